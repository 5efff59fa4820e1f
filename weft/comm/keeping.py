"""Collectives whose results a recomputed forward keeps (`kept_results.py`): they are sent once and used twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from weft.comm.collectives import Axis, Pending
from weft.comm.kept_results import KeptResults

Operation = TypeVar("Operation", bound=Callable[..., Pending])


def keeping(operation: Operation) -> Operation:
    """Returns a collective that keeps its results, or takes kept ones, while a recomputed forward runs.

    The first argument of a collective is what it fills: a tensor, tensors, or pairs of a peer and a tensor.
    """

    @wraps(operation)
    def call(filled: Any, *args: Any, **kwargs: Any) -> Pending:
        axis = next(one for one in (*args, *kwargs.values()) if isinstance(one, Axis))
        kept = axis.ledger.kept
        if kept is None or axis.degree == 1:
            return operation(filled, *args, **kwargs)
        results = _tensors(filled)
        if kept.take(results):
            return Pending(None, axis, operation.__name__)
        pending, room = operation(filled, *args, **kwargs), None if kept.is_again else kept.make_room()
        return pending if room is None else _KeptPending(pending, kept, room, results)

    return call  # type: ignore[return-value]


class _KeptPending(Pending):
    """An operation whose results are copied when it is complete."""

    def __init__(self, pending: Pending, kept: KeptResults, room: list[Tensor], results: Sequence[Tensor]) -> None:
        self._pending, self._kept, self._room, self._results = pending, kept, room, results

    def wait(self) -> None:
        """Return when the result may be used. May be called again."""
        self._pending.wait()
        if self._results:
            self._kept.keep(self._room, self._results)
            self._results = ()

    def block(self) -> None:
        """Wait in another thread than the caller of `wait`."""
        self._pending.block()

    def is_done(self) -> bool:
        """Returns whether `wait` would return at once."""
        return self._pending.is_done()


def _tensors(filled: Any) -> list[Tensor]:
    if isinstance(filled, Tensor):
        return [filled]
    return [one if isinstance(one, Tensor) else one[1] for one in filled]
