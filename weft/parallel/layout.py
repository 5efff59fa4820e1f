"""How a block's parameters lie end to end in one flat buffer, and which part of it each rank of `shard` owns.

Pure arithmetic, shared by the runtime (`unit.py`), the cost formulas (`shard.py`, `data.py`) and the checkpoint, so
that none of them can drift from the others. Each parameter starts at a multiple of `ALIGNMENT` elements (16 bytes in
bf16, what GPU kernels want), and the buffer is padded so that all slices are equal and start aligned too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.plan import Plan
from weft.profile import Parameter, Profile

ALIGNMENT = 8
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
    return tuple(FlatLayout(tuple(groups[key]), degree) for key in sorted(groups))


def trained_layouts(profile: Profile, plan: Plan) -> Iterator[FlatLayout]:
    """The flat buffers whose gradients are reduced."""
    for block in profile.all:
        for layout in flat_layouts(block.parameters, plan.shard.degree):
            if layout.parameters[0].trainable:
                yield layout


def master_bytes(plan: Plan) -> int:
    """Bytes of one element of master state."""
    return MASTER_DTYPE[plan.precision].itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
