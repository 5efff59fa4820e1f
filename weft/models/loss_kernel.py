"""`rows_loss` of `loss.py` as one Triton kernel for GPUs, which reads a row from memory once and writes it once.

A program handles one row. It reads the row for the softmax's denominator, and again for the gradient while the row is
still in the GPU's cache. The kernel that torch.compile made of `rows_loss` read the rows three times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.loss import IGNORE, rows_loss

_WIDTH = 8192  # the number of logits that are loaded at a time
_NUM_WARPS = 16


@triton.jit
def _rows(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    stride,
    z_loss,
    NUM_CLASSES: tl.constexpr,
    IGNORED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * stride
    label = tl.load(labels_ptr + row)
    valid = (label != IGNORED).to(tl.float32)
    # Loaded before anything is written: the reductions below synchronise the threads, so all have read it by then.
    is_class = (label >= 0) & (label < NUM_CLASSES)
    chosen = tl.load(start + label, mask=is_class, other=0.0).to(tl.float32)
    largest, total = float("-inf"), 0.0
    for low in range(0, NUM_CLASSES, WIDTH):
        place = low + tl.arange(0, WIDTH)
        values = tl.load(start + place, mask=place < NUM_CLASSES, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - highest) + tl.sum(tl.exp(values - highest), 0)
        largest = highest
    scale = largest + tl.log(total)
    scale = tl.where(is_class | (label == IGNORED), scale, float("nan"))  # no class: neither loss nor gradient
    tl.store(losses_ptr + row, tl.where(valid > 0, scale - chosen + z_loss * scale * scale, 0.0))
    if WITH_GRADIENT:
        factor = valid * (1 + 2 * z_loss * scale)
        for low in range(0, NUM_CLASSES, WIDTH):
            place = low + tl.arange(0, WIDTH)
            values = tl.load(start + place, mask=place < NUM_CLASSES, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(values - scale) * factor - tl.where(place == label, valid, 0.0)
            tl.store(start + place, gradient.to(logits_ptr.dtype.element_ty), mask=place < NUM_CLASSES)


def rows_loss_by_kernel(logits: Tensor, labels: Tensor, z_loss: float | None, with_gradient: bool) -> Tensor:
    """Computes `rows_loss` by the kernel; falls back to `rows_loss` for float64 and other layouts."""
    if logits.dtype == torch.float64 or logits.stride(1) != 1 or not logits.numel():
        return rows_loss(logits, labels, z_loss, with_gradient)
    losses = torch.empty(len(logits), device=logits.device)
    _rows[(len(logits),)](
        logits,
        labels,
        losses,
        logits.stride(0),
        float(z_loss or 0.0),
        NUM_CLASSES=logits.shape[1],
        IGNORED=IGNORE,
        WITH_GRADIENT=with_gradient,
        WIDTH=min(_WIDTH, triton.next_power_of_2(logits.shape[1])),
        num_warps=_NUM_WARPS,
    )
    return losses.sum()
