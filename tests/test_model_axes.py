"""Every way to split a model over x, y and context equals the sequential one, beside data and shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import weft.parallel.context
import weft.parallel.tensor
from weft.models import DecoderConfig, GPT2Config, ModelConfig, build, initialise
from weft.plan import Context, Memory, Plan, Shard
from weft.plan import Tensor as Axes
from weft.verify import Report, verify

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, ModelConfig] = {
    "tied": DecoderConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "biased": DecoderConfig(**SIZES, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "one key head": DecoderConfig(**SIZES, num_key_value_heads=1, architecture="qwen3"),
    "gpt2": GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=4),
}
PLANS = [
    Plan(tensor=Axes(2)),
    Plan(tensor=Axes(1, 2)),
    Plan(tensor=Axes(4, 1, True)),
    Plan(tensor=Axes(2, 2), memory=Memory("selective")),
    Plan(tensor=Axes(2, 2, True), shard=Shard(2, 3), micro_batch=2),
    Plan(tensor=Axes(2, 1, True), shard=Shard(2, 2), data=2, micro_batch=1, memory=Memory("full")),
    Plan(context=Context(2)),
    Plan(context=Context(4, "all-to-all")),
    Plan(context=Context(2), tensor=Axes(2), memory=Memory("full")),
    Plan(context=Context(2, "all-to-all"), tensor=Axes(2, 1, True), shard=Shard(2, 3)),
]


def make(config: ModelConfig) -> nn.Module:
    model = build(config)
    initialise(model, 0)
    return model


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, labels = (torch.randint(0, 61, (8, 8), generator=generator) for _ in range(2))
    labels[::3, 1:] = -100
    return inputs, labels


def check(config: ModelConfig, plan: Plan) -> Report:
    return verify(lambda: make(config), tokens, plan)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe_axes())
@pytest.mark.parametrize("name", CONFIGS)
def test_weft_models(name: str, plan: Plan) -> None:
    check(CONFIGS[name], plan).require()


def transformers_model(kind: str) -> nn.Module:
    """A tiny model of transformers; its RMSNorm, which casts to float32, is left in float64 for the comparison."""
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_key_value_heads=2, max_position_embeddings=32)
    config.sliding_window = None
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            type(module).forward = exact_norm  # type: ignore[method-assign]
    return model


def exact_norm(norm: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return normed


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[4], PLANS[5]], ids=lambda plan: plan.describe_axes())
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "GPT2"])
def test_transformers_models(kind: str, plan: Plan) -> None:
    verify(lambda: transformers_model(kind), tokens, plan).require()


def identity(value: Tensor, *_: Any) -> Tensor:
    return value


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("leave", Plan(tensor=Axes(2))),
        ("leave", Plan(tensor=Axes(1, 2))),
        ("scatter_sum", Plan(tensor=Axes(2, 1, True))),
    ],
)
def test_a_collective_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, name: str, plan: Plan) -> None:
    skipped = identity
    if name == "scatter_sum":
        skipped = lambda value, axis, dim: value.narrow(dim, 0, value.shape[dim] // axis.degree)  # noqa: E731
    monkeypatch.setattr(weft.parallel.tensor, name, skipped)
    assert not check(CONFIGS["biased"], plan).passed


def test_gradients_that_are_not_summed_over_context_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.parallel.context, "units_of", lambda model: FakeUnits())
    report = check(CONFIGS["biased"], Plan(context=Context(2)))
    assert not report.passed
    assert any(check.what == "worst gradient" and not check.passed for check in report.checks)


class FakeUnits:
    """No flat buffers to sum."""

    flats = ()
