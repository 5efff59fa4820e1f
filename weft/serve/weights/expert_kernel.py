"""Layers of experts whose weights are quantised, as Triton kernels for GPUs.

    router        the norm, and the experts and weights of few tokens (torch has six kernels for it)
    order         of the rows of few tokens, sorted by expert (torch has eight)
    gate and up   of each row, as silu(gate) * up
    down          of each row; where there are few programs, each takes a part of the inputs
    sums          of the parts and, times their weights, of the rows of each token

Only codes of experts that have rows are read. Which they are is found on the device, so that the host waits for nothing
and a step can be a CUDA graph. A token alone is not sorted by expert: it has one row for each of its experts. Products
are those of linears (`packed_token_kernel.py`, `packed_row_kernel.py`), except where experts have more rows: there a
program multiplies up to 64 rows of one expert with some outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.models.expert_rows import RowOrder, sort_by_expert
from weft.models.router import Router
from weft.serve.weights.fast_path import FEW_ROWS, MAX_PAIRS, fits_registers
from weft.serve.weights.packed_product_kernel import products_of_blocks
from weft.serve.weights.packed_row_kernel import ExpertRows, product_of_rows_by_kernel, rows_of_tile
from weft.serve.weights.packed_token_kernel import product_of_token_by_kernel
from weft.serve.weights.shared_steps_kernel import early_launch, wait_for_results
from weft.serve.weights.steps import AfterProduct

if TYPE_CHECKING:
    from weft.serve.weights.packed_experts import PackedExperts, PackedStack

_OUTPUTS = 64  # of a program
_PROGRAMS = 512  # as many as keep a GPU busy
_MAX_ROWS = 64  # of a program
_WARPS = 2
_STAGES = 4
_COLUMNS = 512  # of a program that sums
_LOADED = 16384  # numbers of the router's weight that a program loads at a time
_ROUTER_STAGES = 3


@triton.jit
def _expert_product(
    hidden_ptr, code_ptr, range_ptr, end_ptr, source_ptr, out_ptr, num_rows, num_in, num_results, num_experts,
    hidden_stride, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, IS_SINGLE: tl.constexpr, IS_GATED: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, BY_PTX: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """If IS_GATED, a result is of two neighbours of a program's outputs: its gate, and its up, which is `num_results`
    behind it.
    """
    part = tl.program_id(1)
    wait_for_results(IS_EARLY)
    expert, first, behind = rows_of_tile(end_ptr, tl.program_id(2), num_experts, EXPERTS, ROWS, IS_SINGLE)
    rows = first + tl.arange(0, ROWS)
    exists = rows < behind
    given = rows
    if K > 0:
        given = tl.load(source_ptr + rows, mask=exists, other=0) // K
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside, outputs, num_out = place < num_results, place, num_results
    if IS_GATED:
        inside, outputs, num_out = place < 2 * num_results, place // 2 + place % 2 * num_results, 2 * num_results
    num_blocks = num_in // BLOCK
    begin = part * tl.cdiv(num_blocks, PARTS)
    end = tl.minimum(begin + tl.cdiv(num_blocks, PARTS), num_blocks)
    end = tl.where(first < behind, end, begin)
    outputs = outputs + expert.to(tl.int64) * num_out
    total = products_of_blocks(
        hidden_ptr + given.to(tl.int64)[:, None] * hidden_stride, code_ptr, range_ptr, outputs, inside, exists,
        begin, end, num_blocks, BITS, BLOCK, GROUPS, ROWS, OUTPUTS, BY_PTX,
    )  # fmt: skip
    if IS_GATED:
        gate, up = tl.split(tl.reshape(total, [ROWS, OUTPUTS // 2, 2]))
        total = up * gate / (1 + tl.exp(-gate))
        place = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        inside = place < num_results
    out = out_ptr + (part * num_rows + rows).to(tl.int64)[:, None] * num_results + place[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit
def _sum_rows(
    part_ptr, place_ptr, weight_ptr, residual_ptr, out_ptr, num_rows, num_out, residual_stride,
    K: tl.constexpr, PARTS: tl.constexpr, HAS_PLACES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Add up the parts [parts, rows, outputs] of the rows of each token, times their weights, and the residual."""
    wait_for_results(IS_EARLY)
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_out
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(K):
        row = token * K + choice
        if HAS_PLACES:
            row = tl.load(place_ptr + row).to(tl.int64)
        result = tl.zeros([COLUMNS], tl.float32)
        for part in tl.static_range(PARTS):
            result += tl.load(part_ptr + (part * num_rows + row) * num_out + columns, mask=inside, other=0.0)
        if HAS_WEIGHTS:
            result *= tl.load(weight_ptr + token * K + choice).to(tl.float32)
        total += result
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_out + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def tokens_by_kernel(
    tokens: Tensor, weights: Tensor, chosen: Tensor, experts: PackedExperts, residual: Tensor | None = None
) -> Tensor:
    """For tokens [tokens, hidden] the sums of the results of their chosen experts [tokens, k], times the weights, and
    plus the residual.
    """
    (num_tokens, _), k = tokens.shape, chosen.shape[1]
    sizes = (k, num_tokens * k, experts.num_experts)
    if num_tokens == 1:
        rows, places = ExpertRows(chosen.view(-1), None, *sizes, True), None
    else:
        sort = order_by_kernel if chosen.numel() <= MAX_PAIRS else sort_by_expert
        order = sort(chosen, experts.num_experts)
        assert order.ends is not None
        rows, places = ExpertRows(order.ends, order.sources, *sizes), order.places
    return _summed(_parts(tokens, rows, experts), rows, tokens, places, weights, residual)


