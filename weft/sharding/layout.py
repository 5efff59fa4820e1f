"""The layout of a block's parameters in flat buffers, and the part of each buffer that each rank of `shard` owns.

It is pure arithmetic, shared by the runtime (`units.py`), the cost formulas (`parallel/shard.py`, `parallel/data.py`)
and the checkpoint, so they always agree. Each parameter starts at a multiple of `ALIGNMENT` elements (16 bytes in bf16,
the alignment of GPU kernels). The buffer is padded so that all slices are equal and aligned too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.plan import Plan
from weft.profiling import Block, Parameter, Profile

ALIGNMENT = 8
CODE_BLOCK = 256  # elements of 8-bit optimizer state that share a scale
STAGING_NUMEL = 1 << 23  # elements of host state that are on the device at once, per staging slot
STAGING_SLOTS = 3
STAGING = "staging"  # key of the staging slots' bytes in a rank's state bytes
NUM_DEVICE_BUFFERS = 2  # device buffers for streamed weights of equal blocks: one is computed with, one is filled
STEP_COUNTER_BYTES = 4  # AdamW keeps one fp32 step count for each tensor
COMPUTE_DTYPE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
MASTER_DTYPE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}


@dataclass(frozen=True)
class ParameterPart:
    """The elements [start, stop) of a flattened parameter, stored from `offset` of a rank's slice."""

    parameter: Parameter
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements, which may be 0."""
        return self.stop - self.start

    @property
    def place(self) -> slice:
        """Where the elements lie in the rank's slice."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class FlatLayout:
    """Parameters stored one after another, split into `degree` equal slices."""

    parameters: tuple[Parameter, ...]
    degree: int

    @property
    def sums(self) -> tuple[str, ...]:
        """The axes of the tensor split over which gradients are partial sums."""
        cut = self.parameters[0].cut
        return cut.sums if cut else ()

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes that split these parameters and no others (see `Cut`)."""
        cut = self.parameters[0].cut
        return cut.apart if cut else ()

    @property
    def replicas(self) -> int:
        """The number of ranks of x × y that hold the same parameters."""
        cut = self.parameters[0].cut
        return cut.replicas if cut else 1

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that hold the same parameters; empty if only one does."""
        return self.parameters[0].stages

    @property
    def starts(self) -> tuple[int, ...]:
        """The index in the flat buffer at which each parameter begins."""
        starts, position = [], 0
        for parameter in self.parameters:
            starts.append(position)
            position += _round_up(parameter.numel, ALIGNMENT)
        return tuple(starts)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the view of each parameter in a whole flat buffer. That of a parameter of shape [] has shape [1]."""
        pairs = zip(self.parameters, self.starts, strict=True)
        return [buffer[start : start + one.numel].view(one.shape or 1) for one, start in pairs]

    @property
    def numel(self) -> int:
        """The elements of the whole buffer, with padding."""
        content = sum(_round_up(parameter.numel, ALIGNMENT) for parameter in self.parameters)
        return _round_up(content, ALIGNMENT * self.degree)

    @property
    def slice_numel(self) -> int:
        """The elements of one rank's slice."""
        return self.numel // self.degree

    def parts(self, index: int) -> Iterator[ParameterPart]:
        """Yield each parameter's part in the slice of rank `index`, in the order of parameters; it may be empty."""
        low = index * self.slice_numel
        high = low + self.slice_numel
        for parameter, begin in zip(self.parameters, self.starts, strict=True):
            start = min(max(low - begin, 0), parameter.numel)
            stop = max(min(high - begin, parameter.numel), start)
            yield ParameterPart(parameter, start, stop, begin + start - low if stop > start else 0)


def flat_layouts(parameters: Sequence[Parameter], degree: int) -> tuple[FlatLayout, ...]:
    """Return the flat buffers of a block, those of trained parameters first.

    Parameters share a buffer if they are all trained or all frozen, have gradients that are partial sums over the same
    axes, are held by as many ranks of x × y, are split by the same axes, and are in one pipeline stage only. A
    parameter that several stages hold has a buffer of its own. Parameters of which this rank holds nothing have none.
    """
    groups: dict[tuple[bool, tuple[str, ...], int, tuple[str, ...], str], list[Parameter]] = {}
    for parameter in parameters:
        cut = parameter.cut
        if cut is not None and not parameter.numel and not cut.sums and 0 not in cut.shape:
            continue
        key = (
            not parameter.trainable,
            cut.sums if cut else (),
            cut.replicas if cut else 1,
            cut.apart if cut else (),
            parameter.name if parameter.stages else "",
        )
        groups.setdefault(key, []).append(parameter)
    # Matrices before vectors: parameters that an optimizer treats equally are then contiguous, for one kernel.
    ordered = (sorted(groups[key], key=lambda one: len(one.shape) < 2) for key in sorted(groups))
    return tuple(FlatLayout(tuple(own), degree) for own in ordered)


def trained_layouts(profile: Profile, plan: Plan) -> Iterator[FlatLayout]:
    """Yield the flat buffers whose gradients are reduced."""
    for block in profile.all:
        for layout in flat_layouts(block.parameters, plan.shard.degree):
            if layout.parameters[0].trainable:
                yield layout


def master_bytes(plan: Plan) -> int:
    """Returns the bytes per element of a gradient that is summed or reduced."""
    return MASTER_DTYPE[plan.precision].itemsize


def slice_dtype(plan: Plan) -> torch.dtype:
    """Returns the dtype of the weights that the optimizer updates: the master dtype or, without master weights, the
    compute dtype.
    """
    return (MASTER_DTYPE if plan.memory.master else COMPUTE_DTYPE)[plan.precision]


