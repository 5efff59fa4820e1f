"""Reads and writes LoRA's updates in PEFT's format: adapter_config.json and adapter_model.safetensors, without PEFT.

PEFT stores A and B of the linear `model.layers.0.self_attn.q_proj` as
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in] and `….lora_B.weight` [out, rank]. Options
of PEFT that change the mathematics and that weft does not have (DoRA, rsLoRA, ranks by pattern, biases) are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.architectures import ModelConfig
from weft.architectures.lora import Lora
from weft.errors import CheckpointError, ConfigError
from weft.models.hf import new_folder
from weft.models.hf_config import read_json
from weft.models.lora import Read, is_adapter
from weft.schema import build_dataclass

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Keys for which only this value is supported: any other value is another network.
_FIXED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "layer_replication": None,
    "exclude_modules": None,
    "lora_bias": False,
    "use_qalora": False,
    "target_parameters": None,
    "trainable_token_indices": None,
}


def write_adapter(folder: Path, config: ModelConfig, lora: Lora, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the updates of a model as a folder that PEFT loads. `tensors` has A and B by weft's names."""
    found = {_PREFIX + f"{name}.weight": tensor.detach().cpu().contiguous() for name, tensor in tensors}
    table = {
        **{key: value for key, value in _FIXED.items() if key in ("peft_type", "bias", "modules_to_save")},
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "fan_in_fan_out": config.architecture == "gpt2",  # transformers stores its weights as [in, out]
    }
    with new_folder(folder) as partial:
        (partial / CONFIG_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        save_file(found, partial / WEIGHTS_FILE, metadata={"format": "pt"})


def read_adapter_table(folder: Path) -> dict[str, Any]:
    """Returns what an adapter's config says, as keys of the table `[lora]`."""
    path = folder / CONFIG_FILE
    raw = read_json(path, f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    for key, value in _FIXED.items():
        if raw.get(key) not in (None, value) and raw.get(key) != [] and raw.get(key) != {}:
            raise ConfigError(f"{path}: {key} = {raw[key]!r} is not supported, only {value!r}")
    targets = raw.get("target_modules")
    if not isinstance(targets, list):
        raise ConfigError(f"{path}: target_modules = {targets!r} is not supported, only a list of names")
    names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    found = {key: raw[name] for key, name in names.items() if name in raw}
    return {**found, "targets": sorted(str(target) for target in targets)}


def adapter_weights(folder: Path) -> Path:
    """Returns the file of an adapter's weights; raises CheckpointError if there is none."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = folder / "adapter_model.bin"
        advice = f"; {pickled.name} is pickled and never opened" if pickled.is_file() else ""
        raise CheckpointError(f"{path} does not exist{advice}; give an adapter in safetensors")
    return path


def adapter_reader(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Read:
    """Returns a function that reads A or B by weft's name. `shapes` are those of all parameters of the model."""
    path = adapter_weights(folder)
    try:
        handle = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}; fetch it again") from None
    stored = {name.removeprefix(_PREFIX).removesuffix(".weight"): name for name in handle.keys()}  # noqa: SIM118
    wanted = {name: tuple(shape) for name, shape in shapes.items() if is_adapter(name)}
    if other := sorted(stored.keys() ^ wanted.keys()):
        raise CheckpointError(f"{path} and the model with [lora] differ in {other[0]}; is it of another model?")
    for name, shape in wanted.items():
        found = tuple(handle.get_slice(stored[name]).get_shape())
        if found != shape:
            raise CheckpointError(f"{path}: {stored[name]} has shape {found}, and the model with [lora] needs {shape}")

    def read(name: str) -> Tensor:
        tensor: Tensor = handle.get_tensor(stored[name])
        return tensor

    return read


def with_adapter(given: Lora, table: Mapping[str, Any]) -> Lora:
    """Returns `given`, the value of the table `[lora]`, with what the adapter says that it starts from, if any."""
    if given.adapter is None:
        return given
    found = build_dataclass(Lora, {**read_adapter_table(Path(given.adapter)), "adapter": given.adapter}, "lora")
    adapter_weights(Path(given.adapter))
    for key in ("rank", "alpha", "targets"):
        if key in table and getattr(given, key) != getattr(found, key):
            raise ConfigError(f"lora.{key} = {table[key]}, and the adapter has {getattr(found, key)}; leave it out")
    return replace(found, dropout=given.dropout if "dropout" in table else found.dropout)
