"""Logits of this rank's classes that become those of all classes as soon as code other than weft's uses them.

With the vocabulary split over x, a loss of the user's own (an entropy, a mean square, smoothed labels) would see only
this rank's classes. So a model returns its logits as `SplitLogits`: `weft.cross_entropy` takes this rank's part out,
and any other operation is given the logits of all ranks, gathered once.

weft takes the last linear that a model registers for its head. A model may register its layers in another order, or use
the head's result in a way that needs all classes. The logits would then be wrong, so `HeadUse` watches the first
training and the first evaluation, and refuses such a model by name. It also finds which tensors of the model's result
are its logits, if it returns others too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm import Axis
from weft.errors import PlanError
from weft.inspection.first_order import Transposable
from weft.inspection.logits_use import LogitsWatch
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.inspection.parameter_cut import share
from weft.models.loss_head import logits_of
from weft.parallel.tensor.operations import gather_along

# What is the same for a part of the logits and for all of them.
_SHARED = {"requires_grad", "grad_fn", "is_leaf", "dtype", "device", "is_cuda", "register_hook", "as_subclass"}


class SplitLogits(Tensor):
    """Logits [..., classes of this rank]. For operations on it they are [..., all classes]."""

    axis: Axis
    num_classes: int
    whole: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        change = own_logits if name in _SHARED else _whole_logits
        args, kwargs = map_tensors(change, (args, kwargs or {}))
        return func(*args, **kwargs)


def mark_split(logits: Tensor, axis: Axis, num_classes: int) -> SplitLogits:
    """Returns logits of this rank's classes as logits that are split."""
    made = logits.as_subclass(SplitLogits)
    made.axis, made.num_classes, made.whole = axis, num_classes, None
    return made


def own_logits(logits: Tensor) -> Tensor:
    """Returns the logits of this rank's classes as a plain tensor."""
    if not isinstance(logits, SplitLogits):
        return logits
    with torch._C.DisableTorchFunctionSubclass():
        return logits.as_subclass(Tensor)


def _whole_logits(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, SplitLogits):
        return tensor
    if tensor.whole is None:
        tensor.whole = gather_classes(own_logits(tensor), tensor.axis, tensor.num_classes)
    return tensor.whole


def gather_bytes(num_targets: int, num_classes: int, degree: int, itemsize: int) -> int:
    """Returns the bytes of the all-gather of a forward's logits. Backward does not communicate."""
    return num_targets * -(-num_classes // degree) * degree * itemsize


def _all_classes(logits: Tensor, axis: Axis, num_classes: int) -> Tensor:
    widest = -(-num_classes // axis.degree)
    parts = gather_along(F.pad(logits, (0, widest - logits.shape[-1])), axis, -1).split(widest, dim=-1)
    shares = [share(num_classes, axis.degree, index) for index in range(axis.degree)]
    return torch.cat([part[..., : end - begin] for part, (begin, end) in zip(parts, shares, strict=True)], dim=-1)


def _own_classes(gradient: Tensor, axis: Axis, num_classes: int) -> Tensor:
    begin, end = share(num_classes, axis.degree, axis.index)
    return gradient[..., begin:end]


_GATHER_CLASSES = Transposable(_all_classes, _own_classes, "tensor.x and tensor.y")


def gather_classes(logits: Tensor, axis: Axis, num_classes: int) -> Tensor:
    """Returns the logits of all classes from those of each rank's classes."""
    return _GATHER_CLASSES.apply(logits, axis, num_classes)


class _RefusingWatch(LogitsWatch):
    """Raises a PlanError where the logits are used in a way that needs all classes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def refuse(self, reason: str) -> None:
        raise _refusal(self._name, reason)


def _refusal(name: str, reason: str) -> PlanError:
    return PlanError(
        f"weft splits the result of '{name}', the last linear that the model registers, over x as its logits, and "
        f"{reason}; register the linear that makes the logits last and return its result as it is, or use tensor.x = 1"
    )


class HeadUse:
    """Watches what a model does with the result of its head, in its first forward in each mode (training or not).

    While `gather` is set, the model is not watched and gets what `gather` makes of its head's result.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name = name
        self.gather: Callable[[Tensor], Tensor] | None = None
        self._seen: set[bool] = set()
        self._places: dict[bool, tuple[int, ...]] = {}  # of the logits among the tensors of the model's result
        self._watch: LogitsWatch | None = None
        self._was_called = self._is_training = False
        self._inside = ExitStack()
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        model.register_forward_hook(self._close, always_call=True)
        model.get_submodule(name).register_forward_hook(self._after_head)

    def _begin(self, model: nn.Module, _: Any) -> None:
        is_compiled = torch.compiler.is_compiling() or any(m._compiled_call_impl is not None for m in model.modules())
        if model.training not in self._seen and not is_compiled and self.gather is None:
            self._is_training = model.training
            self._seen.add(model.training)
            self._watch, self._was_called = _RefusingWatch(self._name), False

    def _after_head(self, head: nn.Module, args: Any, result: Any) -> Any:
        if self.gather is not None:
            return self.gather(result)
        if self._watch is not None:
            self._was_called = True
            self._watch.take(head, args, result)
            self._inside.enter_context(self._watch)
        return result

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        watch = self._watch
        if watch is None:
            return
        if not self._was_called:
            raise _refusal(self._name, "the model does not call it")
        places = tuple(i for i, tensor in enumerate(tensors_in(output)) if watch.is_logits(tensor))
        if not places:
            raise _refusal(self._name, "the model does not return its result")
        self._places[self._is_training] = places

    def logits_in(self, model: nn.Module, output: Any) -> list[Tensor]:
        """Returns the logits in a model's output; of a model that was not watched, those that `logits_of` finds."""
        places = self._places.get(model.training)
        if places is None:
            return [] if isinstance(output, Mapping) and "logits" not in output else [logits_of(output)]
        tensors = tensors_in(output)
        return [tensors[place] for place in places if place < len(tensors)]

    def _close(self, *_: Any) -> None:
        self._inside.close()
        self._watch = None
