"""Checkpoints: regions, any layout from any other, refusal of every damaged or hostile folder."""

import errno
import hashlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.checkpoint import Checkpoint, Piece, Region, Saver, covers, latest, load, manifest, overlap, save, steps
from weft.checkpoint.manifest import MANIFEST, seal
from weft.checkpoint.region import Intervals
from weft.errors import CheckpointError, DamagedError, FormatError
from weft.launch.local_ranks import run_local

pytestmark = pytest.mark.processes

torch.set_num_threads(1)

# ---------------------------------------------------------------- regions, against sets of indices


@cache
def elements(region: Region) -> list[int]:
    """The global flat index of each element that a region holds, in its own order."""
    whole = torch.arange(prod(region.shape)).reshape(region.shape)
    for dim, intervals in enumerate(region.intervals):
        whole = whole.index_select(dim, torch.cat([torch.arange(*interval) for interval in intervals]))
    assert whole.shape == region.local_shape
    return whole.reshape(-1)[region.start : region.stop].tolist()


@st.composite
def intervals_of(draw: st.DrawFn, size: int) -> Intervals:
    """Some of the spans between random edges, in any order: empty ones and neighbours too."""
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
    spans = draw(st.permutations(list(pairwise(edges))))
    return tuple(spans[: draw(st.integers(1, len(spans)))])


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    intervals = tuple(draw(intervals_of(size)) for size in shape)
    block = Region.block(shape, intervals)
    ends = sorted((draw(st.integers(0, block.size)), draw(st.integers(0, block.size))))
    return Region(shape, intervals, *ends)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_overlap_is_the_intersection_of_index_sets(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    stored, wanted = data.draw(regions(shape)), data.draw(regions(shape))
    have, want = elements(stored), elements(wanted)
    copied: dict[int, int] = {}
    for source, target, length in overlap(stored, wanted).tolist():
        assert length > 0
        for step in range(length):
            assert target + step not in copied
            assert have[source + step] == want[target + step]
            copied[target + step] = source + step
    assert {want[target] for target in copied} == set(have) & set(want)


def test_overlap_finds_long_runs() -> None:
    whole = Region.whole((6, 8))
    assert overlap(whole, Region.flat((6, 8), 5, 29)).tolist() == [[5, 0, 24]]
    assert overlap(Region.block((6, 8), (((2, 5),), ((0, 8),))), whole).tolist() == [[0, 16, 24]]
    right = Region((6, 8), (((0, 6),), ((4, 8),)), 2, 11)  # the right half's elements 2 to 10
    assert overlap(right, whole).tolist() == [[0, 6, 2], [2, 12, 4], [6, 20, 3]]
    assert overlap(Region.whole(()), Region.whole(())).tolist() == [[0, 0, 1]]
    assert overlap(Region.whole((0, 3)), Region.whole((0, 3))).tolist() == []


def test_overlap_of_stacked_intervals_finds_long_runs() -> None:
    fused = ((0, 1), (3, 4), (6, 7))
    rows, columns = Region.block((9, 8), (fused, ((0, 8),))), Region.block((8, 9), (((0, 8),), fused))
    assert overlap(Region.whole((9, 8)), rows).tolist() == [[0, 0, 8], [24, 8, 8], [48, 16, 8]]
    # As many runs as rows for each interval, one interval after the other
    assert overlap(Region.whole((8, 9)), columns).tolist() == [
        [9 * row + begin, 3 * row + at, 1] for at, (begin, _) in enumerate(fused) for row in range(8)
    ]
    # The same stack on both sides is contiguous, also inside other dims
    assert overlap(rows, rows).tolist() == [[0, 0, 24]]
    assert overlap(columns, columns).tolist() == [[0, 0, 24]]
    assert overlap(columns, Region((8, 9), columns.intervals, 5, 7)).tolist() == [[5, 0, 2]]
    # Stacked in another order
    swapped = Region.block((9,), (((6, 9), (0, 3)),))
    assert overlap(Region.whole((9,)), swapped).tolist() == [[6, 0, 3], [0, 3, 3]]


def test_a_large_cut_by_columns_is_few_copies() -> None:
    size = 2048
    columns = Region.block((size, size), (((0, size),), ((0, 256), (1024, 1152), (1536, 1664))))
    for stored, wanted in ((Region.whole((size, size)), columns), (columns, Region.whole((size, size)))):
        runs = overlap(stored, wanted)
        assert len(runs) == 3 * size
        assert [len(group) for group in load._evenly_spaced_groups(runs)] == [size] * 3
    short = overlap(Region.whole((size, size)), Region((size, size), columns.intervals, 100, 512 * size - 100))
    assert [len(group) for group in load._evenly_spaced_groups(short)] == [1, size - 1, size, size - 1, 1]


def test_the_same_block_is_the_same_value() -> None:
    whole = Region.block((9, 4), (((0, 3), (3, 3), (3, 8), (8, 9)), ((0, 4),)))
    assert whole == Region.whole((9, 4))
    empty = Region.block((9, 4), (((5, 5), (2, 2)), ((0, 4),)))
    assert (empty.intervals, empty.local_shape, empty.size) == ((((0, 0),), ((0, 4),)), (0, 4), 0)
    stacked = Region.block((9, 4), (((6, 9), (0, 3)), ((1, 3),)))
    assert (stacked.intervals, stacked.local_shape) == ((((6, 9), (0, 3)), ((1, 3),)), (6, 2))
    assert Region.whole(()).local_shape == ()


def grid(shape: tuple[int, ...], stacks: list[list[Intervals]], ways: list[int]) -> list[Region]:
    """Every combination of the dims' stacks, each cut into flat ranges at `ways` (in sixteenths)."""
    result = []
    for intervals in product(*stacks):
        size = Region.block(shape, intervals).size
        edges = [0, *sorted(size * way // 16 for way in ways), size]
        result += [Region(shape, intervals, *ends) for ends in pairwise(edges)]
    return result


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], ways: st.SearchStrategy[list[int]]) -> list[Region]:
    """A tiling as tensor axes make it: the spans of each dim dealt out to its ranks, then the product of the dims."""
    stacks = []
    for size in shape:
        edges = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=4))), size]
        dealt: dict[int, Intervals] = {}
        for span in draw(st.permutations(list(pairwise(edges)))):
            rank = draw(st.integers(0, 2))
            dealt[rank] = (*dealt.get(rank, ()), span)
        stacks.append(list(dealt.values()))
    return draw(st.permutations(grid(shape, stacks, draw(ways))))


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_covers_accepts_every_grid_and_refuses_it_with_a_piece_lost_or_doubled(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    parts = data.draw(grids(shape, st.lists(st.integers(0, 16), max_size=2)))
    assert covers(shape, parts)
    held = [part for part in parts if part.size]
    if held:
        assert not covers(shape, held[1:])
        assert not covers(shape, [*held, held[0]])


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_covers_is_never_wrong_when_it_says_yes(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    parts = data.draw(st.lists(regions(shape), max_size=4))
    if covers(shape, parts):
        assert sorted(index for part in parts for index in elements(part)) == list(range(prod(shape)))


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_covers_of_whole_blocks_is_right_both_ways(data: st.DataObject) -> None:
    """A grid of blocks, of which some may be lost, doubled or replaced."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    parts = data.draw(grids(shape, st.just([])))
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(parts)))
        block = Region.block(shape, data.draw(st.tuples(*map(intervals_of, shape))))
        parts[place : place + data.draw(st.integers(0, 2))] = [block]
    truth = sorted(index for part in parts for index in elements(part)) == list(range(prod(shape)))
    assert covers(shape, parts) == truth


def test_covers_refuses_overlapping_blocks_whose_volumes_add_up() -> None:
    left, middle = Region.block((2, 4), (((0, 2),), ((0, 2),))), Region.block((2, 4), (((0, 2),), ((1, 3),)))
    assert not covers((2, 4), [left, middle])
    assert not covers((2, 4), [Region.whole((4, 2))])
    # Each begins before the other in one dim; they share the middle element
    lower, upper = Region.block((3, 3), (((1, 3),), ((0, 2),))), Region.block((3, 3), (((0, 2),), ((1, 3),)))
    assert not covers((3, 3), [lower, upper, Region.block((3, 3), (((2, 3),), ((2, 3),)))])
    even, odd = (((0, 1), (2, 3)),), (((1, 2), (3, 4)),)
    assert covers((4,), [Region.block((4,), even), Region.block((4,), odd)])
    assert not covers((4,), [Region.block((4,), even), Region.block((4,), (((2, 4),),))])
    # The ranges of one block do not fill up those of another
    assert not covers((4,), [Region((4,), even, 0, 1), Region((4,), odd, 1, 2), Region.block((4,), odd)])


def test_covers_bounds_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Region.block((6, 1), (((row, row + 1),), ((0, 1),))) for row in range(6)]
    combs = [Region.block((6,), (tuple((row, row + 1) for row in range(first, 6, 2)),)) for first in (0, 1)]
    for name in ("MAX_BLOCKS", "MAX_INTERVALS"):
        for limit, accepted in ((6, True), (5, False)):
            monkeypatch.setattr(f"weft.checkpoint.region.{name}", limit)
            assert covers((6, 1), rows) == accepted
            assert covers((6,), combs) == (accepted or name == "MAX_BLOCKS")
        monkeypatch.undo()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 3), (((0, 2),),), 0, 6), "has 2 dims and intervals for 1"),
        (((1,) * 17, (((0, 1),),) * 17, 0, 1), "has 17 dims .* 16 dims at most"),
        (((2, -3), (((0, 2),), ((0, 3),)), 0, 6), "sizes must be 0 or more"),
        (((2**40, 2**40), (((0, 0),), ((0, 0),)), 0, 0), "below 2\\*\\*63"),
        (((2**60, 2**60, 0), (((0, 0),),) * 3, 0, 0), "below 2\\*\\*63"),
        (((2, 3), (((1, 3),), ((0, 3),)), 0, 6), r"\(1, 3\) of dim 0 reaches outside the shape \(2, 3\)"),
        (((2, 3), (((0, 2),), ((-1, 2),)), 0, 6), r"\(-1, 2\) of dim 1 reaches outside"),
        (((2, 3), (((0, 2),), ((2, 1),)), 0, 0), r"\(2, 1\) of dim 1 reaches outside"),
        (((2, 3), (((0, 2),), ()), 0, 0), "dim 1 has 0 intervals, it needs 1 to 4096"),
        (((9000,), (((0, 1),) * 4097,), 0, 1), "dim 0 has 4097 intervals"),
        (((9,), (((4, 8), (0, 5)),), 0, 9), r"intervals \(0, 5\) and \(4, 8\) of dim 0 overlap"),
        (((9,), (((2, 4), (2, 4)),), 0, 4), r"intervals \(2, 4\) and \(2, 4\) of dim 0 overlap"),
        (((2, 3), (((0, 2),), ((0, 3),)), 0, 7), r"local block \(2, 3\) of 6 elements, \[0, 7\) does not"),
        (((2, 3), (((0, 2),), ((0, 3),)), 4, 3), "of 6 elements"),
        (((9,), (((0, 2), (5, 7)),), 0, 5), r"local block \(4,\) of 4 elements"),
    ],
)
def test_region_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Region(*arguments)


# ---------------------------------------------------------------- any layout from any other

Layout = Callable[[tuple[int, ...]], list[list[Region]]]  # shape → regions of each rank


def flat_layout(num_ranks: int) -> Layout:
    def cut(shape: tuple[int, ...]) -> list[list[Region]]:
        total = prod(shape)
        edges = [total * rank**2 // num_ranks**2 for rank in range(num_ranks + 1)]  # uneven on purpose
        return [[Region.flat(shape, low, high)] for low, high in pairwise(edges)]

    return cut


def mesh_layout(num_ranks: int, ways: list[int], *cuts: Callable[[int], list[Intervals]]) -> Layout:
    """The first dims stacked as `cuts` say, each block cut flat at `ways`; rank 0 holds tensors with fewer dims."""

    def stack(shape: tuple[int, ...]) -> list[list[Region]]:
        if len(shape) < len(cuts):
            return [[Region.whole(shape)], *([] for _ in range(num_ranks - 1))]
        every = (*cuts, *(uncut for _ in shape[len(cuts) :]))
        return [[part] for part in grid(shape, [cut(size) for cut, size in zip(every, shape, strict=True)], ways)]

    return stack


def uncut(size: int) -> list[Intervals]:
    return [((0, size),)]


def halves(size: int) -> list[Intervals]:
    return [((0, size // 2),), ((size // 2, size),)]


def fused(num_parts: int) -> Callable[[int], list[Intervals]]:
    """Over 2 ranks, a half of each of several parts of unequal widths, as q, k and v have in one matrix."""

    def cut(size: int) -> list[Intervals]:
        edges = [size - size * left**2 // num_parts**2 for left in range(num_parts, -1, -1)]
        middles = [(low + high) // 2 for low, high in pairwise(edges)]
        return [tuple(zip(edges[:-1], middles, strict=True)), tuple(zip(middles, edges[1:], strict=True))]

    return cut


LAYOUTS: dict[str, Layout] = {
    "one": flat_layout(1),
    "two replicas": lambda shape: [[Region.whole(shape)], []],
    "four flat": flat_layout(4),
    "two by two": mesh_layout(4, [], halves, halves),
    "columns and flat": mesh_layout(6, [5, 10], uncut, halves),
    "eight flat": flat_layout(8),
    "fused rows": mesh_layout(2, [], fused(3)),
    "fused columns": mesh_layout(2, [], uncut, fused(3)),
    "fused rows by columns": mesh_layout(4, [], fused(2), halves),
    "fused rows by columns and flat": mesh_layout(8, [7], fused(2), halves),
    "fused columns and flat": mesh_layout(4, [7], uncut, fused(3)),
}

STATE = {
    "data": {"samples": 12},
    "seed": 7,
    "learning_rate": 0.1,
    "run_file": "[plan]\ndata = 2\n",
    "tags": ["ä", None],
}


def example_tensors() -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        ("parameter", "w"): draw(7, 10),
        ("exp_avg", "w"): draw(7, 10).double(),
        ("exp_avg_sq", "w"): draw(7, 10).half(),
        ("step", "w"): torch.tensor(41.0),
        ("parameter", "conv.weight"): draw(6, 5, 3, 2).bfloat16(),
        ("parameter", "blocks.0/mlp@1"): draw(9),
        ("parameter", "empty"): draw(0, 4),
        ("buffer", "mask"): draw(11, 3) > 0,
        ("buffer", "count"): torch.tensor(2**62 + 1),
        ("buffer", "codes"): torch.arange(23, dtype=torch.uint8),
        ("buffer", "scaled"): draw(4, 6).to(torch.float8_e4m3fn),
    }


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def cut(tensor: Tensor, region: Region) -> Tensor:
    """By bytes, because not all dtypes can be indexed."""
    rows = bits(tensor).reshape(tensor.numel(), tensor.itemsize)
    return rows[torch.tensor(elements(region), dtype=torch.int64)].reshape(-1).view(tensor.dtype)


def save_under(
    layout: Layout, folder: Path, step: int, tensors: dict[tuple[str, str], Tensor], token: str = "abcd"
) -> Path:
    """Save as all ranks of a layout, each with its own saver and thread."""
    num_ranks = len(layout(()))
    savers = [Saver(folder, rank, num_ranks, token, timeout_seconds=120) for rank in range(num_ranks)]
    for rank, saver in enumerate(savers):
        pieces = [
            Piece(name, kind, region, cut(tensor, region))
            for (kind, name), tensor in tensors.items()
            for region in layout(tuple(tensor.shape))[rank]
        ]
        saver.save(step, pieces, STATE)
    for saver in savers:
        saver.wait(published=True)
    return folder / f"step-{step:08d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    return {name: save_under(layout, root / name, 5, example_tensors()) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_any_layout_loads_any_other_bit_for_bit(saved: dict[str, Path], writer: str, reader: str) -> None:
    checkpoint = Checkpoint(saved[writer])
    tensors = example_tensors()
    assert {(entry.kind, entry.name) for entry in checkpoint.entries()} == tensors.keys()
    for (kind, name), tensor in tensors.items():
        for region in (region for rank in LAYOUTS[reader](tuple(tensor.shape)) for region in rank):
            local = checkpoint.read_region(name, kind, region)
            assert local.dtype == tensor.dtype
            assert local.shape == (region.size,)
            assert torch.equal(bits(local), bits(cut(tensor, region)))


def test_a_checkpoint_is_a_value(saved: dict[str, Path]) -> None:
    path = saved["two by two"]
    checkpoint = Checkpoint(path)
    assert (checkpoint.step, checkpoint.state, checkpoint.previous) == (5, STATE, None)
    assert [entry.name for entry in checkpoint.entries("exp_avg")] == ["w"]
    whole = checkpoint.read("w", "parameter")
    assert whole.shape == (7, 10)
    assert torch.equal(whole, example_tensors()["parameter", "w"])
    assert checkpoint.read("w", "step").shape == ()
    assert checkpoint.read("empty", "parameter").shape == (0, 4)
    assert sorted(os.listdir(path)) == [MANIFEST, *(f"rank-{rank:05d}.safetensors" for rank in range(4))]
    assert sorted(os.listdir(saved["two replicas"])) == [MANIFEST, "rank-00000.safetensors"]


def test_reading_into_a_tensor(saved: dict[str, Path]) -> None:
    checkpoint = Checkpoint(saved["four flat"])
    want = example_tensors()["parameter", "w"].reshape(-1)[3:33]
    region = Region.flat((7, 10), 3, 33)
    buffer = torch.zeros(60)
    assert checkpoint.read_region("w", "parameter", region, out=buffer[::2]).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[::2], want)
    assert not buffer[1::2].any()
    parameter = torch.nn.Parameter(torch.zeros(30))
    checkpoint.read_region("w", "parameter", region, out=parameter)
    assert torch.equal(parameter.data, want)
    half = torch.zeros(30, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"is torch.float32, `out` is torch.bfloat16; pass cast=True"):
        checkpoint.read_region("w", "parameter", region, out=half)
    assert torch.equal(checkpoint.read_region("w", "parameter", region, out=half, cast=True), want.bfloat16())
    with pytest.raises(CheckpointError, match=r"region has 30 elements, `out` has shape \(29,\)"):
        checkpoint.read_region("w", "parameter", region, out=torch.zeros(29))
    with pytest.raises(CheckpointError, match=r"has shape \(7, 10\), the model wants \(70,\)"):
        checkpoint.read_region("w", "parameter", Region.whole((70,)))
    with pytest.raises(CheckpointError, match=r"has no exp_avg 'other'"):
        checkpoint.read("other", "exp_avg")


def test_only_the_needed_parts_are_read_and_each_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (manifest, load):
        monkeypatch.setattr(module, "HASH_CHUNK_BYTES", 64)
    tensors = {("parameter", "w"): torch.arange(1000.0)}
    checkpoint = Checkpoint(save_under(LAYOUTS["one"], tmp_path, 1, tensors))
    hashed: list[int] = []
    real = manifest.chunk_hashes

    def counted(piece: Tensor, chunks: list[int]) -> list[str]:
        hashed.extend(chunks)
        return real(piece, chunks)

    monkeypatch.setattr(load, "chunk_hashes", counted)
    for _ in range(2):
        local = checkpoint.read_region("w", "parameter", Region.flat((1000,), 500, 625))
        assert torch.equal(local, torch.arange(500.0, 625.0))
    assert hashed == list(range(31, 40))  # 16 elements a chunk: elements 496 to 639
    checkpoint.read("w", "parameter")
    assert sorted(hashed) == list(range(63))


def test_threads_hash_the_same_and_find_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest, load):
        monkeypatch.setattr(module, "HASH_CHUNK_BYTES", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    numbers = torch.arange(1000.0)
    expected = [hashlib.sha256(numbers[start : start + 16].numpy().data).hexdigest() for start in range(0, 1000, 16)]
    assert manifest.chunk_hashes(numbers, range(63)) == expected
    folder = save_under(LAYOUTS["one"], tmp_path, 1, {("parameter", "w"): numbers})
    assert torch.equal(Checkpoint(folder).read("w", "parameter"), numbers)
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-700] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="do not match their SHA-256"):
        Checkpoint(folder).read("w", "parameter")


@pytest.mark.processes
def test_a_save_in_flight_is_finished_when_the_program_ends(tmp_path: Path) -> None:
    """Its hashes too, by several threads, though nobody waits for it."""
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from weft.checkpoint import Piece, Region, Saver\n"
        "torch.set_num_threads(4)\n"
        "numbers = torch.arange(2.0**23)\n"
        "pieces = [Piece('w', 'parameter', Region.whole((2**23,)), numbers)]\n"
        "Saver(Path(sys.argv[1]), 0, 1, 'abcd').save(3, pieces, {})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert torch.equal(Checkpoint(tmp_path / "step-00000003").read("w", "parameter"), torch.arange(2.0**23))


# ---------------------------------------------------------------- saving


def one(folder: Path, **options: Any) -> Saver:
    return Saver(folder, 0, 1, "abcd", **options)


def piece(values: Tensor, name: str = "w") -> Piece:
    return Piece(name, "parameter", Region.whole(tuple(values.shape)), values.reshape(-1))


def test_what_changes_after_save_returns_is_not_saved(tmp_path: Path) -> None:
    gate = threading.Event()
    saver = one(tmp_path, at=lambda point: gate.wait(20) and None)
    values, state = torch.ones(1000), {"list": [1]}
    saver.save(1, [piece(values)], state)
    values.fill_(2)
    state["list"].append(2)
    assert latest(tmp_path) is None  # the writer is held at its first step
    gate.set()
    saver.wait()
    checkpoint = Checkpoint(tmp_path / "step-00000001")
    assert torch.equal(checkpoint.read("w", "parameter"), torch.ones(1000))
    assert checkpoint.state == {"list": [1]}


def test_a_second_save_waits_for_the_first_and_reuses_its_memory(tmp_path: Path) -> None:
    points: list[str] = []
    saver = one(tmp_path, at=points.append)
    saver.save(1, [piece(torch.ones(10))], {})
    address = saver._buffer._bytes.data_ptr()
    saver.save(2, [piece(torch.full((9,), 2.0))], {})
    assert "after rename step-00000001" in points
    assert saver._buffer._bytes.data_ptr() == address
    saver.wait()
    assert Checkpoint(tmp_path / "step-00000001").read("w", "parameter").tolist() == [1.0] * 10
    assert Checkpoint(tmp_path / "step-00000002").read("w", "parameter").tolist() == [2.0] * 9


def test_ranks_may_run_ahead(tmp_path: Path) -> None:
    """Rank 1 writes three steps before rank 0 begins: nothing is lost, mixed or swept away."""
    ranks = [Saver(tmp_path, rank, 2, "abcd", timeout_seconds=120) for rank in range(2)]
    for rank in (1, 0):
        for step in (1, 2, 3):
            own = Piece("w", "parameter", Region.flat((4,), 2 * rank, 2 * rank + 2), torch.full((2,), float(step)))
            ranks[rank].save(step, [own], {}, asynchronous=False)
    assert steps(tmp_path) == [1, 2, 3]
    for step in (1, 2, 3):
        assert Checkpoint(tmp_path / f"step-{step:08d}").read("w", "parameter").tolist() == [float(step)] * 4


def test_manifests_are_chained(tmp_path: Path) -> None:
    saver = one(tmp_path)
    for step in (1, 2):
        saver.save(step, [piece(torch.ones(1))], {}, asynchronous=False)
    first = hashlib.sha256((tmp_path / "step-00000001" / MANIFEST).read_bytes()).hexdigest()
    assert Checkpoint(tmp_path / "step-00000002").previous == first


def test_an_existing_step_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one(tmp_path).save(1, [piece(torch.ones(3))], {}, asynchronous=False)
    with caplog.at_level(logging.WARNING, "weft"):
        one(tmp_path).save(1, [piece(torch.zeros(3))], {}, asynchronous=False)
    assert "complete already" in caplog.text
    assert Checkpoint(tmp_path / "step-00000001").read("w", "parameter").tolist() == [1.0] * 3


def test_retention(tmp_path: Path) -> None:
    saver = one(tmp_path, keep_last=2, keep_every=40)
    for step in range(10, 100, 10):
        saver.save(step, [piece(torch.ones(3))], {})
    saver.wait()
    assert steps(tmp_path) == [40, 80, 90]
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (40, 80, 90)]
    one(tmp_path, keep_last=1).save(45, [piece(torch.ones(3))], {}, asynchronous=False)
    assert steps(tmp_path) == [45, 90]  # a run that went back keeps what it saves


def test_latest_ignores_everything_but_complete_checkpoints(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    one(tmp_path).save(3, [piece(torch.ones(1))], {}, asynchronous=False)
    for name in ("step-00000009", ".saving-step-00000008-wxyz-1", "step-7", "step-000000007"):
        (tmp_path / name).mkdir()
        if name != "step-00000009":
            (tmp_path / name / MANIFEST).write_text("{}")
    assert latest(tmp_path) == tmp_path / "step-00000003"


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    one(tmp_path).save(1, [piece(torch.ones(3))], {}, asynchronous=False)
    saver = Saver(tmp_path, 0, 3, "efgh", timeout_seconds=0.1)
    saver.save(2, [piece(torch.ones(3))], {})
    with pytest.raises(CheckpointError, match=r"step 2 was not published: no part from ranks \[1, 2\] within 0.1 s"):
        saver.wait()
    other = Saver(tmp_path, 1, 3, "efgh", timeout_seconds=0.1)
    other.save(2, [], {})
    with pytest.raises(CheckpointError, match=r"rank 0 did not publish .*step-00000002 within 0.1 s"):
        other.wait(published=True)
    assert steps(tmp_path) == [1]
    saver.save(3, [], {})  # sweeps the failed attempt away, then fails itself
    with pytest.raises(CheckpointError, match="step 3"):
        saver.wait()
    assert sorted(os.listdir(tmp_path)) == [".saving-step-00000003-efgh-2", "step-00000001"]


def test_an_incomplete_tensor_is_not_published(tmp_path: Path) -> None:
    half = Piece("w", "parameter", Region.flat((6,), 0, 3), torch.ones(3))
    with pytest.raises(CheckpointError, match=r"'w' of shape \(6,\) do not hold each element exactly once"):
        one(tmp_path).save(1, [half], {}, asynchronous=False)
    with pytest.raises(CheckpointError, match="differ in dtype or global shape"):
        one(tmp_path).save(1, [half, piece(torch.ones(3))], {}, asynchronous=False)
    ranks = [Saver(tmp_path, rank, 2, "abcd", timeout_seconds=120) for rank in range(2)]
    ranks[1].save(2, [piece(torch.ones(3).double())], {}, asynchronous=False)
    ranks[0].save(2, [piece(torch.ones(3))], {})
    with pytest.raises(CheckpointError, match=r"is torch.float64 \(3,\) on rank 1, but torch.float32 \(3,\)"):
        ranks[0].wait()
    assert steps(tmp_path) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("pieces", "state", "message"),
    [
        ([Piece("w", "parameter", Region.whole((4,)), torch.ones(3))], {}, "has 3 elements, its Region"),
        ([piece(torch.ones(2, dtype=torch.complex128))], {}, "torch.complex128; a checkpoint holds F64, F32"),
        ([piece(torch.ones(2), name="")], {}, "1 to 1024 printable"),
        ([piece(torch.ones(2), name="a\nb")], {}, "1 to 1024 printable"),
        ([Piece("w", "a/b", Region.whole((1,)), torch.ones(1))], {}, "kind 'a/b' must be"),
        ([], {"x": torch.ones(1)}, "must be plain JSON"),
        ([], {"x": float("nan")}, "must be plain JSON"),
        ([], {"1": 0, 1: 0}, "must be plain JSON"),
    ],
)
def test_save_refuses(tmp_path: Path, pieces: list[Piece], state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        one(tmp_path).save(1, pieces, state)


def test_saver_refuses(tmp_path: Path) -> None:
    for arguments, message in (
        ((0, 1, "a-b/"), "token 'a-b/'"),
        ((2, 2, "abcd"), "rank 2 is outside the 2 ranks"),
        ((0, 1, "abcd", 0), "keep_last = 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Saver(tmp_path, *arguments)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="step -1 must be 0 or more"):
        one(tmp_path).save(-1, [], {})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save to .*file/runs"):
        one(tmp_path / "file" / "runs")


@pytest.mark.parametrize("call", ["save_file", "_fsync"])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    saver = one(tmp_path)
    saver.save(1, [piece(torch.ones(3))], {}, asynchronous=False)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save, call, full)
        saver.save(2, [piece(torch.ones(3))], {})
        with pytest.raises(CheckpointError, match=f"cannot save to {tmp_path}: .*No space left.*untouched"):
            saver.wait()
    assert Checkpoint(latest(tmp_path) or "").step == 1
    saver.save(2, [piece(torch.ones(3))], {}, asynchronous=False)  # room again
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("call", ["rmtree", "rename"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    saver = one(tmp_path, keep_last=1)
    saver.save(1, [piece(torch.ones(3))], {}, asynchronous=False)
    rename = Path.rename

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if call == "rename" and not str(arguments[0]).count(".deleting"):
            return rename(path, *arguments)
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(*((save.shutil, "rmtree") if call == "rmtree" else (Path, "rename")), refuse)
        saver.save(2, [piece(torch.ones(3))], {}, asynchronous=False)
    assert "step-00000001 is not needed any more and cannot be deleted: [Errno 16]" in caplog.text
    assert Checkpoint(latest(tmp_path) or "").step == 2
    saver.save(3, [piece(torch.ones(3))], {}, asynchronous=False)
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_an_old_checkpoint_that_cannot_be_read_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = one(tmp_path)
    saver.save(1, [piece(torch.ones(3))], {}, asynchronous=False)

    def stale(checkpoint: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(save, "manifest_hash", stale)
        saver.save(2, [piece(torch.ones(3))], {}, asynchronous=False)
    assert Checkpoint(tmp_path / "step-00000002").previous is None


def test_nobody_waits_for_a_rank_that_failed_for_any_reason(tmp_path: Path) -> None:
    ranks = [Saver(tmp_path, rank, 2, "abcd", timeout_seconds=120) for rank in range(2)]
    parts = [Piece("w", "parameter", Region.flat((4,), at, at + 2), torch.ones(2)) for at in (0, 2)]
    with pytest.raises(CheckpointError, match="differ in dtype or global shape"):
        ranks[1].save(1, [parts[1], Piece("w", "parameter", Region.flat((5,), 0, 2), torch.ones(2))], {}, False)
    with pytest.raises(CheckpointError, match=r"step 1 was not published: ranks \[1\] could not save their part"):
        ranks[0].save(1, [parts[0]], {}, asynchronous=False)


def in_turn(savers: list[Saver], answers: dict[int, list[bool]]) -> list[BaseException | None]:
    """`settle` on all ranks, each in a thread, which meet as ranks do; what each says at each meeting."""
    barrier = threading.Barrier(len(savers), timeout=60)
    told = [[False] * len(savers) for _ in range(2)]
    found: list[BaseException | None] = [None] * len(savers)

    def settle(rank: int) -> None:
        meetings = iter(told)

        def agree(mine: bool) -> bool:
            meeting = next(meetings)
            meeting[rank] = mine
            answers.setdefault(rank, []).append(mine)
            barrier.wait()
            return all(meeting)

        found[rank] = savers[rank].settle(agree)

    threads = [threading.Thread(target=settle, args=(rank,)) for rank in range(len(savers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_part_that_will_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot even leave a mark: rank 0 learns from it, and gives the save up."""
    ranks = [Saver(tmp_path, rank, 2, "abcd", timeout_seconds=10**6) for rank in range(2)]
    parts = [Piece("w", "parameter", Region.flat((4,), at, at + 2), torch.ones(2)) for at in (0, 2)]
    for rank in ranks:
        rank.save(1, [parts[ranks.index(rank)]], {})
    answers: dict[int, list[bool]] = {}
    assert in_turn(ranks, answers) == [None, None]
    assert steps(tmp_path) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(ranks[1], "_write_part", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        patch.setattr(Path, "touch", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        for rank in ranks:
            rank.save(2, [parts[ranks.index(rank)]], {})
        first, second = in_turn(ranks, answers)
    assert "step 2 was not published: another rank could not save its part" in str(first)
    assert "cannot save to" in str(second)
    assert answers == {0: [True, True, True, True], 1: [True, True, False, True]}
    for rank in ranks:
        rank.save(3, [parts[ranks.index(rank)]], {})
    assert in_turn(ranks, answers) == [None, None]
    assert steps(tmp_path) == [1, 3]


def test_savers_go_on_without_a_lost_rank(tmp_path: Path) -> None:
    """A save that has the lost rank's part is published, one that lacks it is given up; later saves need one rank."""

    def two(name: str) -> tuple[Saver, Saver]:
        first, lost = (Saver(tmp_path / name, rank, 2, "abcd", timeout_seconds=10**6) for rank in range(2))
        return first, lost

    whole = piece(torch.ones(4))
    parts = [Piece("w", "parameter", Region.flat((4,), at, at + 2), torch.ones(2)) for at in (0, 2)]
    first, lost = two("whole")
    lost.save(1, [parts[1]], {}, asynchronous=False)
    first.save(1, [parts[0]], {})
    first.continue_without(1, [1])
    first.save(2, [whole], {}, asynchronous=False)
    assert steps(tmp_path / "whole") == [1, 2]
    first, _ = two("half")
    first.save(1, [parts[0]], {})
    first.continue_without(1, [1])
    with pytest.raises(CheckpointError, match="step 1 was not published: a rank was lost before it had saved its part"):
        first.save(2, [whole], {})
    first, _ = two("behind")
    first.continue_without(1, [0, 1])  # another rank has begun a save that this one has not
    with pytest.raises(CheckpointError, match="step 1 was not saved: a rank was lost when others had saved their part"):
        first.save(1, [whole], {})
    first.save(2, [whole], {}, asynchronous=False)
    assert steps(tmp_path / "behind") == [2]


# ---------------------------------------------------------------- damage and malice


def read_all(path: Path) -> None:
    checkpoint = Checkpoint(path)
    for entry in checkpoint.entries():
        checkpoint.read(entry.name, entry.kind)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two ranks, which differ in values only."""
    folder = tmp_path_factory.mktemp("small")
    for step in (1, 2):
        tensors = {("parameter", "w"): torch.arange(8.0) + step, ("buffer", "b"): torch.tensor([step, 2])}
        save_under(mesh_layout(2, [], fused(2)), folder, step, tensors)
    return folder


@pytest.fixture
def victim(small: Path, tmp_path: Path) -> Path:
    shutil.copytree(small, tmp_path / "copy")
    return tmp_path / "copy" / "step-00000002"


@pytest.mark.parametrize("name", ["rank-00001.safetensors", MANIFEST])
def test_every_flipped_bit_is_refused(victim: Path, name: str) -> None:
    path = victim / name
    good = path.read_bytes()
    for index in range(len(good)):
        damaged = bytearray(good)
        damaged[index] ^= 1 << index % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            read_all(victim)
    path.write_bytes(good)
    read_all(victim)


@pytest.mark.parametrize("name", ["rank-00001.safetensors", MANIFEST])
def test_every_truncation_is_refused(victim: Path, name: str) -> None:
    path = victim / name
    good = path.read_bytes()
    for size in range(0, len(good), 3):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=f"{name}.*use the previous checkpoint .*step-00000001"):
            read_all(victim)
    path.write_bytes(good + b"x")
    with pytest.raises(CheckpointError, match=name):
        read_all(victim)


def test_the_hash_is_what_finds_a_flipped_byte(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with verification off, the damage goes through."""
    path = victim / "rank-00001.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="do not match their SHA-256"):
        read_all(victim)
    monkeypatch.setattr(Checkpoint, "_verify", lambda *arguments: None)
    read_all(victim)


def test_lost_swapped_and_foreign_shards_are_refused(victim: Path) -> None:
    first, second = victim / "rank-00000.safetensors", victim / "rank-00001.safetensors"
    good = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors cannot be used: .*No such file"):
        Checkpoint(victim)
    second.mkdir()
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors cannot be used"):
        Checkpoint(victim)
    second.rmdir()
    shutil.copy(victim.parent / "step-00000001" / second.name, second)  # of another step: same header, other bytes
    with pytest.raises(CheckpointError, match=r"step-00000002/rank-00001.safetensors .* do not match their SHA-256"):
        read_all(victim)
    second.write_bytes(first.read_bytes())
    first.write_bytes(good)
    with pytest.raises(CheckpointError, match=r"rank-0000[01].safetensors .*SHA-256"):
        read_all(victim)


def test_a_checkpoint_under_another_steps_name_is_refused(victim: Path) -> None:
    shutil.move(victim, victim.with_name("step-00000003"))
    with pytest.raises(CheckpointError, match="it is of step 2"):
        Checkpoint(victim.with_name("step-00000003"))
    shutil.move(victim.with_name("step-00000003"), victim.with_name("best"))
    assert Checkpoint(victim.with_name("best")).step == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "__0_0.distcp", "optimizer.pkl", "x.pth"])
def test_pickles_are_refused(victim: Path, name: str) -> None:
    (victim / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=f"{name}: weft never unpickles; export it with safetensors first"):
        Checkpoint(victim)


def test_what_is_no_checkpoint_is_refused(victim: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest.json.*did you mean .*step-00000002\?"):
        Checkpoint(victim.parent)
    with pytest.raises(CheckpointError, match="give a run folder, a checkpoint folder"):
        Checkpoint(victim / MANIFEST)


def document(path: Path) -> dict[str, Any]:
    """The manifest without its seal."""
    content: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    del content["sha256"]
    return content


def rewrite(path: Path, content: Any) -> None:
    """Write a manifest as a forger would, who seals it again."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (path / MANIFEST).write_bytes(seal(text))


def put(*steps_and_value: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = steps_and_value

    def change(content: dict[str, Any]) -> None:
        target: Any = content
        for step in way:
            target = target[step]
        target[last] = value

    return change


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop("rank-00001.safetensors")
        for tensor in content["tensors"]:
            tensor["pieces"][1]["file"] = name

    return change


FORGERIES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (put("format", "weft-checkpoint-9"), "format 'weft-checkpoint-9' is unknown"),
    (put("step", -1), "step -1"),
    (put("step", 3), "it is of step 3"),
    (put("step", True), "'step' of the manifest has the wrong type"),
    (put("step", 2.0), "wrong type"),
    (put("num_ranks", 0), "num_ranks 0"),
    (put("state", []), "wrong type"),
    (put("previous", "abc"), "not a SHA-256"),
    (put("extra", 1), "needs exactly the fields"),
    (lambda content: content.pop("state"), "needs exactly the fields"),
    (rename_file("../rank-00001.safetensors"), "needs a name like"),
    (rename_file("/etc/passwd"), "needs a name like"),
    (rename_file("rank-00001.safetensors\n"), "needs a name like"),
    (put("files", "rank-00001.safetensors", -5), "a size in bytes"),
    (put("files", "rank-00001.safetensors", 10**400), "a size in bytes"),
    (put("files", "rank-00001.safetensors", 17), "the manifest says 17"),
    (put("files", "rank-00007.safetensors", 17), "holds no piece"),
    (put("tensors", 0, "dtype", "F128"), "unknown dtype 'F128'"),
    (put("tensors", 0, "dtype", "F64"), "its header does not list"),
    (put("tensors", 0, "name", "b\x1b[2J"), "printable"),
    (put("tensors", 0, "kind", "a/b"), "kind 'a/b'"),
    (put("tensors", 0, "shape", [2**62, 4]), "below 2\\*\\*63"),
    (put("tensors", 1, "shape", [10**30]), "below 2\\*\\*63"),
    (put("tensors", 1, "shape", [-8]), "sizes must be 0 or more"),
    (put("tensors", 1, "shape", [8.0]), "must be a list of int"),
    (put("tensors", 1, "shape", [9]), "exactly once"),
    (put("tensors", 1, "shape", [1] * 100), "16 dims at most"),
    (put("tensors", 1, "pieces", []), "exactly once"),
    (put("tensors", 1, "pieces", 0, "stop", 10**20), "the range must lie"),
    (put("tensors", 1, "pieces", 0, "intervals", [[0, 3, 6, 9]]), "outside the shape"),
    (put("tensors", 1, "pieces", 0, "intervals", [[0, 3, 2, 3]]), "overlap; each row is held once"),
    (put("tensors", 1, "pieces", 0, "intervals", [[0, 3, 3, 4]]), "be one where they touch"),
    (put("tensors", 1, "pieces", 0, "intervals", [[0, 3, 5, 5, 6, 7]]), "must not be empty"),
    (put("tensors", 1, "pieces", 0, "intervals", [[0, 3, 6]]), "need a begin and an end each"),
    (put("tensors", 1, "pieces", 0, "intervals", [[]]), "has 0 intervals"),
    (put("tensors", 1, "pieces", 0, "intervals", [[0, 1] * 5000]), "has 5000 intervals"),
    (put("tensors", 1, "pieces", 0, "intervals", [[0, 4], [0, 1]]), "has 1 dims and intervals for 2"),
    (put("tensors", 1, "pieces", 0, "intervals", [4]), "must be a list of list"),
    (put("tensors", 1, "pieces", 0, "intervals", [[[0, 3], [6, 7]]]), "must be a list of int"),
    (put("tensors", 1, "pieces", 0, "intervals", [[False, 3, 6, 7]]), "must be a list of int"),
    (put("tensors", 1, "pieces", 0, "intervals", "0"), "'intervals' of a piece .* has the wrong type"),
    (put("tensors", 1, "pieces", 1, "intervals", [[0, 4]]), "exactly once"),
    (put("tensors", 1, "pieces", 0, "key", "other"), "its header does not list"),
    (put("tensors", 1, "pieces", 0, "file", "rank-00005.safetensors"), "which is not listed"),
    (put("tensors", 1, "pieces", 0, "sha256", []), "needs one SHA-256"),
    (put("tensors", 1, "pieces", 0, "sha256", ["0" * 64]), "do not match their SHA-256"),
    (lambda content: content["tensors"].append(content["tensors"][0]), "is listed twice"),
    (lambda content: content["tensors"][0]["pieces"].append(content["tensors"][0]["pieces"][0]), "is used twice"),
    (lambda content: content["tensors"].pop(), "its header does not list"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("forge", "message"), FORGERIES)
def test_a_forged_manifest_is_refused(victim: Path, forge: Callable[[dict[str, Any]], Any], message: str) -> None:
    content = document(victim)
    rewrite(victim, content)
    read_all(victim)  # the forger's seal itself is good
    forge(content)
    rewrite(victim, content)
    with pytest.raises(CheckpointError, match=rf"step-00000002/(manifest.json|rank-).*{message}"):
        read_all(victim)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "does? not match|not match its own"),
        (b"{garbage", "not JSON"),
        (b"{" * 100_000, "not JSON"),
        (b'{"a":' + b"[" * 200_000, "not JSON"),
        (b'{"step":1,"step":1}', "appears twice"),
        (b'{"step":NaN}', "NaN is no JSON number"),
        (b'{"step":' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"step":"\xff"}', "not JSON"),
        (b"{}", "not JSON|needs exactly"),
    ],
)
def test_a_manifest_that_is_no_manifest_is_refused(victim: Path, text: bytes, message: str) -> None:
    rewrite(victim, text)
    with pytest.raises(CheckpointError, match=rf"manifest.json cannot be used: .*({message})"):
        Checkpoint(victim)


def test_a_huge_manifest_is_refused_unread(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match="more than 100 bytes"):
        Checkpoint(victim)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match="save less state"):
        seal(b"{" + b" " * 100 + b"}")


def newer(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest as a later version might write it: another format, and fields that this one does not know."""
    return {**content, "format": "weft-checkpoint-2", "compression": "zstd"}


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_newer_format_is_refused_and_is_no_damage(victim: Path, is_sealed: bool) -> None:
    content = newer(document(victim))
    if is_sealed:
        rewrite(victim, content)
    else:  # or sealed in another way
        (victim / MANIFEST).write_text(json.dumps({"version": 2, **content, "blake3": "0" * 64}))
    with pytest.raises(
        FormatError, match=r"format 'weft-checkpoint-2' is unknown.*reads 'weft-checkpoint-1'"
    ) as raised:
        Checkpoint(victim)
    assert not isinstance(raised.value, DamagedError)
    assert str(victim / MANIFEST) in str(raised.value)


def test_a_damaged_format_is_damage(victim: Path) -> None:
    path = victim / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"weft-checkpoint-1", b"weft-checkpoint-3"))
    with pytest.raises(DamagedError, match="do not match its own SHA-256"):
        Checkpoint(victim)


HOST_ERRORS = [
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError(errno.EMFILE, "Too many open files"),
    OSError("Stale file handle (os error 116)"),
    MemoryError("Cannot allocate memory (os error 12)"),
    RuntimeError("unable to mmap 320 bytes from file <rank-00000.safetensors>: Cannot allocate memory (12)"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", HOST_ERRORS, ids=str)
def test_what_a_host_cannot_read_now_is_no_damage(
    victim: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(load, "safe_open", fail)
    with pytest.raises(
        CheckpointError, match=r"rank-0000.* cannot be read on this host now: .*is left as it is"
    ) as open_:
        Checkpoint(victim)
    assert not isinstance(open_.value, DamagedError)
    if isinstance(error, OSError):
        monkeypatch.setattr(Path, "read_bytes", fail)
        with pytest.raises(CheckpointError, match=r"manifest.json cannot be read on this host now") as read:
            Checkpoint(victim)
        assert not isinstance(read.value, DamagedError)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), RuntimeError("[enforce fail] header (12)")], ids=str
)
def test_what_a_file_system_has_lost_is_damage(victim: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(load, "safe_open", fail)
    with pytest.raises(DamagedError):
        Checkpoint(victim)


def test_too_little_memory_to_map_a_file_is_no_damage(tmp_path: Path) -> None:
    """The real thing: address space for the manifest, and not for the pieces."""
    one(tmp_path).save(1, [piece(torch.ones(30_000_000))], {}, asynchronous=False)

    def rank(_: int) -> str:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, resource.RLIM_INFINITY))
        try:
            Checkpoint(tmp_path / "step-00000001")
        except CheckpointError as error:
            return type(error).__name__
        return "it was read"

    assert run_local(rank, 1) == ["CheckpointError"]


