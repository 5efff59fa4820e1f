"""The plan: a frozen value with a degree for each axis, the memory policy and the precision of a run.

It is read and written as TOML. `AXES` is the mesh order, outermost first: the axes that communicate most come last, so
that they lie inside a node. A new axis adds a field to `Plan` and a line to `AXES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from weft.cluster.communication import Communication
from weft.errors import ConfigError, PlanError
from weft.plan.rules import check_plan
from weft.plan.tables import HOST_SHARES, Branch, Context, Memory, Pipe, Recompute, Shard, Tensor, Tile
from weft.schedule.schedules import make_schedule
from weft.schema import convert, convert_fields, dump_toml, nearest, read_toml, to_table

__all__ = [
    "AXES",
    "HOST_SHARES",
    "MAX_RANKS",
    "AxisField",
    "BatchSplit",
    "Branch",
    "Context",
    "Memory",
    "Pipe",
    "Plan",
    "Precision",
    "Recompute",
    "Shard",
    "Tensor",
    "Tile",
    "axes_that_split",
    "load_plan",
    "split_batch",
]


class AxisField(NamedTuple):
    """The field of `Plan` that holds an axis' degree, and what the ranks of the axis hold different parts of."""

    degree: str
    splits: tuple[Literal["samples", "pixels", "tokens", "stages", "weights"], ...]


AXES: dict[str, AxisField] = {
    "data": AxisField("data", ("samples",)),
    "pipe": AxisField("pipe.degree", ("stages",)),
    "shard": AxisField("shard.degree", ("samples", "weights")),
    "expert": AxisField("expert", ("samples", "weights")),
    "branch": AxisField("branch.degree", ("weights",)),
    "rows": AxisField("tile.rows", ("pixels",)),
    "columns": AxisField("tile.columns", ("pixels",)),
    "context": AxisField("context.degree", ("tokens",)),
    "x": AxisField("tensor.x", ("weights",)),
    "y": AxisField("tensor.y", ("weights",)),
}
_INDICES = {axis: index for index, axis in enumerate(AXES)}
_degrees = attrgetter(*(axis.degree for axis in AXES.values()))
MAX_RANKS = 1 << 20

Precision = Literal["fp64", "fp32", "bf16"]


@lru_cache
def axes_that_split(*what: str) -> tuple[str, ...]:
    """Returns the axes whose ranks hold different parts of any of `what`, in the mesh order."""
    return tuple(name for name, axis in AXES.items() if set(axis.splits) & set(what))


