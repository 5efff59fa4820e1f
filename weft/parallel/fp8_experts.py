"""Experts in fp8 from tokens to the sums of their results: all three products of both layers are in fp8.

    tokens ──rounded──▶ rows gathered ──gate, up──▶ silu(gate) · up, rounded ──down──▶ results, weighted and summed

Tokens, and in backward the gradients of their sums, are rounded before they are gathered: a token's k rows have the
same numbers. A row's weight multiplies the gradient after its first product, so the results are not needed in backward.
Weights are rounded by rows in the forward, and by experts in the backward, where they are also transposed.

Gradients of weights sum over rows, which have scales of their own. Those of both operands and the row's weight become
one factor of the row, and the operand that is not only transposed is multiplied by it, relative to the largest factor
of the expert (`row_factors`). So it is rounded as with one scale for each expert. The kernel sums over multiples of 16
rows, hence experts get rows of zeros behind theirs (`align_groups`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from weft.inspection.first_order import first_order
from weft.models.expert_rows import RowOrder, align_groups, through_experts
from weft.models.experts import StackedExperts
from weft.models.grouped_matmul import grouped_linear
from weft.parallel.fp8_products import MULTIPLE, has_kernels
from weft.parallel.fp8_rows import DTYPE, SMALLEST_SCALE

operations = torch.ops.weft


def fp8_through_experts(tokens: Tensor, weights: Tensor, order: RowOrder, experts: StackedExperts) -> Tensor:
    """Returns `through_experts` in fp8, if the experts are bf16 and have no capacity."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if order.ends is None or gate_up.dtype != torch.bfloat16 or len(tokens) == 0:
        return through_experts(tokens, weights, order, experts)
    aligned = align_groups(order, MULTIPLE)
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
        (small, small_scale, widened, gated, gated_scale, weights, gate_up, down, widest, highest) = ctx.saved_tensors[
            :10
        ]
        sources, places, ends = ctx.saved_tensors[10:]
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
            left = operations.turn_rows(of_widened, None, 1, factors, 1)
            of_gate_up = weight_product(left, operations.turn_rows(small, sources, k, None, 1), largest, ends)
        if ctx.needs_input_grad[3]:
            factors, largest = operations.row_factors(scale * row_weights, gated_scale, ends)
            left = operations.turn_rows(gradient, sources, k, factors / scale, 1)
            of_down = weight_product(left, operations.turn_rows(gated, None, 1, None, 1), largest, ends)
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
    return grouped_product(rows, scale, values.view(weight.shape), scales, ends, is_fast=True), scales.amax(1)


def _gradient_product(rows: Tensor, scale: Tensor, weight: Tensor, largest: Tensor, ends: Tensor) -> Tensor:
    """Returns rows [rows, out] in fp8 times weight [groups, out, in] of their group; `largest` is of `_product`."""
    num_groups, outputs, inputs = weight.shape
    factors = (1 / largest).repeat_interleave(outputs, output_size=num_groups * outputs)
    turned = operations.turn_rows(weight.flatten(0, 1), None, 1, factors, num_groups)
    scales = largest[:, None].expand(-1, inputs).contiguous()
    return grouped_product(rows, scale, turned, scales, ends, is_fast=False)


def weight_product(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor, is_fast: bool = False) -> Tensor:
    """Returns for each group the product of left [1, out, rows] and right [1, in, rows], times its scale [groups]."""
    a, b = left[0], right[0]
    if not has_kernels(left):
        return (torch._grouped_mm(a.float(), b.float().t(), offs=ends) * scale[:, None, None]).to(torch.bfloat16)
    return torch._scaled_grouped_mm(
        a,
        b.t(),
        scale[:, None].expand(-1, len(a)).flatten(),
        torch.ones(len(scale) * len(b), device=scale.device),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )


def grouped_product(left: Tensor, scale: Tensor, right: Tensor, scales: Tensor, ends: Tensor, is_fast: bool) -> Tensor:
    """Returns left [rows, k], sorted by group, times right [groups, n, k] of their group transposed: [rows, n] in bf16.

    Both are in fp8, with scales [rows] and [groups, n]. `is_fast` is as in `fp8_products.scaled_product`.
    """
    if not has_kernels(left):
        product = grouped_linear(left.float() * scale[:, None], right.float() * scales[..., None], ends)
        return product.to(torch.bfloat16)
    return torch._scaled_grouped_mm(
        left, right.transpose(1, 2), scale, scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )
