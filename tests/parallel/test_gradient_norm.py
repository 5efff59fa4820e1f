"""The gradient norm is summed precisely, whatever the length of a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.mesh import Mesh
from weft.parallel.gradient_norm import clip_grad_norm
from weft.plan import Plan
from weft.sharding.whole_gradient import norms


@pytest.mark.parametrize("numel", [1 << 22, (1 << 22) + 7])
def test_the_norm_of_a_long_float32_tensor_is_that_of_float64(numel: int) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    (found,) = norms([tensor])
    assert abs(found.item() / tensor.double().square().sum().sqrt().item() - 1) < 1e-7


def test_a_plain_model_is_clipped_by_the_precise_norm() -> None:
    model = nn.Linear(1 << 11, 1 << 11)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    expected = torch.stack(squares).sum().sqrt()
    found = clip_grad_norm(model, 1.0, Mesh(Plan()))
    assert abs(found.item() / expected.item() - 1) < 1e-7
