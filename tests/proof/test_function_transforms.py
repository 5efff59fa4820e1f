"""torch.func in a model: vmap, jvp and functional_call are proved where ranks hold whole parameters, else refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from awkward_for_tests import DATA, PIPE, STAGE_3, Block, Chain, X, vectors
from torch import Tensor, func, nn
from torch.nn import functional

import weft
from weft.errors import LocalError, PlanError
from weft.inspection.callers import functional_call_around, transform_around, unwrapped
from weft.launch.local_ranks import run_local
from weft.proof.prove import verify

STAGE_1 = weft.Plan(shard=weft.Shard(2, 1))


class MappedBlocks(Chain):
    """Calls its blocks for each sample alone."""

    def body(self, hidden: Tensor) -> Tensor:
        return func.vmap(super().body)(hidden)


class MappingBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + func.vmap(lambda row: self.down(functional.gelu(self.up(row))))(hidden)


class MappedInside(Chain):
    """Calls layers for each sample alone, inside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MappingBlock() for _ in range(3))


class MappedBetween(Chain):
    """Calls no module for each sample alone, but functions between blocks."""

    def body(self, hidden: Tensor) -> Tensor:
        return func.vmap(torch.tanh)(super().body(hidden))


class Derivative(Chain):
    """Adds the derivative of its first block in one direction."""

    def body(self, hidden: Tensor) -> Tensor:
        out, change = func.jvp(self.blocks[0], (hidden,), (torch.ones_like(hidden),))
        return out + change


class Ensemble(Chain):
    """Runs all blocks at once, on their stacked parameters."""

    def body(self, hidden: Tensor) -> Tensor:
        own = [dict(block.named_parameters()) for block in self.blocks]
        stacked = {name: torch.stack([one[name] for one in own]) for name in own[0]}
        run = func.vmap(lambda state: func.functional_call(self.blocks[0], state, (hidden,)))
        return run(stacked).mean(0)


class Halved(Chain):
    """Runs its blocks with half of their parameters."""

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            state = {name: parameter * 0.5 for name, parameter in block.named_parameters()}
            hidden = func.functional_call(block, state, (hidden,))
        return hidden


class Gradient(Chain):
    """Adds the gradient of its first block."""

    def body(self, hidden: Tensor) -> Tensor:
        return super().body(hidden) + func.grad(lambda value: self.blocks[0](value).square().sum())(hidden)


class OwnGradient(Chain):
    """The same, by torch.autograd.grad."""

    def body(self, hidden: Tensor) -> Tensor:
        given = hidden.clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.blocks[0](given).square().sum(), given, create_graph=True)
        return super().body(hidden) + gradient


@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (MappedBlocks, DATA),
        (MappedBlocks, STAGE_1),
        (MappedInside, STAGE_3),
        (MappedInside, PIPE),
        (Ensemble, DATA),
        (Derivative, DATA),
        (Halved, STAGE_1),
        (MappedBetween, X),
        (OwnGradient, DATA),
    ],
)
def test_it_is_proved_where_ranks_hold_whole_parameters(make: Callable[[], nn.Module], plan: weft.Plan) -> None:
    verify(make, vectors, plan, steps=2).require()


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (MappedBlocks, STAGE_3, r"'blocks\.0' is called inside of torch\.func\.vmap, .*shard\.stage = 3 gathers"),
        (MappedBlocks, X, r"'blocks\.0\.up' is called inside of torch\.func\.vmap, .*the tensor axes communicate"),
        (MappedBlocks, PIPE, r"its forward runs 'blocks\.0' inside of torch\.func\.vmap, .*use pipe = 1"),
        (MappedBetween, PIPE, r"operations that weft does not see, as of torch\.func, .*call it inside of a block"),
        (Halved, PIPE, r"its forward runs 'blocks\.0' by torch\.func\.functional_call, .*call 'blocks\.0' itself"),
        (Halved, STAGE_3, r"the model's own forward reads parameter 'blocks\.0\.up\.weight' outside of a call"),
        (Gradient, DATA, r"computes gradients by torch\.func .*use torch\.autograd\.grad with create_graph=True"),
    ],
)
def test_it_is_refused_by_name_elsewhere(make: Callable[[], nn.Module], plan: weft.Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        verify(make, vectors, plan)


@pytest.mark.processes
def test_traffic_that_gradients_in_a_forward_change_is_explained() -> None:
    words = (
        r"sends other bytes than are predicted: .* before its own backward \(torch.autograd.grad, test_function_trans"
    )
    with pytest.raises(PlanError, match=words):
        verify(OwnGradient, vectors, STAGE_3)


@pytest.mark.processes
def test_a_loop_of_the_users_own_is_refused_by_name_too() -> None:
    def rank(index: int) -> None:
        weft.parallelize(MappedBlocks(), STAGE_3)(vectors(0)[0])

    with pytest.raises(LocalError, match=r"PlanError: 'blocks\.0' is called inside of torch\.func\.vmap"):
        run_local(rank, 2)


def test_transforms_are_found_around_the_code_that_runs() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def look(value: Tensor) -> Tensor:
        seen.append((transform_around(), tuple(unwrapped(value).shape)))
        return value

    func.vmap(look)(torch.ones(3, 2))
    func.grad(lambda value: look(value).sum())(torch.ones(2))
    look(torch.ones(4))
    assert seen == [("vmap", (3, 2)), ("grad", (2,)), ("", (4,))]


def test_a_functional_call_is_found_around_the_code_that_runs() -> None:
    found = []
    linear = nn.Linear(2, 2)
    linear.register_forward_pre_hook(lambda *_: found.append(functional_call_around()))
    func.functional_call(linear, {}, (torch.ones(2),))
    linear(torch.ones(2))
    assert found == [True, False]
