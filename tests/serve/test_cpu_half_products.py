"""Weights in fp16 on a CPU: products against dequantised weights, where they are used, and what is said if not."""

from __future__ import annotations

import platform

import pytest
import torch
from serving_for_tests import GREEDY, make_engine, serve_all, tiny_model, tokens_of
from torch import nn

from weft.errors import ConfigError
from weft.serve.scheduling.request import Request
from weft.serve.weights import cpu_products
from weft.serve.weights.cpu_products import CpuWeight, HalfWeight, has_product, why_dequantised
from weft.serve.weights.packed_linear import PackedLinear, join_packed, pack_head, pack_model, what_cpus_do
from weft.serve.weights.weight_formats import Half, weight_format

needs_product = pytest.mark.skipif(
    not has_product(HalfWeight), reason="this torch has no products with fp16 for this CPU"
)
FORM = Half()
REQUESTS = [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(3)]


def packed_model(name: str) -> nn.Module:
    model = tiny_model(name)
    pack_model(model, FORM)
    pack_head(model, "fp16", "cpu")
    return model


def test_weights_of_bf16_are_kept_and_others_rounded_to_11_bits() -> None:
    weight = torch.randn(7, 32)
    weight[0] = 0
    errors = (FORM.dequantise(FORM.quantise(weight), torch.float64) - weight.double()).abs()
    assert bool((errors <= 2.0**-11 * weight.double().abs() + 2.0**-25).all())
    assert float(errors.max()) > 0
    exact = weight.bfloat16().clamp(-1, 1) * 2  # none of them is tiny
    assert torch.equal(
        FORM.dequantise(FORM.quantise(exact), torch.float32)[exact.abs() > 1e-4], exact.float()[exact.abs() > 1e-4]
    )


@needs_product
@pytest.mark.parametrize("num_out", [1, 61, 144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_precision_of_float32(num_out: int, dtype: torch.dtype) -> None:
    weight = torch.randn(num_out, 300)
    hidden = (torch.randn(6, 300) * torch.logspace(-18, 18, 6)[:, None]).to(dtype)
    hidden[1] = 0
    parts = FORM.quantise(weight)
    own, decoded = HalfWeight.arrange(FORM, parts, 64), FORM.dequantise(parts, torch.float64)
    found, plain = own.product(hidden), hidden.double() @ decoded.T
    assert found.dtype == dtype
    bound = 2.0**-20 * (hidden.double().abs() @ decoded.abs().T)
    bound = bound + (0 if dtype == torch.float32 else 2.0**-8) * plain.abs()  # and the result's own rounding
    assert bool(((found.double() - plain).abs() <= bound).all())
    rounded = hidden.double() @ decoded.bfloat16().double().T  # the control: weights of 8 bits
    assert bool(((rounded - plain).abs() > bound).any()) or dtype == torch.bfloat16
    for row in range(len(hidden)):  # a row does not depend on the others, to the bit
        assert torch.equal(own.product(hidden[row : row + 1]), found[row : row + 1])


@needs_product
def test_joined_linears_give_the_bits_of_each() -> None:
    linears = [PackedLinear(FORM, FORM.quantise(torch.randn(number, 24)), 24, torch.randn(number)) for number in (8, 3)]
    hidden = torch.randn(2, 24)

    def product_of(linear: PackedLinear) -> torch.Tensor:
        linear.for_cpu = HalfWeight.arrange(FORM, linear.parts, 64)
        return linear(hidden)

    apart = [product_of(one) for one in linears]
    assert torch.equal(product_of(join_packed(linears)), torch.cat(apart, dim=1))


@needs_product
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_an_engine_gives_the_tokens_of_the_decoded_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 64)
    rows, product = list[int](), HalfWeight.product
    monkeypatch.setattr(HalfWeight, "product", lambda own, hidden: rows.append(len(hidden)) or product(own, hidden))
    found = tokens_of(serve_all(make_engine(packed_model(name)), REQUESTS))
    assert {3, 12} <= set(rows)
    rows.clear()
    plain = make_engine(packed_model(name).double())  # float64 takes no such products
    assert tokens_of(serve_all(plain, REQUESTS)) == found
    assert not rows
    few = HalfWeight.arrange(FORM, FORM.quantise(torch.ones(4, 4)), 2)
    linear = PackedLinear(FORM, FORM.quantise(torch.ones(4, 4)), 4, None)
    linear.for_cpu = few
    linear(torch.ones(3, 4))
    assert not rows  # more rows than are faster
    linear(torch.ones(2, 4))
    assert rows == [2]


def test_what_has_no_products_is_refused_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="fp16 is for CPUs, and cuda has no products for it; leave it out"):
        weight_format("fp16", "cuda")
    assert "no inputs in torch.float64" in str(why_dequantised(FORM, 16, torch.float64))
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: True)
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 0)
    assert "faster than products with codes" in str(why_dequantised(FORM, 16, torch.float32))
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: False)
    (words,) = what_cpus_do(packed_model("llama"))
    assert words.endswith("this torch has no products with fp16 weights for this CPU")
    has_product.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(HalfWeight, "product", lambda own, hidden: torch.zeros(64, 17))
        assert not has_product(HalfWeight)
    has_product.cache_clear()


def test_the_product_is_not_called_on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it would round inputs, and end the process on CPUs without its instructions."""
    calls = list[int]()
    monkeypatch.setattr(HalfWeight, "arrange", lambda form, parts, rows: calls.append(rows))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    has_product.cache_clear()
    try:
        assert not has_product(HalfWeight)
    finally:
        has_product.cache_clear()
    assert not calls


@pytest.mark.skipif(not CpuWeight.may_run(), reason="torch has fbgemm on x86 with AVX2 only, and this is another CPU")
def test_torch_has_the_product_on_x86() -> None:
    """The other tests of products are left out without it."""
    assert has_product(HalfWeight)
