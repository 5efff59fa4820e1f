"""Weights rounded by a calibration text on several ranks: each keeps its part of what one rank makes of the text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving_for_tests import GREEDY, MODELS, serve_all, tiny_model, tokens_of
from torch import nn

from weft.errors import ConfigError
from weft.inspection.parameter_cut import Cut
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import save_folder
from weft.plan import Pipe, Plan, Tensor
from weft.serve.calibration.corrected_codes import corrected_parts, make_room_for_corrected, pack_corrected
from weft.serve.engine import Engine, EngineOptions
from weft.serve.follow_steps import follow_steps
from weft.serve.loading import load_model
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import PartValues, RankPlace, build_part
from weft.serve.scheduling.request import Request
from weft.serve.spec import ServingSpec
from weft.serve.weights.folder_codes import packed_linears
from weft.serve.weights.packed_linear import pack_model
from weft.serve.weights.weight_formats import FORMATS, Grouped

TEXTS = [torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
OPTIONS = EngineOptions(block_size=4, num_blocks=60)


def decoded(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.format.dequantise(one.parts, torch.float64) for name, one in packed_linears(model)}


def part_at(name: str, plan: Plan, coordinates: dict[str, int]) -> tuple[nn.Module, dict[str, Cut]]:
    """A rank's part that is corrected block by block, and the cuts of its parameters."""
    place = RankPlace(plan, dict.fromkeys(plan.degrees, 0) | coordinates)
    values = {one: value.detach() for one, value in tiny_model(name).named_parameters()}
    model, cuts = build_part(MODELS[name], place)
    make_room_for_corrected(model, cuts, FORMATS["int4"])
    packed = corrected_parts(model, cuts, values.__getitem__, FORMATS["int4"], TEXTS)
    PartValues(model, cuts, values.__getitem__, "cpu", packed).give_all()
    return model, cuts


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.full(2)
def test_a_rank_has_its_part_of_the_corrected_weights(name: str) -> None:
    whole, plain = tiny_model(name), tiny_model(name)
    pack_corrected(whole, FORMATS["int4"], TEXTS)
    pack_model(plain, FORMATS["int4"])  # the control: other weights, without a text
    expected, other = decoded(whole), decoded(plain)
    for plan, at in ((Plan(), {}), (Plan(tensor=Tensor(2)), {"x": 1}), (Plan(pipe=Pipe(2)), {"pipe": 0})):
        model, cuts = part_at(name, plan, at)
        found = decoded(model)
        assert len(found) == len(expected) // plan.pipe.degree
        for one, value in found.items():
            assert torch.equal(value, cuts[f"{one}.weight"].take(expected[one])), (plan, one)
        assert any(not torch.equal(value, cuts[f"{one}.weight"].take(other[one])) for one, value in found.items())


def test_what_a_text_cannot_correct_is_refused() -> None:
    model, cuts = build_part(MODELS["llama"], RankPlace(Plan(), dict.fromkeys(Plan().degrees, 0)))
    with pytest.raises(ConfigError, match="corrects int4 and int8 only"):
        make_room_for_corrected(model, cuts, FORMATS["fp8"])


@pytest.mark.processes
def test_ranks_serve_what_one_rank_serves_with_the_text(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model("llama"))  # type: ignore[arg-type]
    (tmp_path / "text").write_text("".join(chr(33 + 7 * index % 28) for index in range(2000)))
    spec = ServingSpec(tokenizer="bytes", weights="int4", calibration=str(tmp_path / "text"))
    requests = [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(3)]
    one = load_model(tmp_path, spec).model.double()
    expected = tokens_of(serve_all(Engine(one, OPTIONS), requests))

    def rank(_: int) -> dict[str, list[int]] | None:
        torch.set_num_threads(1)
        ranks = ServingRanks(Mesh(Plan(tensor=Tensor(2))))
        model = load_model(tmp_path, spec, ranks=ranks).model.double()
        assert {one.format for _, one in packed_linears(model)} <= {Grouped(4, size) for size in (4, 8, 12, 16)}
        if not ranks.is_lead:
            follow_steps(ModelPart(model, OPTIONS, ranks))
            return None
        engine = Engine(model, OPTIONS, ranks)
        found = tokens_of(serve_all(engine, requests))
        engine.close()
        return found

    assert run_local(rank, 2, 240.0)[0] == expected
