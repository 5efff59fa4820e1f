"""What a rank holds under a plan, in the planner's closed form: the strategies' own formulas without their padding.

State follows ZeRO's stages; activations are a block's saved bytes (from the profile, as the tensor axes leave them to a
rank), times the blocks of a stage, times the micro-batches that the schedule keeps alive at once. What comes and goes
is that of the fullest moment: the loss, the backward of the head or that of a block, as `memory/recompute.py` has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from weft.compile.saved_bytes import profile_under
from weft.memory.activation_choice import offloadable_storages, offloaded_blocks
from weft.memory.recompute import root_excess_bytes, transient
from weft.models.loss import row_slices
from weft.models.loss_head import is_loss_in_head
from weft.parallel.tensor.cost import localise, transient_bytes
from weft.plan import Context, Plan
from weft.profile import Profile
from weft.schedule.schedules import make_schedule
from weft.schedule.simulate import simulate
from weft.sharding.layout import (
    CODE_BLOCK,
    COMPUTE_DTYPE,
    MASTER_DTYPE,
    NUM_DEVICE_BUFFERS,
    evenly_spaced,
    gradient_dtype,
    has_separate_slice,
    moment_dtype,
    slice_dtype,
)

RESERVE_BYTES = 1.5e9  # the CUDA context, NCCL's buffers, libraries' workspaces
SLACK = 1.02  # of what the allocator holds over what tensors use
IN_HEAD = "loss in head"  # among what a profile keeps: the profile of the same with a head that gives the loss
NUM_MESSAGES = 2  # of a pipeline, on their way in and out beside the results that are alive anyway


@dataclass(frozen=True)
class Sizes:
    """A rank's part of the model under one split of x and y and one way to recompute, for one sequence."""

    root_numel: float  # all that no block holds
    first_numel: float  # the part of it that the first stage holds, and the last
    block_numel: float
    last_numel: float
    tied_numel: float  # of it, what is used at both ends
    block_saved: Mapping[str, float]  # by recompute
    root_saved: float
    behind_saved: float  # the part of it behind the blocks
    at_loss: float  # bytes there over what is saved
    at_head: float  # in its backward, but for the gradient of its weight
    head_gradient: float  # which it holds there: scaled from one that is kept, and rounded
    head_numel: float
    in_backward: float  # of a block, over what blocks have saved
    at_regions: float  # the tensor axes' own
    stream_bytes: float
    # Of a head that gives the loss in parts: its rows of one sequence, its classes, and the gradient that it keeps.
    loss_rows: int = 0
    num_classes: int = 1
    kept_gradient: float = 0.0
    is_compiled: bool = False  # blocks and the head's loss
    block_sent: float = 0.0  # what a block may send to the host of what it saves

    def at_the_loss(self, num_sequences: float, compute: int, wide: int) -> float:
        """Bytes at the loss over what is saved, of `compute` or `wide` bytes an element: with all logits, or with a
        part of them, at their loss or at the gradient of the weight. The first part has no gradient to add to yet. A
        compiled loss widens no logits.
        """
        if not self.loss_rows:
            return self.at_loss * num_sequences
        found = row_slices(math.ceil(self.loss_rows * num_sequences), self.num_classes)
        logits = found[0].stop * self.num_classes
        widened = wide if wide > compute and not self.is_compiled else 0
        at_rows = logits * (compute + widened) - (self.kept_gradient if len(found) == 1 else 0)
        return float(max(at_rows, (logits + self.head_numel) * compute))


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, by kind."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    saved_bytes: float
    transient_bytes: float

    @property
    def state_bytes(self) -> float:
        """What lives from step to step."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def tensor_bytes(self) -> float:
        """Of tensors."""
        return self.state_bytes + self.saved_bytes + self.transient_bytes

    @property
    def total_bytes(self) -> float:
        """Of the device."""
        return self.tensor_bytes * SLACK + RESERVE_BYTES

    @property
    def least_bytes(self) -> float:
        """What stays of it at least, whatever share of its state goes to the host."""
        return (self.gradients_bytes + self.saved_bytes + self.transient_bytes) * SLACK + RESERVE_BYTES

    def parts(self) -> dict[str, float]:
        """Bytes by what they hold; `other` is what comes and goes, the allocator's slack and libraries."""
        held = {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.saved_bytes,
        }
        return {**held, "other": self.total_bytes - sum(held.values())}


class Working(NamedTuple):
    """A rank of pipe at work: all that it holds but for its state, which is what `shard` and `offload` change."""

    numel: float  # of its parameters
    ends: float  # of them, what no block holds
    saved: float
    kept: float  # of it, by one block for one micro-batch
    loss: float  # bytes that come and go: at the loss,
    backward: float  # in a block's backward,
    throughout: float  # and in both


