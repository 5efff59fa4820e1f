"""Finds a model's independent branches in a trace, and gives each to a rank.

An event (an operation) that depends on, or is needed by, every operation with parameters is a point that all data
passes through; all ranks run it. Any other operation with parameters whose inputs all ranks have begins a *path*. An
operation on the results of one path belongs to that path. An operation on the results of several paths joins them.

    x ─┬─ conv ── norm ── relu ─────────────┬─ cat
       ├─ conv ── norm ── relu ── conv ─────┤        three paths, one wave
       └─ pool ── conv ─────────────────────┘

If the user names the modules that are branches, only their parameters begin paths, and all other operations with
parameters run on all ranks.

Paths between two joins form a *wave*: they are independent, and different ranks run them at the same time. Paths that
share a parameter are one *branch*, and so are given to one rank. Branches are dealt out by the longest-processing-time
rule: the longest first, each to the rank on which the waves then take the least time. For one wave the result takes at
most 4/3 - 1/(3·ranks) times as long as the best one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.errors import PlanError
from weft.pipeline.trace import END, Trace

FLOPS_PER_BYTE = 50  # FLOPs that take as long as moving a byte; only ratios between branches depend on it


@dataclass(frozen=True)
class ModelBranch:
    """Paths that one rank runs: their parameters' names, and their work in each wave (FLOPs, bytes as FLOPs)."""

    parameters: frozenset[str]
    work: Mapping[int, float]

    @property
    def name(self) -> str:
        """The module that contains the parameters, or the first of them."""
        parts = [name.split(".") for name in sorted(self.parameters)]
        common = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1]
        return ".".join(common) or sorted(self.parameters)[0]


@dataclass(frozen=True)
class Deal:
    """The rank of each branch. `imbalance`: the time of the waves over what equal shares would take, at least 1."""

    branches: tuple[ModelBranch, ...]
    ranks: tuple[int, ...]
    degree: int

    @property
    def owners(self) -> dict[str, int]:
        """The rank that holds each parameter of a branch. All ranks hold the other parameters."""
        pairs = zip(self.branches, self.ranks, strict=True)
        return {name: rank for branch, rank in pairs for name in branch.parameters}

    @property
    def makespan(self) -> float:
        """The work of the waves, if in each the rank with the most decides."""
        return makespan(self.branches, self.ranks)

    @property
    def imbalance(self) -> float:
        total = sum(sum(branch.work.values()) for branch in self.branches)
        return self.makespan * self.degree / total if total else 1.0

    def describe(self) -> str:
        """Returns the branches of each rank as text, with the imbalance."""
        names: list[list[str]] = [[] for _ in range(self.degree)]
        for branch, rank in zip(self.branches, self.ranks, strict=True):
            names[rank].append(branch.name)
        own = "; ".join(f"rank {rank}: {_list(found)}" for rank, found in enumerate(names))
        return f"{len(self.branches)} branches ({own}); imbalance {self.imbalance:.2f}"


def join_regions(found: Mapping[str, Sequence[ModelBranch]]) -> list[ModelBranch]:
    """Returns the branches of all regions of a model, with names and waves of the whole model."""
    joined: list[ModelBranch] = []
    num_waves = 0
    for region, branches in found.items():
        start, first = f"{region}." if region else "", num_waves
        for one in branches:
            work = {first + wave: own for wave, own in one.work.items()}
            joined.append(ModelBranch(frozenset(start + name for name in one.parameters), work))
            num_waves = max(num_waves, *(wave + 1 for wave in work))
    return joined


