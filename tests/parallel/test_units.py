"""What a user may do to a parallel model beside a plain training step, held to torch's own behaviour.

Every test runs on two Gloo ranks in float64. The reference is the same model unsplit, on the samples of both ranks,
with the mean over ranks that torch's DistributedDataParallel takes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models_for_tests as models
import pytest
import torch
import torch._dynamo  # optimizers import it when they are made: once here, and not in every forked rank
import torch.distributed as dist
from nets_for_tests import chain, net
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
from weft.parallel.model_state import all_flats, named_pieces, refresh, state_bytes, sync_gradients
from weft.plan import Plan, Shard, split_batch
from weft.profiling import profile
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

ModelFn = Callable[[], nn.Module]
WIDTH = models.WIDTH
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
with_one_process = pytest.mark.parametrize("plan", [Plan(), *PLANS.values()], ids=["one process", *PLANS])


def make(model_fn: ModelFn, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return model_fn().to(dtype)


def inputs_of(rank: int, step: int = 0) -> Tensor:
    """The vectors of one rank."""
    return models.vector_batch(step)[0].double()[rank::2]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Some loss of vectors, a mean over the rank's samples."""
    return (model(inputs) - 0.3).square().mean()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The reference's gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def part_of(whole: Tensor, part: Any) -> Tensor:
    """The elements of a parameter's value or gradient that a piece holds."""
    return whole.detach().flatten()[part.start : part.stop]


class Both:
    """A rank's part of a model under a plan, and beside it the same model unsplit, on the samples of both ranks."""

    def __init__(self, plan: Plan, index: int, model_fn: ModelFn = models.CalledTwice) -> None:
        self.plan, self.index, self.mesh = plan, index, Mesh(plan)
        self.reference, self.model = make(model_fn), parallelize(make(model_fn), plan, self.mesh)

    def optimize(self, make_optimizer: Callable[[Any], Any] = lambda own: torch.optim.SGD(own, lr=0.3)) -> None:
        """Make an optimizer of each model, for `update`."""
        self.optimizers = [make_optimizer(list(one.parameters())) for one in (self.reference, self.model)]

    def losses(self, step: int = 0, loss: Callable[..., Tensor] = loss_of) -> tuple[Tensor, Tensor]:
        """What two ranks minimise together, and this rank's loss."""
        both = loss(self.reference, inputs_of(0, step)) + loss(self.reference, inputs_of(1, step))
        return both / 2, loss(self.model, inputs_of(self.index, step))

    def backward(self, step: int = 0, loss: Callable[..., Tensor] = loss_of) -> None:
        for one in self.losses(step, loss):
            one.backward()

    def update(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)

    def zero_grad(self) -> None:
        self.reference.zero_grad()
        self.model.zero_grad()

    def check_gradients(self) -> None:
        """Every piece's gradient equals its part of the reference's."""
        expected, num_checked = gradients_of(self.reference), 0
        for part, piece in named_pieces(self.model):
            if part.parameter.trainable:
                assert piece.grad is not None, part.parameter.name
                assert_close(piece.grad, part_of(expected[part.parameter.name], part))
                num_checked += 1
        assert num_checked or dist.get_rank() > 0

    def check_parameters(self) -> None:
        """Every piece equals its part of the reference's parameter."""
        for part, piece in named_pieces(self.model):
            assert_close(piece.detach(), part_of(self.reference.get_parameter(part.parameter.name), part))

    def check_results(self) -> None:
        """Both give the same result for other samples."""
        assert_close(loss_of(self.model, inputs_of(0, 9)), loss_of(self.reference, inputs_of(0, 9)))


def check_freed(model: nn.Module) -> None:
    """Stage 3 at rest: no whole parameters, no whole gradients, nothing under way."""
    for flat in all_flats(model):
        assert flat.whole.untyped_storage().nbytes() == 0, flat.layout.parameters[0].name
        assert flat.whole_gradient.tensor is None
        assert flat._gathering is None
        assert not flat.is_whole