def working(sizes: Sizes, plan: Plan, num_blocks: int, num_micro_batches: int) -> tuple[Working, ...]:
    """The ranks of pipe that may be the fullest: both ends, and the first that is none."""
    alive = alive_at_once(plan.pipe.schedule, plan.pipe.degree, num_micro_batches, tuple(plan.pipe.options.items()))
    ranks = sorted({0, min(1, plan.pipe.degree - 1), plan.pipe.degree - 1})
    return tuple(_working(sizes, plan, num_blocks, alive[rank], rank, num_chunks(plan)) for rank in ranks)


def _working(sizes: Sizes, plan: Plan, num_blocks: int, alive: float, rank: int, chunks: int) -> Working:
    per_micro_batch, compute = (plan.micro_batch or 1) / plan.context.degree, COMPUTE_DTYPE[plan.precision].itemsize
    blocks = num_blocks / plan.pipe.degree
    is_first, is_last = rank == 0, rank == plan.pipe.degree - 1
    ends = sizes.root_numel if is_first and is_last else is_first * sizes.first_numel + is_last * sizes.last_numel
    numel, kept = blocks * sizes.block_numel + ends, sizes.block_saved[plan.memory.recompute]
    saved = (kept * blocks / chunks * alive + is_last * sizes.root_saved) * per_micro_batch
    saved += is_last * sizes.kept_gradient
    head = sizes.at_head * per_micro_batch + sizes.head_gradient
    loss = is_last * max(sizes.at_the_loss(per_micro_batch, compute, max(compute, 4)), head)
    backward = sizes.in_backward * per_micro_batch
    if sizes.is_compiled:  # gives the gradients of all parameters at once, when nothing is left of what it saved
        backward = max(backward, (sizes.stream_bytes - kept) * per_micro_batch + sizes.block_numel * compute)
    backward -= is_last * (sizes.behind_saved * per_micro_batch + sizes.kept_gradient)
    if places := offloaded_blocks(num_blocks, plan.memory.activations):  # one of them is on its way back in backward
        saved -= len(places) * sizes.block_sent * per_micro_batch
        backward += sizes.block_sent * per_micro_batch
    throughout = sizes.at_regions * per_micro_batch
    if is_first and is_last:
        backward += sizes.tied_numel * compute
    else:
        results = alive if chunks > 1 or not is_last else 0
        throughout += sizes.stream_bytes * per_micro_batch * (results + NUM_MESSAGES)
    return Working(numel, ends, saved, kept * per_micro_batch, loss, backward, throughout)


def memory(ranks: Sequence[Working], sizes: Sizes, plan: Plan, num_micro_batches: int) -> Memory:
    """What the fullest of these ranks of pipe holds, its state included."""
    return max((_of_rank(rank, sizes, plan, num_micro_batches) for rank in ranks), key=_total)


def _total(memory: Memory) -> float:
    return memory.total_bytes


def _of_rank(rank: Working, sizes: Sizes, plan: Plan, num_micro_batches: int) -> Memory:
    numel, ends, saved, kept, loss, backward, throughout = rank
    if plan.shard.degree > 1 and plan.shard.stage > 1:
        compute, master = COMPUTE_DTYPE[plan.precision].itemsize, MASTER_DTYPE[plan.precision].itemsize
        if plan.shard.stage == 3:
            throughout += ends * compute
            backward += 2 * sizes.block_numel * compute
        if plan.pipe.degree > 1 or (num_micro_batches > 1 and plan.memory.accumulate == "whole"):
            throughout += numel * master
        else:
            one = sizes.block_numel * master
            backward += ends * master + max(one, 2 * one - kept)
    streamed = 0
    if plan.memory.weights:  # on one rank
        streamed = len(evenly_spaced(round((numel - ends) / sizes.block_numel), plan.memory.weights))
        width = COMPUTE_DTYPE[plan.precision].itemsize + gradient_dtype(plan, num_micro_batches).itemsize
        throughout += min(NUM_DEVICE_BUFFERS, streamed) * sizes.block_numel * width
    held = state(plan, numel * (1 + plan.pipe.is_mirrored), num_micro_batches, streamed * sizes.block_numel)
    return Memory(*held, saved, throughout + max(loss, backward))


