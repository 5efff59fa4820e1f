"""The mesh: who is where, who talks to whom on each axis, joint axis, run of neighbours and level of nodes."""

from __future__ import annotations

import gc
import logging
import re
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm import Axis, all_gather, all_reduce, barrier
from weft.errors import LaunchError
from weft.launch.local_ranks import LocalError, run_local
from weft.mesh import JOINT_AXES, Mesh, level_degrees, ranks_of, rectangle
from weft.plan import AXES, Context, Pipe, Plan, Shard, Tensor

pytestmark = pytest.mark.processes


def peers(axis: Axis) -> list[int]:
    """The world ranks of an axis in its order, as its own collective tells them."""
    whole = torch.empty(axis.degree, dtype=torch.int64)
    all_gather(whole, torch.tensor([dist.get_rank()]), axis).wait()
    return [int(rank) for rank in whole]


# --- coordinates and axes


def test_one_process_needs_no_group() -> None:
    mesh = Mesh(Plan())
    assert mesh.coordinates == dict.fromkeys(AXES, 0)
    assert mesh.is_first
    for name in (*AXES, *JOINT_AXES):
        axis = mesh[name]
        assert (axis.name, axis.degree, axis.index, axis.group, axis.levels) == (name, 1, 0, None, None)
        assert axis.ledger is mesh.ledger


def test_ranks_are_laid_out_with_the_last_axis_fastest() -> None:
    def rank(_: int) -> list[Any]:
        mesh = Mesh(Plan(data=2, shard=Shard(2), tensor=Tensor(2)))
        barrier()  # a rank that ends before others have their groups would break them off
        return [mesh.coordinates, mesh.is_first]

    assert run_local(rank, 8) == [
        [{**dict.fromkeys(AXES, 0), "data": data, "shard": shard, "x": x}, (data, shard, x) == (0, 0, 0)]
        for data, shard, x in product(range(2), repeat=3)
    ]


@pytest.mark.parametrize("plan", [Plan(data=2, shard=Shard(2), hierarchical=True), Plan(pipe=Pipe(2), data=2)])
def test_every_group_has_the_time_out_of_the_run(plan: Plan) -> None:
    """Not torch's 30 minutes: that is how long ranks would wait for one that is stopped."""

    def rank(_: int) -> dict[str, float]:
        mesh = Mesh(plan, ranks_per_node=2)
        axes = [mesh[name] for name in (*AXES, *JOINT_AXES)]
        axes += [one for axis in axes for one in axis.levels or ()]
        axes += [mesh.with_own_group("data", "own"), mesh.part("world:2"), mesh.part("world%2")]
        axes += [one for one in (mesh.among("data", [0, 1], "some"), mesh.pair("data", 0, 1, "pair")) if one]
        barrier()
        groups = {axis.name: axis.group for axis in axes if axis.group is not None}
        cpu = torch.device("cpu")
        return {name: one._get_backend(cpu).options._timeout.total_seconds() for name, one in groups.items()}

    for found in run_local(rank, 4, timeout_seconds=77):
        assert {"data", "batch" if plan.hierarchical else "losses", "world"} < set(found)
        assert ("batch/node" in found) == plan.hierarchical
        assert set(found.values()) == {77 + 30}, found  # run_local's own time-out ends first


def test_axes_talk_to_the_ranks_that_differ_in_them_alone() -> None:
    def rank(_: int) -> dict[str, list[Any]]:
        mesh = Mesh(Plan(data=2, shard=Shard(2), tensor=Tensor(2)))
        barrier()
        return {name: [mesh[name].index, peers(mesh[name])] for name in (*AXES, *JOINT_AXES)}

    # Rank 5 is data 1, shard 0, x 1.
    assert run_local(rank, 8)[5] == {
        "data": [1, [1, 5]],
        "pipe": [0, [5]],
        "shard": [0, [5, 7]],
        "expert": [0, [5]],
        "branch": [0, [5]],
        "rows": [0, [5]],
        "columns": [0, [5]],
        "context": [0, [5]],
        "x": [1, [4, 5]],
        "y": [0, [5]],
        "batch": [2, [1, 3, 5, 7]],
        "tile": [0, [5]],
        "samples": [2, [1, 3, 5, 7]],
        "tokens": [2, [1, 3, 5, 7]],
        "losses": [2, [1, 3, 5, 7]],
        "state": [1, [4, 5, 6, 7]],
        "world": [5, [0, 1, 2, 3, 4, 5, 6, 7]],
    }


