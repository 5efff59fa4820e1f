"""Products of one token with quantised weights (`weight_formats.py`), as one Triton kernel with all around them.

Such a product is bound by the bytes of the weights, and by instructions: 4 bits are to be multiplied in the time in
which a GPU reads them. A program computes some outputs from all inputs. It loads codes directly into registers, those
of its first outputs before the inputs are known (`shared_steps_kernel.py`), and those of the next while it computes. It
prepares the inputs once for all of its outputs.

Codes are read in words of 32 bits. Four inputs, or eight of 4 bits, belong to a word, and four words are a unit, which
lies in one group. Integers are multiplied with integers of 16 bits (`shared_steps_kernel.py`): in each unit, the
inputs have a scale by which the largest becomes 32767, so that they are rounded less than in bf16. Scales and least
values of codes are applied to units: sum of (code * scale + least) * input = scale * sum of code * input + least * sum
of inputs. Codes of float8 become numbers of 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.serve.weights.shared_steps_kernel import (
    bytes_of,
    early_launch,
    products,
    two_ranges,
    wait_for_results,
    wide_fp8,
)
from weft.serve.weights.steps import AfterProduct

_UNIT = 4  # words that a thread loads at once, all of one group


class TokenLaunch(NamedTuple):
    """How many outputs a program computes (if they are gated, two for a result), how many it loads ahead, and by how
    many warps.
    """

    outputs: int
    ahead: int
    warps: int


@triton.jit
def with_bias_and_gate(
    result, gate_result, bias_ptr, outs, exists, NUM_OUT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr
):
    if HAS_BIAS:
        if IS_GATED:
            gate_result += tl.load(bias_ptr + outs, mask=exists, other=0.0).to(tl.float32)
            result += tl.load(bias_ptr + NUM_OUT + outs, mask=exists, other=0.0).to(tl.float32)
        else:
            result += tl.load(bias_ptr + outs, mask=exists, other=0.0).to(tl.float32)
    if IS_GATED:
        result = result * gate_result / (1 + tl.exp(-gate_result))
    return result


@triton.jit
def _four_numbers(packed, DTYPE: tl.constexpr):
    """Return the four numbers of 16 bits in integers of 64 bits."""
    return (
        packed.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32),
        (packed >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32),
        (packed >> 32).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32),
        (packed >> 48).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32),
    )


@triton.jit
def _inputs(
    packed, norm,
    DTYPE: tl.constexpr, HAS_NORM: tl.constexpr, IS_FLOAT: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr,
    BY_PTX: tl.constexpr,
):  # fmt: skip
    """Return the four inputs of each word, times the norm's weights: as numbers of 32 bits, or as integers of 16 bits
    in two words, which have a scale in each unit. Then these scales, the sums of units, and the sum of all squares.
    """
    a, b, c, d = _four_numbers(packed, DTYPE)
    squares = tl.sum(a * a + b * b + c * c + d * d, 0)
    if HAS_NORM:
        e, f, g, h = _four_numbers(norm, DTYPE)
        a, b, c, d = a * e, b * f, c * g, d * h
    sums = tl.sum(tl.reshape(a + b + c + d, [UNITS, UNIT]), 1)
    scale = sums
    inputs = (a, b, c, d)
    if not IS_FLOAT:
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        scale = tl.maximum(tl.max(tl.reshape(largest, [UNITS, UNIT]), 1), 1e-30) / 32767.0
        inverse = tl.reshape(tl.broadcast_to((1.0 / scale)[:, None], [UNITS, UNIT]), [UNITS * UNIT])
        inputs = bytes_of(a, b, c, d, inverse, BY_PTX)
    return inputs, scale, sums, squares


@triton.jit
def _loaded(
    code_ptr, range_ptr, first, index, word, block, exists,
    NUM_OUT: tl.constexpr, RESULTS: tl.constexpr, ROW_WORDS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the codes of an output of a program, and its scales and zero points. Past the last output, those of the
    last.
    """
    out = first.to(tl.int64)
    if NUM_OUT % RESULTS == 0:
        out += index % RESULTS
    else:
        out = tl.minimum(out + index % RESULTS, NUM_OUT - 1)
    out += index // RESULTS * NUM_OUT
    codes = tl.load(code_ptr + out * ROW_WORDS + word, mask=exists, other=0)
    return codes, tl.load(range_ptr + (out * ROW_BLOCKS + block if GROUPS > 0 else out))


