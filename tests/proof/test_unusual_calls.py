"""Losses that call a model in other ways than its profile counted, and models with bad numbers: refused in words."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models_for_tests as models
import pytest
import torch
from awkward_for_tests import VOCABULARY, WIDTH, tokens
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.errors import PlanError
from weft.models.loss import token_loss
from weft.plan import Plan, Shard
from weft.plan import Tensor as TensorAxes
from weft.proof.prove import verify
from weft.step.objective import CROSS_ENTROPY, Objective

pytestmark = pytest.mark.processes

RANK = importlib.import_module("weft.proof.rank")
X, MICRO_BATCHES = Plan(tensor=TensorAxes(x=2)), Plan(shard=Shard(2, 3), micro_batch=2)
CLASSES = 6


class Pair(nn.Module):
    """Two linears and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(models.WIDTH, 8), nn.Linear(8, models.WIDTH)) for _ in "ab")
        self.head = nn.Linear(models.WIDTH, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        return self.logits(self.blocks[1](self.blocks[0](value).tanh()).tanh())

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out


def siamese(model: nn.Module, batch: Any) -> Tensor:
    """A loss of two calls."""
    return token_loss(model(batch[0]) + model(-batch[0]), batch[1])[0]


def contrast(model: nn.Module, batch: Any) -> Tensor:
    """A loss of three calls."""
    anchor, near, far = (model(batch[0] * factor) for factor in (1.0, 1.1, -1.0))
    return functional.triplet_margin_loss(anchor, near, far, reduction="sum")


@pytest.mark.parametrize("plan", [X, MICRO_BATCHES])
@pytest.mark.parametrize(("total", "calls"), [(siamese, 2), (contrast, 3)])
def test_a_loss_of_several_calls_is_refused_where_its_bytes_are_not_predicted(
    plan: Plan, total: Any, calls: int
) -> None:
    words = rf"computes what the unsplit model does, but sends other bytes .* calls the model {calls} times"
    with pytest.raises(PlanError, match=words):
        verify(Pair, models.vector_batch, plan, objective=Objective(CROSS_ENTROPY.count, total))


@pytest.mark.parametrize("total", [siamese, contrast])
def test_a_loss_of_several_calls_is_proved_over_data(total: Any) -> None:
    objective = Objective(CROSS_ENTROPY.count, total)
    verify(Pair, models.vector_batch, Plan(data=2, micro_batch=2), objective=objective, steps=2).require()


def test_a_fault_beside_unusual_calls_is_a_failure_and_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = RANK.train_step

    def forgetful(model: Any, optimizer: Any, micro_batches: Any, *others: Any, **options: Any) -> Any:
        return train_step(model, optimizer, micro_batches[:-1], *others, **options)

    monkeypatch.setattr(RANK, "train_step", forgetful)
    report = verify(Pair, models.vector_batch, MICRO_BATCHES, objective=Objective(CROSS_ENTROPY.count, siamese))
    assert "loss" in [check.what for check in report.checks if not check.passed]


class Branching(Pair):
    """Leaves out a block, which is larger than the others, by the values of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.Sequential(nn.Linear(models.WIDTH, 32), nn.Linear(32, models.WIDTH)))

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value).tanh()
        if bool(value.sum() > 0):
            value = self.blocks[1](value).tanh()
        return self.logits(self.blocks[2](value))


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_ranks_that_call_other_blocks_by_the_values_of_their_samples_are_refused(micro_batch: int) -> None:
    plan = Plan(shard=Shard(2, 3), micro_batch=micro_batch)
    with pytest.raises(PlanError, match=r"ranks take different ways through the model: rank 0 is in the .* of block"):
        verify(Branching, models.vector_batch, plan)


class HeadTwice(Pair):
    """Adds the results of two calls of its head."""

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden) + self.head(-2 * hidden)
        return out


def test_a_head_that_is_called_twice_is_refused_under_x_by_name() -> None:
    verify(HeadTwice, models.vector_batch, Plan(data=2), steps=2).require()
    with pytest.raises(PlanError, match=r"one loss calls 'head' 2 times, and bytes are predicted for .* one call"):
        verify(HeadTwice, models.vector_batch, X)


class BadNumbers(Pair):
    """Its logits are NaN."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * 0.0 / 0.0


class BadGradient(Pair):
    """Its loss is a number and its gradient is none: that of a root at 0."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) + (0 * hidden.sum()).abs().sqrt()


@pytest.mark.parametrize(("make", "quantity"), [(BadNumbers, "loss"), (BadGradient, "gradient norm")])
def test_a_model_whose_own_numbers_are_nan_is_said_to_be_such(make: Any, quantity: str) -> None:
    with pytest.raises(PlanError, match=rf"the {quantity} of {make.__name__}, unsplit and .*, is nan in step 1"):
        verify(make, models.vector_batch, Plan(data=2))


class Scaled(nn.Module):
    """Takes more than tokens, so that it cannot be tried on tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(models.VOCABULARY, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, models.VOCABULARY)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(self.table(tokens)) * scale[:, None, None])
        return out


def scaled_batch(step: int) -> Any:
    tokens, labels = models.token_batch(step)
    return (tokens, torch.linspace(1, 2, len(tokens))), labels


def scaled_loss(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model(*batch[0]), batch[1])[0]


def test_what_is_assumed_of_the_logits_is_said_once(tmp_path: Path) -> None:
    plan, log = Plan(data=2, tensor=TensorAxes(x=2)), tmp_path / "log"
    handler = logging.FileHandler(log)  # ranks are forked, and append to the same file
    logging.getLogger("weft").addHandler(handler)
    try:
        verify(Scaled, scaled_batch, plan, objective=Objective(CROSS_ENTROPY.count, scaled_loss)).require()
    finally:
        logging.getLogger("weft").removeHandler(handler)
    words = "Scaled does not run on tokens alone (TypeError), so weft assumes that it returns its head's result"
    assert log.read_text().count(words) == 1


# --- models that compute what no result depends on, detach what goes on, or compute without gradients


Y, STAGE_3 = weft.Plan(tensor=weft.Tensor(y=2)), weft.Plan(shard=weft.Shard(2, 3))
SEQUENCE = weft.Plan(tensor=weft.Tensor(x=2, sequence=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)

    def inner(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(hidden)))
        return out


class Detached(nn.Module):
    """Trains its last blocks only: the stream is detached before them."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(value)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden.detach() if number == 2 else hidden)
        out: Tensor = self.head(self.norm(hidden))
        return out


class Unused(Detached):
    """No result depends on the last block, nor on a second call of the head."""

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(value)
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        self.seen = self.head(self.norm(self.blocks[-1](hidden))).detach()
        out: Tensor = self.head(self.norm(hidden))
        return out


class DetachingBlock(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return super().inner(hidden.detach())


class DraftingBlock(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            before = super().inner(hidden)
        return super().inner(hidden) + before


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Detached, STAGE_3),
        (Detached, X),
        (Detached, SEQUENCE),
        (Unused, STAGE_3),
        (Unused, Y),
        (Unused, X),
        (lambda: Detached(DetachingBlock), SEQUENCE),
        (lambda: Detached(DraftingBlock), SEQUENCE),
    ],
)
def test_the_bytes_of_what_backward_does_not_pass(make: Callable[[], nn.Module], plan: weft.Plan) -> None:
    verify(make, tokens, plan, steps=2).require()
