"""RankMemory of a rank under a plan in closed form: the strategies' own formulas without padding, fast enough for the
search.

State follows ZeRO's stages. Activations are the saved bytes of one block (from the profile, as split by the tensor
axes), times the blocks of a stage, times the micro-batches whose activations the schedule keeps at once. Transient
memory is counted at the peak: at the loss, in the backward of the head, or in the backward of a block, as
`memory/recompute.py` counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from weft.compile.saved_bytes import profile_under
from weft.memory.offload_activations import offloadable_storages, offloaded_blocks
from weft.memory.recompute import root_excess_bytes, transient
from weft.models.loss import row_slices
from weft.models.loss_head import is_loss_in_head
from weft.parallel.apply import localise
from weft.parallel.tensor.cost import transient_bytes
from weft.plan import Pipe, Plan
from weft.planner.in_flight import held_at_once
from weft.planner.question import TOKEN_FIELDS, size_settings
from weft.planner.stage_units import StageUnits
from weft.profiling import Profile, ProfileCache
from weft.schedule.nccl_order import is_ahead
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
SLACK = 1.02  # memory of the allocator divided by memory of tensors


def margin_bytes(tensor_bytes: float) -> int:
    """Bytes of device memory beside those of tensors: the allocator's overhead, CUDA context and libraries."""
    return int(tensor_bytes * (SLACK - 1) + RESERVE_BYTES)


_RANK_PARTS = ProfileCache[tuple[Any, int], Profile]()
NUM_MESSAGES = 2  # messages between stages in flight, one in and one out; sent results of stages are counted apart


