"""Products of rows with the experts that they go to, whose weights are in fewer bits, as Triton kernels.

    gate and up   a program multiplies some rows of one expert with some outputs, and gives silu(gate) * up
    down          the same without a gate; where there are few programs, each takes a part of the inputs
    sums          of the parts and, times their weights, of the rows of each token

Only codes of experts that have rows are read. Which they are is found on the device, so that the host waits for nothing
and a step can be a CUDA graph: there are as many programs as any choice of experts needs, and some do nothing. A token
alone is not sorted by expert: it has one row for each of its experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.expert_rows import sort_by_expert
from weft.serve.early_launch_kernel import early_launch, wait_for_results
from weft.serve.packed_product_kernel import products_of_blocks
from weft.serve.router_kernel import MAX_PAIRS, order_by_kernel
from weft.serve.weight_formats import RowFp8

if TYPE_CHECKING:
    from weft.serve.packed_experts import PackedExperts, PackedStack

_OUTPUTS = 64  # of a program
_PROGRAMS = 512  # as many as keep a GPU busy
_MAX_ROWS = 64  # of a program
_WARPS = 2
_STAGES = 4
_COLUMNS = 512  # of a program that sums


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
    def tile(self) -> int:
        """Rows of a program; tensor cores need 16."""
        mean: int = triton.next_power_of_2(triton.cdiv(self.num_rows, self.num_experts))
        return max(16, min(_MAX_ROWS, mean))

    @property
    def num_tiles(self) -> int:
        """As many as any choice of experts needs."""
        return min(self.num_rows, self.num_experts + self.num_rows // self.tile)


@triton.jit
def _rows_of_tile(end_ptr, tile, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, IS_SINGLE: tl.constexpr):
    """The expert of a tile, and its first row and the row behind its last; both are equal for a tile too many."""
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
def _expert_product(
    hidden_ptr, code_ptr, range_ptr, end_ptr, source_ptr, out_ptr, num_rows, num_in, num_results, num_experts,
    hidden_stride, K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, IS_SINGLE: tl.constexpr, HAS_SOURCES: tl.constexpr,
    IS_GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BY_PTX: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """If IS_GATED, a result is of two neighbours of a program's outputs: its gate, and its up, which is `num_results`
    behind it.
    """
    part = tl.program_id(1)
    wait_for_results(IS_EARLY)
    expert, first, behind = _rows_of_tile(end_ptr, tl.program_id(2), num_experts, EXPERTS, ROWS, IS_SINGLE)
    rows = first + tl.arange(0, ROWS)
    exists = rows < behind
    given = rows
    if HAS_SOURCES:
        given = tl.load(source_ptr + rows, mask=exists, other=0)
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
        hidden_ptr + (given // K).to(tl.int64)[:, None] * hidden_stride, code_ptr, range_ptr, outputs, inside, exists,
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
    """The results of rows [rows, hidden], which are sorted by expert; expert i's end before row `ends[i]`."""
    own = ExpertRows(ends, None, 1, len(rows), experts.num_experts)
    return _summed(_parts(rows, own, experts), own, rows)


def _parts(hidden: Tensor, rows: ExpertRows, experts: PackedExperts) -> Tensor:
    """Parts [parts, rows, hidden] of the results of rows."""
    _, num_results, num_inner = experts.down_proj.shape
    inner = hidden.new_empty(1, rows.num_rows, num_inner)
    _multiply(hidden, experts.gate_up_proj, rows, inner, is_gated=True)
    tiles = rows.num_tiles * triton.cdiv(num_results, _OUTPUTS)
    block = experts.down_proj.format.block(num_inner)[1]  # type: ignore[attr-defined]
    most = min(8, max(1, num_inner // block // 4))  # a program has at least four blocks
    num_parts = min(most, triton.next_power_of_2(triton.cdiv(_PROGRAMS, tiles)))
    parts = torch.empty(num_parts, rows.num_rows, num_results, dtype=torch.float32, device=hidden.device)
    _multiply(inner[0], experts.down_proj, rows._replace(sources=None, k=1), parts, is_gated=False)
    return parts


def _summed(
    parts: Tensor,
    rows: ExpertRows,
    like: Tensor,
    places: Tensor | None = None,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The results of tokens, in the dtype of a tensor."""
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


def _multiply(hidden: Tensor, stack: PackedStack, rows: ExpertRows, out: Tensor, is_gated: bool) -> None:
    """Write the products of rows of `hidden` to `out` [parts, rows, results]."""
    assert hidden.stride(1) == 1, "the inputs of a row lie end to end"
    codes, ranges = stack.parts
    num_out, num_in = stack.shape[1:]
    bits, block, groups = stack.format.block(num_in)  # type: ignore[attr-defined]
    grid = (triton.cdiv(num_out, _OUTPUTS), len(out), rows.num_tiles)
    _expert_product[grid](
        hidden,
        codes,
        ranges.view(torch.float32) if isinstance(stack.format, RowFp8) else ranges,
        rows.ends,
        rows.ends if rows.sources is None else rows.sources,
        out,
        rows.num_rows,
        num_in,
        out.shape[2],
        rows.num_experts,
        hidden.stride(0),
        K=rows.k,
        BITS=bits,
        BLOCK=block,
        GROUPS=groups,
        PARTS=len(out),
        EXPERTS=triton.next_power_of_2(rows.num_experts),
        IS_SINGLE=rows.is_single,
        HAS_SOURCES=rows.sources is not None,
        IS_GATED=is_gated,
        ROWS=rows.tile,
        OUTPUTS=_OUTPUTS,
        BY_PTX=hidden.is_cuda and torch.version.hip is None,
        num_warps=_WARPS if rows.tile <= 32 else 2 * _WARPS,
        num_stages=_STAGES,
        **early_launch(hidden),
    )
