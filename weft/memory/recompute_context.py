"""State beside its arguments that a block's forward reads or changes: random states, documents of a micro-batch.

A block that is computed again in backward must find that state as forward did: meanwhile it may belong to a later
micro-batch, or to another part of the model. Whoever keeps such state for a block names it here, by `carry`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

_ATTRIBUTE = "_weft_carried"


class State(Protocol):
    """Something that a forward reads or changes; what `get` returns is never changed."""

    def get(self) -> Any:
        """The value now."""

    def set(self, value: Any) -> None:
        """Put a value back."""


def carry(block: nn.Module, state: State) -> None:
    """Let recompute of a block's forward begin with the state that the forward began with."""
    carried_by(block).append(state)


def carried_by(block: nn.Module) -> list[State]:
    """The states of a block: a list that stays the same, and may grow later."""
    states: list[State] = block.__dict__.setdefault(_ATTRIBUTE, [])
    return states


@torch._disable_dynamo  # type: ignore[attr-defined]  # states are no part of a compiled graph
def carrying(forward: Callable[..., Any], states: Sequence[State]) -> Callable[..., Any]:
    """A block's forward that begins now, and again in recompute with the states of now."""
    return _Carrying(forward, states)


class _Carrying:
    def __init__(self, forward: Callable[..., Any], states: Sequence[State]) -> None:
        self._forward, self._states, self._is_again = forward, states, False
        self._began = [state.get() for state in states]

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # what it keeps differs from call to call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_again:  # the forward itself: what it changes stays
            self._is_again = True
            return self._forward(*args, **kwargs)
        now = [state.get() for state in self._states]
        self._put(self._began)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._put(now)

    def _put(self, values: Sequence[Any]) -> None:
        for state, value in zip(self._states, values, strict=True):
            state.set(value)
