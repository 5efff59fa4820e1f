"""Products of bytes with 4-bit codes, on ARM CPUs: what they give, and when they are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from serving_for_tests import REQUESTS, make_engine, model_of, relative, serve_all, tokens_of

from weft.serve.weights import cpu_products
from weft.serve.weights.cpu_products import DynamicWeight, has_product
from weft.serve.weights.group_codes import joined_ranges, pack
from weft.serve.weights.packed_linear import PackedLinear, what_cpus_do
from weft.serve.weights.weight_formats import Grouped, weight_format

needs_product = pytest.mark.skipif(
    not has_product(DynamicWeight), reason="this torch has no product of bytes and 4-bit codes here"
)
KINDS = ("int8", "int4", "int4-128")


def grouped(kind: str) -> Grouped:
    form = weight_format(kind)
    assert isinstance(form, Grouped)
    return form


@needs_product
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_out", [16, 61, 144])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_code_is_multiplied(bits: int, num_out: int, groups: int) -> None:
    """The inputs, 0 and 1, are not rounded."""
    codes = torch.randint(0, 2**bits, (num_out, 64)).to(torch.uint8)
    ranges = torch.ones(num_out, groups, dtype=torch.float16)
    parts = (pack(codes, bits, 64 // groups), joined_ranges(ranges, 0 * ranges))
    found = DynamicWeight.arrange(Grouped(bits, 64 // groups), parts, 1).product(torch.eye(64))
    torch.testing.assert_close(found.T, codes.float(), rtol=0, atol=1e-4)


@needs_product
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_precision_of_inputs_of_8_bits(kind: str, dtype: torch.dtype) -> None:
    form = grouped(kind)
    weight, hidden = torch.randn(80, 384) + torch.randn(80, 1), torch.randn(5, 384).to(dtype)
    decoded = form.dequantise(form.quantise(weight), torch.float64)
    own = DynamicWeight.arrange(form, form.quantise(weight), 8)
    found = own.product(hidden)
    assert found.dtype == dtype
    step = (hidden.amax(1) - hidden.amin(1)).double()[:, None] / 255  # between numbers of 8 bits
    rounded = step / 12**0.5 * decoded.norm(dim=1)
    error = found.double() - hidden.double() @ decoded.T
    assert float((error / rounded).square().mean()) < 1.5  # of independent roundings it is 1
    torch.testing.assert_close(own.product(hidden[:1]), found[:1])  # a row does not depend on the others
    for changed in controls(own):
        error = changed.product(hidden).double() - hidden.double() @ decoded.T
        assert float((error / rounded).square().mean()) > 4


def controls(own: DynamicWeight) -> list[DynamicWeight]:
    """The weight with the middles of other groups or of none, and without its lower digits."""
    wrong = [replace(own, middles=own.middles.roll(1, 0)), replace(own, middles=0 * own.middles)]
    return wrong + [replace(own, digits=own.digits[:1]) for _ in own.digits[1:]]


@needs_product
@pytest.mark.parametrize("hidden", [torch.zeros(1, 64), torch.full((1, 64), -3.0), 1e4 * torch.ones(1, 64)])
def test_rows_of_equal_inputs_are_not_rounded(hidden: torch.Tensor) -> None:
    form = grouped("int4")
    weight = torch.randn(24, 64)
    own = DynamicWeight.arrange(form, form.quantise(weight), 1)
    expected = hidden.double() @ form.dequantise(form.quantise(weight), torch.float64).T
    torch.testing.assert_close(own.product(hidden).double(), expected, rtol=1e-4, atol=1e-5 * float(hidden.abs().max()))


@needs_product
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_in_this_order_has_the_stated_bytes(kind: str) -> None:
    form = grouped(kind)
    for num_out, num_in in ((61, 384), (128, 96), (7, 32)):
        own = DynamicWeight.arrange(form, form.quantise(torch.randn(num_out, num_in)), 8)
        held = sum(one.nbytes for one in (*own.digits, own.middles))
        assert held == DynamicWeight.num_bytes(num_out, num_in, form.size_of_group(num_in), form.bits)


@needs_product
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_computes_so_where_that_is_faster(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 4)
    engine, rows = make_engine(model_of(0, kind)), list[int]()
    product = DynamicWeight.product
    monkeypatch.setattr(DynamicWeight, "product", lambda own, hidden: rows.append(len(hidden)) or product(own, hidden))
    assert all(len(one) == 9 for one in tokens_of(serve_all(engine, REQUESTS)).values())
    assert set(rows) == {3}  # steps of prompts have 12 rows
    engine.replace_weights(model_of(1, kind))
    newer = make_engine(model_of(1, kind))
    assert tokens_of(serve_all(engine, REQUESTS)) == tokens_of(serve_all(newer, REQUESTS))


@needs_product
def test_a_decode_is_near_that_with_decoded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hidden = model_of(0, "int4"), torch.randn(1, 64)
    linear = next(one for one in model.modules() if isinstance(one, PackedLinear))
    plain = linear(hidden)
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 1)
    linear.arrange_for_cpu(torch.float32)
    assert isinstance(linear.for_cpu, DynamicWeight)
    assert 0 < relative(linear(hidden), plain) < 0.02


def test_rounded_inputs_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: True)
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 4)
    words, by_rows = what_cpus_do(model_of(0, "int4"))
    assert by_rows.startswith("14 of 14 linears round few rows of a step otherwise than many")
    assert words.startswith("14 of 14 linears round the inputs of decodes to 8 bits")
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 0)
    assert all("of 14 linears are dequantised" in words for words in what_cpus_do(model_of(0, "int4")))


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_it_is_not_tried_on_other_cpus(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch has a plain loop for it, which is slow."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(DynamicWeight, "arrange", lambda *given: pytest.fail("it was tried"))
    assert not has_product.__wrapped__(DynamicWeight)
