"""The model that leaves a run is the one that it trained: evaluated, generated from, started from, sent to validators.

The reference is a plain module with the parameters and buffers of the checkpoint's files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs_for_tests import Silent, events, make_run, train_on_ranks, write_run_file, write_text

from weft.checkpoint import Checkpoint, latest
from weft.commands.evaluate import evaluate_folder
from weft.launch.environment import RankInfo
from weft.models import build
from weft.run_file import Run
from weft.serve.loading import load_for_generation
from weft.train import loop
from weft.train.batches import prepare_data

RUN_FILE = """
[model]
architecture = "{architecture}"
{sizes}

[data]
source = "{{source}}"
sequence = 12
cache = "{{cache}}"

[train]
steps = 3
batch = 8
learning_rate = 1e-2
warmup_steps = 1


[plan]
precision = "fp32"
"""
TIED = {
    "lstm": "hidden_size = 12\nnum_hidden_layers = 1\ntie_word_embeddings = true",
    "gru": "hidden_size = 12\nnum_hidden_layers = 1\ntie_word_embeddings = true",
    "llama": "hidden_size = 8\nintermediate_size = 12\nnum_hidden_layers = 1\nnum_attention_heads = 2\n"
    "tie_word_embeddings = true",
    "gpt2": "n_embd = 8\nn_layer = 1\nn_head = 2\nn_positions = 12",
}


DEEPSEEK = (
    "hidden_size = 8\nintermediate_size = 12\nnum_hidden_layers = 1\nnum_attention_heads = 2\nnum_experts = 8\n"
    "num_experts_per_tok = 2\nmoe_intermediate_size = 6\nkv_lora_rank = 4\nqk_nope_head_dim = 4\n"
    "qk_rope_head_dim = 2\nv_head_dim = 4\nrouter_bias_update_rate = 0.01"
)


def write_run(folder: Path, architecture: str, sizes: str) -> Path:
    return write_run_file(folder, RUN_FILE.format(architecture=architecture, sizes=sizes))


def trained(folder: Path, architecture: str, sizes: str, *overrides: str) -> Run:
    """A run that was trained on one rank, in this process."""
    run = make_run(write_run(folder, architecture, sizes), "run", *overrides)
    loop.train(run, RankInfo(), Silent())
    return run


def plain_model(run: Run) -> torch.nn.Module:
    """A plain module with what the files of a run's newest checkpoint hold."""
    newest = latest(run.folder / "checkpoints")
    assert newest is not None
    stored, model = Checkpoint(newest), build(run.model)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert held.keys() == {entry.name for entry in stored.entries() if entry.kind in ("parameter", "buffer")}
    with torch.no_grad():
        for kind in ("parameter", "buffer"):
            for entry in stored.entries(kind):
                held[entry.name].copy_(stored.read(entry.name, kind))
    return model.eval()


def loss_of(model: torch.nn.Module, text: Path, sequence: int = 12) -> float:
    """The mean loss of all whole sequences of a text of bytes."""
    tokens = torch.tensor([*text.read_bytes(), 256])
    count = (len(tokens) - 1) // sequence
    inputs, labels = (tokens[begin : begin + count * sequence].view(count, sequence) for begin in (0, 1))
    with torch.no_grad():
        return float(F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("architecture", TIED)
def test_a_tied_head_is_the_embedding_wherever_a_run_is_read(architecture: str, tmp_path: Path) -> None:
    run = trained(tmp_path, architecture, TIED[architecture])
    text = write_text(tmp_path / "other.txt", 300)
    wanted = loss_of(plain_model(run), text)
    assert evaluate_folder(run.folder, text)["loss"] == pytest.approx(wanted, rel=1e-5)
    loaded, _, _ = load_for_generation(run.folder)
    assert loss_of(loaded, text) == pytest.approx(wanted, rel=1e-5)


def first_state(run_file: Path, source: Path, *overrides: str) -> dict[tuple[str, str], torch.Tensor]:
    """What a run that starts from the newest checkpoint of another has before its first step, by kind and name."""
    text = run_file.read_text()
    started = run_file.with_name("started.toml")
    started.write_text(f'[model]\nfrom = "{source}"\n' + text[text.index("[data]") :])
    run = make_run(
        started,
        "started",
        'numbers.on_bad="rollback"',
        "checkpoint.every=1",
        "train.steps=1",
        "train.warmup_steps=0",
        *overrides,
    )
    train_on_ranks(run)
    stored = Checkpoint(run.folder / "checkpoints" / "step-00000000")
    kinds = ("parameter", "buffer")
    return {(kind, entry.name): stored.read(entry.name, kind) for kind in kinds for entry in stored.entries(kind)}


def test_biases_of_routers_go_with_the_weights(tmp_path: Path) -> None:
    run = trained(tmp_path, "deepseek_v3", DEEPSEEK, "train.steps=40", "train.learning_rate=0.03")
    text = write_text(tmp_path / "other.txt", 300)
    model = plain_model(run)
    biases = dict(model.named_buffers())
    assert any(bias.any() for bias in biases.values())
    wanted = loss_of(model, text)
    for bias in biases.values():
        bias.zero_()
    assert abs(loss_of(model, text) - wanted) > 1e-3  # so that a bias that is left out is seen
    assert evaluate_folder(run.folder, text)["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("overrides", [[], ["plan.data=2"], ["plan.pipe=2", "plan.micro_batch=2"]], ids=str)
def test_a_run_starts_with_all_that_another_has(overrides: list[str], tmp_path: Path) -> None:
    run = trained(tmp_path, "deepseek_v3", DEEPSEEK.replace("num_hidden_layers = 1", "num_hidden_layers = 2"))
    found = first_state(tmp_path / "tiny.toml", run.folder, *overrides)
    model = plain_model(run)
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, value in named:
            assert torch.equal(found.pop((kind, name)), value), name
    assert not found


@pytest.mark.processes
def test_0_1_adam_is_evaluated_as_it_is_saved_between_exchanges(tmp_path: Path) -> None:
    compressed = 'train.compressed={kind="0/1", freeze_step=2, local_scaler=2, most_local=4}'
    overrides = ["plan.data=2", "plan.exact=false", compressed, "train.steps=9", "train.evaluate_sequences=16"]
    run = make_run(write_run(tmp_path, "llama", TIED["llama"]), "run", *overrides)
    train_on_ranks(run)
    held_out, model = prepare_data(run).held_out, plain_model(run)
    assert held_out is not None
    inputs, labels = held_out.get(np.arange(16))
    with torch.no_grad():
        wanted = float(F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()))
    assert events(run.folder, "evaluation")[-1]["loss"] == pytest.approx(wanted, rel=1e-6)
