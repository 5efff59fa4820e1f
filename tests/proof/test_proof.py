"""What is proved of a run: its own objective and options on a shrunk copy, after the run itself was found to work."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands_for_tests import Weft
from runs_for_tests import DEEP, make_run, write_run_file
from torch import nn

from weft.errors import PlanError, VerifyError
from weft.models import loss_head as head
from weft.proof.prove import ProofReport, verify_run
from weft.proof.small_run import _module, _places, small_runs_of
from weft.run_file import Run
from weft.step.train_step import evaluate

pytestmark = pytest.mark.processes

IMAGES = """
[model]
architecture = "resnet"
depth = 34
width = 4
norm = "group"

[data]
kind = "slides"
images = 60
size = 64
cache = "{folder}/cache"

[train]
steps = 6
batch = 8

[plan]
micro_batch = 4
"""
ORACLE = sys.modules[verify_run.__module__]
LAYER_DROP = ("train.layer_drop.theta=0.5", "plan.exact=false")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    path = tmp_path / "images.toml"
    path.write_text(IMAGES.format(folder=tmp_path))
    return path


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run_file(tmp_path, DEEP)


def proved(run: Run) -> ProofReport:
    """The report of a proof that was made."""
    return verify_run(run).require()


def checked(report: ProofReport) -> set[str]:
    return {check.what for check in report.checks}


# --- what shrinks stays valid


def test_tiles_are_handed_over_at_a_block_that_the_small_model_has_too(images: Path) -> None:
    report = proved(make_run(images, "run", 'plan.tile={columns=2, until="layer3.4"}'))
    assert report.plan.tile.until.startswith("layer3.")
    assert report.not_proved == ()


@pytest.mark.soak
def test_an_image_is_large_enough_for_tiles_up_to_where_they_are_handed_over(images: Path) -> None:
    options = ["data.size=128", 'plan.tile={columns=4, until="layer4.2"}', "plan.micro_batch=1"]
    run = make_run(images, "run", *options)
    sizes = [proof.task.shape.height for proof in small_runs_of(run) if proof.plan.tile.until]  # type: ignore[attr-defined]
    assert sizes[:2] == [64, 128]
    assert proved(run).plan.tile.until.startswith("layer4.")


@pytest.mark.soak
def test_shares_of_the_batch_have_a_sample_for_each_tile(images: Path) -> None:
    options = ["plan.micro_batch=4", 'plan.tile={rows=2, columns=2, hand_over="batch", until="layer4"}']
    report = proved(make_run(images, "run", *options))
    assert (report.plan.micro_batch, report.plan.tile.hand_over) == (4, "batch")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["train.batch=3", "plan.micro_batch=3", 'plan.tile={columns=2, hand_over="batch", until="layer4"}'],
            "does not divide 3 samples over 2 tiles",
        ),
        (["data.size=32", 'plan.tile={columns=4, until="layer4.1"}'], "cannot go on in tiles"),
        (['plan.tile={columns=2, until="layer3.9"}'], "tile.until = 'layer3.9' is no module"),
    ],
)
def test_a_run_is_refused_by_its_own_sizes(images: Path, options: list[str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        verify_run(make_run(images, "run", *options))


def test_heads_that_x_divides_in_the_run_alone_are_proved_on_a_wider_copy(text: Path) -> None:
    sizes = ["model.hidden_size=48", "model.intermediate_size=54", "model.num_attention_heads=12"]
    assert proved(make_run(text, "run", *sizes, "model.num_key_value_heads=12", "plan.tensor.x=3")).plan.tensor.x == 3


def test_sequences_are_long_enough_for_context(text: Path) -> None:
    report = proved(make_run(text, "run", "data.sequence=48", "plan.context=3", "train.batch=2"))
    assert report.plan.context.degree == 3


def test_a_plan_that_fits_no_small_copy_is_not_called_proved(
    text: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.proof.small_run.MAX_NUMEL", 0)
    sizes = ["model.hidden_size=48", "model.intermediate_size=54", "model.num_attention_heads=12"]
    options = [*sizes, "model.num_key_value_heads=12", "plan.tensor.x=3"]
    report = verify_run(make_run(text, "run", *options))
    assert (report.passed, report.checks) == (False, ())
    with pytest.raises(VerifyError, match="was not proved: the plan fits the run and no small copy of its model: "):
        report.require()
    left = weft("verify", text, *options, "--json")
    assert (left.status, left.json["passed"], left.json["checks"]) == (1, False, [])
    assert "tensor.x = 3 does not divide the 8 heads" in left.json["not_proved"][0]


# --- the run's own options


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("train.z_loss=0.01", "plan.tensor.x=2"), "train.z_loss = 0.01 needs whole rows of logits, and tensor.x = 2"),
        ((*LAYER_DROP, "plan.pipe=2"), "train.layer_drop skips blocks, and the stages of pipe = 2"),
        ((*LAYER_DROP[:1], "plan.data=2"), "set plan.exact = false"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "plan", "train"])
def test_options_that_ranks_would_refuse_are_refused_first(
    text: Path, weft: Weft, command: str, options: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ORACLE, "run_local", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr("weft.commands.train.start_ranks", lambda *_: pytest.fail("ranks were started"))
    left = weft(command, text, "folder=run", *options)
    assert left.status == 2
    assert reason in left.err


def test_the_proof_is_of_the_runs_own_objective(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(text, "run", "train.z_loss=0.01", "plan.data=2")
    proved(run)
    whole = head.head_loss
    monkeypatch.setattr(head, "head_loss", lambda *args: whole(*args[:4], 0.0, *args[5:]))
    failed = [check.what for check in verify_run(run).checks if not check.passed]
    assert {"loss", "worst gradient"} <= set(failed)


def test_the_runs_accumulation_and_micro_batch_are_kept_where_they_are_small(text: Path) -> None:
    run = make_run(text, "run", "train.batch=4", "plan.micro_batch=1", "plan.data=4")
    assert next(iter(small_runs_of(run))).num_samples == 4
    run = make_run(text, "run", "train.batch=32", "plan.micro_batch=4", "plan.data=2")
    assert next(iter(small_runs_of(run))).num_samples == 8


@pytest.mark.parametrize("count", [4, 6, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "gems", "bidirectional", "zero-bubble"])
def test_the_number_of_micro_batches_suits_the_schedule(text: Path, schedule: str, count: int) -> None:
    run = make_run(text, "run", f"plan.pipe={{degree=2, schedule='{schedule}'}}", "plan.micro_batch=2")
    run = replace(run, train=replace(run.train, batch=2 * count))
    proof = next(iter(small_runs_of(run)))
    assert 4 <= proof.num_samples // 2 <= count


def test_stages_begin_where_the_runs_do(text: Path) -> None:
    def split(*names: str) -> str:
        listed = ", ".join(f'"{name}"' for name in names)
        return f"plan.pipe={{degree={len(names) + 1}, split=[{listed}]}}"

    report = proved(make_run(text, "run", split("model.layers.1", "model.layers.3"), "plan.micro_batch=2"))
    assert report.plan.pipe.split == ("model.layers.1", "model.layers.2")
    report = proved(make_run(text, "run", split("model.layers.0"), "plan.micro_batch=2"))
    assert report.plan.pipe.split == ("model.layers.0",)
    report = proved(make_run(text, "run", split("model.norm"), "plan.micro_batch=2"))
    assert report.plan.pipe.split == ("model.norm",)


class Chain(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(depth))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("names", "depth", "expected"),
    [
        (("blocks.1", "blocks.2", "blocks.3"), 4, ("blocks.1", "blocks.2", "blocks.3")),
        (("blocks.20", "blocks.21", "blocks.23"), 4, ("blocks.1", "blocks.2", "blocks.3")),
        (("blocks.0", "blocks.12"), 3, ("blocks.0", "blocks.1")),
        (("blocks.12", "head"), 3, ("blocks.1", "head")),
        (("blocks.1", "blocks.2", "blocks.3"), 2, None),
        (("blocks.1", "tail"), 3, None),
    ],
)
def test_names_of_stages_in_a_shorter_chain(names: Any, depth: int, expected: Any) -> None:
    whole = Chain(24)
    whole.tail = nn.Linear(2, 2)
    assert _places(names, whole, Chain(depth)) == expected


def test_the_name_of_a_module_in_a_shorter_chain() -> None:
    assert _module("head", Chain(9), Chain(3)) == "head"
    assert _module("blocks.8", Chain(9), Chain(3)) == "blocks.2"
    assert _module("blocks.8.0", Chain(9), Chain(3)) == "blocks.2.0"
    assert _module("blocks.3", Chain(9), Chain(3)) == "blocks.1"
    assert _module("other", Chain(9), Chain(3)) is None


# --- evaluation


@pytest.mark.parametrize("plan", ["plan.pipe=2", "plan.tensor.x=2"])
def test_an_evaluation_is_compared(text: Path, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(text, "run", plan, "plan.micro_batch=2")
    assert "evaluation after the steps" in checked(proved(run))
    monkeypatch.setattr("weft.proof.rank.evaluate", lambda *args: evaluate(*args) * (1 + 1e-7))
    failure = verify_run(run).first_failure
    assert failure is not None
    assert failure.what == "evaluation after the steps"


def test_running_statistics_of_each_rank_are_not_evaluated(images: Path) -> None:
    report = proved(make_run(images, "run", "model.norm=batch", "plan.data=2", "plan.exact=false", "model.depth=10"))
    assert "evaluation after the steps" not in checked(report)
    buffers, evaluation = report.not_proved
    assert buffers.endswith("the running statistics of batch norms are each rank's own")
    assert evaluation == "evaluation: the running statistics of batch norms are each rank's own"


# --- what is not proved is said


def test_what_the_proof_leaves_out_is_said(text: Path, weft: Weft) -> None:
    options = [*LAYER_DROP, "data.documents=separate", "plan.memory={state='int8', delay=true, offload=0.5}"]
    options += ["plan.data=2", "plan.precision=bf16"]
    left = weft("verify", text, *options, "--json")
    assert (left.status, left.json["passed"]) == (0, True)
    assert left.json["not_proved"] == [
        "train.layer_drop: the proof skips no blocks",
        "data.documents = 'separate': every sequence of the proof is one document",
        "plan.memory.state = int8: the proof is of exact updates in float64",
        "plan.memory.delay = true: the proof is of exact updates in float64",
    ]
    shown = weft("verify", text, *options).out
    assert "not proved  train.layer_drop: the proof skips no blocks" in shown


def test_dropout_does_not_keep_a_plan_from_its_proof(text: Path) -> None:
    lines = text.read_text().split("[data]", 1)
    model = '[model]\narchitecture = "gpt2"\nn_embd = 40\nn_head = 4\nn_layer = 2\nn_positions = 64\n'
    text.write_text(f"{model}resid_pdrop = 0.1\nembd_pdrop = 0.2\nattn_pdrop = 0.3\n\n[data]{lines[1]}")
    report = proved(make_run(text, "run", "plan.data=2"))
    assert report.not_proved == ("dropout (model.resid_pdrop = 0.1): the proof drops nothing",)