def on_two_ranks(
    function: Callable[[Both], Any], plan: Plan, model_fn: ModelFn = models.CalledTwice, **others: Any
) -> list[Any]:
    """Run on two ranks; assertions fail there and are reported here."""
    return run_local(lambda index: function(Both(plan, index, model_fn)), 2, **others)


# --- forwards that are not followed by a backward


@every_plan
@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("when", ["before forward", "before backward", "before step"])
def test_evaluation_changes_nothing_wherever_it_is_called(plan: Plan, quiet: Any, when: str) -> None:
    def rank(both: Both) -> None:
        both.optimize()

        def evaluate(now: str) -> None:
            if when == now:
                with quiet():
                    both.check_results()

        for step in range(3):
            evaluate("before forward")
            losses = both.losses(step)
            evaluate("before backward")
            for loss in losses:
                loss.backward()
            evaluate("before step")
            both.check_gradients()
            both.update()
            both.check_parameters()

    on_two_ranks(rank, plan)


@every_plan
def test_a_forward_with_gradients_and_without_backward_leaves_nothing_stale(plan: Plan) -> None:
    def rank(both: Both) -> None:
        both.optimize()
        for step in range(3):
            both.backward(step)
            loss_of(both.model, inputs_of(both.index, 9))  # between backward and step
            both.update()
            both.check_results()

    on_two_ranks(rank, plan)


@every_plan
def test_refresh_shows_values_that_were_changed_from_outside(plan: Plan) -> None:
    def rank(both: Both) -> None:
        for _ in range(2):
            with torch.no_grad():
                loss_of(both.model, inputs_of(both.index))
                for one in (*(piece for _, piece in named_pieces(both.model)), *both.reference.parameters()):
                    one.mul_(0.5)
            refresh(both.model)
            both.check_results()

    on_two_ranks(rank, plan)


# --- backwards


@every_plan
def test_two_backwards_without_zero_grad_add_up(plan: Plan) -> None:
    def rank(both: Both) -> None:
        for step in range(3):
            both.backward(step)
            both.check_gradients()

    on_two_ranks(rank, plan)


@every_plan
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_in_part_stay_cleared(plan: Plan, set_to_none: bool) -> None:
    # Two optimizers on one model, of which one clears its gradients and the other goes on accumulating.
    def rank(both: Both) -> None:
        halves = [
            torch.optim.SGD([one.get_parameter("first.weight"), one.get_parameter("second.bias")])
            for one in (both.reference, both.model)
        ]
        both.backward()
        for half in halves:
            half.zero_grad(set_to_none)
        both.backward()
        both.check_gradients()

    on_two_ranks(rank, plan, models.MLP)


@every_plan
def test_gradients_are_kept_back_while_sync_is_off(plan: Plan) -> None:
    def rank(both: Both) -> None:
        for step in range(3):
            sync_gradients(both.model, step == 2)
            both.backward(step)
            assert all((piece.grad is None) == (step < 2) for _, piece in named_pieces(both.model))
        both.check_gradients()

    on_two_ranks(rank, plan)


some_frozen = pytest.mark.parametrize("model_fn", [models.CalledTwice, models.FrozenCalledTwice, models.AdapterChain])


@every_plan
@some_frozen
def test_two_forwards_and_one_backward(plan: Plan, model_fn: ModelFn) -> None:
    def rank(both: Both) -> None:
        for _ in range(2):
            for first, second in zip(both.losses(0), both.losses(1), strict=True):
                (first + second).backward()
            both.check_gradients()
            both.zero_grad()
        if plan is STAGE_3:
            check_freed(both.model)

    on_two_ranks(rank, plan, model_fn)


@every_plan
@some_frozen
def test_two_forwards_and_then_their_two_backwards(plan: Plan, model_fn: ModelFn) -> None:
    def rank(both: Both) -> None:
        for loss in [*both.losses(0), *both.losses(1)]:
            loss.backward()
        both.check_gradients()

    on_two_ranks(rank, plan, model_fn)


