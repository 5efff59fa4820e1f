"""Cuts a traced forward into stages: the stage of each unit, and the tensors that cross from one stage to another."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from weft.errors import PlanError
from weft.pipeline.trace import Trace
from weft.plan import Pipe
from weft.profiling import RecordedCall
from weft.schedule.actions import Edge

StageWeights = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Route:
    """A trace cut into stages: `stages` has the stage of each event.

    It is None for an event whose inputs are only parameters, which every stage that holds them runs, and for an event
    without outputs, which every stage runs.
    """

    trace: Trace
    num_stages: int
    stages: tuple[int | None, ...]

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every tensor that a stage takes from an earlier one.

        The name of an edge is the tensor's number in the trace.
        """
        found: dict[tuple[int, int, int], None] = {}
        source: dict[int, int | None] = {}
        for event, stage in zip(self.trace.events, self.stages, strict=True):
            for number in event.inputs:
                begin = source.get(number)
                if begin is not None and stage is not None and begin < stage:
                    found[number, begin, stage] = None
            source.update(dict.fromkeys(event.outputs, stage))
        return tuple(
            Edge(begin, stage, str(number), self.trace.values[number].needs_gradient)
            for number, begin, stage in sorted(found)
        )

    @cached_property
    def outline(self) -> tuple[tuple[int, int, bool], ...]:
        """The edges without the numbers of their tensors, which change with each operation between units."""
        return tuple((edge.source, edge.target, edge.backward) for edge in self.edges)

    @cached_property
    def edge_numbers(self) -> tuple[int, ...]:
        """The number in the trace of each edge's tensor.

        Schedules refer to edges by index, traces to tensors by number.
        """
        return tuple(int(edge.name) for edge in self.edges)

    @cached_property
    def edge_indices(self) -> dict[tuple[int, int], int]:
        """The index of the edge that brings a tensor (by its number) to a stage."""
        return {(int(edge.name), edge.target): index for index, edge in enumerate(self.edges)}

    @cached_property
    def parameters(self) -> tuple[frozenset[str], ...]:
        """The parameters that each stage uses outside of its own units."""
        used: list[set[str]] = [set() for _ in range(self.num_stages)]
        for event, stage in zip(self.trace.events, self.stages, strict=True):
            if stage is not None:
                used[stage] |= event.parameters
        return tuple(map(frozenset, used))

    @cached_property
    def crossing(self) -> tuple[frozenset[int], ...]:
        """The numbers of the tensors that each stage makes for other stages."""
        made: list[set[int]] = [set() for _ in range(self.num_stages)]
        for edge, number in zip(self.edges, self.edge_numbers, strict=True):
            made[edge.source].add(number)
        return tuple(map(frozenset, made))

    @cached_property
    def last_event(self) -> tuple[int, ...]:
        """The index of the last event of each stage."""
        last = [0] * self.num_stages
        for place, stage in enumerate(self.stages):
            if stage is not None:
                last[stage] = place
        return tuple(last)

    def calls_of(self, stage: int) -> tuple[RecordedCall, ...]:
        """Return the collectives of a stage in its forward, with those that its backward will make.

        They belong to the stage's events, and to code on the model's inputs that the stage runs on its way.
        """
        begun = self.last_event[stage] + 1
        others = [place for place in range(begun, len(self.stages)) if not self.does(stage, place)]
        left = others[0] if others else len(self.stages)
        return tuple(
            one
            for one in self.trace.calls
            if (one.events_before <= left if one.event is None else self.stages[one.event] == stage)
        )

    def does(self, stage: int, place: int) -> bool:
        """Return whether a stage itself runs the event at index `place`."""
        own, event = self.stages[place], self.trace.events[place]
        if own is not None:
            return own == stage
        return not event.outputs or event.parameters <= self.parameters[stage]


def cut(trace: Trace, stage_of: Mapping[str, int], num_stages: int) -> Route:
    """Cut the trace by the given stages of its units.

    An operation between units goes to the stage of its latest input.
    """
    where: dict[int, int | None] = {}
    stages: list[int | None] = []
    for event in trace.events[:-1]:
        inputs = [stage for number in event.inputs if (stage := where.get(number)) is not None]
        latest = max(inputs, default=None)
        if event.is_call and event.name not in stage_of:
            raise PlanError(
                f"'{event.name}' is called in evaluation, or for inputs of another shape, but not in the forward by "
                f"which the model was cut into stages; call it in every forward"
            )
        stage = stage_of[event.name] if event.is_call else latest if event.outputs else None
        if latest is not None and stage is not None and latest > stage:
            raise PlanError(
                f"'{event.name}' is in stage {stage} but takes what stage {latest} makes, so the chain goes back; put "
                f"both into one stage (pipe.split), or use pipe = 1"
            )
        stages.append(stage)
        where.update(dict.fromkeys(event.outputs, stage))
    route = Route(trace, num_stages, (*stages, num_stages - 1))
    _refuse_changes(route)
    return route


def refuse_evaluation(training: Route, evaluation: Route) -> str | None:
    """Return why stages cut for training cannot evaluate, or None.

    The reason is that other tensors cross them, or that a parameter is missing.
    """
    for stage in range(training.num_stages):
        for name in sorted(evaluation.parameters[stage] - training.parameters[stage]):
            return f"the parameter '{name}' is used by stage {stage} in evaluation only; use it in training too"
    if training.outline == evaluation.outline:
        return None
    for mode, one, other in (("training", training, evaluation), ("evaluation", evaluation, training)):
        for name, source, target in (_named_edges(one) - _named_edges(other)).elements():
            return (
                f"what '{name}' makes goes from stage {source} to stage {target} in {mode} only; use it in both, or "
                f"cut the model so that it stays in one stage (pipe.split)"
            )
    return "tensors cross its stages in another order than in training, or others of them need gradients"


