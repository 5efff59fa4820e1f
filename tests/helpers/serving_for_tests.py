"""Tiny models to serve, and what an engine makes of requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from weft.models import DecoderConfig, GPT2Config, LanguageConfig, build, initialise
from weft.serve.engine import Engine
from weft.serve.scheduling.request import GeneratedToken, Request, Sampling
from weft.serve.scheduling.speculation import DraftLengths

CONTEXT = 32
SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
MODELS: dict[str, LanguageConfig] = {
    "llama": DecoderConfig(**SIZES, attention_bias=True, mlp_bias=True),  # type: ignore[arg-type]
    "mistral": DecoderConfig("mistral", **SIZES, sliding_window=5),  # type: ignore[arg-type]
    "qwen2": DecoderConfig("qwen2", **SIZES, tie_word_embeddings=True),  # type: ignore[arg-type]
    "qwen3": DecoderConfig("qwen3", **SIZES, head_dim=6),  # type: ignore[arg-type]
    "mixtral": DecoderConfig("mixtral", **SIZES, num_experts=4, num_experts_per_tok=2),  # type: ignore[arg-type]
    "gpt2": GPT2Config(vocab_size=61, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=4),
}
# The same with as many layers as four stages need.
DEEP: dict[str, LanguageConfig] = {
    f"{name}-deep": replace(config, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 4})
    for name, config in MODELS.items()
    if name != "mixtral"
}
CONFIGS = {**MODELS, **DEEP}
GREEDY = Sampling(temperature=0)


def tiny_model(name: str, seed: int = 0) -> nn.Module:
    """A model whose every parameter matters: the likeliest tokens differ from place to place."""
    model = build(CONFIGS[name])
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def likeliest(model: nn.Module, prompt: Iterable[int], number: int) -> list[int]:
    """The likeliest tokens after a prompt, each from a forward over all tokens before it."""
    tokens = list(prompt)
    start = len(tokens)
    with torch.inference_mode():
        for _ in range(number):
            logits: Tensor = model(torch.tensor([tokens]))[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[start:]


def serve_all(engine: Engine, requests: Iterable[Request], every: int = 0) -> dict[str, list[GeneratedToken]]:
    """Run requests to their end. With `every`, one arrives each so many steps, else all at once."""
    waiting, results = list(requests), dict[str, list[GeneratedToken]]()
    step = 0
    while waiting or engine.has_work():
        while waiting and (not every or step % every == 0 or not engine.has_work()):
            engine.add(waiting.pop(0))
            if every:
                break
        for one in engine.step():
            results.setdefault(one.request, []).append(one)
        step += 1
    return results


def tokens_of(results: dict[str, list[GeneratedToken]]) -> dict[str, list[int]]:
    return {name: [one.token for one in generated] for name, generated in results.items()}


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens, whether that pays on this machine now or not."""
    monkeypatch.setattr(DraftLengths, "wanted", lambda own, active: 3)