@triton.jit
def _products(numbers, inputs, UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Sums of products of units."""
    total = numbers[0] * inputs[0] + numbers[1] * inputs[1] + numbers[2] * inputs[2] + numbers[3] * inputs[3]
    return tl.sum(tl.reshape(total, [UNITS, UNIT]), 1)


@triton.jit
def _unit_results(
    codes, ranges, low, high, low_scale, high_scale, low_sums, high_sums,
    BITS: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Return what each unit adds to an output."""
    if BITS == 4:
        first = products(codes & 0x0F0F0F0F, low[0], low[1], UNITS, UNIT, BY_PTX) * low_scale
        second = products(codes & -0x0F0F0F10, high[0], high[1], UNITS, UNIT, BY_PTX) * high_scale
        scale, least = two_ranges(ranges, BY_PTX)
        if GROUPS == 2:
            next_scale, next_least = two_ranges(ranges >> 32, BY_PTX)
            result = first * scale + low_sums * least + second * next_scale + high_sums * next_least
        else:
            result = (first + second) * scale + (low_sums + high_sums) * least
    elif GROUPS > 0:
        scale, least = two_ranges(ranges, BY_PTX)
        result = products(codes, low[0], low[1], UNITS, UNIT, BY_PTX) * low_scale
        result = result * scale + low_sums * least
    else:
        result = _products(wide_fp8(codes, BY_PTX), low, UNITS, UNIT) * ranges
    return result


@triton.jit
def _both_inputs(place, exists, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return what the low halves of a word's bytes are multiplied with, and what the high ones are, if codes have 4
    bits.
    """
    low = tl.load(place, mask=exists, other=0)
    high = low
    if BITS == 4:
        high = tl.load(place + WIDTH, mask=exists, other=0)
    return low, high


@triton.jit
def _prepared(
    rows_at, norms_at, exists,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, HAS_NORM: tl.constexpr, IS_FLOAT: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, BY_PTX: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Return the inputs, scales and sums (`_inputs`) of the low halves of words' bytes and of the high ones, and the
    sum of all squares. They are loaded behind the first codes, which are so issued at once.
    """
    norm, high_norm = exists, exists
    if HAS_NORM:
        norm, high_norm = _both_inputs(norms_at, exists, WIDTH, BITS)
    wait_for_results(IS_EARLY)
    inputs, high_inputs = _both_inputs(rows_at, exists, WIDTH, BITS)
    low, low_scale, low_sums, squares = _inputs(inputs, norm, DTYPE, HAS_NORM, IS_FLOAT, UNITS, UNIT, BY_PTX)
    high, high_scale, high_sums = low, low_scale, low_sums
    if BITS == 4:  # codes in the high halves of bytes are 16 times as large
        high, high_scale, high_sums, more_squares = _inputs(
            high_inputs, high_norm, DTYPE, HAS_NORM, IS_FLOAT, UNITS, UNIT, BY_PTX
        )
        high_scale, squares = high_scale / 16, squares + more_squares
    return low, low_scale, low_sums, high, high_scale, high_sums, squares


@triton.jit
def _store(
    total, bias_ptr, residual_ptr, out_ptr, first,
    NUM_OUT: tl.constexpr, RESULTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
):  # fmt: skip
    """Add bias, gate and residual to the products of a program, and write them."""
    gate = total
    if IS_GATED:
        gate, total = tl.split(tl.trans(tl.reshape(total, [2, RESULTS])))
    outs = first + tl.arange(0, RESULTS)
    is_result = outs < NUM_OUT
    total = with_bias_and_gate(total, gate, bias_ptr, outs, is_result, NUM_OUT, HAS_BIAS, IS_GATED)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + outs, mask=is_result, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs, total.to(out_ptr.dtype.element_ty), mask=is_result)


@triton.jit
def _product_of_token(
    row_ptr, norm_ptr, code_ptr, range_ptr, bias_ptr, residual_ptr, expert_ptr, out_ptr, eps, row_stride,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr,
    OUTPUTS: tl.constexpr, AHEAD: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, BY_PTX: tl.constexpr,
    IS_EARLY: tl.constexpr, HAS_EXPERTS: tl.constexpr,
):  # fmt: skip
    """NUM_OUT are results. If IS_GATED, a result is of two outputs, the second of which is NUM_OUT behind the first."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    width: tl.constexpr = BLOCK * BITS // 32  # words of a block
    row_words: tl.constexpr = NUM_IN * BITS // 32
    row_blocks: tl.constexpr = NUM_IN // BLOCK
    row_ranges: tl.constexpr = row_blocks if GROUPS > 0 else 1
    units: tl.constexpr = WORDS // UNIT
    results: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    word, unit, first = tl.arange(0, WORDS), tl.arange(0, units), tl.program_id(0) * results
    exists, block = word < row_words, tl.minimum(unit * UNIT // width, row_blocks - 1)
    if HAS_EXPERTS:
        wait_for_results(IS_EARLY)
        of_expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64) * (NUM_OUT * (2 if IS_GATED else 1))
        code_ptr, range_ptr = code_ptr + of_expert * row_words, range_ptr + of_expert * row_ranges
        row_ptr, out_ptr = row_ptr + tl.program_id(1) * row_stride, out_ptr + tl.program_id(1) * NUM_OUT
    codes, ranges = (), ()
    for index in tl.static_range(AHEAD):
        some_codes, some_ranges = _loaded(
            code_ptr, range_ptr, first, index, word, block, exists,
            NUM_OUT, results, row_words, row_blocks, GROUPS,
        )  # fmt: skip
        codes += (some_codes,)  # type: ignore[assignment]
        ranges += (some_ranges,)  # type: ignore[assignment]
    place = word // width * (BLOCK // 4) + word % width  # of the inputs of a word, by fours
    low, low_scale, low_sums, high, high_scale, high_sums, squares = _prepared(
        row_ptr + place, norm_ptr + place, exists,
        dtype, width, BITS, HAS_NORM, GROUPS == 0, units, UNIT, BY_PTX, IS_EARLY,
    )  # fmt: skip
    column = tl.arange(0, OUTPUTS)[None, :]
    total = tl.zeros([units, OUTPUTS], tl.float32)
    for index in tl.static_range(OUTPUTS):
        if index + AHEAD < OUTPUTS:
            some_codes, some_ranges = _loaded(
                code_ptr, range_ptr, first, index + AHEAD, word, block, exists,
                NUM_OUT, results, row_words, row_blocks, GROUPS,
            )  # fmt: skip
            codes += (some_codes,)  # type: ignore[assignment]
            ranges += (some_ranges,)  # type: ignore[assignment]
        result = _unit_results(
            codes[index], ranges[index], low, high, low_scale, high_scale, low_sums, high_sums,
            BITS, GROUPS, units, UNIT, BY_PTX,
        )  # fmt: skip
        total = tl.where(column == index, result[:, None], total)
    total = tl.sum(total, 0)
    if HAS_NORM:
        total *= tl.rsqrt(squares / NUM_IN + eps)  # the same for all inputs
    _store(total, bias_ptr, residual_ptr, out_ptr, first, NUM_OUT, results, HAS_BIAS, HAS_RESIDUAL, IS_GATED)


def product_of_token_by_kernel(
    hidden: Tensor,
    codes: Tensor,
    ranges: Tensor,
    sizes: tuple[int, int, int],
    after: AfterProduct = AfterProduct(),  # noqa: B008
    norm: RMSNorm | None = None,
    launch: TokenLaunch | None = None,
    experts: Tensor | None = None,
) -> Tensor:
    """norm(hidden) [1, in] @ weight.T, and what follows.

    `sizes` are bits, inputs of a block and groups of a block. `ranges` are scales and zero points as they are kept
    (`weight_formats.py`); of float8, whose blocks have no groups, scales [out] in float32. With `experts` [k], there
    are results [k, out] of these of the stacked weights `codes` [experts, out, in * bits / 8]; `hidden` may have a row
    for each of them.
    """
    bits, block, groups = sizes
    bias, residual, is_gated = after
    num_in, num_out = hidden.shape[1], codes.shape[-2] // (2 if is_gated else 1)
    words = codes.view(torch.int32)
    outputs, ahead, warps = launch or _launch(words.shape[-1])
    out = hidden.new_empty(1 if experts is None else len(experts), num_out)
    _product_of_token[(triton.cdiv(num_out, outputs // 2 if is_gated else outputs), len(out))](
        hidden.view(torch.int64),
        hidden if norm is None else norm.weight.view(torch.int64),
        words,
        ranges.view(torch.int64) if groups == 2 else ranges,
        hidden if bias is None else bias,
        hidden if residual is None else residual,
        hidden if experts is None else experts,
        out,
        0.0 if norm is None else norm.eps,
        0 if len(hidden) == 1 else num_in // 4,
        NUM_IN=num_in,
        NUM_OUT=num_out,
        BITS=bits,
        BLOCK=block,
        GROUPS=groups,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        OUTPUTS=outputs,
        AHEAD=ahead,
        WORDS=triton.next_power_of_2(words.shape[-1]),
        UNIT=_UNIT,
        BY_PTX=hidden.is_cuda and torch.version.hip is None,
        HAS_EXPERTS=experts is not None,
        num_warps=warps,
        **early_launch(hidden),
    )
    return out


def _launch(num_words: int) -> TokenLaunch:
    """Return the fastest of some on an H200, for the matmuls of a model of 8B."""
    if num_words <= 512:
        return TokenLaunch(16, 16, max(1, min(4, triton.next_power_of_2(num_words) // 128)))
    return TokenLaunch(8, 4, 4) if num_words <= 1024 else TokenLaunch(16, 4, 8)
