"""Silent corruption: one flipped bit in a parameter or a gradient of one rank is found, and the rank is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs_for_tests import DEEP, losses, make_run, train_on_ranks, write_run_file
from sampled_for_tests import one_in
from torch import Tensor

from weft.errors import CorruptionError
from weft.health.rank_status import FOLDER_VARIABLE, read_failures, record_failure
from weft.launch.local_ranks import LocalError
from weft.mesh import Mesh
from weft.parallel.model_state import all_flats, all_units
from weft.resilience import corruption
from weft.resilience.corruption import describe, digest, digest_all, find_differences
from weft.step.train_step import StepResult, train_step
from weft.train import loop

pytestmark = pytest.mark.processes

Inject = Callable[[Any, Mesh, int], None]  # into a model, before a step
STEP = 3  # in which a bit is flipped


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("corruption"), DEEP)


def flip(tensor: Tensor, place: int = 5, bit: int = 3) -> None:
    """Flip a low bit, which no loss would show."""
    words = tensor.detach().view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    words[place] ^= 1 << bit


@contextmanager
def injected(inject: Inject) -> Iterator[None]:
    """`inject(model, mesh, number)` before each step, counted from 1."""
    number = [0]

    def step(model: Any, optimizer: Any, given: Any, mesh: Mesh, *rest: Any) -> StepResult:
        number[0] += 1
        inject(model, mesh, number[0])
        return train_step(model, optimizer, given, mesh, *rest)

    with patch.object(loop, "train_step", step):
        yield


def into_parameter(rank: int) -> Inject:
    def inject(model: Any, mesh: Mesh, number: int) -> None:
        if mesh.rank == rank and number == STEP:
            flat = next(flat for flat in all_flats(model) if flat.slice.numel() > 99)
            flip(flat.slice)

    return inject


def error_of(run_file: Path, name: str, inject: Inject, *overrides: str) -> str:
    options = ["train.steps=6", "checkpoint.every=6", *overrides]
    with injected(inject), pytest.raises(LocalError) as raised:
        train_on_ranks(make_run(run_file, name, *options))
    assert "CorruptionError: silent corruption in step" in str(raised.value)
    return str(raised.value)


# --- replicas


@pytest.mark.parametrize(
    ("layout", "rank", "told"),
    [
        (["plan.data=3", "train.batch=18"], 1, "rank 1 holds of the parameters '"),
        (["plan.data=4"], 2, "' other bits than ranks 0, 1 and 3. A chance event"),
        (["plan.data=2"], 1, "ranks 0 and 1 hold different bits of the parameters '"),
        (["plan.data=4", "plan.precision=bf16"], 3, "rank 3 holds of the parameters '"),
        (["plan.data=2", "plan.shard=2"], 2, "ranks 0 and 2 hold different bits"),  # the same slice
        (
            ['plan.pipe={degree=2, schedule="gems"}', "plan.micro_batch=4"],
            1,
            "' other bits than rank 0.",
        ),  # of 4 copies
    ],
    ids=str,
)
def test_a_flipped_bit_of_a_parameter_is_found(run_file: Path, layout: list[str], rank: int, told: str) -> None:
    name = f"flip {layout}".replace("/", " ")
    error = error_of(run_file, name, into_parameter(rank), *layout, "numbers.compare_every=2")
    assert told in error
    assert "corruption in step 4:" in error  # the first comparison after it


def test_a_flipped_bit_of_what_shard_stage_1_gathered_is_found(run_file: Path) -> None:
    """Bits that no optimizer sees: a rank's copy of another's slice, in the midst of the step that compares."""

    def inject(model: Any, mesh: Mesh, number: int) -> None:
        if mesh.rank == 2 and number == 4:
            (units,) = all_units(model)
            flat = next(unit for unit in units.blocks).flats[0]
            other = (flat.shard.index + 1) % 4 * flat.layout.slice_numel

            def corrupt(*_: Any) -> None:
                flip(flat.whole, other)

            next(unit for unit in units.blocks).module.register_forward_hook(corrupt)

    layout = ["plan.shard={degree=4, stage=1}", "numbers.compare_every=2"]
    error = error_of(run_file, "gathered", inject, *layout)
    assert "rank 2 holds of the parameters 'model.layers.0." in error
    assert "other bits than ranks 0, 1 and 3" in error


def test_a_flipped_bit_of_a_reduced_gradient_shows_in_the_parameters(run_file: Path) -> None:
    def inject(model: Any, mesh: Mesh, number: int) -> None:
        if mesh.rank == 0 and number == STEP:
            flat = all_flats(model)[0]
            finish = flat.finish_reduce

            def corrupted() -> None:
                finish()
                assert flat.slice_gradient is not None
                flip(flat.slice_gradient, bit=20)

            flat.finish_reduce = corrupted  # type: ignore[method-assign]

    error = error_of(run_file, "reduced", inject, "plan.data=3", "train.batch=18", "numbers.compare_every=2")
    assert "rank 0 holds of the parameters '" in error


def test_a_checkpoint_is_never_saved_from_replicas_that_differ(run_file: Path) -> None:
    error = error_of(run_file, "save", into_parameter(1), "plan.data=3", "train.batch=18", "numbers.compare_every=100")
    assert "corruption in step 6:" in error
    assert not list((run_file.parent / "save" / "checkpoints").glob("step-*"))


def test_without_comparing_nobody_notices(run_file: Path) -> None:
    """The negative control."""
    with injected(into_parameter(1)):
        train_on_ranks(make_run(run_file, "unseen", "plan.data=2", "train.steps=6"))


SOUND = [
    ["plan.data=2", "plan.shard={degree=2, stage=2}"],
    ["plan.shard={degree=2, stage=3}", "plan.precision=bf16", "plan.data=2"],
    ["plan.tensor={x=2, y=2}", "plan.context=2"],
    ['plan.pipe={degree=4, schedule="gems"}', "plan.micro_batch=4"],
    ['plan.pipe={degree=2, schedule="interleaved"}', "plan.data=2", "plan.micro_batch=2"],
    [],
]


@pytest.mark.parametrize("layout", one_in(4, {str(layout): layout for layout in SOUND}))
def test_a_sound_run_is_never_accused(run_file: Path, layout: list[str]) -> None:
    options = [*layout, "numbers.compare_every=1", "train.steps=4", "train.deterministic=true"]
    if not any("pipe" in option for option in layout):
        options += ["numbers.repeat_every=1"]
    name = f"sound {layout}".replace("/", " ")
    train_on_ranks(make_run(run_file, name, *options))


# --- a micro-batch twice

TWICE = ["train.deterministic=true", "numbers.repeat_every=2"]


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ([], 0),
        (["plan.data=2", "plan.micro_batch=8"], 1),
        (["plan.data=2", "plan.shard=2", "plan.micro_batch=2"], 2),
        (["plan.shard={degree=2, stage=2}", "plan.micro_batch=2", 'plan.memory.accumulate="slice"'], 1),
    ],
    ids=str,
)
def test_a_gradient_that_is_once_wrong_is_found(run_file: Path, layout: list[str], rank: int) -> None:
    """A bit of what backward computes on one rank, before it is reduced: all replicas would share the error."""

    def inject(model: Any, mesh: Mesh, number: int) -> None:
        if mesh.rank != rank or number != 4:
            return
        (parameter, *_) = [
            one for one in corruption._trained_parameters(model) if one.dim() == 2 or not all_units(model)
        ]
        count = [0]

        def corrupt(gradient: Tensor) -> Tensor:
            count[0] += 1  # the repetition is the only one to come an odd number of times, or an even
            gradient = gradient.clone()
            flip(gradient, bit=count[0] % 3)
            return gradient

        parameter.register_hook(corrupt)

    name = f"twice {layout}".replace("/", " ")
    error = error_of(run_file, name, inject, *layout, *TWICE)
    assert f"corruption in step 4: rank {rank} computed micro-batch" in error
    assert "twice, and loss or gradients have different bits" in error


def test_repeating_does_not_change_the_curve(run_file: Path) -> None:
    layout = ["plan.data=2", "plan.shard=2", "plan.micro_batch=2", "train.deterministic=true", "train.steps=6"]
    for name, extra in (("once", []), ("repeated", ["numbers.repeat_every=1"])):
        train_on_ranks(make_run(run_file, name, *layout, *extra))
    assert losses(run_file.parent / "repeated") == losses(run_file.parent / "once")


# --- parts


@given(st.integers(1, 300), st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_every_flipped_bit_changes_the_hash(numel: int, data: st.DataObject, dtype: torch.dtype) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    other = tensor.clone()
    before = int(digest(tensor)), int(digest_all([other, tensor]))
    words = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    place, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    words[place] ^= (1 << bit) - (1 << 8 * dtype.itemsize if bit == 8 * dtype.itemsize - 1 else 0)
    assert int(digest(tensor)) != before[0]
    assert int(digest_all([other, tensor])) != before[1]


def test_the_highest_bit_of_each_place_counts() -> None:
    """Times an even number it would be lost, in 64 bits."""
    words = torch.zeros(40, dtype=torch.int64)
    for place in range(len(words)):
        flipped = words.clone()
        flipped[place] = -(2**63)
        assert int(digest(flipped)) != int(digest(words)), place


def test_places_count_and_chunks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = int(digest(tensor))
    assert int(digest(tensor.flip(0))) != whole
    monkeypatch.setattr(corruption, "_CHUNK_NUMEL", 64)
    assert int(digest(tensor)) == whole


def test_who_is_at_fault() -> None:
    digests = [[(1, 10), (2, 5)], [(1, 10), (2, 5)], [(1, 11), (3, 7)], [(1, 10)]]
    assert find_differences(digests) == {1: [[0, 1, 3], [2]]}
    assert describe([[0, 1, 3], [2]], "p") == "rank 2 holds of the parameters 'p' other bits than ranks 0, 1 and 3"
    assert "ranks 0, 1, 2 and 3 hold different bits" in describe([[0, 3], [1], [2]], "p")
    assert "no majority" in describe([[0], [1]], "p")


def test_corruption_may_be_healed_by_a_restart(tmp_path: Path) -> None:
    assert record_failure({FOLDER_VARIABLE: str(tmp_path)}, 0, CorruptionError("bits")) == 1
    assert not read_failures(tmp_path, 1)[0].final
