"""What comes out of a run: text that repeats by its seed, and a folder that transformers loads with the same values."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats_for_tests import BOS, EOS, TEMPLATE, write_tokenizer
from runs_for_tests import losses, make_run, train_on_ranks, write_run_file
from safetensors.torch import load_file
from tokenizers_for_tests import theirs, write_family

from weft.checkpoint import Checkpoint, Piece, Region, Saver
from weft.commands.evaluate import _run as evaluated_run
from weft.commands.export import export
from weft.data.config import ChatConfig, DataConfig
from weft.data.special_tokens import stated_end_tokens
from weft.data.tokenizer import encode_text, load_tokenizer
from weft.errors import CheckpointError, ConfigError, DamagedError, DataError, NumbersError
from weft.models import Decoder, DecoderConfig, build, initialise, read_config, save_folder
from weft.run_file import load_run, run_from_tables
from weft.saved_run import open_checkpoint, places_of
from weft.schema import to_table
from weft.serve.generate import generate
from weft.serve.loading import load_for_generation, load_model
from weft.serve.spec import ServingSpec
from weft.train.batches import prepare_data
from weft.train.checkpoints import checkpoint_values

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, trained on two ranks whose state is split."""
    run = make_run(write_run_file(tmp_path_factory.mktemp("export")), "run", "plan.shard=2", "train.steps=10")
    train_on_ranks(run)
    return run.folder


def own_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = load_for_generation(folder)[0](tokens)
    return logits


# --- export


