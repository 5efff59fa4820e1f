"""The calls that the planner times against the cost of a run: the bytes that one more block of a decoder adds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from weft.comm import Traffics
from weft.models import DecoderConfig, build
from weft.parallel.apply import STRATEGIES, localise
from weft.plan import Context, Memory, Plan, Shard, Tensor, split_batch
from weft.profiling import Profile, profile
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import workload
from weft.strategy import Buffer, Strategy

SEQUENCE, MICRO_BATCH = 16, 2
NORM_BYTES = 4 * SEQUENCE * MICRO_BATCH  # the moments of one norm, which the planner leaves out
FULL, SLICE = Memory("full"), Memory(accumulate="slice")
PLANS = [
    ("data", Plan(data=2)),
    ("data", Plan(data=2, shard=Shard(2))),
    ("shard", Plan(shard=Shard(2, 1))),
    ("shard", Plan(shard=Shard(4, 2))),
    ("shard", Plan(shard=Shard(2, 3))),
    ("shard", Plan(shard=Shard(2, 2), memory=SLICE)),
    ("context", Plan(context=Context(2))),
    ("context", Plan(context=Context(4), memory=FULL)),
    ("context", Plan(context=Context(2, "all-to-all"))),
    ("tensor", Plan(tensor=Tensor(2))),
    ("tensor", Plan(tensor=Tensor(2), context=Context(2))),
    ("tensor", Plan(tensor=Tensor(4), memory=FULL)),
    ("tensor", Plan(tensor=Tensor(2, sequence=True))),
    ("tensor", Plan(tensor=Tensor(2, sequence=True, regather=True))),
    ("tensor", Plan(tensor=Tensor(1, 2))),
    ("tensor", Plan(tensor=Tensor(2, 2))),
]


@cache
def profiled(num_layers: int, num_sequences: int) -> Profile:
    config = DecoderConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    tokens = torch.zeros(num_sequences, SEQUENCE, dtype=torch.long)
    return profile(build(config), lambda: (tokens,), dtype=torch.bfloat16)


def on_wire(traffic: Traffics) -> Counter[str]:
    """Bytes by axis; an all-reduce sends as much as a reduce-scatter and an all-gather."""
    found = Counter[str]()
    for (axis, operation), value in traffic.items():
        found[axis] += value.num_bytes * (2 if operation == "all_reduce" else 1)
    return found


def stated(strategy: Strategy, plan: Plan) -> Counter[str]:
    """What the strategy's cost says that a third block adds."""
    split = split_batch(plan, MICRO_BATCH * plan.num_batch_ranks, SEQUENCE)
    at = dict.fromkeys(plan.degrees, 0)
    locals_ = [localise(profiled(count, MICRO_BATCH), plan, at) for count in (2, 3)]
    two, three = (on_wire(strategy.cost(local, plan, split, at).traffic) for local in locals_)
    three.subtract(two)
    return +three


def timed(strategy: Strategy, plan: Plan) -> Counter[str]:
    """What the planner times for one block."""
    whole = profiled(3, 1)
    block = BlockPass(workload(whole).blocks[-1], MICRO_BATCH, Software())
    calls = [*strategy.block_calls(block, plan)]
    calls += strategy.buffer_calls(Buffer(whole.blocks[-1].numel, 2, 4), plan, Software())
    found = Counter[str]()
    for call in calls:
        num_bytes = int(call.times * call.num_bytes)
        assert num_bytes == call.times * call.num_bytes
        found[call.axis] += num_bytes * (2 if call.operation == "all_reduce" else 1)
    return found


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=lambda one: one.describe_axes() if isinstance(one, Plan) else one)
@pytest.mark.full(3)
def test_the_planner_times_the_bytes_that_the_cost_states(name: str, plan: Plan) -> None:
    strategy = next(one for one in STRATEGIES if one.name == name)
    plan = replace(plan, micro_batch=MICRO_BATCH, precision="bf16")
    found, expected = timed(strategy, plan), stated(strategy, plan)
    if plan.tensor.y > 1:
        expected["y"] -= 2 * 2 * 2 * NORM_BYTES  # all-reduces of two norms, forward and backward
    assert found == expected
    assert sum(found.values()) > 0
