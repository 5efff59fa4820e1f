"""`weft bench`: fits recover a simulated link, wrong contents are found, and the planner uses what was measured."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands_for_tests import Weft
from runs_for_tests import write_run_file
from torch import Tensor

from weft.bench import machine
from weft.bench.cluster_file import MeasuredMachine, cluster_text
from weft.bench.fit import MAX_BLOCKS, MIN_BLOCKS, LinkFit, Point, Timing, fit_link, fit_pieces, measure
from weft.bench.links import LinkOptions, LinkRow, bus_factor, parse_sizes
from weft.bench.machine import host_link_rates
from weft.bench.operations import OPERATIONS, BenchOperation, Buffers, pattern
from weft.bench.report import backends_table, svg_plot, terminal_plot
from weft.cluster.hardware import load, ring_seconds
from weft.cluster.topology import local_topology
from weft.comm import Axis, Ledger
from weft.errors import ConfigError, CorruptionError, PlanError
from weft.plan import plan_of_degrees

ALPHA, BANDWIDTH = 25e-6, 12e9
SIZES = [4**power for power in range(2, 14)]


def simulated(operation: str, degree: int, noise: float = 0.0) -> list[Point]:
    rng = random.Random(0)
    return [
        Point(
            operation, degree, size, ring_seconds(operation, size, degree, BANDWIDTH, ALPHA) * rng.uniform(1, 1 + noise)
        )
        for size in SIZES
    ]


def test_the_fit_recovers_a_simulated_link() -> None:
    """Of single operations, and of all together over several degrees, with one percent of noise."""
    (fit,) = fit_pieces(simulated("send", 2))
    assert fit.alpha_seconds == pytest.approx(ALPHA, rel=0.02)
    assert 1 / fit.beta_seconds_per_byte == pytest.approx(BANDWIDTH, rel=0.02)
    assert (fit.is_usable, fit.r_squared) == (True, pytest.approx(1.0))
    points = [
        point
        for operation in ("send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
        for degree in (2, 4, 8)
        for point in simulated(operation, degree, noise=0.01)
    ]
    link = fit_link(points)
    assert link.latency_seconds == pytest.approx(ALPHA, rel=0.02)
    assert link.bandwidth_bytes_per_second == pytest.approx(BANDWIDTH, rel=0.02)
    assert link.error < 0.02


def test_a_change_of_protocol_is_two_pieces_and_chaos_is_unusable() -> None:
    def seconds(size: int) -> float:
        return 10e-6 + size / 1e9 if size < 100_000 else 200e-6 + size / 20e9

    small, large = fit_pieces([Point("send", 2, size, seconds(size)) for size in SIZES])
    assert (small.most_bytes, large.most_bytes) == (65536, SIZES[-1])
    assert large.alpha_seconds == pytest.approx(200e-6, rel=0.02)
    rng = random.Random(1)
    wild = fit_pieces([Point("send", 2, size, rng.uniform(1e-6, 1e-2)) for size in SIZES])
    assert not all(fit.is_usable for fit in wild)
    (steep,) = fit_pieces([Point("send", 2, size, 1e-9 * size**2) for size in (1, 2, 4)])
    assert steep.alpha_seconds == 0.0  # the best line would have a latency below zero
    assert steep.beta_seconds_per_byte > 0


def test_measuring_stops_when_it_is_stable_or_time_is_up() -> None:
    assert measure(lambda: [1e-3] * 4, 100).repeats == 4 * MIN_BLOCKS
    rng = random.Random(0)
    assert measure(lambda: [rng.uniform(0.1, 1)], 3.0).repeats < MAX_BLOCKS
    found = measure(lambda: [rng.uniform(1e-9, 1e-6)], 100)
    assert (found.repeats, found.is_stable) == (MAX_BLOCKS, False)
    tail = measure(lambda: [*[1.0] * 199, 9.0], 0)
    assert (tail.median, tail.p99, tail.most) == (1.0, 1.0, 9.0)


# --- contents, on one process: every rank's expected result, and faults in it


def faulty(operation: BenchOperation, fault: Callable[[Tensor], object], rank: int = 1, degree: int = 3) -> None:
    """Check an operation whose transport delivers what is expected with a fault."""

    def run(buffers: Buffers, axis: Axis) -> None:
        wanted = operation.expected(axis.index, axis.degree, buffers.given.numel(), 0)
        assert wanted is not None
        buffers.taken.copy_(wanted)
        fault(buffers.taken)

    axis = Axis("world", degree, rank, None, Ledger())
    replace(operation, run=run).check(operation.buffers(4 * 60, degree, torch.device("cpu")), axis, 0)


CHECKED = [name for name in OPERATIONS if name != "barrier"]


@pytest.mark.parametrize("name", CHECKED)
def test_a_flipped_byte_a_swapped_rank_and_a_stale_buffer_are_found(name: str) -> None:
    operation = OPERATIONS[name]
    rank = 2 if name == "pair_exchange" else 1  # of 3 ranks, rank 1 has no partner there
    faulty(operation, lambda taken: None, rank)  # the right result passes

    def flip(taken: Tensor) -> None:
        taken.view(torch.uint8)[7] ^= 4

    with pytest.raises(CorruptionError, match=rf"{name}: rank {rank} received -?\d+ instead of \d+ at element 1 "):
        faulty(operation, flip, rank)
    with pytest.raises(CorruptionError, match="it was never written"):
        faulty(operation, lambda taken: taken.fill_(-1), rank)
    other = operation.expected(0, 3, operation.buffers(240, 3, torch.device("cpu")).given.numel(), 0)
    if other is not None and name not in ("all_reduce", "all_gather", "broadcast"):  # which are equal on all ranks
        with pytest.raises(CorruptionError):
            faulty(operation, lambda taken: taken.copy_(other), rank)
    if name == "all_gather":
        with pytest.raises(CorruptionError):
            faulty(operation, lambda taken: taken.copy_(taken.roll(taken.numel() // 3)))


def test_borders_come_from_both_neighbours_and_pairs_are_mirrored() -> None:
    halo = OPERATIONS["halo"].expected
    first, middle, last = (halo(rank, 3, 4, 0) for rank in range(3))
    own = [pattern(rank, 4, 0).tolist() for rank in range(3)]
    assert first is not None
    assert middle is not None
    assert last is not None
    assert first.tolist() == [-1, -1, *own[1][:2]]
    assert middle.tolist() == [*own[0][2:], *own[2][:2]]
    assert last.tolist() == [*own[1][2:], -1, -1]
    mirrored = [OPERATIONS["pair_exchange"].expected(rank, 3, 4, 0) for rank in range(3)]
    assert [None if one is None else one.tolist() for one in mirrored] == [own[2], None, own[0]]
    assert OPERATIONS["multi_pair"].expected(2, 3, 4, 0) is None  # an odd number of ranks: the last has no partner


def test_bus_bytes_by_hand() -> None:
    assert [bus_factor("all_reduce", p) for p in (2, 3, 4, 8)] == pytest.approx([1, 4 / 3, 1.5, 1.75])
    assert [bus_factor("all_gather", p) for p in (2, 4)] == [0.5, 0.75]
    assert [bus_factor("broadcast", 4), bus_factor("latency", 2)] == [1, 1]


def test_options_are_refused_in_words() -> None:
    assert parse_sizes("1K:64K") == (1024, 4096, 16384, 65536)
    for text in ("4M:1K", "x", "0:4"):
        with pytest.raises(ConfigError, match=r"e\.g\. 4:4M"):
            parse_sizes(text)
    with pytest.raises(ConfigError, match="did you mean 'all_reduce'"):
        LinkOptions(("all_reduc",))
    assert plan_of_degrees({"data": 2, "x": 2}).degrees["x"] == 2
    with pytest.raises(PlanError, match="'dta' is not an axis; did you mean 'data'"):
        plan_of_degrees({"dta": 2})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no link between host and GPU"):
            host_link_rates()


def test_plots() -> None:
    series = {"send": [(4.0, 10.0), (4096.0, 100.0)], "all_reduce": [(4.0, 20.0), (4096.0, 300.0)]}
    shown = terminal_plot(series)
    assert "o send  x all_reduce" in shown
    assert shown.count("|") == 18
    assert svg_plot(series, "two ranks").count("<polyline") == 2


def test_several_back_ends_are_compared() -> None:
    rows = {
        name: [LinkRow("latency", 2, 64, Timing(seconds, seconds, seconds, seconds, 0.0, 5), 1.0)]
        for name, seconds in (("Gloo", 2e-5), ("MPI", 5e-6))
    }
    assert re.search(r"latency +64 +20\.0 us +5\.0 us +0\.25", backends_table(rows))


# --- the planner


@pytest.mark.processes
def test_ranks_measure_and_the_planner_uses_the_file(
    tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = weft("bench", "links", "--sizes", "64:1K", "--seconds", "0.02", "--svg", tmp_path / "a.svg", "--json")
    rows = left.json["rows"]
    assert {row["operation"] for row in rows} == set(OPERATIONS)
    assert all(row["timing"]["median"] > 0 for row in rows)
    assert "<polyline" in (tmp_path / "a.svg").read_text()
    both = weft(
        *("bench", "links", "--axes", "data=2,shard=2", "--sizes", "64:64", "--seconds", "0.01", "--json"),
        *("--operations", "halo,all_reduce,multi_pair,pair_exchange"),
    ).json["rows"]
    assert {(row["axis"], row["degree"], row["num_groups"]) for row in both} == {("data", 2, 2), ("shard", 2, 2)}
    assert "mpirun -n 2 weft bench links --backend mpi" in weft("bench", "links", "--backend", "mpi").err
    for given in (["--backend", "nccl"], ["--axes", "data"], ["--pinned", "--device", "cuda"]):
        assert weft("bench", "links", *given).status == 2
    link = LinkFit(2e-3, 1e6, 0.1)
    peaks, path = {"fp32": 1e10, "bf16": 1e10}, tmp_path / "m.toml"
    path.write_text(
        cluster_text(MeasuredMachine(1, 2, 10**9, 2 * 10**9, peaks, 1e10, None, link, "Gloo", "2026-01-01"))
    )
    assert load(str(path)).node.intra.latency_seconds == 2e-3
    run_file = write_run_file(tmp_path)
    plans = [weft("plan", run_file, "plan.data=2", "--cluster", one, "--json").json for one in (path, "local")]
    measured, assumed = (plan["seconds"]["communication"]["data"] for plan in plans)
    assert measured > 100 * assumed
    here = local_topology()
    monkeypatch.setattr(
        "weft.cluster.topology.local_topology", lambda: replace(here, num_cpu_cores=here.num_cpu_cores + 1)
    )
    refused = weft("plan", run_file, "plan.data=2", "--cluster", path)
    assert refused.status == 2
    assert f"was measured on another machine: num_cpu_cores = {here.num_cpu_cores} (here" in refused.err


@pytest.mark.processes
def test_rates_of_a_cpu_are_those_of_ranks_that_compute_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its share of the cores, and meets the others while it measures; the result is that of the slowest."""

    def rates(_: torch.device, limit_seconds: float) -> dict[str, float]:
        ranks = torch.ones(1)
        torch.distributed.all_reduce(ranks)  # would wait for ever if only one rank measured
        return {"fp32": float(ranks), "memory": limit_seconds * torch.distributed.get_rank() + torch.get_num_threads()}

    monkeypatch.setattr(machine, "_rates", rates)
    monkeypatch.setattr(machine, "num_cpu_cores", lambda: 7)
    assert machine._rates_of_ranks(3, 10.0) == {"fp32": 3.0, "memory": 2.0}
