"""Random states of a stage: one shared by all stages for code that all run, and one of its own for its part."""

from __future__ import annotations

from functools import cache

import torch

from weft.inspection.rng import RngState, rng_state, seed_rng, set_rng_state


class StageRng:
    """One stage's random states. All stages draw the same numbers from the shared one, in the same order."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self._shared: RngState | None = None
        self._own: RngState | None = None

    def use_own(self) -> None:
        """Switch to this stage's own state, and continue where it was in this forward."""
        if self._own is None:
            seed = int(torch.randint(0, 2**62, ()))
            self._shared = rng_state(self.device)
            seed_rng(seed + self.stage, self.device)
        else:
            self._shared = rng_state(self.device)
            set_rng_state(self._own, self.device)

    def use_shared(self) -> None:
        """Switch back to the state that all stages share."""
        assert self._shared is not None
        self._own = rng_state(self.device)
        set_rng_state(self._shared, self.device)
        self._shared = None

    def end(self) -> None:
        """End a forward: switch to the shared state, and give the next forward a new own state."""
        if self._shared is not None:
            self.use_shared()
        self._own = None


@cache
def is_random(name: str) -> bool:
    """Return whether an operation of this name draws random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)
