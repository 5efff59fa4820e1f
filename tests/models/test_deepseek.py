"""DeepSeek-V3: logits equal transformers'; biases balance experts over the whole batch, under any plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_for_tests import batch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from weft.architectures import DecoderConfig
from weft.cluster.hardware import load
from weft.errors import ConfigError, PlanError
from weft.mesh import Mesh
from weft.models import build, initialise
from weft.models.hf_config import refuse_config
from weft.models.router import change_biases, routers_of, take_router_losses
from weft.parallel.apply import refuse
from weft.plan import Context, Memory, Pipe, Plan
from weft.plan import Tensor as TensorAxis
from weft.planner.model import planned_model
from weft.profiling import profile
from weft.proof.float64 import Float64
from weft.proof.prove import verify
from weft.resilience.corruption import RepeatedMicroBatch
from weft.serve.model.paged_model import PagedModel

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_experts_per_tok": 3, "max_position_embeddings": 32, "kv_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIG = DecoderConfig(architecture="deepseek_v3", num_experts=8, q_lora_rank=12, **SIZES)


def test_the_planner_profiles_layers_with_experts_only() -> None:
    shallow = CONFIG.with_layers(2)
    assert [shallow.has_experts(layer) for layer in range(2)] == [True, True]
    assert [CONFIG.has_experts(layer) for layer in range(3)] == [False, True, True]


@pytest.mark.parametrize("rank", [12, 0])
def test_logits_equal_those_of_transformers(rank: int) -> None:
    with Float64():
        theirs: Any = DeepseekV3ForCausalLM(
            DeepseekV3Config(n_routed_experts=8, num_key_value_heads=4, q_lora_rank=rank or None, **SIZES)
        )
    theirs.double().eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *(one for name, one in theirs.named_buffers() if "e_score" in name)):
            tensor.normal_(0, 0.4, generator=rng)
    ours = build(replace(CONFIG, q_lora_rank=rank)).double().eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = batch(0)[0]
    with torch.no_grad(), Float64():
        found, expected = ours(tokens), theirs(tokens).logits
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
    router = next(iter(routers_of(ours).values()))
    router.e_score_correction_bias.zero_()  # the bias matters
    with torch.no_grad(), Float64():
        assert (ours(tokens) - expected).abs().max() > 1e-3


def make(rate: float = 0.05) -> nn.Module:
    model = build(replace(CONFIG, num_hidden_layers=2, router_bias_update_rate=rate, router_aux_loss_coef=0.1))
    initialise(model, 0)
    with torch.no_grad():
        for router in routers_of(model).values():
            router.weight.mul_(20)  # tokens differ in their experts
    return model


def test_biases_follow_the_tokens_of_a_step() -> None:
    model = make()
    counts = torch.zeros(8)
    for index in range(2):  # two micro-batches
        model(batch(index)[0])
        (router,) = routers_of(model).values()
        assert router.record.routed is not None
        counts += router.record.routed[:8]
        take_router_losses(model)
    change_biases([model], lambda _: None)
    assert torch.equal(router.e_score_correction_bias, 0.05 * (counts.mean() - counts).sign())
    model(batch(0)[0])
    take_router_losses(model)
    before = router.e_score_correction_bias.clone()
    change_biases([model], lambda _: None, torch.tensor(True))  # a step that is not taken
    assert torch.equal(router.e_score_correction_bias, before)


def test_a_router_that_was_not_called_keeps_its_biases() -> None:
    """Its block was skipped by train.layer_drop in every micro-batch of the step."""
    model = build(replace(CONFIG, router_bias_update_rate=0.05))
    initialise(model, 0)
    (_, first), (_, second) = routers_of(model).items()
    torch.manual_seed(0)
    first(torch.randn(2, 5, 16))
    take_router_losses(model)
    change_biases([model], lambda _: None)
    assert first.e_score_correction_bias.any()
    assert not second.e_score_correction_bias.any()


def test_a_micro_batch_that_is_computed_twice_counts_once() -> None:
    model = make()
    (router,) = routers_of(model).values()
    repeated = RepeatedMicroBatch(model, Mesh(Plan()), 1, 1, 0)

    def compute() -> Tensor:
        loss: Tensor = model(batch(0)[0]).sum()
        loss.backward()
        take_router_losses(model)
        return loss.detach()

    repeated(0, compute)
    assert router.record.step is not None
    assert router.record.total is not None
    assert router.record.step[-1] == router.record.total[-1] == batch(0)[0].numel()


def test_biases_balance_experts() -> None:
    def share_of_busiest(model: nn.Module) -> float:
        model(batch(0)[0])
        (router,) = routers_of(model).values()
        routed = router.record.routed
        assert routed is not None
        take_router_losses(model)
        change_biases([model], lambda _: None)
        return float(routed[:8].max() / routed[:8].sum())

    balanced, free = make(0.01), make(0.0)
    shares = [[share_of_busiest(model) for _ in range(30)] for model in (balanced, free)]
    assert shares[0][-1] < shares[0][0] == shares[1][0] == shares[1][-1]


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan",
    [
        Plan(expert=2, pipe=Pipe(2), micro_batch=1),
        Plan(expert=2, tensor=TensorAxis(2), memory=Memory("full")),
    ],
    ids=lambda plan: plan.describe_axes(),
)
def test_plans_are_proved(plan: Plan) -> None:
    report = verify(make, batch, plan)
    report.require()
    assert any(check.what == "worst buffer after the steps" for check in report.checks)


@pytest.mark.processes
def test_biases_of_each_ranks_own_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change_by_own(models: Any, total: Any, keeps: Any = None) -> None:
        change_biases(models, lambda counts: None, keeps)

    monkeypatch.setattr("weft.step.train_step.change_biases", change_by_own)
    report = verify(make, batch, Plan(expert=2))
    assert "worst buffer after the steps" in {check.what for check in report.checks if not check.passed}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group = 3 does not divide 8 experts; use one of 1, 2, 4, 8"),
        ({"topk_group": 1}, "topk_group = 1 of n_group = 4 groups have 2 experts"),
        ({"n_group": 8, "topk_group": 8}, "have one expert each"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0 must be positive"),
        ({"num_key_value_heads": 2}, "heads all have their own keys"),
        ({"architecture": "qwen3_moe"}, "does not exist in architecture 'qwen3_moe'"),
        ({"router_bias_update_rate": -1.0}, "router_bias_update_rate = -1.0 is negative"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_the_planner_counts_layers_with_experts() -> None:
    model = planned_model(replace(CONFIG, first_k_dense_replace=2), 32, load("h100:1x4"))
    assert all(block.num_experts == 8 for block in model.steps.workload.blocks)
    assert len(model.steps.workload.blocks) == 3


def test_what_is_not_there_is_refused_in_words() -> None:
    model: Any = build(CONFIG)
    with pytest.raises(ConfigError, match="does not serve architecture 'deepseek_v3' yet"):
        PagedModel(model, 8)
    with pytest.raises(ConfigError, match="does not write Hugging Face folders of architecture 'deepseek_v3'"):
        refuse_config(CONFIG)
    with pytest.raises(PlanError, match=r"pipe\.schedule = 'bidirectional' has two copies of each stage"):
        refuse(profile(make(), lambda: (batch(0)[0],)), Plan(pipe=Pipe(2, "bidirectional")))
    with pytest.raises(PlanError, match="context = 2 passes keys and values of one width"):
        refuse(profile(model), Plan(context=Context(2)))
    assert CONFIG.shrunk().n_group == 4
    build(CONFIG.shrunk())
