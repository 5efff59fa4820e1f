"""Decodes on a CPU: products of one row as a vector, the number of threads, and ranks that multiply alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from parallel_serving_for_tests import LIMIT_SECONDS, SCORED, part_of
from serve_for_tests import OPTIONS
from serving_for_tests import CONFIGS, GREEDY, tiny_model
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import save_folder
from weft.plan import Context, Pipe, Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.engine import Engine
from weft.serve.follow_steps import follow_steps
from weft.serve.http.run_server import engine_options
from weft.serve.loading import load_model
from weft.serve.measurement.cpu_threads import fastest_threads
from weft.serve.model import paged_model
from weft.serve.model.linear import PlainLinear
from weft.serve.model.model_part import EngineOptions, ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import build_part, read_part
from weft.serve.scheduling.request import Request
from weft.serve.spec import ServingSpec
from weft.serve.weights import cpu_products, packed_experts, packed_linear
from weft.serve.weights.cpu_products import (
    HalfWeight,
    RowWeight,
    has_product,
    is_faster,
)
from weft.serve.weights.fast_path import Place
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, make_room
from weft.serve.weights.weight_formats import FP8, RowInt8

STEP = 2.0**-8  # of numbers in bf16


def made(layer: nn.Linear, norm: nn.Module | None = None, takes_vectors: bool = True) -> PlainLinear:
    linear = PlainLinear(layer, Place("cpu", layer.weight.dtype), norm)
    linear.choose(takes_vectors)
    return linear


def layer_of(dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    return nn.Linear(96, 61, bias=bias).to(dtype).requires_grad_(False)


def vectors_used(function: object) -> int:
    """How many products with vectors a call makes."""
    with patch.object(torch, "mv", wraps=torch.mv) as mv, patch.object(torch, "addmv", wraps=torch.addmv) as addmv:
        function()  # type: ignore[operator]
    return int(mv.call_count + addmv.call_count)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_exact_but_for_their_rounding(dtype: torch.dtype, bias: bool) -> None:
    layer, norm = layer_of(dtype, bias), nn.LayerNorm(96).to(dtype).requires_grad_(False)
    row, residual = torch.randn(1, 96).to(dtype), torch.randn(1, 61).to(dtype)
    wide = layer.weight.double()
    added = 0 if layer.bias is None else layer.bias.double()
    exact = row.double() @ wide.T
    ways = {
        "product": (lambda: made(layer).product(row, None), exact),
        "linear": (lambda: made(layer)(row), exact + added),
        "with a norm": (lambda: made(layer, norm)(row), norm(row).double() @ wide.T + added),
        "with a residual": (lambda: made(layer)(row, residual.clone()), residual.double() + exact + added),
    }
    for name, (call, expected) in ways.items():
        assert vectors_used(call) == 1, name
        assert call().dtype == dtype
        assert float((call().double() - expected).abs().max()) <= 2 * STEP * float(expected.abs().max()), name
    row[0, 7] = 4.0
    without = (row * (torch.arange(96) != 7)).double() @ wide.T + added  # the control: one input is left out
    assert float((made(layer)(row).double() - without).abs().max()) > 2 * STEP * float(without.abs().max())


def test_several_rows_and_other_linears_are_products_of_matrices() -> None:
    layer, rows = layer_of(torch.bfloat16), torch.randn(2, 96).bfloat16()
    assert vectors_used(lambda: made(layer)(rows)) == 0
    assert vectors_used(lambda: made(layer, takes_vectors=False)(rows[:1])) == 0


def test_the_faster_product_is_found_once() -> None:
    seconds = iter([1.0, 2.0, 2.0, 1.0])
    is_faster.cache_clear()
    with patch.object(cpu_products, "least_seconds", lambda compute: (compute(), next(seconds))[1]):
        assert [is_faster(64, torch.bfloat16, threads) for threads in (1, 2, 1, 2)] == [True, False, True, False]
    is_faster.cache_clear()


def logits_of_decode(takes: bool) -> tuple[Tensor, int]:
    """Logits of a decode after a prompt in bf16, and how many products with vectors the decode made."""
    with patch.object(paged_model, "takes_vectors", lambda layer: takes):
        engine = Engine(tiny_model("llama").bfloat16(), EngineOptions(block_size=4, num_blocks=8))
    engine.add(Request("one", (3, 1, 4, 1, 5), 4, GREEDY))
    engine.step()
    found: list[Tensor] = []
    logits = engine._part.logits
    with patch.object(engine._part, "logits", lambda *given: (found.append(out := logits(*given)), out)[1]):
        used = vectors_used(engine.step)
    return found[0][0].double(), used


def test_an_engine_decodes_one_request_by_vectors() -> None:
    with_vectors, used = logits_of_decode(True)
    plain, none = logits_of_decode(False)
    model = tiny_model("llama")
    assert (used, none) == (4 * len(model.model.layers) + 1, 0)
    largest = float(plain.abs().max())
    assert float((with_vectors - plain).abs().max()) <= 8 * STEP * largest
    assert float((with_vectors.roll(1, -1) - plain).abs().max()) > 8 * STEP * largest  # the control


def test_a_folder_is_served_in_the_precision_that_is_asked_for(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model("llama"))
    for precision, dtype in ((None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for weights in (None, "int8"):
            spec = ServingSpec(tokenizer="bytes", weights=weights, precision=precision)
            model = load_model(tmp_path, spec).model
            assert {one.dtype for one in model.parameters()} == {dtype}
    with pytest.raises(ConfigError, match="--precision bf16 is for CPUs; a GPU computes in bf16 if it can"):
        load_model(tmp_path, ServingSpec(tokenizer="bytes", precision="bf16"), "cuda")
    with pytest.raises(ConfigError, match="--precision fp8 is unknown; give fp32 or bf16"):
        ServingSpec(precision="fp8")


def test_a_draft_model_computes_in_the_precision_that_is_asked_for(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model("llama"))
    for precision, dtype in ((None, torch.float32), ("bf16", torch.bfloat16)):
        options = replace(OPTIONS, precision=precision, speculate=str(tmp_path))
        loaded = load_model(tmp_path, options)
        draft = engine_options(options, loaded, "cpu").speculate
        assert isinstance(draft, nn.Module)
        assert {one.dtype for one in draft.parameters()} == {dtype}


def test_other_dtypes_are_not_measured() -> None:
    with patch.object(paged_model, "takes_vectors", side_effect=AssertionError):
        for model in (tiny_model("llama"), tiny_model("llama").double()):
            Engine(model, EngineOptions(block_size=4, num_blocks=8))
        with pytest.raises(AssertionError):  # the control
            Engine(tiny_model("llama").half(), EngineOptions(block_size=4, num_blocks=8))


@pytest.mark.processes
def test_ranks_with_the_same_blocks_multiply_alike() -> None:
    """Each measures for itself: vectors are used where all found them faster."""

    def rank(index: int) -> list[list[bool | None]]:
        torch.set_num_threads(1)
        found = []
        for answers in ((True, True), (True, False)):
            ranks = ServingRanks(Mesh(Plan(context=Context(2))))
            with patch.object(paged_model, "takes_vectors", lambda layer, answer=answers[index]: answer):
                model = part_of("llama", ranks.place).bfloat16()
                part = ModelPart(model, EngineOptions(block_size=4, num_blocks=8), ranks)
            found.append([one.for_row == "vector" for block in part.paged.blocks for one in block.linears])
        return found

    first, second = run_local(rank, 2, LIMIT_SECONDS)
    assert first == second
    assert [set(one) for one in first] == [{True}, {False}]


@pytest.mark.processes
@pytest.mark.skipif(not has_product(RowWeight), reason="this torch has no products of bytes for this CPU")
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
        make_room(model, RowInt8())
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


MEASURED = ((4, 16), (64, 1), (16, 0))  # rows that ranks 0 and 1 find
PLANS = (Plan(expert=2), Plan(context=Context(2)), Plan(tensor=TensorDegrees(2)), Plan(data=2), Plan(pipe=Pipe(2)))


def rows_on_rank(mesh: Mesh, measured: int) -> list[int]:
    """The most rows of each weight's product with codes, on a rank that measured so many."""
    ranks = ServingRanks(mesh)
    model = part_of("mixtral", ranks.place, "int4").float()
    arranged = HalfWeight(measured, None) if measured else None  # nothing is multiplied
    patches = [patch.object(module, "arranged", lambda *given: arranged) for module in (packed_linear, packed_experts)]
    with patches[0], patches[1]:
        part = ModelPart(model, EngineOptions(block_size=4, num_blocks=8), ranks)
        first = _max_rows(part)
        part.take_weights(model)  # arranges weights again
    assert _max_rows(part) == first
    return first


