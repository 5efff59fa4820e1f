"""Products of a CPU with quantised weights: what they give, where they are used, and what is said if not.

HalfWeight and RowWeight        on x86: exact but for a bound that is stated
GroupWeight and DynamicWeight   in groups: with inputs of bf16, and on ARM of 8 bits
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_for_tests import caller
from serving_for_tests import (
    GREEDY,
    REQUESTS,
    SIZES,
    make_engine,
    model_of,
    relative,
    serve_all,
    tiny_model,
    tokens_of,
)
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models import DecoderConfig, build, initialise, save_folder
from weft.serve.calibration.corrected_codes import pack_corrected
from weft.serve.head.graph_head import graph_head
from weft.serve.loading import load_model
from weft.serve.model.paged_model import PagedModel
from weft.serve.scheduling.request import Request
from weft.serve.spec import ServingSpec
from weft.serve.weights import cpu_products
from weft.serve.weights.cpu_products import (
    MAX_INPUTS,
    CpuWeight,
    DynamicWeight,
    GroupWeight,
    HalfWeight,
    RowWeight,
    has_product,
    why_dequantised,
)
from weft.serve.weights.group_codes import joined_ranges, pack
from weft.serve.weights.packed_linear import PackedLinear, join_packed, pack_head, pack_model, what_cpus_do
from weft.serve.weights.weight_formats import Grouped, Half, RowInt8, WeightFormat, weight_format

CASES = [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(3)]


def needs(kind: type[CpuWeight], *others: Any) -> Any:
    """A case of a test with a product that this torch may not have for this CPU."""
    reason = f"this torch has no products {kind.name} for this CPU"
    return pytest.param(kind, *others, marks=pytest.mark.skipif(not has_product(kind), reason=reason))


OF_X86 = [needs(HalfWeight, Half(), "fp16"), needs(RowWeight, RowInt8(), "int8-row")]
IN_GROUPS = [needs(kind, form) for kind in (GroupWeight, DynamicWeight) for form in ("int8", "int4", "int4-128")]


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    """What a test finds of patched products, no other test is told."""
    has_product.cache_clear()
    yield
    has_product.cache_clear()


def only(monkeypatch: pytest.MonkeyPatch, *kinds: type[CpuWeight], rows: int) -> None:
    """This CPU has these products alone, which are the faster ones for so many rows."""
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: kind in kinds)
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: rows)


def grouped(name: str) -> Grouped:
    form = weight_format(name)
    assert isinstance(form, Grouped)
    return form


def packed_model(name: str, form: WeightFormat, head: str) -> nn.Module:
    model = tiny_model(name)
    pack_model(model, form)
    pack_head(model, head, "cpu")
    return model


def counted(monkeypatch: pytest.MonkeyPatch, kind: type[CpuWeight]) -> list[int]:
    """The rows of each product with codes from now on."""
    rows, product = list[int](), kind.product
    monkeypatch.setattr(kind, "product", lambda own, hidden: rows.append(len(hidden)) or product(own, hidden))
    return rows


def test_weights_of_bf16_are_kept_and_others_rounded_to_11_bits() -> None:
    form, weight = Half(), torch.randn(7, 32)
    weight[0] = 0
    errors = (form.dequantise(form.quantise(weight), torch.float64) - weight.double()).abs()
    assert bool((errors <= 2.0**-11 * weight.double().abs() + 2.0**-25).all())
    assert float(errors.max()) > 0
    exact = weight.bfloat16().clamp(-1, 1) * 2
    is_normal = exact.abs() > 1e-4
    assert torch.equal(form.dequantise(form.quantise(exact), torch.float32)[is_normal], exact.float()[is_normal])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_of_rows_are_at_most_half_a_scale_off(dtype: torch.dtype) -> None:
    form, weight = RowInt8(), torch.randn(9, 40).to(dtype) * torch.logspace(-6, 4, 9)[:, None].to(dtype)
    weight[4] = 0
    codes, scale = form.quantise(weight)
    step = scale.view(torch.float32).double()
    errors = (form.dequantise((codes, scale), torch.float64) - weight.double()).abs()
    assert bool((errors <= 0.5 * step * (1 + 1e-6)).all())
    assert codes.view(torch.int8).int().abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 4  # the range is used
    wrong = form.dequantise((codes, scale.roll(1, 0)), torch.float64)  # the control: a scale of another output
    assert bool(((wrong - weight.double()).abs() > errors + step).any())


@pytest.mark.parametrize(("kind", "form", "head"), OF_X86)
@pytest.mark.parametrize("num_out", [1, 61, 144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_dequantised_weight_within_the_bound(
    kind: type[CpuWeight], form: WeightFormat, head: str, num_out: int, dtype: torch.dtype
) -> None:
    hidden = (torch.randn(6, 300) * torch.logspace(-18, 18, 6)[:, None]).to(dtype)
    hidden[1] = 0
    if kind is RowWeight:
        hidden[2, 7] = 1e3 * hidden[2].abs().max()  # one input that is far larger than the others
    parts = form.quantise(torch.randn(num_out, 300))
    own, weight = kind.arrange(form, parts, 64), form.dequantise(parts, torch.float64)
    found, plain = own.product(hidden), hidden.double() @ weight.T
    row = hidden[3:4].float()
    if kind is HalfWeight:  # the order of sums; the control: weights of 8 bits
        bound = 2.0**-20 * (hidden.double().abs() @ weight.abs().T)
        control = row.double() @ weight.bfloat16().double().T
    else:  # two digits of 7 bits; the control: one digit
        bound = 2.0**-13 * hidden.double().abs().amax(1, keepdim=True) * weight.abs().sum(1)
        top = row.abs().amax()
        control = (own.product((row / top * 64).round() / 64) * top).double()
    bound = bound + (0 if dtype == torch.float32 else 2.0**-8) * plain.abs()  # and the result's own rounding
    assert found.dtype == dtype
    assert bool(((found.double() - plain).abs() <= bound).all())
    is_coarse = num_out == 1 or (kind is HalfWeight and dtype == torch.bfloat16)
    assert is_coarse or bool(((control - plain[3:4]).abs() > bound[3:4]).any())
    for index in range(len(hidden)):  # a row does not depend on the others, to the bit
        for is_inference in (True, False):
            with torch.inference_mode(is_inference):
                assert torch.equal(own.product(hidden[index : index + 1]), found[index : index + 1])


@pytest.mark.parametrize("kind", [needs(RowWeight)])
def test_the_largest_sums_of_bytes_are_exact_and_bad_inputs_stay_bad(kind: type[CpuWeight]) -> None:
    """Where products of bytes are added up in 16 bits, the largest would overflow with more bits of inputs."""
    codes = torch.randint(-127, 128, (64, 512), dtype=torch.int8)
    codes[0], codes[1] = 127, -127
    rows = torch.cat([torch.ones(1, 512), -torch.ones(1, 512), torch.eye(512)[:9], torch.full((1, 512), 0.5)])
    own = kind.arrange(RowInt8(), (codes.view(torch.uint8), torch.ones(64, 1).view(torch.int32)), 64)
    assert torch.equal(own.product(rows), rows @ codes.float().T)
    for bad in (torch.nan, torch.inf, -torch.inf):
        hidden = torch.ones(2, 512)
        hidden[0, 3] = bad
        with torch.inference_mode():
            found = own.product(hidden)
            assert not bool(torch.cat([found[:1], own.product(hidden[:1])]).isfinite().any())
            assert torch.equal(found[1:], own.product(torch.ones(1, 512)))


@pytest.mark.parametrize("kind", [needs(GroupWeight), needs(DynamicWeight)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_out", [16, 61, 144])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_code_is_multiplied(kind: type[CpuWeight], bits: int, num_out: int, groups: int) -> None:
    """The inputs, 0 and 1, are not rounded."""
    codes = torch.randint(0, 2**bits, (num_out, 64)).to(torch.uint8)
    ranges = torch.ones(num_out, groups, dtype=torch.float16)
    parts = (pack(codes, bits, 64 // groups), joined_ranges(ranges, 0 * ranges))
    found = kind.arrange(Grouped(bits, 64 // groups), parts, 1).product(torch.eye(64))
    torch.testing.assert_close(found.T, codes.float(), rtol=0, atol=0 if kind is GroupWeight else 1e-4)


@pytest.mark.parametrize(("kind", "name"), IN_GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_groups_have_the_precision_of_their_inputs(
    kind: type[CpuWeight], name: str, dtype: torch.dtype
) -> None:
    form = grouped(name)
    weight, hidden = torch.randn(80, 384) + torch.randn(80, 1), torch.randn(5, 384).to(dtype)
    dequantised = form.dequantise(form.quantise(weight), torch.float64)
    own, plain = kind.arrange(form, form.quantise(weight), 8), hidden.double() @ dequantised.T
    found = own.product(hidden)
    step = (hidden.amax(1) - hidden.amin(1)).double()[:, None] / 255  # between numbers of 8 bits
    rounded = step / 12**0.5 * dequantised.norm(dim=1)

    def error(result: Tensor) -> float:
        """Of bf16 (ARM CPUs round a little more than x86), or of independent roundings to 8 bits, below 1."""
        if kind is GroupWeight:
            return relative(result, plain) * 2**8 / 1.25
        return float(((result.double() - plain) / rounded).square().mean()) / 1.5

    assert found.dtype == dtype
    assert error(found) < 1
    alone = own.product(hidden[:1])  # a row does not depend on the others
    assert torch.equal(alone, found[:1]) or kind is DynamicWeight
    torch.testing.assert_close(alone, found[:1])
    for changed in wrong_weights(own):
        assert error(changed.product(hidden)) > 2


def wrong_weights(own: CpuWeight) -> list[CpuWeight]:
    """Weights with ranges of another group or none, without their lower digits, or with these in another order."""
    if isinstance(own, DynamicWeight):
        wrong = [replace(own, middles=own.middles.roll(1, 0)), replace(own, middles=0 * own.middles)]
        return [*wrong, *(replace(own, digits=own.digits[:1]) for _ in own.digits[1:])]
    assert isinstance(own, GroupWeight)
    (codes, ranges), *lower = own.digits
    digits = [((codes, ranges.roll(1, 0)), *lower)]
    if lower:
        digits += [((codes, ranges),), ((codes, lower[0][1]), (lower[0][0], ranges))]
    return [replace(own, digits=one) for one in digits]


@pytest.mark.parametrize("kind", [needs(DynamicWeight)])
@pytest.mark.parametrize("hidden", [torch.zeros(1, 64), torch.full((1, 64), -3.0), 1e4 * torch.ones(1, 64)])
def test_rows_of_equal_inputs_are_not_rounded(kind: type[CpuWeight], hidden: Tensor) -> None:
    form = grouped("int4")
    parts = form.quantise(torch.randn(24, 64))
    expected = hidden.double() @ form.dequantise(parts, torch.float64).T
    found = kind.arrange(form, parts, 1).product(hidden).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(hidden.abs().max()))


@pytest.mark.parametrize(("kind", "name"), IN_GROUPS)
def test_a_weight_in_the_order_of_products_has_the_stated_bytes(kind: Any, name: str) -> None:
    form = grouped(name)
    for num_out, num_in in ((61, 384), (128, 96), (7, 32)):
        own = kind.arrange(form, form.quantise(torch.randn(num_out, num_in)), 8)
        if kind is GroupWeight:
            held = sum(one.nbytes for digit in own.digits for one in digit)
        else:
            held = sum(one.nbytes for one in (*own.digits, own.middles))
        assert held == kind.num_bytes(num_out, num_in, form.size_of_group(num_in), form.bits)


@pytest.mark.parametrize(("kind", "form", "head"), OF_X86)
def test_joined_linears_give_the_bits_of_each(kind: type[CpuWeight], form: WeightFormat, head: str) -> None:
    linears = [PackedLinear(form, form.quantise(torch.randn(number, 24)), 24, torch.randn(number)) for number in (8, 3)]
    hidden = torch.randn(2, 24)

    def product_of(linear: PackedLinear) -> Tensor:
        linear.for_cpu = kind.arrange(form, linear.parts, 64)
        return linear(hidden)

    apart = [product_of(one) for one in linears]
    joined = product_of(join_packed(linears))
    assert torch.equal(joined, torch.cat(apart, dim=1))
    assert not torch.equal(joined, torch.cat(apart[::-1], dim=1))


@pytest.mark.parametrize(("kind", "form", "head"), OF_X86)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_an_engine_gives_the_tokens_of_the_dequantised_weights(
    kind: type[CpuWeight], form: WeightFormat, head: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 64)
    rows = counted(monkeypatch, kind)
    found = tokens_of(serve_all(make_engine(packed_model(name, form, head)), CASES))
    assert {3, 12} <= set(rows)
    alone = tokens_of(serve_all(make_engine(packed_model(name, form, head)), CASES[1:2]))
    assert alone["1"] == found["1"]
    rows.clear()
    plain = make_engine(packed_model(name, form, head).double())  # float64 takes no such products
    assert tokens_of(serve_all(plain, CASES)) == found
    linear = PackedLinear(form, form.quantise(torch.ones(4, 4)), 4, None)
    linear.for_cpu = kind.arrange(form, linear.parts, 2)
    linear(torch.ones(3, 4))
    assert not rows  # more rows than are faster
    linear(torch.ones(2, 4))
    assert rows == [2]


@pytest.mark.parametrize(("kind", "name"), IN_GROUPS)
def test_an_engine_computes_with_codes_where_that_is_faster_also_with_newer_weights(
    kind: type[CpuWeight], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, kind, rows=4)
    engine, newer, rows = make_engine(model_of(0, name)), make_engine(model_of(1, name)), counted(monkeypatch, kind)
    found, expected = (tokens_of(serve_all(one, REQUESTS)) for one in (engine, newer))
    assert found != expected
    assert set(rows) == {3}  # steps of prompts have 12 rows
    engine.replace_weights(model_of(1, name))
    assert tokens_of(serve_all(engine, REQUESTS)) == expected
    only(monkeypatch, kind, rows=0)  # dequantising is faster
    rows.clear()
    plain = tokens_of(serve_all(make_engine(model_of(0, name)), REQUESTS))
    assert plain == found or kind is DynamicWeight  # which rounds more
    assert not rows


def test_the_most_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster again for more rows is not used."""
    for faster, most in (((True, True, False), 4), ((True, False, True), 1), ((False,), 0)):
        seconds = iter([one for is_faster in faster for one in ((0.0, 1.0) if is_faster else (1.0, 0.0))])
        monkeypatch.setattr(cpu_products, "least_seconds", lambda compute, seconds=seconds: next(seconds))
        assert cpu_products.measured_rows.__wrapped__(RowInt8(), 32, torch.float32, 1) == most