def sorted_rows_by_kernel(rows: Tensor, ends: Tensor, experts: PackedExperts) -> Tensor:
    """Return the results of rows [rows, hidden], which are sorted by expert; expert i's end before row `ends[i]`."""
    own = ExpertRows(ends, None, 1, len(rows), experts.num_experts)
    return _summed(_parts(rows, own, experts), own, rows)


def _parts(hidden: Tensor, rows: ExpertRows, experts: PackedExperts) -> Tensor:
    """Return the results of rows, in parts that are to be added up [parts, rows, hidden]."""
    inner = _multiplied(hidden, experts.gate_up_proj, rows, is_gated=True)[0]
    return _multiplied(inner, experts.down_proj, rows._replace(sources=None), is_gated=False)


def _multiplied(hidden: Tensor, stack: PackedStack, rows: ExpertRows, is_gated: bool) -> Tensor:
    """Return the products of rows with a stack of weights, in parts that are to be added up [parts, rows, results]."""
    codes, ranges = stack.format.kernel_parts(stack.parts)  # type: ignore[attr-defined]
    sizes = stack.format.block(stack.shape[-1])  # type: ignore[attr-defined]
    after, kernel = AfterProduct(is_gated=is_gated), kernel_for(hidden, sizes, rows)
    if kernel == "token":
        return product_of_token_by_kernel(hidden, codes, ranges, sizes, after, experts=rows.ends)[None]
    if kernel == "few rows":
        return product_of_rows_by_kernel(hidden, codes, ranges, sizes, after, experts=rows)[None]
    return _product_of_tiles(hidden, codes, ranges, sizes, rows, is_gated)


def kernel_for(hidden: Tensor, sizes: tuple[int, int, int], rows: ExpertRows) -> Literal["token", "few rows", "tiles"]:
    """Return the kernel that multiplies rows with weights of these bits, inputs of a block and groups of a block.

    On an H200, tiles read float8 at 0.8 to 0.9 of the rate of a copy, and codes of 4 bits at half of it.
    """
    if sizes[2] == 0:
        return "tiles"
    if rows.is_single and fits_registers(sizes[0], hidden.shape[1]):
        return "token"
    return "few rows" if rows.is_single or 2 * rows.rows_each <= FEW_ROWS else "tiles"


def _summed(
    parts: Tensor,
    rows: ExpertRows,
    like: Tensor,
    places: Tensor | None = None,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the results of tokens, in the dtype of a tensor."""
    num_parts, num_rows, num_results = parts.shape
    out = like.new_empty(num_rows // rows.k, num_results)
    _sum_rows[(len(out), triton.cdiv(num_results, _COLUMNS))](
        parts,
        parts if places is None else places,
        parts if weights is None else weights,
        parts if residual is None else residual,
        out,
        num_rows,
        num_results,
        0 if residual is None else residual.stride(0),
        K=rows.k,
        PARTS=num_parts,
        HAS_PLACES=places is not None,
        HAS_WEIGHTS=weights is not None,
        HAS_RESIDUAL=residual is not None,
        COLUMNS=_COLUMNS,
        num_warps=4,
        **early_launch(like),
    )
    return out


def _product_of_tiles(
    hidden: Tensor, codes: Tensor, ranges: Tensor, sizes: tuple[int, int, int], rows: ExpertRows, is_gated: bool
) -> Tensor:
    assert hidden.stride(1) == 1, "the inputs of a row lie end to end"
    (num_experts, num_out, _), num_in, (bits, block, groups) = codes.shape, hidden.shape[1], sizes
    tile = max(16, min(_MAX_ROWS, rows.rows_each))  # tensor cores need 16
    outputs = _OUTPUTS // 2 if rows.is_single else _OUTPUTS  # one token has few programs
    num_programs = triton.cdiv(num_out, outputs) * rows.num_tiles(tile)
    most = 1 if is_gated else min(8, max(1, num_in // block // 4))  # a program has at least four blocks
    num_parts = min(most, triton.next_power_of_2(triton.cdiv(_PROGRAMS, num_programs)))
    num_results, dtype = (num_out // 2, hidden.dtype) if is_gated else (num_out, torch.float32)
    out = torch.empty(num_parts, rows.num_rows, num_results, dtype=dtype, device=hidden.device)
    _expert_product[(triton.cdiv(num_out, outputs), num_parts, rows.num_tiles(tile))](
        hidden,
        codes,
        ranges,
        rows.ends,
        rows.ends if rows.sources is None else rows.sources,
        out,
        rows.num_rows,
        num_in,
        num_results,
        num_experts,
        0 if len(hidden) == 1 else hidden.stride(0),  # experts of one token
        BITS=bits,
        BLOCK=block,
        GROUPS=groups,
        PARTS=num_parts,
        EXPERTS=triton.next_power_of_2(num_experts),
        K=0 if rows.sources is None else rows.k,
        IS_SINGLE=rows.is_single,
        IS_GATED=is_gated,
        ROWS=tile,
        OUTPUTS=outputs,
        BY_PTX=hidden.is_cuda and torch.version.hip is None,
        num_warps=_WARPS if tile <= 32 else 2 * _WARPS,
        num_stages=_STAGES,
        **early_launch(hidden),
    )
    return out


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
        STAGES=_ROUTER_STAGES,
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
