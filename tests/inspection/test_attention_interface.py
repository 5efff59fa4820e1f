"""The attention of transformers' models, computed by another function: same results, and what cannot be is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import masking_utils
from transformers.masking_utils import create_causal_mask

from weft.errors import PlanError
from weft.inspection.attention_interface import refuse_interface, use_attention, watch_attention
from weft.profiling import profile

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(0))


def build(architecture: str, **others: Any) -> Any:
    """A tiny causal model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **{**SIZES, **others})
    return transformers.AutoModelForCausalLM.from_config(config)


class Attend:
    """Plain attention, which records the windows that it is given."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        self.windows.append(window)
        positions = torch.arange(query.shape[2])
        distance = positions[:, None] - positions
        mask = (distance >= 0) & (distance < (window or query.shape[2]))
        repeats = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


@pytest.mark.parametrize(
    ("architecture", "others", "windows"),
    [
        ("llama", {"num_key_value_heads": 2}, [None, None]),
        ("granite", {"num_key_value_heads": 2, "attention_multiplier": 0.5}, [None, None]),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 4}, [4, 4]),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}, [4, None]),
    ],
)
def test_another_function_gives_the_same_result(
    architecture: str, others: dict[str, Any], windows: list[int | None]
) -> None:
    model, attend = build(architecture, **others), Attend()
    other = type(model)(model.config)  # a second model with the same config
    expected = model(TOKENS).logits
    use_attention(model, attend)
    # A rank's positions have gaps. transformers takes what follows a gap for another document; attention is told not.
    found = model(TOKENS, position_ids=torch.arange(16)[None])
    assert torch.allclose(found.logits, expected, atol=1e-6)
    positions = torch.arange(16) + 16 * (torch.arange(16) >= 8)
    model(TOKENS, position_ids=positions[None])
    assert attend.windows == windows * 2
    other(TOKENS)
    assert len(attend.windows) == 4


def test_calls_are_seen_and_torchs_function_is_back_afterwards() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before, seen = ALL_ATTENTION_FUNCTIONS["sdpa"], list[str]()
    with watch_attention(lambda module, *_: seen.append(type(module).__name__)):
        build("llama")(TOKENS)
    assert seen == ["LlamaAttention"] * 2
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_a_profile_has_the_heads() -> None:
    model = build("llama", num_key_value_heads=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.0" not in name and "embed" not in name
    (first,), (second,) = profile(model, lambda: (TOKENS,)).attentions.values()
    assert (first.batch, first.num_heads, first.num_key_heads, first.sequence, first.head_dim) == (2, 4, 2, 16, 4)
    assert (first.needs_gradient, second.needs_gradient) == (False, True)


# --- refusals


@pytest.mark.parametrize(
    ("architecture", "others", "reason"),
    [
        ("bloom", {}, "BloomForCausalLM computes attention in its own code"),
        ("gemma2", {"head_dim": 4}, r"the scores of Gemma2ForCausalLM have a soft cap \(attn_logit_softcapping = 50"),
        ("llama", {"attn_implementation": "eager"}, "LlamaForCausalLM uses attn_implementation = 'eager'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"the rotary frequencies of LlamaForCausalLM \(rope_type = 'dynamic'\) depend on the positions",
        ),
        ("bert", {}, r"the attention of 'bert.encoder.layer.0.attention.self' is not causal"),
        ("lfm2", {"num_key_value_heads": 2, "full_attn_idxs": [1]}, "has layers of the type 'conv', which mix tokens"),
    ],
)
def test_models_that_are_refused(architecture: str, others: dict[str, Any], reason: str) -> None:
    found = refuse_interface(build(architecture, **others))
    assert found is not None
    assert re.search(reason, found), found


def test_a_model_of_images_is_refused_as_one() -> None:
    """Its other properties (no attention, or that of its own) say nothing about what to change."""
    config = transformers.ResNetConfig(hidden_sizes=[4], depths=[1], embedding_size=4)
    found = refuse_interface(transformers.ResNetForImageClassification(config))
    assert found == "ResNetForImageClassification is given images (pixel_values), which are no sequence of tokens"


def masked_by(model: Any, **given: Any) -> nn.Module:
    """The model, whose masks have something more than causality."""
    inner = model.model

    def forward(input_ids: Tensor, **kwargs: Any) -> Any:
        mask = create_causal_mask(inner.config, inner.embed_tokens(input_ids), None, None, **given)
        return type(inner).forward(inner, input_ids, attention_mask=mask, **kwargs)

    inner.forward = forward
    return model  # type: ignore[no-any-return]


def test_calls_that_are_refused() -> None:
    dropping = build("llama", attention_dropout=0.1)
    padded = torch.ones_like(TOKENS)
    padded[0, 12:] = 0
    prefix = masked_by(build("llama"), or_mask_function=lambda batch, head, query, key: key < 4)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (dropping.train(), {}, r"LlamaAttention of layer 0 drops attention weights \(dropout 0.1\)"),
        (build("llama"), {"attention_mask": padded}, "the model masks tokens of its own"),
        (build("llama"), {"attention_mask": torch.zeros(2, 1, 16, 16)}, "is given a mask that weft did not make"),
        (prefix, {}, "the model masks keys by 'or_masks'"),
    ]
    for model, given, reason in cases:
        use_attention(model, Attend())
        with pytest.raises(PlanError, match=reason):
            model(TOKENS, **given)
    dropping.eval()(TOKENS)  # nothing is dropped in an evaluation
    use_attention(ones := build("llama"), Attend())
    ones(TOKENS, attention_mask=torch.ones_like(TOKENS))


def test_positions_of_a_part_of_a_sequence_change_no_mask() -> None:
    """transformers takes the gap in a rank's positions for two documents."""
    model, attend = build("mistral", num_key_value_heads=2, sliding_window=8), Attend()
    use_attention(model, attend)
    positions = torch.cat([torch.arange(4), torch.arange(12, 16)])[None]
    model(TOKENS[:, :8], position_ids=positions)
    assert attend.windows == [8, 8]


def test_masks_that_are_joined_by_or_are_refused() -> None:
    model = build("llama")
    use_attention(model, Attend())
    mask: Any = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    with pytest.raises(PlanError, match="masks keys by 'or_masks'"):
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["weft"](mask_function=mask)
