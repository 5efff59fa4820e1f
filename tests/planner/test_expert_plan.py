"""Experts in the planner: the calls that it times are those that the cost counts; the search tries the axis."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts_for_tests import CONFIG

from weft.cluster.hardware import load
from weft.models import build
from weft.models.loss import ExampleLoss
from weft.parallel.apply import cost, localise
from weft.parallel.data import DataAxis
from weft.parallel.expert.axis import ExpertAxis
from weft.plan import Context, Memory, Pipe, Plan, split_batch
from weft.plan import Tensor as TensorAxis
from weft.planner.expert_time import expert_seconds
from weft.planner.frameworks import CORE
from weft.planner.kernels import FP8_PRODUCT, Kernels
from weft.planner.micro_batch import LINK_SHARE, place
from weft.planner.model import planned_model
from weft.planner.other_forms import folded_plans
from weft.planner.question import Question, parse_constraints
from weft.planner.search import Model, search
from weft.profiling import profile
from weft.profiling.parts import Matmul
from weft.profiling.software import BlockPass, Software
from weft.strategy import Buffer

SEQUENCE = 32


def planned(cluster: str = "h100:1x4", imbalance: float = 1.0) -> Model:
    return planned_model(CONFIG, SEQUENCE, load(cluster), Software(imbalance=imbalance))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_calls_of_blocks_are_those_of_the_cost(recompute: str) -> None:
    plan = Plan(expert=2, micro_batch=2, precision="bf16", memory=Memory(recompute))  # type: ignore[arg-type]
    with torch.device("meta"):
        model = build(CONFIG).to(torch.bfloat16)

    def tokens() -> torch.Tensor:
        return torch.zeros(2, SEQUENCE, dtype=torch.long, device="cpu")

    found = profile(model, lambda: (tokens(),), ExampleLoss(tokens))
    expected = cost(found, plan, split_batch(plan, 4, SEQUENCE)).traffic["expert", "all_to_all"]
    steps = planned().steps
    calls = [call for part in steps.workload.blocks for call in steps.calls(part, plan, 2)]
    assert (len(calls), sum(call.num_bytes for call in calls)) == (expected.calls, expected.num_bytes)


def test_a_rank_holds_its_experts_and_the_planner_counts_them() -> None:
    model, plan = planned(), Plan(expert=4, micro_batch=1, precision="bf16")
    blocks = localise(model.profile, plan, dict.fromkeys(plan.degrees, 0)).blocks
    experts, dense = 8 * (2 * 8 * 16 + 16 * 8), blocks[-1].numel - 2 * (2 * 8 * 16 + 16 * 8)
    assert blocks[-1].numel == dense + experts / 4
    (stage,) = model.steps.stages(plan)
    assert stage.numel == sum(block.numel for block in blocks) + model.profile.root.numel
    alone = model.held(Plan(micro_batch=1, precision="bf16", data=4), 1)
    assert alone.parameters_bytes - model.held(plan, 1).parameters_bytes == 2 * experts * 3 / 4 * (2 + 4)


def test_the_search_tries_expert_where_there_are_experts() -> None:
    question = Question(4, SEQUENCE, constraints=parse_constraints(["expert=2"]))
    found = search(planned(), question)
    assert {one.plan.expert for one in found.best} == {2}
    first = found.best[0].step
    assert first is not None
    assert first.where["expert"] > 0
    dense = replace(CONFIG, architecture="qwen3", num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0)
    free = search(planned_model(dense, SEQUENCE, load("h100:1x4"), Software()), Question(4, SEQUENCE), keep=60)
    assert {one.plan.expert for one in free.best} == {1}
    assert not any("expert" in reason for _, reason in free.refused)


def test_replicas_of_experts_are_the_ranks_that_hold_the_same() -> None:
    """Software that shards the optimizer: all other parameters have replicas on ranks of expert, too."""
    folded = Plan(data=2, pipe=Pipe(8), expert=4, tensor=TensorAxis(2, sequence=True), expert_over=("x",))
    assert place(folded, "replicas") == (2, 8)
    assert place(folded, "expert replicas") == (8, 2)
    beside_context = Plan(data=2, tensor=TensorAxis(8, sequence=True), context=Context(8), expert_over=("x",))
    assert place(beside_context, "expert replicas") == (8, 16)
    over_context = replace(beside_context, expert_over=("context", "x"))
    assert place(over_context, "expert replicas") == (64, 2)
    buffer = Buffer(numel=10.0, compute_bytes=2, gradient_bytes=4, expert_numel=8.0)
    found = [
        (call.axis, call.operation, call.num_bytes)
        for axis in (DataAxis(), ExpertAxis())
        for call in axis.buffer_calls(buffer, folded, CORE)
    ]
    assert found == [
        ("replicas", "reduce_scatter", 8.0),
        ("replicas", "all_gather", 4.0),
        ("expert replicas", "reduce_scatter", 32.0),
        ("expert replicas", "all_gather", 16.0),
    ]


def test_thin_parts_of_experts_are_slower() -> None:
    """Tensor ranks that split experts multiply by thin matrices, and gather rows."""
    plan = Plan(expert=2, tensor=TensorAxis(4, sequence=True), micro_batch=1, precision="bf16")
    narrow = replace(WIDE, moe_intermediate_size=512)
    part = planned_model(narrow, 4096, load("h100:1"), Software()).steps.workload.blocks[0]
    software = Software(many_tiles=True)
    whole, split = (
        Kernels(load("h100:1").node.device, replace(software, splits_experts=value)) for value in (False, True)
    )
    seconds = [sum(expert_seconds(part, plan, 8, kernels)) for kernels in (whole, split)]
    assert seconds[1] > 1.2 * seconds[0]
    calls = [list(ExpertAxis().block_calls(BlockPass(part, 1, one.software), plan)) for one in (whole, split)]
    over_x = [call for call in calls[1] if call.axis == "x"]
    assert [call for call in calls[1] if call.axis != "x"] == calls[0]
    assert sorted(call.operation for call in over_x) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert all(call.num_bytes == 2 * part.routed_numel for call in over_x)  # the rows of all ranks of x


def test_uneven_routing_takes_longer() -> None:
    plan = Plan(expert=4, micro_batch=1, precision="bf16")
    even, uneven = (sum(planned(imbalance=value).steps.chain(plan)) for value in (1.0, 3.0))
    assert uneven > even


WIDE = replace(CONFIG, hidden_size=2048, head_dim=64, num_attention_heads=32, num_key_value_heads=8)
WIDE = replace(WIDE, moe_intermediate_size=4096, max_position_embeddings=4096)


def test_fp8_experts_are_priced() -> None:
    """Products at the rate of fp8, and the casts; nothing on a device without it."""
    plan = Plan(micro_batch=4, precision="bf16", exact=False)
    ratios, sent = {}, {}
    for cluster in ("h200:1x1", "a100-80:1x1"):
        steps = planned_model(WIDE, 4096, load(cluster), Software()).steps
        part = steps.workload.blocks[0]
        assert part.expert_flops == 2 * 2 * 4096 * 3 * 2048 * 4096  # k rows a token, three matrices
        assert part.expert_numel == 8 * 3 * 2048 * 4096
        kernels = steps._kernels["bf16"]
        for found, expert in ((ratios, 1), (sent, 2)):
            plans = [replace(plan, matmul=name, expert=expert) for name in ("fp8", "compute")]
            fp8, compute = (sum(steps._experts(part, one, 4, kernels)) for one in plans)
            found[cluster] = fp8 / compute
    assert ratios["a100-80:1x1"] == sent["a100-80:1x1"] == 1
    assert 0.6 < ratios["h200:1x1"] < sent["h200:1x1"] < 0.7


@pytest.mark.parametrize(("expert", "is_even"), [(1, False), (2, False), (1, True)])
def test_casts_of_fp8_experts_by_hand(expert: int, is_even: bool) -> None:
    """Three products at their rate; 3 bytes for a weight each way; rows that are sent or have slots are moved."""
    steps = planned_model(WIDE, 4096, load("h200:1x2")).steps
    part, device = replace(steps.workload.blocks[0], is_routed_evenly=is_even), steps.cluster.node.device
    plan = Plan(expert=expert, micro_batch=4, precision="bf16", exact=False, matmul="fp8")
    product = 4 * part.expert_flops / (device.peak_flops["fp8"] * device.calibration * FP8_PRODUCT["row"])
    rows_bytes = (3 + 2 + 4) * 4 * 2 * 4096 * 2048 * (expert > 1 or is_even)
    moved = (3 * 8 * 3 * 2048 * 4096 / expert + rows_bytes) / steps._kernels["bf16"].bytes_per_second
    found = expert_seconds(part, plan, 4, steps._kernels["bf16"])
    assert found == pytest.approx((product + moved, 2 * product + moved))


def test_a_routers_product_is_counted() -> None:
    with torch.device("meta"):
        model = build(replace(CONFIG, num_experts=23))  # no other product has 23 columns
    found = profile(model, lambda: (torch.zeros(1, SEQUENCE, dtype=torch.long, device="cpu"),))
    products = {one: count for one, count in found.blocks[0].matmuls.items() if one.columns == 23}
    assert products == {Matmul(1, SEQUENCE, CONFIG.hidden_size, 23): 1}


def test_an_all_to_all_between_nodes_has_its_own_nics() -> None:
    """Half of what a rank sends stays in its node; the rest has an eighth of the node's bandwidth."""
    steps, num_bytes = planned("h100:2x8").steps, 1e9
    node = steps.cluster.node.inter
    seconds = steps.seconds("expert", "all_to_all", num_bytes, Plan(expert=16))
    assert seconds == pytest.approx(
        num_bytes / 2 / (node.bandwidth_bytes_per_second / 8 * LINK_SHARE["inter"]), rel=0.1
    )