@every_plan
def test_one_graph_twice(plan: Plan) -> None:
    def rank(both: Both) -> None:
        losses = both.losses()
        for keep in (True, False):
            for loss in losses:
                loss.backward(retain_graph=keep)
            both.check_gradients()

    on_two_ranks(rank, plan)


@every_plan
def test_gradient_penalty(plan: Plan) -> None:
    def penalised(model: nn.Module, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        loss = loss_of(model, inputs)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()

    def rank(both: Both) -> None:
        for _ in range(2):
            both.backward(0, penalised)
            both.check_gradients()
            both.zero_grad()

    on_two_ranks(rank, plan)


def choosing() -> nn.Module:
    """Each rank uses another half of the root's parameters."""
    left, right = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)
    return net(lambda self, inputs, choice: (self.left, self.right)[choice](inputs), left=left, right=right)


def choosing_blocks() -> nn.Module:
    """Each rank uses another block."""
    model = choosing()
    model.layers = nn.ModuleList([model.left, model.right])
    return model


@pytest.mark.parametrize("model_fn", [choosing, choosing_blocks])
@every_plan
def test_ranks_whose_gradients_reach_different_parameters(plan: Plan, model_fn: ModelFn) -> None:
    # The mean counts a parameter that a rank did not use as zero. Whole blocks that only some ranks call cannot be
    # gathered in stage 3, where all ranks have to take part.
    def rank(both: Both) -> None:
        (sum(both.reference(inputs_of(r), r).square().mean() for r in range(2)) / 2).backward()
        both.model(inputs_of(both.index), both.index).square().mean().backward()
        both.check_gradients()

    if plan is not STAGE_3 or model_fn is choosing:
        on_two_ranks(rank, plan, model_fn)


# --- interrupted passes


class Fragile(models.CalledTwice):
    """Raises in forward, or in backward, when told to."""

    breaks = ""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[0](inputs))
        if self.breaks == "forward":
            raise ZeroDivisionError("in forward")
        if self.breaks == "backward":
            hidden.register_hook(lambda _: 1 / 0)
        return self.head(self.layers[1](hidden))


@every_plan
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_interrupted_one_is_clean(plan: Plan, where: str) -> None:
    def rank(both: Both) -> None:
        both.optimize()
        for step in range(3):
            both.model.breaks = where
            with pytest.raises(ZeroDivisionError):
                loss_of(both.model, inputs_of(both.index, 9)).backward()
            both.model.breaks = ""
            both.model.zero_grad()
            both.backward(step)
            both.check_gradients()
            both.update()
        both.check_parameters()

    on_two_ranks(rank, plan, Fragile)


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
    def rank(both: Both) -> None:
        both.optimize(OPTIMIZERS[name])
        for step in range(4):
            both.backward(step)
            both.update(set_to_none=step % 2 == 0)
        both.check_parameters()

    on_two_ranks(rank, plan, models.AdapterChain)


