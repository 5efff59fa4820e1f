"""How a block's parameters lie end to end in one flat buffer, and which part of it each rank of `shard` owns.

Pure arithmetic, shared by the runtime (`unit.py`), the cost formulas (`shard.py`, `data.py`) and the checkpoint, so
that none of them can drift from the others. Each parameter starts at a multiple of `ALIGNMENT` elements (16 bytes in
bf16, what GPU kernels want), and the buffer is padded so that all slices are equal and start aligned too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.plan import Plan
from weft.profile import Block, Parameter, Profile

ALIGNMENT = 8
CODE_BLOCK = 256  # elements of 8-bit optimizer state that share a scale
STAGING_NUMEL = 1 << 23  # elements of state from the host that are on the device at once, in each slot
STAGING_SLOTS = 3
STAGING = "staging"  # the kind of a rank's state that those slots are
NUM_ROOMS = 2  # for the weights of alike blocks that are streamed: one computes, one is filled
STEP_COUNTER_BYTES = 4  # AdamW keeps one fp32 step count for each tensor
COMPUTE_DTYPE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
MASTER_DTYPE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}


@dataclass(frozen=True)
class Part:
    """The elements [start, stop) of a flattened parameter, lying at `offset` of a rank's slice."""

    parameter: Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameters end to end, cut into `degree` equal slices."""

    parameters: tuple[Parameter, ...]
    degree: int

    @property
    def sums(self) -> tuple[str, ...]:
        """The axes of the model's split over which gradients are partial sums."""
        cut = self.parameters[0].cut
        return cut.sums if cut else ()

    @property
    def replicas(self) -> int:
        """How many ranks of x × y hold the same parameters."""
        cut = self.parameters[0].cut
        return cut.replicas if cut else 1

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of a pipeline that hold the same parameters, where several do."""
        return self.parameters[0].stages

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat buffer."""
        starts, position = [], 0
        for parameter in self.parameters:
            starts.append(position)
            position += _round_up(parameter.numel, ALIGNMENT)
        return tuple(starts)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        content = sum(_round_up(parameter.numel, ALIGNMENT) for parameter in self.parameters)
        return _round_up(content, ALIGNMENT * self.degree)

    @property
    def slice_numel(self) -> int:
        """Elements of one rank's slice."""
        return self.numel // self.degree

    def parts(self, index: int) -> Iterator[Part]:
        """Every parameter's part in the slice of rank `index`, empty ones included, in the order of the parameters."""
        low = index * self.slice_numel
        high = low + self.slice_numel
        for parameter, begin in zip(self.parameters, self.starts, strict=True):
            start = min(max(low - begin, 0), parameter.numel)
            stop = max(min(high - begin, parameter.numel), start)
            yield Part(parameter, start, stop, begin + start - low if stop > start else 0)


def flat_layouts(parameters: Sequence[Parameter], degree: int) -> tuple[FlatLayout, ...]:
    """The flat buffers of a block: one for all parameters that are treated alike, those that are trained first.

    Alike: trained or frozen, with gradients that are partial sums over the same axes, on as many ranks of x × y, and in
    one stage of a pipeline only; a parameter that several stages hold has a buffer of its own.
    """
    groups: dict[tuple[bool, tuple[str, ...], int, str], list[Parameter]] = {}
    for parameter in parameters:
        cut = parameter.cut
        key = (
            not parameter.trainable,
            cut.sums if cut else (),
            cut.replicas if cut else 1,
            parameter.name if parameter.stages else "",
        )
        groups.setdefault(key, []).append(parameter)
    # Matrices before vectors: what an optimizer treats alike then lies in one run, for one kernel.
    ordered = (sorted(groups[key], key=lambda one: len(one.shape) < 2) for key in sorted(groups))
    return tuple(FlatLayout(tuple(own), degree) for own in ordered)


def trained_layouts(profile: Profile, plan: Plan) -> Iterator[FlatLayout]:
    """The flat buffers whose gradients are reduced."""
    for block in profile.all:
        for layout in flat_layouts(block.parameters, plan.shard.degree):
            if layout.parameters[0].trainable:
                yield layout


def master_bytes(plan: Plan) -> int:
    """Bytes of one element of a gradient that is added up or reduced."""
    return MASTER_DTYPE[plan.precision].itemsize


def slice_dtype(plan: Plan) -> torch.dtype:
    """Of the weights that the optimizer updates: master weights, or those that compute where there are none."""
    return (MASTER_DTYPE if plan.memory.master else COMPUTE_DTYPE)[plan.precision]


def gradient_dtype(plan: Plan, accumulation: int) -> torch.dtype:
    """Of gradients at rest: in the compute dtype where they are neither added up nor reduced."""
    return (COMPUTE_DTYPE if accumulation == 1 and plan.num_ranks == 1 else MASTER_DTYPE)[plan.precision]


