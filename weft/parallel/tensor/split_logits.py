"""Logits of this rank's classes that become those of all classes as soon as code other than weft's uses them.

With the vocabulary split over x, a loss of the user's own (an entropy, a mean square, smoothed labels) would see only
this rank's classes. So a model returns its logits as `SplitLogits`: `weft.cross_entropy` takes this rank's part out,
and any other operation is given the logits of all ranks, gathered once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis
from weft.inspection.first_order import first_order
from weft.inspection.nested_tensors import map_tensors
from weft.inspection.parameter_cut import share
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


def gather_classes(logits: Tensor, axis: Axis, num_classes: int) -> Tensor:
    """Returns the logits of all classes from those of each rank's classes."""
    whole: Tensor = _GatherClasses.apply(logits, axis, num_classes)
    return whole


def gather_bytes(num_targets: int, num_classes: int, degree: int, itemsize: int) -> int:
    """Returns the bytes of the all-gather of a forward's logits. Backward does not communicate."""
    return num_targets * -(-num_classes // degree) * degree * itemsize


class _GatherClasses(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, axis: Axis, num_classes: int) -> Tensor:
        ctx.begin, ctx.end = share(num_classes, axis.degree, axis.index)
        widest = -(-num_classes // axis.degree)
        parts = gather_along(F.pad(logits, (0, widest - logits.shape[-1])), axis, -1).split(widest, dim=-1)
        shares = [share(num_classes, axis.degree, index) for index in range(axis.degree)]
        return torch.cat([part[..., : end - begin] for part, (begin, end) in zip(parts, shares, strict=True)], dim=-1)

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][..., ctx.begin : ctx.end], None, None
