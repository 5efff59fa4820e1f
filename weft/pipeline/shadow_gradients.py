"""Keeps shadows up to date: after a step's backwards a rank sends its stage's gradients to the rank that shadows it.

Both ranks then make the same update, so a shadow stays bit-identical to its stage. This costs only the bytes of the
gradients, and comes before the gradient norm is summed: a rank that knows the norm knows that every shadow has what it
needs for the update. The number of the step is sent too and must equal the shadow's own, so a shadow that has missed a
step is never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from weft.comm import Pending, receive, send
from weft.errors import CorruptionError, LostRankError
from weft.mesh import Mesh
from weft.sharding.flat_buffer import Flat
from weft.sharding.units import Units

WHAT = "gradients for a shadow"
VERSION_BYTES = 8


class ShadowRefresh:
    """This rank's messages to and from shadows: one for each flat buffer of a stage."""

    def __init__(self, mesh: Mesh) -> None:
        self._axis = replace(mesh.with_own_group("pipe", "shadow"), name="shadow")
        self._expected: list[Pending] = []
        self._given: list[Pending] = []
        self._received = torch.zeros(1, dtype=torch.int64)  # the number of the step

    def expect(self, units: Units, source: int) -> None:
        """Start to receive the gradients of a shadow's stage; does not block."""
        self._expected = []
        with self._named(source):
            self._expected.append(receive(self._received, self._axis, source, WHAT))
            for flat in _trained(units):
                self._expected.append(receive(flat.room_for_gradient(), self._axis, source, WHAT))

    def give(self, units: Units, target: int, step: int) -> None:
        """Start to send a stage's gradients to the rank that shadows it; does not block."""
        number = torch.tensor([step])
        self._sent = number  # keeps it alive until it is sent
        with self._named(target):
            self._given.append(send(number, self._axis, target, WHAT))
            for flat in _trained(units):
                assert flat.slice_gradient is not None
                self._given.append(send(flat.slice_gradient, self._axis, target, WHAT))

    def finish(self, shadow: Units | None, step: int) -> None:
        """Wait for all messages, check that they are of this step, and show the shadow's gradients to the optimizer."""
        with self._named(None):
            for pending in [*self._expected, *self._given]:
                pending.wait()
        self._expected, self._given = [], []
        if shadow is not None:
            if int(self._received) != step:
                raise CorruptionError(
                    f"pipe rank {self._axis.index} is in step {step} and was sent the gradients of step "
                    f"{int(self._received)} for its shadow; all start again from a checkpoint"
                )
            for flat in _trained(shadow):
                flat.show_gradient()

    @contextmanager
    def _named(self, peer: int | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            whom = "its neighbours" if peer is None else f"pipe rank {peer}"
            raise LostRankError(
                f"pipe rank {self._axis.index} exchanged gradients for shadows when the connection to {whom} failed; "
                f"{str(error).strip().splitlines()[0]}"
            ) from error


def _trained(units: Units) -> list[Flat]:
    return [flat for unit in units.all for flat in unit.trained]
