"""Products with codes on a CPU: what they give, when they are used, and what is said if not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving_for_tests import (
    REQUESTS,
    make_engine,
    model_of,
    relative,
    serve_all,
    tiny_model,
    tokens_of,
)
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models import save_folder
from weft.serve.head.graph_head import graph_head
from weft.serve.loading import load_model
from weft.serve.model.paged_model import PagedModel
from weft.serve.spec import ServingSpec
from weft.serve.weights import cpu_products
from weft.serve.weights.cpu_products import (
    CpuWeight,
    DynamicWeight,
    GroupWeight,
    HalfWeight,
    RowWeight,
    has_product,
    why_dequantised,
)
from weft.serve.weights.group_codes import joined_ranges, pack
from weft.serve.weights.packed_linear import PackedLinear, pack_head, what_cpus_do
from weft.serve.weights.weight_formats import Grouped, weight_format

needs_product = pytest.mark.skipif(
    not has_product(GroupWeight), reason="this torch has no product with 4-bit codes for this CPU"
)


@pytest.fixture(autouse=True)
def no_product_of_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in groups are multiplied as on x86 (`test_cpu_dynamic_products.py` has the other product)."""
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: kind is not DynamicWeight and has_product(kind))


def load(folder: Path, head: str | None) -> nn.Module:
    return load_model(folder, ServingSpec(tokenizer="bytes", head=head)).model


def with_head(model: nn.Module, weight: Tensor) -> nn.Module:
    """The model with another weight of its head alone."""
    model.tied_to = None  # type: ignore[assignment]
    model.lm_head.weight = nn.Parameter(weight)  # type: ignore[union-attr]
    return model


@needs_product
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_out", [16, 61, 144])
def test_every_code_is_multiplied_exactly(bits: int, num_out: int) -> None:
    codes = torch.randint(0, 2**bits, (num_out, 64)).to(torch.uint8)
    ranges = torch.ones(num_out, 2, dtype=torch.float16)
    parts = (pack(codes, bits, 32), joined_ranges(ranges, 0 * ranges))
    found = GroupWeight.arrange(Grouped(bits, 32), parts, 1).product(torch.eye(64))
    assert torch.equal(found.T, codes.float())


@needs_product
@pytest.mark.parametrize("kind", ["int8", "int4", "int4-128"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_precision_of_bf16(kind: str, dtype: torch.dtype) -> None:
    form = weight_format(kind)
    assert isinstance(form, Grouped)
    weight, hidden = torch.randn(80, 384) + torch.randn(80, 1), torch.randn(5, 384).to(dtype)
    plain = hidden.double() @ form.dequantise(form.quantise(weight), torch.float64).T
    own = GroupWeight.arrange(form, form.quantise(weight), 8)
    found = own.product(hidden)
    assert found.dtype == dtype
    assert relative(found, plain) < 1.25 * 2**-8  # ARM CPUs round a little more than x86
    assert torch.equal(own.product(hidden[:1]), found[:1])  # a row does not depend on the others
    for changed in controls(own):
        assert relative(changed.product(hidden), plain) > 0.01


def controls(own: GroupWeight) -> list[GroupWeight]:
    """The weight with ranges of another group, and without its lower digits or with all in another order."""
    (codes, ranges), *lower = own.digits
    wrong = [((codes, ranges.roll(1, 0)), *lower)]
    if lower:
        wrong += [((codes, ranges),), ((codes, lower[0][1]), (lower[0][0], ranges))]
    return [replace(own, digits=digits) for digits in wrong]


@needs_product
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_engine_computes_with_codes_where_that_is_faster(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 4)
    engine, rows = make_engine(model_of(0, kind)), list[int]()
    product = GroupWeight.product
    monkeypatch.setattr(GroupWeight, "product", lambda own, hidden: rows.append(len(hidden)) or product(own, hidden))
    found = tokens_of(serve_all(engine, REQUESTS))
    assert set(rows) == {3}  # steps of prompts have 12 rows
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 0)  # decoding is faster
    rows.clear()
    plain = make_engine(model_of(0, kind))
    assert tokens_of(serve_all(plain, REQUESTS)) == found
    assert not rows


@needs_product
@pytest.mark.parametrize("kind", ["int8", "int4", "int4-128"])
def test_a_weight_in_the_order_of_products_has_the_stated_bytes(kind: str) -> None:
    form = weight_format(kind)
    assert isinstance(form, Grouped)
    for num_out, num_in in ((61, 384), (128, 96)):
        own = GroupWeight.arrange(form, form.quantise(torch.randn(num_out, num_in)), 8)
        held = sum(one.nbytes for digit in own.digits for one in digit)
        assert held == GroupWeight.num_bytes(num_out, num_in, form.size_of_group(num_in), form.bits)


@needs_product
def test_newer_weights_are_arranged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 64)
    engine, newer = make_engine(model_of(0, "int4")), make_engine(model_of(1, "int4"))
    before, expected = (tokens_of(serve_all(one, REQUESTS)) for one in (engine, newer))
    assert before != expected
    engine.replace_weights(model_of(1, "int4"))
    assert tokens_of(serve_all(engine, REQUESTS)) == expected


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])  # heads that share the embedding
def test_a_head_in_fewer_bits_gives_the_logits_of_its_decoded_weight(name: str, tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model(name))  # type: ignore[arg-type]
    packed, plain = (load(tmp_path, head) for head in ("int8", None))
    assert isinstance(packed.lm_head, PackedLinear)
    form, rows = packed.lm_head.format, torch.randn(3, 16)
    decoded = form.dequantise(packed.lm_head.parts, torch.float32)
    assert 0 < float((decoded - plain.lm_head.weight.detach()).abs().max()) < 0.01  # type: ignore[operator, union-attr]
    found, exact = (PagedModel(model, 8).logits(rows) for model in (packed, plain))
    torch.testing.assert_close(found, PagedModel(packed, 8).hidden_states(rows) @ decoded.T)
    assert not torch.equal(found, exact)
    tokens = [tokens_of(serve_all(make_engine(model), REQUESTS)) for model in (packed, with_head(plain, decoded))]
    assert tokens[0] == tokens[1]


