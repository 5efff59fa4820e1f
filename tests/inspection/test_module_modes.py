"""An evaluation gives each module its own mode back: a model may train with some of its modules in evaluation mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.inspection.functional_call import in_mode
from weft.mesh import Mesh
from weft.parallel.apply import parallelize
from weft.plan import Plan
from weft.step.model_loss import model_loss
from weft.step.train_step import evaluate


class Frozen(nn.Module):
    """Its batch norm stays in evaluation mode, as it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.norm.eval()
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> Frozen:
        if hasattr(self, "calls"):
            self.calls.append(mode)
        return super().train(mode)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.norm(self.first(inputs)))
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("training", [True, False])
def test_each_module_has_its_mode_again(training: bool) -> None:
    model = Frozen()
    model.head.eval()
    before = modes(model)

    def fail() -> None:
        with in_mode(model, training):
            assert set(modes(model).values()) == {training}
            raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        fail()
    assert modes(model) == before
    assert model.calls == [training, True]  # a model's own `train` may do more than set modes


def test_an_evaluation_leaves_frozen_statistics_as_they_are() -> None:
    plan = Plan(precision="fp64")
    mesh = Mesh(plan)
    model = parallelize(Frozen(), plan, mesh)
    before, inputs, labels = modes(model), torch.randn(4, 4).double(), torch.arange(4) % 3
    evaluate(model, [(inputs, labels)], mesh)
    model_loss(model, {"inputs": inputs, "labels": labels})
    assert modes(model) == before
    model(inputs)
    assert int(model.get_buffer("norm.num_batches_tracked")) == 0
