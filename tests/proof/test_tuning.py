"""Frozen parameters and LoRA under the axes: gradients, updates, traffic and state equal the unsplit model's."""

from __future__ import annotations

import pytest
import torch
from models_for_tests import small_config
from torch import Tensor, nn

import weft
from weft.architectures.lora import Lora
from weft.errors import PlanError
from weft.models import build, initialise
from weft.models.tuning import Tuning
from weft.plan import Pipe, Plan, Shard
from weft.plan import Tensor as TensorSetting

pytestmark = pytest.mark.processes

CONFIG = small_config(
    architecture="qwen2", vocab_size=37, width=16, inner=24, layers=2, heads=4, keys=2, tie_word_embeddings=True
)
LORA = Lora(4, 8.0, ("q_proj", "v_proj", "o_proj", "down_proj", "up_proj"))
LORA_TUNING, FROZEN = Tuning((), LORA), Tuning(("model.embed*", "model.layers.0.*"))


def tuned(tuning: Tuning) -> nn.Module:
    """A model with this tuning. B of the updates is not zero, so that A has gradients, too."""
    model = build(CONFIG)
    tuning.apply(model)
    initialise(model, 3)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize(
    ("tuning", "plan"),
    [
        (LORA_TUNING, Plan(tensor=TensorSetting(x=2))),
        (LORA_TUNING, Plan(pipe=Pipe(2), micro_batch=2)),
        (FROZEN, Plan(shard=Shard(2, 3))),
    ],
    ids=["lora x 2", "lora pipe 2", "frozen shard 3"],
)
def test_a_plan_equals_the_unsplit_model(tuning: Tuning, plan: Plan) -> None:
    weft.verify(lambda: tuned(tuning), batch, plan, steps=2).require()


def test_what_x_does_not_split_of_an_update_is_refused() -> None:
    dropping = Tuning((), Lora(4, 8.0, ("q_proj",), dropout=0.5))
    for tuning, plan, words in (
        (LORA_TUNING, TensorSetting(x=2, sequence=True), r"tensor\.sequence = true does not split the low-rank update"),
        (dropping, TensorSetting(x=2), r"use lora\.dropout = 0"),
    ):
        with pytest.raises(PlanError, match=words):
            weft.verify(lambda tuning=tuning: tuned(tuning), batch, Plan(tensor=plan))  # type: ignore[misc]
