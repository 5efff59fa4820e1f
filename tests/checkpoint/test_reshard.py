"""A checkpoint saved under one layout loads under any other: the state bit for bit, and the curve that follows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from reshard_for_tests import build_on, check, differences, load_under, save_under
from runs_for_tests import (
    DEEP,
    LAYOUTS,
    MODEL_LAYOUTS,
    PIPE_LAYOUTS,
    copy_run,
    losses,
    make_run,
    train_on_ranks,
    write_run_file,
)
from sampled_for_tests import some_soak
from torch import Tensor

from weft.checkpoint import Checkpoint, Piece, Region, TensorEntry, latest, save, steps
from weft.errors import CheckpointError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim import saved_state as state
from weft.optim.saved_state import load_state
from weft.run_file import Run
from weft.sharding.layout import ParameterPart

pytestmark = pytest.mark.processes

TOLERANCE = 1e-4
ALL_LAYOUTS = LAYOUTS | MODEL_LAYOUTS | PIPE_LAYOUTS
CURVES = LAYOUTS | {"4 pipe (gems)": PIPE_LAYOUTS["4 pipe (gems)"]}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("reshard"), DEEP)


class Saved(dict[str, Path]):
    """A checkpoint from each layout, made when it is asked for."""

    def __init__(self, run_file: Path) -> None:
        super().__init__()
        self._run_file = run_file

    def __missing__(self, name: str) -> Path:
        self[name] = save_under(make_run(self._run_file, f"saved {name}", *ALL_LAYOUTS[name]))
        return self[name]


@pytest.fixture(scope="module")
def saved(run_file: Path) -> Saved:
    return Saved(run_file)


# Always, some layouts of one half load what the other half has saved.
HALVES = (list(ALL_LAYOUTS)[::2], list(ALL_LAYOUTS)[1::2])
LOADS = {f"{target}, saved by half {half}": (target, HALVES[half]) for target in ALL_LAYOUTS for half in (0, 1)}
ALWAYS = [f"{target}, saved by half 1" for target in HALVES[0][::6]]


@pytest.mark.parametrize("case", some_soak(LOADS, *ALWAYS))
def test_state_is_equal_to_the_bit_whoever_saved_it(run_file: Path, saved: Saved, case: str) -> None:
    target, sources = LOADS[case]
    paths = [saved[name] for name in sources]
    load_under(make_run(run_file, "unused", *ALL_LAYOUTS[target]), paths)


def test_mixed_precision_loads_its_master_state_from_a_float32_run(run_file: Path, saved: Saved) -> None:
    run, path = make_run(run_file, "unused", "plan.shard=2", "plan.precision=bf16"), saved["4 shard-3"]

    def rank(index: int) -> tuple[list[str], int]:
        model, optimizer = build_on(run, Mesh(run.plan), seed=2)
        checkpoint = Checkpoint(path)
        load_state(checkpoint, model, optimizer)
        return differences(checkpoint, model, optimizer)

    check(run, run_local(rank, 2))


def test_the_comparison_sees_a_wrong_slice(run_file: Path, saved: Saved) -> None:
    """The control: pieces read one element off are found, on both ranks."""
    run, path = make_run(run_file, "unused", "plan.shard=2"), saved["2 data"]

    def off_by_one(part: ParameterPart) -> Region:
        shift = 1 if part.start > 0 else 0
        return Region.flat(part.parameter.shape, part.start - shift, part.stop - shift)

    def rank(index: int) -> int:
        model, optimizer = build_on(run, Mesh(run.plan), seed=2)
        checkpoint = Checkpoint(path)
        with patch.object(state, "_region", off_by_one):
            load_state(checkpoint, model, optimizer)
        return len(differences(checkpoint, model, optimizer)[0])

    assert run_local(rank, 2)[1] > 0


def test_a_checkpoint_with_more_layers_than_the_model_is_refused(run_file: Path, saved: Saved) -> None:
    run = make_run(run_file, "unused", "model.num_hidden_layers=1")
    model, optimizer = build_on(run, Mesh(run.plan), seed=2)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1.* is not in the model"):
        load_state(Checkpoint(saved["1 process"]), model, optimizer)


# --- curves


def resume(run: Run, step: int, run_file: Path, name: str) -> Run:
    """A copy of a run at `step`, trained to the end under another layout."""
    copy = make_run(run_file, f"{run.folder.name} {step} {name}", *CURVES[name])
    copy_run(run, step, copy)
    assert train_on_ranks(copy)["finished"]
    assert steps(copy.folder / "checkpoints") == [3, 6, 9, 12, 15]
    return copy


class Whole(dict[str, Run]):
    """Fifteen steps under each layout, trained when a test asks for them."""

    def __init__(self, run_file: Path) -> None:
        super().__init__()
        self._run_file = run_file

    def __missing__(self, name: str) -> Run:
        self[name] = run = make_run(self._run_file, f"whole {name}", *CURVES[name])
        assert train_on_ranks(run)["finished"]
        return run


@pytest.fixture(scope="module")
def uninterrupted(run_file: Path) -> Whole:
    return Whole(run_file)


def test_a_curve_falls(uninterrupted: Whole) -> None:
    reference = losses(uninterrupted["1 process"].folder)
    assert len(reference) == 15
    assert reference[-1] < 0.5 * reference[0]


@pytest.mark.parametrize("name", CURVES)
def test_curves_of_all_layouts_agree(uninterrupted: Whole, name: str) -> None:
    reference = losses(uninterrupted["1 process"].folder)
    assert losses(uninterrupted[name].folder) == pytest.approx(reference, rel=TOLERANCE)


@pytest.mark.parametrize("name", CURVES)
def test_a_resumed_curve_is_equal_to_the_bit_on_the_same_layout(
    run_file: Path, uninterrupted: Whole, name: str
) -> None:
    whole = uninterrupted[name]
    resumed = resume(whole, 6, run_file, name)
    assert losses(resumed.folder) == losses(whole.folder)
    ends = [Checkpoint(run.folder / "checkpoints" / "step-00000015") for run in (whole, resumed)]
    for entry in ends[0].entries():
        assert torch.equal(*(end.read(entry.name, entry.kind) for end in ends)), (entry.kind, entry.name)


def test_a_run_that_changes_its_layout_every_three_steps_has_the_same_curve(
    run_file: Path, uninterrupted: Whole
) -> None:
    reference = losses(uninterrupted["1 process"].folder)
    journey = ["2 data", "8 shard-2", "4 pipe (gems)", "1 process", "2 data x 2 shard-1"]
    run = uninterrupted[journey[0]]
    for number, (_, after) in enumerate(pairwise(journey), start=1):
        run = resume(run, 3 * number, run_file, after)
        assert losses(run.folder) == pytest.approx(reference, rel=TOLERANCE)


@pytest.mark.soak
@pytest.mark.parametrize("after", CURVES)
@pytest.mark.parametrize("before", CURVES)
def test_a_resumed_curve_is_the_same_from_any_layout_to_any_other(
    run_file: Path, uninterrupted: Whole, before: str, after: str
) -> None:
    resumed = resume(uninterrupted[before], 9, run_file, after)
    assert losses(resumed.folder) == pytest.approx(losses(uninterrupted["1 process"].folder), rel=TOLERANCE)


# --- what a run keeps


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_retention_keeps_the_last_ones_and_every_nth(run_file: Path, asynchronous: str) -> None:
    keep = ["checkpoint.every=2", "checkpoint.keep_last=2", "checkpoint.keep_every=6"]
    name = f"kept {asynchronous}"
    run = make_run(run_file, name, "plan.data=2", *keep, f"checkpoint.asynchronous={asynchronous}")
    train_on_ranks(run)
    folder = run.folder / "checkpoints"
    assert steps(folder) == [6, 12, 14, 15]
    assert sorted(path.name for path in folder.glob("*step-*")) == [f"step-{step:08d}" for step in (6, 12, 14, 15)]
    newest = latest(folder)
    assert newest is not None
    assert Checkpoint(newest).state["data"]["samples"] == 15 * 16


def test_an_asynchronous_save_holds_the_step_it_was_asked_for(run_file: Path) -> None:
    """Steps go on while a slow save is written: it must hold the values of its own step, as a synchronous one does."""

    def slow(file: str, pieces: Sequence[Piece]) -> tuple[tuple[TensorEntry, ...], dict[str, Tensor]]:
        time.sleep(0.3)
        return index(file, pieces)

    index, runs = save._index, []
    for asynchronous in ("true", "false"):
        saving = [f"checkpoint.asynchronous={asynchronous}", "checkpoint.every=3", "train.steps=8"]
        run = make_run(run_file, f"save {asynchronous}", "plan.shard=2", *saving)
        with patch.object(save, "_index", slow):
            train_on_ranks(run)
        runs.append(run)
    for step in (3, 6, 8):
        pair = [Checkpoint(run.folder / "checkpoints" / f"step-{step:08d}") for run in runs]
        for entry in pair[0].entries():
            assert torch.equal(*(one.read(entry.name, entry.kind) for one in pair)), (step, entry.kind, entry.name)
