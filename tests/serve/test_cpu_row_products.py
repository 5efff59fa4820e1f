"""Weights of 8 bits with a scale for each output (int8-row): rounding, products of bytes on a CPU, ranks, commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands_for_tests import caller
from parallel_serving_for_tests import SCORED
from serving_for_tests import CONFIGS, GREEDY, SIZES, make_engine, serve_all, tiny_model, tokens_of
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, build, initialise, save_folder
from weft.plan import Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.calibration.corrected_codes import pack_corrected
from weft.serve.engine import Engine, EngineOptions
from weft.serve.follow_steps import follow_steps
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import build_part, read_part
from weft.serve.scheduling.request import Request
from weft.serve.weights import cpu_products
from weft.serve.weights.cpu_products import MAX_INPUTS, CpuWeight, RowWeight, has_product, why_dequantised
from weft.serve.weights.packed_linear import PackedLinear, join_packed, make_room, pack_head, pack_model, what_cpus_do
from weft.serve.weights.weight_formats import FP8, RowInt8, weight_format

needs_product = pytest.mark.skipif(
    not has_product(RowWeight), reason="this torch has no products of bytes for this CPU"
)
FORM = RowInt8()
REQUESTS = [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(3)]


def row_weight_of(weight: Tensor) -> RowWeight:
    return RowWeight.arrange(FORM, FORM.quantise(weight), 64)


def without_low_digit(own: RowWeight, hidden: Tensor) -> Tensor:
    """The control: inputs of one digit."""
    top = hidden.abs().amax(1, keepdim=True)
    return RowWeight.product(own, (hidden / top * 64).round() / 64) * top


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products are by codes."""
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_are_at_most_half_a_scale_off(dtype: torch.dtype) -> None:
    weight = torch.randn(9, 40).to(dtype) * torch.logspace(-6, 4, 9)[:, None].to(dtype)
    weight[4] = 0
    codes, scale = FORM.quantise(weight)
    step = scale.view(torch.float32).double()
    errors = (FORM.dequantise((codes, scale), torch.float64) - weight.double()).abs()
    assert bool((errors <= 0.5 * step * (1 + 1e-6)).all())
    assert codes.view(torch.int8).int().abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 4  # the range is used
    wrong = FORM.dequantise((codes, scale.roll(1, 0)), torch.float64)  # the control: a scale of another output
    assert bool(((wrong - weight.double()).abs() > errors + step).any())


