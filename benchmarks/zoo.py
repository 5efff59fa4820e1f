"""Small models of many architectures, unedited, with random weights: what `model_table.py` splits and proves.

Each entry is a transformers architecture with a tiny config, built offline, and a dict batch as its users write it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SAMPLES, TOKENS, PIXELS, VOCABULARY, CLASSES = 4, 16, 32, 64, 4

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
_DECODER = {**_ENCODER, **_MARKS}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_WINDOW = {"sliding_window": 8}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_MARKS}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SEQUENCE_PAIRS = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 0,
    **{
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    },
    **_MARKS,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_PATCHES = {**_SIZES, "intermediate_size": 48, "image_size": PIXELS, "patch_size": 8}
_WINDOWS = {"image_size": PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
_STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
_PYRAMID = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}

CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "gpt_neo": {
        **_SIZES, **_MARKS, "max_position_embeddings": 64, "window_size": 8,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": _DECODER,
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "gpt_bigcode": _GPT,
    "opt": {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_MARKS},
    "falcon": {**_SIZES, **_MARKS},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "biogpt": _DECODER,
    "persimmon": _DECODER,
    **dict.fromkeys(("phi", "phi3", "llama", "mistral", "qwen2", "stablelm", "starcoder2", "olmo", "olmo2"), _GROUPED),
    **dict.fromkeys(("cohere", "granite", "nemotron", "smollm3"), _GROUPED),
    **dict.fromkeys(("gemma", "qwen3", "helium", "glm", "glm4", "seed_oss", "ernie4_5"), _HEADS),
    **{key: {**_HEADS, **_WINDOW} for key in ("gemma2", "gemma3_text")},
    **{key: {**_GROUPED, **_WINDOW} for key in ("olmo3", "cohere2", "exaone4")},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "granitemoe": {**_GROUPED, "num_local_experts": 4},
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "deepseek_v3": {
        **_GROUPED, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **_MARKS},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "electra", "camembert", "deberta-v2", "mpnet", "nystromformer"), _ENCODER),
    **dict.fromkeys(("layoutlm", "roformer", "convbert", "megatron-bert", "modernbert"), _ENCODER),
    "esm": {**_ENCODER, "mask_token_id": 3},
    "albert": {**_ENCODER, "embedding_size": 16},
    "mobilebert": {**_ENCODER, "embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
    "distilbert": {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
}
SEQUENCE_PAIRS: dict[str, dict[str, Any]] = {
    **{key: {**_T5, "decoder_start_token_id": 0} for key in ("t5", "mt5")},
    **dict.fromkeys(("bart", "marian", "pegasus"), _SEQUENCE_PAIRS),
}
IMAGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vit", "beit", "dinov2", "vit_msn"), _PATCHES),
    **{key: {**_WINDOWS, "window_size": 4} for key in ("swin", "swinv2")},
    **dict.fromkeys(("convnext", "convnextv2", "poolformer"), _STAGES),
    "resnet": {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 8},
    "mobilenet_v1": {"depth_multiplier": 0.25, "image_size": PIXELS},
    "mobilenet_v2": {"depth_multiplier": 0.35, "image_size": PIXELS},
    "segformer": {**_PYRAMID, "decoder_hidden_size": 16},
    "pvt": {**_PYRAMID, "image_size": PIXELS},
    "focalnet": {
        "image_size": PIXELS, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [1, 1],
        "focal_windows": [3, 3],
    },
    "hiera": {"image_size": [PIXELS] * 2, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2]},
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: how to build it, and its batch of a step."""

    name: str
    kind: str  # causal, masked, pairs or images
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]


def zoo() -> list[Entry]:
    """Returns all models, by kind and name."""
    kinds = {
        "causal": (CAUSAL, transformers.AutoModelForCausalLM, _tokens),
        "masked": (MASKED, transformers.AutoModelForMaskedLM, _tokens),
        "pairs": (SEQUENCE_PAIRS, transformers.AutoModelForSeq2SeqLM, _tokens),
        "images": (IMAGES, transformers.AutoModelForImageClassification, _images),
    }
    return [
        Entry(name, kind, partial(_build, name, values, auto), batch)
        for kind, (configs, auto, batch) in kinds.items()
        for name, values in configs.items()
    ]


def _build(name: str, values: dict[str, Any], auto: Any) -> nn.Module:
    """Returns the model without dropout, whose masks the sequential model would draw from another generator."""
    config = transformers.AutoConfig.for_model(name, **values)
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    config.num_labels = CLASSES if auto is transformers.AutoModelForImageClassification else config.num_labels
    config.use_cache = False
    model: nn.Module = auto.from_config(config)
    return model.train()


def _tokens(step: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS), generator=rng)
    labels = torch.where(torch.rand(ids.shape, generator=rng) < 0.2, -100, ids)
    return {"input_ids": ids, "labels": labels}


def _images(step: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(step)
    pixels = torch.randn(SAMPLES, 3, PIXELS, PIXELS, generator=rng)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (SAMPLES,), generator=rng)}