def state(plan: Plan, numel: float, num_micro_batches: int, streamed_numel: float = 0.0) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer on the device, of so many parameters on a rank of pipe; some of them
    may be streamed from the host.
    """
    compute, at_rest = COMPUTE_DTYPE[plan.precision].itemsize, slice_dtype(plan).itemsize
    gradient = gradient_dtype(plan, num_micro_batches).itemsize
    own, is_alone = numel / plan.shard.degree, plan.shard.degree == 1
    frees = plan.shard.stage == 3 and not is_alone
    here = 1 - max(plan.memory.offload, streamed_numel / numel if numel else 0.0)
    parameters = 0 if frees else (numel - streamed_numel) * compute
    parameters += own * at_rest * here if has_separate_slice(plan) else 0
    gradients = (numel - streamed_numel if plan.shard.stage == 1 or is_alone else own) * gradient
    if plan.memory.delay:
        parameters, gradients = parameters + own * compute, gradients + own * gradient
    return parameters, gradients, 2 * own * here * _moment_bytes(plan)


def _moment_bytes(plan: Plan) -> float:
    """Of one moment of a parameter; codes with their part of a scale."""
    moment = moment_dtype(plan.memory.state, MASTER_DTYPE[plan.precision])
    return 1 + 4 / CODE_BLOCK if moment is None else moment.itemsize


def spared_bytes(plan: Plan) -> float:
    """What the update of a parameter need not move, by what the plan holds in fewer bits: both moments, read and
    written, and the master weight, in whose place is that which would be written anyway.
    """
    compute, master = COMPUTE_DTYPE[plan.precision].itemsize, MASTER_DTYPE[plan.precision].itemsize
    return 4 * (master - _moment_bytes(plan)) + (0 if plan.memory.master else 2 * master - compute)


def updated_bytes(plan: Plan, numel: float, streamed_numel: float = 0.0) -> float:
    """Bytes that an update moves each way of state in host memory, of so many parameters on a rank of pipe. Weights
    that are there apart from the optimizer's only go, as their gradients only come.
    """
    here = replace(plan, memory=replace(plan.memory, offload=0.0, delay=False))
    home = streamed_numel * COMPUTE_DTYPE[plan.precision].itemsize if has_separate_slice(plan) else 0.0
    return sum(state(here, numel, 1)) - sum(state(plan, numel, 1, streamed_numel)) - home


def sizes(profile: Profile, plan: Plan) -> Sizes:
    """A rank's part of one block and of the ends, from a profile of one sequence; that of a head which gives the loss,
    if there is one, where a plan leaves the loss to the head.
    """
    in_head = profile.cache.get(IN_HEAD) if is_loss_in_head(plan) else None
    profile = profile_under(in_head or profile, plan)
    part = f"part of {plan.tensor} in {plan.precision}"
    if part not in profile.cache:
        at = dict.fromkeys(plan.degrees, 0)
        profile.cache[part] = localise(profile, replace(plan, context=Context()), at)
    local: Profile = profile.cache[part]
    block, policy = local.blocks[-1], plan.memory.recompute
    names = {parameter.name: float(parameter.numel) for parameter in local.root.parameters}
    embeddings = profile.pairing.embeddings
    first = sum(numel for name, numel in names.items() if name.rpartition(".")[0] in embeddings)
    last, tied = sum(names.values()) - first, 0.0
    split_heads = [split.module for split in profile.pairing.splits.values() if split.kind == "head"]
    if any(f"{head}.weight" not in names for head in split_heads):  # tied: both ends hold it
        tied = max(names.values(), default=0.0)
    root = (local.root.saved_bytes or {}).get(policy, 0)
    behind = max(0, root - local.root.saved_by_layer.get(policy, {}).get("", 0))
    end = transient(replace(local, blocks=(block,)), policy)  # without what tied parameters wait for
    over, compute = root_excess_bytes(local, policy), COMPUTE_DTYPE[plan.precision].itemsize
    heads = {name: numel for name, numel in names.items() if name.rpartition(".")[0] in (*split_heads, *embeddings)}
    head = max(heads.values(), default=0.0) if split_heads else 0.0
    heads_over = [size for name, size in over.items() if name in split_heads]
    layer = profile.layers[split_heads[0]] if in_head and split_heads else None
    kept_gradient = head * max(compute, 4) if layer else 0.0  # in float32 at least
    head_gradient = kept_gradient + (head * compute if kept_gradient == 0 or compute < 4 else 0)
    return Sizes(
        sum(names.values()),
        first,
        float(block.numel),
        last + tied,
        tied,
        {kind: float(size) for kind, size in (block.saved_bytes or {}).items()},
        root - kept_gradient,
        behind - kept_gradient,
        float(max(size for name, size in over.items() if name not in split_heads)),
        max(heads_over, default=0) - head_gradient,
        head_gradient,
        head,
        float(end.backward_bytes + behind),
        float(transient_bytes(local, plan)),
        profile.stream_numel * compute / plan.tensor.y,
        layer.rows if layer else 0,
        layer.out_features if layer else 1,
        kept_gradient,
        block.backward_bytes is not None,
        float(sum(offloadable_storages(block, plan).values())),
    )


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
