"""Losses of the user's own on logits that x splits over the vocabulary: gathered, with the bytes that are predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.launch.local_ranks import run_local
from weft.models.loss_head import logits_of

pytestmark = pytest.mark.processes

WIDTH = 8
Total = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, num_classes: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))])
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks[0](self.embedding(tokens)))


class InADict(Model):
    def forward(self, tokens: Tensor) -> Any:
        return {"loss": None, "logits": super().forward(tokens)}


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum()


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - F.one_hot(labels, logits.shape[-1])).square().sum()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.flatten(), label_smoothing=0.1, reduction="sum")


def objective(total: Total) -> weft.Objective:
    def of_batch(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        output = model(batch[0])
        return total(output["logits"] if isinstance(output, dict) else logits_of(output), batch[1])

    return weft.Objective(lambda batch: torch.tensor(batch[1].numel()), of_batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("total", [entropy, squares, smoothed])
def test_a_loss_of_the_users_own_sees_all_classes(total: Total) -> None:
    """Thirteen classes over two ranks are not even."""
    weft.verify(Model, batch, weft.Plan(tensor=weft.Tensor(2)), objective=objective(total), steps=2).require()


def test_logits_in_a_dict_and_beside_a_pipeline() -> None:
    weft.verify(InADict, batch, weft.Plan(tensor=weft.Tensor(2)), objective=objective(entropy), steps=2).require()
    plan = weft.Plan(tensor=weft.Tensor(2), pipe=weft.Pipe(2, split=("head",)), micro_batch=2)
    weft.verify(Model, batch, plan, objective=objective(entropy), steps=2).require()


class BesideFeatures(Model):
    def forward(self, tokens: Tensor) -> Any:
        hidden = self.blocks[0](self.embedding(tokens))
        return {"features": hidden, "classes": self.head(hidden)}


def test_logits_of_any_name_beside_other_results() -> None:
    def of_batch(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        output = model(batch[0])
        return entropy(output["classes"], batch[1]) + output["features"].square().sum()

    own = weft.Objective(lambda batch: torch.tensor(batch[1].numel()), of_batch)
    weft.verify(BesideFeatures, batch, weft.Plan(tensor=weft.Tensor(2)), objective=own, steps=2).require()


def test_a_loop_of_the_users_own_sees_all_classes() -> None:
    tokens, labels = batch(0)

    def rank(index: int) -> list[Any]:
        torch.manual_seed(0)
        plan = weft.Plan(tensor=weft.Tensor(2), precision="fp64")
        model = weft.parallelize(Model().double(), plan)
        logits = model(tokens)
        loss = entropy(logits, labels)
        loss.backward()
        gradient = next(piece.grad for name, piece in model.named_parameters() if name == "blocks.0.2.bias")
        return [list(logits.shape), loss.item(), gradient.tolist()]

    torch.manual_seed(0)
    whole = Model().double()
    expected = entropy(whole(tokens), labels)
    expected.backward()
    bias = whole.get_parameter("blocks.0.2.bias").grad
    for shape, loss, gradient in run_local(rank, 2):
        assert shape == [4, 4, 13]
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert gradient == pytest.approx(bias.tolist(), rel=1e-9, abs=1e-12)