def test_joint_axes_share_the_group_of_the_only_axis_that_talks() -> None:
    def rank(_: int) -> bool:
        mesh = Mesh(Plan(shard=Shard(2)))
        barrier()
        return all(mesh[name].group is mesh["shard"].group for name in JOINT_AXES if name != "tile")

    assert run_local(rank, 2) == [True, True]


def test_who_waits_for_a_rank_that_lets_go_learns_of_it_though_the_world_group_is_held(tmp_path: Path) -> None:
    """Ranks with shadows rely on it. Something else holds torch's world group, as default arguments do."""

    def rank(index: int) -> bool:
        mesh, held = Mesh(Plan(pipe=Pipe(2, shadow=True))), dist.group.WORLD
        assert held is not None
        barrier()
        if index == 0:
            with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
                all_reduce(torch.zeros(1), mesh["world"]).wait()
            (tmp_path / "told").touch()
            return True
        mesh.release_groups()
        dist.destroy_process_group()
        gc.collect()
        deadline = time.monotonic() + 20
        while not (tmp_path / "told").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return (tmp_path / "told").exists()

    assert run_local(rank, 2) == [True, True]


def test_the_world_of_ranks_with_shadows_waits_as_long_as_torchs() -> None:
    def rank(_: int) -> list[float]:
        groups = (Mesh(Plan(pipe=Pipe(2, shadow=True)))["world"].group, dist.group.WORLD)
        barrier()
        assert None not in groups
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]

    assert run_local(rank, 2, timeout_seconds=50) == [[80.0, 80.0]] * 2  # `run_local` adds half a minute


@pytest.mark.parametrize(("plan", "found"), [(Plan(data=2), 1), (Plan(data=2, shard=Shard(3, 1)), 2)])
def test_another_number_of_processes_is_refused(plan: Plan, found: int) -> None:
    message = re.escape(
        f"the plan needs {plan.num_ranks} processes ({plan.describe_axes()}) but {found} run; "
        f"start {plan.num_ranks} (torchrun --nproc-per-node {plan.num_ranks} on one machine), or change the plan"
    )
    if found == 1:
        with pytest.raises(LaunchError, match=message):
            Mesh(plan)
        return
    with pytest.raises(LocalError, match=message):
        run_local(lambda rank: Mesh(plan).rank, found)


# --- neighbours


def test_neighbours_are_runs_along_the_axis() -> None:
    def rank(_: int) -> list[Any]:
        mesh = Mesh(Plan(shard=Shard(4), tensor=Tensor(2)))
        first, again, alone = mesh.neighbours("shard", 2), mesh.neighbours("shard", 2), mesh.neighbours("shard", 1)
        assert first.group is again.group
        assert first.name == "shard:2"
        assert (alone.degree, alone.index, alone.group) == (1, 0, None)
        return [first.degree, first.index, peers(first), peers(mesh.neighbours("shard", 4)), peers(alone)]

    assert run_local(rank, 8) == [
        [2, shard % 2, [shard // 2 * 4 + x, shard // 2 * 4 + 2 + x], [x, 2 + x, 4 + x, 6 + x], [shard * 2 + x]]
        for shard, x in product(range(4), range(2))
    ]


# --- nodes

plans = st.builds(
    Plan,
    data=st.integers(1, 4),
    shard=st.builds(Shard, st.integers(1, 4)),
    context=st.builds(Context, st.integers(1, 2)),
    tensor=st.builds(Tensor, st.integers(1, 3), st.integers(1, 2)),
    hierarchical=st.just(True),
)
names = st.sampled_from([*AXES, *JOINT_AXES])


@given(plans, names)
def test_groups_of_an_axis_differ_in_it_alone(plan: Plan, name: str) -> None:
    members = JOINT_AXES.get(name, (name,))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*(range(degree) for degree in plan.degrees.values()))):
        others = tuple(index for axis, index in zip(AXES, place, strict=True) if axis not in members)
        groups.setdefault(others, []).append(rank)
    assert sorted(ranks_of(plan, name).tolist()) == sorted(groups.values())