def gradient_dtype(plan: Plan, accumulation: int) -> torch.dtype:
    """Returns the dtype in which gradients are stored: the compute dtype if they are neither summed nor reduced."""
    return (COMPUTE_DTYPE if accumulation == 1 and plan.num_ranks == 1 else MASTER_DTYPE)[plan.precision]


def num_scales(part: ParameterPart) -> int:
    """Returns the number of blocks of `CODE_BLOCK` elements in a part; each has one scale per 8-bit moment."""
    return -(-part.numel // CODE_BLOCK)


def needs_units(plan: Plan) -> bool:
    """Return whether state is in flat buffers: if there are several ranks, several dtypes, or state on the host."""
    is_mixed = COMPUTE_DTYPE[plan.precision] != MASTER_DTYPE[plan.precision] or plan.memory.state != "master"
    return plan.num_ranks > 1 or is_mixed or plan.memory.keeps_state_on_host


def host_buffers(blocks: Sequence[Block], plan: Plan) -> frozenset[tuple[str, int]]:
    """Return the flat buffers whose state is on the host, as (block name, number in the block).

    These are the streamed buffers (`memory.weights`) and the share that `memory.offload` adds, spread over the chain.
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


DeviceBufferKey = tuple[int, int]  # a buffer's number in its block, and the index among NUM_DEVICE_BUFFERS


@dataclass(frozen=True)
class DeviceBufferSize:
    """Elements of the largest streamed buffer that uses a device buffer, and of the largest one that is trained."""

    numel: int = 0
    trained_numel: int = 0


def streamed_blocks(blocks: Sequence[Block], plan: Plan) -> dict[str, int]:
    """Return the blocks whose weights `memory.weights` keeps on the host, mapped to their order among each other.

    They are a share of the blocks at equal intervals and include the last. If the share is below 1, the first block is
    not among them, so its compute hides the first copy.
    """
    names = [block.name for block in blocks if block.name]
    places = [len(names) - 1 - place for place in reversed(evenly_spaced(len(names), plan.memory.weights))]
    return {names[place]: order for order, place in enumerate(places)}


def device_buffer_sizes(blocks: Sequence[Block], plan: Plan) -> dict[DeviceBufferKey, DeviceBufferSize]:
    """Return the sizes of the device buffers that streamed buffers use in turn."""
    streamed, found = streamed_blocks(blocks, plan), dict[DeviceBufferKey, DeviceBufferSize]()
    for block in blocks:
        if block.name in streamed:
            for number, layout in enumerate(flat_layouts(block.parameters, plan.shard.degree)):
                key = number, streamed[block.name] % NUM_DEVICE_BUFFERS
                size, trained = found.get(key, DeviceBufferSize()), layout.numel * layout.parameters[0].trainable
                found[key] = DeviceBufferSize(max(size.numel, layout.numel), max(size.trained_numel, trained))
    return found


def slot_shapes(
    largest_numel: int, weight: torch.dtype | None, moment: torch.dtype | None
) -> list[tuple[int, torch.dtype]]:
    """Return the elements and dtype of each tensor of a staging slot, for buffers of up to `largest_numel` elements.

    A slot holds all that an update changes of a buffer on the host: weights of dtype `weight` (None if the slice is a
    view of `whole`) and both moments of dtype `moment` (None for 8-bit codes with scales).
    """
    numel = _round_up(min(largest_numel, STAGING_NUMEL), CODE_BLOCK)
    weights = [] if weight is None else [(numel, weight)]
    if moment is not None:
        return [*weights, (numel, moment), (numel, moment)]
    scales = (numel // CODE_BLOCK, torch.float32)
    return [*weights, (numel, torch.int8), scales, (numel, torch.uint8), scales]


def streamed_slot_shapes(
    largest_numel: int, at_rest: torch.dtype, compute: torch.dtype, master: torch.dtype
) -> list[tuple[int, torch.dtype]]:
    """Return the elements and dtype of the tensors that a staging slot needs in addition for streamed buffers.

    These are the gradient, in any dtype, and the updated weights in the compute dtype if that is not the dtype at rest.
    """
    numel = _round_up(min(largest_numel, STAGING_NUMEL), CODE_BLOCK)
    return [(numel, master), *([(numel, compute)] * (at_rest != compute))]


def has_separate_slice(plan: Plan) -> bool:
    """Return whether the weights that the optimizer updates are separate tensors, not views of those that compute."""
    frees_whole = plan.shard.stage == 3 and plan.shard.degree > 1
    return frees_whole or COMPUTE_DTYPE[plan.precision] != slice_dtype(plan)


def moment_dtype(state: str, master: torch.dtype) -> torch.dtype | None:
    """Returns the dtype of AdamW's moments under the plan's `memory.state`; None if they are 8-bit codes."""
    return None if state == "int8" else torch.bfloat16 if state == "bf16" else master


def optimizer_bytes(layout: FlatLayout, index: int, plan: Plan) -> int:
    """Returns the bytes of AdamW's state of the slice of rank `index`: two moments, scales of codes, a step count per
    part.
    """
    parts = [part for part in layout.parts(index) if part.numel]
    counters = STEP_COUNTER_BYTES * len(parts)
    moment = moment_dtype(plan.memory.state, MASTER_DTYPE[plan.precision])
    if not parts:  # padding only
        return 0
    if moment is None:
        return 2 * layout.slice_numel + 8 * sum(map(num_scales, parts)) + counters
    return 2 * layout.slice_numel * moment.itemsize + counters


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def evenly_spaced(num_blocks: int, share: float) -> tuple[int, ...]:
    """Return the indices of a share of the blocks, at equal intervals, starting with the first."""
    counts = [math.ceil(share * place - 1e-9) for place in range(num_blocks + 1)]
    return tuple(place for place in range(num_blocks) if counts[place + 1] > counts[place])
