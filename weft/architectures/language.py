"""The table `[model]` of language models: decoders (Llama, Mistral, Qwen, with and without experts), GPT-2, LSTM, GRU.

Keys are those of their config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from weft.architectures.experts import DEEPSEEK_KEYS, Capacity, check_experts, shrunk_deepseek
from weft.architectures.sizes import Tied, VocabSize, divisors, require_positive
from weft.errors import ConfigError

RecurrentArchitecture = Literal["lstm", "gru"]
DecoderArchitecture = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"]

# Options that are allowed only for some architectures, because transformers could not load them for the others.
OPTION_ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "attention_bias": ("llama", "qwen3", "qwen3_moe"),
    "mlp_bias": ("llama",),
    "sliding_window": ("mistral", "mixtral"),
    "shared_expert_intermediate_size": ("qwen2_moe",),
    "mlp_only_layers": ("qwen2_moe", "qwen3_moe"),
    **dict.fromkeys(DEEPSEEK_KEYS, ("deepseek_v3",)),
}
IMPLIED_OPTIONS = {"qkv_bias": ("qwen2", "qwen2_moe"), "qk_norm": ("qwen3", "qwen3_moe")}
Heads = Annotated[int, "attention heads of a layer"]
Epsilon = Annotated[float, "the epsilon of its norms"]

DEVIATION = 0.02
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "experts.down_proj")


class LanguageConfigBase:
    """What configs of language models have alike. `layers_key` and `length_key` name the keys of their sizes."""

    layers_key: ClassVar[str] = "num_hidden_layers"
    length_key: ClassVar[str] = "max_position_embeddings"
    is_compiled: ClassVar[bool] = True  # are blocks compiled on GPUs, if the run file does not say?

    @property
    def num_layers(self) -> int:
        return int(getattr(self, self.layers_key))

    @property
    def context_length(self) -> int:
        """The most tokens of a text that the model is made for."""
        return int(getattr(self, self.length_key))

    def with_layers(self, num_layers: int) -> Self:
        """Returns the same model with another number of layers."""
        return replace(self, **{self.layers_key: num_layers})  # type: ignore[type-var]

    def initial_deviation(self, name: str, num_inputs: int) -> float:
        """Returns the standard deviation of a weight's initial values in the scheme of GPT-2: lower for projections
        that write to the residual stream.
        """
        return DEVIATION / math.sqrt(2 * self.num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else DEVIATION


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 scaling of rotary embeddings: the frequencies of long wavelengths are divided by `factor`, those of short
    ones are kept, and those between are interpolated.
    """

    factor: Annotated[float, "by how much the frequencies of long wavelengths are divided"]
    low_freq_factor: Annotated[float, "wavelengths above the original length / this are scaled"]
    high_freq_factor: Annotated[float, "wavelengths below the original length / this are kept"]
    original_max_position_embeddings: Annotated[int, "the length before scaling"]

    def __post_init__(self) -> None:
        require_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope_scaling.high_freq_factor = {self.high_freq_factor} must be larger than "
                f"rope_scaling.low_freq_factor = {self.low_freq_factor}; Llama 3 uses 4 and 1"
            )