@pytest.mark.parametrize(("kind", "name", "num_in"), [
    (HalfWeight, "fp16", 16), (RowWeight, "int8-row", 16), (GroupWeight, "int4", 64), (DynamicWeight, "int4", 64),
])  # fmt: skip
def test_why_weights_are_dequantised_is_said(
    kind: type[CpuWeight], name: str, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = weight_format(name)
    only(monkeypatch, kind, rows=1)
    assert why_dequantised(form, num_in, torch.float32) is None
    assert "no inputs in torch.float64" in str(why_dequantised(form, num_in, torch.float64))
    only(monkeypatch, kind, rows=0)
    assert "faster than products with codes" in str(why_dequantised(form, num_in, torch.float32))
    only(monkeypatch, rows=1)
    model = model_of(0, name)
    (words,) = what_cpus_do(model)
    assert words.startswith("14 of 14 linears are dequantised for each product")
    of_groups = DynamicWeight if kind is GroupWeight else kind  # those of ARM are asked for first
    assert words.endswith(f"this torch has no products {of_groups.name} for this CPU")
    engine = make_engine(model)
    linears = [one.layer for block in engine._part.paged.blocks for one in block.linears]  # type: ignore[union-attr]
    assert all(isinstance(one, PackedLinear) and one.for_cpu is None for one in linears)
    assert tokens_of(serve_all(engine, CASES))


def test_sizes_and_formats_without_products_are_said() -> None:
    assert f"at most {MAX_INPUTS} inputs" in str(why_dequantised(RowInt8(), MAX_INPUTS + 1, torch.float32))
    assert "a layer of 48 inputs has 16" in str(why_dequantised(Grouped(4, 64), 48, torch.float32))
    (words,) = what_cpus_do(model_of(0, "fp8"))
    assert "for fp16, int8-row, int8 and int4" in words


@pytest.mark.parametrize(("kind", "name"), [needs(GroupWeight, "int8"), needs(GroupWeight, "int4"),
                                            needs(DynamicWeight, "int4"), needs(RowWeight, "int8-row")])  # fmt: skip
def test_the_number_of_rows_alone_decides_the_rounding_and_it_is_said(
    kind: type[CpuWeight], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, kind, rows=4)
    model, hidden = model_of(0, name), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    linear = next(one for one in model.modules() if isinstance(one, PackedLinear))
    linear.arrange_for_cpu(torch.float32)
    assert isinstance(linear.for_cpu, kind)
    with torch.inference_mode():
        alone = torch.cat([linear(row[None]) for row in hidden])
        torch.testing.assert_close(linear(hidden[:4]), alone[:4], rtol=0, atol=0 if kind is not DynamicWeight else 1e-6)
        assert 1e-5 < relative(linear(hidden), alone) < 0.02


@pytest.mark.parametrize(("kind", "name", "rounds"), [
    (DynamicWeight, "int4", True), (GroupWeight, "int4", False), (RowWeight, "int8-row", False),
    (HalfWeight, "fp16", None),
])  # fmt: skip
def test_rounded_inputs_are_said(
    kind: type[CpuWeight], name: str, rounds: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, kind, rows=4)
    words = what_cpus_do(model_of(0, name))
    of_rows = [one for one in words if one.startswith("14 of 14 linears round few rows of a step otherwise than many")]
    assert len(of_rows) == (rounds is not None)
    assert len([one for one in words if "round the inputs of decodes to 8 bits" in one]) == (rounds is True)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])  # heads that share the embedding
