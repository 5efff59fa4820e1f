"""Experts in fp8 from tokens to the sums of their results: all three products of both layers are in fp8.

    tokens ──rounded──▶ rows gathered ──gate, up──▶ silu(gate) · up, rounded ──down──▶ results, weighted and summed

Tokens, and in backward the gradients of their sums, are rounded before they are gathered: a token's k rows have the
same numbers. A row's weight multiplies the gradient after its first product, so the results are not needed in backward.
Weights are rounded by rows in the forward, and by experts in the backward, where they are also transposed.

Gradients of weights sum over rows, which have scales of their own. Those of both operands and the row's weight become
one factor of the row, and the operand that is not only transposed is multiplied by it, relative to the largest factor
of the expert (`row_factors`). So it is rounded as with one scale for each expert. The kernels take multiples of 128
rows, hence experts get rows of zeros behind theirs (`align_groups`).

Where rows are sent to other ranks, and where experts have a capacity, rows are there before they are rounded. Each is
then a token of its own with the weight 1 (`fp8_stacked_experts`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from weft.inspection.first_order import first_order
from weft.models.expert_rows import RowOrder, align_groups, through_experts
from weft.models.experts import StackedExperts, stacked_experts
from weft.parallel.fp8.operations import DTYPE, ROWS_MULTIPLE, SMALLEST_SCALE

operations = torch.ops.weft


def fp8_through_experts(tokens: Tensor, weights: Tensor, order: RowOrder, experts: StackedExperts) -> Tensor:
    """Returns `through_experts` in fp8, if the experts are bf16. With a capacity, rows are gathered before they are
    rounded, and `experts` are to compute with `fp8_stacked_experts`.
    """
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if order.ends is None or gate_up.dtype != torch.bfloat16 or len(tokens) == 0:
        return through_experts(tokens, weights, order, experts)
    return _multiply(tokens, weights, order, gate_up, down)


def fp8_stacked_experts(rows: Tensor, ends: Tensor | None, gate_up: Tensor, down: Tensor) -> Tensor:
    """Returns `stacked_experts` in fp8, if the experts are bf16."""
    if len(rows) == 0 or gate_up.dtype != torch.bfloat16:
        return stacked_experts(rows, ends, gate_up, down)
    if ends is None:
        numbers = torch.arange(1, len(gate_up) + 1, device=rows.device, dtype=torch.int32)
        ends = numbers * (len(rows) // len(gate_up))
    places = torch.arange(len(rows), device=rows.device)
    return _multiply(rows, rows.new_ones(len(rows), 1), RowOrder(places, places, ends), gate_up, down)


def _multiply(tokens: Tensor, weights: Tensor, order: RowOrder, gate_up: Tensor, down: Tensor) -> Tensor:
    aligned = align_groups(order, ROWS_MULTIPLE)
    out: Tensor = _Fp8Experts.apply(tokens, weights, gate_up, down, aligned.sources, aligned.places, aligned.ends)
    return out


class _Fp8Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        sources: Tensor,
        places: Tensor,
        ends: Tensor,
    ) -> Tensor:
        k = weights.shape[1]
        small, small_scale = operations.quantise_rows(tokens)
        widened, widest = _product(*_take(small, small_scale, sources, k), gate_up, ends)
        gated, gated_scale = operations.quantise_gated(widened)
        results, highest = _product(gated, gated_scale, down, ends)
        ctx.save_for_backward(
            small,
            small_scale,
            widened,
            gated,
            gated_scale,
            weights,
            gate_up,
            down,
            widest,
            highest,
            sources,
            places,
            ends,
        )
        out: Tensor = operations.sum_rows(results, places, weights, k, False)
        return out

    @staticmethod
    @first_order("matmul = 'fp8'")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        saved = ctx.saved_tensors  # once: recompute allows no second time
        small, small_scale, widened, gated, gated_scale, weights, gate_up, down, widest, highest = saved[:10]
        sources, places, ends = saved[10:]
        k = weights.shape[1]
        row_weights = F.pad(weights.flatten().float(), (0, 1))[sources]
        values, token_scale = operations.quantise_rows(gradient)
        results, scale = _take(values, token_scale, sources, k)
        of_gated = _gradient_product(results, scale, down, highest, ends)
        of_widened, widened_scale, of_row_weights = operations.quantise_gated_gradient(of_gated, widened, row_weights)
        of_tokens = of_gate_up = of_down = None
        if ctx.needs_input_grad[0]:
            of_rows = _gradient_product(of_widened, widened_scale, gate_up, widest, ends)
            of_tokens = operations.sum_rows(of_rows, places, None, k, False)
        if ctx.needs_input_grad[2]:
            taken_scale = F.pad(small_scale, (0, 1), value=SMALLEST_SCALE)[sources // k]
            factors, largest = operations.row_factors(widened_scale, taken_scale, ends)
            left, right = (
                operations.turn_rows(of_widened, None, 1, factors, 1),
                operations.turn_rows(small, sources, k, None, 1),
            )
            of_gate_up = operations.fp8_weights_mm(left[0], right[0], largest, ends)
        if ctx.needs_input_grad[3]:
            factors, largest = operations.row_factors(scale * row_weights, gated_scale, ends)
            left, right = (
                operations.turn_rows(gradient, sources, k, factors / scale, 1),
                operations.turn_rows(gated, None, 1, None, 1),
            )
            of_down = operations.fp8_weights_mm(left[0], right[0], largest, ends)
        of_weights = of_row_weights[places].view_as(weights).to(weights.dtype)
        return of_tokens, of_weights, of_gate_up, of_down, None, None, None


def _take(values: Tensor, scale: Tensor, sources: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns rows in fp8 of tokens in fp8, and their scales."""
    rows = operations.take_rows(values.view(torch.uint8), sources, k, True).view(DTYPE)
    return rows, F.pad(scale, (0, 1), value=SMALLEST_SCALE)[sources // k]


def _product(rows: Tensor, scale: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows in fp8 times the weight [groups, out, in] of their group, and the largest scale of each group."""
    values, scales = operations.quantise_rows(weight.flatten(0, 1))
    scales = scales.view(weight.shape[:2])
    return operations.fp8_rows_mm(rows, scale, values.view(weight.shape), scales, ends), scales.amax(1)


def _gradient_product(rows: Tensor, scale: Tensor, weight: Tensor, largest: Tensor, ends: Tensor) -> Tensor:
    """Returns rows [rows, out] in fp8 times weight [groups, out, in] of their group; `largest` is of `_product`."""
    num_groups, outputs, inputs = weight.shape
    factors = (1 / largest).repeat_interleave(outputs, output_size=num_groups * outputs)
    turned = operations.turn_rows(weight.flatten(0, 1), None, 1, factors, num_groups)
    scales = largest[:, None].expand(-1, inputs).contiguous()
    product: Tensor = operations.fp8_rows_mm(rows, scale, turned, scales, ends)
    return product
