"""What users' models do that once hung or ended in a traceback under a plan: each is proved, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from awkward_for_tests import DATA, PIPE, STAGE_3, VOCABULARY, WIDTH, Block, Chain, MaxNorm, Scaled, X, tokens, vectors
from images_for_tests import NUM_CLASSES, Classic, image_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import ImageClassifierOutput

import weft
from weft.errors import PlanError
from weft.proof.prove import verify
from weft.step.objective import CROSS_ENTROPY, Objective

pytestmark = pytest.mark.processes

SECONDS = 60.0  # a hang ends here
ROWS = weft.Plan(tile=weft.Tile(rows=2))


# --- checkpointing by the model itself


class Checkpointed(Chain):
    """The result of the first layer requires a gradient, without which a reentrant checkpoint has none."""

    is_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_module("head", self._modules.pop("head"))  # last, as models register it

    def body(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.is_reentrant)
        return hidden


class CheckpointedReentrant(Checkpointed):
    is_reentrant = True


class CheckpointedTogether(Checkpointed):
    """Two blocks in one checkpoint, which lie on different stages."""

    def body(self, hidden: Tensor) -> Tensor:
        def both(value: Tensor) -> Any:
            return self.blocks[1](self.blocks[0](value))

        out: Tensor = self.blocks[2](checkpoint(both, self.first(hidden), use_reentrant=False))
        return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Checkpointed, PIPE),
        (CheckpointedTogether, weft.Plan(pipe=weft.Pipe(2, split=("blocks.1",)), micro_batch=2)),
        (Checkpointed, STAGE_3),
        (CheckpointedReentrant, DATA),
    ],
)
def test_a_models_own_checkpoints_are_proved(make: Callable[[], nn.Module], plan: weft.Plan) -> None:
    verify(make, vectors, plan, timeout_seconds=SECONDS, steps=2).require()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (
            CheckpointedReentrant,
            PIPE,
            r"'blocks\.0' in a checkpoint with use_reentrant=True, .*use use_reentrant=False",
        ),
        (CheckpointedReentrant, STAGE_3, r"'blocks\.0' in a checkpoint of its own .*, reentrant\).*is not predicted"),
        (Checkpointed, X, r"'blocks\.0' in a checkpoint of its own .*use plan\.memory\.recompute instead"),
    ],
)
def test_checkpoints_that_would_communicate_again_are_refused(
    make: Callable[[], nn.Module], plan: weft.Plan, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        verify(make, vectors, plan, timeout_seconds=SECONDS)


# --- results of other kinds, in tiles


class Result(NamedTuple):
    logits: Tensor
    pooled: Tensor


class ReturnsTuple(Classic):
    def forward(self, value: Tensor) -> Any:
        logits = super().forward(value)
        return Result(logits, logits.tanh())


class ReturnsOutput(Classic):
    def forward(self, value: Tensor) -> Any:
        return ImageClassifierOutput(logits=super().forward(value))


def _total(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    return nn.functional.cross_entropy(output[0], batch[1], reduction="sum") + 0 * output.logits.sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [ReturnsTuple, ReturnsOutput])
def test_named_results_are_themselves_in_tiles(make: Callable[[], nn.Module]) -> None:
    verify(make, image_batch, ROWS, objective=Objective(CROSS_ENTROPY.count, _total), steps=2).require()


# --- parameters of two modules, and of embeddings


class TiedBias(Scaled):
    """The root holds the bias of its head, as BERT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
        self.head.bias = self.bias