@every_plan
def test_names_stay_and_pieces_cover_every_parameter_once(plan: Plan) -> None:
    def rank(both: Both) -> tuple[dict[str, int], dict[str, int]]:
        model, reference = both.model, both.reference
        assert list(model.state_dict()) == list(reference.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
        assert [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()]
        held: dict[str, int] = {}
        for part, piece in named_pieces(model):
            assert piece.shape == (part.numel,)
            held[part.parameter.name] = held.get(part.parameter.name, 0) + piece.numel()
        return {name: p.numel() for name, p in reference.named_parameters()}, held

    (sizes, first), (_, second) = on_two_ranks(rank, plan, models.tied_decoder)
    for name, size in sizes.items():
        assert first.get(name, 0) + second.get(name, 0) == (2 if plan.data == 2 else 1) * size, name


@pytest.mark.parametrize(
    "model_fn", [models.CalledTwice, models.AdapterChain, models.FrozenCalledTwice, models.Structured]
)
def test_stage_3_frees_everything_between_steps(model_fn: ModelFn) -> None:
    def rank(both: Both) -> None:
        check_freed(both.model)
        for step in range(2):
            output = both.model(inputs_of(both.index, step))
            (output if isinstance(output, Tensor) else output.logits).square().mean().backward()
            check_freed(both.model)
            with torch.no_grad():
                both.model(inputs_of(both.index, step))
            check_freed(both.model)
            both.model.zero_grad()

    on_two_ranks(rank, STAGE_3, model_fn)


@every_plan
def test_a_users_own_checkpointing_around_blocks(plan: Plan) -> None:
    def checkpointed(model_fn: ModelFn) -> ModelFn:
        def made() -> nn.Module:
            model = model_fn().train()
            model.gradient_checkpointing_enable()
            return model

        return made

    def rank(both: Both) -> None:
        tokens = models.token_batch(0)[0]
        for _ in range(2):
            (sum(both.reference(tokens[r::2]).logits.square().mean() for r in range(2)) / 2).backward()
            both.model(tokens[both.index :: 2]).logits.square().mean().backward()
            both.check_gradients()
            both.zero_grad()
        if plan is STAGE_3:
            check_freed(both.model)

    for model_fn in (models.hf_llama, models.hf_gpt2):
        model_fn()  # imports transformers once, here
        on_two_ranks(rank, plan, checkpointed(model_fn))


class Checkpointed(models.AdapterChain):
    """Wraps its blocks itself, in the way of the test."""

    is_reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.is_reentrant)
        return self.head(hidden)


class CheckpointedReentrant(Checkpointed):
    """The old kind, which runs a backward inside backward."""

    is_reentrant = True


