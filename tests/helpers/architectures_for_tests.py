"""Tiny random models of transformers, unedited, one for each habit that matters to the tensor axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY, WIDTH = 64, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 32}
KEYS: dict[str, Any] = {"num_key_value_heads": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "dropout": 0.0, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip


class _Float64(TorchFunctionMode):
    """Casts to float32 become casts to float64, so that a float64 model is one throughout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Logits(nn.Module):
    """A model that returns the logits of one input."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():  # biases, tables and norms are not at their trivial values
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def forward(self, value: Tensor) -> Tensor:
        with _Float64():
            out: Tensor = self.call(self.model, value).logits
        return out


def _one_input(model: nn.Module, value: Tensor) -> Any:
    return model(value)


def _same_tokens(model: nn.Module, tokens: Tensor) -> Any:
    return model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False)


def _sound(model: nn.Module, features: Tensor) -> Any:
    tokens = torch.arange(8, device=features.device)[None].expand(len(features), -1)
    return model(input_features=features, decoder_input_ids=tokens, use_cache=False)


def _maker(
    model: str, config: str, call: Callable[[nn.Module, Tensor], Any] = _one_input, **values: Any
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return Logits(getattr(transformers, model)(getattr(transformers, config)(**values)), call)

    return make


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "Gemma 2": _maker("Gemma2ForCausalLM", "Gemma2Config", **SIZES, **HEADS, **KEYS, head_dim=4, use_cache=False),
    "OPT": _maker(
        "OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=24, num_hidden_layers=2,
        **HEADS, dropout=0.0, word_embed_proj_dim=WIDTH, use_cache=False,
    ),
    "GPT-NeoX": _maker("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, **HEADS, hidden_dropout=0.0, use_cache=False),
    "Phi-3": _maker("Phi3ForCausalLM", "Phi3Config", **SIZES, **HEADS, **KEYS, pad_token_id=0, use_cache=False),
    "Falcon": _maker(
        "FalconForCausalLM", "FalconConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, use_cache=False,
    ),
    "BLOOM": _maker(
        "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4,
        hidden_dropout=0.0, attention_dropout=0.0, use_cache=False,
    ),
    "BERT": _maker("BertForMaskedLM", "BertConfig", **SIZES, **HEADS, **NO_DROPOUT),
    "T5": _maker(
        "T5ForConditionalGeneration", "T5Config", _same_tokens, vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4,
        d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
    ),
    "BART": _maker("BartForConditionalGeneration", "BartConfig", _same_tokens, **CODER, max_position_embeddings=32),
    "Whisper": _maker(
        "WhisperForConditionalGeneration", "WhisperConfig", _sound, **CODER, num_mel_bins=8, max_source_positions=8,
        max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "Swin": _maker(
        "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=4, embed_dim=8, depths=[2, 2],
        num_heads=[2, 4], window_size=4, num_labels=6, drop_path_rate=0.0, **NO_DROPOUT,
    ),
    "ConvNeXt": _maker(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2,
        patch_size=4, image_size=32, num_labels=6,
    ),
}  # fmt: skip


def token_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [4, 8], of which some are masked."""
    generator = torch.Generator().manual_seed(10 + step)
    tokens = torch.randint(3, VOCABULARY, (4, 9), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :3] = -100
    return tokens[:, :-1].contiguous(), labels


def image_batch(step: int) -> tuple[Tensor, Tensor]:
    """Four images and their classes."""
    generator = torch.Generator().manual_seed(10 + step)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 6, (4,), generator=generator)


def sound_batch(step: int) -> tuple[Tensor, Tensor]:
    """Four spectrograms, and eight labels for each."""
    generator = torch.Generator().manual_seed(10 + step)
    return torch.randn(4, 8, 16, generator=generator), torch.randint(0, VOCABULARY, (4, 8), generator=generator)


BATCHES = {"Swin": image_batch, "ConvNeXt": image_batch, "Whisper": sound_batch}
