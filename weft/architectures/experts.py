"""Options of layers of experts in the table `[model]`, and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from weft.architectures.sizes import divisors, require_positive
from weft.errors import ConfigError

SPARSE_ARCHITECTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK_KEYS = (
    *("q_lora_rank", *_LATENT_SIZES, "n_group", "topk_group", "routed_scaling_factor", "n_shared_experts"),
    *("first_k_dense_replace", "router_bias_update_rate"),
)


@dataclass(frozen=True)
class Capacity:
    """How many tokens of each sequence an expert takes in training. Tokens above it are dropped."""

    factor: Annotated[float, "times an expert's equal share of a sequence's tokens, rounded up"] = 1.0
    minimum: Annotated[int, "tokens of a sequence that an expert takes at least"] = 4
    selection: Annotated[
        Literal["first", "random"], "which tokens an expert takes: the first of the sequence, or random ones"
    ] = "first"

    def __post_init__(self) -> None:
        require_positive(self, "factor", "minimum")

    def tokens(self, sequence: int, num_experts: int, per_token: int) -> int:
        """Returns how many of a sequence's tokens an expert takes, if each token chooses `per_token` experts."""
        share = math.ceil(self.factor * per_token * sequence / num_experts)
        return min(max(share, self.minimum), sequence)


def check_experts(config: Any) -> None:
    """Raise ConfigError for options of experts, in a DecoderConfig, that contradict each other or the architecture."""
    if config.architecture not in SPARSE_ARCHITECTURES:
        for name in ("num_experts", "num_experts_per_layer", "residual_experts", "capacity"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} = {getattr(config, name)} does not exist in architecture {config.architecture!r}; leave "
                    f"it out, or use one of {', '.join(SPARSE_ARCHITECTURES)}"
                )
        return
    if config.num_experts_per_layer:
        _check_experts_per_layer(config)
    require_positive(config, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
    fewest = min((number for number in config.num_experts_per_layer if number), default=config.num_experts)
    if config.num_experts_per_tok > fewest:
        raise ConfigError(
            f"num_experts_per_tok = {config.num_experts_per_tok} is more than num_experts = {fewest}; "
            f"give each token at most all experts"
        )
    for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} = {getattr(config, name)} is negative; give 0 or more")
    if config.architecture == "mixtral" and not config.norm_topk_prob:
        raise ConfigError("norm_topk_prob = false does not exist in architecture 'mixtral'; leave it out")
    if config.architecture == "deepseek_v3":
        _check_deepseek(config)
    if not any(config.has_experts(layer) for layer in range(config.num_hidden_layers)):
        raise ConfigError(
            f"none of the {config.num_hidden_layers} layers has experts; lower decoder_sparse_step = "
            f"{config.decoder_sparse_step} and first_k_dense_replace = {config.first_k_dense_replace}, or shorten "
            f"mlp_only_layers = {list(config.mlp_only_layers)}"
        )


def _check_experts_per_layer(config: Any) -> None:
    numbers = config.num_experts_per_layer
    if len(numbers) != config.num_hidden_layers or min(numbers) < 0 or max(numbers) != config.num_experts:
        raise ConfigError(
            f"num_experts_per_layer = {list(numbers)} does not give each of the {config.num_hidden_layers} layers its "
            f"number of experts, 0 or more; give one number for each layer, and leave num_experts out"
        )
    if config.decoder_sparse_step != 1 or config.mlp_only_layers or config.first_k_dense_replace:
        raise ConfigError(
            "num_experts_per_layer says which layers have experts; leave decoder_sparse_step, mlp_only_layers and "
            "first_k_dense_replace out"
        )


def _check_deepseek(config: Any) -> None:
    require_positive(config, *_LATENT_SIZES, "n_group", "topk_group", "routed_scaling_factor")
    if config.num_key_value_heads != config.num_attention_heads:
        raise ConfigError(
            f"num_key_value_heads = {config.num_key_value_heads} does not exist in architecture 'deepseek_v3', whose "
            f"heads all have their own keys; leave it out"
        )
    for number in {*config.num_experts_per_layer, config.num_experts} - {0}:
        if number % config.n_group:
            raise ConfigError(
                f"n_group = {config.n_group} does not divide {number} experts; use one of {divisors(number)}"
            )
        in_groups = min(config.topk_group, config.n_group) * (number // config.n_group)
        if config.topk_group > config.n_group or config.num_experts_per_tok > in_groups:
            raise ConfigError(
                f"topk_group = {config.topk_group} of n_group = {config.n_group} groups have {in_groups} experts, of "
                f"which a token cannot choose num_experts_per_tok = {config.num_experts_per_tok}; use a topk_group "
                f"between 1 and n_group whose groups have as many"
            )
        if config.n_group > 1 and number // config.n_group < 2:
            raise ConfigError(
                f"n_group = {config.n_group} groups of {number} experts have one expert each, and a group is chosen by "
                f"the sum of its two best; use fewer groups"
            )


def shrunk_deepseek(config: Any, num_layers: int) -> dict[str, Any]:
    """Returns the keys of deepseek_v3 for a tiny config of the same structure; nothing for other architectures."""
    if config.architecture != "deepseek_v3":
        return {}
    fewest = min(
        (min(number, 8) for number in config.num_experts_per_layer if number), default=min(8, config.num_experts)
    )
    groups = math.gcd(config.n_group, max(fewest // 2, 1))
    chosen = max(1, config.topk_group * groups // config.n_group)
    return {
        "head_dim": 4,
        "q_lora_rank": min(config.q_lora_rank, 12),
        "kv_lora_rank": min(config.kv_lora_rank, 12),
        "qk_nope_head_dim": min(config.qk_nope_head_dim, 6),
        "qk_rope_head_dim": 4,
        "v_head_dim": min(config.v_head_dim, 6),
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": min(config.num_experts_per_tok, 4, chosen * fewest // groups),
        "first_k_dense_replace": min(config.first_k_dense_replace, num_layers - 1),
    }
