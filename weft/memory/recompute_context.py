"""State that a block's forward reads or changes beside its arguments: random states, documents of a micro-batch.

When backward recomputes a block, this state must be as it was in forward: meanwhile it may belong to a later
micro-batch, or to another part of the model. Code that keeps such state for a block registers it by `register_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

from weft.inspection.annotations import Annotation


class ForwardState(Protocol):
    """A state that a forward reads or changes. A value that `get` returned is never modified."""

    def get(self) -> Any:
        """Return the current value."""

    def set(self, value: Any) -> None:
        """Set the value."""


class RunningStatistics:
    """The running statistics of a block's batch norms: a recompute must not update them a second time.

    Copies are made without dispatch modes: that of selective recompute knows the operations of the forward alone.
    """

    def __init__(self, block: nn.Module) -> None:
        norms = [module for module in block.modules() if isinstance(module, _NormBase)]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def get(self) -> list[Tensor]:
        """Return a copy of the statistics."""
        with _disable_current_modes():
            return [buffer.clone() for buffer in self._buffers]

    def set(self, value: list[Tensor]) -> None:
        """Set the statistics, in place."""
        with torch.no_grad(), _disable_current_modes():
            for buffer, copy in zip(self._buffers, value, strict=True):
                buffer.copy_(copy)


def others_than_statistics(block: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a block by name, without the running statistics of its norms."""
    norms = {name for name, module in block.named_modules() if isinstance(module, _NormBase)}
    return {name: buffer for name, buffer in block.named_buffers() if name.rpartition(".")[0] not in norms}


_FORWARD_STATES = Annotation[list[ForwardState]]("forward_states")


def register_state(block: nn.Module, state: ForwardState) -> None:
    """Make each recompute of a block's forward begin with the state that the forward began with."""
    registered_states(block).append(state)


def registered_states(block: nn.Module) -> list[ForwardState]:
    """Return the states of a block. It is always the same list, which may grow later."""
    return _FORWARD_STATES.setdefault(block, [])


@torch._disable_dynamo  # type: ignore[attr-defined]  # states are not part of a compiled graph
def with_states(forward: Callable[..., Any], states: Sequence[ForwardState]) -> Callable[..., Any]:
    """Return a forward that, when called again for recompute, first restores the states' values of now."""
    return _RestoringForward(forward, states)


class _RestoringForward:
    def __init__(self, forward: Callable[..., Any], states: Sequence[ForwardState]) -> None:
        self._forward, self._states, self._is_again = forward, states, False
        self._began = [state.get() for state in states]

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # what it keeps differs from call to call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_again:  # the forward itself: its changes stay
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
