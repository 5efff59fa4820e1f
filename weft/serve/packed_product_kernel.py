"""The product with a weight of `Grouped` (`weight_formats.py`) as a Triton kernel, for few rows: reads each code once.

A program computes some outputs of one row. Of each group of inputs it needs

    sum of (code * scale + least) * x  =  scale * (sum of code * x) + least * (sum of x)

so codes are multiplied as they are, and scales once a group. The plain function first writes the weight to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_OUTPUTS = 16  # of a program


@triton.jit
def _product(
    hidden_ptr,
    code_ptr,
    scale_ptr,
    least_ptr,
    out_ptr,
    num_in,
    num_out,
    hidden_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row, outputs = tl.program_id(0).to(tl.int64), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < num_out
    place = outputs.to(tl.int64)
    num_groups = num_in // GROUP
    per_byte: tl.constexpr = 8 // BITS
    total = tl.zeros([OUTPUTS], tl.float32)
    for group in range(num_groups):
        byte = tl.arange(0, GROUP // per_byte)
        codes = tl.load(
            code_ptr + place[:, None] * (num_in // per_byte) + group * (GROUP // per_byte) + byte[None, :],
            mask=inside[:, None],
            other=0,
        ).to(tl.int32)
        first = hidden_ptr + row * hidden_stride + group * GROUP + byte * per_byte
        given = tl.load(first).to(tl.float32)
        if BITS == 8:
            products = tl.sum(codes.to(tl.float32) * given[None, :], 1)
            inputs = tl.sum(given, 0)
        else:
            odd = tl.load(first + 1).to(tl.float32)
            low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
            products = tl.sum(low * given[None, :] + high * odd[None, :], 1)
            inputs = tl.sum(given + odd, 0)
        scale = tl.load(scale_ptr + place * num_groups + group, mask=inside, other=0.0).to(tl.float32)
        least = tl.load(least_ptr + place * num_groups + group, mask=inside, other=0.0).to(tl.float32)
        total += scale * products + least * inputs
    tl.store(out_ptr + row * num_out + outputs, total.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_product_by_kernel(hidden: Tensor, codes: Tensor, scale: Tensor, least: Tensor, bits: int) -> Tensor:
    """hidden [rows, in] @ weight.T, from codes [out, in * bits / 8], scale and least [out, groups] (float16)."""
    num_rows, num_in = hidden.shape
    num_out, num_groups = scale.shape
    assert hidden.stride(1) == 1, "the inputs of a row lie end to end"
    out = torch.empty(num_rows, num_out, dtype=hidden.dtype, device=hidden.device)
    _product[(num_rows, triton.cdiv(num_out, _OUTPUTS))](
        hidden,
        codes,
        scale,
        least,
        out,
        num_in,
        num_out,
        hidden.stride(0),
        BITS=bits,
        GROUP=num_in // num_groups,
        OUTPUTS=_OUTPUTS,
        num_warps=4,
    )
    return out
