"""Fine-tuning by `weft train` on conversations against plain PyTorch loops over models of transformers, LoRA of PEFT,
in float64 to 1e-9.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # or each command would import it
import transformers
from chats_for_tests import (
    CHATS,
    EXPECTED,
    EXPECTED_PAIRS,
    SEQUENCE,
    TEMPLATE,
    add_lora_of_peft,
    examples,
    mean_loss,
    preference_loss,
    train_plainly,
    weft_name,
    with_exact_norms,
    write_model,
    write_rows,
    write_run_file,
    write_tokenizer,
)
from commands_for_tests import Weft
from peft import PeftModel
from runs_for_tests import Silent, losses, train_on_ranks
from safetensors.torch import load_file

from weft.architectures.lora import Lora
from weft.checkpoint import Checkpoint
from weft.commands.evaluate import evaluate_folder
from weft.commands.export import export
from weft.data.chat import PairPacker
from weft.data.chat_template import ChatTemplate, load_template, training_time
from weft.data.conversations import ChatRenderer
from weft.data.tokenizer import load_tokenizer
from weft.errors import CheckpointError, ConfigError, DataError
from weft.launch.environment import RankInfo
from weft.run_file import Run, load_run
from weft.serve.text import end_tokens
from weft.step.documents import number_documents
from weft.train.batches import prepare_data
from weft.train.loop import train
from weft.train.setup import first_values

LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
LORA_TABLE = f"[lora]\nrank = 4\nalpha = 8.0\ntargets = {json.dumps(LORA.targets)}\n"


def encoder(run: Run) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        ids: list[int] = run.tokenizer.encode(text).tolist()
        return ids

    return encode


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def train_by_command(weft: Weft, run_file: Path, *overrides: str) -> None:
    left = weft("train", run_file, "plan.data=1", *overrides, "--no-verify")
    assert left.status == 0, left.err


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "tuning"),
    [("Llama", "full"), ("Qwen2", "full"), ("Qwen2", "frozen"), ("Llama", "lora"), ("Qwen2", "lora")],
)
def test_training_equals_a_plain_loop(tmp_path: Path, weft: Weft, name: str, tuning: str) -> None:
    theirs = write_model(tmp_path / "model", name)
    run_file = write_run_file(tmp_path, tmp_path / "model", LORA_TABLE if tuning == "lora" else "")
    patterns = ["model.embed*", "model.layers.0.*"]
    overrides = [f"train.freeze={json.dumps(patterns)}"] if tuning == "frozen" else []
    run = load_run(run_file, overrides)
    data = prepare_data(run)
    assert len(data.train) == run.split.batch, "every step has all rows"
    if tuning == "lora":
        add_lora_of_peft(theirs, LORA)
    if tuning == "frozen":
        theirs.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr, operator]
        theirs.model.layers[0].requires_grad_(False)  # type: ignore[union-attr, index]
    given = examples(encoder(run), EXPECTED)
    expected = train_plainly(theirs, lambda: mean_loss(theirs, given))
    train_by_command(weft, run_file, *overrides)
    worst = max(abs(a - b) for a, b in zip(losses(run.folder), expected, strict=True))
    assert worst < 1e-9
    assert expected[-1] < 0.7 * expected[0]
    checkpoint = Checkpoint(run.folder / "checkpoints" / f"step-{run.train.steps:08d}")
    for path, parameter in theirs.named_parameters():
        difference = largest_difference(checkpoint.read(weft_name(path), "parameter"), parameter.detach())
        assert difference < 1e-9, path
    with_state = {entry.name for entry in checkpoint.entries() if entry.kind not in ("parameter", "buffer")}
    trained = {weft_name(path) for path, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert with_state == trained, "nothing else has optimizer state"
    if tuning == "full" and name == "Llama":
        found = evaluate_folder(run.folder, tmp_path / "chats.jsonl")
        assert found["targets"] == sum(int(one.is_target[1:].sum()) for one in given)
        with torch.no_grad():
            assert found["loss"] == pytest.approx(mean_loss(theirs, given).item(), rel=1e-4)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert 0.5 < found["accuracy"] <= 1
    if tuning == "lora" and name == "Qwen2":
        check_exports(tmp_path, run.folder, theirs)


def check_exports(tmp_path: Path, run_folder: Path, theirs: torch.nn.Module) -> None:
    """The export is the model with the updates merged; PEFT loads the adapter, and weft reads it again."""
    export(run_folder, tmp_path / "merged")
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    with_exact_norms(merged)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert largest_difference(merged(tokens).logits, theirs(tokens).logits) < 1e-9
    assert "chat_template" in (tmp_path / "merged" / "tokenizer_config.json").read_text()
    own = tmp_path / "model"
    assert set(merged.generation_config.eos_token_id) == end_tokens(load_tokenizer(own), own)
    export(run_folder, tmp_path / "adapter", adapter=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    assert tensors[name].shape == (24, 4)
    assert len(tensors) == 2 * 2 * len(LORA.targets)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    by_peft: Any = PeftModel.from_pretrained(with_exact_norms(base), tmp_path / "adapter", autocast_adapter_dtype=False)
    with torch.no_grad():
        assert largest_difference(by_peft(tokens).logits, theirs(tokens).logits) < 1e-9
    (tmp_path / "again").mkdir()
    run = load_run(
        write_run_file(tmp_path / "again", tmp_path / "model", f'[lora]\nadapter = "{tmp_path / "adapter"}"')
    )
    assert run.lora is not None
    assert (run.lora.rank, run.lora.scaling, set(run.lora.targets)) == (4, 2.0, set(LORA.targets))
    assert torch.equal(first_values(run)("model.layers.1.mlp.up_proj.lora_B"), tensors[name])
    merged_run = load_run(write_run_file(tmp_path / "again", run_folder))
    value = first_values(merged_run)("model.layers.1.mlp.up_proj.weight")
    assert largest_difference(value, merged.model.layers[1].mlp.up_proj.weight.detach()) < 1e-12


@pytest.mark.processes
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_preferences_equal_a_plain_loop_with_a_second_model(tmp_path: Path, weft: Weft, name: str) -> None:
    theirs = write_model(tmp_path / "model", name)
    reference = copy.deepcopy(theirs)
    run_file = write_run_file(tmp_path, tmp_path / "model", kind="preference")
    run = load_run(run_file, ["train.dpo_beta=0.3"])
    pairs = [
        [examples(encoder(run), [[(prompt, False), (answer, True)]])[0] for answer in answers]
        for prompt, *answers in EXPECTED_PAIRS
    ]
    with_exact_norms(reference)
    expected = train_plainly(theirs, lambda: preference_loss(theirs, reference, pairs, 0.3))
    train_by_command(weft, run_file, "train.dpo_beta=0.3")
    found = losses(run.folder)
    assert found[0] == pytest.approx(math.log(2), abs=1e-12)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-9
    assert expected[-1] < 0.5 * expected[0]
    checkpoint = Checkpoint(run.folder / "checkpoints" / f"step-{run.train.steps:08d}")
    for path, parameter in theirs.named_parameters():
        assert largest_difference(checkpoint.read(path, "parameter"), parameter.detach()) < 1e-9, path


PLANS = {
    "data 2": ["plan.data=2"],
    "shard 3": ["plan.shard={degree=2, stage=3}"],
    "x 2": ["plan.tensor.x=2"],
    "pipe 2": ["plan.pipe=2", "plan.micro_batch=1"],
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_every_plan_has_the_losses_of_one_rank(tmp_path: Path, kind: str) -> None:
    """Packed conversations and preferences with LoRA: documents, answers, references and updates under every axis."""
    write_model(tmp_path / "model", "Llama")
    run_file = write_run_file(tmp_path, tmp_path / "model", LORA_TABLE, kind)
    one = load_run(run_file, ["train.steps=4"])
    train(one, RankInfo(), Silent())
    for name, plan in PLANS.items():
        run = load_run(run_file, ["train.steps=4", f"folder={tmp_path / name}", *plan])
        train_on_ranks(run)
        worst = max(abs(a - b) for a, b in zip(losses(run.folder), losses(one.folder), strict=True))
        assert worst < 1e-9, name
    other = load_run(run_file, ["train.steps=5", "lora.alpha=9.0"])
    with pytest.raises(CheckpointError, match=r"was trained with \[lora\] = .*'alpha': 8\.0.*, now it is .*9\.0"):
        train(other, RankInfo(), Silent())


@pytest.mark.processes
def test_the_command_line_fine_tunes(tmp_path: Path, weft: Weft) -> None:
    """`weft train` with the proof of the plan (preferences and LoRA), `weft evaluate` and `weft export --adapter`."""
    write_model(tmp_path / "model", "Qwen2")
    run_file = write_run_file(tmp_path, tmp_path / "model", LORA_TABLE, "preference")
    left = weft("train", run_file, "train.steps=2", "plan.tensor.x=2")
    assert left.status == 0, left.err
    chats = write_rows(tmp_path / "chats.jsonl", CHATS)
    assert "use --kind chat or text" in weft("evaluate", tmp_path / "run", "--data", chats).err
    assert weft("evaluate", tmp_path / "run", "--data", chats, "--kind", "chat", "--json").json["targets"] > 10
    assert weft("export", tmp_path / "run", tmp_path / "adapter", "--adapter").status == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


# --- conversations


def test_rows_hold_conversations_as_documents_with_answers_as_labels(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Llama")
    run = load_run(write_run_file(tmp_path, tmp_path / "model"))
    inputs, labels = prepare_data(run).train.get(torch.arange(4).numpy())
    found, texts = [], []
    for row, targets, numbers in zip(inputs, labels, number_documents(inputs, None), strict=True):
        for number in numbers.unique():
            own = numbers == number
            if (targets[own] != -100).any():
                tokens = torch.where(row[own] < 0, ~row[own], row[own])
                found.append(run.tokenizer.decode(targets[own][targets[own] != -100].numpy()))
                texts.append(run.tokenizer.decode(tokens.numpy()))
    end = run.tokenizer.decode(run.tokenizer.encode("<|im_end|>"))
    assert found == [f"4{end}", f"b{end}d!{end}", "hi", f"yz{end}", "one two", "yes"]
    assert texts[2] == "say hi: hi"
    assert texts[1].endswith(f"b{end}<user>c<assistant>d!")


def test_a_template_with_a_date_makes_the_same_data_on_any_day(tmp_path: Path) -> None:
    """Rows that were packed with the date of their day are not used again."""
    write_model(tmp_path / "model", "Llama")
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    run = load_run(write_run_file(tmp_path, tmp_path / "model"), [f"data.template={template}"])
    row = prepare_data(run).train.get(torch.arange(1).numpy())[0][0]
    assert run.tokenizer.decode(torch.where(row < 0, ~row, row).numpy()).startswith("26 Jul 2024")
    serves, learns = (
        load_template(str(template), str(tmp_path / "model"), now) for now in (datetime.now, training_time)
    )
    assert serves is not None
    assert learns is not None
    assert serves.render([]).startswith(datetime.now().strftime("%d %b %Y"))
    assert learns.fingerprint != serves.fingerprint


def test_a_completion_beside_messages_adds_no_target(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    renderer = ChatRenderer(load_tokenizer(tmp_path), load_template(None, str(tmp_path)))
    assert renderer.documents({**CHATS[0], "completion": "4"}, "") == renderer.documents(CHATS[0], "")


def test_bad_conversations_are_refused_in_a_line(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Llama")
    folder = str(tmp_path / "model")
    renderer = ChatRenderer(load_tokenizer(folder), load_template(None, folder))

    def refusal(row: dict[str, object], used: ChatRenderer = renderer) -> str:
        with pytest.raises(DataError) as found:
            used.documents(row, "chats.jsonl, line 7")
        assert "\n" not in str(found.value)
        return str(found.value)

    assert "line 7 has neither 'messages' nor 'prompt'" in refusal({"text": "x"})
    assert "'messages[0].content' is None; it must be a text" in refusal({"messages": [{"role": "user"}]})
    bare = ChatRenderer(load_tokenizer("bytes"), None)
    half = "\ud83d"
    chat = [{"role": "user", "content": half}, {"role": "assistant", "content": "b"}]
    for row, used in (({"messages": chat}, renderer), ({"prompt": "a", "completion": half}, bare)):
        assert "line 7: it holds half a surrogate pair, which is not Unicode text" in refusal(row, used)
    pair = {"prompt": "a", "chosen": "b", "rejected": half}
    with pytest.raises(DataError, match="line 7: it holds half a surrogate pair"):
        PairPacker(SEQUENCE).add(bare, pair, "pairs.jsonl, line 7")
    assert "no chat template; give data.template" in refusal(CHATS[0], bare)
    strict = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "x")
    assert "refuses the messages: roles must alternate" in refusal(CHATS[0], ChatRenderer(renderer.tokenizer, strict))
    unsafe = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}, "x")
    assert "refuses the messages" in refusal(CHATS[0], ChatRenderer(renderer.tokenizer, unsafe))
    shortens = ChatTemplate("{{ messages[-1].content }}", {}, "x")
    assert "asks for message 2 with 'a', but then writes 'b'" in refusal(
        CHATS[1], ChatRenderer(renderer.tokenizer, shortens)
    )
    with pytest.raises(DataError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {}, "x")


def test_bad_tuning_is_refused_in_a_line(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Llama")
    run_file = write_run_file(tmp_path, tmp_path / "model")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").write_text('{"target_modules": ["q_proj"]}')
    (tmp_path / "half" / "adapter_model.bin").touch()
    half = f'lora={{adapter="{tmp_path}/half"}}'
    for override, words in (
        (half, r"adapter_model\.safetensors does not exist; adapter_model\.bin is pickled and never opened"),
        ('train.freeze=["model.embedding*"]', r"no parameter of the model matches 'model\.embedding\*'; did you mean"),
        ('train.freeze=["*"]', "leaves nothing to train"),
        ('lora={targets=["qproj"]}', "no linear of a block is named 'qproj'; the blocks have down_proj"),
        ("lora={rank=0}", r"lora\.rank = 0"),
        ('lora={adapter="nowhere"}', r"adapter_config\.json does not exist"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=words) as found:
            load_run(run_file, [override])
        assert "\n" not in str(found.value)
    with pytest.raises(ConfigError, match=r"leave train\.freeze out"):
        load_run(run_file, ["lora={}", 'train.freeze=["model.norm*"]'])
