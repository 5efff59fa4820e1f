"""Folders in fewer bits: what their tensors stand for; other methods, shapes and damage are refused in words."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_folders_for_tests import CASES, CONFIG, Case, change_config, change_tensors, table, write_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import CheckpointError, ConfigError, WeftError
from weft.models import read_config
from weft.models.hf import FolderWeights
from weft.models.hf_quantisation import read_quantisation
from weft.saved_run import open_source

NAME = "model.layers.0.mlp.up_proj"
NUM_DAMAGES = 6  # for each kind of folder
SHAPES = [(), (0,), (1,), (2,), (64,), (128, 1), (1, 128), (128, 2), (2, 128), (0, 0), (8, 8, 8)]
DTYPES = [torch.int32, torch.int8, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]
VALUES = [None, 0, -1, 3, 4, 8, 2**70, 1.5, "4", "gptq", "group", True, False, [], {}, [1], {"a": 1}, "re:.*"]


def test_a_run_starts_from_the_decoded_weights(tmp_path: Path) -> None:
    for name, case in CASES.items():
        reference = write_folder(tmp_path / name, case)
        source = open_source(tmp_path / name)
        assert source.model == CONFIG
        for parameter, wanted in reference.named_parameters():
            assert torch.equal(source.read(parameter), wanted.float()), (name, parameter)


def test_gptq_zero_points_are_one_more_only_in_the_first_format(tmp_path: Path) -> None:
    """Zero points of 0 borrow from their neighbours in a word, and must give it back."""
    case = Case("gptq", 4, 32, False)
    reference = write_folder(tmp_path, case).get_parameter(f"{NAME}.weight").float()
    stored = FolderWeights(tmp_path, CONFIG).quantised(f"{NAME}.weight")[0]
    assert bool((stored.zero() == 0).any())
    assert torch.equal(stored.read(), reference)
    change_config(tmp_path, quantization_config={**table(case), "checkpoint_format": "gptq_v2"})
    assert not torch.equal(FolderWeights(tmp_path, CONFIG).read(f"{NAME}.weight"), reference)  # the control
    symmetric = tmp_path / "symmetric"
    write_folder(symmetric, CASES["gptq"])
    change_config(symmetric, quantization_config={**table(CASES["gptq"]), "checkpoint_format": "gptq_v2"})
    with pytest.raises(CheckpointError, match="a zero point is 7, not 8; if checkpoint_format is 'gptq' and was"):
        FolderWeights(symmetric, CONFIG).read(f"{NAME}.weight")


def test_what_tools_add_is_read(tmp_path: Path) -> None:
    """Biases of zeros, tensors for activations, zero points of symmetric weights, and the newer name of the format."""
    write_folder(tmp_path / "gptq", CASES["gptq"])
    change_tensors(tmp_path / "gptq", {f"{NAME}.bias": torch.zeros(128, dtype=torch.float16)})
    values = table(CASES["gptq"])
    values["format"] = values.pop("checkpoint_format")
    change_config(tmp_path / "gptq", quantization_config={**values, "dynamic": {"-:lm_head": {}}})
    FolderWeights(tmp_path / "gptq", CONFIG)
    change_tensors(tmp_path / "gptq", {f"{NAME}.bias": torch.ones(128, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match=r"unexpected tensor .*up_proj\.bias"):
        FolderWeights(tmp_path / "gptq", CONFIG)
    twice = {**values, "format": "gptq_v2", "checkpoint_format": "gptq"}
    with pytest.raises(ConfigError, match=r"format = 'gptq_v2' and .*checkpoint_format = 'gptq' differ; leave out"):
        read_quantisation({"quantization_config": twice})
    read_quantisation({"quantization_config": {**twice, "format": "gptq"}})
    write_folder(tmp_path / "int8", CASES["int8"])
    zero = torch.zeros(128, 1, dtype=torch.int8)
    change_tensors(tmp_path / "int8", {f"{NAME}.input_scale": torch.ones(1), f"{NAME}.weight_zero_point": zero})
    FolderWeights(tmp_path / "int8", CONFIG).read(f"{NAME}.weight")
    change_tensors(tmp_path / "int8", {f"{NAME}.weight_zero_point": zero + 1})
    with pytest.raises(CheckpointError, match="says that weights are symmetric, and a zero point is 129, not 128"):
        FolderWeights(tmp_path / "int8", CONFIG).read(f"{NAME}.weight")


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "end", "tensor", "message"),
    [
        ("gptq", "qzeros", None, "qzeros is missing"),
        ("gptq", "scales", torch.ones(3, 128).half(), r"scales is F16 \(3, 128\), and should be .*\(2, 128\)"),
        ("gptq", "scales", torch.ones(2, 128, dtype=torch.int32), r"scales is I32 \(2, 128\)"),
        ("gptq", "qweight", int32(4, 128), r"codes is I32 \(4, 128\), and should be \('I32', \(8, 128\)\)"),
        ("gptq", "scales", torch.full((2, 128), torch.nan).half(), "scales are not finite"),
        ("gptq-order", "g_idx", None, "g_idx is missing"),
        ("gptq-order", "g_idx", int32(64) + 2, "names a group that is not among the 2"),
        ("gptq-order", "g_idx", int32(64) - 1, "names a group that is not among the 2"),
        ("packed", "weight_scale", None, "weight_scale is missing"),
        ("packed", "weight_shape", torch.tensor([128, 63]), r"weight_shape is \[128, 63\], but the config needs"),
        ("packed", "weight_packed", int32(128, 16), r"codes is I32 \(128, 16\)"),
        ("packed-asymmetric", "weight_zero_point", int32(128, 4), r"weight_zero_point is I32 \(128, 4\)"),
        ("packed-asymmetric", "weight_zero_point", None, "weight_zero_point is missing"),
        ("int8", "weight", torch.zeros(64, 64, dtype=torch.int8), r"codes is I8 \(64, 64\)"),
        ("fp8", "weight_scale", torch.ones(2, 2), r"weight_scale is F32 \(2, 2\)"),
        ("fp8", "weight_zero_point", torch.ones(1), "a zero point that is not 0"),
        ("fp8", "weight_global_scale", torch.ones(1), "unexpected tensor"),
        ("gptq", "weight", torch.ones(128, 64), "the second of one"),
        ("int8", "input_scale", torch.ones(1), None),
        ("packed", "input_scale", torch.ones(1), "unexpected tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, end: str, tensor: Tensor | None, message: str | None, tmp_path: Path
) -> None:
    write_folder(tmp_path, CASES[name])
    change_tensors(tmp_path, {f"{NAME}.{end}": tensor})
    if message is None:
        FolderWeights(tmp_path, CONFIG).read(f"{NAME}.weight")
        return
    with pytest.raises(CheckpointError, match=message):
        FolderWeights(tmp_path, CONFIG).read(f"{NAME}.weight")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"quant_method": "awq"}, "quant_method = 'awq' is not read, only 'gptq' and 'compressed-tensors'"),
        ("gptq", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not read"),
        ("gptq", {"quant_method": ["gptq"]}, "is not read"),
        ("gptq", {"bits": 3}, r"quantization_config\.bits"),
        ("gptq", {"bits": "4"}, r"quantization_config\.bits"),
        ("gptq", {"group_size": 0}, "group_size = 0 is neither positive nor -1"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"rotation": "hadamard"}, r"unknown key 'quantization_config\.rotation'"),
        ("gptq", {"dynamic": {".*up_proj": {"bits": 8}}}, r"dynamic gives '\.\*up_proj' other bits"),
        ("packed", {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized' is not read"),
        ("packed", {"format": None}, "format = None is not read"),
        ("packed", {"quantization_status": "frozen"}, "quantization_status = 'frozen'"),
        ("packed", {"transform_config": {"a": 1}}, "transform_config = .* may change the mathematics"),
        ("packed", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config = .* may change"),
        ("packed", {"config_groups": {}}, "config_groups = None is no table|config_groups is empty"),
        ("packed", {"config_groups": {"a": {"weights": None}}}, r"config_groups\.a\.weights = None is no table"),
        ("packed", {"config_groups": {"a": {"weights": {"strategy": "block"}}}}, "strategy"),
        ("packed", {"config_groups": {"a": {"weights": {"strategy": "group"}}}}, "group_size = None is not positive"),
        ("packed", {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, "floats of 4 bits"),
        *(
            ("fp8", {"config_groups": {"a": {"weights": {"type": "float", "group_size": 32, **more}}}}, "of floats, on")
            for more in ({"strategy": "group"}, {})
        ),
    ],
)
def test_other_quantisations_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, CASES[name])
    change_config(tmp_path, quantization_config={**table(CASES[name]), **changes})
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_sizes_of_config_json_are_bounds(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["gptq"])
    change_config(tmp_path, quantization_config={**table(CASES["gptq"]), "group_size": 10**30})
    with pytest.raises(
        CheckpointError, match=r"qzeros is I32 \(2, 8\), and should be \('I32', \(1, 8\)\)|tensors are not"
    ):
        FolderWeights(tmp_path, CONFIG)
    change_config(tmp_path, quantization_config=None)  # a folder without the table
    with pytest.raises(CheckpointError, match="missing from its safetensors files"):
        FolderWeights(tmp_path, CONFIG)
    write_folder(tmp_path / "tied", CASES["gptq"])
    about = json.loads((tmp_path / "tied" / "config.json").read_text())
    about["architectures"], about["model_type"] = ["GPT2LMHeadModel"], "gpt2"
    (tmp_path / "tied" / "config.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="of architecture 'gpt2' is not read"):
        read_config(tmp_path / "tied")


def test_random_damage_is_refused_or_read(tmp_path: Path) -> None:
    """Tensors of other dtypes and shapes, and other values in config.json, end in a weight of its shape or in words."""
    rng, outcomes = random.Random(0), list[str]()
    small = replace(CONFIG, num_hidden_layers=1, vocab_size=8)
    for name, case in CASES.items():
        folder = tmp_path / name
        write_folder(folder, case, small)
        stored = load_file(folder / "model.safetensors")
        for _ in range(NUM_DAMAGES):
            about = json.loads(json.dumps(table(case)))
            is_tensor = rng.random() < 0.3
            if is_tensor:
                ends = [one for one in stored if one.startswith(f"{NAME}.")]
                change = torch.ones(rng.choice(SHAPES)).to(rng.choice(DTYPES)) if rng.random() < 0.8 else None
                change_tensors(folder, {rng.choice(ends): change})
            else:
                inside = rng.choice([about, *about.get("config_groups", {}).values()])
                inside = rng.choice([inside, inside.get("weights", inside)])
                inside[rng.choice([*inside, "new"])] = rng.choice(VALUES)
            change_config(folder, quantization_config=about)
            try:
                found = FolderWeights(folder, read_config(folder)).read(f"{NAME}.weight")
            except WeftError:
                outcomes.append("refused")
            else:
                assert found.shape == (128, 64)
                outcomes.append("read")
            if is_tensor:
                save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert 0.3 * len(outcomes) < outcomes.count("refused") < len(outcomes)
