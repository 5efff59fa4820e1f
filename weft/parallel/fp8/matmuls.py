"""Matmuls in fp8 (`plan.matmul = "fp8"`). Tensor cores run them at twice the rate of bf16. They are not exact.

Linears inside of blocks multiply fp8 numbers, and so do experts (`experts.py`). Embeddings, the head, norms, routers
and attention are unchanged, and so are experts of transformers' models. The kernels need features in multiples of 16,
and that of experts a GPU of compute capability 9.0 (H100, H200); other linears and experts stay in bf16.

Each row of an operand has its own scale, which maps the row's largest magnitude to the largest number of e4m3. (Scales
of experts are powers of two, because their numbers change scales later; that costs 1 % of the error, and 8 % where few
numbers are much larger than the others.) Rows always lie along the dim that the matmul sums over, so each matmul
quantises its operands anew. Weights, activations and saved activations stay bf16. On a CPU the operands are rounded in
the same way and multiplied in float32, so that tests check the same rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.inspection.first_order import first_order
from weft.mesh import Mesh
from weft.models.expert_rows import through_experts
from weft.models.experts import SparseMLP, StackedExperts, stacked_experts
from weft.parallel.fp8.experts import fp8_stacked_experts, fp8_through_experts
from weft.parallel.fp8.operations import DTYPE, LARGEST
from weft.plan import Plan
from weft.profiling import Profile
from weft.strategy import Strategy, Values

CAPABILITY = (8, 9)  # compute capability of the first GPUs with fp8
EXPERTS_CAPABILITY = (9, 0)  # of the GPUs for which torch has fp8 products of experts
MULTIPLE = 16  # features that the kernels take
LEAST_LARGEST = 1e-12  # the largest magnitude that a row of zeros is taken to have

_is_traced = False  # Are products of fake tensors on a CPU traced as the kernels of a GPU?


class Fp8Matmuls(Strategy):
    """Runs the linears and experts of blocks in fp8."""

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
        if profile.model is not None and not any(map(_takes_part, _modules(profile.model))):
            return (
                f"plan.matmul = 'fp8', but no linear inside a block has features in multiples of {MULTIPLE}; "
                f"use matmul = 'compute'"
            )
        return None

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.matmul != "fp8":
            return model
        capability = torch.cuda.get_device_capability(mesh.device) if mesh.device.type == "cuda" else None
        if capability is not None and capability < CAPABILITY:
            raise PlanError(
                f"plan.matmul = 'fp8' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and "
                f"{torch.cuda.get_device_name(mesh.device)} has none; use matmul = 'compute'"
            )
        modules = list(_modules(model))
        _install(modules)
        if capability in (None, EXPERTS_CAPABILITY):
            _install_in_experts(modules, sends_rows=plan.num_expert_parts > 1)
        return model


@contextmanager
def traced_as_on_a_gpu(block: nn.Module, sends_rows: bool = False) -> Iterator[None]:
    """Inside the context, the block's linears and experts can be traced on fake tensors as fp8 matmuls on a GPU.

    The block must be of a model to which no plan was applied. `sends_rows`: the plan has experts on several ranks.
    """
    global _is_traced
    linears = _install(block.modules())
    _install_in_experts(block.modules(), sends_rows)
    _is_traced = True
    try:
        yield
    finally:
        _is_traced = False
        for linear in linears:
            del linear.forward
        for module in block.modules():
            if isinstance(module, StackedExperts):
                module.compute = stacked_experts
            elif isinstance(module, SparseMLP):
                module.through = through_experts


def _install(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Let linears multiply in fp8, and return them."""
    linears = [module for module in modules if _takes_part(module)]
    for linear in linears:
        setattr(linear, "forward", _Fp8Linear(linear).forward)  # noqa: B010 (a method to mypy)
    return linears


def _install_in_experts(modules: Iterable[nn.Module], sends_rows: bool) -> None:
    """Let experts multiply in fp8. `sends_rows`: a layer's experts are on several ranks, to which rows are sent."""
    for module in modules:
        if isinstance(module, StackedExperts) and _experts_take_part(module):
            module.compute = fp8_stacked_experts
        elif isinstance(module, SparseMLP) and _experts_take_part(module.experts) and not sends_rows:
            module.through = fp8_through_experts


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for block in find_blocks(model).values() for module in block.modules())


def _takes_part(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def _experts_take_part(experts: StackedExperts) -> bool:
    return all(size % MULTIPLE == 0 for size in experts.down_proj.shape[1:])


class _Fp8Linear:
    """Has the forward that replaces an nn.Linear's."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

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

    Each row of both is rounded to fp8 with its own scale. `is_fast` accumulates with fewer bits, which is precise
    enough for forwards, but not for gradients.
    """
    (a, scale_a), (b, scale_b) = quantise(left), quantise(right)
    if not (left.is_cuda or _is_traced):
        return ((a.float() @ b.float().t()) * scale_a * scale_b.t()).to(torch.bfloat16)
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of a matrix in fp8, and their scales [rows, 1] in float32."""
    wide = matrix.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST_LARGEST) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(DTYPE).contiguous(), scale
