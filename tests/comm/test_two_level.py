"""Two-level collectives: the order and the bits of the flat ones on simulated nodes, and traffic as predicted.

Payloads are stamped with their rank and place, so that a right size in a wrong order is found. The negative controls
leave out the permute or swap the levels, and both the stamps and the oracle must say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import models_for_tests as models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nodes_for_tests import SMALL, WIDE, compared, payload, wrong_results
from runs_for_tests import make_run, write_run_file
from torch import Tensor, nn

from weft.cluster.collective_choice import Levels
from weft.cluster.hardware import Cluster, Link, local_cluster
from weft.comm import (
    Axis,
    Pending,
    Traffic,
    add_traffic,
    all_gather,
    all_reduce,
    barrier,
    collectives,
    expand,
    reduce_scatter,
)
from weft.comm import hierarchical as two_level
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh, level_degrees
from weft.models import Decoder, DecoderConfig
from weft.plan import Context, Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.planner.predict import _communication_seconds, predict, run_cluster
from weft.proof.prove import ProofReport, verify, verify_run
from weft.train import setup

pytestmark = pytest.mark.processes

NODES = [(2, 2), (4, 2), (2, 4), (3, 2), (2, 3)]  # (nodes, ranks in each)
SIZES = [1, 3, 5, 8, 16, 17, 1000]
PAYLOADS = [*product(SIZES, [torch.int64]), *product([77], WIDE + SMALL)]


def two_levels(num_nodes: int, num_local: int) -> Axis:
    """An axis over all ranks, of which runs of `num_local` are nodes."""
    axis = Mesh(Plan(data=num_nodes * num_local, hierarchical=True), ranks_per_node=num_local)["data"]
    assert axis.levels is not None
    return axis


def wrong_orders(axis: Axis, payloads: Iterable[tuple[int, torch.dtype]]) -> list[str]:
    """The operations that differ from what the stamps say, to the bit: the two-level ones, or even the flat ones."""
    given, levels = list(payloads), {"two-level": axis, "flat": replace(axis, levels=None)}
    return [f"{level} {line}" for level, over in levels.items() for line in wrong_results(over, given)]


@pytest.mark.parametrize(("num_nodes", "num_local"), NODES)
@pytest.mark.sampled(2)
def test_every_element_comes_where_the_flat_collective_puts_it(num_nodes: int, num_local: int) -> None:
    def rank(_: int) -> list[str]:
        return wrong_orders(two_levels(num_nodes, num_local), PAYLOADS)

    assert run_local(rank, num_nodes * num_local) == [[]] * (num_nodes * num_local)


@pytest.mark.parametrize("level", ["node", "local"])
def test_a_level_of_degree_1_says_nothing_and_changes_nothing(level: str) -> None:
    def rank(_: int) -> list[Any]:
        whole = Mesh(Plan(data=3))["data"]
        alone = Axis(f"data/{level}", 1, 0, None, whole.ledger)
        other = replace(whole, name="data/other")
        axis = replace(whole, levels=(alone, other) if level == "node" else (other, alone))
        wrong = wrong_orders(axis, product([1, 5, 50], [torch.int64]))
        return [wrong, [key for key, _ in axis.ledger if key[0] == alone.name]]

    assert run_local(rank, 3) == [[[], []]] * 3


def test_parts_inside_the_whole_and_tensors_of_several_dims() -> None:
    def rank(index: int) -> list[bool]:
        axis = two_levels(2, 2)
        # [ranks, 3, 5]: our part is our place in the whole, as flat buffers have it
        whole = torch.full((4, 3, 5), -1, dtype=torch.int64)
        whole[index] = payload(15, index, torch.int64).view(3, 5)
        all_gather(whole, whole[index], axis).wait()
        gathered = torch.stack([payload(15, other, torch.int64).view(3, 5) for other in range(4)])
        mine = whole * (index + 1)
        reduce_scatter(mine[index], mine, axis).wait()
        summed = torch.full((5, 7), index + 1)
        all_reduce(summed, axis).wait()
        return [
            torch.equal(whole, gathered),
            torch.equal(mine[index], gathered[index] * 10),
            bool((summed == 10).all()),
        ]

    assert run_local(rank, 4) == [[True] * 3] * 4


def test_several_operations_under_way_and_waited_for_in_another_order() -> None:
    def total_of(size: int) -> Tensor:
        return torch.stack([payload(size, rank, torch.int64) for rank in range(4)]).sum(0)

    def rank(index: int) -> list[bool]:
        axis = two_levels(2, 2)
        first, second = torch.empty(400, dtype=torch.int64), torch.empty(12, dtype=torch.int64)
        reduced, total = torch.empty(100, dtype=torch.int64), payload(101, index, torch.int64)
        under_way = [
            all_gather(first, payload(100, index, torch.int64), axis),
            all_gather(second, payload(3, index + 10, torch.int64), axis),
            reduce_scatter(reduced, payload(400, index, torch.int64), axis),
            all_reduce(total, axis),
        ]
        for position in (1, 3, 0, 2, 0):  # the same order on all ranks; one is waited for twice
            under_way[position].wait()
        return [
            torch.equal(first, torch.cat([payload(100, other, torch.int64) for other in range(4)])),
            torch.equal(second, torch.cat([payload(3, other + 10, torch.int64) for other in range(4)])),
            torch.equal(reduced, total_of(400)[100 * index :][:100]),
            torch.equal(total, total_of(101)),
        ]

    assert run_local(rank, 4) == [[True] * 4] * 4


# --- traffic


@pytest.mark.parametrize(("num_nodes", "num_local"), NODES)
def test_the_ledger_shows_both_levels_as_predicted(num_nodes: int, num_local: int) -> None:
    degree = num_nodes * num_local

    def rank(_: int) -> list[Any]:
        axis = two_levels(num_nodes, num_local)
        for over in (axis, replace(axis, name="flat", levels=None)):
            for size, dtype in product(SIZES, (torch.float64, torch.float16)):
                part, whole = torch.zeros(size, dtype=dtype), torch.zeros(size * degree, dtype=dtype)
                for pending in (
                    all_gather(whole, part, over),
                    reduce_scatter(part, whole, over),
                    all_reduce(part, over),
                    collectives.broadcast(part, over),
                ):
                    pending.wait()
        entries = axis.ledger.entries()
        flat = {("data", operation): value for (name, operation), value in entries.items() if name == "flat"}
        counted = {key: value for key, value in entries.items() if key[0] != "flat"}
        predicted = expand(flat, {"data": Levels(num_nodes, num_local)})
        return [counted == predicted, sorted({name for name, _ in counted})]

    assert run_local(rank, degree) == [[True, ["data", "data/local", "data/node"]]] * degree


def test_bytes_by_level() -> None:
    # 8 ranks in 2 nodes of 4. 100 bytes are less than 16 for each rank; 200 are padded to a multiple of 4 · 16.
    flat = {
        ("data", "all_gather"): Traffic(2, 1600),
        ("data", "reduce_scatter"): Traffic(1, 320),
        ("data", "all_reduce"): Traffic(2, 200) + Traffic(1, 200) + Traffic(1, 128),
        ("data", "send"): Traffic(1, 7),
        ("x", "all_gather"): Traffic(1, 64),
    }
    assert expand(flat, {"data": Levels(2, 4)}) == {
        ("data", "all_reduce"): Traffic(2, 200),
        ("data", "send"): Traffic(1, 7),
        ("data/local", "all_gather"): Traffic(2, 1600) + Traffic(1, 256) + Traffic(1, 128),
        ("data/local", "reduce_scatter"): Traffic(1, 320) + Traffic(1, 256) + Traffic(1, 128),
        ("data/node", "all_gather"): Traffic(2, 400),
        ("data/node", "all_reduce"): Traffic(1, 64) + Traffic(1, 32),
        ("data/node", "reduce_scatter"): Traffic(1, 80),
        ("x", "all_gather"): Traffic(1, 64),
    }


operations = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"])
sizes = st.dictionaries(st.integers(0, 10_000).map(lambda units: units * 48), st.integers(1, 9), min_size=1, max_size=4)
traffics = st.dictionaries(
    st.tuples(st.sampled_from(["data", "shard"]), operations),
    sizes.map(lambda found: Traffic(sum(found.values()), sum(size * n for size, n in found.items()), found)),
)


@given(traffics, traffics, st.sampled_from([(2, 2), (2, 3), (4, 4)]))
def test_expanding_is_linear_and_leaves_other_axes_alone(one: Any, other: Any, degrees: tuple[int, int]) -> None:
    levels = Levels(*degrees)
    both = expand(add_traffic(one, other), {"data": levels})
    assert both == add_traffic(expand(one, {"data": levels}), expand(other, {"data": levels}))
    assert expand(one, {}) == add_traffic(one)
    assert {key: value for key, value in both.items() if key[0] == "shard"} == {
        key: value for key, value in add_traffic(one, other).items() if key[0] == "shard"
    }
    equal = ("data/local", "all_to_all"), ("data/node", "all_to_all")
    assert both.get(equal[0]) == both.get(equal[1])
    local, node = (
        sum(v.num_bytes for k, v in both.items() if k[0] == f"data/{level}" and k not in equal)
        for level in ("local", "node")
    )
    twice = sum(v.num_bytes for k, v in both.items() if k == ("data/node", "all_reduce"))
    assert local == (node + twice) * degrees[1]  # an all-reduce passes inside a node twice


def test_traffic_knows_the_size_of_each_call() -> None:
    mixed = Traffic(2, 16) + Traffic(1, 8) * 3 + Traffic(1, 5)
    assert (mixed.calls, mixed.num_bytes, mixed.sizes) == (6, 45, {8: 5, 5: 1})
    assert mixed != Traffic(6, 48)
    assert Traffic() + mixed == mixed
    with pytest.raises(AssertionError):
        Traffic(2, 17)


def test_levels_are_told_on_their_own_links() -> None:
    node = replace(
        local_cluster(4).node, intra=Link("inside", 400e9, 1e-6), inter=Link("between", 40e9, 1e-5, num_nics=4)
    )
    plan, cluster = Plan(data=8, hierarchical=True), Cluster("two", node, 2)
    num_bytes = 1 << 20
    flat = {("data", "all_gather"): Traffic(1, num_bytes)}
    seconds = _communication_seconds(expand(flat, level_degrees(plan, 4)), plan, cluster)
    # Each of the 4 ranks of a node has a quarter of its NICs, and gathers a quarter of the bytes between nodes.
    assert seconds == pytest.approx(
        {"data/node": 1e-5 + num_bytes / 4 / 2 / 10e9, "data/local": 3e-6 + num_bytes * 3 / 4 / 400e9}
    )


# --- the oracle


def check(plan: Plan, ranks_per_node: int) -> ProofReport:
    """Verify a decoder under a plan on simulated nodes."""
    plan = replace(plan, hierarchical=True)
    return verify(models.tied_decoder, models.token_batch, plan, ranks_per_node=ranks_per_node)


def check_even(plan: Plan) -> ProofReport:
    """Verify, on nodes of two ranks, a decoder of which context and x take equal parts."""

    def decoder() -> nn.Module:
        config = DecoderConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        return Decoder(config)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return verify(decoder, batch, replace(plan, hierarchical=True), ranks_per_node=2)


def test_data_over_two_nodes() -> None:
    assert compared(check(Plan(data=4, micro_batch=1), 2).require()) == {
        "data/local all_gather",
        "data/local reduce_scatter",
        "data/node all_reduce",
        "losses all_reduce",
        "tokens all_reduce",
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shard_over_two_nodes(stage: Any) -> None:
    assert compared(check(Plan(shard=Shard(4, stage)), 2).require()) == {
        "shard/local all_gather",
        "shard/local reduce_scatter",
        "shard/node all_gather",
        "shard/node reduce_scatter",
        "losses all_reduce",
        "state all_reduce",
        "tokens all_reduce",
    }


def test_data_and_shard_over_four_nodes() -> None:
    report = check(Plan(data=2, shard=Shard(4, 3)), 2).require()
    assert {"data all_reduce", "shard/node all_gather", "shard/local reduce_scatter"} <= compared(report)


def test_data_and_shard_over_two_nodes_that_hold_shard() -> None:
    # Only the joint axes cross nodes, and they only tell numbers.
    assert not [line for line in compared(check(Plan(data=2, shard=Shard(4, 3)), 4).require()) if "/" in line]


def test_context_and_x_over_two_nodes() -> None:
    report = check_even(Plan(context=Context(4))).require()
    assert {"context/node all_reduce", "context send"} <= compared(report)
    report = check_even(Plan(tensor=TensorPlan(4, sequence=True))).require()
    assert {"x/node all_gather", "x/local reduce_scatter"} <= compared(report)


# --- runs


def test_a_run_takes_its_nodes_from_the_launcher_and_is_predicted_so(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "run", "plan.data=4", "plan.hierarchical=true", "train.device=cpu")

    def rank(index: int) -> list[str]:
        with (  # the ranks are in a process group already
            patch.object(setup, "init_process_group", lambda *_: torch.device("cpu")),
            patch.object(setup, "shutdown", lambda: None),
            setup.world(run, RankInfo(index, 4, index % 2, 2, 2, "torchrun")) as mesh,
        ):
            levels = mesh["data"].levels
            barrier()
        return [axis.name for axis in levels] if levels else []

    assert run_local(rank, 4) == [["data/node", "data/local"]] * 4
    prediction = predict(run, run_cluster(run, num_hosts=2))
    assert set(prediction.traffic) == {
        ("data/local", "all_gather"),
        ("data/local", "reduce_scatter"),
        ("data/node", "all_reduce"),
        ("tokens", "all_reduce"),
        ("losses", "all_reduce"),
    }
    assert set(prediction.communication_seconds) == {"data/local", "data/node", "tokens", "losses"}
    flat = {("data", "all_reduce"), ("tokens", "all_reduce"), ("losses", "all_reduce")}
    assert set(predict(run, run_cluster(run)).traffic) == flat


def test_a_runs_plan_is_verified_on_the_nodes_of_its_cluster(tmp_path: Path) -> None:
    given = ["plan.data=4", "plan.hierarchical=true", "train.device=cpu"]
    run_file = write_run_file(tmp_path)
    assert "data/node all_reduce" in compared(verify_run(make_run(run_file, "a", *given, "cluster=h100:2x2")).require())
    assert "data all_reduce" in compared(verify_run(make_run(run_file, "b", *given)).require())


# --- negative controls


def without_permute(whole: Tensor, part: Tensor, between: Axis, inside: Axis, _: str) -> Iterator[Pending]:
    of_nodes = part.new_empty(between.degree * part.numel())
    yield collectives.all_gather(of_nodes, part.view(-1), between)
    yield collectives.all_gather(whole.view(-1), of_nodes, inside)


def scatter_without_permute(part: Tensor, whole: Tensor, between: Axis, inside: Axis, _: str) -> Iterator[Pending]:
    of_nodes = part.new_empty(between.degree * part.numel())
    yield collectives.reduce_scatter(of_nodes, whole.view(-1), inside)
    yield collectives.reduce_scatter(part.view(-1), of_nodes, between)


def swapped(original: Any) -> Any:
    def exchanged(first: Tensor, second: Tensor, between: Axis, inside: Axis, algorithm: str) -> Iterator[Pending]:
        return original(first, second, inside, between, algorithm)  # type: ignore[no-any-return]

    return exchanged


BROKEN = {
    "gather without permute": ("_all_gather", without_permute, False),
    "gather inside first": ("_all_gather", swapped(two_level._all_gather), True),
    "scatter without permute": ("_reduce_scatter", scatter_without_permute, False),
    "scatter between first": ("_reduce_scatter", swapped(two_level._reduce_scatter), True),
}


@pytest.mark.parametrize(("name", "replacement", "bytes_differ"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.sampled(2)
def test_finds_parts_in_the_wrong_order(
    monkeypatch: pytest.MonkeyPatch, name: str, replacement: Any, bytes_differ: bool
) -> None:
    monkeypatch.setattr(two_level, name, replacement)
    wrong = run_local(lambda rank: wrong_orders(two_levels(2, 2), product([1, 5], [torch.int64])), 4)
    # Ranks 0 and 3 have their part of a sum at the right place all the same.
    assert {line.split(" of ")[0] for line in wrong[1]} == {f"two-level {name.removeprefix('_')}"}
    report = check(Plan(shard=Shard(4, 3)), 2)
    assert not report.passed
    failed = {line.what for line in report.checks if not line.passed}
    assert "worst parameter after the steps" in failed
    assert any(line.startswith("traffic") for line in failed) == bytes_differ


def test_finds_an_all_reduce_that_stays_inside_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(tensor: Tensor, between: Axis, inside: Axis, reduction: Any, _: str) -> Iterator[Pending]:
        yield collectives.all_reduce(tensor, inside, reduction)

    monkeypatch.setattr(two_level, "_all_reduce", alone)
    failed = {line.what for line in check(Plan(data=4), 2).checks if not line.passed}
    assert {"worst gradient", "traffic: data/node all_reduce", "traffic: data/local all_reduce"} <= failed