def test_a_head_in_fewer_bits_gives_the_logits_of_its_dequantised_weight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: kind is not DynamicWeight and has_product(kind))
    save_folder(tmp_path, tiny_model(name))  # type: ignore[arg-type]
    packed, plain = (load_model(tmp_path, ServingSpec(tokenizer="bytes", head=head)).model for head in ("int8", None))
    assert isinstance(packed.lm_head, PackedLinear)
    form, rows = packed.lm_head.format, torch.randn(3, 16)
    weight = form.dequantise(packed.lm_head.parts, torch.float32)
    assert 0 < float((weight - plain.lm_head.weight.detach()).abs().max()) < 0.01  # type: ignore[operator, union-attr]
    found, exact = (PagedModel(model, 8).logits(rows) for model in (packed, plain))
    torch.testing.assert_close(found, PagedModel(packed, 8).hidden_states(rows) @ weight.T)
    assert not torch.equal(found, exact)
    tokens = tokens_of(serve_all(make_engine(packed), REQUESTS))
    plain.tied_to = None  # type: ignore[assignment]
    plain.lm_head.weight = nn.Parameter(weight)  # type: ignore[union-attr]
    assert tokens == tokens_of(serve_all(make_engine(plain), REQUESTS))


def test_what_does_not_go_together_is_refused() -> None:
    for name in ("fp16", "int8-row"):
        with pytest.raises(ConfigError, match=f"{name} is for CPUs, and cuda has no products for it; leave it out, or"):
            weight_format(name, "cuda")
    with pytest.raises(ConfigError, match="leave it out with other formats"):
        pack_corrected(tiny_model("llama"), RowInt8(), [])
    with pytest.raises(ConfigError, match="--head int8 is for models of attention on CPUs, not for a Decoder on cuda"):
        pack_head(tiny_model("llama"), "int8", "cuda")
    with pytest.raises(ConfigError, match="not for a Linear on cpu; leave it out"):
        pack_head(nn.Linear(2, 2), "int4", "cpu")
    with pytest.raises(ConfigError, match="a format of its weight: fp16, int8-row, int8, int4, int4-128"):
        graph_head("int3")
    assert graph_head("int4") is None


