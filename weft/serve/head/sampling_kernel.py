"""Sampling on GPUs as Triton kernels, which read the logits once: the likeliest token, and a draw, of all tokens or of
those that filters leave (`filter_kernel.py`).

One program finds the likeliest token of a request. For a draw, a program handles a part of the tokens of one request:
it makes their noise, and finds the token with the highest sum of logit and noise. The plain function makes the noise in
some thirty passes over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.head.filter_kernel import TokenFilter, scaled_logits

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
