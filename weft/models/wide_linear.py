"""A linear whose results are at least float32, for routers: the order of scores decides where tokens go.

On GPUs, numbers of 16 bits are multiplied by tensor cores, which add up exact products in float32. So nothing is cast,
and results have the precision of float32. In backward, the float32 gradient is split into two bf16 numbers, of which
the second is what the first has lost: their products have 16 bits of it. As `torch.ops.weft`, as in
`row_operations.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.models.row_operations import define


def wide_linear(value: Tensor, weight: Tensor) -> Tensor:
    """Returns value [..., in] times weight [out, in] transposed, in at least float32."""
    out: Tensor = _WideLinear.apply(value.flatten(0, -2), weight)
    return out.view(*value.shape[:-1], len(weight))


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        product: Tensor = torch.ops.weft.wide_product(rows, weight)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_rows, of_weight = torch.ops.weft.wide_gradients(gradient, *ctx.saved_tensors)
        return of_rows, of_weight


def wide_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns rows [rows, in] times weight [out, in] transposed, in at least float32."""
    return F.linear(rows.to(_wide(rows)), weight.to(_wide(rows)))


def wide_gradients(gradient: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows and weight from that of their wide product [rows, out]."""
    of_rows, of_weight = gradient @ weight.to(gradient.dtype), gradient.t() @ rows.to(gradient.dtype)
    return of_rows.to(rows.dtype), of_weight.to(weight.dtype)


def wide_product_on_gpu(rows: Tensor, weight: Tensor) -> Tensor:
    """`wide_product` by tensor cores for numbers of 16 bits."""
    if not _has_kernel(rows, weight):
        return wide_product(rows, weight)
    return torch.mm(rows, weight.t(), out_dtype=torch.float32)


def wide_gradients_on_gpu(gradient: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`wide_gradients` by tensor cores for numbers of 16 bits."""
    if not _has_kernel(rows, weight):
        return wide_gradients(gradient, rows, weight)
    both = split_in_two(gradient, rows.dtype)
    of_rows = both @ weight.repeat(2, 1)
    high, low = torch.mm(both.t(), rows, out_dtype=torch.float32).chunk(2)
    return of_rows, (high + low).to(weight.dtype)


def split_in_two(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns each float32 of [rows, columns] as two numbers of 16 bits with nearly its sum [rows, 2 * columns]."""
    high = values.to(dtype)
    return torch.cat([high, (values - high.float()).to(dtype)], dim=1)


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    return rows.dtype == weight.dtype == torch.bfloat16 and len(rows) > 0


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


define(
    "(Tensor rows, Tensor weight) -> Tensor",
    wide_product,
    wide_product_on_gpu,
    lambda rows, weight: rows.new_empty(len(rows), len(weight), dtype=_wide(rows)),
)
define(
    "(Tensor gradient, Tensor rows, Tensor weight) -> (Tensor, Tensor)",
    wide_gradients,
    wide_gradients_on_gpu,
    lambda gradient, rows, weight: (rows.new_empty(rows.shape), weight.new_empty(weight.shape)),
)
