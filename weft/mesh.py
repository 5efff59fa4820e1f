"""The mesh: a plan's axes as named process groups. The only file that makes groups; it is passed, never global.

Ranks are laid out in the order of `plan.AXES`, outermost first. Besides each axis there are joint ones, over all ranks
that differ in some of them: `batch` (take different samples), `tokens` (different tokens: loss and counts), `state`
(hold different parts of the model: the gradient norm) and `world` (decisions to stop).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.comm import Axis, Ledger
from weft.errors import LaunchError
from weft.plan import AXES, Plan

JOINT_AXES = {
    "batch": ("data", "shard"),
    "tokens": ("data", "shard", "context"),
    "state": ("shard", "x", "y"),
    "world": AXES,
}


class Mesh:
    """One rank's view of the plan's axes. `mesh["shard"]` is an `Axis`."""

    def __init__(self, plan: Plan, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        self.device = torch.device(device)
        self.ledger = Ledger()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        found = dist.get_world_size() if dist.is_initialized() else 1
        if found != plan.num_ranks:
            raise LaunchError(
                f"the plan needs {plan.num_ranks} processes ({plan.describe_axes()}) but {found} run; "
                f"start {plan.num_ranks} or change the plan"
            )
        self.coordinates = self._coordinates()
        self._groups = self._make_groups() if found > 1 else {}

    def __getitem__(self, name: str) -> Axis:
        members = JOINT_AXES.get(name, (name,))
        degree, index = 1, 0
        for axis in members:
            degree, index = degree * self.plan.degree(axis), index * self.plan.degree(axis) + self.coordinates[axis]
        return Axis(name, degree, index, self._groups.get(self._talking(members)), self.ledger)

    def neighbours(self, name: str, degree: int) -> Axis:
        """The part of an axis that this rank is in when it is cut into runs of `degree` neighbours.

        Makes groups, so all ranks must call it in the same order; asked again, it gives the same ones.
        """
        whole = self[name]
        assert whole.degree % degree == 0
        key = (f"{name}:{degree}",)
        if degree > 1 and key not in self._groups:
            inner = self.plan.inner(name)
            for rank in range(self.plan.num_ranks):
                if rank // inner % degree == 0:  # the first of its run
                    members = [rank + step * inner for step in range(degree)]
                    group = dist.new_group(members, group_desc=key[0])
                    if self.rank in members:
                        self._groups[key] = group
        return Axis(name, degree, whole.index % degree, self._groups.get(key), self.ledger)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.rank == 0

    def _coordinates(self) -> dict[str, int]:
        coordinates, rest = {}, self.rank
        for axis in reversed(AXES):
            rest, coordinates[axis] = divmod(rest, self.plan.degree(axis))
        return coordinates

    def _talking(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """The members that have anyone to talk to: joint axes whose other members have degree 1 share a group."""
        return tuple(axis for axis in members if self.plan.degree(axis) > 1)

    def _make_groups(self) -> dict[tuple[str, ...], dist.ProcessGroup]:
        talking = self._talking(AXES)
        shape = tuple(self.plan.degree(axis) for axis in talking)
        device_mesh: DeviceMesh = init_device_mesh(self.device.type, shape, mesh_dim_names=talking)
        groups: dict[tuple[str, ...], dist.ProcessGroup] = {(axis,): device_mesh.get_group(axis) for axis in talking}
        for name, members in JOINT_AXES.items():
            joint = self._talking(members)
            if len(joint) > 1 and joint != talking and joint not in groups:
                groups[joint] = device_mesh[joint]._flatten(name).get_group()
        assert dist.group.WORLD is not None
        groups[talking] = dist.group.WORLD
        return groups
