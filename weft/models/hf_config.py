"""Reads and writes the config.json of a Hugging Face folder, without transformers.

Reading is strict. A key that is neither used nor known to be harmless is an error, because it might change the
mathematics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.architectures import DecoderConfig, GPT2Config, LanguageConfig, RecurrentConfig, TransformerConfig
from weft.errors import CheckpointError, ConfigError
from weft.models.hf_quantisation import TABLE as QUANTISATION
from weft.models.hf_quantisation import Quantisation, read_quantisation
from weft.schema import build_dataclass

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
END_TOKENS, DOCUMENT_END = "eos_token_id", "weft_end_token"  # keys of generation_config.json; the second is weft's own
RECURRENT_TYPE = "weft_recurrent"  # the model_type of LSTM and GRU models, which transformers does not have

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPT2LMHeadModel": "gpt2",
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DECODER_KEYS = (*SIZES, "max_position_embeddings", "rms_norm_eps")
QWEN_EXPERT_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
)
GPT2_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
# Keys that config.json must contain, because transformers' defaults for them differ between architectures.
REQUIRED_KEYS = {
    "llama": DECODER_KEYS,
    "mistral": (*DECODER_KEYS, "num_key_value_heads", "sliding_window"),
    "qwen2": (*DECODER_KEYS, "num_key_value_heads"),
    "qwen3": (*DECODER_KEYS, "num_key_value_heads", "head_dim"),
    "mixtral": (*DECODER_KEYS, "num_key_value_heads", "sliding_window", "num_experts", "num_experts_per_tok"),
    "qwen2_moe": (*DECODER_KEYS, "num_key_value_heads", *QWEN_EXPERT_KEYS, "shared_expert_intermediate_size"),
    "qwen3_moe": (*DECODER_KEYS, "num_key_value_heads", *QWEN_EXPERT_KEYS),
    "gpt2": GPT2_SIZES,
}
# Keys of weft with another name in the config.json of an architecture. Both names are read.
RENAMED_KEYS = {"mixtral": {"num_experts": "num_local_experts"}}
OTHER_NAMES = {"num_local_experts": "num_experts"}
OPTIONAL_KEYS = {
    "llama": ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    "mistral": ("head_dim", "tie_word_embeddings"),
    "qwen2": ("head_dim", "tie_word_embeddings"),
    "qwen3": ("attention_bias", "tie_word_embeddings"),
    "mixtral": ("head_dim", "tie_word_embeddings"),
    "qwen2_moe": ("head_dim", "mlp_only_layers", "tie_word_embeddings"),
    "qwen3_moe": ("head_dim", "attention_bias", "mlp_only_layers", "tie_word_embeddings"),
    "gpt2": ("n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop", "tie_word_embeddings"),
}
# Keys for which only this value is supported: any other value is another network.
DECODER_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
QWEN_FIXED = {**DECODER_FIXED, "use_sliding_window": False}
EXPERTS_FIXED = {"output_router_logits": False}  # with it, transformers adds a loss of the router
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
    "mixtral": {**DECODER_FIXED, **EXPERTS_FIXED, "router_jitter_noise": 0.0},
    "qwen2_moe": {**QWEN_FIXED, **EXPERTS_FIXED, "qkv_bias": True},
    "qwen3_moe": {**QWEN_FIXED, **EXPERTS_FIXED},
    "gpt2": GPT2_FIXED,
}
# The same, for keys that weft does not write: options of other programs and of other architectures.
COMMON_FIXED = {
    **dict.fromkeys(("use_mrope", "rope_interleaved", "is_encoder_decoder", "add_cross_attention"), False),
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
UNWRITTEN_FIXED: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "use_qk_norm": False},
    "qwen3_moe": {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
}
# Other names of transformers for the same function.
ACTIVATIONS = ("hidden_act", "activation_function")
OTHER_FUNCTIONS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}
# Keys that do not affect the network: provenance, tokens, dtype, the cache, heads that a causal model does not have.
HARMLESS_KEYS = {
    *("architectures", "model_type", "transformers_version", "_name_or_path", "_attn_implementation_autoset"),
    *("torch_dtype", "dtype", "use_cache", "initializer_range", "pretraining_tp", "gradient_checkpointing"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "task_specific_params", "reorder_and_upcast_attn", "n_ctx"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_past", "summary_activation"),
    *("router_aux_loss_coef", "_experts_implementation"),  # no loss of the router without output_router_logits
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("id2label", "label2id", "_num_labels", "num_labels", "problem_type", "finetuning_task", "is_decoder"),
    *("n_special", "predict_special_tokens", "tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id"),
    *("max_sequence_length", "is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
    *("torchscript", "tie_encoder_decoder", "use_bfloat16", "tf_legacy_loss", "cross_attention_hidden_size"),
    # How text is generated, which a request says.
    *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "max_length"),
    *("min_length", "early_stopping", "length_penalty", "repetition_penalty", "diversity_penalty", "output_scores"),
    *("no_repeat_ngram_size", "num_return_sequences", "return_dict_in_generate", "remove_invalid_values"),
}
DECODER_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
# These have no effect without use_sliding_window.
QWEN_WINDOW_KEYS = ("sliding_window", "max_window_layers", "layer_types")


def read_config(folder: Path) -> LanguageConfig:
    """Read the config of a Hugging Face folder. Raises a ConfigError that names a key that weft does not support."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    try:
        if raw.get("model_type") == RECURRENT_TYPE:
            return build_dataclass(RecurrentConfig, {key: value for key, value in raw.items() if key != "model_type"})
        names = raw.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            raise ConfigError(f"architectures = {names!r} is not supported; weft reads {', '.join(ARCHITECTURES)}")
        architecture = ARCHITECTURES[names[0]]
        if read_quantisation(raw) is not None and architecture == "gpt2":
            raise ConfigError(
                f"{QUANTISATION} of architecture 'gpt2' is not read; give the model that is not quantised"
            )
        raw.pop(QUANTISATION, None)
        for key in ACTIVATIONS:
            if isinstance(raw.get(key), str):
                raw[key] = OTHER_FUNCTIONS.get(raw[key], raw[key])
        values = _mapped_values({OTHER_NAMES.get(key, key): value for key, value in raw.items()}, architecture)
        if architecture == "gpt2":
            return build_dataclass(GPT2Config, values)
        return build_dataclass(DecoderConfig, {**values, **_rope_values(raw)})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def folder_quantisation(folder: Path) -> Quantisation | None:
    """Returns how the weights of a Hugging Face folder are quantised; None if they are not. Raises ConfigError."""
    path = folder / CONFIG_FILE
    try:
        return read_quantisation(read_json(path)) if path.is_file() else None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def refuse_config(config: LanguageConfig) -> None:
    """Raise ConfigError if no model of transformers computes what a config describes.

    A capacity is not refused: it applies in training only.
    """
    if isinstance(config, DecoderConfig):
        if config.architecture not in REQUIRED_KEYS:
            raise ConfigError(
                f"weft does not write Hugging Face folders of architecture {config.architecture!r}; keep the "
                f"checkpoint of weft"
            )
        for name in ("residual_experts", "num_experts_per_layer"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} = {getattr(config, name)} has no place in a Hugging Face folder: no model of transformers "
                    f"has it; keep weft's checkpoint"
                )


