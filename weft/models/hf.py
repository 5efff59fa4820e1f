"""Reads and writes Hugging Face folders: config.json and safetensors weights, without transformers.

Reading is strict. A config key that is neither used nor known to be harmless is an error, because it might change the
mathematics. A tensor that is missing, unexpected or of another shape is an error before anything is loaded. Pickled
weights are never opened. Writing streams shards into a temporary folder, which is renamed when it is complete. GPT-2's
projections are stored transposed in these folders (Conv1D); this is the only file that handles that.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import CheckpointError, ConfigError
from weft.models.decoder import DecoderConfig
from weft.models.gpt2 import GPT2Config
from weft.models.init import LanguageConfig, LanguageModel, ModelConfig, build
from weft.schema import build_dataclass

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD_NAME = "lm_head.weight"

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2",
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DECODER_KEYS = (*SIZES, "max_position_embeddings", "rms_norm_eps")
GPT2_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
# Keys that config.json must contain, because transformers' defaults for them differ between architectures.
REQUIRED_KEYS = {
    "llama": DECODER_KEYS,
    "mistral": (*DECODER_KEYS, "num_key_value_heads", "sliding_window"),
    "qwen2": (*DECODER_KEYS, "num_key_value_heads"),
    "qwen3": (*DECODER_KEYS, "num_key_value_heads", "head_dim"),
    "gpt2": GPT2_SIZES,
}
OPTIONAL_KEYS = {
    "llama": ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    "mistral": ("head_dim", "tie_word_embeddings"),
    "qwen2": ("head_dim", "tie_word_embeddings"),
    "qwen3": ("attention_bias", "tie_word_embeddings"),
    "gpt2": ("n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop", "tie_word_embeddings"),
}
# Keys for which only this value is supported: any other value is another network.
DECODER_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
QWEN_FIXED = {**DECODER_FIXED, "use_sliding_window": False}
GPT2_FIXED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
FIXED_VALUES: dict[str, dict[str, Any]] = {
    "llama": DECODER_FIXED,
    "mistral": DECODER_FIXED,
    "qwen2": QWEN_FIXED,
    "qwen3": QWEN_FIXED,
    "gpt2": GPT2_FIXED,
}
# Keys that do not affect the network: provenance, tokens, dtype, the cache, heads that a causal model does not have.
HARMLESS_KEYS = {
    *("architectures", "model_type", "transformers_version", "_name_or_path", "_attn_implementation_autoset"),
    *("torch_dtype", "dtype", "use_cache", "initializer_range", "pretraining_tp", "gradient_checkpointing"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "task_specific_params", "reorder_and_upcast_attn", "n_ctx"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_past", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
}
DECODER_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
# These have no effect without use_sliding_window.
QWEN_WINDOW_KEYS = ("sliding_window", "max_window_layers", "layer_types")

# Buffers in old files; they follow from the config and are ignored.
LEGACY_BUFFERS = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|self_attn\.rotary_emb\.inv_freq)$")
CONV1D_WEIGHTS = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


def read_config(folder: Path) -> LanguageConfig:
    """Read the config of a Hugging Face folder. Raises a ConfigError that names a key that weft does not support."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(f"{path}: architectures = {names!r} is not supported; weft reads {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[names[0]]
    try:
        values = _mapped_values(raw, architecture)
        if architecture == "gpt2":
            return build_dataclass(GPT2Config, values)
        return build_dataclass(DecoderConfig, {**values, **_rope_values(raw)})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_config(folder: Path, config: LanguageConfig) -> None:
    """Write config.json, with the rotary keys that transformers 4 and 5 both read."""
    path = folder / CONFIG_FILE
    if path.exists():
        raise CheckpointError(f"{path} exists; choose a new folder or remove it")
    architecture = config.architecture
    keys = (*REQUIRED_KEYS[architecture], *OPTIONAL_KEYS[architecture])
    table: dict[str, Any] = {
        "architectures": [name for name, ours in ARCHITECTURES.items() if ours == architecture],
        "model_type": architecture,
        # Not known here; transformers' defaults are tokens of another tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        **FIXED_VALUES[architecture],
        **{key: getattr(config, key) for key in keys},
    }
    table.pop("partial_rotary_factor", None)
    if isinstance(config, DecoderConfig):
        scaling = config.rope_scaling
        table["rope_theta"] = config.rope_theta
        table["rope_scaling"] = None if scaling is None else {"rope_type": "llama3", **asdict(scaling)}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_weights(folder: Path, model: LanguageModel) -> None:
    """Copy the weights of a folder into a model, in the model's dtype and on its device."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights(folder, model.config):
            parameters[name].copy_(tensor)


def weights(folder: Path, config: LanguageConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of a folder by weft's name, one at a time, without a tied head."""
    read = weight_reader(folder, config)
    return ((name, read(name)) for name in parameter_shapes(config))


def weight_reader(folder: Path, config: LanguageConfig) -> Callable[[str], Tensor]:
    """Returns a function that reads a parameter's tensor from the folder by its name. Names and shapes of all tensors
    are checked at once. If the folder has a tied head, it must equal the embedding.
    """
    stored: dict[str, tuple[Path, Any, str]] = {}  # weft's name -> file, its handle, the name inside
    for file, listed in _weight_files(folder).items():
        handle = _open(file)
        _check_listed(file, listed, set(handle.keys()))
        for raw_name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
            name = _weft_name(raw_name, config)
            if LEGACY_BUFFERS.search(raw_name):
                continue
            if name in stored:
                raise CheckpointError(f"{file}: {raw_name} is the tensor {name} a second time; remove one of them")
            stored[name] = (file, handle, raw_name)
    _check_stored(folder, config, stored)

    def read(name: str) -> Tensor:
        _, handle, raw_name = stored[name]
        return _transposed(name, handle.get_tensor(raw_name), config)

    if (
        config.tie_word_embeddings
        and HEAD_NAME in stored
        and not torch.equal(read(HEAD_NAME), read(config.embedding_name))
    ):
        file, _, raw_name = stored[HEAD_NAME]
        raise CheckpointError(
            f"{file}: {raw_name} differs from the embedding, but tie_word_embeddings = true; "
            f"set it to false in {CONFIG_FILE}"
        )
    return read


def save_folder(folder: Path, model: LanguageModel) -> None:
    """Write a whole model as a folder that transformers loads."""
    write_weights(folder, model.config, model.named_parameters())


def write_weights(
    folder: Path,
    config: LanguageConfig,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 4 * 1024**3,
    files: Mapping[str, Path] | None = None,
) -> None:
    """Write a folder that transformers loads: config.json and the weights. `tensors` has weft's names, in any order.
    `files` maps names in the folder to other files to copy there.

    At most one shard is in memory. A tied head may be given and is left out. The folder appears when it is complete.
    """
    with new_folder(folder) as partial:
        write_config(partial, config)
        for name, path in (files or {}).items():
            shutil.copyfile(path, partial / name)
        shapes = parameter_shapes(config)
        shard: dict[str, Tensor] = {}
        shard_of: dict[str, int] = {}
        num_shards, shard_bytes, total_bytes = 1, 0, 0
        for name, tensor in tensors:
            if config.tie_word_embeddings and name == HEAD_NAME:
                continue
            _check_tensor(folder, name, tensor, shapes, shard_of)
            if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
                _save(partial, num_shards, shard)
                shard, shard_bytes, num_shards = {}, 0, num_shards + 1
            shard[name] = _transposed(name, tensor.detach().cpu(), config).contiguous()
            shard_of[name] = num_shards
            shard_bytes, total_bytes = shard_bytes + tensor.nbytes, total_bytes + tensor.nbytes
        missing = [name for name in shapes if name not in shard_of]
        if missing:
            raise CheckpointError(f"{folder}: {_some(missing)} missing from the tensors to write; give every parameter")
        _save(partial, num_shards, shard)
        _name_shards(partial, shard_of, num_shards, total_bytes)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every parameter of a model, without a tied head."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in build(config).named_parameters()}


def _mapped_values(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the keys that weft uses. Raises ConfigError for a key that it would have to ignore."""
    required, optional, fixed = REQUIRED_KEYS[architecture], OPTIONAL_KEYS[architecture], FIXED_VALUES[architecture]
    for key in required:
        if key not in raw or (raw[key] is None and key != "sliding_window"):
            raise ConfigError(f"key '{key}' is missing or null; an architecture {architecture!r} needs it")
    inert = {"qwen2": QWEN_WINDOW_KEYS, "qwen3": QWEN_WINDOW_KEYS}.get(architecture, ())
    rope = () if architecture == "gpt2" else DECODER_ROPE_KEYS
    used = {*required, *optional, *rope, *inert} | HARMLESS_KEYS
    for key, value in raw.items():
        if key in fixed and value is not None and value != fixed[key]:
            raise ConfigError(
                f"{key} = {value!r} is not supported in architecture {architecture!r}, only {fixed[key]!r}"
            )
        if key not in used and key not in fixed and value is not None:
            raise ConfigError(
                f"key '{key}' = {value!r} is unknown for architecture {architecture!r} and may change the mathematics; "
                f"remove it only if you know that it does not"
            )
    layer_types = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(f"layer_types = {layer_types!r} is not supported, only 'full_attention' in every layer")
    if raw.get("model_type", architecture) != architecture:
        raise ConfigError(
            f"model_type = {raw['model_type']!r} contradicts architectures; it should be {architecture!r}"
        )
    values = {key: raw[key] for key in (*required, *optional) if raw.get(key) is not None}
    if architecture == "gpt2":  # transformers' defaults for dropout
        values = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, **values}
    return {**values, "architecture": architecture}


def _rope_values(raw: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling from the keys of transformers 4 (both at the top) or 5 (rope_parameters)."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old:
        raise ConfigError("rope_parameters and rope_scaling are both given; remove one of them")
    key, values = ("rope_parameters", new) if new else ("rope_scaling", old or {})
    if not isinstance(values, dict):
        raise ConfigError(f"{key} = {values!r} is not a table")
    values = dict(values)
    theta = raw.get("rope_theta")
    inner_theta = values.pop("rope_theta", theta)
    if theta is not None and inner_theta != theta:
        raise ConfigError(f"rope_theta = {theta!r} contradicts {key}.rope_theta = {inner_theta!r}; remove one of them")
    legacy_kind = values.pop("type", "default")
    kind = values.pop("rope_type", legacy_kind)
    if values.get("partial_rotary_factor") == 1.0:
        del values["partial_rotary_factor"]
    if kind not in ("default", "llama3"):
        raise ConfigError(f"{key}.rope_type = {kind!r} is not supported; weft knows 'default' and 'llama3'")
    if kind == "default" and values:
        raise ConfigError(f"{key} = {values!r} is not supported with rope_type 'default', which takes rope_theta only")
    # 10000 is the default of all these architectures.
    return {
        "rope_theta": 10000.0 if inner_theta is None else inner_theta,
        "rope_scaling": values if kind == "llama3" else None,
    }


def read_json(path: Path, wanted: str = "a folder with config.json and safetensors files") -> dict[str, Any]:
    """Returns a JSON object. Raises CheckpointError if there is none; `wanted` is what to give instead."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give {wanted}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds {type(table).__name__}, not a JSON object")
    return table


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The weight files of a folder, and the tensors that the index lists in each; None if there is no index."""
    if (folder / SINGLE_FILE).exists():  # transformers also prefers it
        return {folder / SINGLE_FILE: None}
    index = folder / INDEX_FILE
    if not index.exists():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        advice = f"; {pickled[0]} is pickled and never opened, convert it to safetensors first" if pickled else ""
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{advice}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no table 'weight_map' of tensor names to file names")
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise CheckpointError(f"{index}: tensor {name} points to {file!r}, which is no safetensors file name in it")
        if not (folder / file).exists():
            raise CheckpointError(f"{folder / file} does not exist, but {INDEX_FILE} places tensor {name} in it")
        listed = files.setdefault(folder / file, set())
        assert listed is not None
        listed.add(name)
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}; fetch it again") from None


def _check_listed(file: Path, listed: set[str] | None, found: set[str]) -> None:
    if listed is not None and listed != found:
        difference = sorted(listed ^ found)
        raise CheckpointError(f"{file} and {INDEX_FILE} disagree on {_some(difference)}; fetch both again")


def _check_stored(folder: Path, config: LanguageConfig, stored: Mapping[str, tuple[Path, Any, str]]) -> None:
    shapes = parameter_shapes(config)
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise CheckpointError(f"{folder}: {_some(missing)} missing from its safetensors files; is it another model?")
    if config.tie_word_embeddings:
        shapes[HEAD_NAME] = shapes[config.embedding_name]
    for name, (file, handle, raw_name) in stored.items():
        if name not in shapes:
            raise CheckpointError(f"{file}: unexpected tensor {raw_name}; the config has no such parameter")
        shape = tuple(handle.get_slice(raw_name).get_shape())
        expected = shapes[name][::-1] if _is_transposed(name, config) else shapes[name]
        if shape != expected:
            raise CheckpointError(f"{file}: {raw_name} has shape {shape}, but the config needs {expected}")


def _check_tensor(
    folder: Path, name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], seen: Mapping[str, int]
) -> None:
    if name not in shapes:
        raise CheckpointError(f"{folder}: unexpected tensor {name} to write; the config has no such parameter")
    if name in seen:
        raise CheckpointError(f"{folder}: tensor {name} is given twice")
    if tuple(tensor.shape) != shapes[name]:
        raise CheckpointError(f"{folder}: {name} has shape {tuple(tensor.shape)}, but the config needs {shapes[name]}")


def _weft_name(raw_name: str, config: LanguageConfig) -> str:
    """The name of a tensor in weft. Files of a bare GPT2Model lack the prefix `transformer.`, which is added."""
    if isinstance(config, GPT2Config) and not raw_name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{raw_name}"
    return raw_name


def _is_transposed(name: str, config: LanguageConfig) -> bool:
    return isinstance(config, GPT2Config) and CONV1D_WEIGHTS.search(name) is not None


def _transposed(name: str, tensor: Tensor, config: LanguageConfig) -> Tensor:
    return tensor.t() if _is_transposed(name, config) else tensor


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside the target. It is renamed to the target if the block succeeds, else removed."""
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; choose a new one or remove it")
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save(folder: Path, number: int, shard: dict[str, Tensor]) -> None:
    save_file(shard, folder / _shard_name(number), metadata={"format": "pt"})  # transformers requires this metadata


def _name_shards(folder: Path, shard_of: Mapping[str, int], num_shards: int, total_bytes: int) -> None:
    """Rename the shards to their final names, which contain the number of shards, and write the index."""
    if num_shards == 1:
        (folder / _shard_name(1)).rename(folder / SINGLE_FILE)
        return
    final = {n: f"model-{n:05d}-of-{num_shards:05d}.safetensors" for n in range(1, num_shards + 1)}
    for number, name in final.items():
        (folder / _shard_name(number)).rename(folder / name)
    weight_map = {name: final[number] for name, number in sorted(shard_of.items())}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(names[:3])}{more}"
