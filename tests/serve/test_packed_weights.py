"""Weights in fewer bits: bounds of the rounding, what packed models compute and hold, and what correction gains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving_for_tests import GREEDY, MODELS, ONE, give_decoded, make_engine, serve_all, tiny_model, tokens_of
from torch import Tensor

from weft.errors import ConfigError, DataError, NumbersError
from weft.models import save_folder
from weft.plan import Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.calibration.corrected_codes import corrected, pack_corrected
from weft.serve.loading import calibration_texts, load_model
from weft.serve.parallel.rank_part import RankPlace, build_part, part_bytes, part_numel, read_part
from weft.serve.scheduling.request import Request
from weft.serve.spec import ServingSpec
from weft.serve.weights.group_codes import GroupCodes, codes_of, dequantise, group_range, pack, quantise, unpack
from weft.serve.weights.packed_linear import make_room, pack_model
from weft.serve.weights.weight_formats import FORMATS, Grouped, weight_bytes, weight_format


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_are_at_most_half_a_scale_off(bits: int, dtype: torch.dtype) -> None:
    values = torch.randn(7, 96).to(dtype) * torch.logspace(-4, 3, 7)[:, None].to(dtype) + 3
    coded = quantise(values, 32, bits)
    errors = (dequantise(coded, bits, torch.float64) - values.double()).abs().unflatten(-1, (-1, 32))
    assert bool((errors <= 0.5 * coded.scale[..., None].double() * (1 + 1e-5) + 1e-9).all())
    assert coded.codes.shape == (7, 96 * bits // 8)
    assert int(unpack(coded.codes, bits, 32).max()) == 2**bits - 1  # the whole range is used
    wrong = GroupCodes(coded.codes, coded.scale.roll(1, 0), coded.zero_point)  # the control: a scale of another group
    assert bool(((dequantise(wrong, bits, torch.float64) - values.double()).abs() > errors.flatten(-2) + 1e-6).any())


def test_equal_numbers_are_kept_and_codes_lie_low_half_first() -> None:
    constant = torch.tensor([[1.5, 1.5, -2.25, -2.25], [0.0, 0.0, 7.0, 7.0]])
    assert torch.equal(dequantise(quantise(constant, 2, 4), 4, torch.float32), constant)
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack(codes, 4, 4).tolist() == [[0xF1, 0x02]]
    assert torch.equal(unpack(pack(codes, 4, 4), 4, 4), codes)
    assert pack(codes, 4, 1).tolist() == [[0x21, 0x0F]]  # two groups in a block
    halves = torch.tensor([[0.0, 0.5, 1.5, 2.5, 15.0]])
    assert codes_of(halves, *group_range(halves, 4), 4).tolist() == [[0, 0, 2, 2, 15]]  # half to even


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_beyond_16_bits_become_the_nearest_that_codes_reach(bits: int) -> None:
    for numbers, expected in (
        ([-65510.0, 0.0], [-65504.0, 0.0]),  # which float16 rounds up to its lowest number
        ([-7e4, 0.0], [-65504.0, 0.0]),
        ([-3e38, -2e38], [-65504.0, -65504.0]),
        ([7e4, 8e4], [7e4, 8e4]),  # from the highest number of float16 on
        ([-1e6, 3e38], [-65504.0, 65504.0 * (2**bits - 2)]),
    ):
        found = dequantise(quantise(torch.tensor([numbers]), 2, bits), bits, torch.float32)
        torch.testing.assert_close(found, torch.tensor([expected]), rtol=0.01, atol=40)
    for one in (torch.inf, -torch.inf, torch.nan):  # the control: what a broken model gives does not look sound
        found = dequantise(quantise(torch.tensor([[one, 1.0]]), 2, bits), bits, torch.float32)
        assert bool(found.isnan().all()), found


def test_least_values_are_the_largest_16_bit_numbers_that_are_not_above() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()].sort().values.float()
    numbers = torch.cat([every, every.nextafter(every + 1), every.nextafter(every - 1), every + every.diff().median()])
    numbers = numbers[numbers <= 65504.0]
    expected = every[(torch.searchsorted(every, numbers, right=True) - 1).clamp(min=0)]
    assert torch.equal(group_range(numbers[:, None], 4)[1].float(), expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.full(3)
def test_the_engine_computes_with_the_decoded_weights(kind: str, name: str) -> None:
    requests = [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(3)]
    plain, packed = tiny_model(name).double(), tiny_model(name).double()
    pack_model(packed, FORMATS[kind])
    give_decoded(plain, packed)
    text = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        torch.testing.assert_close(packed(text), plain(text), rtol=1e-9, atol=1e-9)
    expected = tokens_of(serve_all(make_engine(plain), requests))
    assert tokens_of(serve_all(make_engine(packed), requests)) == expected
    if kind == "int4":
        assert tokens_of(serve_all(make_engine(tiny_model(name).double()), requests)) != expected  # it is not exact


@pytest.mark.parametrize("kind", FORMATS)
def test_a_folder_is_read_in_a_format_and_its_bytes_are_predicted(kind: str, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    save_folder(tmp_path, model)  # type: ignore[arg-type]
    read = load_model(tmp_path, ServingSpec(tokenizer="bytes", weights=kind)).model
    pack_model(model, FORMATS[kind])
    own = dict(model.named_buffers())
    assert own
    for name, buffer in read.named_buffers():
        assert torch.equal(buffer, own[name])
    held = sum(one.numel() * one.itemsize for one in (*read.parameters(), *read.buffers()))
    assert held == part_bytes(MODELS["qwen2"], ONE, 4, weight_format(kind))
    assert held < part_bytes(MODELS["qwen2"], ONE, 4) == 4 * part_numel(MODELS["qwen2"], ONE)


def test_a_ranks_part_is_packed_and_its_bytes_are_predicted() -> None:
    plan = Plan(tensor=TensorDegrees(2))
    values = dict(tiny_model("llama").named_parameters())
    for index in range(2):
        place = RankPlace(plan, {**dict.fromkeys(plan.degrees, 0), "x": index})
        model, cuts = build_part(MODELS["llama"], place)
        make_room(model, FORMATS["int4"])
        read_part(model, cuts, lambda one: values[one].detach(), "cpu")
        held = sum(one.numel() * one.itemsize for one in (*model.parameters(), *model.buffers()))
        assert held == part_bytes(MODELS["llama"], place, 4, FORMATS["int4"])


def test_bits_of_a_large_weight() -> None:
    size = 4096 * 4096
    found = {kind: 8 * weight_bytes(one, 4096, 4096) / size for kind, one in FORMATS.items()}
    assert found == pytest.approx(
        {"fp8": 8 + 32 / 4096, "fp16": 16, "int8-row": 8 + 32 / 4096, "int8": 8.25, "int4": 4.5, "int4-128": 4.25}
    )


def test_newer_weights_are_taken_in_the_same_format() -> None:
    old, new = tiny_model("llama"), tiny_model("llama", seed=1)
    for model in (old, new):
        pack_model(model, FORMATS["int4"])
    requests = [Request("x", (1, 2, 3), 8, GREEDY)]
    expected = tokens_of(serve_all(make_engine(tiny_packed(1)), requests))
    engine = make_engine(old)
    assert tokens_of(serve_all(engine, requests)) != expected
    engine.replace_weights(new)
    assert tokens_of(serve_all(engine, requests)) == expected
    with pytest.raises(ConfigError, match="give weights of the same model"):
        engine.replace_weights(tiny_model("llama", seed=1))


def tiny_packed(seed: int) -> torch.nn.Module:
    model = tiny_model("llama", seed)
    pack_model(model, FORMATS["int4"])
    return model


def correlated_rows(number: int, size: int) -> Tensor:
    """Inputs of which a few directions carry most, as those of a trained model."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(size, size, generator=generator) * torch.logspace(0, -2, size)[:, None]
    return torch.randn(number, size, generator=generator) @ mixing


