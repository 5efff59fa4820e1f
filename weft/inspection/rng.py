"""Random number generators of a forward: one state per scope of the model, shared by ranks that hold equal elements.

All ranks of one batch rank begin a forward with the same rng state. A *scope* names a part of the model and the axes
over which its elements are split. Each scope has its own rng state. Its seed follows from the seed of the forward, the
scope's name and the rank's coordinates on the scope's axes. So dropout of the residual stream, which all ranks of x
hold whole, is the same on all of them. Dropout of attention heads, which are split over x, differs between ranks. After
the model, the shared state is used again.

Recompute starts with the scopes that the forward started with (`memory/recompute_context.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.comm import Axis

# Scopes of the tensor axes: the whole residual stream, a rank's part of the sequence of the residual stream, and values
# between a column linear and its row linear.
WHOLE, PART, INNER = "whole", "part", "inner"

RngState = tuple[Tensor, Tensor | None]  # states of the host's and of the device's generator


class ScopedRng:
    """One rank's rng states in a forward: one for each scope, and the shared one outside of all scopes.

    `scopes` has the axes over which the elements of each scope are split.
    """

    def __init__(self, scopes: Mapping[str, Sequence[Axis]], device: torch.device) -> None:
        self.device = device
        self._keys = {name: ":".join([name, *(str(axis.index) for axis in axes)]) for name, axes in scopes.items()}
        self._seed: int | None = None  # seed of this forward
        self._scope = ""  # the scope that is entered; "" outside of all scopes
        self._states: Mapping[str, RngState] = {}  # states of the other scopes

    def begin(self) -> None:
        """Start a new forward, and drop the states of an earlier forward that was interrupted."""
        self._seed, self._scope, self._states = None, "", {}

    @torch._disable_dynamo  # type: ignore[attr-defined]  # the rng state is not part of a compiled graph
    def enter(self, scope: str) -> None:
        """Use the rng state of this scope from now on. It continues where the scope was left in this forward."""
        if scope == self._scope:
            return
        if self._seed is None:
            self._seed = int(torch.randint(0, 2**62, ()))  # equal on all ranks: they have used the shared state so far
        self._states = {**self._states, self._scope: rng_state(self.device)}
        self._scope = scope
        if scope in self._states:
            set_rng_state(self._states[scope], self.device)
        else:
            seed_rng(derive_seed(self._seed, self._keys[scope]), self.device)

    def enter_first(self, scope: str) -> None:
        """Enter this scope, unless a scope is entered already."""
        if not self._scope:
            self.enter(scope)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def end(self) -> None:
        """Leave all scopes, and continue with the state that all ranks share."""
        if self._seed is not None:
            self.enter("")
            self.begin()

    def get(self) -> tuple[int | None, str, Mapping[str, RngState]]:
        """Returns what recompute restores: seed, scope and states of other scopes. torch restores the current state."""
        return self._seed, self._scope, self._states

    def set(self, value: tuple[int | None, str, Mapping[str, RngState]]) -> None:
        """Restore a result of `get`."""
        self._seed, self._scope, self._states = value


class TileRng:
    """Rng of a single operation on tiles of images: each rank uses its own state, derived from the shared one."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._rng = ScopedRng({"tile": (axis,)}, device)

    def per_rank(self) -> None:
        """Use a state of this rank's own tile from now on."""
        self._rng.enter("tile")

    def shared(self) -> None:
        """Use the state that all ranks share from now on."""
        self._rng.end()


def rng_state(device: torch.device) -> RngState:
    """Returns the rng state of the host and, on a GPU, of the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_rng_state(state: RngState, device: torch.device) -> None:
    """Set the rng state of the host and the device to a result of `rng_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def derive_seed(*parts: object) -> int:
    """Returns a seed that is a hash of all parts."""
    key = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())


def seed_rng(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of `device`.

    torch.manual_seed also seeds every other kind of device, which takes longer than the forward of a small block.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def has_dropout(model: nn.Module) -> bool:
    """Does the model use dropout, as a module or by a probability above 0 among a module's attributes?"""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False
