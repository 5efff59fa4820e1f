"""The mesh: a plan's axes as named process groups. The only file that makes groups; it is passed, never global.

Ranks are laid out in the order of `plan.AXES`, outermost first. Besides each axis there are two joint ones: `batch`
(every rank that takes different samples: loss, token counts) and `world` (every rank: decisions to stop).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.comm import Axis, Ledger
from weft.errors import LaunchError
from weft.plan import AXES, Plan

BATCH_AXES = ("data", "shard")


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
        self._groups = self._make_groups() if found > 1 else {}
        self.coordinates = self._coordinates()

    def __getitem__(self, name: str) -> Axis:
        members = {"batch": BATCH_AXES, "world": AXES}.get(name, (name,))
        degree, index = 1, 0
        for axis in members:
            degree, index = degree * self.plan.degree(axis), index * self.plan.degree(axis) + self.coordinates[axis]
        return Axis(name, degree, index, self._groups.get(self._talking(members)), self.ledger)

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
        batch = self._talking(BATCH_AXES)
        if len(batch) > 1 and batch != talking:
            groups[batch] = device_mesh[batch]._flatten("batch").get_group()
        assert dist.group.WORLD is not None
        groups[talking] = dist.group.WORLD
        return groups
