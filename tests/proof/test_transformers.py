"""Unedited models of transformers, with batches as their users write them: keyword arguments with labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import weft
from weft.errors import PlanError
from weft.step.model_loss import model_loss
from weft.step.objective import Objective

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
PLANS = {
    "data": weft.Plan(data=2, micro_batch=2),
    "x": weft.Plan(tensor=weft.Tensor(x=2)),
    "pipe": weft.Plan(pipe=weft.Pipe(2), micro_batch=2),
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attention_dropout=0.1))


def mixtral() -> nn.Module:
    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def masked_bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES))


def batch(step: int) -> dict[str, Any]:
    """Sequences of different lengths, of which one has few labels."""
    tokens = torch.randint(0, 61, (8, 8), generator=torch.Generator().manual_seed(step))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[1, 6:], labels[1, 6:], labels[5, 2:] = 0, -100, -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.processes
@pytest.mark.parametrize("plan", PLANS)
def test_a_dict_batch_uses_the_models_own_loss(plan: str) -> None:
    weft.verify(llama, batch, PLANS[plan], steps=2).require()


@pytest.mark.processes
def test_experts_in_grouped_products_are_proved() -> None:
    report = weft.verify(mixtral, batch, weft.Plan(shard=weft.Shard(2, 3)), steps=2).require()
    assert any(line.startswith("grouped products") for line in report.not_proved)


def even_llama() -> nn.Module:
    """Its loss is the same for every sample, so it adds up over samples for any number of targets."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    nn.init.zeros_(model.lm_head.weight)
    return model


@pytest.mark.parametrize(
    ("make", "count"), [(even_llama, 8 * 7 - 2 - 6), (llama, 8 * 7 - 2 - 6), (masked_bert, 8 * 8 - 2 - 6)]
)
def test_the_targets_that_a_models_loss_is_a_mean_over_are_found(make: Any, count: int) -> None:
    model, given = make().double(), batch(0)
    objective = model_loss(model, given)
    assert objective.count(given) == count
    total = objective.total(model.eval(), given)
    assert torch.allclose(total, model(**given).loss * count)


def test_a_loss_of_one_label_per_sample_counts_samples() -> None:
    config = BertConfig(**SIZES)
    config.num_labels = 3
    model = BertForSequenceClassification(config).double()
    given = {**batch(0), "labels": torch.arange(8) % 3}
    assert model_loss(model, given).count(given) == 8


class Summed(nn.Module):
    """Its loss is no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 61)

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> dict[str, Any]:
        logits = self.table(input_ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss, "logits": logits}


def test_a_loss_that_is_no_mean_over_labels_is_refused() -> None:
    with pytest.raises(PlanError, match="the loss of Summed is not a mean over its labels"):
        weft.verify(Summed, batch, weft.Plan(data=2))


def test_an_error_of_the_models_own_code_is_a_refusal() -> None:
    sizes: dict[str, Any] = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}

    def pairs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(step)["input_ids"], batch(step)["labels"]

    with pytest.raises(
        PlanError, match=r"T5ForConditionalGeneration fails before it is split, .*: ValueError: You must"
    ):
        weft.verify(lambda: T5ForConditionalGeneration(T5Config(**sizes)), pairs, weft.Plan(context=weft.Context(2)))


# --- plans under which a rank has a part of each sample


def plain_batch(step: int) -> dict[str, Any]:
    """Sequences without padding, with the mask of ones that tokenizers return."""
    given = batch(step)
    return {**given, "attention_mask": torch.ones_like(given["input_ids"])}


CONTEXT = weft.Plan(context=weft.Context(2), micro_batch=4)


@pytest.mark.processes
@pytest.mark.parametrize("make", [llama, mixtral])
def test_a_dict_batch_under_context(make: Any) -> None:
    config: Any = make().config
    config.attention_dropout = 0.0
    weft.verify(lambda: type(make())(config), plain_batch, CONTEXT, steps=2).require()


@pytest.mark.processes
def test_labels_that_are_not_moved_before_the_sequence_is_split_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Any, given: Any) -> Any:
        return given if isinstance(given, tuple) else ({"input_ids": given["input_ids"]}, given["labels"])

    monkeypatch.setattr("weft.step.model_loss._ModelLoss.align", late)
    monkeypatch.setattr("weft.step.model_loss._is_cross_entropy", lambda *_: True)
    assert not weft.verify(even_gradients, plain_batch, CONTEXT, steps=1).passed


def even_gradients() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


@pytest.mark.processes
def test_padding_is_refused_under_context() -> None:
    with pytest.raises(PlanError, match="LlamaForCausalLM is given attention_mask, and context = 2 splits"):
        weft.verify(even_gradients, batch, CONTEXT)


def test_labels_of_whole_samples_are_refused_under_context() -> None:
    def pairs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(step)["input_ids"], torch.arange(8)

    with pytest.raises(
        PlanError, match=r"every tensor of a batch has to be \[samples, sequence, ...\].* \[8, 8\], \[8\]"
    ):
        weft.verify(even_gradients, pairs, CONTEXT)


class Smoothed(nn.Module):
    """Its own loss is no plain cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = even_gradients()

    def forward(self, input_ids: Any, labels: Any = None, **given: Any) -> dict[str, Any]:
        logits = self.inner(input_ids, **given).logits
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


