"""Random draws in a stage: alike in all stages where all run the same code, apart where each computes its own part."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


class Draws:
    """One stage's random state. All stages take the same draws from the common one, in the same order."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self._common: tuple[Tensor, Tensor | None] | None = None
        self._own: tuple[Tensor, Tensor | None] | None = None

    def apart(self) -> None:
        """From here on draw for this stage alone, from where it was in this forward."""
        if self._own is None:
            seed = int(torch.randint(0, 2**62, ()))
            self._common = self._get()
            torch.manual_seed(seed + self.stage)
        else:
            self._common = self._get()
            self._set(self._own)

    def alike(self) -> None:
        """Go on where all stages drew alike."""
        assert self._common is not None
        self._own = self._get()
        self._set(self._common)
        self._common = None

    def end(self) -> None:
        """The forward is over: draw alike, and begin the next with draws of its own."""
        if self._common is not None:
            self.alike()
        self._own = None

    def _get(self) -> tuple[Tensor, Tensor | None]:
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _set(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)


@cache
def is_random(name: str) -> bool:
    """Whether an operation of this name draws numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)