def write_config(folder: Path, config: LanguageConfig) -> None:
    """Write config.json, with the rotary keys that transformers 4 and 5 both read. Recurrent models have weft's."""
    path = folder / CONFIG_FILE
    if path.exists():
        raise CheckpointError(f"{path} exists; choose a new folder or remove it")
    refuse_config(config)
    table = {"model_type": RECURRENT_TYPE, **asdict(config)} if isinstance(config, RecurrentConfig) else _table(config)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _table(config: TransformerConfig) -> dict[str, Any]:
    """Returns the config.json of transformers."""
    architecture = config.architecture
    keys = (*REQUIRED_KEYS[architecture], *OPTIONAL_KEYS[architecture])
    table: dict[str, Any] = {
        "architectures": [name for name, ours in ARCHITECTURES.items() if ours == architecture],
        "model_type": architecture,
        # Not known here; transformers' defaults are tokens of another tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        **FIXED_VALUES[architecture],
        **{RENAMED_KEYS.get(architecture, {}).get(key, key): getattr(config, key) for key in keys},
    }
    table.pop("partial_rotary_factor", None)
    if isinstance(config, DecoderConfig):
        scaling = config.rope_scaling
        table["rope_theta"] = config.rope_theta
        table["rope_scaling"] = None if scaling is None else {"rope_type": "llama3", **asdict(scaling)}
    return table