@dataclass(frozen=True)
class Sizes:
    """Sizes of a rank's part of the model for one sequence, under one degree of x and y and one recompute policy.

    If only some stages recompute, these are the sizes of the others, and `again` those of the stages that do.
    """

    root_numel: float  # parameters outside of blocks
    first_numel: float  # parameters outside of blocks on the first stage; `last_numel` on the last
    block_numel: float
    last_numel: float
    tied_numel: float  # parameters outside of blocks that the first and the last stage both use
    block_saved: float
    root_saved: float
    behind_saved: float  # the part of `root_saved` after the last block
    at_loss: float  # transient bytes at the loss
    # Transient bytes in the backward of the head, and of a norm before it: for a sequence, and of the gradient of the
    # head's weight (the fp32 gradient, and its scaled and rounded copy), which is as large for any number of sequences.
    at_ends: tuple[tuple[float, float], ...]
    head_numel: float
    in_backward: float  # transient bytes in a block's backward
    at_regions: float  # transient bytes of the tensor axes
    stream_bytes: float
    # For a head that computes the loss in parts: its rows for one sequence, its classes, and the bytes of the gradient
    # that it keeps.
    loss_rows: int = 0
    num_classes: int = 1
    kept_gradient: float = 0.0
    is_compiled: bool = False  # are the blocks and the head's loss compiled?
    # Bytes that the deferred weight gradients of a block need, and the part of them for its last linear.
    block_late: float = 0.0
    last_late: float = 0.0
    fixed_backward: float = 0.0  # transient bytes in a block's backward that do not grow with the sequences
    block_sent: float = 0.0  # bytes of a block's saved activations that may be offloaded to the host
    again: Sizes | None = None

    def of_stages(self, stages: Sequence[StageUnits]) -> tuple[Sizes, tuple[float, ...]]:
        """Returns the sizes of a rank with these stages, and how many blocks' activations each stage saves.

        If only some of a rank's stages recompute, a recomputed block counts as the part of a block that it saves.
        """
        counts, again = tuple(float(one.num_blocks) for one in stages), self.again
        if again is None or not any(one.num_recomputed for one in stages):
            return self, counts
        if all(one.num_recomputed == one.num_blocks for one in stages):
            return again, counts
        share = again.block_saved / self.block_saved if self.block_saved else 1.0
        return self._of_both, tuple(one.num_blocks * (share if one.num_recomputed else 1.0) for one in stages)

    @cached_property
    def _of_both(self) -> Sizes:
        """The sizes of a rank of whose stages some recompute and others do not."""
        assert self.again is not None
        in_backward = max(self.in_backward, self.again.in_backward)
        return replace(self, in_backward=in_backward, at_regions=max(self.at_regions, self.again.at_regions))

    def at_the_loss(self, num_sequences: float, compute: int, wide: int) -> float:
        """Transient bytes at the loss for `num_sequences` sequences.

        Logits have `compute` bytes an element, and `wide` bytes where the loss widens them. Without a loss in the head,
        all logits exist at once. With it, only one part of them exists, and the peak is either at that part's loss or
        at the gradient of the weight. At the first part there is no gradient to add to yet: if it is the only one, the
        bytes of that gradient are taken off, as they are counted among those that are saved. A compiled loss widens no
        logits.
        """
        if not self.loss_rows:
            return self.at_loss * num_sequences
        found = row_slices(math.ceil(self.loss_rows * num_sequences), self.num_classes)
        logits = found[0].stop * self.num_classes
        widened = wide if wide > compute and not self.is_compiled else 0
        absent = self.kept_gradient if len(found) == 1 else 0
        copied = absent if wide > compute else 0  # the weight's gradient, which is widened into the one that is kept
        return float(max(logits * (compute + widened), (logits + self.head_numel) * compute + copied) - absent)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that needs the most memory, by kind."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    saved_bytes: float
    transient_bytes: float

    @property
    def state_bytes(self) -> float:
        """Bytes of parameters, gradients and optimizer state, which live from step to step."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def tensor_bytes(self) -> float:
        """Bytes of all tensors."""
        return self.state_bytes + self.saved_bytes + self.transient_bytes

    @property
    def total_bytes(self) -> float:
        """Bytes of device memory: tensors, allocator overhead, and the reserve for CUDA context and libraries."""
        return self.tensor_bytes * SLACK + RESERVE_BYTES

    @property
    def least_bytes(self) -> float:
        """Bytes of device memory that remain if all parameters and optimizer state are offloaded to the host."""
        return (self.gradients_bytes + self.saved_bytes + self.transient_bytes) * SLACK + RESERVE_BYTES

    def parts(self) -> dict[str, float]:
        """Bytes by content. `other` is transient memory, allocator overhead and libraries."""
        held = {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.saved_bytes,
        }
        return {**held, "other": self.total_bytes - sum(held.values())}


class WorkingMemory(NamedTuple):
    """Memory of a pipeline rank without its state. `shard` and `offload` change only the state."""

    numel: float  # parameters of the rank
    ends: float  # parameters outside of blocks
    saved: float  # bytes of saved activations
    kept: float  # bytes that one block saves for one micro-batch
    loss: float  # transient bytes at the loss
    backward: float  # transient bytes in a block's backward
    throughout: float  # transient bytes at both moments


def working(
    sizes: Sizes, plan: Plan, stages: tuple[StageUnits, ...], num_micro_batches: int, kept_bytes: float = 0.0
) -> tuple[WorkingMemory, ...]:
    """Returns the working memory of the pipeline ranks that may need most.

    `kept_bytes`: results of collectives that are kept of a block and a micro-batch, beside its activations.

    Of ranks with equal stages the first needs most: it holds the most micro-batches. With zero-bubble the last one may.
    """
    degree = plan.pipe.degree
    ranks: dict[tuple[StageUnits, ...], list[int]] = {}
    for rank in range(degree):
        ranks.setdefault(stages[rank::degree], []).append(rank)
    chosen = {rank for same in ranks.values() for rank in (same[0], same[-1])}
    own = {rank: stages[rank::degree] for rank in sorted(chosen)}
    return tuple(rank_working(sizes, plan, of, rank, num_micro_batches, kept_bytes) for rank, of in own.items())


def rank_working(
    sizes: Sizes, plan: Plan, own: tuple[StageUnits, ...], rank: int, num_micro_batches: int, kept_bytes: float = 0.0
) -> WorkingMemory:
    """Returns the working memory of one pipeline rank that has these stages."""
    per_micro_batch = (plan.micro_batch or 1) / plan.num_parts("tokens")
    compute = COMPUTE_DTYPE[plan.precision].itemsize
    sizes, counts = sizes.of_stages(own)
    blocks, is_first, is_last = sum(stage.num_blocks for stage in own), own[0].has_first, own[-1].has_last
    ends = sizes.root_numel if is_first and is_last else is_first * sizes.first_numel + is_last * sizes.last_numel
    numel, kept = blocks * sizes.block_numel + ends, sizes.block_saved
    late = sizes.block_late if plan.pipe.schedule == "zero-bubble" and plan.pipe.degree > 1 else 0.0
    held = held_at_once(plan.pipe, rank, num_micro_batches, counts, late / kept if kept else 0.0)
    saved = (kept * held.alive_blocks + late * held.late_blocks) * per_micro_batch + kept_bytes * held.alive_blocks
    saved += is_last * held.roots * (sizes.root_saved * per_micro_batch + sizes.kept_gradient)
    ends_bytes = [of_sequence * per_micro_batch + gradient for of_sequence, gradient in sizes.at_ends]
    loss = is_last * max(sizes.at_the_loss(per_micro_batch, compute, max(compute, 4)), *ends_bytes)
    backward = sizes.in_backward * per_micro_batch + sizes.fixed_backward
    if sizes.is_compiled:  # all gradients appear at once, after the saved activations are freed
        backward = max(backward, (sizes.stream_bytes - kept) * per_micro_batch + sizes.block_numel * compute)
    backward -= is_last * (sizes.behind_saved * per_micro_batch + sizes.kept_gradient)
    if late:  # the last linear's gradients exist at the peak of its block's backward; counted at the loss, too
        backward += sizes.last_late * per_micro_batch
        loss += is_last * sizes.last_late * per_micro_batch
    if places := offloaded_blocks(blocks, plan.memory.activations):
        # In every backward, the activations of one offloaded block are back on the device.
        saved -= len(places) * sizes.block_sent * per_micro_batch
        backward += sizes.block_sent * per_micro_batch
    throughout = sizes.at_regions * per_micro_batch
    if is_first and is_last:
        backward += sizes.tied_numel * compute
    else:
        message = sizes.stream_bytes * per_micro_batch
        if num_micro_batches == 1 and len(own) == 1:  # what was sent has arrived, and nothing is received ahead
            backward = max(backward, NUM_MESSAGES * message)
        else:
            results = _sent_results(plan.pipe, rank, held.results) if len(own) > 1 or not is_last else 0
            throughout += message * (results + NUM_MESSAGES)
    return WorkingMemory(numel, ends, saved, kept * per_micro_batch, loss, backward, throughout)


def _sent_results(pipe: Pipe, rank: int, alive: float) -> float:
    """The results of stages that a pipeline rank holds, if it has `alive` micro-batches between forward and backward.

    A rank holds one sent result of each awaited channel (`schedule/nccl_order.py`), and of others those not known to
    have arrived.
    """
    is_awaited = pipe.schedule != "message" and not pipe.shadow
    if is_awaited and not (is_ahead(pipe.schedule, pipe.options) and rank == pipe.degree - 1):
        return min(alive, 1.0 + pipe.is_mirrored)
    return alive


def bytes_of_rank(sizes: Sizes, plan: Plan, num_micro_batches: int) -> Callable[[WorkingMemory], float]:
    """Returns the function from a pipeline rank's working memory to its device memory, including state.

    It gives what `memory` gives for plans with a pipeline, without a second replica or streamed weights, in less time.
    """
    compute, master = COMPUTE_DTYPE[plan.precision].itemsize, MASTER_DTYPE[plan.precision].itemsize
    is_sharded = plan.shard.degree > 1 and plan.shard.stage > 1
    gathered = compute if is_sharded and plan.shard.stage == 3 else 0
    of_parameter = sum(state(plan, 1.0, num_micro_batches)) + (master if is_sharded else 0)
    of_backward = 2 * sizes.block_numel * gathered

    def total(rank: WorkingMemory) -> float:
        transient = rank.throughout + rank.ends * gathered + max(rank.loss, rank.backward + of_backward)
        return (rank.numel * of_parameter + rank.saved + transient) * SLACK + RESERVE_BYTES

    return total


def least_bytes(rank: WorkingMemory) -> float:
    """Device memory of a rank whose state takes no memory."""
    return (rank.saved + rank.throughout + max(rank.loss, rank.backward)) * SLACK + RESERVE_BYTES


def memory(ranks: Sequence[WorkingMemory], sizes: Sizes, plan: Plan, num_micro_batches: int) -> RankMemory:
    """Returns the memory, including state, of the rank that needs most among these pipeline ranks."""
    return max((_of_rank(rank, sizes, plan, num_micro_batches) for rank in ranks), key=_total)


def _total(memory: RankMemory) -> float:
    return memory.total_bytes


def _of_rank(rank: WorkingMemory, sizes: Sizes, plan: Plan, num_micro_batches: int) -> RankMemory:
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
    if plan.memory.weights:  # streamed weights need a plan of one rank
        streamed = len(evenly_spaced(round((numel - ends) / sizes.block_numel), plan.memory.weights))
        width = COMPUTE_DTYPE[plan.precision].itemsize + gradient_dtype(plan, num_micro_batches).itemsize
        throughout += min(NUM_DEVICE_BUFFERS, streamed) * sizes.block_numel * width
    held = state(plan, numel * (1 + plan.pipe.is_mirrored), num_micro_batches, streamed * sizes.block_numel)
    return RankMemory(*held, saved, throughout + max(loss, backward))


def state(plan: Plan, numel: float, num_micro_batches: int, streamed_numel: float = 0.0) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state on the device.

    `numel` parameters belong to a pipeline rank before sharding. `streamed_numel` of them are streamed from host
    memory.
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
    """Bytes of one optimizer moment of one parameter. 8-bit codes include their share of a block's scale."""
    moment = moment_dtype(plan.memory.state, MASTER_DTYPE[plan.precision])
    return 1 + 4 / CODE_BLOCK if moment is None else moment.itemsize


