"""Products with quantised weights (`weight_formats.py`) as Triton kernels, for some rows: each code is read once.

A program computes some outputs of all rows from a part of the inputs. Codes become numbers in registers and go to the
tensor cores. A second kernel adds up the parts and does what follows a product: bias, residual, silu(gate) * up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.weights.shared_steps_kernel import four_bit_numbers, fp8_numbers, halves
from weft.serve.weights.steps import AfterProduct

_OUTPUTS = 64  # of a program
_PROGRAMS = 512  # as many as keep a GPU busy
_WARPS = 2
_STAGES = 4
_COLUMNS = 512  # of a program of the second kernel


@triton.jit
def _ranges(range_ptr, place, inside):
    """Return the scales and zero points of a group for each output."""
    return halves(tl.load(range_ptr + place, mask=inside, other=0))


@triton.jit
def _dequantised(numbers, scale, least, DTYPE: tl.constexpr):
    return numbers * scale.to(DTYPE)[:, None] + least.to(DTYPE)[:, None]


@triton.jit
def products_of_blocks(
    given, code_ptr, range_ptr, outputs, inside, exists, begin, end, num_blocks,
    BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BY_PTX: tl.constexpr,
):  # fmt: skip
    """Return the products [ROWS, OUTPUTS] of rows, which begin at `given` [ROWS, 1], by the inputs of blocks from
    `begin` to `end`. A block has one or two groups; none: codes are float8. Ranges are loaded a block ahead.
    """
    dtype: tl.constexpr = given.dtype.element_ty
    width: tl.constexpr = BLOCK * BITS // 8  # bytes of a block
    exists = exists[:, None]
    column, groups = tl.arange(0, width), outputs.to(tl.int64) * (num_blocks * GROUPS)
    given = given + column[None, :]
    codes_at = code_ptr + outputs.to(tl.int64)[:, None] * (num_blocks * width) + column[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    if GROUPS > 0:
        first_group = groups + tl.minimum(begin, num_blocks - 1) * GROUPS
        low_scale, low_least = _ranges(range_ptr, first_group, inside)
        high_scale, high_least = low_scale, low_least
        if GROUPS == 2:
            high_scale, high_least = _ranges(range_ptr, first_group + 1, inside)
    for block in range(begin, end):
        codes = tl.load(codes_at + block * width, mask=inside[:, None], other=0)
        low_hidden = tl.load(given + block * BLOCK, mask=exists, other=0.0)
        if BITS == 4:
            low, high = four_bit_numbers(codes, dtype, BY_PTX)
            high_hidden = tl.load(given + block * BLOCK + width, mask=exists, other=0.0)
            total = tl.dot(low_hidden, tl.trans(_dequantised(low, low_scale, low_least, dtype)), total)
            total = tl.dot(high_hidden, tl.trans(_dequantised(high, high_scale, high_least, dtype)), total)
        else:
            if GROUPS > 0:
                numbers = _dequantised(codes.to(dtype), low_scale, low_least, dtype)
            else:
                numbers = fp8_numbers(codes, dtype, BY_PTX)
            total = tl.dot(low_hidden, tl.trans(numbers), total)
        if GROUPS > 0:
            next_group = groups + tl.minimum(block + 1, num_blocks - 1) * GROUPS
            low_scale, low_least = _ranges(range_ptr, next_group, inside)
            high_scale, high_least = low_scale, low_least
            if GROUPS == 2:
                high_scale, high_least = _ranges(range_ptr, next_group + 1, inside)
    if GROUPS == 0:
        total *= tl.load(range_ptr + outputs, mask=inside, other=0.0)[None, :]
    return total


@triton.jit
def _product(
    hidden_ptr, code_ptr, range_ptr, out_ptr, num_rows, num_in, num_out, hidden_stride,
    BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, by a part of the inputs."""
    part = tl.program_id(1)
    outputs, rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    inside, exists = outputs < num_out, rows < num_rows
    num_blocks = num_in // BLOCK
    begin, end = part * tl.cdiv(num_blocks, PARTS), tl.minimum((part + 1) * tl.cdiv(num_blocks, PARTS), num_blocks)
    total = products_of_blocks(
        hidden_ptr + rows.to(tl.int64)[:, None] * hidden_stride, code_ptr, range_ptr, outputs, inside, exists,
        begin, end, num_blocks, BITS, BLOCK, GROUPS, ROWS, OUTPUTS, BY_PTX,
    )  # fmt: skip
    out = out_ptr + (part * num_rows + rows).to(tl.int64)[:, None] * num_out + outputs[None, :]
    tl.store(out, total, mask=exists[:, None] & inside[None, :])


@triton.jit
def _finish(
    part_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, num_out, residual_stride,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the parts [parts, rows, outputs], and what follows. `num_out` are the outputs of a result."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_out
    width = num_out * 2 if IS_GATED else num_out
    total, up = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        given = part_ptr + (part * num_rows + row) * width + columns
        total += tl.load(given, mask=inside, other=0.0)
        if IS_GATED:
            up += tl.load(given + num_out, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if IS_GATED:
            up += tl.load(bias_ptr + num_out + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_GATED:
        total = up * total / (1 + tl.exp(-total))
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_out + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def packed_product_by_kernel(
    hidden: Tensor,
    codes: Tensor,
    ranges: Tensor,
    sizes: tuple[int, int, int],
    after: AfterProduct = AfterProduct(),  # noqa: B008
) -> Tensor:
    """hidden [rows, in] @ weight.T, from codes [out, in * bits / 8], and what follows.

    `sizes` are bits, inputs of a block and groups of a block. Codes of 4 bits lie in blocks, the first half of a block
    in the low halves of its bytes. `ranges` are scales and zero points as they are kept (`weight_formats.py`) [out,
    groups]; of float8, whose blocks have no groups, scales [out] in float32.
    """
    (num_rows, num_in), num_out = hidden.shape, len(codes)
    assert hidden.stride(1) == 1, "the inputs of a row lie end to end"
    bits, block, groups = sizes
    tiles = triton.cdiv(num_out, _OUTPUTS)
    most = min(8, max(1, num_in // block // 4))  # a program has at least four blocks
    num_parts = min(most, triton.next_power_of_2(triton.cdiv(_PROGRAMS, tiles)))
    parts = torch.empty(num_parts, num_rows, num_out, dtype=torch.float32, device=hidden.device)
    _product[(tiles, num_parts)](
        hidden,
        codes,
        ranges,
        parts,
        num_rows,
        num_in,
        num_out,
        hidden.stride(0),
        BITS=bits,
        BLOCK=block,
        GROUPS=groups,
        PARTS=num_parts,
        ROWS=max(16, triton.next_power_of_2(num_rows)),  # tensor cores need 16
        OUTPUTS=_OUTPUTS,
        BY_PTX=hidden.is_cuda and torch.version.hip is None,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    bias, residual, is_gated = after
    num_results = num_out // 2 if is_gated else num_out
    out = hidden.new_empty(num_rows, num_results)
    _finish[(num_rows, triton.cdiv(num_results, _COLUMNS))](
        parts,
        hidden if bias is None else bias,
        hidden if residual is None else residual,
        out,
        num_rows,
        num_results,
        0 if residual is None else residual.stride(0),
        PARTS=num_parts,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return out
