"""Models with experts: tiny decoders, one layer of experts, Mixtral of transformers, and a run file that trains one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from weft.architectures import Capacity
from weft.models import DecoderConfig, build, initialise
from weft.models.experts import SparseMLP
from weft.models.loss import ExampleLoss
from weft.profiling import Profile, profile

CONFIG = DecoderConfig(
    architecture="qwen3_moe", vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=8,
)  # fmt: skip
SIX = replace(CONFIG, num_experts=6)


def make(config: DecoderConfig = CONFIG) -> nn.Module:
    model = build(config)
    initialise(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(20)  # tokens differ in their experts
    return model


make_balanced = partial(make, replace(CONFIG, router_aux_loss_coef=0.5, router_z_loss_coef=0.1))


def layer_of(config: DecoderConfig) -> SparseMLP:
    torch.manual_seed(3)
    layer = SparseMLP(config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    return layer


def batch(index: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(index))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def kept_by_loop(experts: Tensor, num_experts: int, limit: int, priorities: Tensor | None) -> Tensor:
    """Which choices [batch, sequence, k] are taken, token by token."""
    batch, sequence, k = experts.shape
    kept = torch.zeros(batch, sequence, k, dtype=torch.bool)
    for sample in range(batch):
        order = list(range(sequence))
        if priorities is not None:
            order.sort(key=lambda token: int(priorities[sample, token]))
        room = [limit] * num_experts
        for token in order:
            for choice in range(k):
                expert = int(experts[sample, token, choice])
                kept[sample, token, choice] = room[expert] > 0
                room[expert] -= 1
    return kept


def counted(config: Any = CONFIG, sequence: int = 16, samples: int = 4) -> Profile:
    """The profile of a model with its loss."""
    tokens = torch.zeros(samples, sequence, dtype=torch.long)
    return profile(make(config), lambda: (tokens,), ExampleLoss(lambda: tokens))


SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip


def make_mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES))


RUN_FILE = """
[model]
architecture = "qwen3_moe"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 8
router_aux_loss_coef = 0.01
capacity = {{ factor = 0.75, minimum = 1, selection = "random" }}

[data]
source = "{source}"
sequence = 16
cache = "{cache}"

[train]
steps = 6
batch = 4
learning_rate = 1e-2
evaluate_sequences = 4
schedule = "constant"
"""


LOSSES: dict[str, Any] = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}


def make_random() -> nn.Module:
    """Random tokens, residual experts, and layers with 4 and with 8 experts."""
    return make(
        replace(
            CONFIG, num_experts=0, num_experts_per_layer=(4, 8), residual_experts=True,
            capacity=Capacity(0.75, 1, "random"), **LOSSES,
        )
    )  # fmt: skip
