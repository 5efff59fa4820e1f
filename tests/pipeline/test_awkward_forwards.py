"""Forwards that stages cannot run, refused by name: gradients inside a forward, and tensors that cannot be copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import PlanError
from weft.parallel.shard import ShardAxis
from weft.profiling import profile

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*weight_norm.*")]

PIPE = weft.Plan(pipe=weft.Pipe(2), micro_batch=2)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step)), torch.arange(4) % 3


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6)) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        out: Tensor = self.head(inputs)
        return out


class OldWeightNorm(Chain):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.get_submodule("layers.1.0"))


class NewWeightNorm(Chain):
    """One parametrized layer is inside a block. The head is parametrized itself, and has its own `__deepcopy__`."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("layers.1.0", "head"):
            torch.nn.utils.parametrizations.weight_norm(self.get_submodule(name))


class GradientPenalty(Chain):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[0](inputs)
        out: Tensor = self.head(self.layers[2](self.layers[1](hidden)))
        if not self.training:
            return out
        (gradient,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
        return out * (1 + gradient.square().mean())


def penalty(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    loss = nn.functional.cross_entropy(model(inputs), batch[1], reduction="sum")
    if not torch.is_grad_enabled():
        return loss
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + gradient.square().sum()


def test_weight_norm() -> None:
    weft.verify(NewWeightNorm, batch, PIPE, steps=2).require()
    with pytest.raises(PlanError, match=r"'layers\.1\.0' holds 'weight', a result computed from parameters"):
        weft.verify(OldWeightNorm, batch, PIPE)


def test_gradients_in_a_forward_are_refused() -> None:
    with pytest.raises(PlanError, match=r"its forward computes gradients \(torch\.autograd\.grad\).*use pipe = 1"):
        weft.verify(GradientPenalty, batch, PIPE)


def test_gradients_in_the_objective_are_refused() -> None:
    objective = weft.Objective(lambda batch: torch.tensor(len(batch[1])), penalty)
    with pytest.raises(PlanError, match=r"the objective computes gradients"):
        weft.verify(Chain, batch, PIPE, objective=objective)


def test_gradients_of_gradients_are_refused_under_x() -> None:
    objective = weft.Objective(lambda batch: torch.tensor(len(batch[1])), penalty)
    plan = weft.Plan(tensor=weft.Tensor(x=2))
    with pytest.raises(PlanError, match=r"the loss uses gradients of gradients .* under tensor\.x and tensor\.y"):
        weft.verify(Chain, batch, plan, objective=objective)
    with pytest.raises(PlanError, match=r"'sum' of its logits needs all classes"):
        weft.verify(GradientPenalty, batch, plan)


def always_penalty(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    out = model(inputs)
    (gradient,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    return gradient.square().sum()


def test_an_objective_that_needs_gradients_in_an_evaluation_is_refused() -> None:
    objective = weft.Objective(lambda batch: torch.tensor(len(batch[1])), always_penalty)
    with pytest.raises(PlanError, match=r"the objective fails in an evaluation.*give Objective a measure"):
        weft.verify(Chain, batch, weft.Plan(data=2), objective=objective)


class Renormalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(tokens))
        return out


@pytest.mark.parametrize("plan", [weft.Plan(data=2), weft.Plan(shard=weft.Shard(2))], ids=["data", "shard"])
def test_an_embedding_that_changes_its_weights_is_refused(plan: weft.Plan) -> None:
    with pytest.raises(PlanError, match=r"the embedding 'embedding' has max_norm"):
        weft.verify(Renormalising, lambda step: (torch.arange(4), torch.arange(4) % 3), plan)


class FrozenRenormalising(Renormalising):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)


class RenormalisingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Renormalising(), nn.Linear(3, 3)])


@pytest.mark.parametrize(
    ("make", "plan", "is_refused"),
    [
        (Renormalising, weft.Plan(precision="bf16"), True),
        (Renormalising, weft.Plan(tensor=weft.Tensor(x=2), precision="bf16"), True),
        (Renormalising, weft.Plan(precision="bf16", memory=weft.Memory(master=False), exact=False), False),
        (Renormalising, weft.Plan(tensor=weft.Tensor(x=2)), False),
        (Renormalising, weft.Plan(), False),
        (FrozenRenormalising, weft.Plan(precision="bf16"), False),  # no optimizer updates it
        (RenormalisingBlock, weft.Plan(memory=weft.Memory(weights=1.0)), True),
        (RenormalisingBlock, weft.Plan(memory=weft.Memory(weights=0.5)), False),  # the last block
    ],
)
@pytest.mark.sampled(1)
def test_an_embedding_that_changes_a_copy_of_its_weights_is_refused(
    make: Callable[[], nn.Module], plan: weft.Plan, is_refused: bool
) -> None:
    """The optimizer updates the weights behind the copy, and would lose the change."""
    found = ShardAxis().refuse(profile(make()), plan) or ""
    assert ("embedding' has max_norm, which changes its weights in forward" in found) == is_refused
