"""Matmuls in fp8 (`plan.matmul = "fp8"`). Tensor cores run them at twice the rate of bf16. They are not exact.

Linears inside of blocks multiply fp8 numbers (e4m3). Each row has its own scale, which maps the row's largest magnitude
to the largest number of e4m3. This applies to the forward and to the gradients of input and weight; rows always lie
along the dim that the matmul sums over, so each of the three matmuls quantises its operands anew. Weights, activations
and saved activations stay bf16. Embeddings, the head, norms and attention are unchanged.

The kernel needs features in multiples of 16; other linears stay in bf16. On a CPU the operands are rounded in the same
way and multiplied in float32, so that tests check the same rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.inspection.first_order import first_order
from weft.mesh import Mesh
from weft.plan import Plan
from weft.profiling import Profile
from weft.strategy import Strategy, Values

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
SMALLEST_SCALE = 1e-12  # the scale of a row of zeros
MULTIPLE = 16
CAPABILITY = (8, 9)  # compute capability of the first GPUs with fp8


class Fp8Matmuls(Strategy):
    """Runs the linears of blocks in fp8."""

    name = "fp8"
    exact = False

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.matmul != "fp8":
            return None
        if plan.tensor.x * plan.tensor.y > 1:
            return (
                f"plan.matmul = 'fp8' multiplies whole linears, and tensor.x = {plan.tensor.x}, tensor.y = "
                f"{plan.tensor.y} split them; use shard instead, or matmul = 'compute'"
            )
        if plan.pipe.degree > 1 and plan.pipe.schedule == "zero-bubble":
            return (
                "plan.matmul = 'fp8' does not put weight gradients off, as pipe.schedule = 'zero-bubble' does; use 1f1b"
            )
        if profile.model is not None and not any(map(_takes_part, _linears(profile.model))):
            return (
                f"plan.matmul = 'fp8', but no linear inside a block has features in multiples of {MULTIPLE}; "
                f"use matmul = 'compute'"
            )
        return None

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.matmul != "fp8":
            return model
        if mesh.device.type == "cuda" and torch.cuda.get_device_capability(mesh.device) < CAPABILITY:
            raise PlanError(
                f"plan.matmul = 'fp8' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and "
                f"{torch.cuda.get_device_name(mesh.device)} has none; use matmul = 'compute'"
            )
        for linear in _linears(model):
            if _takes_part(linear):
                _install(linear)
        return model


@contextmanager
def traced_as_on_a_gpu(block: nn.Module) -> Iterator[None]:
    """Inside the context, the block's linears can be traced on fake tensors as fp8 matmuls on a GPU.

    The block must be of a model to which no plan was applied.
    """
    global _is_traced
    linears = [module for module in block.modules() if type(module) is nn.Linear and _takes_part(module)]
    for linear in linears:
        _install(linear)
    _is_traced = True
    try:
        yield
    finally:
        _is_traced = False
        for linear in linears:
            del linear.forward


_is_traced = False


def _install(linear: nn.Linear) -> None:
    setattr(linear, "forward", _Fp8Linear(linear).forward)  # noqa: B010 (a method to mypy)


def _linears(model: nn.Module) -> list[nn.Linear]:
    inside = (module for block in find_blocks(model).values() for module in block.modules())
    return [module for module in inside if type(module) is nn.Linear]


def _takes_part(linear: nn.Linear) -> bool:
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


class _Fp8Linear:
    """Has the forward that replaces an nn.Linear's."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name, which callers may use
        """Returns the product in fp8 plus the bias in the compute dtype."""
        out = multiply(input, self.module.weight)
        return out if self.module.bias is None else out + self.module.bias


def multiply(value: Tensor, weight: Tensor) -> Tensor:
    """Returns the product of value [..., in] and weight [out, in], like F.linear, in fp8 if the weight is bf16."""
    if value.shape[:-1].numel() == 0 or weight.dtype != torch.bfloat16:
        return torch.nn.functional.linear(value, weight)
    out: Tensor = _Multiply.apply(value, weight)
    return out


class _Multiply(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        rows = value.reshape(-1, value.shape[-1])  # [rows, in]
        return scaled_product(rows, weight, is_fast=True).view(*value.shape[:-1], len(weight))

    @staticmethod
    @first_order("matmul = 'fp8'")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (value, weight), (gradient,) = ctx.saved_tensors, gradients
        rows = gradient.reshape(-1, gradient.shape[-1])  # [rows, out]
        of_value = of_weight = None
        if ctx.needs_input_grad[0]:
            of_value = scaled_product(rows, weight.t(), is_fast=False).view(value.shape)
        if ctx.needs_input_grad[1]:
            given = value.reshape(-1, value.shape[-1])  # [rows, in]
            is_taken = len(rows) % MULTIPLE == 0  # whether the kernel supports it
            of_weight = scaled_product(rows.t(), given.t(), is_fast=False) if is_taken else rows.t() @ given
        return of_value, of_weight


def scaled_product(left: Tensor, right: Tensor, is_fast: bool) -> Tensor:
    """Returns left [m, k] times right [n, k] transposed: [m, n] in bf16.

    Each row of both is rounded to fp8 with its own scale.
    `is_fast` accumulates with fewer bits, which is precise enough for forwards, but not for gradients.
    """
    (a, scale_a), (b, scale_b) = quantise(left), quantise(right)
    if left.device.type != "cuda" and not _is_traced:
        return ((a.float() @ b.float().t()) * scale_a * scale_b.t()).to(torch.bfloat16)
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of a matrix in fp8, and their scales [rows, 1] in float32."""
    wide = matrix.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALE) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(DTYPE).contiguous(), scale
