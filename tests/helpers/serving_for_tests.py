"""Tiny models to serve, and what an engine makes of requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from weft.architectures import RecurrentConfig
from weft.architectures.lora import Lora
from weft.models import DecoderConfig, GPT2Config, LanguageConfig, build, initialise
from weft.models.adapter import write_adapter
from weft.models.recurrent import RecurrentModel
from weft.models.tuning import add_lora, is_adapter
from weft.plan import Plan
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.adapters import merge_adapter
from weft.serve.parallel.rank_part import RankPlace
from weft.serve.scheduling.request import GeneratedToken, Request, Sampling
from weft.serve.scheduling.speculation import DraftLengths
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, pack_model
from weft.serve.weights.weight_formats import weight_format

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
    "qwen2_moe": DecoderConfig(
        "qwen2_moe",
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=12,  # type: ignore[arg-type]
    ),
    "gpt2": GPT2Config(vocab_size=61, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=4),
}
# The same with as many layers as four stages need.
DEEP: dict[str, LanguageConfig] = {
    f"{name}-deep": replace(config, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 4})
    for name, config in MODELS.items()
    if name not in ("mixtral", "qwen2_moe")
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


def make_engine(model: nn.Module, **options: object) -> Engine:
    return Engine(model, EngineOptions(**{"block_size": 4, "num_blocks": 40, **options}))  # type: ignore[arg-type]


RECURRENT = RecurrentConfig(vocab_size=61, hidden_size=12, num_hidden_layers=2, max_position_embeddings=40)


def tiny_recurrent(kind: str, seed: int = 0, **sizes: object) -> RecurrentModel:
    torch.manual_seed(seed)
    model = RecurrentModel(replace(RECURRENT, architecture=kind, **sizes))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6)
    return model.eval()


ADAPTED = {
    "llama": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    "gpt2": ("c_attn", "c_fc", "c_proj"),
    "mixtral": ("k_proj", "o_proj"),
}


def save_adapter(folder: Path, name: str, seed: int, rank: int) -> Path:
    """A folder of PEFT with random updates that change the likeliest tokens."""
    lora = Lora(rank=rank, alpha=2.0 * rank, targets=ADAPTED[name])
    model = build(MODELS[name])
    add_lora(model, lora)
    generator = torch.Generator().manual_seed(seed)
    updates = [
        (n, torch.randn(p.shape, generator=generator) * 0.3) for n, p in model.named_parameters() if is_adapter(n)
    ]
    write_adapter(folder, MODELS[name], lora, updates)
    return folder


def merged_model(name: str, folder: Path) -> nn.Module:
    model = tiny_model(name)
    merge_adapter(model, folder)
    return model


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    assert not counts[probabilities == 0].any()
    expected = probabilities[probabilities > 0] * counts.sum()
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


WIDE = DecoderConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 96}, attention_bias=True)  # type: ignore[arg-type]
REQUESTS = [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(3)]


def model_of(seed: int, kind: str) -> nn.Module:
    model = build(WIDE)
    initialise(model, seed)
    pack_model(model, weight_format(kind))
    return model.eval()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


ONE = RankPlace(Plan(), dict.fromkeys(Plan().degrees, 0))


def give_decoded(plain: torch.nn.Module, packed: torch.nn.Module) -> None:
    """Give a model the weights that a packed one has decoded."""
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear | PackedStack):
            weight = plain.get_parameter(name if isinstance(module, PackedStack) else f"{name}.weight").detach()
            decoded = module.format.dequantise([part.flatten(0, -2) for part in module.parts], torch.float64)
            assert 0 < float((decoded.view_as(weight) - weight).abs().max()) < 0.2
            with torch.no_grad():
                weight.copy_(decoded.view_as(weight))
