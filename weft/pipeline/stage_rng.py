"""Random draws in a stage: alike in all stages where all run the same code, apart where each computes its own part."""

from __future__ import annotations

from functools import cache

import torch

from weft.inspection.rng import RngState, rng_state, seed_rng, set_rng_state


class Draws:
    """One stage's random state. All stages take the same draws from the common one, in the same order."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self._common: RngState | None = None
        self._own: RngState | None = None

    def apart(self) -> None:
        """From here on draw for this stage alone, from where it was in this forward."""
        if self._own is None:
            seed = int(torch.randint(0, 2**62, ()))
            self._common = rng_state(self.device)
            seed_rng(seed + self.stage, self.device)
        else:
            self._common = rng_state(self.device)
            set_rng_state(self._own, self.device)

    def alike(self) -> None:
        """Go on where all stages drew alike."""
        assert self._common is not None
        self._own = rng_state(self.device)
        set_rng_state(self._common, self.device)
        self._common = None

    def end(self) -> None:
        """The forward is over: draw alike, and begin the next with draws of its own."""
        if self._common is not None:
            self.alike()
        self._own = None


@cache
def is_random(name: str) -> bool:
    """Whether an operation of this name draws numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)