def spared_bytes(plan: Plan) -> float:
    """Bytes of memory traffic per parameter that an update saves because the plan holds state in fewer bits.

    Both moments are read and written in fewer bytes. Without master weights, the update reads and writes the weight
    that it would have to write anyway.
    """
    compute, master = COMPUTE_DTYPE[plan.precision].itemsize, MASTER_DTYPE[plan.precision].itemsize
    return 4 * (master - _moment_bytes(plan)) + (0 if plan.memory.master else 2 * master - compute)


def updated_bytes(plan: Plan, numel: float, streamed_numel: float = 0.0) -> float:
    """Bytes that an update copies in each direction between the device and state in host memory.

    `numel` parameters belong to a pipeline rank. `streamed_numel` of them are streamed from host memory. If streamed
    weights are separate from the optimizer's, they only travel to the host and their gradients only come from it.
    """
    here = replace(plan, memory=replace(plan.memory, offload=0.0, delay=False))
    home = streamed_numel * COMPUTE_DTYPE[plan.precision].itemsize if has_separate_slice(plan) else 0.0
    return sum(state(here, numel, 1)) - sum(state(plan, numel, 1, streamed_numel)) - home


def plan_sizes(profile: Profile, plan: Plan) -> Sizes:
    """Returns the sizes of a rank's part of one block and of both ends, also if only some stages recompute."""
    count = plan.memory.recompute_stages
    if count is None:
        return sizes(profile, plan)
    return replace(sizes(profile, plan.of_stage(count)), again=sizes(profile, plan.of_stage(0)))