def test_transformers_loads_an_export_with_equal_weights_and_logits(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export(folder, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    checkpoint = Checkpoint(folder / "checkpoints" / "step-00000010")
    values = dict(theirs.named_parameters())
    assert set(values) == {entry.name for entry in checkpoint.entries("parameter")}
    for name, value in values.items():
        assert torch.equal(value, checkpoint.read(name, "parameter")), name
    tokens = torch.randint(0, 257, (3, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = theirs(tokens).logits
    torch.testing.assert_close(found, own_logits(folder, tokens), rtol=1e-5, atol=1e-5)


def test_training_goes_on_from_an_export(folder: Path, tmp_path: Path) -> None:
    """The circle: train, export, start from the folder; the first loss is near where the run ended."""
    export(folder, tmp_path / "model")
    text = (folder.parent / "tiny.toml").read_text()
    file = tmp_path / "again.toml"
    file.write_text(f'[model]\nfrom = "{tmp_path / "model"}"\n' + text[text.index("[data]") :])
    run = load_run(file, [f"folder={tmp_path / 'run'}", "train.steps=4", "plan.data=2", "data.tokenizer=bytes"])
    train_on_ranks(run)
    new = make_run(folder.parent / "tiny.toml", "new", "train.steps=4", "plan.data=2")
    train_on_ranks(new)
    assert losses(run.folder)[0] < 3.0 < losses(new.folder)[0]
    assert load_for_generation(run.folder)[0].config == read_config(tmp_path / "model")


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_export_in_a_dtype(folder: Path, tmp_path: Path, dtype: str | None, expected: torch.dtype) -> None:
    told: list[tuple[int, int]] = []
    export(folder, tmp_path / "model", dtype, lambda done, total: told.append((done, total)))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {expected}
    checkpoint = Checkpoint(folder / "checkpoints" / "step-00000010")
    for name, tensor in tensors.items():
        assert torch.equal(tensor, checkpoint.read(name, "parameter").to(expected))
    assert told[-1] == (len(tensors), len(tensors))


def test_export_does_not_overwrite(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="model"):
        export(folder, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["precious"]


def test_export_takes_a_checkpoint_or_the_newest_of_a_run(folder: Path, tmp_path: Path) -> None:
    for source, step in ((folder / "checkpoints" / "step-00000003", 3), (folder, 10), (folder / "checkpoints", 10)):
        target = tmp_path / f"{source.name}"
        export(source, target)
        stored = Checkpoint(folder / "checkpoints" / f"step-{step:08d}")
        tensors = load_file(target / "model.safetensors")
        assert torch.equal(tensors["model.norm.weight"], stored.read("model.norm.weight", "parameter"))


CONFIG = DecoderConfig(vocab_size=264, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def saved_with(
    tokenizer: str, checkpoints: Path, run_folder: str, step: int = 2, value: float = 0.5, more: str = ""
) -> Path:
    """A checkpoint of a run that names this tokenizer and this folder, as its run file did."""
    text = f'folder = "{run_folder}"\n[data]\nsource = "stdlib"\nsequence = 8\ntokenizer = "{tokenizer}"\n{more}\n'
    state = {"model": to_table(CONFIG), "run": text}
    named = build(CONFIG).named_parameters()
    whole = Region.whole
    pieces = [Piece(name, "parameter", whole(tuple(p.shape)), torch.full_like(p, value).detach()) for name, p in named]
    Saver(checkpoints, 0, 1, "abcd").save(step, pieces, state, asynchronous=False)
    return checkpoints.parent


def test_a_relative_tokenizer_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the run was started is where its folder lies; from there its paths are meant."""
    started, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (started / "own").mkdir(parents=True)
    write_tokenizer(started / "own")
    own = (started / "own" / "tokenizer.json").read_text()
    elsewhere.mkdir()
    for number, tokenizer in enumerate(("own/tokenizer.json", "own", str(started / "own"))):
        run = saved_with(tokenizer, started / f"runs/{number}/checkpoints", f"runs/{number}")
        for cwd, source in ((elsewhere, run), (started, Path(f"runs/{number}")), (run, Path("checkpoints"))):
            monkeypatch.chdir(cwd)
            target = tmp_path / f"model-{number}-{cwd.name}"
            export(source, target)
            assert (target / "tokenizer.json").read_text() == own


def test_a_tokenizer_that_is_gone_is_no_silent_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = saved_with("own.json", tmp_path / "runs" / "x" / "checkpoints", "runs/x")
    with pytest.raises(
        ConfigError, match=r"tokenizer 'own\.json' of the run is not there \(.*own\.json\); put it there"
    ):
        export(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_export_appears_with_its_tokenizer_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    run = saved_with(str(tmp_path / "tokenizer.json"), tmp_path / "runs" / "x" / "checkpoints", "runs/x")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        patch.setattr("shutil.copy", full)
        with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
            export(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    export(run, tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


@pytest.mark.parametrize(("first", "end_token"), [(BOS, None), (BOS, BOS), ("<|begin|>", EOS)])
def test_an_export_ends_where_its_run_does(tmp_path: Path, first: str, end_token: str | None) -> None:
    """At the token that the tokenizer's files name, or at what the run states."""
    from transformers import GenerationConfig

    write_tokenizer(tmp_path)
    file, target = tmp_path / "tokenizer.json", tmp_path / "model"
    file.write_text(file.read_text().replace(BOS, first))
    (tmp_path / "generation_config.json").write_text(
        '{"_from_model_config": true, "eos_token_id": [65], "temperature": 0.6}'
    )
    stated = "" if end_token is None else f'end_token = "{end_token}"\n'
    run = saved_with(str(file), tmp_path / "run" / "checkpoints", "run", more=stated + "add_special_tokens = true")
    export(run, target)
    ours, theirs = (load_model(folder) for folder in (run, target))
    assert theirs.end_tokens == ours.end_tokens == {65, ours.tokenizer.end}
    assert theirs.tokenizer.end == ours.tokenizer.end == {BOS: 256, EOS: 257}[end_token or EOS]
    found = GenerationConfig.from_pretrained(target)
    assert (found.eos_token_id, found.temperature) == ([ours.tokenizer.end, 65], 0.6)


def test_an_export_with_bytes_states_their_end(tmp_path: Path) -> None:
    export(saved_with("bytes", tmp_path / "checkpoints", "."), tmp_path / "model")
    assert stated_end_tokens(tmp_path / "model") == [256]


def test_a_folder_without_a_known_end_token_ends_at_the_one_that_it_states(tmp_path: Path) -> None:
    save_folder(tmp_path / "model", build(CONFIG))
    write_tokenizer(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace(BOS, "<|begin|>"))
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"has no token </s> or .* to end a document"):
        load_for_generation(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 257}')
    assert load_for_generation(tmp_path / "model")[1].end == 257


@pytest.mark.parametrize("tokenizer", ["own", "bytes"])
def test_an_export_has_the_chat_template_of_its_run(tmp_path: Path, tokenizer: str) -> None:
    """The file that the run names, found from where it was started, in place of the one in the tokenizer's folder."""
    own, template = tmp_path / "own", tmp_path / "chat.jinja"
    own.mkdir()
    write_tokenizer(own)
    (own / "chat_template.jinja").write_text("that of the tokenizer")
    template.write_text("that of the run")
    more = 'kind = "chat"\ntemplate = "chat.jinja"'
    run = saved_with(tokenizer, tmp_path / "runs" / "x" / "checkpoints", "runs/x", more=more)
    export(run, tmp_path / "model")
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "that of the run"
    template.unlink()
    with pytest.raises(
        ConfigError, match=r"the chat template 'chat\.jinja' of the run is not there \(.*\); put it there"
    ):
        export(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# --- generation


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
def test_a_damaged_newest_checkpoint_is_left_out(tmp_path: Path, file: str) -> None:
    for step in (2, 4):
        saved_with("bytes", tmp_path / "run" / "checkpoints", "run", step, value=step / 8)
    path = tmp_path / "run" / "checkpoints" / "step-00000004" / file
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    said: list[str] = []
    export(tmp_path / "run", tmp_path / "model", say=said.append)
    assert float(load_file(tmp_path / "model" / "model.safetensors")["model.norm.weight"][0]) == 2 / 8
    model, _, _ = load_for_generation(tmp_path / "run", say=said.append)
    assert {float(parameter.detach().max()) for parameter in model.parameters()} == {2 / 8}
    assert len(said) == 2
    assert all("step-00000004" in text and text.endswith("; step-00000002 is tried") for text in said)
    with pytest.raises(DamagedError):  # a checkpoint that was asked for by name
        export(path.parent, tmp_path / "other")


def test_weights_that_are_nan_are_said(tmp_path: Path) -> None:
    run = saved_with("bytes", tmp_path / "checkpoints", ".", value=math.nan)
    with pytest.raises(NumbersError, match="step-00000002 has NaN or infinite values; use an older checkpoint"):
        load_for_generation(run)


def test_a_model_that_gives_nan_is_said(folder: Path) -> None:
    model, tokenizer, context = load_for_generation(folder)
    with torch.no_grad():
        next(iter(model.parameters())).fill_(math.nan)
    with pytest.raises(NumbersError, match="the model gives NaN for every text: its weights are damaged or"):
        generate(model, tokenizer, "abc", context=context)


def test_text_repeats_by_its_seed(folder: Path) -> None:
    model, tokenizer, context = load_for_generation(folder)
    assert context == 24
    texts = [generate(model, tokenizer, "abc", num_tokens=60, seed=seed, context=context) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert generate(*load_for_generation(folder)[:2], "abc", num_tokens=60, seed=1, context=context) == texts[0]
    assert 0 < len(texts[0]) <= 60


def test_the_exported_folder_writes_the_same_text(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; pass --tokenizer bytes"):
        load_for_generation(tmp_path / "model")
    theirs, tokenizer, _ = load_for_generation(tmp_path / "model", "bytes")
    ours = load_for_generation(folder)[0]
    texts = [generate(model, tokenizer, "fab ", num_tokens=40, context=24) for model in (ours, theirs)]
    assert texts[0] == texts[1]


def fixed() -> Decoder:
    """Likes token 98 ('b') best, then 97 ('a'), then the end; all else is impossible."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = build(DecoderConfig(vocab_size=300, **sizes)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        logits = torch.full((300,), -1e9)
        logits[98], logits[97], logits[256], logits[299] = 2.0, 1.0, -3.0, 50.0
        model.lm_head.weight.copy_(logits[:, None] / 4)  # the norm gives ones, up to its epsilon
    return model


def test_temperature_zero_takes_the_likeliest_that_the_tokenizer_knows() -> None:
    """Token 299 is beyond the tokenizer's 257: a vocabulary that was padded."""
    text = generate(fixed(), load_tokenizer("bytes"), "x", num_tokens=5, temperature=0)
    assert text == "bbbbb"


def test_top_k_leaves_out_the_rest() -> None:
    tokenizer = load_tokenizer("bytes")
    assert generate(fixed(), tokenizer, "x", num_tokens=20, temperature=5.0, top_k=1) == "b" * 20
    text = generate(fixed(), tokenizer, "x", num_tokens=200, temperature=1.0, top_k=2)
    assert set(text) == {"a", "b"}
    assert 0.6 < text.count("b") / 200 < 0.85  # e / (1 + e) = 0.73


def test_generation_ends_with_the_document_and_sees_no_more_than_its_context() -> None:
    model, tokenizer = fixed(), load_tokenizer("bytes")
    assert len(generate(model, tokenizer, "x", num_tokens=5000, top_k=None, temperature=1.0)) < 5000
    text = generate(model, tokenizer, "x" * 50, num_tokens=30, context=7, temperature=0)
    assert text == "b" * 30
    initialise(model, 0)
    texts = [generate(model, tokenizer, start + "cdefghi", num_tokens=20, context=7) for start in ("", "ab", "xy" * 9)]
    assert texts[0] == texts[1] == texts[2] != generate(model, tokenizer, "abcdefghi", num_tokens=20, context=9)
    model = fixed()
    assert generate(model, tokenizer, "", num_tokens=2, temperature=0) == "bb"


def test_a_run_from_a_seed_and_its_model_agree(folder: Path) -> None:
    """The control for the comparisons above: an untrained model says something else."""
    model, tokenizer, context = load_for_generation(folder)
    assert isinstance(model, Decoder)
    fresh = build(model.config)
    initialise(fresh, 0)
    texts = [generate(m, tokenizer, "abc", num_tokens=40, context=context) for m in (model, fresh.eval())]
    assert texts[0] != texts[1]


def test_a_run_is_served_and_exported_with_the_tokens_that_its_texts_had(tmp_path: Path) -> None:
    """Runs that were saved before `add_special_tokens` existed were trained without them."""
    own = write_family(tmp_path / "own", "llama3")
    begin = theirs(own).bos_token_id
    for number, (more, expected) in enumerate(
        (("", []), ("add_special_tokens = false", []), ("add_special_tokens = true", [begin]))
    ):
        run = saved_with(str(own), tmp_path / f"run{number}" / "checkpoints", f"run{number}", more=more)
        export(run, tmp_path / f"model{number}")
        source = {"model": {"from": str(run)}, "train": {"steps": 1, "batch": 1}}
        again = run_from_tables({**source, "data": {"source": "stdlib", "sequence": 8}}, {}, "again")
        ids = theirs(own)("he", add_special_tokens=False).input_ids
        for tokenizer in (
            load_model(run).tokenizer,
            load_model(tmp_path / f"model{number}").tokenizer,
            again.tokenizer,
        ):
            assert encode_text(tokenizer, "he") == [*expected, *ids]
        assert theirs(tmp_path / f"model{number}")("he").input_ids == [*expected, *ids]


def test_a_run_of_an_earlier_weft_ends_texts_with_the_token_that_it_learnt(tmp_path: Path) -> None:
    """It read no file beside tokenizer.json, so it ended texts with <|endoftext|> where these name <|im_end|>."""
    own = write_family(tmp_path / "own", "qwen")
    for number, (more, expected) in enumerate((("", "<|endoftext|>"), ("add_special_tokens = true", "<|im_end|>"))):
        run = saved_with(str(own), tmp_path / f"run{number}" / "checkpoints", f"run{number}", more=more)
        export(run, tmp_path / f"model{number}")
        source = {"model": {"from": str(run)}, "train": {"steps": 1, "batch": 1}}
        again = run_from_tables({**source, "data": {"source": "stdlib", "sequence": 8}}, {}, "again")
        loaded = load_model(run)
        exported = load_model(tmp_path / f"model{number}")
        assert {loaded.tokenizer.end_token, exported.tokenizer.end_token, again.tokenizer.end_token} == {expected}
        assert loaded.tokenizer.end in loaded.end_tokens


def test_generating_stops_at_every_token_that_the_folder_states(tmp_path: Path) -> None:
    save_folder(tmp_path / "model", build(CONFIG))
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [257, 120]}')
    loaded = load_model(tmp_path / "model")
    assert loaded.end_tokens == {257, 120}
    options: dict[str, Any] = {"num_tokens": 5, "temperature": 0}
    assert len(generate(fixed(), load_tokenizer("bytes"), "x", **options)) == 5
    assert generate(fixed(), load_tokenizer("bytes"), "x", **options, stop_tokens=frozenset([98])) == ""


def test_a_relative_template_is_that_of_the_run_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file of that name is: in `weft evaluate`, and in a run that starts from the run."""
    for name in ("project", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat.jinja").write_text(name)
        (tmp_path / name / "chats.jsonl").touch()
    run = saved_with(
        "bytes",
        tmp_path / "project/runs/x/checkpoints",
        "runs/x",
        more='kind = "chat"\ntemplate = "chat.jinja"\ncache = "runs/cache"',
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = {"kind": "chat", "source": "chats.jsonl", "sequence": 8}
    tables = {"model": {"from": str(run)}, "data": data, "train": {"steps": 1, "batch": 1}}
    for found in (evaluated_run(run, Path("chats.jsonl"), None, None), run_from_tables(tables, {}, "again")):
        assert isinstance(found.data, ChatConfig)
        assert found.data.template is not None
        assert Path(found.data.template).read_text() == "project"
    own = saved_with("bytes", tmp_path / "project/runs/y/checkpoints", "runs/y", more='cache = "here"')
    evaluated = evaluated_run(own, None, None, None).data
    assert isinstance(evaluated, DataConfig)
    assert (evaluated.source, evaluated.cache) == ("stdlib", str(tmp_path / "project/here"))
    placed = places_of(open_checkpoint(run))
    assert placed["cache"] == str(tmp_path / "project/runs/cache")
    given = run_from_tables({**tables, "data": {**data, "template": "chat.jinja"}}, {}, "again").data
    assert isinstance(given, ChatConfig)
    assert given.template == "chat.jinja", "what a run file says is meant from where it is read"


@pytest.mark.parametrize("kind", ["tokenizer", "template"])
def test_another_file_where_the_runs_was_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As after a run was moved, when the current folder has a file of that name. It made other texts, silently."""
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    write_tokenizer(Path("own"))
    Path("chat.jinja").write_text(TEMPLATE)
    Path("rows.jsonl").write_text((json.dumps({"prompt": "a", "completion": "b"}) + "\n") * 9)
    data = {"kind": "chat", "source": "rows.jsonl", "sequence": 8, "tokenizer": "own", "template": "chat.jinja"}
    tables = {"model": to_table(CONFIG), "data": {**data, "cache": "cache"}, "train": {"steps": 1, "batch": 1}}
    run = run_from_tables(tables, {}, "first")
    state = checkpoint_values(run, "id", prepare_data(run), 1, "", {})
    named = build(CONFIG).named_parameters()
    pieces = [Piece(name, "parameter", Region.whole(tuple(p.shape)), p.detach().fill_(0.5)) for name, p in named]
    Saver(Path("runs/first/checkpoints"), 0, 1, "abcd").save(1, pieces, state, asynchronous=False)

    folder = Path("runs/first")
    again = {**tables, "model": {"from": str(folder)}}
    without = {key: value for key, value in data.items() if key != kind}
    started = {**again, "data": {key: without[key] for key in ("kind", "source", "sequence")}}
    uses: list[Callable[[], object]] = [
        lambda: load_model(folder),
        lambda: run_from_tables(started, {}, "again"),
        lambda: export(folder, tmp_path / f"model-{len(list(tmp_path.iterdir()))}"),
    ]
    for use in uses:
        use()
    changed = Path("own/tokenizer.json" if kind == "tokenizer" else "chat.jinja")
    changed.write_text(changed.read_text() + " ")
    for use in uses:
        with pytest.raises(DataError, match=rf"(own|chat.jinja) is another {kind} than that with which .* was trained"):
            use()
    given = {"tokenizer": "own"} if kind == "tokenizer" else {"chat_template": "chat.jinja"}
    load_model(folder, ServingSpec(**given))
    run_from_tables({**again, "data": data}, {}, "again")