def _mapped_values(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the keys that weft uses. Raises ConfigError for a key that it would have to ignore."""
    required, optional = REQUIRED_KEYS[architecture], OPTIONAL_KEYS[architecture]
    fixed = {**COMMON_FIXED, **UNWRITTEN_FIXED.get(architecture, {}), **FIXED_VALUES[architecture]}
    for key in required:
        if key not in raw or (raw[key] is None and key != "sliding_window"):
            raise ConfigError(f"key '{key}' is missing or null; an architecture {architecture!r} needs it")
    inert = QWEN_WINDOW_KEYS if architecture.startswith("qwen") else ()
    rope = () if architecture == "gpt2" else DECODER_ROPE_KEYS
    used = {*required, *optional, *rope, *inert} | HARMLESS_KEYS
    for key, value in raw.items():
        if key in fixed and value is not None and value != fixed[key] and not _has_no_effect(key, raw):
            layers = raw.get("num_hidden_layers")
            also = f", or max_window_layers of all {layers} layers" if key == "use_sliding_window" else ""
            raise ConfigError(
                f"{key} = {value!r} is not supported in architecture {architecture!r}, only {fixed[key]!r}{also}"
            )
        if key not in used and key not in fixed and value is not None:
            raise ConfigError(
                f"key '{key}' = {value!r} is unknown for architecture {architecture!r} and may change the mathematics; "
                f"null is fine, so set it to null if you know that it does not"
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


def _has_no_effect(key: str, raw: Mapping[str, Any]) -> bool:
    """Does a value other than the fixed one leave the network as it is, because of other keys? Windows of Qwen are of
    the layers from max_window_layers on.
    """
    if key != "use_sliding_window":
        return False
    first = raw.get("max_window_layers")
    is_of_no_layer = isinstance(first, int) and first >= raw["num_hidden_layers"]
    return is_of_no_layer or ("sliding_window" in raw and raw["sliding_window"] is None)


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
    if kind == "linear" and values.get("factor") == 1.0:  # positions divided by one
        kind = "default"
        del values["factor"]
    if kind not in ("default", "llama3"):
        raise ConfigError(f"{key}.rope_type = {kind!r} is not supported; weft knows 'default' and 'llama3'")
    if kind == "default" and values:
        raise ConfigError(f"{key} = {values!r} is not supported with rope_type 'default', which takes rope_theta only")
    # 10000 is the default of all these architectures.
    return {
        "rope_theta": 10000.0 if inner_theta is None else inner_theta,
        "rope_scaling": values if kind == "llama3" else None,
    }


def generation_config(folder: Path | None, end_tokens: Sequence[int], end_token: str | None) -> str:
    """Returns a generation_config.json with the tokens that end an answer, the one that ends a document first, and
    with the other values of the one in `folder`. `end_token` is what the run states as data.end_token.
    """
    path = None if folder is None else folder / GENERATION_FILE
    given = read_json(path) if path is not None and path.is_file() else {}
    # Keys that begin with "_" would have transformers make it anew from config.json.
    table = {key: value for key, value in given.items() if key != DOCUMENT_END and not key.startswith("_")}
    own = {} if end_token is None else {DOCUMENT_END: end_token}
    return json.dumps({**table, END_TOKENS: list(end_tokens), **own}, indent=2, sort_keys=True) + "\n"


def read_json(path: Path, wanted: str = "a folder with config.json and safetensors files") -> dict[str, Any]:
    """Returns a JSON object. Raises CheckpointError if there is none; `wanted` is what to give instead."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give {wanted}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds {type(table).__name__}, not a JSON object")
    return table
