"""The training loss as a sum and a count, so that every layout can normalise by the global number of tokens.

`head_loss` computes the last linear and the loss together, for some rows at a time: it computes their logits, replaces
them by their gradient, and multiplies that by the weight. So the whole logits are never in memory. Nothing is computed
twice: forward computes the gradients of hidden states and weight, and backward only scales them. The weight's gradient
is accumulated over the parts in at least float32 and rounded once, like that of a single matmul.

A label that is neither a class nor IGNORE makes the loss and its gradient NaN, in every implementation and on every
device. Nothing is read outside of a row, the host does not wait for the device, and a guarded step skips its update
(`count_unknown` describes the labels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton

IGNORE = -100  # a label that does not count in the loss
PART_NUMEL = 2**29  # the number of logits computed at a time: 1 GiB of bf16
ROW_MULTIPLE = 64  # a part has a multiple of so many rows, so that parts have equal sizes and kernels get whole tiles
CLASS_MULTIPLE = 8  # rows aligned to 16 bytes; without it a GPU's matmul of 50,257 classes runs at a fifth of its speed

_in_gradient = False


def token_loss(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy summed over the positions whose label is not IGNORE, and the number of such positions.

    logits are [batch, sequence, vocab]. labels are [batch, sequence], already shifted: labels[t] is the target of
    position t. Computed in at least float32. Without valid positions the sum and the count are 0. `z_loss` times the
    squared logarithm of the softmax's denominator is added for each position, which keeps logits from drifting.
    """
    wide, flat = logits.to(_wide(logits)).flatten(0, -2), labels.flatten()  # [positions, vocab], [positions]
    unknown, valid = is_unknown(flat, wide.shape[1]), labels != IGNORE
    total = F.cross_entropy(wide, flat.masked_fill(unknown, IGNORE), ignore_index=IGNORE, reduction="sum")
    total = total * torch.where(unknown.any(), torch.nan, 1.0).to(total.dtype)
    if z_loss:
        total = total + z_loss * torch.where(valid.flatten(), wide.logsumexp(-1), 0.0).square().sum()
    return total, valid.sum()


def is_unknown(labels: Tensor, num_classes: int) -> Tensor:
    """Returns a mask of the labels that are neither a class nor IGNORE."""
    return ((labels < 0) | (labels >= num_classes)) & (labels != IGNORE)


def count_unknown(labels: Tensor, num_classes: int) -> str | None:
    """Describe labels that are neither a class nor IGNORE; None if there are none. Waits for the device."""
    wrong, num_labels = labels[is_unknown(labels, num_classes)], labels.numel()
    if not len(wrong):
        return None
    return (
        f"{len(wrong)} of {num_labels} labels are none of the model's {num_classes} classes, {int(wrong[0])} first; "
        f"use 0 to {num_classes - 1}, or {IGNORE} for what does not count"
    )


@dataclass(frozen=True)
class ExampleLoss:
    """The loss of an example, for a profile. If the output is a loss already (a scalar), returns it unchanged."""

    labels: Callable[[], Tensor]

    def __call__(self, output: Tensor) -> Tensor:
        if not output.dim():
            return output
        labels = self.labels()
        if output.shape[:-1] != labels.shape:  # a class of each pixel: logits are [batch, classes, height, width]
            output = output.movedim(1, -1)
        return token_loss(output, labels)[0]


def rows_loss(logits: Tensor, labels: Tensor, z_loss: float | None, with_gradient: bool) -> Tensor:
    """Returns the summed loss of some rows of logits [rows, vocab], and overwrites them: `with_gradient`, by their
    gradient.

    z_loss = None, not 0, leaves the z-loss out, because torch.compile turns a number into an input.
    """
    wide, valid = logits.to(_wide(logits)), labels != IGNORE
    unknown = is_unknown(labels, wide.shape[1])
    target = labels.masked_fill(unknown | ~valid, 0)  # any class will do for a label that does not count
    scale = wide.logsumexp(-1).masked_fill(unknown, torch.nan)  # [rows]
    chosen = wide.gather(1, target[:, None])[:, 0]
    losses = scale - chosen
    if z_loss is not None:
        losses = losses + z_loss * scale.square()
    total = torch.where(valid, losses, 0.0).sum()
    if with_gradient:
        factor = valid if z_loss is None else (1 + 2 * z_loss * scale) * valid
        wide.sub_(scale[:, None]).exp_().mul_(factor[:, None])
        if torch.compiler.is_compiling():  # fused into the pass over all logits, not a separate kernel
            classes = torch.arange(wide.shape[1], device=wide.device)
            wide.sub_(((classes == target[:, None]) & valid[:, None]).to(wide.dtype))
        else:
            wide.scatter_add_(1, target[:, None], -valid.to(wide.dtype)[:, None])
        logits.copy_(wide)
    return total


