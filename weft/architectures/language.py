"""The table `[model]` of language models: decoders (Llama, Mistral, Qwen2, Qwen3) and GPT-2. Keys are those of their
config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from weft.architectures.sizes import divisors, require_positive
from weft.errors import ConfigError

DecoderArchitecture = Literal["llama", "mistral", "qwen2", "qwen3"]

# Options that are allowed only for some architectures, because transformers could not load them for the others.
OPTION_ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "attention_bias": ("llama", "qwen3"),
    "mlp_bias": ("llama",),
    "sliding_window": ("mistral",),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 scaling of rotary embeddings: the frequencies of long wavelengths are divided by `factor`, those of short
    ones are kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        require_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope_scaling.high_freq_factor = {self.high_freq_factor} must be larger than "
                f"rope_scaling.low_freq_factor = {self.low_freq_factor}; Llama 3 uses 4 and 1"
            )


@dataclass(frozen=True)
class DecoderConfig:
    """The config of a decoder. A size of 0 means that it is derived, and is replaced by the derived value.

    intermediate_size: 8/3 of hidden_size, rounded up to a multiple of 256 (Llama's rule).
    num_key_value_heads: num_attention_heads. head_dim: hidden_size / num_attention_heads.
    qkv_bias, qk_norm: follow from the architecture; giving a value that contradicts it is an error.
    """

    architecture: DecoderArchitecture = "llama"
    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 0
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool | None = None
    sliding_window: int | None = None

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
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim = {self.head_dim} is odd; rotary embeddings turn pairs, so use an even head_dim"
            )

    @property
    def num_layers(self) -> int:
        return self.num_hidden_layers

    def shrunk(self, num_layers: int = 2) -> DecoderConfig:
        """A tiny config of the same structure, for a quick verification in float64.

        The ratio of query to key heads is kept up to 8. heads * head_dim equals hidden_size if it did before. A sliding
        window or scaled wavelengths still take effect within 64 positions.
        """
        group = min(self.num_attention_heads // self.num_key_value_heads, 8)
        num_key_value_heads = min(self.num_key_value_heads, 8 // group)
        num_heads = group * num_key_value_heads
        head_dim = min(self.head_dim, 32 // num_heads // 2 * 2)
        hidden_size = num_heads * head_dim
        is_square = self.num_attention_heads * self.head_dim == self.hidden_size
        scaling = self.rope_scaling
        if scaling is not None:
            positions = min(scaling.original_max_position_embeddings, 32)
            scaling = replace(scaling, original_max_position_embeddings=positions)
        return replace(
            self,
            vocab_size=min(self.vocab_size, 61),
            hidden_size=hidden_size,
            intermediate_size=min(self.intermediate_size, 64),
            num_hidden_layers=min(self.num_hidden_layers, num_layers),
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim if is_square else 2 * head_dim,
            max_position_embeddings=min(self.max_position_embeddings, 64),
            rope_scaling=scaling,
            sliding_window=None if self.sliding_window is None else min(self.sliding_window, 8),
        )

    def _check_options(self) -> None:
        for name, architectures in OPTION_ARCHITECTURES.items():
            if getattr(self, name) and self.architecture not in architectures:
                raise ConfigError(
                    f"{name} = {getattr(self, name)} does not exist in architecture {self.architecture!r}; "
                    f"leave it out, or use architecture {' or '.join(repr(name) for name in architectures)}"
                )
        for name, owner in (("qkv_bias", "qwen2"), ("qk_norm", "qwen3")):
            implied, given = self.architecture == owner, getattr(self, name)
            if given is not None and given != implied:
                raise ConfigError(
                    f"{name} = {given} contradicts architecture {self.architecture!r}, which has {name} = {implied}; "
                    f"leave {name} out"
                )
            object.__setattr__(self, name, implied)

    def _derive(self) -> None:
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


@dataclass(frozen=True)
class GPT2Config:
    """The config of a GPT-2. n_inner = None means 4 * n_embd. Dropout is off by default."""

    architecture: Literal["gpt2"] = "gpt2"
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    tie_word_embeddings: bool = True

    embedding_name: ClassVar[str] = "transformer.wte.weight"

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
    def num_layers(self) -> int:
        return self.n_layer

    @property
    def inner_size(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def shrunk(self, num_layers: int = 2) -> GPT2Config:
        """A tiny config of the same structure, for a quick verification in float64."""
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


LanguageConfig = DecoderConfig | GPT2Config