@pytest.mark.parametrize(("kind", "machine"), [
    (HalfWeight, "aarch64"), (RowWeight, "aarch64"), (DynamicWeight, "x86_64"), (DynamicWeight, "AMD64"),
])  # fmt: skip
def test_products_are_not_tried_on_other_cpus(
    kind: type[CpuWeight], machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, an illegal instruction ends the process, inputs are rounded, or torch has a plain loop, which is slow."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(kind, "arrange", lambda *given: pytest.fail("it was tried"))
    assert not has_product(kind)


@pytest.mark.parametrize("kind", [HalfWeight, RowWeight, GroupWeight])
def test_a_torch_without_or_with_wrong_products_is_found(
    kind: type[CpuWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise NotImplementedError

    for wrong in (lambda own, hidden: torch.zeros(len(hidden), 17 if kind is HalfWeight else 16), fail):
        has_product.cache_clear()
        monkeypatch.setattr(kind, "product", wrong)
        assert not has_product(kind)


@pytest.mark.skipif(not CpuWeight.may_run(), reason="torch has fbgemm on x86 with AVX2 only, and this is another CPU")
def test_torch_has_the_products_on_x86() -> None:
    """The other tests of products are left out without them."""
    assert has_product(HalfWeight)
    assert has_product(RowWeight)


def test_commands_take_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build(DecoderConfig(**{**SIZES, "vocab_size": 257}))  # type: ignore[arg-type]
    initialise(model, 0)
    save_folder(tmp_path, model)  # type: ignore[arg-type]
    weft = caller(monkeypatch, capfd)
    asked = ("generate", tmp_path, "--tokenizer", "bytes", "--device", "cpu", "--tokens", 6, "--temperature", 0)
    done = weft(*asked, "--prompt", "ab", "--json", "--weights", "int8-row", "--head", "int8-row")
    assert done.status == 0, done.err
    assert done.json["text"]
    wrong = weft(*asked, "--weights", "int8-rows")
    assert wrong.status == 2
    assert "give one of fp8, fp16, int8-row, int8, int4, int4-128" in wrong.err
    planned = weft("plan", "--serve", "--model", "llama3-8b", "--cluster", "h100:1x1", "--weights", "int8-row")
    assert planned.status == 2
    assert "is for CPUs" in planned.err
