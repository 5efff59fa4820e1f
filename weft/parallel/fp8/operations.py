"""Operations on operands in fp8 (e4m3), most of them as operations of torch for experts: `torch.ops.weft`.

    quantise_rows              rows in fp8, each with its own scale
    quantise_gated             silu(gate) * up, as `quantise_rows`
    quantise_gated_gradient    the gradient of silu(gate) * up, as `quantise_rows`, and that of the rows' weights
    row_factors                what the rows of two operands are multiplied by, so that all of a group have one scale
    turn_rows                  rows gathered, multiplied by factors, rounded to fp8 and transposed
    fp8_rows_mm                rows times the weight of their group
    fp8_weights_mm             the sum over the rows of each group, as for the gradients of weights

Scales are powers of two, so that a number in fp8 can change its scale without a second rounding, unless it becomes
smaller than e4m3's smallest normal number, 2^-6. On GPUs they are Triton kernels (`row_kernel.py`, which reads and
writes each byte once, and `product_kernel.py`); elsewhere they are the plain functions here. Groups of rows that are
multiplied must begin and end at multiples of `ROWS_MULTIPLE` rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.experts import grouped_linear
from weft.models.row_operations import define, gated_gradient

ROWS_MULTIPLE = 128
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
SMALLEST_SCALE = 2.0**-60  # of a row of zeros; products of two scales are still normal numbers of float32


def scale_of(largest: Tensor) -> Tensor:
    """Returns the smallest power of two that maps these magnitudes (float32) to at most `LARGEST`."""
    bits = (largest / LARGEST).clamp(min=SMALLEST_SCALE).view(torch.int32)
    return ((bits + 0x7FFFFF) & -0x800000).view(torch.float32)  # the exponent, rounded up


def rounded(values: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 values [rows, columns] divided by scales [rows], in fp8."""
    return (values / scale[:, None]).to(DTYPE)


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows [rows, columns] in fp8, and their scales [rows]."""
    wide = rows.float()
    scale = scale_of(wide.abs().amax(1))
    return rounded(wide, scale), scale


def quantise_gated(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns silu(gate) * up of rows [rows, 2 * inner] in fp8, and the scales of the rows."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantise_rows(F.silu(gate) * up)


def quantise_gated_gradient(gradient: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of rows of gate_up [rows, 2 * inner] in fp8, its scales, and the gradient of `weights`.

    `gradient` [rows, inner] is that of silu(gate) * up for rows that count once; here row i counts `weights[i]` times.
    """
    wide, given = gate_up.float(), gradient.float()
    gate, up = wide.chunk(2, dim=-1)
    of_weights = (given * F.silu(gate) * up).sum(1)
    values, scale = quantise_rows(gated_gradient(given * weights[:, None], wide))
    return values, scale, of_weights


def row_factors(left: Tensor, right: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns left * right [rows], divided by the largest magnitude of the row's group, and these [groups].

    Group i ends before row `ends[i]`; rows behind the last group have the factor 0.
    """
    products, rows = left * right, torch.arange(len(left), device=left.device)
    groups = torch.searchsorted(ends.long(), rows, right=True)
    inside = groups < len(ends)
    products = torch.where(inside, products, 0.0)
    largest = products.new_zeros(len(ends) + 1).scatter_reduce(0, groups, products.abs(), "amax")
    largest = largest.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(inside, products / largest[groups], 0.0), largest[:-1]


def turn_rows(rows: Tensor, sources: Tensor | None, k: int, factors: Tensor | None, num_groups: int) -> Tensor:
    """Returns rows in fp8 with each of `num_groups` equal groups transposed: [groups, columns, rows of a group].

    With `sources` [rows] of pairs (`models/expert_rows.py`), the row of pair p is rows[p // k], and zeros if p is the
    number of pairs. Rows are multiplied by their `factors`; those with the factor 0 are zeros.
    """
    values = rows.float()
    if sources is not None:
        values = torch.cat([values, values.new_zeros(1, values.shape[1])])[(sources // k).clamp(max=len(rows))]
    if factors is not None:
        values = torch.where(factors[:, None] != 0, values * factors[:, None], 0.0)
    by_group: Tensor = values.to(DTYPE).unflatten(0, (num_groups, -1))
    return by_group.transpose(1, 2).contiguous()


# --- as operations of torch


def _by_kernel(plain: Any) -> Any:
    """Returns the Triton kernel of a plain function; nothing at all is left to the plain function."""

    def on_gpu(*args: Any) -> Any:
        if args[0].numel() == 0:
            return plain(*args)
        from weft.parallel.fp8 import row_kernel

        return getattr(row_kernel, plain.__name__)(*args)

    return on_gpu


def _scales(rows: Tensor, num_rows: int) -> Tensor:
    return rows.new_empty(num_rows, dtype=torch.float32)


define(
    "(Tensor rows) -> (Tensor, Tensor)",
    quantise_rows,
    _by_kernel(quantise_rows),
    lambda rows: (rows.new_empty(rows.shape, dtype=DTYPE), _scales(rows, len(rows))),
)
define(
    "(Tensor gate_up) -> (Tensor, Tensor)",
    quantise_gated,
    _by_kernel(quantise_gated),
    lambda gate_up: (
        gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2, dtype=DTYPE),
        _scales(gate_up, len(gate_up)),
    ),
)
define(
    "(Tensor gradient, Tensor gate_up, Tensor weights) -> (Tensor, Tensor, Tensor)",
    quantise_gated_gradient,
    _by_kernel(quantise_gated_gradient),
    lambda gradient, gate_up, weights: (
        gate_up.new_empty(gate_up.shape, dtype=DTYPE),
        _scales(gate_up, len(gate_up)),
        _scales(gate_up, len(gate_up)),
    ),
)
define(
    "(Tensor left, Tensor right, Tensor ends) -> (Tensor, Tensor)",
    row_factors,
    _by_kernel(row_factors),
    lambda left, right, ends: (_scales(left, len(left)), _scales(left, len(ends))),
)
define(
    "(Tensor rows, Tensor? sources, int k, Tensor? factors, int num_groups) -> Tensor",
    turn_rows,
    _by_kernel(turn_rows),
    lambda rows, sources, k, factors, num_groups: rows.new_empty(
        num_groups, rows.shape[1], len(rows if sources is None else sources) // num_groups, dtype=DTYPE
    ),
)


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
    from weft.parallel.fp8 import product_kernel as kernel

    if kernel.takes(*right.shape[1:]):
        return kernel.fp8_rows_mm(left, scale, right, scales, ends)
    return torch._scaled_grouped_mm(
        left, right.transpose(1, 2), scale, scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _weights_on_gpu(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    from weft.parallel.fp8 import product_kernel as kernel

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
