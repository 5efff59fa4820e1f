"""Collectives of `context` in one block, in closed form for the planner.

They are those of `attention.py`. Gradients are summed in 32 bits at least. The keys and values of
a ring go together in one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.plan import Plan
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import BlockWork, Call
from weft.sharding.layout import COMPUTE_DTYPE


def block_calls(block: BlockPass, plan: Plan) -> Iterator[Call]:
    """Yields the collectives of a block's attention.

    In a ring, the next keys are sent during all blocks of attention but the last. An all-to-all is not hidden.
    """
    degree, scale = plan.context.degree, block.micro_batch / plan.context.degree
    keys = key_numel(block.work, plan, block.software) * scale
    queries = block.work.query_numel * scale / plan.tensor.x
    width = COMPUTE_DTYPE[plan.precision].itemsize
    forward = [Call("context", "send", width * keys, "forward", beside="attention")] * (degree - 1)
    sent = [Call("context", "send", size * keys, "backward", beside="attention") for size in (width, max(width, 4))]
    backward = sent * (degree - 1)
    if plan.context.kind == "all-to-all":
        traded = (width * (queries + keys), width * queries)
        forward = [Call("context", "all_to_all", num_bytes, "forward", beside="nothing") for num_bytes in traded]
        backward = [call._replace(phase="backward") for call in forward]
    yield from forward
    yield from backward
    if attends_again(plan, block.software) and plan.memory.repeats_collectives:
        yield from (call._replace(phase="backward") for call in forward)


def key_numel(work: BlockWork, plan: Plan, software: Software) -> float:
    """K and V on one rank, for all tokens of a sequence. An all-to-all repeats key heads if ranks are more."""
    x, degree = plan.tensor.x, plan.context.degree
    if software.repeats_keys:
        return 2 * work.query_numel / x
    heads = max(1, work.num_key_heads // x)
    repeats = degree // math.gcd(heads, degree) if plan.context.kind == "all-to-all" else 1
    return 2 * work.key_numel / work.num_key_heads * heads * repeats


def attends_again(plan: Plan, software: Software) -> bool:
    """Does backward compute attention again? weft's selective recompute keeps no results of ring attention."""
    kind = software.selective
    is_selective = kind == "attention" or (kind == "cheap" and plan.context.degree > 1)
    return {"none": False, "selective": is_selective, "full": True}[plan.memory.recompute]
