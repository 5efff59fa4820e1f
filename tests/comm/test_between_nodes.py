"""Rings and recursive doubling between simulated nodes: order, bits, messages, traffic as predicted, proofs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil, log2
from typing import Any

import models_for_tests as models
import pytest
import torch
from nodes_for_tests import SMALL, WIDE, compared, payload, wrong_results
from torch import Tensor

from weft.bench.links import LinkOptions, LinkRow, bench_rank, measured_collectives, row_from_json
from weft.cluster.collective_choice import ALGORITHMS as CHOICES
from weft.cluster.collective_choice import OPERATIONS, Levels
from weft.cluster.communication import Communication
from weft.cluster.hardware import AxisLink, Cluster, Link, MeasuredCollective, local_cluster, ring_seconds
from weft.comm import Axis, Ledger, all_gather, all_reduce, all_to_all, expand, node_messages, reduce_scatter
from weft.comm.recorder import HostTimer
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh, level_axes
from weft.plan import Context, Plan, Shard
from weft.proof.prove import ProofReport, verify

pytestmark = pytest.mark.processes

DTYPES = WIDE + SMALL
SIZES = [1, 3, 17]
ALGORITHMS = ("library", "ring", "doubling")


def axis_of(num_nodes: int, num_local: int, between: Any, cluster: Cluster | None = None) -> Axis:
    """An axis over all ranks, of which runs of `num_local` are nodes."""
    plan = Plan(data=num_nodes * num_local, hierarchical=True, communication=Communication(between))
    return Mesh(plan, ranks_per_node=num_local, cluster=cluster)["data"]


def differences(axis: Axis, sizes: list[int], dtypes: list[torch.dtype]) -> list[str]:
    """What is wrong with operations over the axis."""
    return wrong_results(axis, [*product(sizes, [torch.int64]), *product([13], dtypes)])


def messages_of(axis: Axis) -> dict[str, int]:
    """The messages between nodes of one operation each."""
    found, part, whole = {}, torch.zeros(64), torch.zeros(64 * axis.degree)
    operations = {
        "all_gather": lambda: all_gather(whole, part, axis),
        "reduce_scatter": lambda: reduce_scatter(part, whole, axis),
        "all_reduce": lambda: all_reduce(whole, axis),
        "all_to_all": lambda: all_to_all(torch.empty_like(whole), whole, axis),
    }
    for name, operation in operations.items():
        axis.ledger.clear()
        operation().wait()
        entries = axis.ledger.entries()
        found[name] = entries["data/node", "send"].calls if ("data/node", "send") in entries else 0
    return found


def is_predicted(axis: Axis) -> bool:
    """Whether the ledger counts what `expand` makes of the flat calls."""
    counts = []
    for over in (axis, replace(axis, name="data", levels=None)):
        axis.ledger.clear()
        for size, dtype in product((1, 5, 33), (torch.float64, torch.float16)):
            part, whole = torch.zeros(size, dtype=dtype), torch.zeros(size * axis.degree, dtype=dtype)
            for pending in (
                all_gather(whole, part, over),
                reduce_scatter(part, whole, over),
                all_reduce(part, over),
                all_to_all(torch.empty_like(whole), whole, over),
            ):
                pending.wait()
        counts.append(axis.ledger.entries())
    assert axis.choice is not None
    return counts[0] == expand(counts[1], {"data": axis.choice})


def checks_of(num_nodes: int, num_local: int, sizes: list[int], dtypes: list[torch.dtype]) -> list[str]:
    """What is wrong on this rank with any algorithm on such nodes."""
    wrong, log = [], ceil(log2(num_nodes))
    for between in ALGORITHMS:
        axis = axis_of(num_nodes, num_local, between)
        if axis.levels is None:
            assert num_nodes == 1 or (num_local == 1 and between == "library")
            continue
        wrong += [f"{between}: {line}" for line in differences(axis, sizes, dtypes)]
        count = {"library": 0, "ring": num_nodes - 1, "doubling": log}[between]
        expected = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), count)
        found = messages_of(axis)
        if found != {**expected, "all_reduce": 2 * count}:
            wrong.append(f"{between}: messages {found}")
        if not is_predicted(axis):
            wrong.append(f"{between}: traffic is not as predicted")
    return wrong


def test_on_six_ranks_every_element_comes_to_its_place() -> None:
    """3 × 2 and 2 × 3 nodes × ranks in one start of ranks, and a control that must fail."""

    def rank(index: int) -> list[Any]:
        wrong = [line for shape in ((3, 2), (2, 3)) for line in checks_of(*shape, SIZES, DTYPES)]
        wrong += repeated([axis_of(3, 2, between) for between in ALGORITHMS], 96)
        rotated, node_messages._rotated = node_messages._rotated, lambda blocks, by: blocks.roll(-by, 0)
        control = differences(axis_of(3, 2, "doubling"), [5], [])
        repeats = repeated([axis_of(3, 2, "doubling")], 32)
        node_messages._rotated = rotated
        return [wrong, sorted(line.split(" ")[0] for line in control), len(repeats)]

    found = run_local(rank, 6, 240.0)
    assert [wrong for wrong, _, _ in found] == [[]] * 6
    assert sum(num_wrong for _, _, num_wrong in found) > 0
    assert {name for _, control, _ in found for name in control} == {"all_gather", "all_to_all", "reduce_scatter"}


@pytest.mark.soak
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("num_local", [1, 2, 3, 4])
def test_on_all_shapes_of_up_to_sixteen_ranks(num_nodes: int, num_local: int) -> None:
    if num_nodes * num_local == 1:
        return

    def rank(_: int) -> list[str]:
        return checks_of(num_nodes, num_local, [1, 2, 3, 5, 8, 16, 17, 100, 1000, 65_537], DTYPES)

    assert run_local(rank, num_nodes * num_local, 500.0) == [[]] * (num_nodes * num_local)


def repeated(axes: list[Axis], num_repeats: int) -> list[str]:
    """The repeats whose result differs in any bit from what the payloads say, over operations, types and sizes in turn.

    Sums of floats with no exact result must have the bits of their first repeat, where the order of additions follows
    from the rounds and not from arrivals.
    """
    wrong, first = [], dict[tuple[int, int], Tensor]()
    payloads = [*product((1, 17, 33), (torch.int64, torch.uint8)), (13, torch.int32), (101, torch.float32)]
    for repeat in range(num_repeats):
        which = repeat % len(axes)
        axis, (size, dtype) = axes[which], payloads[repeat // len(axes) % len(payloads)]
        degree, index, number = axis.degree, axis.index, repeat // (len(axes) * len(payloads)) % len(OPERATIONS)
        parts = [payload(size * degree, (rank + repeat) % 97, dtype) for rank in range(degree)]
        if dtype == torch.float32:
            total = torch.randn(size, generator=torch.Generator().manual_seed(index))
            all_reduce(total, axis).wait()
            if axis.choice is not None and axis.choice.between != "library":
                wrong += [] if first.setdefault((which, size), total).equal(total) else [f"{repeat}: float sum"]
            continue
        if OPERATIONS[number] == "all_gather":
            found = torch.zeros(size * degree, dtype=dtype)
            all_gather(found, parts[index][:size], axis).wait()
            right = torch.cat([one[:size] for one in parts])
        elif OPERATIONS[number] == "reduce_scatter":
            found = torch.zeros(size, dtype=dtype)
            reduce_scatter(found, parts[index].clone(), axis).wait()
            right = torch.stack(parts).sum(0, dtype=dtype).view(degree, size)[index]
        elif OPERATIONS[number] == "all_to_all":
            found = torch.zeros(size * degree, dtype=dtype)
            all_to_all(found, parts[index], axis).wait()
            right = torch.cat([one.view(degree, size)[index] for one in parts])
        else:
            found = parts[index].clone()
            all_reduce(found, axis).wait()
            right = torch.stack(parts).sum(0, dtype=dtype)
        if not found.equal(right):
            wrong.append(f"{repeat}: {OPERATIONS[number]} of {size} × {dtype}")
    return wrong


@pytest.mark.soak
@pytest.mark.parametrize(("num_nodes", "num_local"), [one for one in product((1, 2, 3, 4), repeat=2) if one != (1, 1)])
def test_ten_thousand_repeats_are_equal_to_the_bit(num_nodes: int, num_local: int) -> None:
    """Checked on every repeat; the control of the comparison is in the test on six ranks."""

    def rank(_: int) -> list[str]:
        return repeated([axis_of(num_nodes, num_local, between) for between in ALGORITHMS], 10_000)

    assert run_local(rank, num_nodes * num_local, 6_000.0) == [[]] * (num_nodes * num_local)


def check(plan: Plan, between: Any, ranks_per_node: int = 2) -> ProofReport:
    plan = replace(plan, hierarchical=True, communication=Communication(between))
    return verify(models.tied_decoder, models.token_batch, plan, ranks_per_node=ranks_per_node)


def test_shard_by_doubling_is_proved() -> None:
    found = compared(check(Plan(shard=Shard(4, 3)), "doubling").require())
    assert {"shard/node send", "shard/local all_gather", "shard/local reduce_scatter"} <= found


def test_data_over_two_nodes_of_one_rank_is_proved_and_a_lost_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "data/node send" in compared(check(Plan(data=2), "ring", 1).require())
    original = node_messages.gather_rounds
    monkeypatch.setattr(node_messages, "gather_rounds", lambda algorithm, n: original(algorithm, n)[:-1])
    failed = {line.what for line in check(Plan(data=2), "ring", 1).checks if not line.passed}
    assert {"worst gradient", "traffic: data/node send"} <= failed


@pytest.mark.soak
@pytest.mark.parametrize("between", ["ring", "doubling"])
def test_every_axis_that_uses_them_is_proved(between: str) -> None:
    for plan in (
        Plan(data=4, micro_batch=1),
        Plan(shard=Shard(4, 1)),
        Plan(shard=Shard(4, 2)),
        Plan(data=2, shard=Shard(4, 3)),
        Plan(context=Context(2, "all-to-all"), data=2),
        Plan(context=Context(4)),
    ):
        check(plan, between).require()
    check(Plan(context=Context(2, "all-to-all")), between, 1).require()


def test_the_fastest_is_chosen_from_measured_times_and_counted_as_predicted() -> None:
    """A table in which doubling is fastest for small gathers, and the flat one for large ones."""
    rows = [
        MeasuredCollective(operation, algorithm, 2, 2, (64, 1 << 20), (first, last))  # type: ignore[arg-type]
        for operation in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for algorithm, first, last in (
            ("flat", 4e-3, 1e-2),
            ("library", 3e-3, 3e-2),
            ("ring", 2e-3, 4e-2),
            ("doubling", 1e-3, 5e-2),
        )
    ]
    node = replace(local_cluster(2, on_cpu=True).node, inter=Link("far", 1e9, 1e-3))
    cluster = Cluster("two", node, 2, tuple(rows))

    def rank(index: int) -> list[Any]:
        axis = axis_of(2, 2, "fastest", cluster)
        small, large = (axis.choice.algorithm("all_gather", size) for size in (256, 1 << 22))
        return [small, large, differences(axis, [1, 17, 1 << 17], [torch.float32]), is_predicted(axis)]

    assert run_local(rank, 4, 120.0) == [["doubling", "flat", [], True]] * 4


# --- the choice under injected latency

MEASURED, BETWEEN = (1 << 8, 1 << 18), (1 << 13,)


class SlowNodes:
    """A clock that each call over a link advances: latency and bytes are injected, and no time is slept."""

    def __init__(self, num_nodes: int, num_local: int, latency: float, bandwidth: float) -> None:
        self.degrees = {"node": num_nodes, "local": num_local}
        self.latency, self.bandwidth, self.now = latency, bandwidth, 0.0
        self._record = Ledger.record

    def record(self, ledger: Ledger, axis: str, operation: str, num_bytes: int) -> None:
        self._record(ledger, axis, operation, num_bytes)
        level = axis.partition("/")[2]
        degree = self.degrees.get(level, self.degrees["node"] * self.degrees["local"])
        slow = 100 if level == "local" else 1  # links inside a node are so much faster
        self.now += ring_seconds(operation, num_bytes, degree, self.bandwidth * slow, self.latency / slow)

    def measure(self, axes: Any, sizes: tuple[int, ...]) -> list[LinkRow]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "record", lambda ledger, *call: self.record(ledger, *call))
            patch.setattr("weft.bench.links.HostTimer", lambda: HostTimer(lambda: self.now))
            for name, value in (("links._BLOCK_SECONDS", 0.0), ("links._WARM_UP", 1), ("fit.MIN_BLOCKS", 1)):
                patch.setattr(f"weft.bench.{name}", value)  # repeats are equal on this clock
            options = LinkOptions(OPERATIONS, sizes, 0.0, validate=False)
            return [row_from_json(row) for row in bench_rank(options, torch.device("cpu"), axes)]


def distances_from_best(shape: tuple[int, int], axes: Any, latency: float) -> list[Any]:
    """By how much the choice of a measured table is at most slower than the best, for its sizes and one between them;
    the same of a table in which the times of "flat" and "doubling" are exchanged; and the algorithms chosen.
    """
    slow = SlowNodes(*shape, latency, 1e8)
    table = measured_collectives(slow.measure(axes, MEASURED), shape[0])
    other = {"flat": "doubling", "doubling": "flat"}
    spoiled = tuple(replace(one, algorithm=other.get(one.algorithm, one.algorithm)) for one in table)
    links = dict.fromkeys(("", "node", "local"), AxisLink(1.0, 1.0, False))  # not used where times were measured
    times: dict[tuple[str, int], dict[Any, float]] = {}
    for row in slow.measure(axes, (*MEASURED, *BETWEEN)):
        times.setdefault((row.operation, row.num_bytes), {})[row.algorithm] = row.timing.median
    assert all(set(found) == set(CHOICES) for found in times.values())
    answers: list[Any] = []
    for measured in (table, spoiled):
        levels = Levels(*shape, "fastest", links=links, measured=measured)
        chosen = {key: levels.algorithm(*key) for key in times}
        answers.append(max(found[chosen[key]] / min(found.values()) - 1 for key, found in times.items()))
        answers.append(sorted(set(chosen.values())))
    return answers[:3]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (3, 2), (4, 2)])
def test_with_injected_latency_the_choice_is_within_a_tenth_of_the_best(shape: tuple[int, int]) -> None:
    """On links of long and of short latency. The control has a table with exchanged times, and is far off."""

    def rank(_: int) -> list[list[Any]]:
        axes = level_axes(shape[0], torch.device("cpu"))
        return [distances_from_best(shape, axes, latency) for latency in (5e-3, 5e-6)]

    (found, *others) = run_local(rank, shape[0] * shape[1], 240.0)
    assert all(other == found for other in others)
    for distance, used, spoiled in found:
        assert distance < 0.1, used
        assert spoiled > 0.1
