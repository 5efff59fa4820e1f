"""What a user may do to a parallel model beside a plain training step, held to torch's own behaviour.

Every test runs on two Gloo ranks in float64. The reference is the same model unsplit, on the samples of both ranks,
with the mean over ranks that torch's DistributedDataParallel takes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import models_for_tests as models
import pytest
import torch
import torch._dynamo  # optimizers import it when they are made: once here, and not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from weft.errors import PlanError
from weft.launch.local_ranks import LocalError, run_local
from weft.mesh import Mesh
from weft.models.init import initial_value
from weft.optim import AdamW
from weft.parallel.apply import cost, parallelize
from weft.parallel.gradient_norm import clip_grad_norm
from weft.parallel.model_state import named_pieces, refresh, state_bytes, sync_gradients
from weft.plan import Plan, Precision, Shard, split_batch
from weft.profiling import profile
from weft.sharding.flat_buffer import Flat
from weft.sharding.units import units_of
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

ModelFn = Callable[[], nn.Module]
PLANS = {
    "data": Plan(data=2, precision="fp64"),
    "stage 1": Plan(shard=Shard(2, 1), precision="fp64"),
    "stage 2": Plan(shard=Shard(2, 2), precision="fp64"),
    "stage 3": Plan(shard=Shard(2, 3), precision="fp64"),
}
STAGE_3 = PLANS["stage 3"]
SOAKED = ("stage 1", "stage 2")
every_plan = pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=name, marks=pytest.mark.soak if name in SOAKED else ()) for name, plan in PLANS.items()],
)


def make(model_fn: ModelFn, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return model_fn().to(dtype)


def inputs_of(rank: int, step: int = 0) -> Tensor:
    """The vectors of one rank."""
    return models.vector_batch(step)[0].double()[rank::2]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Some loss of vectors, a mean over the rank's samples."""
    loss: Tensor = (model(inputs) - 0.3).square().mean()
    return loss


def mean_loss(model: nn.Module, step: int = 0) -> Tensor:
    """What two ranks minimise together."""
    return (loss_of(model, inputs_of(0, step)) + loss_of(model, inputs_of(1, step))) / 2


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The reference's gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Every piece's gradient equals its part of the reference's."""
    num_checked = 0
    for part, piece in named_pieces(model):
        if part.parameter.trainable:
            assert piece.grad is not None, part.parameter.name
            assert_close(piece.grad, expected[part.parameter.name].flatten()[part.start : part.stop])
            num_checked += 1
    assert num_checked or dist.get_rank() > 0


def check_parameters(model: nn.Module, reference: nn.Module) -> None:
    """Every piece equals its part of the reference's parameter."""
    expected = dict(reference.named_parameters())
    for part, piece in named_pieces(model):
        assert_close(piece.detach(), expected[part.parameter.name].detach().flatten()[part.start : part.stop])


def flats_of(model: nn.Module) -> Iterator[Flat]:
    """The flat buffers of a parallel model."""
    units = units_of(model)
    assert units is not None
    return units.flats


def check_freed(model: nn.Module) -> None:
    """Stage 3 at rest: no whole parameters, no whole gradients, nothing under way."""
    for flat in flats_of(model):
        assert flat.whole.untyped_storage().nbytes() == 0, flat.layout.parameters[0].name
        assert flat.whole_gradient.tensor is None
        assert flat._gathering is None
        assert not flat.is_whole


def on_two_ranks(function: Callable[[int], Any]) -> list[Any]:
    """Run on two ranks; assertions fail there and are reported here."""
    return run_local(function, 2)


# --- forwards that are not followed by a backward


@every_plan
@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("when", ["before forward", "before backward", "before step"])
def test_evaluation_changes_nothing_wherever_it_is_called(plan: Plan, quiet: Any, when: str) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, model)]

        def evaluate(now: str) -> None:
            if when == now:
                with quiet():
                    assert_close(loss_of(model, inputs_of(0, 9)), loss_of(reference, inputs_of(0, 9)))

        for step in range(3):
            evaluate("before forward")
            expected, loss = mean_loss(reference, step), loss_of(model, inputs_of(index, step))
            evaluate("before backward")
            expected.backward()
            loss.backward()
            evaluate("before step")
            check_gradients(model, gradients_of(reference))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            check_parameters(model, reference)

    on_two_ranks(rank)