@dataclass(frozen=True)
class DecoderConfig(LanguageConfigBase):
    """The config of a decoder. A size of 0 means that it is derived, and is replaced by the derived value.

    Architectures with experts need num_experts and num_experts_per_tok. deepseek_v3 has latent attention, of which it
    needs the sizes, and routers with sigmoid scores.
    """

    architecture: Annotated[DecoderArchitecture, "the kind of model; the other keys of [model] depend on it"] = "llama"
    vocab_size: VocabSize = 32000
    hidden_size: Annotated[int, "the width of the residual stream"] = 768
    intermediate_size: Annotated[int, "the width inside the MLPs; 0: 8/3 of hidden_size, rounded up to 256"] = 0
    num_hidden_layers: Annotated[int, "the number of layers"] = 12
    num_attention_heads: Heads = 12
    num_key_value_heads: Annotated[int, "heads of keys and values; 0: as many as attention heads"] = 0
    head_dim: Annotated[int, "the width of a head; 0: hidden_size / num_attention_heads"] = 0
    max_position_embeddings: Annotated[int, "the longest sequence that the model is meant for"] = 2048
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Annotated[float, "the base of the rotary frequencies"] = 10000.0
    rope_scaling: Annotated[RopeScaling | None, "Llama 3's scaling of the rotary frequencies"] = None
    tie_word_embeddings: Tied = False
    attention_bias: Annotated[bool, "biases on all projections of attention (llama, qwen3)"] = False
    qkv_bias: Annotated[bool | None, "biases on q, k and v; follows from the architecture"] = None
    mlp_bias: Annotated[bool, "biases in the MLPs (llama)"] = False
    qk_norm: Annotated[bool | None, "a norm on each head of q and k; follows from the architecture"] = None
    sliding_window: Annotated[int | None, "how many tokens back attention sees (mistral, mixtral)"] = None
    num_experts: Annotated[int, "experts of a layer (mixtral, qwen2_moe, qwen3_moe)"] = 0
    num_experts_per_tok: Annotated[int, "experts that each token goes through"] = 0
    moe_intermediate_size: Annotated[int, "the width inside an expert; 0: intermediate_size"] = 0
    shared_expert_intermediate_size: Annotated[
        int, "the width inside the expert of all tokens; 0: there is none (qwen2_moe)"
    ] = 0
    norm_topk_prob: Annotated[bool, "do the weights of a token's experts sum to 1?"] = True
    decoder_sparse_step: Annotated[int, "every so many layers one has experts, except mlp_only_layers"] = 1
    mlp_only_layers: Annotated[tuple[int, ...], "layers without experts"] = ()
    router_aux_loss_coef: Annotated[float, "the weight of the loss that balances experts"] = 0.0
    router_z_loss_coef: Annotated[float, "the weight of the loss that keeps routers' logits small"] = 0.0
    num_experts_per_layer: Annotated[
        tuple[int, ...], "experts of each layer, in place of num_experts; 0: a layer without experts"
    ] = ()
    residual_experts: Annotated[bool, "a dense MLP beside the experts; both are weighted per token (DeepSpeed-MoE)"] = (
        False
    )
    capacity: Annotated[Capacity | None, "how many tokens an expert takes in training; without it, all"] = None
    q_lora_rank: Annotated[int, "the width of latent queries; 0: queries are not latent (deepseek_v3)"] = 0
    kv_lora_rank: Annotated[int, "the width of latent keys and values (deepseek_v3)"] = 0
    qk_nope_head_dim: Annotated[int, "the width of a head's queries and keys without positions (deepseek_v3)"] = 0
    qk_rope_head_dim: Annotated[int, "the width of a head's queries and keys with positions (deepseek_v3)"] = 0
    v_head_dim: Annotated[int, "the width of a head's values (deepseek_v3)"] = 0
    n_group: Annotated[int, "groups of experts; 0: one (deepseek_v3)"] = 0
    topk_group: Annotated[int, "groups whose experts a token may go through; 0: one (deepseek_v3)"] = 0
    routed_scaling_factor: Annotated[float, "times the weights of a token's experts; 0: 1 (deepseek_v3)"] = 0.0
    n_shared_experts: Annotated[int, "experts of all tokens, as one MLP of their widths (deepseek_v3)"] = 0
    first_k_dense_replace: Annotated[int, "first layers without experts (deepseek_v3)"] = 0
    router_bias_update_rate: Annotated[
        float, "by how much a step changes the biases that balance experts (deepseek_v3)"
    ] = 0.0

    embedding_name: ClassVar[str] = "model.embed_tokens.weight"

    def __post_init__(self) -> None:
        if self.architecture not in get_args(DecoderArchitecture):
            raise ConfigError(
                f"architecture = {self.architecture!r} is not a decoder; use {', '.join(get_args(DecoderArchitecture))}"
            )
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        require_positive(self, *sizes, "rms_norm_eps", "rope_theta")
        self._check_options()
        self._derive()
        require_positive(self, "intermediate_size", "num_key_value_heads", "head_dim")
        if self.sliding_window is not None:
            require_positive(self, "sliding_window")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide num_attention_heads = "
                f"{self.num_attention_heads}; use one of {divisors(self.num_attention_heads)}"
            )
        check_experts(self)
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim = {self.head_dim} is odd; rotary embeddings turn pairs, so use an even head_dim"
            )

    def with_layers(self, num_layers: int) -> Self:
        """Returns the same model with another number of layers, all of them like its last ones."""
        return replace(self, num_hidden_layers=num_layers, num_experts_per_layer=(), first_k_dense_replace=0)

    def has_experts(self, layer: int) -> bool:
        """Has a layer experts in place of one MLP?"""
        if self.num_experts_per_layer:
            return self.num_experts_per_layer[layer] > 0
        is_sparse = (layer + 1) % self.decoder_sparse_step == 0 and layer >= self.first_k_dense_replace
        return self.num_experts > 0 and is_sparse and layer not in self.mlp_only_layers

    def num_experts_of(self, layer: int) -> int:
        """Returns the number of experts of a layer that has experts."""
        return self.num_experts_per_layer[layer] if self.num_experts_per_layer else self.num_experts

    def last_experts(self, num_layers: int) -> tuple[int, ...]:
        """Returns num_experts_per_layer of a model of fewer layers: up to the last layer with experts."""
        numbers = self.num_experts_per_layer
        end = max((index + 1 for index, number in enumerate(numbers) if number), default=0)
        return numbers[max(end - num_layers, 0) :][:num_layers]

    def shrunk(self, num_layers: int = 2) -> DecoderConfig:
        """Returns a tiny config of the same structure, for a quick verification in float64.

        The ratio of query to key heads is kept up to 8. heads * head_dim equals hidden_size if it did before. A sliding
        window or scaled wavelengths still take effect within 64 positions.
        """
        group = min(self.num_attention_heads // self.num_key_value_heads, 8)
        num_key_value_heads = min(self.num_key_value_heads, 8 // group)
        num_heads = group * num_key_value_heads
        head_dim = min(self.head_dim, 32 // num_heads // 2 * 2)
        hidden_size = num_heads * head_dim
        is_square = self.num_attention_heads * self.head_dim == self.hidden_size
        num_layers = min(self.num_hidden_layers, num_layers)
        step = min(self.decoder_sparse_step, num_layers)
        scaling = self.rope_scaling
        if scaling is not None:
            positions = min(scaling.original_max_position_embeddings, 32)
            scaling = replace(scaling, original_max_position_embeddings=positions)
        sizes: dict[str, Any] = {
            "vocab_size": min(self.vocab_size, 61),
            "hidden_size": hidden_size,
            "intermediate_size": min(self.intermediate_size, 64),
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim if is_square else 2 * head_dim,
            "max_position_embeddings": min(self.max_position_embeddings, 64),
            "rope_scaling": scaling,
            "sliding_window": None if self.sliding_window is None else min(self.sliding_window, 8),
            "num_experts": 0 if self.num_experts_per_layer else min(self.num_experts, 8),
            "num_experts_per_layer": tuple(min(number, 8) for number in self.last_experts(num_layers)),
            "num_experts_per_tok": min(self.num_experts_per_tok, 4),
            "moe_intermediate_size": min(self.moe_intermediate_size, 32),
            "shared_expert_intermediate_size": min(self.shared_expert_intermediate_size, 32),
            "decoder_sparse_step": step,
            "mlp_only_layers": tuple(
                layer for layer in self.mlp_only_layers if layer < num_layers and layer != step - 1
            ),
        }
        return replace(self, **(sizes | shrunk_deepseek(self, num_layers)))

    def _check_options(self) -> None:
        for name, architectures in OPTION_ARCHITECTURES.items():
            if getattr(self, name) and self.architecture not in architectures:
                raise ConfigError(
                    f"{name} = {getattr(self, name)} does not exist in architecture {self.architecture!r}; "
                    f"leave it out, or use architecture {' or '.join(repr(name) for name in architectures)}"
                )
        for name, owners in IMPLIED_OPTIONS.items():
            implied, given = self.architecture in owners, getattr(self, name)
            if given is not None and given != implied:
                raise ConfigError(
                    f"{name} = {given} contradicts architecture {self.architecture!r}, which has {name} = {implied}; "
                    f"leave {name} out"
                )
            object.__setattr__(self, name, implied)

    def _derive(self) -> None:
        if self.num_experts == 0 and self.num_experts_per_layer:
            object.__setattr__(self, "num_experts", max(self.num_experts_per_layer))
        if self.architecture == "deepseek_v3":
            object.__setattr__(self, "head_dim", self.qk_rope_head_dim)  # of the rotary embeddings
            for name, value in {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}.items():
                if not getattr(self, name):
                    object.__setattr__(self, name, value)
        if (self.head_dim == 0 or self.architecture == "llama") and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"num_attention_heads = {self.num_attention_heads} does not divide hidden_size = {self.hidden_size}; "
                f"use one of {divisors(self.hidden_size)}"
            )
        derived = {
            "intermediate_size": math.ceil(8 * self.hidden_size / 3 / 256) * 256,
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
        }
        for name, value in derived.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        if self.num_experts and self.moe_intermediate_size == 0:
            object.__setattr__(self, "moe_intermediate_size", self.intermediate_size)


@dataclass(frozen=True)
class GPT2Config(LanguageConfigBase):
    """The config of a GPT-2."""

    architecture: Annotated[Literal["gpt2"], "GPT-2"] = "gpt2"
    vocab_size: VocabSize = 50257
    n_positions: Annotated[int, "the longest sequence: one learned position each"] = 1024
    n_embd: Annotated[int, "the width of the residual stream"] = 768
    n_layer: Annotated[int, "the number of layers"] = 12
    n_head: Heads = 12
    n_inner: Annotated[int | None, "the width inside the MLPs; by default 4 × n_embd"] = None
    layer_norm_epsilon: Epsilon = 1e-5
    resid_pdrop: Annotated[float, "the probability of dropout on the residual stream"] = 0.0
    embd_pdrop: Annotated[float, "the probability of dropout on embeddings"] = 0.0
    attn_pdrop: Annotated[float, "the probability of dropout on attention weights"] = 0.0
    tie_word_embeddings: Tied = True

    embedding_name: ClassVar[str] = "transformer.wte.weight"
    layers_key: ClassVar[str] = "n_layer"
    length_key: ClassVar[str] = "n_positions"

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
        if self.n_inner is not None:
            require_positive(self, "n_inner")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} = {getattr(self, name)} is no dropout probability; use 0 <= {name} < 1")
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}; use one of {divisors(self.n_embd)}"
            )

    @property
    def inner_size(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def shrunk(self, num_layers: int = 2) -> GPT2Config:
        """Returns a tiny config of the same structure, for a quick verification in float64."""
        num_heads = min(self.n_head, 8)
        return replace(
            self,
            vocab_size=min(self.vocab_size, 61),
            n_positions=min(self.n_positions, 64),
            n_embd=num_heads * min(self.n_embd // self.n_head, 32 // num_heads),
            n_layer=min(self.n_layer, num_layers),
            n_head=num_heads,
            n_inner=None if self.n_inner is None else min(self.n_inner, 64),
        )


@dataclass(frozen=True)
class RecurrentConfig(LanguageConfigBase):
    """The config of a recurrent model."""

    architecture: Annotated[RecurrentArchitecture, "LSTM or GRU"] = "lstm"
    vocab_size: VocabSize = 32000
    hidden_size: Annotated[int, "the width of the embedding, of each layer and of its state"] = 512
    num_hidden_layers: Annotated[int, "the number of layers"] = 2
    max_position_embeddings: Annotated[int, "the most tokens of a text that are served from an exported folder"] = 2048
    tie_word_embeddings: Tied = False

    embedding_name: ClassVar[str] = "embed_tokens.weight"
    is_compiled: ClassVar[bool] = False  # torch.compile would unroll a sequence token by token

    def __post_init__(self) -> None:
        if self.architecture not in get_args(RecurrentArchitecture):
            raise ConfigError(f"architecture = {self.architecture!r} is not recurrent; use lstm or gru")
        require_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")

    @property
    def num_gates(self) -> int:
        """How many gates a layer computes, each as wide as its state."""
        return 4 if self.architecture == "lstm" else 3

    def initial_deviation(self, name: str, num_inputs: int) -> float:
        """Returns the standard deviation of a weight's initial values: that of torch's own layers. A tied embedding is
        also the head, whose values are small.
        """
        if ".weight_" in name:
            return math.sqrt(1 / (3 * num_inputs))
        return 1.0 if name == self.embedding_name and not self.tie_word_embeddings else DEVIATION

    def shrunk(self, num_layers: int = 2) -> RecurrentConfig:
        """Returns a tiny config of the same structure, for a quick verification in float64."""
        return replace(
            self,
            vocab_size=min(self.vocab_size, 61),
            hidden_size=min(self.hidden_size, 16),
            num_hidden_layers=min(self.num_hidden_layers, num_layers),
            max_position_embeddings=min(self.max_position_embeddings, 64),
        )


TransformerConfig = DecoderConfig | GPT2Config
