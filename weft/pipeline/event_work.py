"""Counts the work of each event of a trace: its FLOPs in forward and backward, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from weft.inspection.memory_traffic import bytes_of, is_view, tensors_of
from weft.profiling.flops import count_product


class EventWork(NamedTuple):
    """The FLOPs of an event in forward and backward, and the bytes that its forward reads and writes."""

    flops: int = 0
    num_bytes: int = 0


class WorkCounter(TorchDispatchMode):
    """Adds the operations that run in this mode to the event whose index `event()` returns."""

    def __init__(self, event: Callable[[], int]) -> None:
        super().__init__()
        self.found: dict[int, EventWork] = {}
        self._event = event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
        product = count_product(func, args, kwargs, result)
        flops = 0 if product is None else product.flops.all + product.flops.backward
        moved = 0 if is_view(func, inputs, outputs) else sum(map(bytes_of, (*inputs, *outputs)))
        before = self.found.get(self._event(), EventWork())
        self.found[self._event()] = EventWork(before.flops + flops, before.num_bytes + moved)
        return result