@dataclass(frozen=True)
class Plan:
    """How the work is split over ranks. Fields are converted as those of a run file: `pipe=2` is `pipe=Pipe(2)`.

    `ranks_per_device` ranks of `data` have consecutive numbers. The first of them sums their gradients with those of
    other devices.
    """

    data: Annotated[int, "replicas of the model, each with its samples"] = 1
    pipe: Annotated[Pipe, "stages of the model's chain of blocks; a number sets degree"] = field(default_factory=Pipe)
    shard: Annotated[Shard, "ranks that share the state (ZeRO, FSDP); a number sets degree"] = field(
        default_factory=Shard
    )
    expert: Annotated[int, "ranks that the experts of each layer are split over, each with its samples"] = 1
    expert_over: Annotated[
        tuple[Literal["context", "x", "y"], ...],
        "axes whose ranks the experts of each layer are split over, too; all else keeps its own layout",
    ] = ()
    branch: Annotated[Branch, "ranks that independent branches of the model are split over; a number sets degree"] = (
        field(default_factory=Branch)
    )
    tensor: Annotated[Tensor, "splits of every matmul; a number sets x"] = field(default_factory=Tensor)
    context: Annotated[Context, "ranks that a sequence is split over; a number sets degree"] = field(
        default_factory=Context
    )
    tile: Annotated[Tile, "tiles of an image"] = field(default_factory=Tile)
    micro_batch: Annotated[int | None, "samples of one forward of a rank; by default all of a step"] = None
    memory: Annotated[Memory, "how memory is saved"] = field(default_factory=Memory)
    precision: Annotated[Precision, "of parameters and activations; by default what suits the machine"] = "fp32"
    matmul: Annotated[
        Literal["compute", "fp8"],
        "fp8: linears and experts of blocks multiply in fp8 instead of the precision; needs exact = false",
    ] = "compute"
    exact: Annotated[bool, "refuse what changes the mathematics, such as statistics over a part of the batch"] = True
    hierarchical: Annotated[
        bool, "collectives across nodes in two levels: inside each node, and between nodes as `communication` says"
    ] = False
    communication: Annotated[Communication, "how collectives are carried out"] = field(default_factory=Communication)
    statistics: Annotated[
        Literal["rank", "batch"],
        "batch norms take statistics over a rank's micro-batch, or over those of all ranks (batch)",
    ] = "rank"
    ranks_per_device: Annotated[
        int, "so many ranks of `data` share one device, on which their gradients are summed first"
    ] = 1

    def __post_init__(self) -> None:
        convert_fields(self, "plan")
        self._check()

    def _check(self) -> None:
        if min(self._all_degrees) < 1:  # the search makes thousands of plans, so this names the axis only then
            axis, degree = next((axis, degree) for axis, degree in self.degrees.items() if degree < 1)
            raise PlanError(f"plan.{axis} = {degree}; a degree is at least 1")
        if self.num_ranks > MAX_RANKS:
            raise PlanError(f"the plan asks for {self.num_ranks} ranks ({self.describe_axes()}); at most {MAX_RANKS}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise PlanError(f"plan.micro_batch = {self.micro_batch}; a micro-batch holds at least 1 sequence")
        if self.memory.accumulate == "slice" and (self.shard.degree == 1 or self.shard.stage == 1):
            raise PlanError(
                f"plan.memory.accumulate = 'slice' needs shard.stage 2 or 3 with shard.degree > 1; given stage "
                f"{self.shard.stage}, degree {self.shard.degree}; use 'whole' or raise the stage"
            )
        if self.matmul == "fp8" and (self.precision != "bf16" or self.exact):
            raise PlanError(
                f"plan.matmul = 'fp8' rounds what precision = 'bf16' computes, which changes the mathematics; given "
                f"precision = '{self.precision}' and exact = {str(self.exact).lower()}; use 'bf16' and exact = false"
            )
        if self.tile.fused < 1:
            raise PlanError(f"plan.tile.fused = {self.tile.fused}; an exchange serves at least 1 layer")
        check_plan(self)
        self.communication.refuse(self.hierarchical, self.exact)

    def changed(self, **fields: Any) -> Plan:
        """The plan with other values of these fields, checked: `dataclasses.replace`, but fast enough for searches."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **fields)
        made.__dict__.pop("_all_degrees", None)  # cached
        made._check()
        return made

    def of_stage(self, stage: int) -> Plan:
        """The plan that one stage of the pipeline follows, with its own `memory.recompute`.

        Recompute gathers the inputs of matmuls again anyway, so `tensor.regather` is for the stages without it.
        """
        count = self.memory.recompute_stages
        if count is None:
            return self
        if stage < count:
            memory, tensor = replace(self.memory, recompute_stages=None), replace(self.tensor, regather=False)
            return replace(self, memory=memory, tensor=tensor)
        memory = replace(self.memory, recompute="none", recompute_stages=None, keep_collectives=False)
        return replace(self, memory=memory)

    def degree(self, axis: str) -> int:
        """The degree of an axis of `AXES`."""
        return self.place(axis)[1]

    @cached_property
    def _all_degrees(self) -> tuple[int, ...]:
        return _degrees(self)

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis, in the mesh order (`AXES`)."""
        return dict(zip(AXES, self._all_degrees, strict=True))

    @property
    def num_ranks(self) -> int:
        """The number of processes that the plan needs."""
        return math.prod(self._all_degrees)

    def axes_that_split(self, *what: str) -> tuple[str, ...]:
        """The axes whose ranks hold different parts of any of `what` (see `AxisField.splits`), in the mesh order.

        Ranks of the axes in `expert_over` hold different experts, and those of `branch` may have different samples.
        """
        axes = axes_that_split(*what)
        more: tuple[str, ...] = self.expert_over if "weights" in what else ()
        if "samples" in what and self.branch.splits_batch:
            more = (*more, "branch")
        return tuple(axis for axis in AXES if axis in axes or axis in more) if more else axes

    def num_parts(self, *what: str) -> int:
        """The number of ranks with different parts of any of `what` (see `AxisField.splits`)."""
        degrees = self._all_degrees
        return math.prod([degrees[_INDICES[axis]] for axis in self.axes_that_split(*what)])

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes with a degree above 1 over which the experts of each layer are split, in the mesh order."""
        if not self.expert_over:
            return ("expert",) if self.expert > 1 else ()
        return tuple(axis for axis in AXES if axis in ("expert", *self.expert_over) and self.degree(axis) > 1)

    @property
    def expert_axis(self) -> str:
        """The axis, or joint axis, of the mesh over which rows of tokens are sent to their experts."""
        return "expert" if not self.expert_over or set(self.expert_axes) <= {"expert"} else "experts"

    @property
    def num_expert_parts(self) -> int:
        """The number of ranks that the experts of each layer are split over."""
        return math.prod(self.degree(axis) for axis in self.expert_axes) if self.expert_over else self.expert

    @property
    def num_batch_ranks(self) -> int:
        """The number of ranks with different samples: the product of the axes that split the batch."""
        return self.num_parts("samples")

    @property
    def has_batch_statistics(self) -> bool:
        """Do batch norms communicate with ranks that have other samples?"""
        return self.statistics == "batch" and self.num_batch_ranks > 1

    @property
    def is_viewed(self) -> bool:
        """Do models run under the view of `weft.spatial`? They do with tiles, or with statistics of the whole batch."""
        return self.tile.degree > 1 or self.has_batch_statistics

    def inner(self, axis: str) -> int:
        """Returns the product of the degrees of the axes after `axis`: the distance of neighbours on it, in ranks."""
        return self.place(axis)[0]

    def place(self, axis: str) -> tuple[int, int]:
        """Returns (the distance in ranks between neighbours on an axis, its degree)."""
        degrees, index = self._all_degrees, _INDICES[axis]
        return math.prod(degrees[index + 1 :]), degrees[index]

    def describe_axes(self) -> str:
        """Returns the axes as text, such as `data 2 × shard 4 (stage 3)`, or `1 process`."""
        notes = {"shard": f" (stage {self.shard.stage})", "context": f" ({self.context.kind})"}
        notes["data"] = f" ({self.ranks_per_device} per device)" if self.ranks_per_device > 1 else ""
        notes["branch"] = " (batch split)" if self.branch.splits_batch else ""
        pipe, cap = self.pipe, "" if self.pipe.in_flight is None else f", {self.pipe.in_flight} in flight"
        notes["pipe"] = f" ({pipe.schedule}{cap}{', named stages' * bool(pipe.split)}{', shadow' * pipe.shadow})"
        if words := [
            *([f"until {self.tile.until}"] * bool(self.tile.until)),
            *([self.tile.hand_over] * (self.tile.hand_over != "gather")),
            *([f"fused {self.tile.fused}"] * (self.tile.fused > 1)),
        ]:
            notes["columns" if self.tile.columns > 1 else "rows"] = f" ({', '.join(words)})"
        if self.tensor.sequence:
            words = ["sequence"] + ["regather"] * self.tensor.regather
            notes["x"] = f" ({', '.join(words + [f'{self.tensor.chunks} chunks'] * (self.tensor.chunks > 1))})"
        if self.expert_axis == "experts":
            last, over = self.expert_axes[-1], " × ".join(self.expert_axes)
            notes[last] = f"{notes.get(last, '')} (experts over {over})"
        parts = [f"{axis} {degree}{notes.get(axis, '')}" for axis, degree in self.degrees.items() if degree > 1]
        return " × ".join(parts) or "1 process"

    def to_toml(self) -> str:
        """Returns the plan as a `[plan]` table of TOML."""
        return dump_toml({"plan": to_table(self)})


@dataclass(frozen=True)
class BatchSplit:
    """The batch identity: samples (sequences or images) a step = batch ranks × micro-batch × accumulation."""

    batch: int
    num_batch_ranks: int
    micro_batch: int
    accumulation: int
    sequence: int
    samples: str = "sequences"  # the kind of samples, "sequences" or "images"

    @property
    def tokens(self) -> int:
        """Tokens (or images) per step over all ranks."""
        return self.batch * self.sequence

    def identity(self, plan: Plan) -> str:
        """Returns the identity with its numbers as text, as printed at the start of a run."""
        identity = (
            f"{self.batch} {self.samples}/step = {plan.data} data × {plan.shard.degree} shard × "
            f"{f'{plan.expert} expert × ' if plan.expert > 1 else ''}"
            f"{f'{plan.branch.degree} branch × ' if plan.branch.splits_batch else ''}{self.micro_batch} micro-batch × "
            f"{self.accumulation} accumulation"
        )
        if self.samples == "images":
            return identity
        return f"{identity}; × {self.sequence} tokens = {self.tokens:,} tokens/step"


def split_batch(plan: Plan, batch: int, sequence: int, samples: str = "sequences") -> BatchSplit:
    """Returns the batch identity of a plan; raises PlanError with the numbers and the nearest batch that divides."""
    ranks, context = plan.num_batch_ranks, plan.context.degree
    if context > 1 and samples != "sequences":
        raise PlanError(f"plan.context = {context} splits sequences, and the data is of {samples}; use context = 1")
    if context > 1 and sequence % (2 * context):
        raise PlanError(
            f"a sequence of {sequence} tokens does not divide into 2 × context = {2 * context} equal parts (balanced "
            f"for causal attention); use a multiple of {2 * context}"
        )
    if batch < 1 or sequence < 1:
        raise PlanError(f"a batch of {batch} {samples} of {sequence} tokens is empty; both must be at least 1")
    if batch % ranks:
        down, up = batch // ranks * ranks, (batch // ranks + 1) * ranks
        raise PlanError(
            f"batch = {batch} {samples} does not divide over {ranks} ranks (data {plan.data} × shard "
            f"{plan.shard.degree}{f' × expert {plan.expert}' if plan.expert > 1 else ''}"
            f"{f' × branch {plan.branch.degree}' if plan.branch.splits_batch else ''}); use "
            f"{f'{down} or {up}' if down else up}"
        )
    per_rank = batch // ranks
    micro_batch = plan.micro_batch or per_rank
    if per_rank % micro_batch:
        divisors = ", ".join(str(size) for size in range(1, per_rank + 1) if per_rank % size == 0)
        raise PlanError(
            f"plan.micro_batch = {micro_batch} does not divide the {per_rank} {samples} of each rank (batch {batch} / "
            f"{ranks} ranks); use one of {divisors}"
        )
    if plan.pipe.degree > 1:  # raises if the schedule does not allow this number of micro-batches
        make_schedule(plan.pipe.schedule, plan.pipe.degree, per_rank // micro_batch, **plan.pipe.options)
    return BatchSplit(batch, ranks, micro_batch, per_rank // micro_batch, sequence, samples)


def plan_of_degrees(degrees: Mapping[str, int]) -> Plan:
    """Returns a plan with these degrees by the names of axes."""
    table: dict[str, Any] = {}
    for name, degree in degrees.items():
        if name not in AXES:
            raise PlanError(f"'{name}' is not an axis{nearest(name, list(AXES))}")
        key, _, inner = AXES[name].degree.partition(".")
        table[key] = {**table.get(key, {}), inner: degree} if inner else degree
    plan: Plan = convert(table, Plan, "plan")
    return plan


def load_plan(path: Path) -> Plan:
    """Returns the plan in the `[plan]` table of a TOML file."""
    table = read_toml(path)
    if "plan" not in table:
        raise ConfigError(f"{path} has no [plan] table")
    plan: Plan = convert(table["plan"], Plan, "plan")
    return plan