def _named_edges(route: Route) -> Counter[tuple[str, int, int]]:
    """Return the edges by the name of the event that made their tensor."""
    made = {number: event.name for event in route.trace.events for number in event.outputs}
    return Counter((made[int(edge.name)], edge.source, edge.target) for edge in route.edges)


def _refuse_changes(route: Route) -> None:
    """Refuse in-place changes that another stage could see: stages have copies of a tensor, made at different times."""
    source: dict[int, int | None] = {}
    uses: dict[int, list[int | None]] = {}  # the stages that have used a tensor so far
    changed: dict[int, tuple[str, int | None]] = {}
    for event, stage in zip(route.trace.events, route.stages, strict=True):
        for number in event.inputs:
            name, by = changed.get(number, (event.name, stage))
            if by != stage and stage is not None:
                _refuse_change(name, by, stage)
            uses.setdefault(number, []).append(stage)
        for number in event.changed:
            others = [other for other in uses.get(number, []) if other not in (stage, None)]
            if others and source.get(number) == stage:
                _refuse_change(event.name, stage, others[0])
            changed[number] = event.name, stage
        source.update(dict.fromkeys(event.outputs, stage))


def _refuse_change(name: str, stage: int | None, other: int | None) -> None:
    raise PlanError(
        f"'{name}' in stage {stage} changes a tensor in place that stage {other} uses too; do it on a copy, or put "
        f"both into one stage (pipe.split)"
    )


def unit_order(trace: Trace) -> list[str]:
    """Return the units in the order of their first calls."""
    return list(dict.fromkeys(event.name for event in trace.events if event.is_call))


def partition(trace: Trace, blocks: Sequence[str], weights: StageWeights, pipe: Pipe) -> dict[str, int]:
    """Return the stage of every unit: as `pipe.split` says, or such that the heaviest stage is as light as possible.

    `weights` has the weight of each unit at each stage. Every stage holds at least one block. Embedding, norm and head
    join their neighbours, and their weights count. In a model without blocks, every unit is one.
    """
    order = unit_order(trace)
    called = [name for name in order if name in set(blocks)] or order  # layers may be attributes, not in a list
    return assign(order, set(called), weights, pipe)


def assign(order: list[str], blocks: set[str], weights: StageWeights, pipe: Pipe) -> dict[str, int]:
    """Return the stage of every unit of a forward that calls them in this order; `blocks` are among them."""
    num_stages = pipe.num_stages
    if pipe.split:
        return _as_listed(order, pipe.split, num_stages)
    if num_stages > len(blocks):
        raise PlanError(
            f"{num_stages} stages need as many blocks, and the model's forward calls {len(blocks)}; "
            f"use at most {len(blocks)} stages (pipe.degree × chunks)"
        )
    return _balanced(order, blocks, weights)


def _as_listed(order: list[str], split: Sequence[str], num_stages: int) -> dict[str, int]:
    if len(split) != num_stages - 1:
        raise PlanError(
            f"pipe.split names {len(split)} modules, but {num_stages} stages have {num_stages - 1} beginnings beside "
            f"the first; name the module that begins each further stage"
        )
    for name in split:
        if name not in order:
            raise PlanError(f"pipe.split names '{name}', which is not among the units: {', '.join(order)}")
    places = [order.index(name) for name in split]
    if places != sorted(set(places)) or places[0] == 0:
        raise PlanError(
            f"pipe.split = {list(split)} is not in the order of the forward, or leaves the first stage empty; "
            f"the units are {', '.join(order)}"
        )
    return {name: bisect_right(places, place) for place, name in enumerate(order)}


def _balanced(order: list[str], blocks: set[str], weights: StageWeights) -> dict[str, int]:
    """Exact dynamic programming: best[k][i] is the least heaviest stage of the first i units in k stages."""
    count, num_stages = len(order), len(weights)
    held = list(accumulate((name in blocks for name in order), initial=0))
    totals: dict[int, list[float]] = {}  # most stages share the same weights
    for units in weights:
        if id(units) not in totals:
            totals[id(units)] = list(accumulate((units.get(name, 0.0) for name in order), initial=0.0))
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    begin = [[0] * (count + 1) for _ in range(num_stages + 1)]  # of the last stage; of equally good ones the first
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        total, before = totals[id(weights[stage - 1])], best[stage - 1]
        for stop in range(stage, count - num_stages + stage + 1):  # later stages have a unit each
            least, end, held_then = float("inf"), total[stop], held[stop]
            for start in range(stop - 1, stage - 2, -1):
                own = end - total[start]
                if own > least:
                    break  # earlier starts make this stage heavier still
                heaviest = max(before[start], own)
                if heaviest <= least and held_then > held[start]:
                    least, begin[stage][stop] = heaviest, start
            best[stage][stop] = least
    result: dict[str, int] = {}
    stop = count
    for stage in range(num_stages, 0, -1):
        start = begin[stage][stop]
        result.update(dict.fromkeys(order[start:stop], stage - 1))
        stop = start
    return {name: result[name] for name in order}
