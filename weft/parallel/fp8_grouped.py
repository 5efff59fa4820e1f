"""Products in fp8 of rows in groups, as operations of torch: `torch.ops.weft`.

    fp8_rows_mm       rows times the weight of their group
    fp8_weights_mm    the sum over the rows of each group, as for the gradients of weights

On GPUs they are Triton kernels (`fp8_product_kernel.py`), or torch's for sizes that these do not take. Elsewhere
numbers in fp8 are multiplied in float32. Groups must begin and end at multiples of `ROWS_MULTIPLE` rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.models.experts import grouped_linear
from weft.models.row_operations import define

ROWS_MULTIPLE = 128


def fp8_rows_mm(left: Tensor, scale: Tensor, right: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """Returns left [rows, k], sorted by group, times right [groups, n, k] of their group transposed: [rows, n] in bf16.

    Both are in fp8, with scales [rows] and [groups, n]. Group i ends before row `ends[i]` (int32); rows behind the last
    are not computed.
    """
    product = grouped_linear(left.float() * scale[:, None], right.float() * scales[..., None], ends)
    return product.to(torch.bfloat16)


def fp8_weights_mm(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Returns for each group its part of left [m, rows] times that of right [n, rows] transposed: [groups, m, n], bf16.

    Both are in fp8; the product of a group is multiplied by its scale [groups].
    """
    product = torch._grouped_mm(left.float(), right.float().t(), offs=ends)
    return (product * scale[:, None, None]).to(torch.bfloat16)


def _rows_on_gpu(left: Tensor, scale: Tensor, right: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    from weft.parallel import fp8_product_kernel as kernel

    if kernel.takes(*right.shape[1:]):
        return kernel.fp8_rows_mm(left, scale, right, scales, ends)
    return torch._scaled_grouped_mm(
        left, right.transpose(1, 2), scale, scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _weights_on_gpu(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    from weft.parallel import fp8_product_kernel as kernel

    if kernel.takes(len(left), len(right)):
        return kernel.fp8_weights_mm(left, right, scale, ends)
    of_left, of_right = scale[:, None].expand(-1, len(left)).flatten(), scale.new_ones(len(scale) * len(right))
    return torch._scaled_grouped_mm(
        left, right.t(), of_left, of_right, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


define(
    "(Tensor left, Tensor scale, Tensor right, Tensor scales, Tensor ends) -> Tensor",
    fp8_rows_mm,
    _rows_on_gpu,
    lambda left, scale, right, scales, ends: left.new_empty(len(left), right.shape[1], dtype=torch.bfloat16),
)
define(
    "(Tensor left, Tensor right, Tensor scale, Tensor ends) -> Tensor",
    fp8_weights_mm,
    _weights_on_gpu,
    lambda left, right, scale, ends: left.new_empty(len(ends), len(left), len(right), dtype=torch.bfloat16),
)