@given(plans, names, st.integers(1, 12))
@settings(max_examples=3 * settings.default.max_examples)
def test_rectangles_are_groups_with_the_same_places_in_equally_many_nodes(plan: Plan, name: str, size: int) -> None:
    shapes: set[tuple[int, int] | None] = set()
    for group in ranks_of(plan, name).tolist():
        nodes = [{rank % size for rank in group if rank // size == node} for node in {rank // size for rank in group}]
        shapes.add((len(nodes), len(nodes[0])) if all(node == nodes[0] for node in nodes) else None)
    assert rectangle(plan, name, size) == (shapes.pop() if len(shapes) == 1 else None)


def shapes(plan: Plan, ranks_per_node: int) -> dict[str, tuple[int, int]]:
    """The number of nodes, and of ranks in each, of the axes with two levels."""
    found = level_degrees(plan, ranks_per_node)
    return {name: (levels.num_nodes, levels.num_local) for name, levels in found.items()}


def test_which_axes_have_levels() -> None:
    plan = Plan(data=2, shard=Shard(4), hierarchical=True)
    joint = dict.fromkeys(("batch", "samples", "tokens", "losses", "world"), (4, 2))
    assert shapes(plan, 2) == {"shard": (2, 2), "state": (2, 2), **joint}
    assert shapes(plan, 4) == dict.fromkeys(("batch", "samples", "tokens", "losses", "world"), (2, 4))
    for ranks_per_node in (1, 8, None):  # each alone, all in one node, not known
        assert level_degrees(plan, ranks_per_node) == {}
    assert level_degrees(Plan(data=2, shard=Shard(4)), 2) == {}
    assert level_degrees(plan, 3) == {}  # nodes of 3, 3 and 2


def test_levels_talk_between_equal_places_and_inside_nodes() -> None:
    def rank(_: int) -> list[Any]:
        mesh = Mesh(Plan(data=4, tensor=Tensor(2), hierarchical=True), ranks_per_node=4)
        levels = mesh["data"].levels
        assert levels is not None
        assert mesh["x"].levels is None
        told = [[axis.name, axis.degree, axis.index, peers(axis)] for axis in levels]
        assert mesh.ledger.entries().keys() == {("data/node", "all_gather"), ("data/local", "all_gather")}
        return told

    # A node holds data 0 and 1, or data 2 and 3, each with both of x.
    assert run_local(rank, 8) == [
        [
            ["data/node", 2, data // 2, [data % 2 * 2 + x, data % 2 * 2 + 4 + x]],
            ["data/local", 2, data % 2, [data // 2 * 4 + x, data // 2 * 4 + 2 + x]],
        ]
        for data, x in product(range(4), range(2))
    ]


def test_equal_groups_of_levels_are_made_once() -> None:
    def rank(_: int) -> bool:
        mesh = Mesh(Plan(shard=Shard(4), hierarchical=True), ranks_per_node=2)
        barrier()
        shard, world = mesh["shard"].levels, mesh["world"].levels
        assert shard is not None
        assert world is not None
        return all(one.group is other.group and one.name != other.name for one, other in zip(shard, world, strict=True))

    assert run_local(rank, 4) == [True] * 4


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([2, 2, 2, 2], None),
        (
            [3, 3, 3, 3],
            "plan.hierarchical: the ranks of data, batch, samples, tokens, losses, world do not fill equal parts of "
            "nodes of 3; "
            "their collectives stay flat",
        ),
        ([3, 3, 3, 1], "plan.hierarchical: the ranks per node are not known or differ; collectives stay flat"),
        ([None] * 4, "plan.hierarchical: the ranks per node are not known or differ; collectives stay flat"),
    ],
)
def test_nodes_that_are_no_rectangles_stay_flat_and_rank_0_says_so(
    nodes: list[int | None], message: str | None
) -> None:
    def rank(index: int) -> list[Any]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("weft").addHandler(handler)
        mesh = Mesh(Plan(data=4, hierarchical=True), ranks_per_node=nodes[index])
        return [mesh["data"].levels is not None, peers(mesh["data"]), lines]

    silent = [message is None, [0, 1, 2, 3], []]
    assert run_local(rank, 4) == [[*silent[:2], [message] if message else []], silent, silent, silent]