def test_correction_changes_results_less_than_plain_rounding() -> None:
    rows, weight, form = correlated_rows(600, 64), torch.randn(48, 64), Grouped(4, 32)
    moment = rows.double().T @ rows.double()
    with_text = form.dequantise(corrected(weight, moment, form), torch.float64)
    plain = form.dequantise(form.quantise(weight), torch.float64)

    def change(decoded: Tensor) -> float:
        return float((rows.double() @ (decoded - weight.double()).T).square().mean())

    assert change(with_text) < 0.5 * change(plain)
    shuffled = moment[torch.randperm(64)][:, torch.randperm(64)]  # the control: moments of other inputs
    shuffled = shuffled @ shuffled.T
    assert change(form.dequantise(corrected(weight, shuffled, form), torch.float64)) > change(with_text)
    # Inputs that are independent and equally strong leave nothing to make up for.
    assert torch.equal(corrected(weight, torch.eye(64).double(), form)[0], form.quantise(weight)[0])


def test_a_text_corrects_a_model(tmp_path: Path) -> None:
    model, plain = tiny_model("llama"), tiny_model("llama")
    texts = [torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    pack_corrected(model, FORMATS["int4"], texts)
    pack_model(plain, FORMATS["int4"])
    with torch.inference_mode():
        exact = tiny_model("llama")(texts[0])
        assert float((model(texts[0]) - exact).square().mean()) < float((plain(texts[0]) - exact).square().mean())
    with pytest.raises(ConfigError, match="corrects int4 and int8 only"):
        pack_corrected(tiny_model("llama"), FORMATS["fp8"], texts)


def test_what_cannot_be_packed_is_refused_in_words(tmp_path: Path) -> None:
    from weft.data.tokenizer import ByteTokenizer

    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = float("nan")  # type: ignore[union-attr, index, operator]
    with pytest.raises(NumbersError, match=r"layers.1.mlp.up_proj.weight\[2, 3\] is nan"):
        pack_model(model, FORMATS["int4"])
    with pytest.raises(ConfigError, match="--weights int3 is unknown; give one of fp8, fp16, int8-row, int8, int4"):
        weight_format("int3")
    with pytest.raises(ConfigError, match="two weights in a byte"):
        FORMATS["int4"].empty(4, 7, "cpu")
    with pytest.raises(DataError, match="cannot read the calibration text"):
        calibration_texts(tmp_path / "none", ByteTokenizer(), 32, 61)
    (tmp_path / "short").write_text("abc")
    with pytest.raises(DataError, match="has 3 tokens; give one of at least 32"):
        calibration_texts(tmp_path / "short", ByteTokenizer(), 32, 61)
