"""Products of few rows with quantised weights (`weight_formats.py`), as one Triton kernel with all around them.

A decode of one request reads a weight in some microseconds, so one kernel computes the norm before a product, the
product, and bias, residual or silu(gate) * up after it.

Codes are the first operand of the product, which fills the tensor cores: these take 16 rows of the first and 8 columns
of the second. Few rows of inputs would leave columns empty. So the inputs are dealt out to chunks, block by block, and
a tile has all chunks of some outputs below each other, and all chunks of the inputs side by side. Its product is each
chunk of codes times each chunk of inputs; those of the same chunk are added up at the end. A step reads one block of
each chunk, which lie end to end in memory. Scales and zero points belong to outputs, which are the rows, so they are
applied to products: sum of (code * scale + zero point) * input = scale * sum of code * input + zero point * sum of
inputs. The sums of inputs are a product with ones.

Weights may be those of experts. Rows are then sorted by expert, and a tile has some rows of one expert. The choice of
experts is known on the device alone, so there are as many tiles as any choice needs; some have no rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.serve.weights.shared_steps_kernel import ones_like, raised_four_bit_numbers, small_fp8_numbers, two_ranges
from weft.serve.weights.steps import AfterProduct

_TILE, _LARGE_TILE = 64, 128  # rows of codes: outputs times chunks
_MANY_PROGRAMS = 1024  # so many large tiles are better than twice as many tiles
_MAX_CHUNKS = 8
_WARPS = 2
_STAGES = 3
_SQUARES = 4096  # inputs that are squared at a time


class ExpertRows(NamedTuple):
    """Rows that are sorted by expert; expert i's end before row `ends[i]`. They are rows of tokens: row r is that of
    token sources[r] // k. Where `is_single`, each row is one expert's alone: that of row r is `ends[r]`.
    """

    ends: Tensor
    sources: Tensor | None
    k: int
    num_rows: int
    num_experts: int
    is_single: bool = False

    @property
    def rows_each(self) -> int:
        """Rows of an expert, in the mean, as a power of two."""
        mean: int = triton.next_power_of_2(triton.cdiv(self.num_rows, self.num_experts))
        return mean

    def num_tiles(self, tile: int) -> int:
        """Tiles of at most `tile` rows, as many as any choice of experts needs."""
        return min(self.num_rows, self.num_experts + self.num_rows // tile)


@triton.jit
def rows_of_tile(end_ptr, tile, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, IS_SINGLE: tl.constexpr):
    """Return the expert of a tile, and its first row and the row behind its last; both are equal for a tile too
    many.
    """
    if IS_SINGLE:
        expert, begin, end = tl.load(end_ptr + tile).to(tl.int32), tile, tile + 1
    else:
        number = tl.arange(0, EXPERTS)
        exists = number < num_experts
        ends = tl.load(end_ptr + number, mask=exists, other=0)
        begins = tl.load(end_ptr + number - 1, mask=exists & (number > 0), other=0)
        num_tiles = tl.cdiv(ends - begins, ROWS)
        last = tl.cumsum(num_tiles, 0)
        expert = tl.sum((exists & (last <= tile)).to(tl.int32), 0)
        is_own = number == expert
        first = tl.sum(tl.where(is_own, last - num_tiles, 0), 0)
        begin = tl.sum(tl.where(is_own, begins, 0), 0) + (tile - first) * ROWS
        end = tl.minimum(tl.sum(tl.where(is_own, ends, 0), 0), begin + ROWS)
        end = tl.where(expert < num_experts, end, begin)
        expert = tl.minimum(expert, num_experts - 1)
    return expert, begin, end


@triton.jit
def _add_group(total, product, sums, both, raised):
    """Add a group's part of the results: from the product of codes that are raised, the sums of inputs, and the 32 bits
    of a scale and a zero point.
    """
    scale, zero_point = two_ranges(both, False)
    return product * scale[:, None] + (sums * (zero_point - raised * scale)[:, None] + total)


@triton.jit
def _normed_inputs(given, norms, exists, factor, DTYPE: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return inputs times the norm's weights and a factor. The norm's own factor is the same for all of a row, and
    applied at the end.
    """
    inputs = tl.load(given, mask=exists, other=0.0)
    if HAS_NORM:
        weights = tl.load(norms, mask=exists, other=0.0)
        inputs = (inputs.to(tl.float32) * weights.to(tl.float32)).to(DTYPE)
    if factor != 1.0:
        inputs = (inputs.to(tl.float32) * factor).to(DTYPE)
    return inputs