class LaterPositions(nn.Embedding):
    """Positions begin at row 2, as OPT's do."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY + 2, WIDTH)

    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(positions + 2)


class ScaledEmbedding(Scaled):
    """Scales its embedding, as Gemma does."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = LaterPositions()

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(value) * WIDTH**0.5 + self.positions(torch.arange(value.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("make", "plan"), [(TiedBias, PIPE), (TiedBias, X), (MaxNorm, PIPE), (ScaledEmbedding, X)])
def test_parameters_in_unusual_places_are_proved(make: Callable[[], nn.Module], plan: weft.Plan) -> None:
    verify(make, tokens, plan, steps=2).require()


# --- blocks that are called in unusual ways


@dataclass(frozen=True)
class State:
    hidden: Tensor
    num_blocks: int


class StateBlock(Block):
    """Takes and returns a dataclass."""

    def forward(self, state: Any) -> Any:
        return State(super().forward(state.hidden), state.num_blocks + 1)


class States(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StateBlock() for _ in range(3))

    def body(self, hidden: Tensor) -> Tensor:
        state = State(hidden, 0)
        for block in self.blocks:
            state = block(state)
        return state.hidden / state.num_blocks


class WithoutGradient(Checkpointed):
    """Calls a block whose input requires a gradient without computing gradients."""

    def body(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        with torch.no_grad():
            beside = self.blocks[0](hidden)
        out: Tensor = self.blocks[2](self.blocks[1](hidden + beside))
        return out


class Generating(Block):
    """Makes a matrix from a vector, by a linear whose input has one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.generate = nn.Parameter(torch.randn(2)), nn.Linear(2, WIDTH * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) @ self.generate(self.code).view(WIDTH, WIDTH)


class Generated(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Generating() for _ in range(2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "plan"),
    [(States, STAGE_3), (States, PIPE), (WithoutGradient, X), (WithoutGradient, STAGE_3), (Generated, X)],
)
def test_blocks_that_are_called_in_unusual_ways_are_proved(make: Callable[[], nn.Module], plan: weft.Plan) -> None:
    verify(make, vectors, plan, steps=2).require()


# --- forwards that change what they hold


class CountingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(hidden)


class CountsInBlocks(Chain):
    """Counts the forwards of a block, beside a block with running statistics, which recompute restores."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)), CountingBlock()])


class Normalised(Chain):
    """Improves an estimate of a norm in every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.blocks[1].up)


class MakesBuffer(Chain):
    def body(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.zeros(WIDTH, dtype=hidden.dtype))
        return super().body(hidden + self.table)


class Averages(Chain):
    """Keeps a mean of its parameters in others."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleList(Block() for _ in range(3)).requires_grad_(False)

    def body(self, hidden: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mean, parameter in zip(self.means.parameters(), self.blocks.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
        return super().body(hidden)


class HooksGradients(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, given, gradients: (given[0] * 0.5,))


RECOMPUTE = weft.Plan(tensor=weft.Tensor(x=2), memory=weft.Memory("full"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (CountsInBlocks, RECOMPUTE, r"changes buffer 'blocks\.1\.forwards', which would change twice"),
        (Normalised, RECOMPUTE, r"changes buffer 'blocks\.1\.up\.parametrizations\.weight\.0\._u', which would change"),
        (Averages, PIPE, r"its forward changes 'means\.0\.up\.weight' in place \('lerp_'\)"),
        (HooksGradients, PIPE, r"a hook on gradients \(register_full_backward_hook\)"),
    ],
)
def test_changes_that_a_plan_would_repeat_or_lose_are_refused(
    make: Callable[[], nn.Module], plan: weft.Plan, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        verify(make, vectors, plan)


@pytest.mark.parametrize("make", [CountsInBlocks, Averages])
def test_such_changes_are_proved_where_they_are_neither(make: Callable[[], nn.Module]) -> None:
    verify(make, vectors, weft.Plan(shard=weft.Shard(2, 1), statistics="batch"), steps=2).require()


def test_a_buffer_that_forwards_register_is_named() -> None:
    report = verify(MakesBuffer, vectors, DATA)
    failure = report.first_failure
    assert failure is not None
    assert (failure.what, failure.where.partition(": ")[2]) == (
        "state: buffers",
        "forwards register buffer 'table', which is not there before them; register it in __init__",
    )


# --- errors that no rule foresees


class ExpectsAll(Chain):
    """Its block expects all of its inner features, where `Block` calls its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.register_forward_hook(lambda module, args, result: result.view(-1, 2 * WIDTH))


def test_an_error_that_no_rule_foresees_names_the_line_of_the_model() -> None:
    with pytest.raises(
        PlanError, match=r"ExpectsAll runs unsplit and fails under x 2: .*\(awkward_for_tests\.py:\d+\)"
    ):
        verify(ExpectsAll, vectors, X)


# --- statistics over few values


class FewValues(nn.Module):
    """Its last batch norm sees one value of each sample and channel, and what comes before has hardly a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for width in (3, 8)
        )
        self.last, self.norm, self.head = nn.Conv2d(8, 8, 1), nn.BatchNorm1d(8, eps=1e-18), nn.Linear(8, NUM_CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        value = value[:, :, :4, :4]
        for block in self.blocks:
            value = block(value)
        out: Tensor = self.head(self.norm(self.last(value).flatten(1)))
        return out


def test_statistics_over_few_values_raise_no_false_alarm() -> None:
    report = verify(FewValues, image_batch, PIPE, steps=2).require()  # two samples at a time
    worst = next(check for check in report.checks if check.what == "worst gradient")
    assert ("the model's own noise there is" in worst.where) == (float(worst.found) > 1e-9)  # ARM CPUs round both alike
