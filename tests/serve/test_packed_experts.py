"""Stacked experts in fewer bits: what is read, decoded, predicted, split over ranks and corrected by a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import tokens_on_ranks, whole_model
from serving_for_tests import (
    CONFIGS,
    GREEDY,
    MODELS,
    ONE,
    SIZES,
    give_decoded,
    make_engine,
    serve_all,
    tiny_model,
    tokens_of,
)
from torch import Tensor, nn

from weft.errors import NumbersError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, save_folder
from weft.models.experts import StackedExperts
from weft.plan import Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.calibration.corrected_codes import (
    corrected_parts,
    make_room_for_corrected,
    pack_corrected,
    second_moments,
)
from weft.serve.loading import load_model
from weft.serve.model.model_part import EngineOptions
from weft.serve.parallel.rank_part import (
    PartValues,
    RankPlace,
    block_bytes,
    build_part,
    part_bytes,
    read_part,
    refuse_plan,
)
from weft.serve.scheduling.request import Request
from weft.serve.spec import ServingSpec
from weft.serve.weights.cpu_products import why_dequantised
from weft.serve.weights.packed_experts import PackedExperts, PackedStack
from weft.serve.weights.packed_linear import make_room, pack_model, what_cpus_do
from weft.serve.weights.weight_formats import FORMATS, RowFp8

LIMIT_SECONDS = 300.0
# Groups of 64 inputs are whole on each of two ranks of x, so all ranks round as one does.
WIDE = {**SIZES, "hidden_size": 128, "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
WITH_EXPERTS = {
    "wide-experts": DecoderConfig("mixtral", **WIDE),  # type: ignore[arg-type]
    "shared-experts": DecoderConfig("qwen2_moe", **WIDE, shared_expert_intermediate_size=32),  # type: ignore[arg-type]
}
REQUESTS = [Request(str(i), (7 * i + 1, 5, 3, i), 8, GREEDY) for i in range(3)]


@pytest.fixture(autouse=True)
def _models_of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only here: tests of other files take each of CONFIGS for a case."""
    for name, config in WITH_EXPERTS.items():
        monkeypatch.setitem(CONFIGS, name, config)


def packed_model(name: str, kind: str) -> nn.Module:
    model = whole_model(name)
    pack_model(model, FORMATS[kind])
    return model


def held_bytes(model: nn.Module) -> int:
    return sum(one.numel() * one.itemsize for one in (*model.parameters(), *model.buffers()))


def first_experts(model: nn.Module) -> PackedExperts:
    return next(one for one in model.modules() if isinstance(one, PackedExperts))


@pytest.mark.parametrize("name", ["wide-experts", "shared-experts"])
def test_the_engine_computes_with_decoded_experts_beside_a_shared_one(name: str) -> None:
    plain, packed = whole_model(name), packed_model(name, "int4-128")
    give_decoded(plain, packed)
    assert tokens_of(serve_all(make_engine(packed), REQUESTS)) == tokens_of(serve_all(make_engine(plain), REQUESTS))


def test_only_chosen_experts_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, decoded = first_experts(packed_model("mixtral", "int4")), []
    tokens, chosen = torch.randn(2, 16).double(), torch.tensor([[2, 0], [2, 3]])
    monkeypatch.setattr(
        PackedStack, "parts_of", lambda self, one: decoded.append(one) or [part[one] for part in self.parts]
    )
    experts.of_tokens(tokens, torch.rand(2, 2).double(), chosen)
    assert decoded == [0, 0, 2, 2, 3, 3]  # gate and up, and down


def test_codes_of_another_expert_change_the_result() -> None:
    experts = first_experts(packed_model("mixtral", "int4"))
    tokens, weights, chosen = torch.randn(3, 16).double(), torch.rand(3, 2).double(), torch.tensor([[0, 2]] * 3)
    before = experts.of_tokens(tokens, weights, chosen)
    experts.down_proj.part_0[1].zero_()  # type: ignore[index, operator]
    assert torch.equal(experts.of_tokens(tokens, weights, chosen), before)  # nobody chose this one
    experts.down_proj.part_0[[0, 2]] = experts.down_proj.part_0[[2, 0]]  # type: ignore[index, operator]
    assert not torch.allclose(experts.of_tokens(tokens, weights, chosen), before)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.full(2)
