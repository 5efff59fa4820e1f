"""LSTM and GRU models from a run file: every layout is the sequential model, resuming and answers are exact."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from commands_for_tests import caller
from runs_for_tests import losses, make_run, train_on_ranks, write_run_file, write_text
from serving_for_tests import GREEDY, likeliest, make_engine, serve_all, tokens_of

from weft.commands.export import export
from weft.data.order import batch_indices
from weft.models import RecurrentConfig, RecurrentModel, build, initialise, read_config
from weft.run_file import Run
from weft.saved_run import open_source
from weft.serve.loading import load_for_generation
from weft.serve.model.recurrent import RecurrentRows
from weft.serve.model.step_inputs import text_inputs
from weft.serve.scheduling.request import Request
from weft.train.batches import prepare_data

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "lstm.toml"
KINDS = ("lstm", "gru")
RUN_FILE = """
[model]
architecture = "lstm"
hidden_size = 12
num_hidden_layers = 2

[data]
source = "{source}"
sequence = 12
cache = "{cache}"

[train]
steps = 3
batch = 8
learning_rate = 1e-2
warmup_steps = 1
evaluate_sequences = 8

[checkpoint]
every = 1
keep_last = 100

[plan]
precision = "fp64"
"""
LAYOUTS = {
    "data 2": ["plan.data=2"],
    "shard 2 stage 3": ["plan.shard=2"],
    "shard 2 stage 1, two micro-batches": ["plan.shard={degree=2, stage=1}", "plan.micro_batch=2"],
    "data 2, full recompute": ["plan.data=2", "plan.memory.recompute=full"],
    "x 2": ["plan.tensor.x=2"],
    "pipe 2": ["plan.pipe=2", "plan.micro_batch=2"],
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("recurrent"), RUN_FILE)


def named(kind: str) -> str:
    return f"model.architecture={kind}"


def parameters(run: Run) -> dict[str, torch.Tensor]:
    read = open_source(run.folder).read
    return {name: read(name) for name, _ in build(run.model).named_parameters()}


def worst(run: Run, other: dict[str, torch.Tensor]) -> float:
    found = parameters(run)
    assert found.keys() == other.keys()
    return max(float((found[name] - other[name]).abs().max()) for name in found)


def by_plain_torch(run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of torch's own layers, trained without anything of weft but the data and the start."""
    assert isinstance(run.model, RecurrentConfig)
    start = build(run.model)
    initialise(start, run.train.seed)
    size, layers = run.model.hidden_size, run.model.num_layers
    kind = torch.nn.LSTM if run.model.architecture == "lstm" else torch.nn.GRU
    rnn = kind(size, size, layers, batch_first=True, dtype=torch.float64)
    weights = {name: one.detach().double().requires_grad_() for name, one in start.named_parameters()}
    own = {
        f"{name}_l{layer}": weights[f"layers.{layer}.{name}"]
        for layer in range(layers)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    groups = [[one for one in weights.values() if (one.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    decays = (run.train.weight_decay, 0.0)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    data, found = prepare_data(run), []
    for step in range(run.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 if step == 0 else 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 1) / 2)))
        tokens, labels = data.train.get(batch_indices(step, 8, len(data.train), seed=run.train.seed))
        hidden, _ = torch.func.functional_call(rnn, own, (F.embedding(tokens, weights["embed_tokens.weight"]),))
        loss = F.cross_entropy(F.linear(hidden, weights["lm_head.weight"]).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), run.train.clip)
        optimizer.step()
        found.append(loss.item())
    return found, {name: one.detach() for name, one in weights.items()}


@pytest.fixture(scope="module")
def references(run_file: Path) -> dict[str, Run]:
    found = {kind: make_run(run_file, f"{kind} alone", named(kind)) for kind in KINDS}
    for run in found.values():
        train_on_ranks(run)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_does_what_torchs_own_layers_do(references: dict[str, Run], kind: str) -> None:
    expected, weights = by_plain_torch(references[kind])
    assert losses(references[kind].folder) == pytest.approx(expected, rel=1e-9)
    assert worst(references[kind], weights) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(2)
