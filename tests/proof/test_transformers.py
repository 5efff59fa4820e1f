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
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import weft
from weft.errors import PlanError
from weft.step.model_loss import model_loss

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
    weft.verify(llama, batch, PLANS[plan]).require()


@pytest.mark.processes
def test_experts_in_grouped_products_are_proved() -> None:
    report = weft.verify(mixtral, batch, weft.Plan(shard=weft.Shard(2, 3))).require()
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
