"""Answers of the planner that must agree: with the run, with each other, and words with numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

import weft.planner.model
from weft.cluster.hardware import load
from weft.commands.run_planning import ask_for, catalog_run, planning_cluster, with_plan
from weft.errors import PlanError
from weft.models import DecoderConfig, GPT2Config
from weft.parallel.apply import refuse
from weft.parallel.context.axis import ContextAxis
from weft.parallel.tensor.axis import TensorAxes
from weft.plan import Context, Memory, Pipe, Plan, Tensor
from weft.planner.answer import Answer, ask
from weft.planner.candidate import Candidate, num_settings, rank
from weft.planner.explain import sensitivities
from weft.planner.model import _profiled, _traced, planned_model
from weft.planner.predict import predict
from weft.planner.question import Question, parse_constraints
from weft.planner.search import Model, search
from weft.profiling.software import BlockPass, software_for_text
from weft.run_file import Run

TINY = GPT2Config(vocab_size=8192, n_positions=512, n_embd=512, n_layer=8, n_head=8)
SEQUENCE = 512


@lru_cache(maxsize=8)
def tiny(cluster: str = "h100:1x8") -> Model:
    return planned_model(TINY, SEQUENCE, load(cluster))


@lru_cache(maxsize=8)
def answer(cluster: str, batch: int, *where: str) -> Answer:
    return ask("tiny", TINY, load(cluster), Question(batch, SEQUENCE, constraints=parse_constraints(where)))


@lru_cache(maxsize=1)
def unconstrained() -> Candidate:
    return search(tiny(), Question(256, SEQUENCE), keep=1).best[0]


def tiny_run(cluster: str, batch: int) -> Run:
    run = catalog_run("mpt-125m", cluster, batch * SEQUENCE, SEQUENCE)
    return replace(run, model=TINY)


def test_a_device_without_bf16_is_planned_in_fp32() -> None:
    run = tiny_run("v100-32:1x4", 16)
    assert ask_for(run, planning_cluster(run)).best.plan.precision == "fp32"
    with pytest.raises(PlanError, match="precision = 'bf16' is not among those of V100"):
        ask_for(run, planning_cluster(run), parse_constraints(["precision=bf16"]))


def test_nodes_that_do_not_help_stay_idle() -> None:
    fewer, eleven = [answer(f"h100:{count}x8", 64) for count in (8, 10)], answer("h100:11x8", 64)
    assert all(eleven.best.seconds <= one.best.seconds for one in fewer)
    used = eleven.model.cluster.num_nodes  # 8 blocks are no pipeline of 11, and 64 sequences not 11 parts
    assert used < 11
    assert eleven.why.startswith(f"Use {used} of 11 nodes")
    run = with_plan(tiny_run("h100:11x8", 64), eleven)
    assert run.cluster == f"h100:{used}x8"
    assert load(run.cluster).num_devices == run.plan.num_ranks


@pytest.mark.parametrize(
    "asked",
    [
        ["context=2"],
        ["context=2", "context.kind=all-to-all"],
        ["schedule=gpipe"],
        ["chunks=3", "pipe=2"],
        pytest.param(["matmul=fp8", "exact=false"], marks=pytest.mark.full),
        ["memory.state=bf16", "exact=false"],
        ["memory.accumulate=slice"],
        ["micro_batch=128"],
        ["pipe.balance=memory", "pipe=4"],
    ],
    ids=" ".join,
)
@pytest.mark.sampled(2)
def test_what_is_asked_for_is_searched(asked: list[str]) -> None:
    constraints = parse_constraints(asked)
    found = search(tiny(), Question(256, SEQUENCE, constraints=constraints), keep=2).best
    assert found
    assert all(one.holds(candidate.plan) for candidate in found for one in constraints)
    fastest = unconstrained()
    exact = [one for one in found if one.plan.exact and one.plan.memory.accumulate == "whole"]
    assert all(one.seconds >= fastest.seconds * 0.999 for one in exact)


def test_more_memory_is_searched() -> None:
    cluster = load("h100:1x8")
    question = Question(256, SEQUENCE, constraints=parse_constraints(["no offload", "no pipe"]))
    best, *others = search(tiny(), question).best
    as_fast = [one.memory.total_bytes for one in (best, *others) if one.seconds < best.seconds * 1.0001]
    limit = int(min(as_fast) / 1.05)
    device = replace(cluster.node.device, memory_bytes=limit)
    model = tiny().on(replace(cluster, node=replace(cluster.node, device=device)))
    found = search(model, question, keep=1)
    more = next(one for one in sensitivities(model, question, found) if "memory" in one.change)
    assert found.best[0].seconds > best.seconds
    assert more.seconds == best.seconds
    assert more.saved_seconds == found.best[0].seconds - best.seconds > 0


@pytest.mark.parametrize(
    ("axis", "plan"),
    [
        (TensorAxes(), Plan(tensor=Tensor(2, 2), micro_batch=1)),
        (ContextAxis(), Plan(context=Context(2), micro_batch=1)),
    ],
)
def test_bytes_of_communication_follow_the_precision(axis: Any, plan: Plan) -> None:
    model = tiny()
    block = BlockPass(model.steps.workload.blocks[0], 1, model.steps.software)
    narrow, wide = (
        [call.num_bytes for call in axis.block_calls(block, replace(plan, precision=name))] for name in ("bf16", "fp32")
    )
    assert len(narrow) == len(wide)
    sums_of_gradients = isinstance(axis, ContextAxis)  # in 32 bits under both
    assert all(b == 2 * a or (sums_of_gradients and b == a) for a, b in zip(narrow, wide, strict=True))
    assert sum(wide) > 1.3 * sum(narrow)
    plans = [replace(Plan(pipe=Pipe(2), micro_batch=1), precision=name) for name in ("bf16", "fp32")]
    assert model.steps._message_bytes(plans[1]) == 2 * model.steps._message_bytes(plans[0])


def test_an_answer_does_not_depend_on_the_questions_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, plan = load("h100:1x8"), Plan(data=8, micro_batch=2, precision="bf16")

    def held(compiles: bool) -> float:
        software = software_for_text(cluster, compiles)
        return weft.planner.model.planned_model(TINY, SEQUENCE, cluster, software).held(plan, 4).total_bytes

    def forget() -> None:
        """Begin with empty caches; those that other tests share stay."""
        for one in (planned_model, _traced, _profiled):
            monkeypatch.setattr(weft.planner.model, one.__name__, lru_cache(one.__wrapped__))

    forget()
    eager, compiled = held(False), held(True)
    forget()
    assert (held(True), held(False)) == (compiled, eager)
    assert compiled < eager


def test_a_send_uses_the_nics_of_its_device() -> None:
    cluster = load("h100:4x8")
    inter = cluster.node.inter
    assert cluster.axis_link(8, 4, is_send=True) == cluster.axis_link(8, 4)
    assert cluster.axis_link(1, 16).bandwidth_bytes_per_second == inter.bandwidth_bytes_per_second
    assert cluster.axis_link(1, 16, is_send=True).bandwidth_bytes_per_second == inter.bandwidth_bytes_per_second / 8
    two_of_four = load("frontier:4")  # two devices share a NIC
    nic = two_of_four.node.inter.bandwidth_bytes_per_second / two_of_four.node.inter.num_nics
    assert two_of_four.axis_link(1, 16, is_send=True).bandwidth_bytes_per_second == nic


def test_words_equal_numbers() -> None:
    found = answer("h100:1x8", 64, "pipe=8", "schedule=1f1b")
    shown = found.to_json()["plans"][0]
    assert shown["bubble_share"] == pytest.approx(shown["where"]["bubble"] / shown["seconds"])
    assert f"waiting in the pipeline ({shown['bubble_share']:.1%})" in found.why
    assert sum(shown["where"].values()) == pytest.approx(shown["seconds"])


def test_a_model_too_small_for_several_nodes_is_not_slower_on_more_of_them() -> None:
    config = DecoderConfig(
        vocab_size=4096, hidden_size=768, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=6,
        intermediate_size=1536, max_position_embeddings=128,
    )  # fmt: skip
    found = [ask("small", config, load(f"h100:{count}x2"), Question(32, 128)) for count in (1, 3, 4)]
    seconds = [one.best.seconds for one in found]
    assert seconds[0] >= seconds[1] >= seconds[2]
    assert found[2].why.startswith("Use ")
    alone = search(found[2].model.on(load("h100:4x2")), Question(32, 128))  # all nodes are slower
    assert alone.best[0].seconds > seconds[2]


@pytest.mark.parametrize(
    "where", [["schedule=zero-bubble"], ["schedule=message"], ["x=2", "schedule=zero-bubble"], ["pipe=2"]], ids=" ".join
)
def test_no_answer_is_refused_by_its_own_run(where: list[str]) -> None:
    question = Question(64, SEQUENCE, constraints=parse_constraints(where))
    found = search(tiny(), question)
    for one in found.best:
        refuse(tiny().profile, one.plan)
        file = replace(tiny_run("h100:1x8", 64), plan=one.plan)
        if one is found.best[0]:
            assert predict(file, load("h100:1x8")).step_seconds == pytest.approx(one.seconds, rel=1e-6)
    if where == ["x=2", "schedule=zero-bubble"]:
        assert not found.best
        assert any("zero-bubble" in reason for _, reason in found.refused)


@pytest.mark.parametrize("where", ["memory.activations=0.5", "memory.weights=0.5"])
def test_copies_to_the_host_cost_the_search_what_they_cost_the_file(where: str) -> None:
    constraints = parse_constraints([where, "data=1"])
    cluster = load("h100:1x1")
    slow = replace(cluster, node=replace(cluster.node, host_link_bytes_per_second=1e9))
    model = tiny("h100:1x1").on(slow)
    best = search(model, Question(32, SEQUENCE, constraints=constraints), keep=1).best[0]
    predicted = predict(replace(tiny_run("h100:1x1", 32), plan=best.plan), slow)
    assert predicted.step_seconds == pytest.approx(best.seconds, rel=0.01)
    assert best.seconds > 1.1 * model.steps.step(best.plan, best.num_micro_batches).seconds


def test_a_search_and_its_file_state_one_memory() -> None:
    best = answer("h100:1x8", 64).best
    predicted = predict(replace(tiny_run("h100:1x8", 64), plan=best.plan), load("h100:1x8"))
    assert predicted.memory_bytes == pytest.approx(best.memory.total_bytes, rel=0.05)
    stated = predicted.to_json()["memory"]
    assert stated["total_bytes"] + stated["margin_bytes"] == predicted.memory_bytes
    assert stated["margin_bytes"] > 1e9


def test_of_equally_fast_plans_the_plainest_is_first() -> None:
    plain = unconstrained()
    for memory in (Memory("selective"), Memory("full"), Memory(offload=0.5)):
        less = replace(plain, plan=replace(plain.plan, memory=memory), memory=replace(plain.memory, saved_bytes=0.0))
        assert rank(plain) < rank(less)
    assert rank(replace(plain, seconds=plain.seconds * 1.001)) > rank(replace(plain, plan=less.plan))
    for batch in (64, 256):
        best = answer("h100:1x8", batch).found.best
        equal = [one for one in best if one.seconds == pytest.approx(best[0].seconds, rel=1e-9)]
        assert num_settings(best[0].plan) == min(num_settings(one.plan) for one in equal)


def test_a_constraint_finds_no_faster_plan_than_none() -> None:
    small = DecoderConfig(
        vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = planned_model(small, 128, load("h100:1x1"))
    free, asked = (
        search(model, Question(512, 128, constraints=parse_constraints(where)), keep=1).best[0]
        for where in ([], ["micro_batch>=2"])
    )
    assert free.seconds == asked.seconds
    assert (free.plan.micro_batch or 0) > 64


def test_why_a_field_of_the_pipeline_is_refused() -> None:
    question = Question(64, SEQUENCE, constraints=parse_constraints(["pipe.shadow=true", "pipe=8"]))
    assert "pipe.shadow = true works in fp32 and fp64" in search(tiny(), question).unmet["pipe.shadow=true"]


def test_tensor_ranks_over_several_nodes_are_named() -> None:
    found = answer("h100:2x4", 64, "x=8")
    assert any(text.startswith("x = 8 crosses nodes") for text in found.assumptions)
    assert not any("crosses nodes" in text for text in answer("h100:1x8", 64, "x=8").assumptions)


def test_plans_of_latent_attention_keep_no_scores() -> None:
    config = DecoderConfig(
        architecture="deepseek_v3", vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=256, max_position_embeddings=2048, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    for compiles in (False, True):
        saved, flops = [], []
        for sequence in (512, 1024):
            software = software_for_text(load("h100:1x8"), compiles)
            block = planned_model(config, sequence, load("h100:1x8"), software).profile.blocks[-1]
            saved.append((block.saved_bytes or {})["none"])
            flops.append(block.attention_flops)
        assert saved[1] == pytest.approx(2 * saved[0], rel=0.05)  # scores would grow with the square
        assert flops == [2 * 4 * sequence**2 * (24 + 16) for sequence in (512, 1024)]