@triton.jit
def _given_rows(source_ptr, rows, exists, K: tl.constexpr):
    """Return the tokens of rows, if there is a K; otherwise the rows themselves."""
    if K > 0:
        rows = tl.load(source_ptr + rows, mask=exists, other=0) // K
    return rows


@triton.jit
def _inputs_of_rows(
    hidden_ptr, start, num_rows, num_in, hidden_stride, ROWS: tl.constexpr, SQUARES: tl.constexpr
):  # fmt: skip
    """Return some inputs of all rows [SQUARES, ROWS]."""
    rows, column = tl.arange(0, ROWS), start + tl.arange(0, SQUARES)
    exists = (column < num_in)[:, None] & (rows < num_rows)[None, :]
    return tl.load(hidden_ptr + rows[None, :] * hidden_stride + column[:, None], mask=exists, other=0.0)


@triton.jit
def _norm_factor(
    hidden_ptr, eps, num_rows, num_in, hidden_stride, ROWS: tl.constexpr, SQUARES: tl.constexpr
):  # fmt: skip
    """Return the norm's factor of each row: [1, ROWS]."""
    squares = tl.zeros([SQUARES, ROWS], tl.float32)
    for start in range(0, num_in, SQUARES):
        inputs = _inputs_of_rows(hidden_ptr, start, num_rows, num_in, hidden_stride, ROWS, SQUARES).to(tl.float32)
        squares += inputs * inputs
    return tl.rsqrt(tl.sum(squares, 0) / num_in + eps)[None, :]


