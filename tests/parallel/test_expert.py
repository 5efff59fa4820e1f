"""The axis `expert`: exact beside other axes and under any routing; its bytes follow from the routed counts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_for_tests import CONFIG, RUN_FILE, SIZES, batch, make, make_balanced, make_mixtral
from nets_for_tests import repeated
from runs_for_tests import events, losses, make_run, train_on_ranks, write_run_file
from torch import Tensor, nn
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import weft
import weft.parallel.expert.dispatch
from weft.errors import PlanError
from weft.models import DecoderConfig, GPT2Config, build
from weft.models.experts import SparseMLP
from weft.parallel.apply import cost, refuse
from weft.plan import Context, Memory, Pipe, Plan, Shard, split_batch
from weft.plan import Tensor as TensorAxis
from weft.profiling import profile
from weft.proof.prove import verify
from weft.sharding.flat_buffer import Flat


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan",
    [
        Plan(expert=4),
        Plan(expert=2, data=2, micro_batch=1, memory=Memory("selective")),
        Plan(expert=2, shard=Shard(2, 3), memory=Memory("full")),
        Plan(expert=2, shard=Shard(2, 1)),
        Plan(expert=2, pipe=Pipe(2), micro_batch=1, memory=Memory("full")),
        Plan(expert=2, tensor=TensorAxis(2)),
    ],
    ids=lambda plan: plan.describe_axes() + plan.memory.words,
)
def test_plans_are_proved(plan: Plan) -> None:
    verify(make_balanced, batch, plan, steps=2).require()


@pytest.mark.processes
def test_sequences_may_be_split_too() -> None:
    verify(make, batch, Plan(expert=2, context=Context(2)), steps=1).require()


def make_qwen() -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=8, moe_intermediate_size=8, **SIZES))


@pytest.mark.processes
def test_gemma_4_is_proved() -> None:
    """It has norms without a weight, and `top_k_experts`."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "global_head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    others = {"vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 0, "use_cache": False}
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**sizes, **heads, **others, **experts, layer_types=kinds)
    tokens = torch.randint(0, 32, (4, 16))
    given = {"input_ids": tokens, "labels": tokens}
    verify(lambda: Gemma4ForCausalLM(config), lambda step: given, Plan(expert=2), steps=2).require()


@pytest.mark.processes
def test_unedited_models_of_transformers_are_proved() -> None:
    verify(make_mixtral, batch, Plan(expert=2), steps=1).require()
    verify(make_qwen, batch, Plan(expert=2, shard=Shard(2, 3), memory=Memory("full")), steps=2).require()


def make_unknown() -> nn.Module:
    """A model whose stacked experts compute something else than weft knows."""
    model: Any = make_mixtral()
    experts = model.model.layers[1].mlp.experts
    forward = experts.forward
    experts.forward = lambda *args: 2 * forward(*args)
    return model  # type: ignore[no-any-return]


@pytest.mark.processes
def test_experts_that_are_called_twice_send_twice() -> None:
    verify(lambda: repeated(make()), batch, Plan(expert=2, memory=Memory("full")), steps=1).require()


class UnequalCalls(SparseMLP):
    """Calls its experts for all tokens without gradients, for some of them, and for the results of both."""

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            before = super().forward(hidden, keys)
        some = super().forward(hidden[:, :4], keys if keys is None else keys[:, :4])
        return super().forward(hidden + before + some.mean(1, keepdim=True), keys)


def make_unequal_calls() -> nn.Module:
    model: Any = make()
    for layer in model.model.layers:
        layer.mlp.__class__ = UnequalCalls
    return model  # type: ignore[no-any-return]


@pytest.mark.processes
@pytest.mark.parametrize("memory", [Memory(), Memory("full")], ids=["saved", "recomputed"])
def test_every_call_of_experts_is_counted(memory: Memory) -> None:
    """Calls without gradients send nothing backward, and others may have fewer rows."""
    verify(make_unequal_calls, batch, Plan(expert=2, memory=memory), steps=1).require()


def make_named() -> nn.Module:
    """Its experts are given their arguments by name, in another order."""
    model: Any = make_qwen()
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(_by_name, with_kwargs=True, prepend=True)
    return model  # type: ignore[no-any-return]


def _by_name(_: nn.Module, args: Any, kwargs: Any) -> Any:
    hidden, *others = args
    return (), {**dict(zip(("top_k_weights", "top_k_index"), others[::-1], strict=True)), "hidden_states": hidden}


