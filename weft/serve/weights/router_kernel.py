"""Which experts few tokens go to, as Triton kernels: the norm and the router in one, and the order of rows in another.

A decode of one request reads an expert in some microseconds, and each kernel takes some to start and to end. As torch's
functions, a router is six kernels and the order of its choices eight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.models.expert_rows import RowOrder
from weft.models.router import Router
from weft.serve.weights.early_launch_kernel import early_launch, wait_for_results

_LOADED = 16384  # numbers of the router's weight that a program loads at a time
_STAGES = 3


@triton.jit
def _route(
    hidden_ptr, norm_ptr, router_ptr, normed_ptr, weight_ptr, chosen_ptr, eps, num_experts, hidden_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    IS_NORMALISED: tl.constexpr, STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    token, columns, experts = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, EXPERTS)
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    given = hidden_ptr + token * hidden_stride + columns
    wait_for_results(IS_EARLY)
    squares = tl.zeros([WIDTH], tl.float32)
    for start in range(0, SIZE, WIDTH):
        wide = tl.load(given + start, mask=start + columns < SIZE, other=0.0).to(tl.float32)
        squares += wide * wide
    factor = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    weights_at = router_ptr + experts[:, None] * SIZE + columns[None, :]
    total = tl.zeros([EXPERTS, WIDTH], tl.float32)
    for start in tl.range(0, SIZE, WIDTH, num_stages=STAGES):
        inside = start + columns < SIZE
        router = tl.load(weights_at + start, mask=(experts < num_experts)[:, None] & inside[None, :], other=0.0)
        normed = (tl.load(given + start, mask=inside, other=0.0).to(tl.float32) * factor).to(dtype)
        weight = tl.load(norm_ptr + start + columns, mask=inside, other=0.0)
        normed = (weight.to(tl.float32) * normed.to(tl.float32)).to(dtype)
        tl.store(normed_ptr + token * SIZE + start + columns, normed, mask=inside)
        total += router.to(tl.float32) * normed.to(tl.float32)[None, :]
    logits = tl.where(experts < num_experts, tl.sum(total, 1), -float("inf"))
    shares = tl.exp(logits - tl.max(logits, 0))
    shares = shares / tl.sum(shares, 0)
    place = tl.arange(0, CHOICES)
    kept, chosen = tl.zeros([CHOICES], tl.float32), tl.zeros([CHOICES], tl.int32)
    for choice in tl.static_range(K):
        best = tl.max(shares, 0)
        expert = tl.min(tl.where(shares == best, experts, EXPERTS), 0)
        expert = tl.minimum(expert, num_experts - 1)  # of NaN, none is the best
        kept, chosen = tl.where(place == choice, best, kept), tl.where(place == choice, expert, chosen)
        shares = tl.where(experts == expert, -1.0, shares)
    if IS_NORMALISED:
        kept = kept / tl.sum(kept, 0)
    tl.store(weight_ptr + token * K + place, kept, mask=place < K)
    tl.store(chosen_ptr + token * K + place, chosen, mask=place < K)


@triton.jit
def _order(
    chosen_ptr, source_ptr, place_ptr, end_ptr, num_pairs, num_experts,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    pair, expert = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    exists = pair < num_pairs
    wait_for_results(IS_EARLY)
    own = tl.load(chosen_ptr + pair, mask=exists, other=EXPERTS)
    same = tl.load(chosen_ptr + pair, mask=exists, other=EXPERTS)  # by columns
    is_before = (same[None, :] < own[:, None]) | ((same[None, :] == own[:, None]) & (pair[None, :] < pair[:, None]))
    place = tl.sum(is_before.to(tl.int32), 1)
    tl.store(place_ptr + pair, place.to(tl.int64), mask=exists)
    tl.store(source_ptr + place, pair.to(tl.int64), mask=exists)
    ends = tl.sum((same[None, :] <= expert[:, None]).to(tl.int32), 1)
    tl.store(end_ptr + expert, ends, mask=expert < num_experts)


def route_by_kernel(hidden: Tensor, norm: RMSNorm, router: Router) -> tuple[Tensor, Tensor, Tensor]:
    """norm(hidden) of [tokens, hidden], and what the router gives for it: weights and experts [tokens, k]."""
    (num_tokens, size), k = hidden.shape, router.num_experts_per_tok
    assert hidden.stride(1) == 1, "the inputs of a row lie end to end"
    experts = triton.next_power_of_2(router.num_experts)
    normed = torch.empty(num_tokens, size, dtype=hidden.dtype, device=hidden.device)
    weights = torch.empty(num_tokens, k, dtype=torch.float32, device=hidden.device)
    chosen = torch.empty(num_tokens, k, dtype=torch.int32, device=hidden.device)
    _route[(num_tokens,)](
        hidden,
        norm.weight,
        router.weight,
        normed,
        weights,
        chosen,
        norm.eps,
        router.num_experts,
        hidden.stride(0),
        SIZE=size,
        WIDTH=min(triton.next_power_of_2(size), max(16, _LOADED // experts)),
        EXPERTS=experts,
        K=k,
        CHOICES=triton.next_power_of_2(k),
        IS_NORMALISED=router.is_normalised,
        STAGES=_STAGES,
        num_warps=8,
        **early_launch(hidden),
    )
    return normed, weights, chosen


def order_by_kernel(chosen: Tensor, num_experts: int) -> RowOrder:
    """`sort_by_expert` of few pairs [tokens, k], which one program compares."""
    num_pairs = chosen.numel()
    sources, places = (torch.empty(num_pairs, dtype=torch.int64, device=chosen.device) for _ in range(2))
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    _order[(1,)](
        chosen,
        sources,
        places,
        ends,
        num_pairs,
        num_experts,
        PAIRS=triton.next_power_of_2(num_pairs),
        EXPERTS=triton.next_power_of_2(num_experts),
        num_warps=4,
        **early_launch(chosen),
    )
    return RowOrder(sources, places, ends)