def _max_rows(part: ModelPart) -> list[int]:
    linears = [linear.layer for block in part.paged.blocks for linear in block.linears]
    stacks = [one for one in part.paged.model.modules() if isinstance(one, PackedStack)]
    assert len(stacks) == 2 * len(part.paged.blocks)
    return [one.max_rows for one in (*linears, *stacks) if isinstance(one, PackedLinear | PackedStack)]


@pytest.mark.processes
def test_ranks_with_the_same_blocks_use_codes_for_as_many_rows() -> None:
    def rank(index: int) -> list[list[int]]:
        torch.set_num_threads(1)
        return [rows_on_rank(Mesh(plan), rows[index]) for plan in PLANS for rows in MEASURED]

    found = iter(zip(*run_local(rank, 2, LIMIT_SECONDS), strict=True))
    for plan in PLANS:
        for measured in MEASURED:
            used = [set(one) for one in next(found)]
            is_split = plan.pipe.degree > 1  # stages hold other blocks, and need not agree
            assert used == ([{one} for one in measured] if is_split else [{min(measured)}] * 2), plan.describe_axes()


def test_the_fastest_number_of_threads_is_found() -> None:
    seconds = {1: 1.0, 2: 0.6, 4: 0.59, 8: 0.4, 12: 0.9}
    assert fastest_threads(12, seconds.__getitem__) == 8
    assert fastest_threads(4, seconds.__getitem__) == 2  # four gain too little
    assert fastest_threads(1, seconds.__getitem__) == 1