@pytest.mark.processes
def test_experts_take_their_arguments_by_name() -> None:
    verify(make_named, batch, Plan(expert=2), steps=1).require()


@pytest.mark.processes
def test_a_wrong_divisor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flat, "_num_means", 1)
    report = verify(make, batch, Plan(expert=2), steps=1)
    assert "worst gradient" in {check.what for check in report.checks if not check.passed}


@pytest.mark.processes
def test_a_lost_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = weft.parallel.expert.dispatch._EXCHANGE

    def lose(*args: Any) -> Tensor:
        rows = exchange.forward(*args)
        rows[-1:] = 0
        return rows

    monkeypatch.setattr(weft.parallel.expert.dispatch, "_EXCHANGE", replace(exchange, forward=lose))
    report = verify(make, batch, Plan(expert=2), steps=1)
    assert "loss" in {check.what for check in report.checks if not check.passed}


class OtherName(SparseMLP):
    """Its experts have a name by which weft does not know them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.mixture = self.experts
        del self.experts

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        weights, experts = self.gate(hidden)
        out = self.through(hidden.flatten(0, -2), weights, self._order(experts, hidden, keys), self.mixture)
        return out.view_as(hidden)


def make_other_name() -> nn.Module:
    model: Any = make()
    for layer in model.model.layers:
        layer.mlp = OtherName(CONFIG)
    return model  # type: ignore[no-any-return]


def make_without_number() -> nn.Module:
    """Nothing says how many experts a token goes to."""
    model: Any = make()
    model.config = None
    for layer in model.model.layers:
        layer.mlp.gate = nn.Linear(CONFIG.hidden_size, CONFIG.num_experts)
    return model  # type: ignore[no-any-return]


def test_the_bytes_of_a_model_that_cannot_be_counted_are_refused() -> None:
    plan = Plan(expert=2)
    with pytest.raises(PlanError, match="expert = 2 follows from the rows that a forward sends to experts"):
        cost(profile(make()), plan, split_batch(plan, 4, 16))


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (make, Plan(expert=3), "expert = 3 does not divide the 8 experts of 'model.layers.0.mlp.experts'"),
        (
            lambda: build(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)),
            Plan(expert=2),
            "GPT2 has no layer of experts",
        ),
        (make_other_name, Plan(expert=2), r"whose name has 'expert'.* and 'model.layers.0.mlp.mixture' is not such"),
        (make_without_number, Plan(expert=2), r"neither 'model.layers.0.mlp.experts', .* says to how many experts a t"),
        (make_unknown, Plan(expert=2), r"layers.1.mlp.experts' \(MixtralExperts\) has stacked experts, but does not"),
    ],
)
def test_plans_that_are_refused(model: Any, plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        refuse(profile(model()), plan)


def test_the_batch_is_divided_over_expert() -> None:
    plan = Plan(expert=2, data=2)
    split = split_batch(plan, 8, 16)
    assert (split.num_batch_ranks, split.micro_batch) == (4, 2)
    assert "2 data × 1 shard × 2 expert × 2 micro-batch" in split.identity(plan)
    with pytest.raises(PlanError, match="data 2 × shard 1 × expert 2"):
        split_batch(plan, 6, 16)


@pytest.mark.processes
def test_a_run_goes_on_under_another_degree(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, RUN_FILE)
    expected = make_run(run_file, "one")
    train_on_ranks(expected)
    for steps, *plan in ((2, "plan.expert=2", "plan.shard=2"), (4, "plan.expert=4"), (6,)):
        run = make_run(run_file, "many", f"train.steps={steps}", *plan)
        train_on_ranks(run)
    assert len(losses(run.folder)) == 6
    assert losses(run.folder) == pytest.approx(losses(expected.folder), rel=1e-4)
    for folder in (expected.folder, run.folder):
        loads = events(folder, "experts")
        assert [event["step"] for event in loads] == [1, 2, 3, 4, 5, 6]
        assert all(1 <= event["imbalance"] <= event["load"] <= 2 for event in loads if event["step"] > 2)
        assert all(0 < event["entropy"] <= math.log(4) + 1e-6 for event in loads)
        assert all(0.25 <= event["dropped"] < 1 for event in loads)  # at least what does not fit
    for name in ("entropy", "dropped"):
        one, other = ([event[name] for event in events(run.folder, "experts")] for run in (expected, run))
        assert other == pytest.approx(one, rel=1e-3)
