"""Pipelines of models whose forward differs in evaluation, whose layers are attributes, or that share parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pipeline_for_tests as models
import pytest
import torch
import torch.nn.functional as F
from pipeline_for_tests import double, make, on_stages, staged, vectors
from torch import Tensor, nn
from torch.optim import SGD

import weft
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Pipe, Plan
from weft.step.batch import Batch
from weft.step.objective import CROSS_ENTROPY
from weft.step.train_step import evaluate, train_step

pytestmark = pytest.mark.processes

BATCHES = [double(vectors(2, seed=seed)(0)) for seed in range(4)]


class Noisy(models.Chain):
    """What an embedding gives is changed in training only, and a block's result in both modes."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        if self.training:
            hidden = (hidden * 1.5 + hidden.sin()) * 0.5
        for block in self.blocks:
            hidden = block(hidden).tanh()
        logits: Tensor = self.head(hidden)
        return logits


class Clamped(models.Chain):
    """Results are changed in evaluation only, behind each block."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        seed = hidden
        for block in self.blocks:
            hidden = block(hidden + 0.1 * seed)
            if not self.training:
                hidden = hidden.clamp(-0.5, 0.5) * 1.25
        logits: Tensor = self.head(hidden)
        return logits


class Skipping(models.Chain):
    """In training the head also takes what enters the first block."""

    def forward(self, inputs: Tensor) -> Tensor:
        entered = hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden + entered if self.training else hidden)
        return logits


class Scaled(models.Chain):
    """A parameter of no unit is used by the first stage, and in evaluation by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden if self.training else hidden * self.scale)
        return logits


class TwoHeads(models.Chain):
    """Evaluation has a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(models.WIDTH, models.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = (self.head if self.training else self.other)(hidden)
        return logits


class Auxiliary(models.Chain):
    """Training has a head more, in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(models.WIDTH, models.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits + 0.3 * self.other(hidden) if self.training else logits


def sequential_losses(model_fn: Callable[[], nn.Module], batches: Sequence[Batch] = BATCHES) -> list[float]:
    """The mean loss in training and in evaluation."""
    model, found = make(model_fn), []
    count = sum(int(CROSS_ENTROPY.count(batch)) for batch in batches)
    for is_training in (True, False):
        model.train(is_training)
        with torch.no_grad():
            found.append(float(sum(CROSS_ENTROPY.total(model, batch) for batch in batches) / count))
    assert abs(found[0] - found[1]) > 1e-3
    return found


@pytest.mark.parametrize("was_training", [True, False])
@pytest.mark.parametrize("pipe", [Pipe(2), Pipe(2, "gems"), Pipe(2, "interleaved"), Pipe(3, "message")], ids=str)
@pytest.mark.parametrize("model_fn", [Noisy, Clamped, Auxiliary])
@pytest.mark.sampled(5)
def test_operations_of_one_mode(model_fn: Callable[[], nn.Module], pipe: Pipe, was_training: bool) -> None:
    """Also where the model comes in evaluation mode."""
    plan = Plan(pipe=pipe, precision="fp64")

    def rank(_: int) -> list[float]:
        mesh = Mesh(plan)
        model = on_stages(lambda: model_fn().train(was_training), plan, mesh, BATCHES[0])
        found = [float(evaluate(model, BATCHES, mesh))]
        model.train()
        found.append(float(train_step(model, SGD(model.parameters(), lr=0.0), BATCHES, mesh).loss))
        return [*found, float(evaluate(model, BATCHES, mesh))]

    training, evaluation = sequential_losses(model_fn)
    for losses in run_local(rank, pipe.degree):
        assert losses == pytest.approx([evaluation, training, evaluation], rel=1e-12)


@pytest.mark.parametrize(
    ("model_fn", "words"),
    [
        (Skipping, r"what 'enter' makes goes from stage 0 to stage 1 in training only"),
        (Scaled, r"the parameter 'scale' is used by stage 1 in evaluation only"),
        (TwoHeads, r"'other' is called in evaluation.*but not in the forward by which the model was cut"),
    ],
)
def test_other_tensors_across_stages_are_refused_before_a_run(model_fn: Callable[[], nn.Module], words: str) -> None:
    found = staged(model_fn, Pipe(2))
    found.schedule(4)  # training works
    modes = [module.training for module in found.whole.modules()]
    for _ in range(2):
        with pytest.raises(PlanError, match=words):
            found.check_evaluation()
    assert [module.training for module in found.whole.modules()] == modes


def test_an_evaluation_that_does_not_fit_is_refused_and_training_goes_on() -> None:
    plan = Plan(pipe=Pipe(2), precision="fp64")

    def rank(_: int) -> list[float]:
        mesh = Mesh(plan)
        model = on_stages(Skipping, plan, mesh, BATCHES[0])
        with pytest.raises(PlanError, match="'enter' makes goes"):
            model.check_evaluation()
        with pytest.raises(PlanError, match="'enter' makes goes"):
            evaluate(model, BATCHES, mesh)
        model.train()
        return [float(train_step(model, SGD(model.parameters(), lr=0.0), BATCHES, mesh).loss)]

    for losses in run_local(rank, 2):
        assert losses == pytest.approx(sequential_losses(Skipping)[:1], rel=1e-12)


def test_an_evaluation_has_any_number_of_micro_batches_whatever_a_step_has_in_flight() -> None:
    plan = Plan(pipe=Pipe(2, "interleaved", in_flight=3), precision="fp64")
    found = staged(models.Chain, plan.pipe)
    found.schedule(4)
    with pytest.raises(PlanError, match="groups of 3 micro-batches at 2 stages need at least 4"):
        found.schedule(3)

    def rank(_: int) -> list[float]:
        mesh = Mesh(plan)
        model = on_stages(Clamped, plan, mesh, BATCHES[0])
        found = [float(train_step(model, SGD(model.parameters(), lr=0.0), BATCHES, mesh).loss)]
        return [*found, float(evaluate(model, BATCHES[:3], mesh))]

    expected = [sequential_losses(Clamped)[0], sequential_losses(Clamped, BATCHES[:3])[1]]
    for losses in run_local(rank, 2):
        assert losses == pytest.approx(expected, rel=1e-12)


# --- pipelines of models whose layers are attributes, and of parameters that two modules hold


WIDTH, CLASSES = 8, 11


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CLASSES, (4, 5), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.gelu(self.linear(self.norm(hidden)))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.first, self.second = Layer(), Layer()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(self.embedding(tokens))))
        return logits


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Attributes()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        return logits


class TiedBias(nn.Module):
    """The head's bias is also a parameter of the model, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.bias = nn.Parameter(torch.zeros(CLASSES))
        self.head.bias, self.head.weight = self.bias, self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize("model", [Attributes, Wrapped, TiedBias])
def test_two_stages(model: Callable[[], nn.Module]) -> None:
    weft.verify(model, batch, weft.Plan(pipe=weft.Pipe(2), micro_batch=2), steps=2).require()


def test_three_stages_of_attributes() -> None:
    weft.verify(Attributes, batch, weft.Plan(pipe=weft.Pipe(3), micro_batch=2), steps=2).require()
