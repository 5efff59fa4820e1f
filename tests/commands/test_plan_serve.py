"""`weft plan --serve` for GPUs, by the command: folders in fewer bits as the server loads them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands_for_tests import Weft
from quantised_folders_for_tests import CASES, CONFIG, Case, change_config, table, write_folder
from torch import nn

from weft.cluster.hardware import load
from weft.cluster.local_gpus import Gpu, hide_gpus
from weft.models import DecoderConfig, write_config
from weft.plan import Plan
from weft.planner.serving import ServingModel
from weft.planner.serving_speculation import price_speculation
from weft.serve.attention.formats import Loki, save_loki
from weft.serve.engine import Engine, EngineOptions
from weft.serve.loading import load_for_generation
from weft.serve.weights.folder_codes import folder_format

EXPERTS = replace(CONFIG, architecture="mixtral", num_experts=2, num_experts_per_tok=1)
FOLDERS = {  # how a folder is quantised, and its model; weft's format is the folder's own, in groups of 64
    "linears": (Case("gptq", 4, 64), CONFIG),
    "experts": (Case("gptq", 4, 64), EXPERTS),
    **{name: (CASES[name], CONFIG) for name in ("gptq-order", "packed-order", "int8-asymmetric")},
}


def held_bytes(model: nn.Module) -> int:
    return sum(one.numel() * one.itemsize for one in (*model.parameters(), *model.buffers()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_in_fewer_bits_is_priced_with_the_bytes_that_are_loaded(name: str, weft: Weft, tmp_path: Path) -> None:
    case, config = FOLDERS[name]
    write_folder(tmp_path, case, config, experts=config is EXPERTS)
    sizes = ("--requests", 1, "--prompt", 16, "--output", 4, "--json")
    given = ("plan", "--serve", "--model", tmp_path, "--cluster", "h200:1x1", *sizes)
    loaded = load_for_generation(tmp_path, "bytes")[0].to(torch.bfloat16)
    found = weft(*given).json["plans"][0]
    assert found["weight_bytes"] == held_bytes(loaded)
    streamed = weft(*given, "--stream-weights", 1).json["plans"][0]
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=20, stream_weights=1))
    assert engine._part.streamed is not None
    assert streamed["streaming"]["host_bytes"] == sum(engine._part.streamed.block_bytes)
    if config is EXPERTS:  # --weights rounds experts too
        assert weft(*given, "--weights", "int4").json["plans"][0]["weight_bytes"] < found["weight_bytes"]


def test_the_table_is_whole_at_80_columns(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = weft("plan", "--serve", "--model", "llama3-70b", "--cluster", "h100:2x8", "--requests", 8).out
    table = shown.partition("tokens a step")[0].splitlines()
    assert "…" not in shown
    assert max(map(len, table)) <= 80
    assert any("data 2 × pipe 2 × x 4" in line for line in table), "layouts are not broken"


def test_groups_of_neighbours_are_not_decoded(tmp_path: Path) -> None:
    about = table(replace(CASES["gptq-order"], group=128))
    weights = table(replace(CASES["packed-order"], is_symmetric=True))["config_groups"]["group_0"]["weights"]
    write_config(tmp_path, CONFIG)
    for changes, expected in (
        ({}, None),
        ({"desc_act": False}, "int4-128"),
        ({"static_groups": True}, "int4-128"),
        ({"group_size": -1}, "int4-128"),  # a single group
        ({"desc_act": False, "group_size": 8}, None),  # their ranges take too many bytes
    ):
        change_config(tmp_path, quantization_config={**about, **changes})
        assert folder_format(tmp_path) == expected, changes
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for order, expected in (("group", None), ("dynamic", None), (True, None), ("weight", "int4"), (None, "int4")):
        groups = {"group_0": {"weights": {**weights, "actorder": order}}}
        change_config(tmp_path, quantization_config={**packed, "config_groups": groups})
        assert folder_format(tmp_path) == expected, order


def test_a_draft_model_in_fewer_bits_has_experts_that_are_decoded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 100_000, "num_hidden_layers": 1, "num_attention_heads": 32}
    config = DecoderConfig("mixtral", 1000, num_experts=2, num_experts_per_tok=2, **sizes)  # type: ignore[arg-type]
    model = ServingModel(replace(config, num_hidden_layers=2), load("h200:1x1"), Plan(), "bf16")
    write_config(tmp_path, config)
    change_config(tmp_path, quantization_config=table(Case("gptq", 4, 64)))
    found = price_speculation(model, str(tmp_path), 1, 100)
    change_config(tmp_path, quantization_config=None)
    plain = price_speculation(model, str(tmp_path), 1, 100)
    assert plain.tokens_per_second <= found.tokens_per_second < 1.1 * plain.tokens_per_second  # by attention alone


@pytest.mark.parametrize("number", [1, 2])
def test_a_gpu_that_the_catalog_does_not_know_is_refused_in_words(weft: Weft, number: int) -> None:
    with hide_gpus([Gpu("NVIDIA GeForce RTX 4090", 24 << 30, (8, 9))] * number):
        refused = weft("plan", "--serve", "--model", "llama3-8b")
    assert refused.status == 2
    assert "is of NVIDIA GeForce RTX 4090, whose rates are not known; measure them" in refused.err
    more, one = (" --ranks 2", ":1x1") if number == 1 else ("", "")  # a link needs two ranks
    assert f"(weft bench machine --device cuda{more} --write machine.toml) and give --cluster machine.toml{one}," in (
        refused.err
    )
    known = weft("bench", "machine", "--device", "cuda", *more.split(), "--write", "nowhere/machine.toml")
    assert "the folder nowhere does not exist" in known.err  # the command has these options


def test_axes_and_replicas_that_read_weights_together_are_refused(weft: Weft, tmp_path: Path) -> None:
    path = tmp_path / "axes"
    save_loki(path, Loki(torch.eye(64).expand(12, 12, 64, 64), identity="any"))
    sizes = ("--requests", 2, "--prompt", 16, "--output", 4, "--json")
    given = ("plan", "--serve", "--cluster", "a100-40:1x2", "--model", "mpt-125m", *sizes, "--cache")
    found = weft(*given, f"loki={path}", "--stream-weights", 2).json
    assert {one["plan"]["data"] for one in found["plans"]} == {1}
    assert any("cannot compare them with the file of --cache" in reason for reason in found["refused"])
    assert {one["plan"]["data"] for one in weft(*given, f"loki={path}").json["plans"]} == {1, 2}
    assert {one["plan"]["data"] for one in weft(*given, "int4", "--stream-weights", 2).json["plans"]} == {1, 2}


def test_experts_in_fewer_bits_are_refused_without_bf16(weft: Weft, tmp_path: Path) -> None:
    write_config(tmp_path, EXPERTS)
    sizes = ("--requests", 1, "--prompt", 16, "--output", 4)
    given = ("plan", "--serve", "--model", tmp_path, "--cluster", "v100-32:1x1", *sizes)
    assert weft(*given).status == 0
    refused = weft(*given, "--weights", "int4")
    assert refused.status == 2
    assert "not priced for models with experts in fp32, in which a V100 SXM 32GB serves" in refused.err
    change_config(tmp_path, quantization_config=table(Case("gptq", 4, 64)))
    assert weft(*given).status == 0  # its experts are decoded when they are read


def test_drafts_of_early_layers_are_priced_on_one_device(weft: Weft, tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    sizes = ("--requests", 1, "--prompt", 16, "--output", 4, "--json")
    given = ("plan", "--serve", "--model", tmp_path, "--speculate", "layers=1", *sizes)
    assert weft(*given, "--cluster", "h200:1x1").json["speculation"]["kind"] == "layers=1"
    assert "--speculate is priced on one device; plan for one" in weft(*given, "--cluster", "h200:1x2").err
