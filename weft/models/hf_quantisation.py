"""How the weights of a Hugging Face folder are quantised, as its config.json says: the table `quantization_config`.

Two methods are read, of safetensors files only:

    gptq                 formats gptq and gptq_v2, 4 or 8 bits
    compressed-tensors   formats pack-quantized, int-quantized and float-quantized

Reading is strict, as that of the rest of config.json is: a key that may change the mathematics is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import ConfigError
from weft.schema import build_dataclass

TABLE = "quantization_config"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
ADVICE = "give the folder of the model that is not quantised, with --weights for fewer bits"

# These say how the codes were found and where to compute with them, which does not change what they stand for.
_GPTQ_HARMLESS = {
    *("quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "lm_head", "meta"),
    *("model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "backend", "use_exllama", "version"),
    *("exllama_config", "disable_exllama", "max_input_length", "batch_size", "modules_in_block_to_quantize"),
    *("module_name_preceding_first_block", "block_name_to_quantize", "cache_block_outputs", "pad_token_id"),
    *("use_cuda_fp16", "model_seqlen", "act_group_aware", "mse", "mock_quantization", "v2", "v2_alpha", "hyb_act"),
}
_COMPRESSED_HARMLESS = {"quant_method", "ignore", "version", "global_compression_ratio", "run_compressed"}
_ORDERED = ("group", "dynamic", "true")  # values of actorder that group other inputs than neighbours


@dataclass(frozen=True)
class Scheme:
    """How some weights are quantised. `group_size` inputs share a scale; None: all inputs of an output do. `has_order`:
    inputs are grouped by importance, not with their neighbours.
    """

    bits: int
    is_float: bool
    is_symmetric: bool
    group_size: int | None
    has_order: bool = False


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a folder are quantised. `notes` are sentences on what weft leaves out.

    `adds_one`: zero points are stored as one less than they are (format gptq, the first one).
    """

    method: Literal["gptq", "compressed-tensors"]
    schemes: tuple[Scheme, ...]
    adds_one: bool = False
    has_order: bool = False  # a tensor may state groups by importance
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages: the method and its bits."""
        bits = sorted({scheme.bits for scheme in self.schemes})
        return f"{self.method}, {' and '.join(str(one) for one in bits)} bits"


@dataclass(frozen=True)
class _GptqTable:
    bits: Literal[4, 8]
    group_size: int
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    pack_dtype: Literal["int32", "torch.int32"] = "int32"
    is_marlin_format: Literal[False] = False
    dynamic: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _WeightsTable:
    num_bits: Literal[4, 8] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: Literal["tensor", "channel", "group"] | None = None
    dynamic: Literal[False] = False


def read_quantisation(raw: Mapping[str, Any]) -> Quantisation | None:
    """Returns what the table of a config.json says, or None. Raises ConfigError for what weft does not read."""
    table = raw.get(TABLE)
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ConfigError(f"{TABLE} = {table!r} is not a table")
    method = table.get("quant_method")
    if method == "gptq":
        return _gptq(table)
    if method == "compressed-tensors":
        return _compressed(table)
    raise ConfigError(f"{TABLE}.quant_method = {method!r} is not read, only 'gptq' and 'compressed-tensors'; {ADVICE}")


def _gptq(table: Mapping[str, Any]) -> Quantisation:
    values = {key: value for key, value in table.items() if value is not None and key not in _GPTQ_HARMLESS}
    if "format" in values:  # the newer name
        form = values.pop("format")
        if values.setdefault("checkpoint_format", form) != form:
            raise ConfigError(
                f"{TABLE}.format = {form!r} and {TABLE}.checkpoint_format = {values['checkpoint_format']!r} differ; "
                f"leave out the one that is wrong"
            )
    found = build_dataclass(_GptqTable, values, TABLE)
    changed = [key for key in found.dynamic or {} if not key.startswith("-:")]  # "-:" leaves modules as they are
    if changed:
        raise ConfigError(f"{TABLE}.dynamic gives {changed[0]!r} other bits or groups, which is not read; {ADVICE}")
    if found.group_size != -1 and found.group_size < 1:
        raise ConfigError(f"{TABLE}.group_size = {found.group_size} is neither positive nor -1, one group for a row")
    group_size = None if found.group_size == -1 else found.group_size
    is_moved = found.desc_act and not table.get("static_groups")  # static groups are of neighbours in any order
    scheme = Scheme(found.bits, False, found.sym, group_size, is_moved and group_size is not None)
    return Quantisation("gptq", (scheme,), found.checkpoint_format == "gptq", found.desc_act)


def _compressed(table: Mapping[str, Any]) -> Quantisation:
    values = {key: one for key, one in table.items() if one not in (None, {}, []) and key not in _COMPRESSED_HARMLESS}
    groups = values.pop("config_groups", None)
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(f"{TABLE}.config_groups = {groups!r} is no table of groups; {ADVICE}")
    form, status = values.pop("format", None), values.pop("quantization_status", "compressed")
    formats = [group.get("format") or form for group in groups.values()] or [form]
    wrong = [one for one in formats if one not in FORMATS]
    if wrong:
        raise ConfigError(f"{TABLE}.format = {wrong[0]!r} is not read, only {', '.join(FORMATS)}; {ADVICE}")
    if status != "compressed":
        raise ConfigError(f"{TABLE}.quantization_status = {status!r} is not read, only 'compressed'; {ADVICE}")
    notes = []
    if values.pop("kv_cache_scheme", None) is not None:
        notes.append("the folder's quantisation of the key-value cache is left out: keys and values stay as they are")
    if any(group.get("input_activations") or group.get("output_activations") for group in groups.values()):
        notes.append("the folder's quantisation of activations is left out: only its weights are quantised")
    if values:
        key = sorted(values)[0]
        raise ConfigError(f"{TABLE}.{key} = {values[key]!r} is unknown and may change the mathematics; {ADVICE}")
    schemes = tuple(_scheme(group, f"{TABLE}.config_groups.{name}") for name, group in groups.items())
    if not schemes:
        raise ConfigError(f"{TABLE}.config_groups is empty; remove {TABLE} if no weight is quantised")
    return Quantisation("compressed-tensors", schemes, has_order=True, notes=tuple(notes))


def _scheme(group: Mapping[str, Any], path: str) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"{path}.weights = {weights!r} is no table; {ADVICE}")
    harmless = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
    values = {key: one for key, one in weights.items() if one is not None and key not in harmless}
    found = build_dataclass(_WeightsTable, values, f"{path}.weights")
    if found.type == "float" and found.num_bits != 8:
        raise ConfigError(f"{path}.weights: floats of {found.num_bits} bits are not read, only of 8; {ADVICE}")
    has_groups = found.strategy == "group" or (found.strategy is None and (found.group_size or 0) > 0)
    if has_groups and (found.group_size or 0) < 1:
        raise ConfigError(f"{path}.weights.group_size = {found.group_size} is not positive, and strategy is 'group'")
    if has_groups and found.type == "float":
        raise ConfigError(
            f"{path}.weights.strategy = 'group' is not read of floats, only 'channel' and 'tensor'; {ADVICE}"
        )
    has_order = has_groups and str(weights.get("actorder")).lower() in _ORDERED
    group_size = found.group_size if has_groups else None
    return Scheme(found.num_bits, found.type == "float", found.symmetric, group_size, has_order)
