"""The mesh: a plan's axes as named process groups. Only this file creates groups, and no mesh is global.

Ranks are numbered in the order of `plan.AXES`, outermost first. Besides each axis there are joint axes, each of which
combines several:

    batch     ranks with different samples
    tile      ranks with different parts of the same images
    samples   both of these, for statistics over the batch
    tokens    ranks with different tokens or pixels, to count targets
    losses    these and different stages, of which the last knows the loss
    state     ranks with different parts of the model, for the gradient norm
    world     all ranks, for decisions to stop
    experts   ranks that the experts of a layer are split over, if `plan.expert_over` adds axes to `expert`

A hierarchical plan gives two levels to every axis that crosses nodes: `data/node` connects ranks with equal local
indices on different nodes, and `data/local` the ranks inside a node. A node is `ranks_per_node` consecutive ranks.
If ranks share devices (`plan.ranks_per_device`), `data/leaders` connects the first ranks of all devices, and
`data/device` the ranks of one device.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft.cluster.collective_choice import Levels
from weft.cluster.communication import Communication
from weft.cluster.hardware import AxisLink, Cluster
from weft.cluster.rounds import Algorithm
from weft.comm import Axis, Ledger, all_reduce
from weft.comm.device_ranks import LEADER, create_page, open_device_ranks
from weft.errors import LaunchError
from weft.health.call_order import call_order
from weft.launch.environment import join_launched
from weft.plan import AXES, Plan, axes_that_split

logger = logging.getLogger("weft")

_JOINT = {  # what the ranks of each joint axis hold different parts of
    "batch": ("samples",),
    "tile": ("pixels",),
    "samples": ("samples", "pixels"),
    "tokens": ("samples", "pixels", "tokens"),
    "losses": ("samples", "pixels", "tokens", "stages"),
    "state": ("stages", "weights"),
}
JOINT_AXES = {**{name: axes_that_split(*what) for name, what in _JOINT.items()}, "world": tuple(AXES)}


def joint_axes(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Returns the axes that each joint axis of a plan combines."""
    if plan.expert_axis == "expert" and not plan.branch.splits_batch:
        return JOINT_AXES
    own = {name: plan.axes_that_split(*what) for name, what in _JOINT.items()}
    experts = {} if plan.expert_axis == "expert" else {"experts": plan.expert_axes}
    return {**JOINT_AXES, **own, **experts}


