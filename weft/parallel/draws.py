"""Random draws over x: where ranks hold other features, heads or tokens they draw apart, elsewhere they draw alike.

All ranks of x have the same random state (it is keyed by what they have in common), so dropout of the residual stream,
which each of them holds whole, is the same on all. Inside a region each has its own features or heads: there it draws
from a state of its own, made from the common one, and behind the region the common one goes on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.comm import Axis


class Draws:
    """Switches one rank's random state between what is common over an axis and what is its own."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self._common: tuple[Tensor, Tensor | None] | None = None

    @torch._disable_dynamo  # type: ignore[attr-defined]  # the random state is no part of a compiled graph
    def apart(self) -> None:
        """From here on draw for this rank alone."""
        if self._common is not None:
            return
        seed = int(torch.randint(0, 2**62, ()))  # the same on all ranks: they have drawn alike so far
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._common = torch.get_rng_state(), on_device
        seed_draws(seed + self.axis.index, self.device)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def alike(self) -> None:
        """Go on where all ranks of the axis drew alike."""
        if self._common is None:
            return
        state, on_device = self._common
        self._common = None
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self.device)

    def forget(self) -> None:
        """A new forward: whatever a forward that was cut short has left is not gone on with."""
        self._common = None


def seed_draws(seed: int, device: torch.device) -> None:
    """Start the draws of a model on `device` anew.

    torch.manual_seed also tells every other kind of device, which takes longer than the forward of a small block.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def has_dropout(model: nn.Module) -> bool:
    """Whether anything in the model drops values, as a module or by a probability among its attributes."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False