class CheckpointedOnly(nn.Module):
    """Reentrant, with no parameter outside the blocks: every gradient arrives in an inner backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.clone().requires_grad_()
        for layer in self.layers:
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=True))
        return hidden


@every_plan
@pytest.mark.parametrize("model_fn", [Checkpointed, CheckpointedReentrant, CheckpointedOnly])
def test_both_kinds_of_checkpointing(plan: Plan, model_fn: ModelFn) -> None:
    def rank(both: Both) -> None:
        ledger = both.mesh.ledger
        for step in range(2):
            ledger.clear()
            both.backward(step)
            both.check_gradients()
            operation = ("data", "all_reduce") if plan.data > 1 else ("shard", "reduce_scatter")
            num_trained = sum(1 for flat in all_flats(both.model) if flat.trainable)
            assert ledger.entries()[operation].calls == num_trained  # once for each buffer, not for each block
            both.zero_grad()

    on_two_ranks(rank, plan, model_fn)


@every_plan
def test_a_checkpoint_around_the_whole_model(plan: Plan) -> None:
    def rank(both: Both) -> None:
        for step in range(2):
            both.losses(step)[0].backward()
            out = checkpoint(both.model, inputs_of(both.index, step), use_reentrant=False)
            (out - 0.3).square().mean().backward()
            both.check_gradients()

    on_two_ranks(rank, plan)


@every_plan
def test_compiled_blocks(plan: Plan) -> None:
    def rank(both: Both) -> None:
        for layer in both.model.get_submodule("layers").children():
            layer.forward = torch.compile(layer.forward, backend="eager")
        both.optimize()
        for step in range(3):
            both.backward(step)
            both.check_gradients()
            both.update()

    on_two_ranks(rank, plan, models.AdapterChain)


def in_place() -> nn.Module:
    """Blocks that write into what the block before returned."""

    def adding() -> nn.Module:
        return net(lambda self, hidden: hidden.add_(self.linear(hidden.clone())), linear=nn.Linear(WIDTH, WIDTH))

    model = chain([adding() for _ in range(3)], head=nn.Linear(WIDTH, 5))
    return net(lambda self, inputs: self.model(inputs.clone()), model=model)


@every_plan
def test_blocks_that_write_in_place(plan: Plan) -> None:
    def rank(both: Both) -> None:
        for step in range(2):
            both.backward(step)
            both.check_gradients()

    on_two_ranks(rank, plan, in_place)


# --- precision


@with_one_process
def test_bf16_computes_in_bf16_and_keeps_float32_masters(plan: Plan) -> None:
    plan = replace(plan, precision="bf16")

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
        for part, piece in named_pieces(model):
            assert torch.equal(piece, part_of(reference.get_parameter(part.parameter.name), part))

    run_local(rank, plan.num_ranks)


def test_bf16_gradients_are_reduced_in_float32() -> None:
    # 1 and 2^-10 lose the small one in bf16; the mean over ranks must keep it.
    def rank(index: int) -> float:
        scaled = net(lambda self, inputs: inputs * self.weight, weight=nn.Parameter(torch.ones(1)))
        model = parallelize(scaled, Plan(data=2, precision="bf16"))
        model(torch.tensor([1.0, 2.0**-10][index : index + 1])).sum().backward()
        ((_, piece),) = named_pieces(model)
        return piece.grad.item()

    assert run_local(rank, 2) == [(1 + 2.0**-10) / 2] * 2


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
            return initial_value(reference.config, name, reference.get_parameter(name).shape, 7)

        model = parallelize(model, plan, values=value)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(value(name))
        tokens = models.token_batch(0)[0]
        assert_close(model(tokens), reference(tokens))
        assert set(asked) == set(dict(reference.named_parameters()))

    run_local(rank, 2)


def test_a_parameter_of_two_modules_stays_one_when_it_gets_its_value() -> None:
    def tied() -> nn.Module:
        embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = embed.weight
        return net(lambda self, tokens: self.head(self.embed(tokens)), embed=embed, head=head)

    reference = tied()
    with torch.device("meta"):
        model = tied()
    model = parallelize(model, Plan(), values={"embed.weight": reference.embed.weight}.__getitem__)
    assert model.head.weight is model.embed.weight
    tokens = torch.arange(5)[None]
    assert_close(model(tokens), reference(tokens))


def test_a_model_on_the_meta_device_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = models.gpt2()
    with pytest.raises(PlanError, match="the model is on the meta device; pass values="):
        parallelize(model, Plan())


@with_one_process
def test_a_buffer_on_the_meta_device_is_refused_because_nobody_knows_its_value(plan: Plan) -> None:
    def rotating() -> nn.Module:
        """A buffer that its constructor computes and no checkpoint holds."""
        model = net(lambda self, inputs: self.linear(inputs) * self.table, linear=nn.Linear(WIDTH, 5))
        model.register_buffer("table", torch.arange(5.0), persistent=False)
        return model

    def rank(index: int) -> None:
        values = make(rotating)
        with torch.device("meta"):
            model = rotating()
        with pytest.raises(PlanError, match="buffer 'table'"):
            parallelize(model, plan, values=values.get_parameter)

    run_local(rank, plan.num_ranks)


@every_plan
def test_a_parallel_model_is_not_made_parallel_again(plan: Plan) -> None:
    def rank(both: Both) -> None:
        with pytest.raises(PlanError, match="the model is parallel already; build it anew"):
            parallelize(both.model, plan)

    on_two_ranks(rank, plan, models.gpt2)


def refused(model_fn: ModelFn, message: str, use: Callable[[nn.Module, int], Any] = lambda model, index: None) -> None:
    """Shard stage 3 refuses a model, or what `use` does with it."""

    def rank(index: int) -> None:
        with pytest.raises(PlanError, match=message):
            use(parallelize(make(model_fn), STAGE_3), index)

    run_local(rank, 2)


def test_a_model_without_anything_to_train_is_refused() -> None:
    refused(lambda: models.MLP().requires_grad_(False), "no trainable parameter; set requires_grad")


def test_batch_norm_is_refused_unless_the_user_accepts_it() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5))

    def rank(index: int) -> None:
        for plan in (Plan(data=2), Plan(shard=Shard(2, 3))):
            with pytest.raises(PlanError, match=r"layer '1' takes statistics over the batch, which .* = 2 splits"):
                parallelize(build(), plan)
            model = parallelize(build(), replace(plan, exact=False))
            model(inputs_of(index).float()).square().mean().backward()
            assert all(piece.grad is not None for _, piece in named_pieces(model))

    run_local(rank, 2)


def test_a_block_that_returns_no_tensor_is_refused() -> None:
    def silent(self: nn.Module, inputs: Tensor) -> str:
        self.result = self.linear(inputs)
        return "done"

    message = r"block 'blocks.0' returned str, in which no tensor was found"
    with_silent = lambda: chain([net(silent, linear=nn.Linear(WIDTH, 5))])  # noqa: E731
    refused(with_silent, message, lambda model, index: model(inputs_of(index)))


def bypassing() -> nn.Module:
    """Uses a block's vector without calling the block."""
    layers = nn.ModuleList([nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, 5)])
    return net(lambda self, inputs: self.layers[1](inputs * self.layers[0].get_parameter("weight")), layers=layers)