def _list(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def total_work(trace: Trace) -> float:
    """Returns the work of all events of a trace, in the unit of branches."""
    return sum(work.flops + FLOPS_PER_BYTE * work.num_bytes for work in trace.work.values())


def makespan(branches: Sequence[ModelBranch], ranks: Sequence[int]) -> float:
    """Returns the time of all waves, if in each the rank with the most work decides."""
    loads = Counter[tuple[int, int]]()
    for branch, rank in zip(branches, ranks, strict=True):
        for wave, work in branch.work.items():
            loads[wave, rank] += work  # type: ignore[assignment]
    slowest: dict[int, float] = {}
    for (wave, _), work in loads.items():
        slowest[wave] = max(slowest.get(wave, 0.0), work)
    return sum(slowest.values())


def deal(branches: Sequence[ModelBranch], degree: int) -> Deal:
    """Gives each branch to one of `degree` ranks, the longest first."""
    order = sorted(range(len(branches)), key=lambda i: (-sum(branches[i].work.values()), i))
    ranks, loads = [0] * len(branches), [Counter[int]() for _ in range(degree)]
    for index in order:
        work = branches[index].work

        def after(rank: int, work: Mapping[int, float] = work) -> tuple[float, float, int]:
            times = [max(*(load[wave] for load in loads), loads[rank][wave] + own) for wave, own in work.items()]
            return sum(times), sum(loads[rank][wave] for wave in work), rank

        ranks[index] = min(range(degree), key=after)
        loads[ranks[index]].update(work)
    return Deal(tuple(branches), tuple(ranks), degree)


# --- paths


@dataclass
class _BranchPath:
    """A path: its parameters and its work in each wave. `found` leads to the path that it was merged with."""

    parameters: set[str] = field(default_factory=set)
    work: Counter[int] = field(default_factory=Counter)
    is_shared: bool = False  # a parameter of it is also used by all ranks
    found: _BranchPath | None = None

    def root(self) -> _BranchPath:
        return self if self.found is None else self.found.root()


def find_branches(trace: Trace, modules: Sequence[str] = (), common: Collection[str] = ()) -> tuple[ModelBranch, ...]:
    """Returns the branches of a traced model, each of which is in a wave with another, in the order of computation.

    If `modules` are given, they are the branches. Raises PlanError if they cannot be. All ranks hold the parameters in
    `common`.
    """
    names = {number: name for number, name in trace.parameter_numbers.items() if name not in common}
    if modules:
        names = {number: name for number, name in names.items() if _module_of(name, modules)}
    cuts = _passed_by_all(trace, set(names)) | _common_events(trace, set(trace.parameter_numbers) - set(names))
    made: dict[int, _BranchPath] = {}  # the path of each tensor that only one path has
    joined: dict[int, int] = {}  # the wave after which all ranks have a tensor that several paths gave
    # the parameters of each tensor that is computed from parameters and buffers only
    derived = {number: frozenset([names[number]] if number in names else ()) for number in trace.parameters.values()}
    users: dict[str, list[_BranchPath | None]] = {}
    paths, wave = list[_BranchPath](), 0
    for index, event in enumerate(trace.events):
        parameters = frozenset[str]().union(*(derived[number] for number in event.inputs if number in derived))
        data = [number for number in event.inputs if number not in derived]
        if not data:
            derived.update(dict.fromkeys(event.outputs, parameters))
            continue
        given = list({id(made[number]): made[number] for number in data if number in made}.values())
        is_cut, is_joined = index in cuts, any(joined.get(number) == wave for number in data)
        path = given[0] if len(given) == 1 and not is_cut and not is_joined else None
        if path is None and parameters:
            wave += is_joined or bool(given)
            if not is_cut:
                path = _BranchPath()
                paths.append(path)
        for name in parameters:
            users.setdefault(name, []).append(path)
        if path is not None:
            work = trace.work.get(index)
            path.parameters |= parameters
            path.work[wave] += 0 if work is None else work.flops + FLOPS_PER_BYTE * work.num_bytes
            made.update(dict.fromkeys(event.outputs, path))
        elif not parameters and (given or is_joined):
            joined.update(dict.fromkeys(event.outputs, wave))
    return _named_branches(paths, users, modules) if modules else _branches(paths, users)


def _module_of(parameter: str, modules: Sequence[str]) -> str | None:
    """Returns the module, of these, that holds a parameter; None if there is none."""
    return next((module for module in modules if parameter.startswith(f"{module}.")), None)


def _common_events(trace: Trace, parameters: set[int]) -> set[int]:
    """Returns the events that use one of these parameters, or a tensor made of one and of nothing but parameters."""
    derived, state, found = set(parameters), set(trace.parameters.values()), set[int]()
    for index, event in enumerate(trace.events):
        if derived.intersection(event.inputs):
            if state.issuperset(event.inputs):
                derived.update(event.outputs)
            else:
                found.add(index)
        if state.issuperset(event.inputs):
            state.update(event.outputs)
    return found


def _named_branches(
    paths: Iterable[_BranchPath], users: Mapping[str, Sequence[_BranchPath | None]], modules: Sequence[str]
) -> tuple[ModelBranch, ...]:
    """Returns a branch for each named module, or raises PlanError if one cannot run beside another."""
    given = f"branch.modules = {list(modules)}"
    for path in paths:
        own = sorted({str(_module_of(name, modules)) for name in path.parameters})
        if len(own) > 1:
            raise PlanError(
                f"{given}, but one of '{own[0]}' and '{own[1]}' needs the other's result, so that they cannot run at "
                f"the same time; name one of them, or a module that holds both"
            )
        first = next(path for path in paths if path.parameters and _module_of(min(path.parameters), modules) == own[0])
        _merge(first.root(), path.root())
    found = _branches(paths, users)
    held = {_module_of(name, modules) for branch in found for name in branch.parameters}
    for module in modules:
        if module not in held:
            raise PlanError(
                f"{given}, but no other branch runs at the same time as '{module}': the model has no parameters of "
                f"that name, uses them outside of it too, or needs its result before the others begin; leave it out"
            )
    return found


def _branches(
    paths: Iterable[_BranchPath], users: Mapping[str, Sequence[_BranchPath | None]]
) -> tuple[ModelBranch, ...]:
    """Merges paths that share parameters, and leaves out those that all ranks must run, or that are alone."""
    for sharing in users.values():
        first = next((path for path in sharing if path is not None), None)
        for path in sharing:
            if first is not None and path is None:
                first.root().is_shared = True
            elif first is not None and path is not None:
                _merge(first.root(), path.root())
    roots = list({id(path.root()): path.root() for path in paths}.values())
    whole = [one for one in roots if not one.is_shared]
    while True:
        num_in_wave = Counter(wave for one in whole for wave in one.work)
        beside = [one for one in whole if any(num_in_wave[wave] > 1 for wave in one.work)]
        if len(beside) == len(whole):
            return tuple(ModelBranch(frozenset(one.parameters), dict(one.work)) for one in whole)
        whole = beside


def _merge(one: _BranchPath, other: _BranchPath) -> None:
    if one is not other:
        one.parameters |= other.parameters
        one.work.update(other.work)
        one.is_shared |= other.is_shared
        other.found = one


def _passed_by_all(trace: Trace, parameters: set[int]) -> frozenset[int]:
    """Returns the events that depend on, or are needed by, every event with one of these parameters."""
    derived = set(trace.parameters.values())
    makers, before, heavy = dict[int, int](), list[int](), 0  # `before`: the events that each depends on, as a bit set
    needs: list[list[int]] = []
    for index, event in enumerate(trace.events):
        needs.append([makers[number] for number in event.inputs if number in makers])
        before.append(0)
        for maker in needs[-1]:
            before[-1] |= before[maker] | 1 << maker
        is_weight = any(number in parameters for number in event.inputs)
        if all(number in derived for number in event.inputs):
            derived.update(event.outputs)
            parameters.update(event.outputs if is_weight else ())
            continue
        heavy |= is_weight << index
        makers.update(dict.fromkeys(event.outputs, index))
    after = [0] * len(before)
    for index in reversed(range(len(before))):
        for maker in needs[index]:
            after[maker] |= after[index] | 1 << index
    return frozenset(
        index
        for index, event in enumerate(trace.events)
        if event.name == END or not heavy & ~(before[index] | after[index] | 1 << index)
    )
