"""The traffic of an axis over all flat buffers of a model, from its strategy's calls for one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.comm.ledger import Key
from weft.plan import BatchSplit, Plan
from weft.profiling import Block, Profile
from weft.profiling.software import Software
from weft.sharding.layout import COMPUTE_DTYPE, flat_layouts, master_bytes
from weft.strategy import Buffer, Strategy, reductions_per_step

WEFT = Software()


def buffer_traffic(strategy: Strategy, profile: Profile, plan: Plan, split: BatchSplit) -> Iterator[tuple[Key, int]]:
    """Yields the collectives of a step over every flat buffer, each with its bytes."""
    compute = COMPUTE_DTYPE[plan.precision].itemsize
    for block in profile.all:
        passes = _passes(block, profile, plan, split)
        for layout in flat_layouts(block.parameters, plan.shard.degree):
            reductions = reductions_per_step(plan, split) if layout.parameters[0].trainable else 0
            buffer = Buffer(layout.numel, compute, master_bytes(plan), layout.numel if layout.apart else 0)
            for call in strategy.buffer_calls(buffer, plan, WEFT):
                times = reductions if call.phase == "reduce" else passes[call.phase]
                yield from [((call.axis, call.operation), int(call.num_bytes))] * (times * int(call.times))


def _passes(block: Block, profile: Profile, plan: Plan, split: BatchSplit) -> Mapping[str, int]:
    """Returns how often parameters are needed in a step, by phase. The root's are kept from forward to backward."""
    if block is profile.root:
        return {"forward": split.accumulation if plan.pipe.degree == 1 else 1, "backward": 0}
    return {"forward": split.accumulation * block.calls, "backward": split.accumulation * block.in_backward}
