"""Folders that everybody downloads: their config.json is read, or refused for a reason that is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_configs_for_tests import READ, REFUSED, gpt2, llama, qwen

from weft.errors import ConfigError
from weft.models import LanguageConfig, read_config
from weft.models.hf import parameter_shapes

SIZES = (64, 32, 48, 4, 4, 2, 128)


def read(folder: Path, table: dict[str, Any]) -> LanguageConfig:
    (folder / "config.json").write_text(json.dumps(table))
    return read_config(folder)


def test_there_are_sixty() -> None:
    assert len(READ) >= 60
    architectures = {table["architectures"][0] for _, table in READ.values()}
    assert len(architectures) == 8


@pytest.mark.parametrize("name", READ)
def test_a_published_config_is_read_with_the_sizes_of_its_model(name: str, tmp_path: Path) -> None:
    millions, table = READ[name]
    shapes = parameter_shapes(read(tmp_path, table)).values()
    numel = 0
    for shape in shapes:
        product = 1
        for size in shape:
            product *= size
        numel += product
    assert numel / 1e6 == pytest.approx(millions, rel=0.006)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_is_refused_for_a_true_reason(name: str, tmp_path: Path) -> None:
    reason, table = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            qwen("Qwen2", *SIZES, use_mrope=True),
            "use_mrope = True is not supported .* 'qwen2', only False",
        ),
        (llama(*SIZES, rope_interleaved=True), "rope_interleaved = True is not supported .* only False"),
        (llama(*SIZES, add_cross_attention=True), "add_cross_attention = True is not supported .* only False"),
        (llama(*SIZES, residual_scale=2.0), "key 'residual_scale' = 2.0 is unknown .* null is fine"),
        (
            qwen("Qwen2", *SIZES, use_sliding_window=True, max_window_layers=3),
            "use_sliding_window = True is not supported .* only False, or max_window_layers of all 4 layers",
        ),
    ],
)
def test_a_value_with_an_effect_is_refused_beside_the_one_without(
    table: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, table)


def test_a_window_of_no_layer_and_a_factor_of_one_are_no_other_network(tmp_path: Path) -> None:
    plain = read(tmp_path, qwen("Qwen2", *SIZES))
    assert read(tmp_path, qwen("Qwen2", *SIZES, use_sliding_window=True, max_window_layers=4)) == plain
    assert read(tmp_path, qwen("Qwen2", *SIZES, rope_scaling={"type": "linear", "factor": 1.0})) == plain


def test_another_name_of_the_same_function_is_no_other_network(tmp_path: Path) -> None:
    from transformers.activations import ACT2FN

    values = torch.linspace(-4, 4, 33)
    for name, usual, table in (
        ("swish", "silu", {**qwen("Qwen2", *SIZES), "hidden_act": "swish"}),
        ("gelu_pytorch_tanh", "gelu_new", gpt2(768, 10, 12, activation_function="gelu_pytorch_tanh")),
    ):
        torch.testing.assert_close(ACT2FN[name](values), ACT2FN[usual](values))
        read(tmp_path, table)