def test_every_layout_trains_the_same_model_in_float64(
    run_file: Path, references: dict[str, Run], kind: str, layout: str
) -> None:
    run = make_run(run_file, f"{kind} {layout}", named(kind), *LAYOUTS[layout])
    train_on_ranks(run)
    assert losses(run.folder) == pytest.approx(losses(references[kind].folder), rel=1e-9)
    assert worst(run, parameters(references[kind])) < 1e-9


def test_another_batch_is_found(run_file: Path, references: dict[str, Run]) -> None:
    """The control: equality in float64 is not that of models that hardly move."""
    run = make_run(run_file, "another seed", "train.seed=0", "data.held_out=0.3")
    train_on_ranks(run)
    assert worst(run, parameters(references["lstm"])) > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_equal_to_the_bit(run_file: Path, references: dict[str, Run], kind: str) -> None:
    run, whole = references[kind], parameters(references[kind])
    curve = losses(run.folder)
    for step in (2, 3):
        shutil.rmtree(run.folder / "checkpoints" / f"step-{step:08d}")
    assert worst(run, whole) > 1e-6  # the control: an earlier step is other parameters
    train_on_ranks(run)
    assert losses(run.folder) == curve
    assert worst(run, whole) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_answers_from_the_run_folder_and_an_exported_one_are_the_trained_models(
    references: dict[str, Run], kind: str, tmp_path: Path
) -> None:
    run = references[kind]
    trained = build(run.model).double()
    with torch.no_grad():
        for name, value in parameters(run).items():
            trained.get_parameter(name).copy_(value)
    assert "weft serve" in export(run.folder, tmp_path / "exported")  # not a class of transformers
    assert read_config(tmp_path / "exported") == run.model
    requests = [Request(str(n), tuple((5 * n + i) % 97 for i in range(n)), 7, GREEDY) for n in (1, 4, 30)]
    expected = {one.name: likeliest(trained.eval(), one.tokens, one.max_tokens) for one in requests}
    for folder in (run.folder, tmp_path / "exported"):
        model, _, context = load_for_generation(folder, "bytes")
        assert context == (12 if folder == run.folder else 2048)
        engine = make_engine(model.double(), context_length=64)
        found = serve_all(engine, requests)
        assert tokens_of(found) == expected
    text = torch.arange(40)[None] % 97
    rows = RecurrentRows(cast(RecurrentModel, load_for_generation(run.folder)[0].double()))
    layout = make_engine(build(run.model).double(), context_length=64)._part.layout
    with torch.inference_mode():
        hidden = rows.residual(text_inputs(text[0].tolist(), 16).batch(layout), rows.new_cache(1, 16, 1))
        torch.testing.assert_close(rows.logits(hidden), trained(text)[0], rtol=1e-10, atol=1e-12)


def test_the_example_trains_and_is_proved_planned_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weft, source = caller(monkeypatch, capfd), write_text(tmp_path / "text.txt", 4000)
    small = [f"folder={tmp_path / 'run'}", f"data.source={source}", f"data.cache={tmp_path}", "data.sequence=16"]
    small += [
        "model.hidden_size=24",
        "train.steps=4",
        "train.warmup_steps=1",
        "train.evaluate_every=4",
        "train.evaluate_sequences=8",
    ]
    trained = weft("train", EXAMPLE, *small, "--json")
    assert trained.status == 0, trained.err
    assert trained.json["step"]["step"] == 4
    planned = weft("plan", EXAMPLE, *small, "--json")
    assert planned.status == 0, planned.err
    searched = weft("plan", EXAMPLE, *small, "--search", "--json")
    assert searched.status == 0, searched.err
    for one in searched.json["plans"]:
        assert one["plan"].get("tensor", {}).get("x", 1) == 1
        assert one["recompute"] in ("none", "full")
    proved = weft("verify", EXAMPLE, *small, "plan.data=1", "plan.shard=2", "--json")
    assert proved.status == 0, proved.err
    written = weft("generate", tmp_path / "run", "--device", "cpu", "--tokens", 5, "--prompt", "ab", "--json")
    assert written.status == 0, written.err
    refused = weft("serve", tmp_path / "run", "--device", "cpu", "--follow")
    assert refused.status == 2
    assert "a recurrent model is served on one rank" in refused.err
    refused = weft("calibrate", tmp_path / "run", "--data", source, "--device", "cpu")
    assert refused.status == 2
    assert "a recurrent model keeps no keys" in refused.err