def fused_rows_loss(logits: Tensor, labels: Tensor, z_loss: float | None, with_gradient: bool) -> Tensor:
    """Stands for the compiled `rows_loss` in a count of memory: it allocates as much, since it works in place."""
    return logits.sum(dtype=_wide(logits))


RowsLoss = Callable[[Tensor, Tensor, float | None, bool], Tensor]


def rows_kernel(device: torch.device) -> RowsLoss | None:
    """Return the Triton kernel that computes what `rows_loss` does; None on a device without Triton."""
    if device.type != "cuda" or not has_triton():
        return None
    from weft.models.loss_kernel import rows_loss_by_kernel

    return rows_loss_by_kernel


def head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float = 0.0, rows: RowsLoss = rows_loss
) -> Tensor:
    """Compute `token_loss(F.linear(hidden, weight, bias), labels, z_loss)[0]` in parts, each part's loss by `rows`."""
    total: Tensor = _HeadLoss.apply(hidden, weight, bias, labels, z_loss, rows, torch.is_grad_enabled())
    return total


def row_slices(num_rows: int, num_classes: int) -> list[slice]:
    """Returns the slices of rows that are computed together, of about equal size and at most PART_NUMEL logits each."""
    most = max(1, PART_NUMEL // num_classes)
    even = -(-num_rows // max(1, -(-num_rows // most)))
    size = max(1, -(-even // ROW_MULTIPLE)) * ROW_MULTIPLE
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        z_loss: float,
        rows: RowsLoss,
        with_gradient: bool,
    ) -> Tensor:
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)  # [positions, features], [positions]
        needs = [with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(flat) if needs[0] else None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
        num_classes, weight, bias = len(weight), _padded(weight), None if bias is None else _padded(bias)
        for part in row_slices(len(flat), len(weight)):
            logits = F.linear(flat[part], weight, bias)  # [rows, classes + padding]; the padding stays zero
            total += rows(logits[:, :num_classes], targets[part], z_loss or None, any(needs))
            with _gradients():  # from here on `logits` holds the gradient of the logits
                if of_hidden is not None:
                    torch.mm(logits, weight, out=of_hidden[part])
                if needs[1]:
                    of_weight = _add_product(of_weight, logits.t(), flat[part])
                if needs[2]:
                    of_bias = _add(of_bias, logits.sum(0))
            del logits
        of_weight, of_bias = (None if one is None else one[:num_classes] for one in (of_weight, of_bias))
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_hidden, of_weight, of_bias = (
            None if one is None else torch.mul(one, gradient, out=torch.empty_like(one, dtype=ctx.dtype))
            for one in ctx.saved_tensors
        )
        return None if of_hidden is None else of_hidden.view(ctx.shape), of_weight, of_bias, None, None, None, None


def _needs_padding(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.element_size() == 2


def _padded(tensor: Tensor) -> Tensor:
    """Append classes of zeros if that makes matmuls faster."""
    missing = -len(tensor) % CLASS_MULTIPLE if _needs_padding(tensor) else 0
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor


def _add_product(so_far: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """so_far + left @ right in at least float32. On a GPU, the matmul itself accumulates."""
    if so_far is None or left.device.type != "cuda" or left.dtype == so_far.dtype:
        return _add(so_far, left @ right)
    return torch.ops.aten.addmm.dtype_out(so_far, left, right, so_far.dtype, out=so_far)  # type: ignore[no-any-return]


def _add(so_far: Tensor | None, one: Tensor) -> Tensor:
    return one.to(_wide(one)) if so_far is None else so_far.add_(one)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def is_gradient_work() -> bool:
    """Returns whether a forward is computing gradients at the moment. A count of FLOPs adds these to backward."""
    return _in_gradient


@contextmanager
def _gradients() -> Iterator[None]:
    global _in_gradient
    _in_gradient = True
    try:
        yield
    finally:
        _in_gradient = False