@needs_product
@pytest.mark.parametrize("num_out", [1, 61, 144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_decoded_weight_within_the_bound(num_out: int, dtype: torch.dtype) -> None:
    weight = torch.randn(num_out, 300)
    hidden = (torch.randn(6, 300) * torch.logspace(-18, 18, 6)[:, None]).to(dtype)
    hidden[1] = 0
    hidden[2, 7] = 1e3 * hidden[2].abs().max()  # one input that is far larger than the others
    decoded, own = FORM.dequantise(FORM.quantise(weight), torch.float64), row_weight_of(weight)
    found, plain = own.product(hidden), hidden.double() @ decoded.T
    bound = hidden.double().abs().amax(1, keepdim=True) * decoded.abs().sum(1)
    bound = 2.0**-13 * bound + (0 if dtype == torch.float32 else 2.0**-8) * plain.abs()  # and the result's own rounding
    assert found.dtype == dtype
    assert bool(((found.double() - plain).abs() <= bound).all())
    control = without_low_digit(own, hidden[3:4].float())
    assert bool(((control.double() - plain[3:4]).abs() > bound[3:4]).any())
    for row in range(len(hidden)):  # a row does not depend on the others, to the bit
        for is_inference in (True, False):
            with torch.inference_mode(is_inference):
                assert torch.equal(own.product(hidden[row : row + 1]), found[row : row + 1])


@needs_product
def test_the_largest_sums_and_all_codes_are_exact() -> None:
    """Where products of bytes are added up in 16 bits, the largest would overflow with more bits of inputs."""
    codes = torch.randint(-127, 128, (64, 512), dtype=torch.int8)
    codes[0], codes[1] = 127, -127
    rows = torch.cat([torch.ones(1, 512), -torch.ones(1, 512), torch.eye(512)[:9], torch.full((1, 512), 0.5)])
    found = RowWeight.arrange(FORM, (codes.view(torch.uint8), torch.ones(64, 1).view(torch.int32)), 64).product(rows)
    assert torch.equal(found, rows @ codes.float().T)


@needs_product
def test_bad_inputs_stay_bad() -> None:
    own = row_weight_of(torch.randn(5, 16))
    for bad in (torch.nan, torch.inf, -torch.inf):
        hidden = torch.ones(2, 16)
        hidden[0, 3] = bad
        with torch.inference_mode():
            found = own.product(hidden)
            assert not bool(torch.cat([found[:1], own.product(hidden[:1])]).isfinite().any())
            assert torch.equal(found[1:], own.product(torch.ones(1, 16)))


@needs_product
def test_joined_linears_give_the_bits_of_each() -> None:
    linears = [PackedLinear(FORM, FORM.quantise(torch.randn(number, 24)), 24, torch.randn(number)) for number in (8, 3)]
    hidden = torch.randn(2, 24)

    def products(all_linears: list[PackedLinear]) -> list[Tensor]:
        for one in all_linears:
            one.for_cpu = row_weight_of(one.format.dequantise(one.parts, torch.float32))
        return [one(hidden) for one in all_linears]

    apart = products(linears)
    (joined,) = products([join_packed(linears)])
    assert torch.equal(joined, torch.cat(apart, dim=1))
    assert not torch.equal(joined, torch.cat(apart[::-1], dim=1))


@needs_product
@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_an_engine_gives_the_tokens_of_the_decoded_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_of() -> nn.Module:
        model = tiny_model(name)
        pack_model(model, FORM)
        pack_head(model, "int8-row", "cpu")
        return model

    rows, product = list[int](), RowWeight.product
    monkeypatch.setattr(RowWeight, "product", lambda own, hidden: rows.append(len(hidden)) or product(own, hidden))
    packed, plain = make_engine(model_of()), make_engine(model_of().double())  # float64 takes no products of bytes
    found = tokens_of(serve_all(packed, REQUESTS))
    assert {3, 12} <= set(rows)
    rows.clear()
    assert tokens_of(serve_all(plain, REQUESTS)) == found
    assert not rows
    alone = tokens_of(serve_all(make_engine(model_of()), REQUESTS[1:2]))
    assert alone["1"] == found["1"]


@needs_product
@pytest.mark.processes
def test_two_ranks_of_x_multiply_their_slices() -> None:
    scores: dict[str, list[float]] = {}
    for way in ("codes", "decoded", "few bits"):
        found = run_local(lambda rank, way=way: scores_on_rank(way), 2, 120.0)  # type: ignore[misc]
        scores[way] = found[0]
    errors = {
        way: max(abs(one - two) for one, two in zip(scores[way], scores["decoded"], strict=True)) for way in scores
    }
    assert errors["codes"] < 2e-3 < errors["few bits"]


def scores_on_rank(way: str) -> Any:
    """Log-probabilities of a text on two ranks, whose parts are packed."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_products, "measured_rows", lambda *sizes: 0 if way == "decoded" else 64)
        ranks = ServingRanks(Mesh(Plan(tensor=TensorDegrees(2))))
        values = dict(tiny_model("llama").named_parameters())
        model, cuts = build_part(CONFIGS["llama"], ranks.place)
        make_room(model, FORM)
        read_part(model, cuts, lambda one: values[one].detach(), "cpu")
        options = EngineOptions(block_size=4, num_blocks=30, token_budget=8, max_running=4)
        if way == "few bits":
            product = RowWeight.product  # the control: inputs are rounded
            patch.setattr(RowWeight, "product", lambda own, hidden: product(own, hidden.to(FP8).float()))
        if not ranks.is_lead:
            follow_steps(ModelPart(model, options, ranks))
            return None
        engine = Engine(model, options, ranks)
        found = [one.token for one in engine.score(SCORED)]
        engine.close()
        return found


def test_what_has_no_products_is_refused_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="int8-row is for CPUs, and cuda has no products for it; leave it out, or give"
    ):
        weight_format("int8-row", "cuda")
    with pytest.raises(ConfigError, match="leave it out with other formats"):
        pack_corrected(tiny_model("llama"), FORM, [])
    assert f"at most {MAX_INPUTS} inputs" in str(why_dequantised(FORM, MAX_INPUTS + 1, torch.float32))
    assert "no inputs in torch.float64" in str(why_dequantised(FORM, 16, torch.float64))
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: True)
    monkeypatch.setattr(cpu_products, "measured_rows", lambda *sizes: 0)
    assert "faster than products with codes" in str(why_dequantised(FORM, 16, torch.float32))
    monkeypatch.setattr(cpu_products, "has_product", lambda kind: False)
    model = tiny_model("llama")
    pack_model(model, FORM)
    (words,) = what_cpus_do(model)
    assert words.endswith("this torch has no products of bytes for this CPU")
    assert tokens_of(serve_all(make_engine(model), REQUESTS))


def test_a_torch_without_or_with_wrong_products_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise NotImplementedError

    for wrong in (lambda own, hidden: torch.zeros(len(hidden), 16), fail):
        has_product.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(RowWeight, "product", wrong)
            assert not has_product(RowWeight)
    has_product.cache_clear()


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


@pytest.mark.skipif(not CpuWeight.may_run(), reason="torch has fbgemm on x86 with AVX2 only, and this is another CPU")
def test_torch_has_the_product_on_x86() -> None:
    """The other tests of products are left out without it."""
    assert has_product(RowWeight)