@every_plan
def test_a_forward_with_gradients_and_without_backward_leaves_nothing_stale(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, model)]
        for step in range(3):
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            loss_of(model, inputs_of(index, 9))  # between backward and step
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_close(loss_of(model, inputs_of(0, 9)), loss_of(reference, inputs_of(0, 9)))

    on_two_ranks(rank)


@every_plan
def test_refresh_shows_values_that_were_changed_from_outside(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        for _ in range(2):
            with torch.no_grad():
                loss_of(model, inputs_of(index))
                for _, piece in named_pieces(model):
                    piece.mul_(0.5)
                for parameter in reference.parameters():
                    parameter.mul_(0.5)
            refresh(model)
            assert_close(loss_of(model, inputs_of(0)), loss_of(reference, inputs_of(0)))

    on_two_ranks(rank)


# --- backwards


@every_plan
def test_two_backwards_without_zero_grad_add_up(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        for step in range(3):
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


@every_plan
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_in_part_stay_cleared(plan: Plan, set_to_none: bool) -> None:
    # Two optimizers on one model, of which one clears its gradients and the other goes on accumulating.
    def rank(index: int) -> None:
        reference, model = make(models.MLP), parallelize(make(models.MLP), plan)
        for current in (reference, model):
            half = torch.optim.SGD([current.get_parameter("first.weight"), current.get_parameter("second.bias")])
            for step in range(2):
                (mean_loss(current, 0) if current is reference else loss_of(current, inputs_of(index, 0))).backward()
                if step == 0:
                    half.zero_grad(set_to_none)
        check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


@every_plan
def test_gradients_are_kept_back_while_sync_is_off(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        for step in range(3):
            mean_loss(reference, step).backward()
            sync_gradients(model, step == 2)
            loss_of(model, inputs_of(index, step)).backward()
            assert all((piece.grad is None) == (step < 2) for _, piece in named_pieces(model))
        check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


@every_plan
@pytest.mark.parametrize("model_fn", [models.CalledTwice, models.FrozenCalledTwice, models.AdapterChain])
def test_two_forwards_and_one_backward(plan: Plan, model_fn: ModelFn) -> None:
    def rank(index: int) -> None:
        reference, model = make(model_fn), parallelize(make(model_fn), plan)
        for _ in range(2):
            (mean_loss(reference, 0) + mean_loss(reference, 1)).backward()
            (loss_of(model, inputs_of(index, 0)) + loss_of(model, inputs_of(index, 1))).backward()
            check_gradients(model, gradients_of(reference))
            reference.zero_grad()
            model.zero_grad()
        if plan is STAGE_3:
            check_freed(model)

    on_two_ranks(rank)


@every_plan
@pytest.mark.parametrize("model_fn", [models.CalledTwice, models.FrozenCalledTwice, models.AdapterChain])
def test_two_forwards_and_then_their_two_backwards(plan: Plan, model_fn: ModelFn) -> None:
    def rank(index: int) -> None:
        reference, model = make(model_fn), parallelize(make(model_fn), plan)
        mean_loss(reference, 0).backward()
        mean_loss(reference, 1).backward()
        losses = [loss_of(model, inputs_of(index, step)) for step in range(2)]
        for loss in losses:
            loss.backward()
        check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


@every_plan
def test_one_graph_twice(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        loss, expected = loss_of(model, inputs_of(index)), mean_loss(reference)
        for keep in (True, False):
            loss.backward(retain_graph=keep)
            expected.backward(retain_graph=keep)
            check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


@every_plan
def test_gradient_penalty(plan: Plan) -> None:
    def penalised(model: nn.Module, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        loss = loss_of(model, inputs)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()

    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        for _ in range(2):
            ((penalised(reference, inputs_of(0)) + penalised(reference, inputs_of(1))) / 2).backward()
            penalised(model, inputs_of(index)).backward()
            check_gradients(model, gradients_of(reference))
            reference.zero_grad()
            model.zero_grad()

    on_two_ranks(rank)


class Choosing(nn.Module):
    """Each rank uses another half of the root's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(models.WIDTH, 5), nn.Linear(models.WIDTH, 5)

    def forward(self, inputs: Tensor, choice: int) -> Tensor:
        out: Tensor = (self.left, self.right)[choice](inputs)
        return out


class ChoosingBlocks(Choosing):
    """Each rank uses another block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.left, self.right])


@pytest.mark.parametrize("model_fn", [Choosing, ChoosingBlocks])
@every_plan
def test_ranks_whose_gradients_reach_different_parameters(plan: Plan, model_fn: ModelFn) -> None:
    # The mean counts a parameter that a rank did not use as zero. Whole blocks that only some ranks call cannot be
    # gathered in stage 3, where all ranks have to take part.
    if plan is STAGE_3 and model_fn is ChoosingBlocks:
        return

    def rank(index: int) -> None:
        reference, model = make(model_fn), parallelize(make(model_fn), plan)
        (sum(reference(inputs_of(r), r).square().mean() for r in range(2)) / 2).backward()
        model(inputs_of(index), index).square().mean().backward()
        check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


# --- interrupted passes


class Fragile(models.CalledTwice):
    """Raises in forward, or in backward, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks = ""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[0](inputs))
        if self.breaks == "forward":
            raise ZeroDivisionError("in forward")
        if self.breaks == "backward":
            hidden.register_hook(self._fail)
        out: Tensor = self.head(self.layers[1](hidden))
        return out

    def _fail(self, _: Tensor) -> None:
        raise ZeroDivisionError("in backward")


@every_plan
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_interrupted_one_is_clean(plan: Plan, where: str) -> None:
    def rank(index: int) -> None:
        reference, model = make(Fragile), parallelize(make(Fragile), plan)
        assert isinstance(model, Fragile)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, model)]
        for step in range(3):
            model.breaks = where
            with pytest.raises(ZeroDivisionError):
                loss_of(model, inputs_of(index, 9)).backward()
            model.breaks = ""
            model.zero_grad()
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            check_gradients(model, gradients_of(reference))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        check_parameters(model, reference)

    on_two_ranks(rank)


# --- users' own loops, optimizers and wrappers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@every_plan
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_element_wise_optimizer_trains_the_pieces(plan: Plan, name: str) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.AdapterChain), parallelize(make(models.AdapterChain), plan)
        optimizers = [OPTIMIZERS[name](list(m.parameters())) for m in (reference, model)]
        for step in range(4):
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        check_parameters(model, reference)

    on_two_ranks(rank)


@every_plan
def test_names_stay_and_pieces_cover_every_parameter_once(plan: Plan) -> None:
    def rank(index: int) -> tuple[list[str], dict[str, int]]:
        reference, model = make(models.tied_decoder), parallelize(make(models.tied_decoder), plan)
        assert list(model.state_dict()) == list(reference.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
        assert [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()]
        held: dict[str, int] = {}
        for part, piece in named_pieces(model):
            assert piece.shape == (part.stop - part.start,)
            held[part.parameter.name] = held.get(part.parameter.name, 0) + piece.numel()
        sizes = {name: p.numel() for name, p in reference.named_parameters()}
        return [f"{name} {size}" for name, size in sizes.items()], held

    (sizes, first), (_, second) = on_two_ranks(rank)
    for line in sizes:
        name, size = line.split()
        both = first.get(name, 0) + second.get(name, 0)
        assert both == (2 if plan.data == 2 else 1) * int(size), name


def test_stage_3_frees_everything_between_steps() -> None:
    def rank(index: int) -> None:
        for model_fn in (models.CalledTwice, models.AdapterChain, models.FrozenCalledTwice, models.Structured):
            model = parallelize(make(model_fn), STAGE_3)
            check_freed(model)
            for step in range(2):
                output = model(inputs_of(index, step))
                (output if isinstance(output, Tensor) else output.logits).square().mean().backward()
                check_freed(model)
                with torch.no_grad():
                    model(inputs_of(index, step))
                check_freed(model)
                model.zero_grad()

    on_two_ranks(rank)


@every_plan
def test_a_users_own_checkpointing_around_blocks(plan: Plan) -> None:
    kinds = (models.hf_llama, models.hf_gpt2)
    for model_fn in kinds:  # imports transformers once, here
        model_fn()

    def rank(index: int) -> None:
        for model_fn in kinds:
            tokens = models.token_batch(0)[0]
            reference, model = make(model_fn), make(model_fn)
            model.gradient_checkpointing_enable()  # type: ignore[operator]
            model = parallelize(model.train(), plan)
            for _ in range(2):
                (sum(reference(tokens[r::2]).logits.square().mean() for r in range(2)) / 2).backward()
                model(tokens[index::2]).logits.square().mean().backward()
                check_gradients(model, gradients_of(reference))
                reference.zero_grad()
                model.zero_grad()
            if plan is STAGE_3:
                check_freed(model)

    on_two_ranks(rank)


class Checkpointed(models.AdapterChain):
    """Wraps its blocks itself, in the way of the test."""

    is_reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.is_reentrant)
        logits: Tensor = self.head(hidden)
        return logits


class CheckpointedReentrant(Checkpointed):
    """The old kind, which runs a backward inside backward."""

    is_reentrant = True


class CheckpointedOnly(nn.Module):
    """Reentrant, with no parameter outside the blocks: every gradient arrives in an inner backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.clone().requires_grad_()
        for layer in self.layers:
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=True))
        return hidden


@every_plan
@pytest.mark.parametrize("model_fn", [Checkpointed, CheckpointedReentrant, CheckpointedOnly])
def test_both_kinds_of_checkpointing(plan: Plan, model_fn: ModelFn) -> None:
    def rank(index: int) -> None:
        mesh = Mesh(plan)
        reference, model = make(model_fn), parallelize(make(model_fn), plan, mesh)
        for step in range(2):
            mesh.ledger.clear()
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            check_gradients(model, gradients_of(reference))
            operation = ("data", "all_reduce") if plan.data > 1 else ("shard", "reduce_scatter")
            num_trained = sum(1 for flat in flats_of(model) if flat.trainable)
            assert mesh.ledger.entries()[operation].calls == num_trained  # once for each buffer, not for each block
            reference.zero_grad()
            model.zero_grad()

    on_two_ranks(rank)


@every_plan
def test_a_checkpoint_around_the_whole_model(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.CalledTwice), parallelize(make(models.CalledTwice), plan)
        for step in range(2):
            mean_loss(reference, step).backward()
            out = checkpoint(model, inputs_of(index, step), use_reentrant=False)
            (out - 0.3).square().mean().backward()
            check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


@every_plan
def test_compiled_blocks(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(models.AdapterChain), parallelize(make(models.AdapterChain), plan)
        layers = model.get_submodule("layers")
        for layer in layers.children():
            layer.forward = torch.compile(layer.forward, backend="eager")  # type: ignore[method-assign]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, model)]
        for step in range(3):
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            check_gradients(model, gradients_of(reference))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    on_two_ranks(rank)


class InPlace(nn.Module):
    """Blocks that write into what the block before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(3))
        self.head = nn.Linear(models.WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.clone()
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out


class Adding(nn.Module):
    """hidden += linear(hidden), in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.add_(self.linear(hidden.clone()))


@every_plan
def test_blocks_that_write_in_place(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference, model = make(InPlace), parallelize(make(InPlace), plan)
        for step in range(2):
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


# --- precision


@pytest.mark.parametrize("plan", [Plan(), *PLANS.values()], ids=["one process", *PLANS])
def test_bf16_computes_in_bf16_and_keeps_float32_masters(plan: Plan) -> None:
    precision: Precision = "bf16"
    plan = Plan(data=plan.data, shard=plan.shard, precision=precision)

    def rank(index: int) -> None:
        tokens = models.token_batch(0)[0]
        own = tokens[index :: plan.num_ranks]
        mesh = Mesh(plan)
        reference = make(models.tied_decoder, torch.float32)
        model = parallelize(make(models.tied_decoder, torch.float32), plan, mesh)
        seen: list[torch.dtype] = []
        layer = model.get_submodule("model.layers.0.mlp.up_proj")
        layer.register_forward_hook(lambda module, _, out: seen.extend([module.weight.dtype, out.dtype]))
        optimizer = AdamW(model, lr=0.0, weight_decay=0.0)
        for _ in range(2):
            loss = model(own).float().square().mean()
            assert_close(loss, reference(own).square().mean(), rtol=0.03, atol=0.0)
            loss.backward()
            counted = state_bytes(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert set(seen) == {torch.bfloat16}
        assert {piece.dtype for _, piece in named_pieces(model)} == {torch.float32}
        split = split_batch(plan, len(tokens), 1)
        assert counted == cost(profile(reference), plan, split, mesh.coordinates).state_bytes
        # The masters were never rounded to bf16.
        expected = dict(reference.named_parameters())
        for part, piece in named_pieces(model):
            assert torch.equal(piece, expected[part.parameter.name].flatten()[part.start : part.stop])

    run_local(rank, plan.num_ranks)


def test_bf16_gradients_are_reduced_in_float32() -> None:
    # 1 and 2^-10 lose the small one in bf16; the mean over ranks must keep it.
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.weight

    def rank(index: int) -> float:
        model = parallelize(Scaled(), Plan(data=2, precision="bf16"))
        model(torch.tensor([1.0, 2.0**-10][index : index + 1])).sum().backward()
        ((_, piece),) = named_pieces(model)
        assert piece.grad is not None
        return piece.grad.item()

    assert on_two_ranks(rank) == [(1 + 2.0**-10) / 2] * 2


# --- building


@every_plan
def test_a_model_on_the_meta_device_takes_its_values_by_name(plan: Plan) -> None:
    def rank(index: int) -> None:
        reference = make(models.tied_decoder)
        with torch.device("meta"):
            model = models.tied_decoder()
        asked: list[str] = []

        def value(name: str) -> Tensor:
            asked.append(name)
            return initial_value(reference.config, name, reference.get_parameter(name).shape, 7)  # type: ignore[arg-type]

        model = parallelize(model, plan, values=value)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(value(name))
        tokens = models.token_batch(0)[0]
        assert_close(model(tokens), reference(tokens))
        assert set(asked) == set(dict(reference.named_parameters()))

    on_two_ranks(rank)


def test_a_parameter_of_two_modules_stays_one_when_it_gets_its_value() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(tokens))
            return out

    reference = Tied()
    with torch.device("meta"):
        model = Tied()
    model = parallelize(model, Plan(), values={"embed.weight": reference.embed.weight}.__getitem__)
    assert model.head.weight is model.embed.weight
    tokens = torch.arange(5)[None]
    assert_close(model(tokens), reference(tokens))


def test_a_model_on_the_meta_device_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = models.gpt2()
    with pytest.raises(PlanError, match="the model is on the meta device; pass values="):
        parallelize(model, Plan())


class Rotating(nn.Module):
    """A buffer that its constructor computes and no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, 5)
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.linear(inputs) * self.table
        return out


@pytest.mark.parametrize("plan", [Plan(), *PLANS.values()], ids=["one process", *PLANS])
def test_a_buffer_on_the_meta_device_is_refused_because_nobody_knows_its_value(plan: Plan) -> None:
    def rank(index: int) -> None:
        values = make(Rotating)
        with torch.device("meta"):
            model = Rotating()
        with pytest.raises(PlanError, match="buffer 'table'"):
            parallelize(model, plan, values=values.get_parameter)

    run_local(rank, plan.num_ranks)


@every_plan
def test_a_parallel_model_is_not_made_parallel_again(plan: Plan) -> None:
    def rank(index: int) -> None:
        model = parallelize(make(models.gpt2), plan)
        with pytest.raises(PlanError, match="the model is parallel already; build it anew"):
            parallelize(model, plan)

    on_two_ranks(rank)


def test_a_model_without_anything_to_train_is_refused() -> None:
    def rank(index: int) -> None:
        model = make(models.MLP).requires_grad_(False)
        with pytest.raises(PlanError, match="no trainable parameter; set requires_grad"):
            parallelize(model, STAGE_3)

    on_two_ranks(rank)


def test_batch_norm_is_refused_unless_the_user_accepts_it() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(models.WIDTH, 5), nn.BatchNorm1d(5))

    def rank(index: int) -> None:
        for plan in (Plan(data=2), Plan(shard=Shard(2, 3))):
            with pytest.raises(PlanError, match=r"layer '1' takes statistics over the batch, which .* = 2 splits"):
                parallelize(build(), plan)
            model = parallelize(build(), replace(plan, exact=False))
            model(inputs_of(index).float()).square().mean().backward()
            assert all(piece.grad is not None for _, piece in named_pieces(model))

    on_two_ranks(rank)


class Silent(nn.Module):
    """A block that keeps its result to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, 5)

    def forward(self, inputs: Tensor) -> str:
        self.result = self.linear(inputs)
        return "done"


class WithSilent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Silent()])

    def forward(self, inputs: Tensor) -> Tensor:
        self.layers[0](inputs)
        return self.layers[0].result  # type: ignore[return-value]


