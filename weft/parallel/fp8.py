"""Matmuls in fp8 (`plan.matmul = "fp8"`). Tensor cores run them at twice the rate of bf16. They are not exact.

Linears inside of blocks multiply fp8 numbers (`fp8_products.py`), and so do experts (`fp8_experts.py`). Embeddings, the
head, norms, routers and attention are unchanged, and so are experts of transformers' models. The kernels need features
in multiples of 16, and that of experts a GPU of compute capability 9.0 (H100, H200); other linears and experts stay in
bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.mesh import Mesh
from weft.models.expert_rows import through_experts
from weft.models.experts import SparseMLP, StackedExperts, stacked_experts
from weft.parallel.fp8_experts import fp8_stacked_experts, fp8_through_experts
from weft.parallel.fp8_products import MULTIPLE, multiply, traced_kernels
from weft.plan import Plan
from weft.profiling import Profile
from weft.strategy import Strategy, Values

CAPABILITY = (8, 9)  # compute capability of the first GPUs with fp8
EXPERTS_CAPABILITY = (9, 0)  # of the GPUs for which torch has fp8 products of experts


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
        if profile.model is not None and not any(map(_takes_part, _linears(profile.model))):
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
        for linear in _linears(model):
            if _takes_part(linear):
                _install(linear)
        if capability in (None, EXPERTS_CAPABILITY):
            _install_in_experts(_modules(model), sends_rows=plan.num_expert_parts > 1)
        return model


@contextmanager
def traced_as_on_a_gpu(block: nn.Module, sends_rows: bool = False) -> Iterator[None]:
    """Inside the context, the block's linears and experts can be traced on fake tensors as fp8 matmuls on a GPU.

    The block must be of a model to which no plan was applied. `sends_rows`: the plan has experts on several ranks.
    """
    linears = [module for module in block.modules() if type(module) is nn.Linear and _takes_part(module)]
    for linear in linears:
        _install(linear)
    _install_in_experts(block.modules(), sends_rows)
    try:
        with traced_kernels():
            yield
    finally:
        for linear in linears:
            del linear.forward
        for module in block.modules():
            if isinstance(module, StackedExperts):
                module.compute = stacked_experts
            elif isinstance(module, SparseMLP):
                module.through = through_experts


def _install(linear: nn.Linear) -> None:
    setattr(linear, "forward", _Fp8Linear(linear).forward)  # noqa: B010 (a method to mypy)


def _install_in_experts(modules: Iterable[nn.Module], sends_rows: bool) -> None:
    """Let experts multiply in fp8. `sends_rows`: a layer's experts are on several ranks, to which rows are sent."""
    for module in modules:
        if isinstance(module, StackedExperts) and _experts_take_part(module):
            module.compute = fp8_stacked_experts
        elif isinstance(module, SparseMLP) and _experts_take_part(module.experts) and not sends_rows:
            module.through = fp8_through_experts


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for block in find_blocks(model).values() for module in block.modules())


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in _modules(model) if type(module) is nn.Linear]


def _takes_part(linear: nn.Linear) -> bool:
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def _experts_take_part(experts: StackedExperts) -> bool:
    return all(size % MULTIPLE == 0 for size in experts.down_proj.shape[1:])


class _Fp8Linear:
    """Has the forward that replaces an nn.Linear's."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name, which callers may use
        """Returns the product in fp8 plus the bias in the compute dtype."""
        out = multiply(input, self.module.weight)
        return out if self.module.bias is None else out + self.module.bias
