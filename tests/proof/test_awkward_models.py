"""Models whose code does unusual things: each is proved, or refused by an error that says why and what to change."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from awkward_for_tests import (
    CLASSES,
    DATA,
    PIPE,
    STAGE_3,
    VOCABULARY,
    WIDTH,
    Block,
    Chain,
    MaxNorm,
    Scaled,
    X,
    tokens,
    vectors,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

import weft
from weft.errors import PlanError
from weft.inspection.functional_call import no_fakes_left
from weft.parallel.apply import refuse
from weft.pipeline import trace
from weft.profiling import profile
from weft.proof.compare import numbers, tensors
from weft.proof.prove import ProofReport, verify
from weft.proof.report import nan_as_inf
from weft.step.objective import CROSS_ENTROPY, Objective

processes = pytest.mark.processes


def failed(report: ProofReport) -> list[str]:
    return [check.what for check in report.checks if not check.passed]


# --- samples that depend on each other


class Centred(Chain):
    """What it computes of a sample depends on the others."""

    def body(self, hidden: Tensor) -> Tensor:
        found = super().body(hidden)
        return found - found.mean(0)


class Counting(Chain):
    """What it computes depends on how many forwards there were before."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def body(self, hidden: Tensor) -> Tensor:
        self.num_forwards += self.training
        return super().body(hidden) * (1 + 0.01 * self.num_forwards)


def contrast(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch[0])
    return functional.cross_entropy(found @ found.T, torch.arange(len(found)), reduction="sum")


@processes
@pytest.mark.parametrize(
    ("make", "objective"), [(Centred, None), (Counting, None), (Chain, Objective(CROSS_ENTROPY.count, contrast))]
)
def test_a_model_whose_samples_depend_on_each_other_is_refused_where_the_batch_is_split(
    make: Callable[[], nn.Module], objective: Objective | None
) -> None:
    for plan in (weft.Plan(data=2, micro_batch=1), PIPE):
        with pytest.raises(PlanError, match=r"unsplit, computes another loss from \d samples at a time than from 4"):
            verify(make, vectors, plan, objective=objective)


@processes
def test_it_is_proved_where_each_forward_has_the_whole_batch() -> None:
    report = verify(Centred, vectors, X, steps=2).require()
    assert "worst result after the steps" in {check.what for check in report.checks}  # of this rank's classes
    assert not report.not_proved


@processes
def test_a_fault_of_the_plan_is_not_taken_for_one_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.step.train_step.grad_norm", None)
    monkeypatch.setattr("weft.proof.rank.numbers", lambda found, expected, names=(): numbers([2.0], [1.0]))
    assert "loss" in failed(verify(Chain, vectors, weft.Plan(data=2, micro_batch=1), steps=1))


# --- numbers that are drawn


class Drawing(Chain):
    """Leaves out blocks by torch's random numbers."""

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.5:
                hidden = block(hidden)
        return hidden


class DrawingInPython(Chain):
    """Leaves out blocks by Python's random numbers, which no seed of a proof sets."""

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or random.random() > 0.5:
                hidden = block(hidden)
        return hidden


@processes
def test_drawn_blocks_are_the_stated_reason_where_their_traffic_differs() -> None:
    report = verify(Drawing, vectors, X)
    assert not report.checks
    assert "the model draws random numbers" in report.not_proved[-1]


@processes
def test_a_model_that_draws_pythons_numbers_is_not_proved() -> None:
    """It is refused, or a check fails: this follows from what it draws."""
    try:
        is_proved = verify(DrawingInPython, vectors, DATA, steps=1).passed
    except PlanError:
        is_proved = False
    assert not is_proved


def test_tensors_that_only_one_run_has_differ() -> None:
    one = {"weight": torch.ones(2)}
    assert tensors(one, one).worst().error == 0.0
    assert [nan_as_inf(tensors(*pair).worst().error) for pair in (({}, one), (one, {}))] == [float("inf")] * 2


# --- buffers of a pipeline


class CountedForwards(Chain):
    """Counts its forwards in a buffer outside of its blocks, and uses a mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def body(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
            self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return super().body(hidden - self.mean)


@processes
def test_tracing_a_pipeline_leaves_buffers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    verify(CountedForwards, vectors, PIPE, steps=2).require()
    monkeypatch.setattr(trace, "_other_buffers", lambda model, state, device: {})
    assert "worst buffer after the steps" in failed(verify(CountedForwards, vectors, PIPE, steps=1))


# --- functions of autograd between blocks


class Half(torch.autograd.Function):
    """Halves gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 0.5


class Reverse(torch.autograd.Function):
    """Reverses gradients, and returns its argument itself."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


class Between(Chain):
    function: Any = Half

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = self.function.apply(block(hidden))
        return hidden


class ReverseBetween(Between):
    function: Any = Reverse


class Inside(Chain):
    """Calls the functions inside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, result: result)
            block.up.register_forward_hook(lambda module, args, result: Half.apply(Reverse.apply(result)))