def test_advice_knows_whether_the_checkpoint_before_is_the_one_that_was_there(victim: Path) -> None:
    before, name = victim.with_name("step-00000001"), "rank-00001.safetensors"
    (victim / name).write_bytes(b"")
    with pytest.raises(DamagedError, match=f"use the previous checkpoint {before}$"):
        Checkpoint(victim)
    content = document(before)
    rewrite(before, {**content, "state": {**content["state"], "learning_rate": 1.0}})
    with pytest.raises(DamagedError, match=f"{before} is not the one that this was saved after"):
        Checkpoint(victim)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def mutable(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    copy = tmp_path_factory.mktemp("mutable") / "copy"
    shutil.copytree(small, copy)
    return copy / "step-00000002", document(copy / "step-00000002")


@settings(max_examples=3 * settings.default.max_examples)
@given(data=st.data())
def test_a_mutated_manifest_raises_nothing_but_checkpoint_errors(
    mutable: tuple[Path, dict[str, Any]], data: st.DataObject
) -> None:
    path, original = mutable
    content = json.loads(json.dumps(original))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(list(places(content))))
        match data.draw(st.sampled_from(["replace", "near", "delete", "double"])):
            case "near" if type(container[key]) is int:
                container[key] += data.draw(st.sampled_from([-1, 1, 4, -4, 2**63]))
            case "delete":
                del container[key]
            case "double" if isinstance(container, list):
                container.append(container[key])
            case _:
                container[key] = data.draw(json_values)
        if not list(places(content)):
            break
    rewrite(path, content)
    try:
        read_all(path)
    except CheckpointError:
        return
    # What was accepted differs in nothing but order, names and what the caller may store freely.
    assert substance(content) == substance(original)


def substance(content: dict[str, Any]) -> tuple[Any, ...]:
    """What a manifest says about bytes, without names and order."""
    tensors = sorted(
        (tensor["dtype"], tensor["shape"], sorted(json.dumps(piece, sort_keys=True) for piece in tensor["pieces"]))
        for tensor in content["tensors"]
    )
    return content["format"], content["step"], content["files"], tensors


@settings(max_examples=2 * settings.default.max_examples)
@given(raw=st.binary(max_size=200) | st.text().map(str.encode))
def test_random_bytes_are_refused(mutable: tuple[Path, dict[str, Any]], raw: bytes) -> None:
    path, _ = mutable
    for content in (raw, seal(b"{" + raw)):
        (path / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match=MANIFEST):
            Checkpoint(path)
