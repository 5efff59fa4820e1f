"""The routers' linear: results and gradients in at least float32, from numbers of any precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.models.row_operations import split_in_two, wide_linear


def test_results_and_gradients_are_those_of_float32() -> None:
    torch.manual_seed(0)
    value = torch.randn(2, 5, 24, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(6, 24, dtype=torch.bfloat16, requires_grad=True)
    given = torch.randn(2, 5, 6)
    gradients = []
    for out in (wide_linear(value, weight), F.linear(value.float(), weight.float())):
        assert out.dtype == torch.float32
        gradients.append((out.detach(), *torch.autograd.grad(out, (value, weight), given)))
    for mine, plain in zip(*gradients, strict=True):
        assert mine.dtype == plain.dtype
        assert torch.equal(mine, plain)
    rounded = F.linear(value, weight).float()
    assert not torch.allclose(rounded, gradients[1][0], rtol=1e-4)  # which bf16 does not reach


def test_float64_stays_float64() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (5, 4))]
    assert torch.autograd.gradcheck(wide_linear, tensors)


def test_two_numbers_of_16_bits_keep_16_bits() -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 7) * torch.logspace(-6, 6, 50)[:, None]
    high, low = split_in_two(values, torch.bfloat16).chunk(2, dim=1)
    assert float(((high.double() + low.double() - values) / values).abs().max()) < 2**-16
    assert float(((high.double() - values) / values).abs().max()) > 2**-10