def test_a_folder_is_read_expert_by_expert_and_its_bytes_are_predicted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, shapes = FORMATS[kind], []
    save_folder(tmp_path, tiny_model("mixtral"))  # type: ignore[arg-type]
    quantise = type(form).quantise
    monkeypatch.setattr(
        type(form), "quantise", lambda self, weight: shapes.append(weight.shape) or quantise(self, weight)
    )
    read = load_model(tmp_path, ServingSpec(tokenizer="bytes", weights=kind)).model
    assert {tuple(shape) for shape in shapes} == {(16, 16), (8, 16), (48, 16), (16, 24)}  # never a stack
    own = tiny_model("mixtral")
    pack_model(own, form)
    assert not any(isinstance(one, StackedExperts) for one in read.modules())
    buffers = dict(own.named_buffers())
    assert any("experts.down_proj" in name for name in buffers)
    assert all(torch.equal(one, buffers[name]) for name, one in read.named_buffers())
    assert held_bytes(read) == part_bytes(MODELS["mixtral"], ONE, 4, form)
    assert held_bytes(read.model.layers) == sum(block_bytes(MODELS["mixtral"], ONE, 4, form))  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("expert", [1, 2])
def test_a_ranks_experts_are_packed_and_their_bytes_are_predicted(expert: int, x: int) -> None:
    plan = Plan(expert=expert, tensor=TensorDegrees(x))
    values, form = dict(tiny_model("wide-experts").named_parameters()), FORMATS["int4"]
    for index in range(2):
        own = {axis: index * (degree > 1) for axis, degree in plan.degrees.items()}
        model, cuts = build_part(CONFIGS["wide-experts"], RankPlace(plan, own))
        make_room(model, form)
        read_part(model, cuts, lambda one: values[one].detach(), "cpu")
        assert held_bytes(model) == part_bytes(CONFIGS["wide-experts"], RankPlace(plan, own), 4, form)
        first = index * 2 if plan.expert > 1 else 0
        stack = first_experts(model).down_proj
        expected = form.quantise(values["model.layers.0.mlp.experts.down_proj"].detach()[first])
        assert len(stack.part_0) == 4 // plan.expert  # type: ignore[arg-type]
        assert all(torch.equal(one, other) for one, other in zip(stack.parts_of(0), expected, strict=True))


@pytest.mark.processes
def test_ranks_of_experts_and_of_x_give_the_tokens_of_the_decoded_weights() -> None:
    name, kind = "wide-experts", "int4"
    plain = whole_model(name)
    give_decoded(plain, packed_model(name, kind))
    expected = tokens_of(serve_all(make_engine(plain), REQUESTS))
    assert tokens_of(serve_all(make_engine(whole_model(name)), REQUESTS)) != expected  # rounding matters here
    plans = [Plan(expert=2), Plan(tensor=TensorDegrees(2))]
    options = EngineOptions(block_size=4, num_blocks=60)
    for plan in plans:
        refuse_plan(CONFIGS[name], plan)

    def rank(_: int) -> list[Any]:
        torch.set_num_threads(1)
        found = [tokens_on_ranks(name, Mesh(plan), REQUESTS, options, weights=kind) for plan in plans]
        place = RankPlace(plans[0], dict.fromkeys(plans[0].degrees, 0))  # the control: both have the first experts
        return [*found, tokens_on_ranks(name, Mesh(plans[0]), REQUESTS, options, place, weights=kind)]

    *right, wrong = run_local(rank, 2, LIMIT_SECONDS)[0]
    assert [one["tokens"] for one in right] == [expected] * 2
    assert wrong["tokens"] != expected


def test_newer_experts_are_taken_and_a_cpu_multiplies_with_their_codes() -> None:
    old, new = (tiny_model("wide-experts", seed) for seed in (0, 1))
    decoded = tiny_model("wide-experts", 1).double()
    for model in (old, new):
        pack_model(model, FORMATS["int4"])
    give_decoded(decoded, new)
    engine, text = make_engine(old), torch.tensor([1, 2, 3])
    before = engine.embed(text.tolist(), "mean")
    engine.replace_weights(new)
    after, expected = (one.embed(text.tolist(), "mean") for one in (engine, make_engine(decoded)))
    assert float((after - before).abs().max()) > 0.1
    torch.testing.assert_close(after.double(), expected.double(), rtol=0.1, atol=0.1)  # codes take inputs of bf16
    stack = first_experts(old).gate_up_proj
    assert len(stack.for_cpu) in (0, 4)  # none where this torch has no product with codes
    if why_dequantised(stack.format, stack.in_features, torch.float32) is None:
        assert not any("are dequantised for each product" in reason for reason in what_cpus_do(old))
        rows = torch.randn(1, 128)
        found, plain = stack.for_cpu[1].product(rows), stack.format.dequantise(stack.parts_of(1), torch.float32)  # type: ignore[union-attr]
        torch.testing.assert_close(found, rows @ plain.T, rtol=0.05, atol=0.3)
        assert not torch.allclose(found, stack.for_cpu[0].product(rows), rtol=0.05, atol=0.3)  # type: ignore[union-attr]