def sizes(profile: Profile, plan: Plan) -> Sizes:
    """Returns the sizes of a rank's part of one block and of both ends, from a profile of one sequence.

    If the plan computes the loss in the head, the profile with such a head is used, if there is one.
    """
    in_head = profile.in_head if is_loss_in_head(plan) else None
    profile = profile_under(in_head or profile, plan)
    local = _rank_part(profile, plan)
    block, policy = local.blocks[-1], plan.memory.recompute
    names = {parameter.name: float(parameter.numel) for parameter in local.root.parameters}
    embeddings = profile.pairing.embeddings
    first = sum(numel for name, numel in names.items() if name.rpartition(".")[0] in embeddings)
    last, tied = sum(names.values()) - first, 0.0
    split_heads = [split.module for split in profile.pairing.splits.values() if split.kind == "head"]
    if any(f"{head}.weight" not in names for head in split_heads):  # tied: the first and the last stage hold it
        tied = max(names.values(), default=0.0)
    root = (local.root.saved_bytes or {}).get(policy, 0)
    behind = max(0, root - local.root.saved_by_layer.get(policy, {}).get("", 0))
    end = transient(replace(local, blocks=(block,)), policy)  # without waiting gradients of tied parameters
    in_backward = float(end.backward_bytes + behind)
    fixed = _fixed_backward(profile, policy, in_backward)
    over, compute = root_excess_bytes(local, policy), COMPUTE_DTYPE[plan.precision].itemsize
    heads = {name: numel for name, numel in names.items() if name.rpartition(".")[0] in (*split_heads, *embeddings)}
    head = max(heads.values(), default=0.0) if split_heads else 0.0
    layer = profile.layers[split_heads[0]] if in_head and split_heads else None
    linears = [one for name, one in local.layers.items() if one.is_linear and name.startswith(f"{block.name}.")]
    late = [float(one.rows * one.out_features * compute + one.saved_bytes) for one in linears]
    kept_gradient = head * max(compute, 4) if layer else 0.0  # in float32 at least
    gradient = kept_gradient + (head * compute if kept_gradient == 0 or compute < 4 else 0)
    gradients = {name: gradient for name in over if name in split_heads}
    if layer is None:  # it waits during the backward of the norm, which is on the residual stream
        waiting = gradient * local.shares.stream / local.shares.head
        gradients = {name: gradients.get(name, waiting) for name in over if name}
    return Sizes(
        sum(names.values()),
        first,
        float(block.numel),
        last + tied,
        tied,
        float((block.saved_bytes or {}).get(policy, 0)),
        root - kept_gradient,
        behind - kept_gradient,
        float(over.get("", 0)),
        tuple((over[name] - own, own) for name, own in gradients.items()),
        head,
        in_backward - fixed,
        float(transient_bytes(local, plan)),
        profile.stream_numel * compute / plan.tensor.y,
        layer.rows if layer else 0,
        layer.out_features if layer else 1,
        kept_gradient,
        block.backward_bytes is not None,
        sum(late),
        late[-1] if late else 0.0,
        fixed,
        float(sum(offloadable_storages(block, plan).values())),
    )


def _rank_part(profile: Profile, plan: Plan) -> Profile:
    """A rank's part of a profile, with whole sequences."""

    def part() -> Profile:
        whole = replace(plan, **{name: getattr(Plan(), name) for name in TOKEN_FIELDS})
        whole = replace(whole, expert=plan.expert * plan.num_expert_parts // whole.num_expert_parts)
        return localise(profile, whole, dict.fromkeys(plan.degrees, 0))

    return _RANK_PARTS.get(profile, (size_settings(plan), plan.num_expert_parts), part)


def _fixed_backward(profile: Profile, policy: str, of_one: float) -> float:
    """The transient bytes in a block's backward that one and two sequences have alike; `of_one` has all of one."""
    both = profile.of_two
    if both is None:
        return 0.0
    root = (both.root.saved_bytes or {}).get(policy, 0)
    behind = max(0, root - both.root.saved_by_layer.get(policy, {}).get("", 0))
    of_two = transient(replace(both, blocks=both.blocks[-1:]), policy).backward_bytes + behind
    return max(0.0, 2 * of_one - of_two)