def test_kept_collectives_are_priced() -> None:
    """Less time for the memory of their results."""
    model, plan = planned(), Plan(expert=4, micro_batch=1, precision="bf16", memory=Memory("full"))
    kept = replace(plan, memory=replace(plan.memory, keep_collectives=True))
    assert sum(model.steps.chain(kept)) < sum(model.steps.chain(plan))
    rows, num_blocks = SEQUENCE * 2 * 16 * 2, model.num_blocks
    per_block = 2 * rows + 8 * CONFIG.num_experts  # rows and results, and how many go to each expert
    held = [model.held(one, 1) for one in (kept, plan)]
    assert model.steps.kept_bytes(kept) == per_block
    assert held[0].saved_bytes - held[1].saved_bytes == num_blocks * per_block


def test_experts_over_context_are_state_of_one_rank_each() -> None:
    model, plan = planned(), Plan(context=Context(4), micro_batch=1, precision="bf16")
    folded = replace(plan, expert_over=("context",))
    experts = 2 * 8 * (2 * 8 * 16 + 16 * 8)
    difference = model.held(plan, 1).parameters_bytes - model.held(folded, 1).parameters_bytes
    assert difference == experts * 3 / 4 * (2 + 4)


def test_the_search_keeps_collectives_of_split_experts() -> None:
    question = Question(8, SEQUENCE, constraints=parse_constraints(["expert=2", "recompute=full"]))
    found = search(planned(), question, keep=60)
    assert {one.plan.memory.keep_collectives for one in found.best} == {False, True}
    whole = Question(8, SEQUENCE, constraints=parse_constraints(["expert=1", "recompute=full"]))
    assert not any(one.plan.memory.keep_collectives for one in search(planned(), whole, keep=60).best)


