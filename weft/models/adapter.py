"""Reads and writes LoRA's updates in PEFT's format: adapter_config.json and adapter_model.safetensors, without PEFT.

PEFT stores A and B of the linear `model.layers.0.self_attn.q_proj` as
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in] and `….lora_B.weight` [out, rank]. Options
of PEFT that change the mathematics and that weft does not have (DoRA, PiSSA, ranks by pattern, biases) are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from weft.architectures import ModelConfig
from weft.architectures.lora import Lora, is_end_of
from weft.errors import CheckpointError, ConfigError
from weft.models.hf import new_folder, open_safetensors, refuse_integers
from weft.models.hf_config import read_json
from weft.models.tuning import Read, is_adapter
from weft.schema import build_dataclass, to_table

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_USED = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
# Keys for which only these values are supported: any other value is another network. A key may also be null.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others change the model's own weights when an adapter is loaded.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({},)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"), (None,)),
    **dict.fromkeys(("alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config"), (None,)),
    **dict.fromkeys(("velora_config", "monteclora_config"), (None,)),
}
# Keys that do not affect the network: provenance, how other keys' values are initialised, and where it computes.
_HARMLESS = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
}


def write_adapter(folder: Path, config: ModelConfig, lora: Lora, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the updates of a model as a folder that PEFT loads. `tensors` has A and B by weft's names."""
    found = {_PREFIX + f"{name}.weight": tensor.detach().cpu().contiguous() for name, tensor in tensors}
    table = {
        **{key: _FIXED[key][0] for key in ("peft_type", "bias", "modules_to_save")},
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _modules(found) if isinstance(lora.targets, str) else list(lora.targets),
        "fan_in_fan_out": config.architecture == "gpt2",  # transformers stores its weights as [in, out]
    }
    with new_folder(folder) as partial:
        (partial / CONFIG_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        save_file(found, partial / WEIGHTS_FILE, metadata={"format": "pt"})


def read_adapter_table(folder: Path) -> dict[str, Any]:
    """Returns what an adapter's config says, as keys of the table `[lora]`."""
    path = folder / CONFIG_FILE
    raw = read_json(path, f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    for key in sorted(raw, key=lambda name: name != "peft_type"):  # another kind of adapter is refused as such
        value = raw[key]
        if value is None or key in _USED or key in _HARMLESS:
            continue
        if key not in _FIXED:
            raise ConfigError(
                f"{path}: key '{key}' = {value!r} is unknown and may change the mathematics; null is fine, so set "
                f"it to null if it does not"
            )
        if value not in _FIXED[key] and value not in ([], {}):
            fine = " or ".join(json.dumps(one) for one in _FIXED[key])
            raise ConfigError(f"{path}: {key} = {value!r} is not supported, only {fine}")
    values = {key: value for key, value in raw.items() if value is not None}
    table = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    found = {key: values.get(name, default) for (key, name), default in zip(table.items(), (8, 8, 0.0), strict=True)}
    lora = build_dataclass(Lora, {**found, "targets": _targets(folder, raw)}, "lora")
    alpha = lora.alpha * math.sqrt(lora.rank) if values.get("use_rslora") else lora.alpha  # divided by the root there
    return {**found, "alpha": alpha, "targets": to_table(lora.targets)}


def _targets(folder: Path, raw: Mapping[str, Any]) -> list[str]:
    """Returns lora.targets of an adapter. Where its config has more than a list of names, these are the whole names of
    those that have weights in its file.
    """
    path, excluded, layers = folder / CONFIG_FILE, raw.get("exclude_modules"), raw.get("layers_to_transform")
    targets: Any = raw.get("target_modules")
    is_list = isinstance(targets, list) and all(isinstance(one, str) for one in targets)
    if not is_list and not isinstance(targets, str):
        raise ConfigError(f"{path}: target_modules = {targets!r} is neither a list of names nor a regular expression")
    if is_list and not excluded and layers in (None, []):
        return sorted(targets)
    handle = open_safetensors(adapter_weights(folder))
    found = _modules(handle.keys())
    wanted = Lora(targets=targets if isinstance(targets, str) else tuple(targets))
    for name in found:
        is_whole = is_list and name in targets  # whatever its layer is
        is_chosen = wanted.is_target(name) and (not is_list or is_whole or _is_in_layers(name, layers, raw))
        if not is_chosen or (excluded and _is_excluded(name, excluded)):
            raise ConfigError(
                f"{path} leaves {name} out, which has an update in {WEIGHTS_FILE}; correct target_modules, "
                f"exclude_modules and layers_to_transform"
            )
    return found


def _is_in_layers(name: str, layers: Any, raw: Mapping[str, Any]) -> bool:
    """Is a module in a layer that layers_to_transform has? layers_pattern names the list of layers."""
    if layers in (None, []):
        return True
    given = raw.get("layers_pattern") or []
    patterns = [given] if isinstance(given, str) else given
    searches = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    match = next(filter(None, (re.match(search, name) for search in searches)), None)
    return match is not None and int(match[1]) in (layers if isinstance(layers, list) else [layers])


def _is_excluded(name: str, excluded: Any) -> bool:
    if isinstance(excluded, str):
        return re.fullmatch(excluded, name) is not None
    return any(is_end_of(str(one), name) for one in excluded)


def _modules(names: Iterable[str]) -> list[str]:
    """Returns the modules whose updates have these names in a file of PEFT."""
    return sorted({re.sub(r"\.lora_[AB]\.weight$", "", name.removeprefix(_PREFIX)) for name in names})


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
    handle = open_safetensors(path)
    stored = {name.removeprefix(_PREFIX).removesuffix(".weight"): name for name in handle.keys()}  # noqa: SIM118
    wanted = {name: tuple(shape) for name, shape in shapes.items() if is_adapter(name)}
    if other := sorted(stored.keys() ^ wanted.keys()):
        raise CheckpointError(f"{path} and the model with [lora] differ in {other[0]}; is it of another model?")
    for name, shape in wanted.items():
        found = tuple(handle.get_slice(stored[name]).get_shape())
        if found != shape:
            raise CheckpointError(f"{path}: {stored[name]} has shape {found}, and the model with [lora] needs {shape}")
        refuse_integers(path, stored[name], str(handle.get_slice(stored[name]).get_dtype()))

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
