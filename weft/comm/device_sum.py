"""All-reduces over ranks that share devices: a sum on each device, one over leaders, and the result for all ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.comm import collectives
from weft.comm.collectives import Axis, Pending, Reduction
from weft.comm.device_ranks import DeviceRanks


class _DevicePart:
    """A function as an operation that `Pending` waits for."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def wait(self) -> None:
        self._function()

    def is_completed(self) -> bool:
        return False


class DeviceSum(Pending):
    """A reduction of `tensor` in place over the ranks of all devices. `levels`: the axis over the leaders, of which
    only they have a group, and the axis over the ranks of this device.
    """

    def __init__(self, tensor: Tensor, levels: tuple[Axis, Axis], reduction: Reduction) -> None:
        assert levels[1].device_ranks is not None
        self._tensor, self._levels, self._reduction = tensor, levels, reduction
        self._ranks: DeviceRanks = levels[1].device_ranks
        self._is_done = False
        self._first = self._part("reduce", self._gather)
        self._ranks.start(self, tensor)

    def wait(self) -> None:
        """Return when the result may be used. May be called again."""
        if not self._is_done:
            self._ranks.finish(self)
            self._is_done = True

    def is_done(self) -> bool:
        """Has `wait` returned?"""
        return self._is_done

    def run(self) -> None:
        """Go through all parts of the operation."""
        self._first.wait()
        if self._ranks.is_leader:
            with self._ranks.cells.copying():
                collectives.all_reduce(self._tensor, self._levels[0], self._reduction).wait()
        self._part("broadcast", self._hand_back).wait()
        self._ranks.cells.end()
        self._is_done = True

    def _part(self, operation: str, function: Callable[[], None]) -> Pending:
        collectives.record(self._levels[1], operation, self._tensor)
        return Pending([_DevicePart(function)], self._levels[1], operation)  # type: ignore[list-item]

    def _gather(self) -> None:
        if self._ranks.is_leader:
            self._ranks.add_pieces(self._tensor, self._reduction)
        else:
            self._ranks.send_pieces(self)

    def _hand_back(self) -> None:
        if self._ranks.is_leader:
            self._ranks.publish_pieces(self._tensor)
        else:
            self._ranks.take_pieces(self._tensor)