def test_rows_over_a_joint_axis_take_as_long_as_over_one_of_its_size() -> None:
    steps = planned("h100:2x8").steps
    folded = Plan(expert=4, context=Context(2), expert_over=("context",))
    assert steps.seconds("experts", "all_to_all", 1e9, folded) == steps.seconds(
        "expert", "all_to_all", 1e9, Plan(expert=8)
    )
    assert sum(steps.chain(replace(folded, micro_batch=1, precision="bf16"))) > 0


def test_the_search_folds_experts_of_the_plans_that_it_finds() -> None:
    asked = ["expert=2", "x=2", "data=1", "pipe=1"]
    found = search(planned(), Question(8, SEQUENCE, constraints=parse_constraints(asked)), keep=60).best
    assert {one.plan.expert_over for one in found} == {(), ("x",)}
    folded = next(one for one in found if one.plan.expert_over)
    whole = next(one for one in found if one.plan == replace(folded.plan, expert_over=()))
    assert folded.memory.parameters_bytes < whole.memory.parameters_bytes
    assert folded.seconds != whole.seconds
    for constraint, over in (("expert_over=x", {("x",)}), ("expert_over!=x", {()})):
        constraints = parse_constraints([*asked, constraint])
        again = search(planned(), Question(8, SEQUENCE, constraints=constraints), keep=60).best
        assert {one.plan.expert_over for one in again} == over
    assert [one.expert_over for one in folded_plans(Plan(tensor=TensorAxis(16)), 8)] == []  # 16 do not divide 8