def test_a_parameter_that_is_used_without_its_block() -> None:
    def rank(both: Both) -> None:
        for step in range(2):  # the first is watched
            both.zero_grad()
            both.backward(step)
            both.check_gradients()

    on_two_ranks(rank, PLANS["data"], bypassing)
    message = r"own forward reads parameter 'layers.0.weight' outside of a call"
    refused(bypassing, message, lambda model, index: model(inputs_of(index)))


def test_a_gradient_of_a_piece_is_refused() -> None:
    message = r"got a gradient outside the forward of its block"
    refused(bypassing, message, lambda model, index: next(model.parameters()).sum().backward())


@every_plan
def test_a_block_that_returns_a_view_of_its_parameter(plan: Plan) -> None:
    # Stage 3 frees what the view shows when the block returns.
    def with_table() -> nn.Module:
        table = net(lambda self, length: self.weight[:length], weight=nn.Parameter(torch.randn(9, WIDTH)))
        return net(lambda self, inputs: inputs + self.layers[0](len(inputs)), layers=nn.ModuleList([table]))

    def rank(both: Both) -> None:
        for _ in range(2):
            both.backward()
            both.check_gradients()

    if plan is STAGE_3:
        message = r"block 'layers.0' returned a view of its parameter.*clone"
        refused(with_table, message, lambda model, index: model(inputs_of(index)))
    else:
        on_two_ranks(rank, plan, with_table)


def test_a_rank_that_skips_a_block_in_stage_3_is_ended_and_named() -> None:
    def rank(both: Both) -> None:
        both.model(inputs_of(both.index), both.index).square().mean().backward()

    with pytest.raises(LocalError, match=r"no answer from rank\(s\) 0, 1 of 2 after 2 s"):
        on_two_ranks(rank, STAGE_3, choosing_blocks, timeout_seconds=2)


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
            assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-9, atol=1e-12)
        for plan in PLANS.values():
            model = parallelize(make(models.CalledTwice), plan)
            loss_of(model, inputs_of(index)).backward()
            for part, piece in named_pieces(model):
                assert_close(piece.grad, part_of(expected[part.parameter.name], part), rtol=1e-9, atol=1e-12)

    run_local(rank, 2)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_clipping_equals_torchs_on_the_unsplit_model(plan: Plan) -> None:
    def rank(both: Both) -> None:
        both.backward()
        expected = nn.utils.clip_grad_norm_(both.reference.parameters(), 1e-3)
        assert_close(clip_grad_norm(both.model, 1e-3, both.mesh), expected)
        both.check_gradients()

    on_two_ranks(rank, plan, models.AdapterChain)


def test_a_model_that_nobody_uses_is_freed() -> None:
    def make() -> tuple[weakref.ref[nn.Module], weakref.ref[Tensor]]:
        plan = Plan(precision="bf16")
        mesh = Mesh(plan)
        model = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan, mesh)
        inputs, labels = torch.randn(2, 4), torch.tensor([0, 1])
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), [(inputs, labels)], mesh)
        return weakref.ref(model), weakref.ref(all_flats(model)[0].whole)

    model, buffer = make()
    gc.collect()
    assert model() is None
    assert buffer() is None
