"""Random draws where ranks hold different elements: they draw apart there, and alike where they hold the same.

All ranks of one batch rank begin a forward with the same random state (it is keyed by what they have in common). A
*scope* names a part of the model and the axes over which its elements are split. Ranks draw in a scope from a state of
its own, which is keyed by the seed of the forward, the scope and their coordinates on its axes: dropout of the residual
stream, which all ranks of x hold whole, is then the same on all of them, and that of heads, which they share out, is
not. Behind the model the common state goes on.

Recompute begins with the scopes that forward began with (`memory/recompute_context.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.comm import Axis

# Scopes of the tensor axes: the residual stream, a rank's part of its sequence, and between a column and its row.
WHOLE, PART, INNER = "whole", "part", "inner"

RandomState = tuple[Tensor, Tensor | None]  # of the host, and of the device


class Draws:
    """One rank's random states in a forward, one for each scope."""

    def __init__(self, scopes: Mapping[str, Sequence[Axis]], device: torch.device) -> None:
        self.device = device
        self._keys = {name: ":".join([name, *(str(axis.index) for axis in axes)]) for name, axes in scopes.items()}
        self._seed: int | None = None  # of this forward
        self._scope = ""  # outside of all
        self._states: Mapping[str, RandomState] = {}  # of the scopes that it is not in

    def begin(self) -> None:
        """A new forward: whatever a forward that was cut short has left is not gone on with."""
        self._seed, self._scope, self._states = None, "", {}

    @torch._disable_dynamo  # type: ignore[attr-defined]  # the random state is no part of a compiled graph
    def enter(self, scope: str) -> None:
        """From here on draw in this scope, from where it was in this forward."""
        if scope == self._scope:
            return
        if self._seed is None:
            self._seed = int(torch.randint(0, 2**62, ()))  # the same on all ranks: they have drawn alike so far
        self._states = {**self._states, self._scope: random_state(self.device)}
        self._scope = scope
        if scope in self._states:
            set_random_state(self._states[scope], self.device)
        else:
            seed_draws(keyed(self._seed, self._keys[scope]), self.device)

    def enter_first(self, scope: str) -> None:
        """Draw in this scope unless the forward is in one already."""
        if not self._scope:
            self.enter(scope)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def end(self) -> None:
        """Go on where all ranks drew alike."""
        if self._seed is not None:
            self.enter("")
            self.begin()

    def get(self) -> tuple[int | None, str, Mapping[str, RandomState]]:
        """What recompute puts back; the state that is drawn from just now is put back by torch."""
        return self._seed, self._scope, self._states

    def set(self, value: tuple[int | None, str, Mapping[str, RandomState]]) -> None:
        self._seed, self._scope, self._states = value


class TileDraws:
    """Draws of one operation on tiles: apart for its duration, from a state made of the common one."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._draws = Draws({"tile": (axis,)}, device)

    def apart(self) -> None:
        """From here on draw for this rank's tile alone."""
        self._draws.enter("tile")

    def alike(self) -> None:
        """Go on where all ranks drew alike."""
        self._draws.end()


def random_state(device: torch.device) -> RandomState:
    """Of the host and, where it is another, of the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Go on from a state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def keyed(*parts: object) -> int:
    """A seed made of all parts."""
    key = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())


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
