"""Sampling on GPUs as Triton kernels: the likeliest token, which tokens top_k, top_p and min_p leave, and a draw.

One program finds the likeliest token of a request. For a draw, a program handles a part of the tokens of one request:
it makes their noise, and finds the token with the highest sum of logit and noise. The plain function makes the noise in
some thirty passes over memory.

Filters give a threshold for each request, without a sort. Of tokens in the order of their logits, and of equal ones in
that of their numbers, each filter leaves the first ones. So what is left are the tokens above some logit, and those of
this logit up to some token. The lowest logit is found two bits at a time, by counting the tokens that reach it (top_k)
or adding up their probabilities (top_p).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _WARPS = 8192, 32  # tokens that a program loads at a time, and its warps


class TokenFilter(NamedTuple):
    """For each request [requests] (int32): tokens are left whose logits, as integers of the same order, are above
    `lowest`, or equal to it if the token is at most `last`.
    """

    lowest: Tensor
    last: Tensor


@triton.jit
def _order(numbers):
    """Integers of the same order as numbers, and equal for 0 and -0."""
    bits = tl.where(numbers == 0, 0.0, numbers).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def scaled_logits(logits_ptr, temperature, token, num_tokens):
    """Return logits divided by a temperature, and integers of the same order."""
    logits = tl.load(logits_ptr + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return scaled, _order(scaled)


@triton.jit
def _amount(order, weight, least, BY_WEIGHT: tl.constexpr):
    """Return the weight (1 unless BY_WEIGHT) of each token whose integer is at least `least`, and 0 for others."""
    return tl.where(order >= least, weight, 0.0) if BY_WEIGHT else tl.where(order >= least, 1.0, 0.0)


@triton.jit
def _lowest(logits_ptr, temperature, highest, num_tokens, wanted, CHUNK: tl.constexpr, BY_WEIGHT: tl.constexpr):
    """Return the largest integer that tokens with `wanted` weight in all reach (each has weight 1 unless BY_WEIGHT),
    the weight of the tokens above it, and the weight of one token at it.
    """
    place, lowest = tl.arange(0, CHUNK), -2147483648
    for digit in range(16):
        step = 1 << (30 - 2 * digit)
        first, second, third = (
            tl.zeros([CHUNK], tl.float32),
            tl.zeros([CHUNK], tl.float32),
            tl.zeros([CHUNK], tl.float32),
        )
        for start in range(0, num_tokens, CHUNK):
            token = start + place
            scaled, order = scaled_logits(logits_ptr, temperature, token, num_tokens)
            order = tl.where(token < num_tokens, order, -2147483648)
            weight = tl.exp(scaled - highest)
            first += _amount(order, weight, lowest + step, BY_WEIGHT)
            second += _amount(order, weight, lowest + step + step, BY_WEIGHT)
            third += _amount(order, weight, lowest + step + step + step, BY_WEIGHT)
        steps = (tl.sum(first, 0) >= wanted).to(tl.int32) + (tl.sum(second, 0) >= wanted).to(tl.int32)
        steps += (tl.sum(third, 0) >= wanted).to(tl.int32)
        lowest += tl.where(steps > 0, step, 0) + tl.where(steps > 1, step, 0) + tl.where(steps > 2, step, 0)
    above, own = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for start in range(0, num_tokens, CHUNK):
        token = start + place
        scaled, order = scaled_logits(logits_ptr, temperature, token, num_tokens)
        order = tl.where(token < num_tokens, order, -2147483648)
        weight = tl.exp(scaled - highest)
        above += tl.where(order > lowest, weight, 0.0) if BY_WEIGHT else tl.where(order > lowest, 1.0, 0.0)
        own = tl.maximum(own, tl.where(order == lowest, weight, 0.0))
    return lowest, tl.sum(above, 0), tl.max(own, 0)


# Settings lie anywhere in a table, and results behind each other: a kernel for each alignment would be compiled late.
@triton.jit(do_not_specialize_on_alignment=[
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "log_min_p_ptr", "lowest_ptr", "last_ptr"
])  # fmt: skip
def _filter(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, lowest_ptr, last_ptr, num_tokens, logits_stride,
    settings_stride, CHUNK: tl.constexpr,
):  # fmt: skip
    request, place = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK)
    temperature = tl.load(temperature_ptr + request * settings_stride)
    top_k, top_p = tl.load(top_k_ptr + request * settings_stride), tl.load(top_p_ptr + request * settings_stride)
    log_min_p = tl.load(log_min_p_ptr + request * settings_stride)
    logits_ptr += request * logits_stride
    # Of the tokens with the lowest logit, so many are left.
    lowest, left, own = -2147483648 + tl.zeros([], tl.int32), 2e9 + tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    if temperature > 0:
        best, total = tl.full([CHUNK], float("-inf"), tl.float32), tl.zeros([CHUNK], tl.float32)
        for start in range(0, num_tokens, CHUNK):
            best = tl.maximum(best, scaled_logits(logits_ptr, temperature, start + place, num_tokens)[0])
        highest = tl.max(best, 0)
        if top_k < num_tokens:
            lowest, above, own = _lowest(logits_ptr, temperature, highest, num_tokens, top_k, CHUNK, False)
            left = top_k - above
        if top_p < 1:
            for start in range(0, num_tokens, CHUNK):
                token = start + place
                scaled, order = scaled_logits(logits_ptr, temperature, token, num_tokens)
                total += tl.where((token < num_tokens) & (order > lowest), tl.exp(scaled - highest), 0.0)
            wanted = top_p * (tl.sum(total, 0) + left * own)
            of_mass, above, own = _lowest(logits_ptr, temperature, highest, num_tokens, wanted, CHUNK, True)
            # The first token whose probability with those before it reaches top_p is the last one.
            needed = tl.maximum(tl.ceil((wanted - above) / own), 1.0)
            # By rounding, what top_k leaves may fall short of `wanted`: top_p never leaves more than it.
            needed = tl.where(of_mass == lowest, tl.minimum(left, needed), needed)
            left = tl.where(of_mass >= lowest, needed, left)
            lowest = tl.maximum(lowest, of_mass)
        least = tl.max(_order(tl.zeros([CHUNK], tl.float32) + (highest + log_min_p)), 0)
        left = tl.where(least > lowest, 2e9, left)
        lowest = tl.maximum(lowest, least)
    last, seen = tl.zeros([], tl.int32) - 1, tl.zeros([], tl.int32)
    if left < num_tokens:  # the last of the equal tokens that are left
        for start in range(0, num_tokens, CHUNK):
            token = start + place
            _, order = scaled_logits(logits_ptr, temperature, token, num_tokens)
            is_equal = ((token < num_tokens) & (order == lowest)).to(tl.int32)
            rank = seen + tl.cumsum(is_equal, 0)
            last = tl.maximum(last, tl.max(tl.where((is_equal > 0) & (rank.to(tl.float32) <= left), token, -1), 0))
            seen += tl.sum(is_equal, 0)
    else:
        last += 2147483647
    tl.store(lowest_ptr + request, lowest)
    tl.store(last_ptr + request, last)


def filter_by_kernel(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor
) -> TokenFilter:
    """Return the tokens that are left of logits [requests, tokens] of any dtype, by settings [requests, 1] in
    float32.
    """
    number, num_tokens = logits.shape
    lowest, last = torch.empty(2, number, dtype=torch.int32, device=logits.device)
    stride = temperature.stride(0)
    assert logits.stride(1) == 1, "the logits of a request lie end to end"
    assert all(one.stride(0) == stride for one in (top_k, top_p, log_min_p)), "settings lie alike"
    size = min(_CHUNK, triton.next_power_of_2(num_tokens))
    _filter[(number,)](
        logits, temperature, top_k, top_p, log_min_p, lowest, last, num_tokens, logits.stride(0), stride,
        CHUNK=size, num_warps=max(1, min(_WARPS, size // 256)),
    )  # fmt: skip
    return TokenFilter(lowest, last)


_TOKENS = 4096  # that a program handles
_ROW_TOKENS, _ROW_WARPS = 8192, 32  # that a program compares at a time, and its warps: all that one of them can have


@triton.jit
def _likeliest(logits_ptr, token_ptr, num_tokens, logits_stride, TOKENS: tl.constexpr):
    """Each column of TOKENS keeps the first of the highest logits that it meets, or NaN, and where it was."""
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    highest, begin = tl.full([TOKENS], float("-inf"), tl.float32), tl.zeros([TOKENS], tl.int32)
    for start in tl.range(0, num_tokens, TOKENS, loop_unroll_factor=4):
        at = logits_ptr + request * logits_stride + start + column
        logits = tl.load(at, mask=start + column < num_tokens, other=float("-inf")).to(tl.float32)
        begin = tl.where(logits > highest, start, begin)
        highest = tl.maximum(highest, logits, propagate_nan=tl.PropagateNan.ALL)
    num_bad = tl.sum((highest != highest).to(tl.int32), 0)
    found = tl.min(tl.where(highest == tl.max(highest, 0), begin + column, num_tokens), 0)
    tl.store(token_ptr + request, tl.where(num_bad > 0, -1, found).to(tl.int64))


def likeliest_by_kernel(logits: Tensor) -> Tensor:
    """Equals `sampling.likeliest`: logits [requests, tokens] of any dtype -> tokens [requests]."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1, "the logits of a request lie end to end"
    size = min(_ROW_TOKENS, triton.next_power_of_2(logits.shape[1]))
    _likeliest[(len(logits),)](
        logits, tokens, logits.shape[1], logits.stride(0), TOKENS=size, num_warps=max(1, min(_ROW_WARPS, size // 256))
    )
    return tokens


@triton.jit
def _mix(bits):
    """Equals `sampling._mix`."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


# What is read once for a request lies anywhere: a kernel for each alignment would be compiled late.
@triton.jit(
    do_not_specialize_on_alignment=["temperature_ptr", "key_ptr", "position_ptr", "lowest_ptr", "last_ptr"],
)
def _draw(
    logits_ptr,
    temperature_ptr,
    key_ptr,
    position_ptr,
    lowest_ptr,
    last_ptr,
    best_ptr,
    token_ptr,
    num_tokens,
    logits_stride,
    temperature_stride,
    key_stride,
    position_stride,
    NUM_PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_FILTERED: tl.constexpr,
):
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    position = tl.load(position_ptr + request * position_stride).to(tl.uint32)
    low = tl.load(key_ptr + request * key_stride).to(tl.uint32)
    high = tl.load(key_ptr + request * key_stride + 1).to(tl.uint32)
    first = _mix(position ^ _mix(low))
    second = _mix(position + _mix(high ^ 0x5BD1E995))
    bits = _mix(_mix(tokens.to(tl.uint32) ^ first) + second) & 0x7FFFFFFF
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    # log1p(-uniform) without cancellation: the series where uniform is small.
    exponential = tl.where(uniform < 1e-3, uniform * (1 + uniform * (0.5 + uniform / 3)), -tl.log(1 - uniform))
    temperature = tl.load(temperature_ptr + request * temperature_stride)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    scaled, order = scaled_logits(logits_ptr + request * logits_stride, temperature, tokens, num_tokens)
    if IS_FILTERED:
        lowest, last = tl.load(lowest_ptr + request), tl.load(last_ptr + request)
        inside = inside & ((order > lowest) | ((order == lowest) & (tokens <= last)))
    scores = tl.where(inside, scaled - tl.log(exponential), float("-inf"))
    tl.store(best_ptr + request * NUM_PARTS + part, tl.max(scores, 0))
    tl.store(token_ptr + request * NUM_PARTS + part, part * TOKENS + tl.argmax(scores, 0))


def draw_by_kernel(
    logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, left: TokenFilter | None = None
) -> Tensor:
    """Equals `sampling.draw`: logits [requests, tokens] of any dtype -> tokens [requests]. With `left`, draws are among
    the tokens that it leaves.
    """
    num_requests, num_tokens = logits.shape
    num_parts = triton.cdiv(num_tokens, _TOKENS)
    best = torch.empty(num_requests, num_parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_requests, num_parts, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1 and keys.stride(1) == 1, "logits and keys of a request lie end to end"  # noqa: PT018
    _draw[(num_requests, num_parts)](
        logits,
        temperature,
        keys,
        positions,
        *((tokens, tokens) if left is None else left),
        best,
        tokens,
        num_tokens,
        logits.stride(0),
        temperature.stride(0),
        keys.stride(0),
        positions.stride(0),
        NUM_PARTS=num_parts,
        TOKENS=_TOKENS,
        IS_FILTERED=left is not None,
        num_warps=4,
    )
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]
