"""Operations on the rows of experts that move most bytes, and the product of routers, as `torch.ops.weft`.

    take_rows        the rows of tokens, in the order of experts
    sum_rows         for each token the sum of its rows, times weights if they are given
    spread_rows      the gradients of a weighted `sum_rows`: those of the rows, and those of the weights
    gated_gradient   the gradient of silu(gate) * up
    wide_product, wide_gradients   a linear whose results are at least float32, and its gradients

On GPUs they are Triton kernels (`row_kernel.py`), because those that torch.compile makes of the plain functions here
run at a fifth to a half of the memory's rate. Elsewhere they are the plain functions. To torch.compile each is one
operation on any device, so a trace on a CPU shows what is saved on a GPU.

A token with k experts has k *pairs* of token and choice, numbered token * k + choice (`expert_rows.py`). An index that
is the number of rows, or of pairs, stands for a row of zeros; `is_padded` says whether there may be such.

Routers need wide products, because the order of scores decides where tokens go. On GPUs, numbers of 16 bits are
multiplied by tensor cores, which add up exact products in float32. So nothing is cast, and results have the precision
of float32. In backward, the float32 gradient is split into two bf16 numbers, of which the second is what the first has
lost: their products have 16 bits of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def take_rows(tokens: Tensor, sources: Tensor, k: int, is_padded: bool) -> Tensor:
    """Returns the token of each pair in `sources` [rows]: [rows, hidden]."""
    return _take(tokens, sources // k, is_padded)


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None, k: int, is_padded: bool) -> Tensor:
    """Returns for each token the sum of the rows at `places` [tokens * k], times `weights` [tokens, k]."""
    by_pair = _take(rows, places, is_padded).unflatten(0, (-1, k))
    total: Tensor = (by_pair if weights is None else by_pair * weights[..., None]).sum(1)
    return total.to(rows.dtype)


def spread_rows(
    gradient: Tensor, rows: Tensor, weights: Tensor, sources: Tensor, places: Tensor, is_padded: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows [rows, hidden] and weights [tokens, k] from that of their sums [tokens, hidden]."""
    wide = gradient.to(weights.dtype)
    of_pairs = _take(weights.flatten(), sources, is_padded)
    for_rows = _take(wide, sources // weights.shape[1], is_padded) * of_pairs[:, None]
    for_weights = (_take(rows, places, is_padded).view(*weights.shape, -1) * wide[:, None]).sum(-1)
    return for_rows.to(rows.dtype), for_weights


def gated_gradient(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Returns the gradient of gate_up [rows, 2 * inner] from that of silu(gate) * up [rows, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat([of_gate, gradient * F.silu(gate)], dim=-1)


def _take(rows: Tensor, index: Tensor, is_padded: bool) -> Tensor:
    """Returns rows by index; if `is_padded`, the index len(rows) gives zeros."""
    return (torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) if is_padded else rows)[index]


# --- as operations of torch


def define(signature: str, plain: Callable[..., Any], on_gpu: Callable[..., Any], on_fake: Callable[..., Any]) -> None:
    """Define an operation of `torch.ops.weft` with the name of its plain function."""
    operation = torch.library.custom_op(f"weft::{plain.__name__}", plain, mutates_args=(), schema=signature)
    operation.register_kernel("cuda")(on_gpu)
    operation.register_fake(on_fake)


def _by_kernel(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the Triton kernel of a plain function; float64 and nothing at all are left to the plain function."""

    def on_gpu(*args: Any) -> Any:
        if any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in args) or args[0].numel() == 0:
            return plain(*args)
        from weft.models import row_kernel

        return getattr(row_kernel, plain.__name__)(*args)

    return on_gpu


define(
    "(Tensor tokens, Tensor sources, int k, bool is_padded) -> Tensor",
    take_rows,
    _by_kernel(take_rows),
    lambda tokens, sources, k, is_padded: tokens.new_empty(len(sources), tokens.shape[1]),
)
define(
    "(Tensor rows, Tensor places, Tensor? weights, int k, bool is_padded) -> Tensor",
    sum_rows,
    _by_kernel(sum_rows),
    lambda rows, places, weights, k, is_padded: rows.new_empty(len(places) // k, rows.shape[1]),
)
define(
    "(Tensor gradient, Tensor rows, Tensor weights, Tensor sources, Tensor places, bool is_padded) -> (Tensor, Tensor)",
    spread_rows,
    _by_kernel(spread_rows),
    lambda gradient, rows, weights, sources, places, is_padded: (
        rows.new_empty(rows.shape),
        weights.new_empty(weights.shape),
    ),
)
define(
    "(Tensor gradient, Tensor gate_up) -> Tensor",
    gated_gradient,
    _by_kernel(gated_gradient),
    lambda gradient, gate_up: gate_up.new_empty(gate_up.shape),
)


def wide_linear(value: Tensor, weight: Tensor) -> Tensor:
    """Returns value [..., in] times weight [out, in] transposed, in at least float32."""
    out: Tensor = _WideLinear.apply(value.flatten(0, -2), weight)
    return out.view(*value.shape[:-1], len(weight))


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        product: Tensor = torch.ops.weft.wide_product(rows, weight)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_rows, of_weight = torch.ops.weft.wide_gradients(gradient, *ctx.saved_tensors)
        return of_rows, of_weight


def wide_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns rows [rows, in] times weight [out, in] transposed, in at least float32."""
    return F.linear(rows.to(_wide(rows)), weight.to(_wide(rows)))


def wide_gradients(gradient: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows and weight from that of their wide product [rows, out]."""
    of_rows, of_weight = gradient @ weight.to(gradient.dtype), gradient.t() @ rows.to(gradient.dtype)
    return of_rows.to(rows.dtype), of_weight.to(weight.dtype)


def wide_product_on_gpu(rows: Tensor, weight: Tensor) -> Tensor:
    """`wide_product` by tensor cores for numbers of 16 bits."""
    if not _has_kernel(rows, weight):
        return wide_product(rows, weight)
    return torch.mm(rows, weight.t(), out_dtype=torch.float32)


def wide_gradients_on_gpu(gradient: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`wide_gradients` by tensor cores for numbers of 16 bits."""
    if not _has_kernel(rows, weight):
        return wide_gradients(gradient, rows, weight)
    both = split_in_two(gradient, rows.dtype)
    of_rows = both @ weight.repeat(2, 1)
    high, low = torch.mm(both.t(), rows, out_dtype=torch.float32).chunk(2)
    return of_rows, (high + low).to(weight.dtype)


def split_in_two(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns each float32 of [rows, columns] as two numbers of 16 bits with nearly its sum [rows, 2 * columns]."""
    high = values.to(dtype)
    return torch.cat([high, (values - high.float()).to(dtype)], dim=1)


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    return rows.dtype == weight.dtype == torch.bfloat16 and len(rows) > 0


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


define(
    "(Tensor rows, Tensor weight) -> Tensor",
    wide_product,
    wide_product_on_gpu,
    lambda rows, weight: rows.new_empty(len(rows), len(weight), dtype=_wide(rows)),
)
define(
    "(Tensor gradient, Tensor rows, Tensor weight) -> (Tensor, Tensor)",
    wide_gradients,
    wide_gradients_on_gpu,
    lambda gradient, rows, weight: (rows.new_empty(rows.shape), weight.new_empty(weight.shape)),
)