def test_a_block_that_returns_no_tensor_is_refused() -> None:
    def rank(index: int) -> None:
        model = parallelize(make(WithSilent), STAGE_3)
        with pytest.raises(PlanError, match=r"block 'layers.0' returned str, in which no tensor was found"):
            model(inputs_of(index))

    on_two_ranks(rank)


class Bypassing(nn.Module):
    """Uses a block's vector without calling the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(models.WIDTH, bias=False), nn.Linear(models.WIDTH, 5)])

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers[1](inputs * self.layers[0].get_parameter("weight"))
        return out


def test_a_parameter_that_is_used_without_its_block() -> None:
    def rank(index: int) -> None:
        reference, model = make(Bypassing), parallelize(make(Bypassing), PLANS["data"])
        for step in range(2):  # the first is watched
            model.zero_grad(), reference.zero_grad()
            mean_loss(reference, step).backward()
            loss_of(model, inputs_of(index, step)).backward()
            check_gradients(model, gradients_of(reference))
        with pytest.raises(PlanError, match=r"own forward reads parameter 'layers.0.weight' outside of a call"):
            parallelize(make(Bypassing), STAGE_3)(inputs_of(index))

    on_two_ranks(rank)


def test_a_gradient_of_a_piece_is_refused() -> None:
    def rank(index: int) -> None:
        model = parallelize(make(Bypassing), STAGE_3)
        with pytest.raises(PlanError, match=r"got a gradient outside the forward of its block"):
            next(model.parameters()).sum().backward()

    on_two_ranks(rank)


class Table(nn.Module):
    """A block that returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, models.WIDTH))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Table()])

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = inputs + self.layers[0](len(inputs))
        return out