@pytest.mark.processes
@pytest.mark.parametrize("plan", [CONTEXT, PLANS["x"]])
def test_a_loss_of_the_models_own_is_refused_where_ranks_hold_parts_of_logits(plan: weft.Plan) -> None:
    with pytest.raises(PlanError, match="the loss of Smoothed is not the cross-entropy of its logits"):
        weft.verify(Smoothed, plain_batch, plan)
    weft.verify(Smoothed, plain_batch, weft.Plan(data=2), steps=2).require()


def vit() -> nn.Module:
    sizes: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 4}
    config = ViTConfig(
        **{key: value for key, value in sizes.items() if key not in ("vocab_size", "max_position_embeddings")}
    )
    config.num_labels = 3
    return ViTForImageClassification(config)


def images(step: int) -> dict[str, Any]:
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    return {"labels": torch.arange(4) % 3, "pixel_values": pixels}


@pytest.mark.processes
def test_a_dict_of_images_in_tiles() -> None:
    weft.verify(vit, images, weft.Plan(tile=weft.Tile(rows=2)), steps=2).require()


# --- two towers, three inputs


def clip() -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**sizes, "vocab_size": 61, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 60}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 4}))


def captions(step: int) -> dict[str, Any]:
    tokens = torch.randint(1, 60, (4, 8), generator=torch.Generator().manual_seed(step))
    tokens[:, -1] = 60
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **_pixels(step)}


def _pixels(step: int) -> dict[str, Any]:
    return {"pixel_values": images(step)["pixel_values"]}


def _count(given: Any) -> torch.Tensor:
    return torch.tensor(len(given["input_ids"]))


def _contrast(model: nn.Module, given: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**given, return_loss=True).loss * len(given["input_ids"])
    return loss


def _agreement(model: nn.Module, given: Any) -> torch.Tensor:
    found = model(**given)
    loss: torch.Tensor = -(found.text_embeds * found.image_embeds).sum()
    return loss


CLIP_PIPE = weft.Plan(pipe=weft.Pipe(2), micro_batch=4)
CONTRAST, AGREEMENT = Objective(_count, _contrast), Objective(_count, _agreement)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("objective", "plan", "reason"),
    [
        (CONTRAST, weft.Plan(data=2), r"CLIPModel with this loss, unsplit, computes another loss from 2 samples"),
        (CONTRAST, weft.Plan(context=weft.Context(2)), r"the attention of .* is not causal"),
        (CONTRAST, weft.Plan(tile=weft.Tile(rows=2)), r"a dict that does not say which are which"),
        (None, weft.Plan(data=2), r"has no 'labels' with which the model could compute its loss"),
    ],
)
def test_what_clip_is_refused(objective: Objective | None, plan: weft.Plan, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        weft.verify(clip, captions, plan, objective=objective)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("objective", "plan"),
    [
        (AGREEMENT, weft.Plan(data=2)),
        pytest.param(CONTRAST, CLIP_PIPE, marks=pytest.mark.soak),
        pytest.param(AGREEMENT, weft.Plan(shard=weft.Shard(2, 3)), marks=pytest.mark.soak),
    ],
)
def test_clip_is_proved(objective: Objective, plan: weft.Plan) -> None:
    weft.verify(clip, captions, plan, objective=objective, steps=2).require()