def test_what_a_head_in_fewer_bits_does_not_go_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--head int8 is for models of attention on CPUs, not for a Decoder on cuda"):
        pack_head(tiny_model("llama"), "int8", "cuda")
    with pytest.raises(ConfigError, match="not for a Linear on cpu; leave it out"):
        pack_head(nn.Linear(2, 2), "int4", "cpu")
    with pytest.raises(ConfigError, match="a format of its weight: fp16, int8-row, int8, int4, int4-128"):
        graph_head("int3")
    assert graph_head("int4") is None


@needs_product
def test_the_most_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster again for more rows is not used."""
    for faster, most in (((True, True, False), 4), ((True, False, True), 1), ((False,), 0)):
        seconds = iter([one for is_faster in faster for one in ((0.0, 1.0) if is_faster else (1.0, 0.0))])
        monkeypatch.setattr(cpu_products, "least_seconds", lambda compute, seconds=seconds: next(seconds))
        assert cpu_products.measured_rows.__wrapped__(Grouped(4, 32), 32, torch.float32, 1) == most


def test_weights_that_are_decoded_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: kind is GroupWeight)
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 1)
    form = Grouped(4, 64)
    assert why_dequantised(form, 64, torch.float32) is None
    assert "no inputs in torch.float64" in str(why_dequantised(form, 64, torch.float64))
    assert "a layer of 48 inputs has 16" in str(why_dequantised(form, 48, torch.float32))
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 0)
    assert "dequantising was faster than products with codes" in str(why_dequantised(form, 64, torch.float32))
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: False)
    (words,) = what_cpus_do(model_of(0, "int4"))
    assert words.startswith("14 of 14 linears are dequantised")
    assert "this torch has no products" in words
    engine = make_engine(model_of(0, "int4"))
    linears = [one.layer for block in engine._part.paged.blocks for one in block.linears]  # type: ignore[union-attr]
    assert all(isinstance(one, PackedLinear) and one.for_cpu is None for one in linears)
    assert "for fp16, int8-row, int8 and int4" in what_cpus_do(model_of(0, "fp8"))[0]


@needs_product
@pytest.mark.parametrize("kind", ["int8", "int4", "int8-row"])
def test_the_number_of_rows_alone_decides_the_rounding_and_it_is_said(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 4)
    model, hidden = model_of(0, kind), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    linear = next(one for one in model.modules() if isinstance(one, PackedLinear))
    linear.arrange_for_cpu(torch.float32)
    with torch.inference_mode():
        alone = torch.cat([linear(row[None]) for row in hidden])
        assert torch.equal(linear(hidden[:4]), alone[:4])
        assert 1e-5 < relative(linear(hidden), alone) < 0.02
    assert any("14 of 14 linears round few rows of a step otherwise than many" in one for one in what_cpus_do(model))


@pytest.mark.parametrize("kind", ["fp8", "fp16"])
def test_of_other_formats_it_is_not_said(kind: str) -> None:
    assert not any("otherwise than many" in one for one in what_cpus_do(model_of(0, kind)))


@pytest.mark.parametrize("kind", [HalfWeight, RowWeight])
def test_products_of_x86_are_not_tried_on_other_cpus(kind: type[CpuWeight], monkeypatch: pytest.MonkeyPatch) -> None:
    """There, an illegal instruction ends the process."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(kind, "arrange", lambda *given: pytest.fail("it was tried"))
    assert not has_product.__wrapped__(kind)