@every_plan
def test_a_block_that_returns_a_view_of_its_parameter(plan: Plan) -> None:
    # Stage 3 frees what the view shows when the block returns.
    def rank(index: int) -> None:
        reference, model = make(WithTable), parallelize(make(WithTable), plan)
        if plan is STAGE_3:
            with pytest.raises(PlanError, match=r"block 'layers.0' returned a view of its parameter.*clone"):
                model(inputs_of(index))
            return
        for _ in range(2):
            mean_loss(reference).backward()
            loss_of(model, inputs_of(index)).backward()
            check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


def test_a_rank_that_skips_a_block_in_stage_3_is_ended_and_named() -> None:
    def rank(index: int) -> None:
        model = parallelize(make(ChoosingBlocks), STAGE_3)
        model(inputs_of(index), index).square().mean().backward()

    with pytest.raises(LocalError, match=r"no answer from rank\(s\) 0, 1 of 2 after 2 s"):
        run_local(rank, 2, timeout_seconds=2)


# --- independent peers


def test_torchs_own_ddp_and_fsdp_give_the_same_gradients() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def rank(index: int) -> None:
        ddp = DistributedDataParallel(make(models.CalledTwice))
        loss_of(ddp, inputs_of(index)).backward()
        expected = {name.removeprefix("module."): grad for name, grad in gradients_of(ddp).items()}
        sharded = make(models.CalledTwice)
        for layer in sharded.get_submodule("layers").children():
            fully_shard(layer)
        fully_shard(sharded)
        loss_of(sharded, inputs_of(index)).backward()
        for name, parameter in sharded.named_parameters():
            assert parameter.grad is not None
            whole = parameter.grad.full_tensor()  # type: ignore[attr-defined]
            assert_close(whole, expected[name], rtol=1e-9, atol=1e-12)
        for plan in PLANS.values():
            model = parallelize(make(models.CalledTwice), plan)
            loss_of(model, inputs_of(index)).backward()
            for part, piece in named_pieces(model):
                wanted = expected[part.parameter.name].flatten()[part.start : part.stop]
                assert_close(piece.grad, wanted, rtol=1e-9, atol=1e-12)

    on_two_ranks(rank)


def test_clipping_equals_torchs_on_the_unsplit_model() -> None:
    def rank(index: int) -> None:
        for plan in PLANS.values():
            mesh = Mesh(plan)
            reference, model = make(models.AdapterChain), parallelize(make(models.AdapterChain), plan, mesh)
            mean_loss(reference).backward()
            loss_of(model, inputs_of(index)).backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
            assert_close(clip_grad_norm(model, 1e-3, mesh), expected)
            check_gradients(model, gradients_of(reference))

    on_two_ranks(rank)


def test_a_model_that_nobody_uses_is_freed() -> None:
    def make() -> tuple[weakref.ref[nn.Module], weakref.ref[Tensor]]:
        plan = Plan(precision="bf16")
        mesh = Mesh(plan)
        model = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan, mesh)
        inputs, labels = torch.randn(2, 4), torch.tensor([0, 1])
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), [(inputs, labels)], mesh)
        units = units_of(model)
        assert units is not None
        return weakref.ref(model), weakref.ref(next(units.flats).whole)

    model, buffer = make()
    gc.collect()
    assert model() is None
    assert buffer() is None