class Mesh:
    """The plan's axes as one rank sees them. `mesh["shard"]` is an `Axis`.

    If torch.distributed is not initialised, a process that torchrun, srun or mpirun started joins the others, with the
    timeout of torch; `device` "cuda" is then its own GPU. `ranks_per_node` is for hierarchical plans, and `cluster` has
    the links by which they choose the fastest collectives; all ranks must give the same.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device | str = "cpu",
        ranks_per_node: int | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.plan = plan
        self._joint = joint_axes(plan)
        self.device = torch.device(device)
        if plan.num_ranks > 1 and not dist.is_initialized():
            self.device = join_launched(plan.degrees, self.device, plan.ranks_per_device)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ledger = Ledger(call_order(os.environ, self.rank))
        found = dist.get_world_size() if dist.is_initialized() else 1
        if found != plan.num_ranks:
            raise LaunchError(
                f"the plan needs {plan.num_ranks} processes ({plan.describe_axes()}) but {found} run; start "
                f"{plan.num_ranks} (torchrun --nproc-per-node {plan.num_ranks} on one machine), or change the plan"
            )
        self.num_local_ranks = min(found, ranks_per_node or found)
        self.coordinates = self._coordinates()
        self._made: dict[tuple[Any, ...], dist.ProcessGroup | None] = {}
        self._groups = self._make_groups() if found > 1 else {}
        self._levels: dict[str, tuple[Axis, Axis]] = {}
        self.levels: dict[str, Levels] = {}  # how collectives of the axes with two levels are carried out
        if plan.ranks_per_device > 1:
            self._share_devices()
        if plan.hierarchical and found > 1:
            self._make_levels(self._agree(ranks_per_node), cluster)

    def __getitem__(self, name: str) -> Axis:
        members = self._joint.get(name, (name,))
        degree, index = 1, 0
        for axis in members:
            degree, index = degree * self.plan.degree(axis), index * self.plan.degree(axis) + self.coordinates[axis]
        group = self._groups.get(self._split(members))
        return Axis(name, degree, index, group, self.ledger, self._levels.get(name), self.levels.get(name))

    def neighbours(self, name: str, degree: int) -> Axis:
        """Returns this rank's part of an axis that is cut into parts of `degree` neighbours.

        It creates groups, so all ranks must call it in the same order. A second call returns the same groups.
        """
        whole = self[name]
        assert whole.degree % degree == 0
        runs = ranks_of(self.plan, name).view(-1, degree)
        group = self._group_among(runs, f"{name}:{degree}") if degree > 1 else None
        return Axis(f"{name}:{degree}", degree, whole.index % degree, group, self.ledger)

    def equal_remainders(self, name: str, divisor: int) -> Axis:
        """Returns the ranks of an axis whose indices have the same remainder as this rank's, divided by `divisor`.

        These are the ranks at the same place in all parts of `neighbours(name, divisor)`. It creates groups, as that.
        """
        whole = self[name]
        degree = whole.degree // divisor
        rows = ranks_of(self.plan, name).view(-1, degree, divisor).transpose(1, 2).reshape(-1, degree)
        group = self._group_among(rows, f"{name}%{divisor}") if degree > 1 else None
        return Axis(f"{name}%{divisor}", degree, whole.index // divisor, group, self.ledger)

    def part(self, name: str) -> Axis:
        """Returns an axis by name: `x`, its parts of 2 neighbours `x:2`, or ranks of equal remainders `x%2`."""
        for mark, find in ((":", self.neighbours), ("%", self.equal_remainders)):
            axis, _, number = name.partition(mark)
            if number:
                return find(axis, int(number))
        return self[name]

    def with_own_group(self, name: str, label: str) -> Axis:
        """Returns the axis with a new group, whose communication does not wait for that of the axis' own group.

        It creates groups, so all ranks must call it in the same order.
        """
        whole = self[name]
        group = self._group_among(ranks_of(self.plan, name), f"{name} {label}", label)
        return Axis(name, whole.degree, whole.index, group, self.ledger)

    def among(self, name: str, indices: Sequence[int], label: str) -> Axis | None:
        """Returns the ranks at these indices of an axis as an axis called `label`; None on other ranks.

        It creates groups, so all ranks must call it in the same order.
        """
        rows = ranks_of(self.plan, name)[:, list(indices)]
        index = self.coordinates[name]
        group = self._group_among(rows, label, label) if len(indices) > 1 else None
        return Axis(label, len(indices), indices.index(index), group, self.ledger) if index in indices else None

    def pair(self, name: str, one: int, other: int, label: str) -> Axis | None:
        """Returns two ranks of an axis as an axis with its own group, for messages from `one` to `other`.

        `label` names the messages. Index 0 is the lower of the two ranks. None on other ranks. It creates groups, so
        all ranks must call it in the same order.
        """
        found = self.among(name, sorted((one, other)), f"{name} {one} to {other} {label}")
        return None if found is None else replace(found, name=name)

    def global_ranks(self, name: str) -> list[int]:
        """Returns the global ranks of this rank's group of an axis, in the order of the axis."""
        rows: list[list[int]] = ranks_of(self.plan, name).tolist()
        return next(row for row in rows if self.rank in row)

    def release_groups(self) -> None:
        """Drop all references to groups. When no other is left, their connections close, and ranks that wait fail."""
        self._groups, self._made, self._levels, self.levels = {}, {}, {}, {}

    def drop_pipe_rank(self) -> None:
        """Reduce `pipe`, which must be the plan's only axis, by one rank.

        torch.distributed must be initialised anew without that rank.
        """
        pipe = self.plan.pipe
        assert self.plan.num_ranks == pipe.degree
        memory = replace(self.plan.memory, recompute_stages=None)  # each stage was built with its own policy
        self.plan = replace(self.plan, pipe=replace(pipe, degree=pipe.degree - 1), memory=memory)
        self.rank, self.num_local_ranks = dist.get_rank(), min(self.num_local_ranks, dist.get_world_size())
        self.coordinates = self._coordinates()
        self._groups = self._make_groups() if pipe.degree > 2 else {}

    @property
    def is_first(self) -> bool:
        """Is this rank 0, which prints and writes for the job?"""
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        """Is this the first of the ranks that share its device?"""
        return self.rank % self.plan.ranks_per_device == 0

    @property
    def is_first_of_stage(self) -> bool:
        """Is this the first rank with its coordinate on `pipe`?"""
        return not any(index for axis, index in self.coordinates.items() if axis != "pipe")

    def _coordinates(self) -> dict[str, int]:
        coordinates, rest = {}, self.rank
        for axis in reversed(AXES):
            rest, coordinates[axis] = divmod(rest, self.plan.degree(axis))
        return coordinates

    def _split(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the members with a degree above 1. Joint axes that are equal in these share a group."""
        return tuple(axis for axis in members if self.plan.degree(axis) > 1)

    def _make_groups(self) -> dict[tuple[str, ...], dist.ProcessGroup]:
        split = self._split(tuple(AXES))
        groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        for name, members in ({axis: (axis,) for axis in split} | self._joint).items():
            axes = self._split(members)
            if axes and axes != split and axes not in groups:
                group = self._group_among(ranks_of(self.plan, name), name, "axis")
                assert group is not None
                groups[axes] = group
        world = dist.group.WORLD
        assert world is not None
        groups[split] = world
        if self.plan.pipe.shadow:
            # A group whose connections close after `release_groups`. A group stays open while anything holds it, and
            # functions with the default argument `group=dist.group.WORLD` hold torch's world group for ever if their
            # module is imported while that group exists.
            groups[split] = dist.new_group(timeout=_timeout(world), group_desc="world with shadows")
        return groups

    def _group_among(
        self, rows: Tensor, description: str, label: str = "", backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Returns this rank's group among rows of ranks [groups, members], with the time-out of the world group, which
        torch does not pass on. It is created once per rows and label.
        """
        world = dist.group.WORLD
        assert world is not None
        key = (label, *sorted(tuple(row) for row in rows.tolist()))
        if key not in self._made:
            self._made[key] = None
            for row in key[1:]:  # every rank creates all groups, in the same order
                group = dist.new_group(list(row), _timeout(world), backend, group_desc=description)
                if self.rank in row:
                    self._made[key] = group
        return self._made[key]

    # --- two levels

    def _share_devices(self) -> None:
        """Connect the ranks of this rank's device, and the leaders of all devices."""
        per_device = self.plan.ranks_per_device
        device, local = divmod(self.rank, per_device)
        if self.num_local_ranks % per_device:
            raise LaunchError(
                f"plan.ranks_per_device = {per_device}, and a host has {self.num_local_ranks} ranks, which do not fill "
                f"devices; start a multiple of {per_device} on each host"
            )
        world = dist.group.WORLD
        assert world is not None
        pages = torch.zeros(self.plan.num_ranks, dtype=torch.int64)
        if local == LEADER:
            pages[self.rank] = create_page(per_device)
        all_reduce(pages, Axis("world", self.plan.num_ranks, self.rank, world, Ledger())).wait()
        page = int(pages[self.rank - local])
        ranks = open_device_ranks(page, local, per_device, self.device, _timeout(world).total_seconds())
        self.levels = level_degrees(self.plan, None)
        leaders, num_devices = None, self.plan.num_ranks // per_device
        if num_devices > 1:
            firsts = torch.arange(0, self.plan.num_ranks, per_device).view(1, -1)
            # NCCL between GPUs, of which each has one leader; else the back-end of the world group
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" and dist.is_nccl_available() else None
            leaders = self._group_among(firsts, "leaders of devices", "leaders", backend)
        for name in self.levels:
            self._levels[name] = (
                Axis(f"{name}/leaders", num_devices, device, leaders, self.ledger),
                Axis(f"{name}/device", per_device, local, None, self.ledger, device_ranks=ranks),
            )

    def _agree(self, ranks_per_node: int | None) -> int | None:
        """Returns `ranks_per_node` if all ranks give the same number, else None.

        With different numbers, ranks would create different groups and wait for ever.
        """
        given = ranks_per_node or 0
        bounds = torch.tensor([given, -given], device=self.device)
        unrecorded = Axis("world", self.plan.num_ranks, self.rank, dist.group.WORLD, Ledger())
        all_reduce(bounds, unrecorded, "max").wait()
        largest, smallest = bounds.tolist()
        return given if given and largest == -smallest else None

    def _make_levels(self, ranks_per_node: int | None, cluster: Cluster | None) -> None:
        if ranks_per_node is None:
            self._log("plan.hierarchical: the ranks per node are not known or differ; collectives stay flat")
            return
        uneven = [name for name in _names(self.plan) if rectangle(self.plan, name, ranks_per_node) is None]
        if uneven:
            self._log(
                f"plan.hierarchical: the ranks of {', '.join(uneven)} do not fill equal parts of nodes of "
                f"{ranks_per_node}; their collectives stay flat"
            )
        self.levels = level_degrees(self.plan, ranks_per_node, cluster)
        for name, levels in self.levels.items():
            num_nodes, num_local = levels.num_nodes, levels.num_local
            blocks = ranks_of(self.plan, name).view(-1, num_nodes, num_local)
            between = self._group_among(blocks.transpose(1, 2).reshape(-1, num_nodes), f"{name}/node")
            alone = num_local == 1
            inside = None if alone else self._group_among(blocks.reshape(-1, num_local), f"{name}/local")
            node, local = divmod(self[name].index, num_local)
            self._levels[name] = (
                Axis(f"{name}/node", num_nodes, node, between, self.ledger),
                Axis(f"{name}/local", num_local, local, inside, self.ledger),
            )

    def _log(self, message: str) -> None:
        if self.is_first:
            logger.warning(message)


class UnconnectedMesh(Mesh):
    """The mesh as any rank of a plan sees it, without groups: for indices and degrees. Nothing can be sent over it."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.device, self.ledger = plan, rank, torch.device("cpu"), Ledger()
        self._joint = joint_axes(plan)
        self.num_local_ranks = plan.num_ranks
        self.coordinates = self._coordinates()
        self.release_groups()

    def __getitem__(self, name: str) -> Axis:
        return replace(super().__getitem__(name), dry=True)


def ranks_of(plan: Plan, name: str) -> Tensor:
    """Returns the global ranks of all groups of an axis, or joint axis: [groups, degree], in the order of the axis."""
    names = list(AXES)
    members = [names.index(axis) for axis in joint_axes(plan).get(name, (name,))]
    others = [dim for dim in range(len(names)) if dim not in members]
    degree = math.prod(plan.degree(names[dim]) for dim in members)
    world = torch.arange(plan.num_ranks).view(*plan.degrees.values())
    return world.permute(*others, *members).reshape(-1, degree).contiguous()


def rectangle(plan: Plan, name: str, ranks_per_node: int) -> tuple[int, int] | None:
    """Returns (nodes, ranks in each node) of a group of the axis; None if groups differ in this.

    Every group must use the same number of nodes, and the same local ranks of each of its nodes.
    """
    ranks = ranks_of(plan, name)  # [groups, degree]
    nodes, places = ranks // ranks_per_node, ranks % ranks_per_node
    num_local = int((nodes[0] == nodes[0, 0]).sum())
    num_nodes = ranks.shape[1] // num_local
    if num_nodes * num_local != ranks.shape[1]:
        return None
    nodes, places = nodes.view(-1, num_nodes, num_local), places.view(-1, num_nodes, num_local)
    is_one_node_a_row = bool((nodes == nodes[:, :, :1]).all())
    is_another_in_the_next = bool((nodes[:, 1:, 0] > nodes[:, :-1, 0]).all())
    has_equal_places = bool((places == places[:, :1]).all())
    return (num_nodes, num_local) if is_one_node_a_row and is_another_in_the_next and has_equal_places else None


def level_degrees(plan: Plan, ranks_per_node: int | None, cluster: Cluster | None = None) -> dict[str, Levels]:
    """Returns the levels of the axes whose collectives have two levels on nodes of this size.

    `cluster` has the links or times by which `plan.communication.between = "fastest"` chooses.
    """
    if plan.ranks_per_device > 1:
        shape = (plan.data // plan.ranks_per_device, plan.ranks_per_device)
        return {name: Levels(*shape, axis=name, shares_device=True) for name in _names(plan)}
    if not plan.hierarchical or ranks_per_node is None:
        return {}
    between, found = plan.communication.between, {}
    for name in _names(plan):
        degrees = rectangle(plan, name, ranks_per_node)
        if degrees is None or degrees[0] == 1 or (degrees[1] == 1 and between == "library"):
            continue
        links = None if cluster is None else _level_links(plan, name, degrees, ranks_per_node, cluster)
        found[name] = Levels(*degrees, between, name, links, () if cluster is None else cluster.collectives)
    return found


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """The limit of waits in a group; torch's default for back-ends that state none (MPI)."""
    try:
        options = group._get_backend(torch.device("cpu")).options
    except (RuntimeError, AttributeError):
        return dist.default_pg_timeout
    return getattr(options, "_timeout", dist.default_pg_timeout)


def level_axes(num_nodes: int, device: torch.device) -> dict[Algorithm, Axis]:
    """Returns an axis over all ranks for each algorithm between nodes, as if the ranks were on so many nodes."""
    degree, found = dist.get_world_size(), dict[Algorithm, Axis]()
    kinds: tuple[Literal["library", "ring", "doubling"], ...] = ("library", "ring", "doubling")
    for kind in kinds:
        plan = Plan(data=degree, hierarchical=True, communication=Communication(between=kind))
        found[kind] = Mesh(plan, device, degree // num_nodes)["data"]
    return found


def group_axes(plan: Plan, device: torch.device) -> dict[str, Axis]:
    """Returns this rank's group of each axis of the plan with a degree above 1, by the axis' name."""
    mesh = Mesh(plan, device)
    return {name: mesh[name] for name in AXES if plan.degree(name) > 1}


def _level_links(
    plan: Plan, name: str, degrees: tuple[int, int], ranks_per_node: int, cluster: Cluster
) -> dict[str, AxisLink] | None:
    """The links of an axis (""), between nodes and inside; None if the cluster has not as many devices."""
    inner, degree = distance_and_degree(plan, name)
    spans = {"": (inner, degree), "node": (ranks_per_node, degrees[0]), "local": (inner, degrees[1])}
    if cluster.node.num_devices != ranks_per_node or cluster.num_devices < plan.num_ranks:
        return None
    return {level: cluster.axis_link(*span) for level, span in spans.items()}


def distance_and_degree(plan: Plan, name: str) -> tuple[int, int]:
    """Returns (the distance in ranks between neighbours on an axis, its degree). Joint axes span all their members."""
    joint = joint_axes(plan)
    if name in joint:
        return 1, math.prod(plan.degree(member) for member in joint[name])
    name, _, divisor = name.partition("%")
    if divisor:
        return plan.inner(name) * int(divisor), plan.degree(name) // int(divisor)
    name, _, neighbours = name.partition(":")
    return plan.inner(name), int(neighbours) if neighbours else plan.degree(name)


def _names(plan: Plan) -> list[str]:
    """Returns the axes and joint axes with a degree above 1."""
    return [name for name in (*AXES, *joint_axes(plan)) if ranks_of(plan, name).shape[1] > 1]
