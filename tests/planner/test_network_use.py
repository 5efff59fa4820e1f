"""Collectives on the same links: gathers wait for all-to-alls between nodes, and those of two groups run at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cluster.hardware import load
from weft.parallel.expert.axis import ExpertAxis
from weft.parallel.shard import ShardAxis
from weft.plan import Memory, Plan, Shard
from weft.planner.micro_batch import place
from weft.planner.network_use import between_nodes, seconds_of, waits
from weft.planner.overlap import OVERLAP_LOSS
from weft.planner.step import StepModel
from weft.profiling.software import Software
from weft.profiling.workload import BlockWork, Call, Product, Workload
from weft.strategy import Buffer

NUMEL, EXPERTS, ROUTED = 100_000_000, 80_000_000, 50_000_000
FSDP = Software(shards_over_expert=True)


def steps(software: Software, routed: int = ROUTED, cluster: str = "h100:4") -> StepModel:
    block = BlockWork(
        products=(Product(1024, 4096, 4096, "column"),),
        routed_numel=routed,
        num_experts=16,
        is_routed_evenly=True,
    )
    work = Workload(BlockWork(), (block,) * 4, BlockWork(), 0)
    return StepModel(work, load(cluster), software, (0, NUMEL, 0), expert_numel=EXPERTS)


def plan_of(expert: int, shard: int) -> Plan:
    return Plan(
        expert=expert, shard=Shard(shard, 3), micro_batch=1, precision="bf16", memory=Memory(accumulate="slice")
    )


def test_gathers_wait_for_all_to_alls_between_nodes_but_not_for_those_in_a_node() -> None:
    software = Software()
    far, near = plan_of(16, 2), plan_of(8, 4)
    all_to_all = steps(software).seconds("expert", "all_to_all", 2 * ROUTED, far)
    assert between_nodes(steps(software), far) == pytest.approx((2 * all_to_all, 2 * all_to_all))
    assert waits(steps(software), far, ["x"], {}) == (0, 0)  # nothing over flat buffers leaves a node
    assert sum(between_nodes(steps(software), near)) == 0
    # Gathers are longer than what a block computes. All-to-alls inside a node slow what computes beside gathers.
    for plan, share in ((far, 1.0), (near, OVERLAP_LOSS)):
        longer = steps(software).step(plan, 1).seconds - steps(software, routed=0).step(plan, 1).seconds
        own = 4 * 4 * steps(software).seconds("expert", "all_to_all", 2 * ROUTED, plan)
        assert longer == pytest.approx(share * own, rel=0.02)


def test_software_may_cut_all_but_experts_over_the_ranks_of_expert_too() -> None:
    plan, buffer = plan_of(8, 4), Buffer(NUMEL, 2, 4, EXPERTS)
    calls = [*ShardAxis().buffer_calls(buffer, plan, FSDP)]
    assert {(call.axis, call.phase): call.num_bytes for call in calls} == {
        ("shard", "forward"): 2 * EXPERTS,
        ("shard", "backward"): 2 * EXPERTS,
        ("shard", "reduce"): 4 * EXPERTS,
        ("expert and shard", "forward"): 2 * (NUMEL - EXPERTS),
        ("expert and shard", "backward"): 2 * (NUMEL - EXPERTS),
        ("expert and shard", "reduce"): 4 * (NUMEL - EXPERTS),
    }
    assert place(plan, "expert and shard") == (1, 32)
    assert not [*ExpertAxis().buffer_calls(buffer, plan, FSDP)]  # already reduced over expert
    assert {call.axis for call in ShardAxis().buffer_calls(buffer, plan, Software())} == {"shard"}
    assert [call.axis for call in ExpertAxis().buffer_calls(buffer, plan, Software())] == ["expert"]
    # A rank updates an eighth of its part of all but experts.
    model = steps(FSDP)
    held = 4 * (NUMEL - EXPERTS + EXPERTS / 8)
    apart = 4 * ((NUMEL - EXPERTS) / 8 + EXPERTS / 8) / 4
    assert model._updated_numel(held, plan) == pytest.approx(apart)
    assert steps(Software())._updated_numel(held, plan) == held / 4


def test_two_groups_at_once_take_as_long_as_their_bytes_or_as_the_longer_one() -> None:
    plan = plan_of(8, 4)
    model, alone = steps(FSDP), steps(replace(FSDP, shards_over_expert=False))
    large, small = Call("shard", "all_gather", 1e9, "forward"), Call("expert and shard", "all_gather", 1e3, "forward")
    each = [model.seconds(call.axis, call.operation, call.num_bytes, plan) for call in (large, small)]
    assert seconds_of(alone, [large, small], plan) == sum(each)
    assert each[0] == seconds_of(model, [large, small], plan) < sum(each)  # the small one's latency is hidden
    latency = model.seconds("shard", "all_gather", 1e-3, plan)
    assert seconds_of(model, [large, large], plan) == pytest.approx(2 * (each[0] - latency))
    assert seconds_of(model, [], plan) == 0
