"""Products of matrices in fp8 (e4m3), of linears, with their gradients. Those of experts: `fp8_experts.py`.

Each row has its own scale, which maps the row's largest magnitude to the largest number of e4m3. Rows always lie along
the dim that the matmul sums over, so each matmul quantises its operands anew. Weights, activations and saved
activations stay bf16.

On a CPU the operands are rounded in the same way and multiplied in float32, so that tests check the same rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.inspection.first_order import first_order

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
SMALLEST_SCALE = 1e-12  # the scale of a row of zeros
MULTIPLE = 16  # features that the kernels take

_is_traced = False


@contextmanager
def traced_kernels() -> Iterator[None]:
    """Inside the context, products of fake tensors on a CPU are traced as the kernels of a GPU."""
    global _is_traced
    _is_traced = True
    try:
        yield
    finally:
        _is_traced = False


def _has_kernels(value: Tensor) -> bool:
    return value.device.type == "cuda" or _is_traced


def multiply(value: Tensor, weight: Tensor) -> Tensor:
    """Returns the product of value [..., in] and weight [out, in], like F.linear, in fp8 if the weight is bf16."""
    if value.shape[:-1].numel() == 0 or weight.dtype != torch.bfloat16:
        return torch.nn.functional.linear(value, weight)
    out: Tensor = _Multiply.apply(value, weight)
    return out


class _Multiply(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        rows = value.reshape(-1, value.shape[-1])  # [rows, in]
        return scaled_product(rows, weight, is_fast=True).view(*value.shape[:-1], len(weight))

    @staticmethod
    @first_order("matmul = 'fp8'")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (value, weight), (gradient,) = ctx.saved_tensors, gradients
        rows = gradient.reshape(-1, gradient.shape[-1])  # [rows, out]
        of_value = of_weight = None
        if ctx.needs_input_grad[0]:
            of_value = scaled_product(rows, weight.t(), is_fast=False).view(value.shape)
        if ctx.needs_input_grad[1]:
            given = value.reshape(-1, value.shape[-1])  # [rows, in]
            is_taken = len(rows) % MULTIPLE == 0  # whether the kernel supports it
            of_weight = scaled_product(rows.t(), given.t(), is_fast=False) if is_taken else rows.t() @ given
        return of_value, of_weight


def scaled_product(left: Tensor, right: Tensor, is_fast: bool) -> Tensor:
    """Returns left [m, k] times right [n, k] transposed: [m, n] in bf16.

    Each row of both is rounded to fp8 with its own scale.
    `is_fast` accumulates with fewer bits, which is precise enough for forwards, but not for gradients.
    """
    (a, scale_a), (b, scale_b) = quantise(left), quantise(right)
    if not _has_kernels(left):
        return ((a.float() @ b.float().t()) * scale_a * scale_b.t()).to(torch.bfloat16)
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of a matrix in fp8, and their scales [rows, 1] in float32."""
    wide = matrix.float()
    scale = _scale_of(wide.abs().amax(-1, keepdim=True))
    return _rounded(wide, scale), scale


def _scale_of(largest: Tensor) -> Tensor:
    return largest.clamp(min=SMALLEST_SCALE) / LARGEST


def _rounded(wide: Tensor, scale: Tensor) -> Tensor:
    return (wide / scale).clamp(-LARGEST, LARGEST).to(DTYPE).contiguous()
