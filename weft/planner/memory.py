"""What a rank holds under a plan, in the planner's closed form: the strategies' own formulas without their padding.

State follows ZeRO's stages; activations are a block's saved bytes (from the profile, as the tensor axes leave them to a
rank), times the blocks of a stage, times the micro-batches that the schedule keeps alive at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from weft.parallel.layout import COMPUTE_DTYPE, MASTER_DTYPE
from weft.pipeline.schedules import make_schedule
from weft.pipeline.simulate import simulate
from weft.plan import Plan

RESERVE_BYTES = 1.5e9  # the CUDA context, NCCL's buffers, libraries' workspaces
SLACK = 1.02  # of what the allocator holds over what tensors use


@dataclass(frozen=True)
class Sizes:
    """A rank's part of the model under one split of x and y, for one sequence: parameters and bytes saved."""

    root_numel: float  # all that no block holds
    first_numel: float  # the part of it that the first stage holds, and the last
    block_numel: float
    last_numel: float
    block_saved: Mapping[str, float]  # by recompute
    root_saved: float
    logits_numel: float


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, by kind."""

    state_bytes: float
    saved_bytes: float
    transient_bytes: float

    @property
    def total_bytes(self) -> float:
        return (self.state_bytes + self.saved_bytes + self.transient_bytes) * SLACK + RESERVE_BYTES

    def parts(self) -> dict[str, float]:
        """Bytes by what they hold, in words; they add up to the total."""
        held = {"state": self.state_bytes, "activations": self.saved_bytes, "buffers": self.transient_bytes}
        return {**held, "allocator and libraries": self.total_bytes - sum(held.values())}


def memory(sizes: Sizes, plan: Plan, num_blocks: int, num_micro_batches: int) -> Memory:
    """The fullest rank along `pipe`."""
    assert plan.micro_batch is not None
    chunks = num_chunks(plan)
    ranks = sorted({0, min(1, plan.pipe.degree - 1), plan.pipe.degree - 1})  # an end, or the first without one
    alive = alive_at_once(plan.pipe.schedule, plan.pipe.degree, num_micro_batches, tuple(plan.pipe.options.items()))
    return max((_of_rank(sizes, plan, num_blocks, alive[rank], rank, chunks) for rank in ranks), key=_total)


def _total(memory: Memory) -> float:
    return memory.total_bytes


def _of_rank(sizes: Sizes, plan: Plan, num_blocks: int, alive: float, rank: int, chunks: int) -> Memory:
    micro_batch, context, degree = plan.micro_batch or 1, plan.context.degree, plan.shard.degree
    compute, master = COMPUTE_DTYPE[plan.precision].itemsize, MASTER_DTYPE[plan.precision].itemsize
    blocks = num_blocks / plan.pipe.degree
    is_first, is_last = rank == 0, rank == plan.pipe.degree - 1
    ends = sizes.root_numel if is_first and is_last else is_first * sizes.first_numel + is_last * sizes.last_numel
    numel = blocks * sizes.block_numel + ends
    copies = 2 if plan.pipe.degree > 1 and plan.pipe.schedule in ("gems", "bidirectional") else 1
    frees = plan.shard.stage == 3 and degree > 1
    keeps_gradient = plan.shard.stage == 1 or degree == 1
    own = numel / degree
    state = 2 * own * master + (numel if keeps_gradient else own) * master
    state += 0 if frees else numel * compute
    state += own * master if frees or compute != master else 0
    kind = plan.memory.recompute
    per_micro_batch = micro_batch / context
    saved = sizes.block_saved[kind] * blocks / chunks * alive * per_micro_batch
    saved += is_last * sizes.root_saved * per_micro_batch
    transient = 0.0
    if kind != "none":
        transient += sizes.block_saved["none"] * per_micro_batch
    if is_last:  # the gradient of the logits, as the loss gives it and as the head takes it
        transient += sizes.logits_numel * per_micro_batch * (max(4, compute) + compute)
    if frees:
        transient += (2 * sizes.block_numel + ends) * compute
    if degree > 1 and plan.shard.stage > 1:
        transient += numel * master
    return Memory(copies * state, saved, transient)


def num_chunks(plan: Plan) -> int:
    """Stages of each rank of pipe."""
    return plan.pipe.chunks or 2 if plan.pipe.schedule == "interleaved" and plan.pipe.degree > 1 else 1


@lru_cache(maxsize=1 << 14)
def alive_at_once(
    schedule: str, degree: int, num_micro_batches: int, options: tuple[tuple[str, int], ...]
) -> tuple[float, ...]:
    """The most micro-batches whose activations each rank holds; of a steady schedule, more change nothing."""
    if degree == 1:
        return (1.0,)
    if schedule in ("1f1b", "message"):
        return tuple(float(min(num_micro_batches, degree - rank)) for rank in range(degree))
    if schedule == "zero-bubble":
        return (float(min(num_micro_batches, degree)),) * degree
    if schedule == "gpipe":
        return (float(num_micro_batches),) * degree
    if schedule == "interleaved":  # its own count of forwards before the first backward, and the one between
        chunks, groups = dict(options).get("chunks", 2), max(1, num_micro_batches // degree)
        largest = -(-num_micro_batches // groups)
        ahead = [(chunks - 1) * largest + 2 * (degree - rank - 1) + 1 for rank in range(degree)]
        return tuple(float(min(num_micro_batches * chunks, count)) for count in ahead)
    most = min(num_micro_batches, 4 * degree)
    timeline = simulate(make_schedule(schedule, degree, most, **dict(options)))
    return tuple(map(float, timeline.peak_activations))
