"""FLOPs and shapes of matmuls, convolutions and attention, in forward (by torch's formulas) and backward.

The backward of a matmul or convolution has the FLOPs of its forward once for each operand that requires a gradient.
Attention's backward is counted as torch counts it: five matmuls, which are four for the two of forward, and the scores
computed once more. The counts differ from torch's counter in two points:

- torch has no formula for attention on a CPU or for grouped matmuls (experts), and counts nothing for them.
- torch counts the weight gradient of a convolution with groups `groups` times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import weft.models.row_operations  # noqa: F401 (defines an operation)
from weft.profiling.parts import Convolution, Flops, Matmul

aten = torch.ops.aten
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
ATTENTION = tuple(getattr(aten, name) for name in _ATTENTION)
GROUPED = aten._grouped_mm
WIDE = torch.ops.weft.wide_product
# Operations whose results selective recompute keeps: matmuls, convolutions, attention. Others are cheap to recompute.
KEPT_OPERATIONS = frozenset(
    [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default]
    + [aten.convolution.default, GROUPED.default, aten._scaled_grouped_mm.default, WIDE.default]
    + [packet.default for packet in ATTENTION]
)
# The positions of the two operands, where they are not the first two arguments.
_OPERANDS = {aten.addmm: slice(1, 3), aten.baddbmm: slice(1, 3)}


@dataclass(frozen=True)
class CountedProduct:
    """FLOPs and shape of an operation that multiplies: a matmul, a convolution, or attention (no shape)."""

    flops: Flops
    matmul: Matmul | None = None
    convolution: Convolution | None = None


def count_product(func: Any, args: Any, kwargs: Any, result: Any) -> CountedProduct | None:
    """Returns the FLOPs and shape of an operation; None if it does not multiply, or torch has no formula for it."""
    packet = func._overloadpacket
    if packet in ATTENTION:
        return CountedProduct(_attention(*args[:3]))
    if packet is GROUPED:
        matmul = _grouped(*args[:2])
        return CountedProduct(_twice_in_backward(2 * matmul.rows * matmul.inner * matmul.columns, args[:2]), matmul)
    if packet is WIDE:  # an autograd function, inside of which gradients are disabled
        rows, weight = args
        flops = 2 * rows.numel() * len(weight)
        return CountedProduct(
            Flops(flops, 0, 2 * flops * rows.requires_grad), Matmul(1, rows.shape[0], rows.shape[1], len(weight))
        )
    if packet not in flop_registry:
        return None
    operands = args[_OPERANDS.get(packet, slice(0, 2))]
    flops = _twice_in_backward(flop_registry[packet](*args, **kwargs, out_val=result), operands)
    if packet is aten.convolution:
        return CountedProduct(flops, convolution=_convolution(result, *args))
    if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        left, right = operands
        batch = left.shape[0] if left.dim() == 3 else 1
        return CountedProduct(flops, Matmul(batch, left.shape[-2], left.shape[-1], right.shape[-1]))
    return CountedProduct(flops)


def _twice_in_backward(flops: int, operands: Any) -> Flops:
    num_gradients = sum(operand.requires_grad for operand in operands) if torch.is_grad_enabled() else 0
    return Flops(flops, 0, flops * num_gradients)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Flops:
    # Full attention, as in torch's counter: a causal mask does not reduce it. There may be fewer key heads.
    batch, heads, queries, head_dim = query.shape
    scores, mixed = (2 * batch * heads * queries * key.shape[-2] * dim for dim in (head_dim, value.shape[-1]))
    has_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    return Flops(scores + mixed, scores + mixed, (3 * scores + 2 * mixed) * has_gradient)


def _grouped(left: Tensor, right: Tensor) -> Matmul:
    return Matmul(1, left.shape[0], left.shape[1], right.shape[-1], right.shape[0])


def _convolution(result: Tensor, value: Tensor, weight: Tensor, _: Any, *geometry: Any) -> Convolution:
    stride, padding, dilation, is_transposed, _, groups = geometry
    kernel = tuple(weight.shape[2:])

    def each(numbers: Any) -> tuple[int, ...]:
        return tuple(numbers) * (len(kernel) if len(numbers) == 1 else 1)

    return Convolution(
        value.shape[0],
        value.shape[1],
        result.shape[1],
        tuple(value.shape[2:]),
        tuple(result.shape[2:]),
        kernel,
        each(stride),
        each(padding),
        each(dilation),
        groups,
        is_transposed,
    )