@triton.jit
def _halves(pairs, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Return the first and the second half of [2 * HALF, ROWS]."""
    split = tl.reshape(pairs, [2, HALF, ROWS])
    is_first = (tl.arange(0, 2) == 0)[:, None, None]
    return tl.sum(tl.where(is_first, split, 0.0), 0), tl.sum(tl.where(is_first, 0.0, split), 0)


@triton.jit
def _finished(
    total, bias_ptr, residual_ptr, outs, rows, exists, num_results, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr, RESULTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return what follows a product, of [outputs, ROWS]: [RESULTS, ROWS]."""
    exists_out = outs < num_results
    if IS_GATED:
        gate, total = _halves(total, RESULTS, ROWS)
        if HAS_BIAS:
            gate += tl.load(bias_ptr + outs, mask=exists_out, other=0.0).to(tl.float32)[:, None]
            total += tl.load(bias_ptr + num_results + outs, mask=exists_out, other=0.0).to(tl.float32)[:, None]
        total = total * gate / (1 + tl.exp(-gate))
    elif HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=exists_out, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        place = residual_ptr + rows[None, :] * residual_stride + outs[:, None]
        total += tl.load(place, mask=exists, other=0.0).to(tl.float32)
    return total


@triton.jit
def _add_block(
    total, codes, ranges_at, given, norms, exists,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, HAS_NORM: tl.constexpr,
    BY_PTX: tl.constexpr,
):  # fmt: skip
    """Add the product of a block of codes and inputs. Codes of float8 have no groups; they are scaled at the end."""
    if GROUPS == 0:
        numbers, root = small_fp8_numbers(codes, DTYPE, BY_PTX)
        inputs = _normed_inputs(given, norms, exists, root, DTYPE, HAS_NORM)
        total = tl.dot(numbers, inputs, total, input_precision="ieee")
    else:
        ranges, ones = tl.load(ranges_at), ones_like(codes, DTYPE, BY_PTX)
        inputs = _normed_inputs(given, norms, exists, 1.0, DTYPE, HAS_NORM)
        sums = tl.dot(ones, inputs, input_precision="ieee")
        if BITS == 4:
            low, high, raised = raised_four_bit_numbers(codes, DTYPE, BY_PTX)
            product = tl.dot(low, inputs, input_precision="ieee")
            inputs = _normed_inputs(given + WIDTH, norms + WIDTH, exists, 1.0, DTYPE, HAS_NORM)
            if GROUPS == 2:
                total = _add_group(total, product, sums, ranges, raised)
                product = tl.dot(high, inputs, input_precision="ieee")
                sums = tl.dot(ones, inputs, input_precision="ieee")
                total = _add_group(total, product, sums, ranges >> 32, raised)
            else:
                product = tl.dot(high, inputs, product, input_precision="ieee")
                sums = tl.dot(ones, inputs, sums, input_precision="ieee")
                total = _add_group(total, product, sums, ranges, raised)
        else:
            product = tl.dot(codes.to(DTYPE), inputs, input_precision="ieee")
            total = _add_group(total, product, sums, ranges, 0.0)
    return total


@triton.jit
def _product_of_rows(
    hidden_ptr, norm_ptr, code_ptr, range_ptr, bias_ptr, residual_ptr, end_ptr, source_ptr, out_ptr, eps, num_rows,
    num_in, num_results, hidden_stride, residual_stride, num_experts,
    BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, OUTPUTS: tl.constexpr, SQUARES: tl.constexpr, STAGES: tl.constexpr,
    IS_EARLY: tl.constexpr, BY_PTX: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, IS_SINGLE: tl.constexpr,
):  # fmt: skip
    """Inputs come in blocks, of one or two groups; none: codes are float8. Codes past the last are multiplied by 0. If
    there are EXPERTS, the rows are those of a tile (`rows_of_tile`), and of tokens if there is a K.
    """
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    width: tl.constexpr = BLOCK * BITS // 8  # bytes of a block
    results: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    num_blocks, begin, first_row = num_in // BLOCK, tl.program_id(0) * results, 0
    place, column, byte = tl.arange(0, CHUNKS * OUTPUTS), tl.arange(0, CHUNKS * ROWS), tl.arange(0, width)
    output, own = place // CHUNKS, place % CHUNKS
    output = tl.minimum(begin + output % results, num_results - 1) + output // results * num_results
    chunk, row, end_block = column // ROWS, column % ROWS, num_blocks
    if EXPERTS > 0:
        expert, first_row, behind = rows_of_tile(end_ptr, tl.program_id(1), num_experts, EXPERTS, ROWS, IS_SINGLE)
        num_rows = behind - first_row
        end_block = tl.where(num_rows > 0, num_blocks, 0)
        output = output + expert.to(tl.int64) * (num_results * (2 if IS_GATED else 1))
    codes_at = code_ptr + output.to(tl.int64)[:, None] * (num_blocks * width) + byte[None, :]
    ranges_at = range_ptr + output.to(tl.int64) * (1 if GROUPS == 0 else num_blocks)  # both groups of a block in one
    given = hidden_ptr + _given_rows(source_ptr, first_row + row, row < num_rows, K)[None, :] * hidden_stride
    given, norms = given + byte[:, None], norm_ptr + byte[:, None]
    early = tl.zeros([SQUARES, ROWS], dtype)
    if HAS_NORM and IS_EARLY:  # loaded in front of the codes, and squared behind them: nothing waits for it
        early = _inputs_of_rows(hidden_ptr, 0, num_rows, num_in, hidden_stride, ROWS, SQUARES)
    total = tl.zeros([CHUNKS * OUTPUTS, CHUNKS * ROWS], tl.float32)
    for first in tl.range(0, end_block, CHUNKS, num_stages=STAGES):  # said here, so that ranges are loaded ahead too
        block = tl.minimum(first + own, num_blocks - 1)
        exists = ((first + chunk < num_blocks) & (row < num_rows))[None, :]
        start = ((first + chunk) * BLOCK)[None, :]
        codes = tl.load(codes_at + block[:, None] * width)
        total = _add_block(
            total, codes, ranges_at + block, given + start, norms + start, exists,
            dtype, width, BITS, GROUPS, HAS_NORM, BY_PTX,
        )  # fmt: skip
    if GROUPS == 0:
        total *= tl.load(ranges_at)[:, None] * (2.0**60 if BY_PTX and dtype == tl.bfloat16 else 1.0)

    total = tl.where(own[:, None] == chunk[None, :], total, 0.0)
    total = tl.sum(tl.sum(tl.reshape(total, [OUTPUTS, CHUNKS, CHUNKS, ROWS]), 2), 1)  # [OUTPUTS, ROWS]
    if HAS_NORM:
        if IS_EARLY:
            early = early.to(tl.float32)
            total *= tl.rsqrt(tl.sum(early * early, 0) / num_in + eps)[None, :]
        else:
            total *= _norm_factor(hidden_ptr, eps, num_rows, num_in, hidden_stride, ROWS, SQUARES)
    outs, rows = begin + tl.arange(0, results), tl.arange(0, ROWS)
    exists = (outs < num_results)[:, None] & (rows < num_rows)[None, :]
    total = _finished(
        total, bias_ptr, residual_ptr, outs, rows, exists, num_results, residual_stride,
        HAS_BIAS, HAS_RESIDUAL, IS_GATED, results, ROWS,
    )  # fmt: skip
    out_place = out_ptr + (first_row + rows)[None, :] * num_results + outs[:, None]
    tl.store(out_place, total.to(out_ptr.dtype.element_ty), mask=exists)


def product_of_rows_by_kernel(
    hidden: Tensor,
    codes: Tensor,
    ranges: Tensor,
    sizes: tuple[int, int, int],
    after: AfterProduct = AfterProduct(),  # noqa: B008
    norm: RMSNorm | None = None,
    experts: ExpertRows | None = None,
) -> Tensor:
    """norm(hidden) [rows, in] @ weight.T, and what follows, of at most 8 rows.

    `sizes` are bits, inputs of a block and groups of a block. `ranges` are scales and zero points as they are kept
    (`weight_formats.py`); of float8, whose blocks have no groups, scales [out] in float32. With `experts`, weights are
    those of the rows' experts, of which `codes` [experts, out, in * bits / 8] has all, and each has few rows.
    """
    num_in, num_out = hidden.shape[1], codes.shape[-2]
    assert hidden.stride(1) == 1, "the inputs of a row lie end to end"
    (bits, block, groups), (bias, residual, is_gated) = sizes, after
    num_results = num_out // 2 if is_gated else num_out
    num_rows = len(hidden) if experts is None else experts.num_rows
    rows, num_tiles, chunks, outputs = _launch(num_rows, num_out, experts)
    squares = min(_SQUARES, triton.next_power_of_2(num_in)) // rows
    out = hidden.new_empty(num_rows, num_results)
    _product_of_rows[(triton.cdiv(num_results, outputs // 2 if is_gated else outputs), num_tiles)](
        hidden,
        hidden if norm is None else norm.weight,
        codes,
        ranges.view(torch.int64) if groups == 2 else ranges,
        hidden if bias is None else bias,
        hidden if residual is None else residual,
        hidden if experts is None else experts.ends,
        hidden if experts is None or experts.sources is None else experts.sources,
        out,
        0.0 if norm is None else norm.eps,
        num_rows,
        num_in,
        num_results,
        0 if len(hidden) == 1 else hidden.stride(0),  # experts of one token
        0 if residual is None else residual.stride(0),
        0 if experts is None else experts.num_experts,
        BITS=bits,
        BLOCK=block,
        GROUPS=groups,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        ROWS=rows,
        CHUNKS=chunks,
        OUTPUTS=outputs,
        SQUARES=squares,
        STAGES=_STAGES,
        IS_EARLY=num_in <= squares,
        BY_PTX=hidden.is_cuda and torch.version.hip is None,
        EXPERTS=0 if experts is None else triton.next_power_of_2(experts.num_experts),
        K=0 if experts is None or experts.sources is None else experts.k,
        IS_SINGLE=experts is not None and experts.is_single,
        num_warps=_WARPS,
    )
    return out


def _launch(num_rows: int, num_out: int, experts: ExpertRows | None) -> tuple[int, int, int, int]:
    """Return how many rows a program has, how many tiles of rows there are, and the chunks and outputs of a program."""
    rows, num_tiles = triton.next_power_of_2(num_rows), 1
    if experts is not None:
        rows = 1 if experts.is_single else 2 * experts.rows_each
        num_tiles = experts.num_tiles(rows)
    chunks = max(1, min(_MAX_CHUNKS, 2 * _MAX_CHUNKS // rows))
    tile = _LARGE_TILE if num_tiles * num_out * chunks >= _MANY_PROGRAMS * _LARGE_TILE else _TILE
    return rows, num_tiles, chunks, tile // chunks
