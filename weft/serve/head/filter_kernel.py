"""Which tokens top_k, top_p and min_p leave, as a Triton kernel: a threshold for each request, without a sort.

Of tokens in the order of their logits, and of equal ones in that of their numbers, each filter leaves the first ones.
So what is left are the tokens above some logit, and those of this logit up to some token. The lowest logit is found two
bits at a time, by counting the tokens that reach it (top_k) or adding up their probabilities (top_p).
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
    """Logits by a temperature, and integers of the same order."""
    logits = tl.load(logits_ptr + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return scaled, _order(scaled)


@triton.jit
def _amount(order, weight, least, BY_WEIGHT: tl.constexpr):
    """1 or the weight of each token that reaches an order, else 0."""
    return tl.where(order >= least, weight, 0.0) if BY_WEIGHT else tl.where(order >= least, 1.0, 0.0)


@triton.jit
def _lowest(logits_ptr, temperature, highest, num_tokens, wanted, CHUNK: tl.constexpr, BY_WEIGHT: tl.constexpr):
    """The largest integer that so many tokens reach, or tokens with such weights; the amount above it, and the weight
    of a token there.
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
    """The tokens that are left of logits [requests, tokens] of any dtype, by settings [requests, 1] in float32."""
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