def test_formats_that_a_cpu_decodes_are_said() -> None:
    (reason,) = what_cpus_do(packed_model("mixtral", "fp8"))
    assert reason.startswith("12 of 12 linears and stacks of experts are dequantised for each product")


def test_a_text_corrects_experts_by_the_inputs_that_reach_them() -> None:
    texts = [torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def experts_in(model: nn.Module, correct: bool) -> nn.Module:
        """Only the experts are rounded."""
        other = tiny_model("mixtral")
        pack_corrected(other, FORMATS["int4"], texts) if correct else pack_model(other, FORMATS["int4"])
        for layer, own in zip(model.model.layers, other.model.layers, strict=True):  # type: ignore[union-attr, arg-type]
            layer.mlp.experts = own.mlp.experts
        return model

    def loss(found: Tensor, exact: Tensor) -> float:
        return float((found - exact).square().mean())

    with torch.inference_mode():
        exact = tiny_model("mixtral")(texts[0])
        plain, corrected = (experts_in(tiny_model("mixtral"), one) for one in (False, True))
        assert loss(corrected(texts[0]), exact) < loss(plain(texts[0]), exact)
    unreached = tiny_model("mixtral")
    with torch.no_grad():
        unreached.model.layers[0].mlp.gate.weight.zero_()  # type: ignore[union-attr, index, operator]
    pack_corrected(unreached, FORMATS["int4"], texts)
    chosen = unreached.model.layers[0].mlp.gate(torch.randn(1, 1, 16))[1].flatten().tolist()  # type: ignore[union-attr, index, operator]
    stacks = [one.model.layers[0].mlp.experts.down_proj for one in (unreached, plain)]  # type: ignore[union-attr, index]
    for expert in range(4):
        is_plain = torch.equal(stacks[0].parts_of(expert)[0], stacks[1].parts_of(expert)[0])
        assert is_plain == (expert not in chosen)


def test_a_rank_has_its_part_of_the_corrected_experts() -> None:
    texts = [torch.arange(48).view(3, 16)]
    whole, plan, form = tiny_model("mixtral"), Plan(expert=2), FORMATS["int4"]
    values = {name: value.detach() for name, value in whole.named_parameters()}
    pack_corrected(whole, form, texts)
    expected = dict(whole.named_buffers())
    for index in range(2):
        model, cuts = build_part(MODELS["mixtral"], RankPlace(plan, dict.fromkeys(plan.degrees, 0) | {"expert": index}))
        make_room_for_corrected(model, cuts, form)
        packed = corrected_parts(model, cuts, values.__getitem__, form, texts)
        PartValues(model, cuts, values.__getitem__, "cpu", packed).give_all()
        own = {name: value for name, value in model.named_buffers() if ".experts." in name}
        assert len(own) == 8  # two layers of two stacks of two parts
        for name, value in own.items():
            assert torch.equal(value, expected[name][2 * index : 2 * index + 2])
            assert not torch.equal(value, expected[name][2 - 2 * index : 4 - 2 * index])  # the control: others' experts


def test_moments_are_those_of_the_inputs_of_each_expert() -> None:
    model = whole_model("mixtral")
    layer = model.model.layers[0].mlp  # type: ignore[union-attr, index]
    given: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        (found,) = second_moments(model, [layer.experts], [torch.arange(24).view(2, 12)])
        chosen = layer.gate(given[0][None])[1]
        for expert in range(4):
            rows = given[0][(chosen == expert).any(1)]
            gate, up = (rows @ layer.experts.gate_up_proj[expert].T).chunk(2, dim=-1)
            inner = gate.sigmoid() * gate * up
            torch.testing.assert_close(found[2 * expert], rows.T @ rows)
            torch.testing.assert_close(found[2 * expert + 1], inner.T @ inner)


def test_a_bad_expert_is_named() -> None:
    for form in (FORMATS["int4"], RowFp8()):
        model = tiny_model("mixtral")
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[3, 2, 5] = float("inf")  # type: ignore[union-attr, index, operator]
        with pytest.raises(NumbersError, match=r"layers.1.mlp.experts.down_proj\[3\]\[2, 5\] is inf"):
            pack_model(model, form)
