"""Folders with weights in fewer bits (GPTQ, compressed-tensors): the engine computes what their codes stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantised_folders_for_tests import CASES, CONFIG, change_tensors, write_folder
from serving_for_tests import GREEDY, make_engine, serve_all, tokens_of
from torch import nn

from weft.errors import CheckpointError, ConfigError
from weft.inspection.parameter_cut import Cut
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models.hf import FolderWeights
from weft.plan import Plan, Tensor
from weft.serve.engine import Engine, EngineOptions
from weft.serve.follow_steps import follow_steps
from weft.serve.loading import load_for_generation, load_model
from weft.serve.model.adapters import merge_adapter
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.model.streamed_model import StreamedModel
from weft.serve.scheduling.request import Request
from weft.serve.spec import ServingSpec
from weft.serve.weights.folder_codes import MAX_ERROR, format_of, packed_linears, parts_of
from weft.serve.weights.weight_formats import FORMATS, Grouped

DECODED = {"gptq-order", "packed-order", "int8-asymmetric"}
ROUNDED = {"gptq-asymmetric", "gptq-v2-asymmetric", "packed-asymmetric"}  # least values, to 16 bits
TEXT = torch.tensor([[5, 60, 7, 81, 200, 3]])


BYTES = ServingSpec(tokenizer="bytes")


def requests() -> list[Request]:
    return [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(3)]


def served(model: nn.Module) -> dict[str, list[int]]:
    return tokens_of(serve_all(make_engine(model), requests()))


@pytest.mark.parametrize("name", CASES)
def test_a_folder_in_fewer_bits_gives_the_tokens_of_its_weights(name: str, tmp_path: Path) -> None:
    reference, said = write_folder(tmp_path, CASES[name]), list[str]()
    model = load_for_generation(tmp_path, "bytes", say=said.append)[0].double()
    packed = dict(packed_linears(model))
    assert len(packed) == (0 if name in DECODED else 14)
    assert any("are dequantised" in text for text in said) == (name in DECODED)
    assert any("activations" in text for text in said) == (CASES[name].method in ("int8", "fp8"))
    with torch.inference_mode():
        found, expected = model(TEXT), reference(TEXT)
    error = 0.005 if name in ROUNDED else 1e-6 if name == "int8-asymmetric" else 1e-9  # the latter is float32
    torch.testing.assert_close(found, expected, rtol=0, atol=error)
    assert served(model) == served(reference)


def test_each_weight_is_within_the_stated_part_of_its_scale(tmp_path: Path) -> None:
    for name in CASES:
        case = replace(CASES[name], has_order=False)
        reference = write_folder(tmp_path / name, case)
        folder = FolderWeights(tmp_path / name, CONFIG)
        for parameter in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
            (stored,), wanted = folder.quantised(parameter), reference.get_parameter(parameter).detach()
            assert torch.equal(stored.read(), wanted.float())
            whole = Cut.whole(wanted.shape)
            form = format_of(stored, whole)
            if isinstance(form, str):  # zero points of 8 bits
                assert name == "int8-asymmetric"
                assert "16 bits are too few" in form
                continue
            errors = (form.dequantise(parts_of(stored, whole, form), torch.float64) - wanted).abs()
            scale = stored.scale().double().repeat_interleave(wanted.shape[1] // stored.scale().shape[1], dim=1)
            assert float((errors / scale).max()) <= (MAX_ERROR if not case.is_symmetric else 1e-12)
            assert bool(errors.any()) == (name in ROUNDED | {"packed-order"})


@pytest.mark.processes
def test_ranks_take_their_part_of_the_codes(tmp_path: Path) -> None:
    names = ["gptq", "packed-8", "fp8", "gptq-order"]
    expected = {name: served(write_folder(tmp_path / name, CASES[name])) for name in names}

    def rank(_: int) -> list[tuple[dict[str, list[int]] | None, list[str]]]:
        torch.set_num_threads(1)
        found = []
        for name in names:
            ranks = ServingRanks(Mesh(Plan(tensor=Tensor(2))))
            model = load_model(tmp_path / name, BYTES, ranks=ranks).model.double()
            formats = sorted({str(one.format) for _, one in packed_linears(model)})
            if not ranks.is_lead:
                follow_steps(ModelPart(model, EngineOptions(block_size=4, num_blocks=60), ranks))
                found.append((None, formats))
                continue
            engine = Engine(model, EngineOptions(block_size=4, num_blocks=60), ranks)
            found.append((tokens_of(serve_all(engine, requests())), formats))
            engine.close()
        return found

    lead, other = run_local(rank, 2, 240.0)
    assert [tokens for tokens, _ in lead] == [expected[name] for name in names]
    assert [formats for _, formats in lead] == [formats for _, formats in other]
    assert lead[0][1] == [str(Grouped(4, 32))]
    assert lead[1][1] == [str(Grouped(8, 32)), str(Grouped(8, 64))]  # 32 of 64 inputs of a row are here
    assert not lead[3][1]


def test_groups_of_more_inputs_become_several_with_the_same_scale(tmp_path: Path) -> None:
    config = replace(CONFIG, intermediate_size=512, num_hidden_layers=1)
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = write_folder(tmp_path, replace(CASES["gptq"], group=256), config).get_parameter(name).detach()
    (stored,) = FolderWeights(tmp_path, config).quantised(name)
    form = format_of(stored, Cut.whole(wanted.shape))
    assert form == Grouped(4, 128)
    assert torch.equal(form.dequantise(parts_of(stored, Cut.whole(wanted.shape), form), torch.float64), wanted)


def test_linears_that_are_computed_as_one_have_one_format(tmp_path: Path) -> None:
    reference, said = write_folder(tmp_path, CASES["gptq"]), list[str]()
    owner = "model.layers.0.self_attn.q_proj"
    order = torch.arange(64, dtype=torch.int32).flip(0) // 32
    change_tensors(tmp_path, {f"{owner}.g_idx": order})
    stored = FolderWeights(tmp_path, CONFIG).read(f"{owner}.weight")
    with torch.no_grad():
        reference.get_parameter(f"{owner}.weight").copy_(stored)
    model = load_for_generation(tmp_path, "bytes", say=said.append)[0].double()
    assert len(dict(packed_linears(model))) == 11
    assert [text.split()[0] for text in said] == ["1", "2"]
    assert "neighbouring" in said[0]
    assert "as one linear" in said[1]
    assert served(model) == served(reference)


@pytest.mark.parametrize("name", ["gptq", "fp8-tensor"])
def test_codes_are_read_to_host_memory(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, CASES[name])
    plain = load_for_generation(tmp_path, "bytes")[0]
    streamed = load_model(tmp_path, replace(BYTES, stream_weights=1)).model
    assert isinstance(streamed, StreamedModel)
    assert len(dict(packed_linears(streamed))) == 14
    engine = make_engine(streamed, stream_weights=1)
    assert tokens_of(serve_all(engine, requests())) == served(plain)


def test_weights_that_are_asked_for_are_rounded_again_and_adapters_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["gptq-v2"])
    said = list[str]()
    model = load_model(tmp_path, replace(BYTES, weights="int4"), say=said.append).model
    assert {one.format for _, one in packed_linears(model)} == {FORMATS["int4"]}
    assert said == ["the folder's weights (gptq, 8 bits) are dequantised and rounded a second time, as --weights asks"]
    with pytest.raises(ConfigError, match="adapter cannot be merged into weights in fewer bits"):
        merge_adapter(model, tmp_path)


def test_experts_in_fewer_bits_are_decoded(tmp_path: Path) -> None:
    config = replace(CONFIG, architecture="mixtral", num_experts=2, num_experts_per_tok=1)
    write_folder(tmp_path, CASES["gptq"], config, experts=True)
    said = list[str]()
    model = load_for_generation(tmp_path, "bytes", say=said.append)[0]
    assert len(dict(packed_linears(model))) == 8  # those of attention
    assert said == [
        "2 weights of the folder in fewer bits are dequantised: only linears of attention and MLPs are kept in fewer "
        "bits, to torch.float32"
    ]
    stacked = FolderWeights(tmp_path, config).read("model.layers.0.mlp.experts.gate_up_proj")
    assert torch.equal(model.get_parameter("model.layers.0.mlp.experts.gate_up_proj"), stacked)


def test_scales_that_16_bits_cannot_hold_are_decoded(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["packed"])
    said = list[str]()
    name = "model.layers.1.self_attn.o_proj"
    scale = torch.full((64, 2), 2.0**15, dtype=torch.bfloat16)  # 8 of them are too many
    change_tensors(tmp_path, {f"{name}.weight_scale": scale})
    model = load_for_generation(tmp_path, "bytes", say=said.append)[0]
    assert said == [
        "1 weights of the folder in fewer bits are dequantised: 16 bits are too few for their scales and zero points, "
        "to torch.float32"
    ]
    assert name not in dict(packed_linears(model))
    assert float(model.get_parameter(f"{name}.weight").detach().abs().max()) == 8 * 2.0**15


def test_float8_codes_that_are_no_number_are_refused(tmp_path: Path) -> None:
    """Kernels would make numbers of them."""
    write_folder(tmp_path, CASES["fp8"])
    name = "model.layers.1.self_attn.o_proj.weight"
    codes = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)
    codes.view(torch.uint8)[3, 5] = 0xFF
    change_tensors(tmp_path, {name: codes})
    with pytest.raises(CheckpointError, match="some of its codes are NaN; the folder is damaged"):
        load_for_generation(tmp_path, "bytes")