def num_scales(part: Part) -> int:
    """Blocks of a part whose 8-bit state has scales."""
    return -(-(part.stop - part.start) // CODE_BLOCK)


def needs_units(plan: Plan) -> bool:
    """Whether state lives in flat buffers: with ranks beside it, several precisions, or a part on the host."""
    is_mixed = COMPUTE_DTYPE[plan.precision] != MASTER_DTYPE[plan.precision] or plan.memory.state != "master"
    return plan.num_ranks > 1 or is_mixed or plan.memory.keeps_state_on_host


def on_host(blocks: Sequence[Block], plan: Plan) -> frozenset[tuple[str, int]]:
    """The flat buffers, by block and number, whose state is on the host: those that are streamed, and what
    `memory.offload` asks for beside them, spread over the chain.
    """
    found, seen, taken = [], 0, 0
    streamed = streamed_blocks(blocks, plan)
    for block in blocks:
        for number, layout in enumerate(flat_layouts(block.parameters, plan.shard.degree)):
            if layout.parameters[0].trainable:
                seen += layout.slice_numel
                is_due = plan.memory.offload and taken + layout.slice_numel / 2 <= plan.memory.offload * seen
                if block.name in streamed or is_due:
                    taken += layout.slice_numel
                    found.append((block.name, number))
    return frozenset(found)


RoomKey = tuple[int, int]  # a buffer's number in its block, and which of NUM_ROOMS


@dataclass(frozen=True)
class RoomSize:
    """Elements of the largest streamed buffer that a room takes, and of those that are trained."""

    numel: int = 0
    trained_numel: int = 0


def streamed_blocks(blocks: Sequence[Block], plan: Plan) -> dict[str, int]:
    """The blocks whose weights `memory.weights` keeps on the host, and their order among them: a share at equal
    intervals, the last among them. Where it is not all, the first block of a step is there, and hides what comes.
    """
    names = [block.name for block in blocks if block.name]
    places = [len(names) - 1 - place for place in reversed(spread(len(names), plan.memory.weights))]
    return {names[place]: order for order, place in enumerate(places)}


def room_sizes(blocks: Sequence[Block], plan: Plan) -> dict[RoomKey, RoomSize]:
    """The rooms on the device that streamed buffers take turns in."""
    streamed, found = streamed_blocks(blocks, plan), dict[RoomKey, RoomSize]()
    for block in blocks:
        if block.name in streamed:
            for number, layout in enumerate(flat_layouts(block.parameters, plan.shard.degree)):
                key = number, streamed[block.name] % NUM_ROOMS
                size, trained = found.get(key, RoomSize()), layout.numel * layout.parameters[0].trainable
                found[key] = RoomSize(max(size.numel, layout.numel), max(size.trained_numel, trained))
    return found


def slot_shapes(
    largest_numel: int, weight: torch.dtype | None, moment: torch.dtype | None
) -> list[tuple[int, torch.dtype]]:
    """A slot's room for what an update changes of a buffer on the host, of the largest: weights, where they are apart
    from `whole`, and both moments, or their codes and scales (None). Elements and dtype of each tensor.
    """
    numel = _round_up(min(largest_numel, STAGING_NUMEL), CODE_BLOCK)
    weights = [] if weight is None else [(numel, weight)]
    if moment is not None:
        return [*weights, (numel, moment), (numel, moment)]
    scales = (numel // CODE_BLOCK, torch.float32)
    return [*weights, (numel, torch.int8), scales, (numel, torch.uint8), scales]


def passing_shapes(
    largest_numel: int, at_rest: torch.dtype, compute: torch.dtype, master: torch.dtype
) -> list[tuple[int, torch.dtype]]:
    """A slot's room for what an update of a streamed buffer reads, its gradient in any dtype, and for what it writes
    besides: weights to compute with, where those at rest are others.
    """
    numel = _round_up(min(largest_numel, STAGING_NUMEL), CODE_BLOCK)
    return [(numel, master), *([(numel, compute)] * (at_rest != compute))]


def is_apart(plan: Plan) -> bool:
    """Whether the optimizer's weights are other tensors than those that compute."""
    frees_whole = plan.shard.stage == 3 and plan.shard.degree > 1
    return frees_whole or COMPUTE_DTYPE[plan.precision] != slice_dtype(plan)


def moment_dtype(state: str, master: torch.dtype) -> torch.dtype | None:
    """Of AdamW's moments under the plan's `memory.state`; None where they are codes."""
    return None if state == "int8" else torch.bfloat16 if state == "bf16" else master


def optimizer_bytes(layout: FlatLayout, index: int, plan: Plan) -> int:
    """What AdamW holds for the slice of rank `index`: two moments, a step count for each part, and scales of codes."""
    parts = [part for part in layout.parts(index) if part.stop > part.start]
    counters = STEP_COUNTER_BYTES * len(parts)
    moment = moment_dtype(plan.memory.state, MASTER_DTYPE[plan.precision])
    if not parts:  # padding alone
        return 0
    if moment is None:
        return 2 * layout.slice_numel + 8 * sum(map(num_scales, parts)) + counters
    return 2 * layout.slice_numel * moment.itemsize + counters


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def spread(num_blocks: int, share: float) -> tuple[int, ...]:
    """The places of a share of the blocks, at equal intervals, the first among them."""
    counts = [math.ceil(share * place - 1e-9) for place in range(num_blocks + 1)]
    return tuple(place for place in range(num_blocks) if counts[place + 1] > counts[place])