@processes
@pytest.mark.parametrize("make", [Between, ReverseBetween])
def test_a_function_of_autograd_between_blocks_is_refused_under_pipe(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(PlanError, match=r"uses a torch.autograd.Function \('(Half|Reverse)'\) between blocks"):
        verify(make, vectors, PIPE)
    verify(make, vectors, DATA, steps=2).require()


@processes
def test_a_function_of_autograd_inside_a_block_is_proved_under_pipe() -> None:
    verify(Inside, vectors, PIPE, steps=2).require()


# --- logits and values that are trained


class ScaledVectors(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * self.scale.exp()


class LastPosition(Scaled):
    """Computes the logits of all positions, and returns those of the last."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)[:, -1]


@processes
def test_logits_of_which_a_part_is_left_out_are_gathered_under_x() -> None:
    verify(LastPosition, lambda step: (tokens(step)[0], tokens(step)[1][:, 0]), X, steps=2).require()


@processes
def test_an_evaluation_that_changes_weights_comes_behind_their_comparison() -> None:
    verify(MaxNorm, tokens, X, steps=2).require()


@processes
def test_logits_that_a_trained_number_scales_have_its_whole_gradient_under_x() -> None:
    verify(Scaled, tokens, X, steps=2).require()
    with pytest.raises(PlanError, match="'mul' joins its logits with a value that is trained"):
        verify(ScaledVectors, vectors, X)


# --- layers that are given their input by name


class NamedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.gelu(self.up(input=self.norm(input=hidden)))
        out: Tensor = hidden + self.down(input=inner)
        return out


class NamedInputs(nn.Module):
    """With `is_gathered`, it has a linear without a partner, whose outputs are gathered over x."""

    def __init__(self, is_gathered: bool) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([NamedBlock(), NamedBlock()])
        self.beside, self.norm = nn.Linear(WIDTH, WIDTH) if is_gathered else None, nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(input=value)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden if self.beside is None else self.beside(input=hidden)
        out: Tensor = self.head(input=self.norm(input=hidden))
        return out


class NamedImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.third, self.head = nn.Conv2d(WIDTH, WIDTH, 3), nn.Linear(WIDTH, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.third(input=self.second(input=self.first(input=value).relu()).relu())
        out: Tensor = self.head(input=hidden.mean((2, 3)))
        return out


def _images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)


@processes
@pytest.mark.parametrize("tensor", [weft.Tensor(x=2), weft.Tensor(y=2), weft.Tensor(x=2, sequence=True)], ids=str)
@pytest.mark.sampled(1)
def test_layers_take_their_input_by_name_under_x_and_y(tensor: weft.Tensor) -> None:
    make = partial(NamedInputs, is_gathered=tensor == weft.Tensor(x=2))
    assert profile(make()).pairing.splits["blocks.0.up"].kind == "column"
    verify(make, tokens, weft.Plan(tensor=tensor), steps=2).require()
    if not tensor.sequence:
        verify(NamedImages, _images, weft.Plan(tensor=tensor), steps=2).require()


# --- what is refused of every model


def _with_hook() -> nn.Module:
    model = Chain()
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    return model


class Complex(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def body(self, hidden: Tensor) -> Tensor:
        return super().body(torch.fft.irfft(torch.fft.rfft(hidden) * self.filter, n=WIDTH))


class Sparse(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


class WithIntegers(Chain):
    """Keeps a table of integers among its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def body(self, hidden: Tensor) -> Tensor:
        return super().body(hidden[:, self.order])


def _with_script() -> nn.Module:
    model = Chain()
    model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_with_hook, r"parameter 'head.weight' has a hook on its gradient"),
        (Sparse, r"the embedding 'table' has sparse gradients"),
        (Complex, r"parameter 'filter' is of complex64, and weft holds real numbers"),
        (WithIntegers, r"parameter 'order' is of int64, and this plan holds .* register it as a buffer"),
    ],
)
def test_parameters_that_flat_buffers_cannot_hold_are_refused(make: Callable[[], nn.Module], words: str) -> None:
    """One rank has such buffers for mixed precision, and for state on the host or in fewer bits."""
    alone = (weft.Memory(offload=1.0), weft.Memory(weights=1.0))
    for plan in (DATA, STAGE_3, X, weft.Plan(precision="bf16"), *(weft.Plan(memory=memory) for memory in alone)):
        with pytest.raises(PlanError, match=words):
            refuse(profile(make()), plan)
    refuse(profile(make()), weft.Plan())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_script_module_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"module 'blocks.1' is a ScriptModule"):
        profile(_with_script())


# --- fake tensors


class Caching(Chain):
    """Keeps its last result, all results, and results by name."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.all: list[Tensor] = [torch.ones(1)]
        self.named: dict[str, Tensor] = {}

    def body(self, hidden: Tensor) -> Tensor:
        self.last = super().body(hidden)
        self.all.append(self.last)
        self.named["last"] = self.last
        self.made = self.last.detach()
        return self.last


def test_a_profile_leaves_no_fake_tensor_in_the_model() -> None:
    model, example = Caching(), torch.zeros(2, WIDTH)
    profile(model, lambda: (example.clone(),))
    assert model.last is None
    assert [type(tensor) for tensor in model.all] == [Tensor]
    assert not model.named
    assert not hasattr(model, "made")
    model(example)
    with no_fakes_left(model):
        pass
    assert model.last is model.named["last"] is model.all[-1]
    assert not isinstance(model.last, FakeTensor)


# --- blocks in a dict


class InDict(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"layer {i}": Block() for i in range(3)})

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden


@processes
def test_blocks_in_a_dict_are_stages() -> None:
    verify(InDict, vectors, PIPE, steps=2).require()
