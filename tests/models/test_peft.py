"""Adapters of PEFT: those that weft reads give PEFT's logits, and all others are refused by the key that differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving_for_tests import tiny_model
from torch import nn

from weft.architectures.lora import Lora
from weft.errors import ConfigError, WeftError
from weft.models import adapter as adapters
from weft.models import save_folder
from weft.models.adapter import CONFIG_FILE, WEIGHTS_FILE, write_adapter
from weft.models.tuning import LoraLinear, add_lora, is_adapter
from weft.serve.model.adapters import merge_adapter

NAMES = ["q_proj", "down_proj"]
READ: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled by the root of the rank": {"use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 2},
    "ends of names": {"target_modules": ["0.self_attn.v_proj", "mlp.up_proj"]},
    "a whole name": {"target_modules": ["model.layers.1.self_attn.o_proj"]},
    "an expression": {"target_modules": r".*layers\.1\..*(q|k)_proj"},
    "all": {"target_modules": "all-linear"},
    "without some": {"target_modules": NAMES, "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "without an expression": {"target_modules": r".*_proj", "exclude_modules": r".*mlp.*"},
    "a layer": {"layers_to_transform": 1},
    "layers of a list": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "a whole name in no layer": {
        "target_modules": ["model.layers.0.mlp.gate_proj", "q_proj"],
        "layers_to_transform": 1,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "init_lora_weights = 'pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights = 'pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "init_lora_weights = 'olora'": {"init_lora_weights": "olora"},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 3]},
    "use_dora = True": {"use_dora": True},
    "bias = 'lora_only'": {"bias": "lora_only"},
    "rank_pattern": {"rank_pattern": {"down_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"down_proj": 2}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "layer_replication": {"layer_replication": [(0, 1), (0, 2)]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    save_folder(folder, tiny_model("llama"))  # type: ignore[arg-type]
    return folder


def write_peft(base: Path, folder: Path, options: dict[str, Any]) -> torch.Tensor:
    """Write an adapter by PEFT, and return the logits that PEFT computes with it after it has read it."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    torch.manual_seed(0)
    given = {"r": 3, "lora_alpha": 7, "target_modules": NAMES, "task_type": "CAUSAL_LM", **options}
    made = get_peft_model(model(), LoraConfig(**given))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.3)
    made.save_pretrained(str(folder))
    with torch.no_grad():
        out: torch.Tensor = PeftModel.from_pretrained(model(), str(folder)).eval()(torch.arange(9)[None]).logits
    return out


def own_logits(folder: Path) -> torch.Tensor:
    model: nn.Module = tiny_model("llama")
    merge_adapter(model, folder)
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(9)[None])
    return out


@pytest.mark.full  # peft takes two seconds to import
@pytest.mark.parametrize("name", READ)
def test_an_adapter_of_peft_gives_its_logits(name: str, base: Path, tmp_path: Path) -> None:
    wanted = write_peft(base, tmp_path / "adapter", READ[name])
    table = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    for key, value in READ[name].items():
        if key == "target_modules" and isinstance(value, list):  # PEFT writes a set
            assert set(table[key]) == set(value)
        else:
            assert table[key] == value or value == "all-linear"
    torch.testing.assert_close(own_logits(tmp_path / "adapter"), wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        plain = tiny_model("llama")(torch.arange(9)[None])
    assert (plain - wanted).abs().max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize("message", REFUSED)
def test_other_adapters_of_peft_are_refused_by_name(message: str, base: Path, tmp_path: Path) -> None:
    write_peft(base, tmp_path / "adapter", REFUSED[message])
    with pytest.raises(ConfigError, match=f"{CONFIG_FILE}: {message}.*only "):
        own_logits(tmp_path / "adapter")


@pytest.mark.full
def test_weft_knows_each_key_of_peft() -> None:
    from peft import LoraConfig

    known = adapters._USED | adapters._HARMLESS | adapters._FIXED.keys()
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= known


def write_own(folder: Path, **keys: Any) -> Path:
    """An adapter by weft, with other values in its config."""
    model, lora = tiny_model("llama"), Lora(rank=2, targets=("q_proj",))
    add_lora(model, lora)
    write_adapter(folder, model.config, lora, [(n, p) for n, p in model.named_parameters() if is_adapter(n)])  # type: ignore[arg-type]
    table = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**table, **keys}))
    return folder


def test_a_key_that_nobody_knows_is_refused_unless_it_is_null(tmp_path: Path) -> None:
    own_logits(write_own(tmp_path / "null", use_newest=None))
    with pytest.raises(ConfigError, match="key 'use_newest' = 3 is unknown and may change the mathematics; null is"):
        own_logits(write_own(tmp_path / "three", use_newest=3))
    with pytest.raises(ConfigError, match=r"leaves model\.layers\.0\.self_attn\.q_proj out, which has an update"):
        own_logits(write_own(tmp_path / "less", layers_to_transform=[1]))
    with pytest.raises(ConfigError, match=r"peft_type = 'LOHA' is not supported, only"):
        own_logits(write_own(tmp_path / "loha", alpha=8, peft_type="LOHA"))
    with pytest.raises(ConfigError, match="target_modules = None is neither a list of names nor"):
        own_logits(write_own(tmp_path / "none", target_modules=None))


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    folder = write_own(tmp_path / "adapter")
    weights = {name: tensor.int() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    save_file(weights, folder / WEIGHTS_FILE)
    with pytest.raises(WeftError, match=r"lora_A\.weight has dtype I32, and weights are floating-point numbers"):
        own_logits(folder)


def test_targets_are_names_expressions_or_all(tmp_path: Path) -> None:
    def chosen(targets: Any, **options: Any) -> list[str]:
        model = tiny_model("llama")
        add_lora(model, Lora(targets=targets, **{"rank": 2, **options}))
        return [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]

    assert chosen(("model.layers.1.self_attn.q_proj",)) == ["model.layers.1.self_attn.q_proj"]
    assert chosen(("0.mlp.up_proj",)) == ["model.layers.0.mlp.up_proj"]
    assert chosen(r".*\.1\..*q_proj") == ["model.layers.1.self_attn.q_proj"]
    assert len(chosen("all-linear")) == 14
    for targets, message in (
        (r".*\.9\..*", "matches the whole name of no linear of a block, such as 'model.layers.0"),
        ("q_proj", "matches the whole name of no linear"),
        ("(", "is no regular expression"),
        (("layers.7.q_proj",), "no linear of a block is named 'layers.7.q_proj'"),
    ):
        with pytest.raises(ConfigError, match=message):
            chosen(targets)
    with pytest.raises(ConfigError, match=r"lora\.rank = 1000000 is above [0-9]+, the largest rank that an update"):
        chosen(("q_proj",), rank=10**6)
