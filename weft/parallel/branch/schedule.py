"""Says which ranks run each event of a traced model, and where they communicate, if each branch has one rank.

An event that uses a branch's parameters runs on that branch's rank, and so does one that only uses results of one rank.
All other events run on all ranks. Where an event with parameters needs a result that its ranks do not have, all results
so far that others need are *exchanged*: every rank then has them. Events without parameters that need such results are
*deferred* until then. A tensor that all ranks have and that a branch uses is *forked* there: backward sums its
gradients over the ranks.

If ranks have different samples (`batch_dims.py`), a tensor outside of branches has a rank's own samples, and one in a
branch those of all ranks. A fork then gathers samples, and an exchange gives each rank its own samples of all results.

Every rank derives the same schedule from the same trace, so all communicate in the same order. In backward, autograd
runs nodes in the reverse order of their creation, which is the same on all ranks for those that communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.parallel.branch.batch_dims import BatchDims
from weft.pipeline.trace import END, Trace, TraceEvent

ALIGNMENT = 16  # of a tensor in a rank's part of an exchange, in bytes
NORMS = ("batch_norm", "instance_norm")  # they change running statistics, of which torch shows no trace


@dataclass(frozen=True)
class SentTensor:
    """A tensor of an exchange: its number, the rank that has it, and where it lies in that rank's part, in bytes."""

    number: int
    rank: int
    offset: int
    num_bytes: int
    is_buffer: bool = False  # a buffer of the model, which other ranks overwrite by it


@dataclass(frozen=True)
class BranchExchange:
    """Tensors that all ranks get before an event. Each rank's part has `part_bytes`, those of the largest one.

    If ranks have different samples, a part has one rank's samples, and `buffers` are exchanged by themselves.
    """

    tensors: tuple[SentTensor, ...]
    part_bytes: int
    forks: tuple[int, ...] = ()  # tensors forked since the last exchange: their backward follows that of this one
    has_backward: bool = False  # does a tensor of it need a gradient?
    buffers: BranchExchange | None = None


@dataclass(frozen=True)
class BranchSchedule:
    """The rank of each event (None: all ranks), and the exchanges and forks before events, by their index."""

    trace: Trace
    ranks: tuple[int | None, ...]
    makers: Mapping[int, int | None]  # the rank that makes each tensor; None: all ranks have it
    exchanges: Mapping[int, BranchExchange]
    forks: Mapping[int, tuple[int, ...]]
    deferred: frozenset[int] = frozenset()  # events that wait for the next exchange
    kept: frozenset[int] = frozenset()  # tensors that are exchanged
    batch: BatchDims | None = None  # where tensors have their samples, if ranks have different ones

    def calls(self, degree: int, forwards: int = 1) -> list[tuple[str, int]]:
        """Returns the collectives of so many forwards and one backward over the axis: (operation, bytes)."""
        values, exchanges = self.trace.values, list(self.exchanges.values())
        summed = [values[number].num_bytes for one in exchanges for number in one.forks]
        if self.batch is None:
            gathers = [("all_gather", degree * one.part_bytes) for one in exchanges] * forwards
            return gathers + [("all_reduce", num_bytes) for num_bytes in summed]
        gathered = [values[number].num_bytes for numbers in self.forks.values() for number in numbers]
        gathered += [one.buffers.part_bytes for one in exchanges if one.buffers is not None]
        swapped = [one.part_bytes for one in exchanges for _ in range(forwards + one.has_backward) if one.tensors]
        found = {"all_gather": gathered * forwards, "reduce_scatter": summed, "all_to_all": swapped}
        return [(operation, degree * num_bytes) for operation, sizes in found.items() for num_bytes in sizes]

    def result_share(self, rank: int) -> float:
        """Returns the bytes of results that a rank makes or gathers over those of all events for one rank's samples."""
        values, num_samples = self.trace.values, 1 if self.batch is None else self.batch.degree
        whole = own = 0
        for event, runs_on in zip(self.trace.events, self.ranks, strict=True):
            num_bytes = sum(values[number].num_bytes for number in event.outputs)
            whole += num_bytes
            own += num_bytes if runs_on is None else num_samples * num_bytes * (runs_on == rank)
        if self.batch is not None:
            gathered = (number for numbers in self.forks.values() for number in numbers)
            own += num_samples * sum(values[number].num_bytes for number in gathered)
        return own / max(1, whole)


class _Assignment:
    """Decides which ranks run each event, in the order of events."""

    def __init__(self, trace: Trace, owners: Mapping[str, int]) -> None:
        self.trace, self.names = trace, trace.parameter_numbers
        self.ranks: list[int | None] = []
        self.makers: dict[int, int | None] = {number: owners.get(name) for number, name in self.names.items()}
        self.deferred: set[int] = set()  # events
        self._waiting: set[int] = set()  # tensors that one rank has, or that deferred events make, until an exchange
        for index, event in enumerate(trace.events):
            rank = self._assign(index, event)
            self.ranks.append(rank)
            self.makers.update(dict.fromkeys(event.outputs, rank))
            if rank is not None or index in self.deferred:
                self._waiting.update(event.outputs)

    def _assign(self, index: int, event: TraceEvent) -> int | None:
        ranks = {self.makers.get(number) for number in event.inputs} - {None}
        own = {self.makers[number] for number in event.inputs if number in self.names} - {None}
        rank = own.pop() if own else None
        if own or (rank is not None and self._is_shared(event)):
            raise PlanError(
                f"'{event.name}' uses parameters of several branches, which are on different ranks; use branch = 1"
            )
        is_late = any(n in self._waiting and self.makers[n] is None for n in event.inputs)
        if rank is None and event.name != END and not self._is_shared(event) and not is_late and len(ranks) == 1:
            (rank,) = ranks
        missing = [n for n in event.inputs if n in self._waiting and (rank is None or self.makers[n] != rank)]
        if missing and rank is None and event.outputs and not self._is_shared(event) and not event.changed:
            self.deferred.add(index)
        elif missing:
            self._waiting.clear()
        return rank

    def _is_shared(self, event: TraceEvent) -> bool:
        """Does an event use a parameter that all ranks train?"""
        values = self.trace.values
        return any(n in self.names and self.makers[n] is None and values[n].needs_gradient for n in event.inputs)

    def sink(self) -> None:
        """Let one rank run an operation whose result only that rank uses, such as a pool at the start of a branch."""
        users: dict[int, set[int | None]] = {}
        for index in reversed(range(len(self.trace.events))):
            event = self.trace.events[index]
            found = set[int | None]().union(*(users.get(number, set()) for number in event.outputs))
            is_common = all(self.makers.get(number) is None for number in event.inputs)
            is_light = not event.changed and not any(number in self.names for number in event.inputs)
            if self.ranks[index] is None and is_common and is_light and len(found) == 1 and None not in found:
                (self.ranks[index],) = found
                self.makers.update(dict.fromkeys(event.outputs, self.ranks[index]))
            for number in event.inputs:
                users.setdefault(number, set()).add(self.ranks[index])


def make_schedule(trace: Trace, owners: Mapping[str, int], batch: BatchDims | None = None) -> BranchSchedule:
    """Returns the schedule of a trace, if each parameter in `owners` is held by that rank alone.

    `batch` says where tensors have their samples, if ranks have different ones; the trace is of a rank's own.
    """
    found = _Assignment(trace, owners)
    found.sink()
    made = _ExchangePlanner(trace, found, batch)
    ranks, deferred, kept = tuple(found.ranks), frozenset(found.deferred), frozenset(made.wanted)
    return BranchSchedule(trace, ranks, found.makers, made.exchanges, made.forks, deferred, kept, batch)


class _ExchangePlanner:
    """Decides what ranks communicate before each event, in the order of events."""

    def __init__(self, trace: Trace, found: _Assignment, batch: BatchDims | None) -> None:
        self.batch = batch
        self.trace, self.ranks, self.makers, self.deferred = trace, found.ranks, found.makers, found.deferred
        self.state = set(trace.parameters.values())
        self.wanted = _foreign(trace, found.ranks, found.makers)
        self.exchanges: dict[int, BranchExchange] = {}
        self.forks: dict[int, tuple[int, ...]] = {}
        self._waiting: list[int] = []  # tensors that are made and not exchanged
        self._buffers: dict[int, int] = {}  # buffers that one rank has changed, with that rank
        self._queue: list[int] = []  # events that wait for the next exchange
        self._exchanged: set[int] = set()
        self._forked: set[int] = set()
        self._new_forks: list[int] = []  # since the last exchange
        for index, event in enumerate(trace.events):
            self._add(index, event)

    def _add(self, index: int, event: TraceEvent) -> None:
        rank = self.ranks[index]
        if index in self.deferred:
            self._queue.append(index)
        else:
            if self._is_due(event, rank):
                self._exchange(index)
            self._fork(index)
        if rank is not None:
            touched = event.inputs if event.name in NORMS else event.changed
            state = (number for number in touched if number in self.state)
            self._buffers.update({number: rank for number in state if number not in self.trace.parameter_numbers})
        _refuse_changes(event, rank, self.makers, self.state, self._exchanged)
        self._waiting += [number for number in event.outputs if number in self.wanted]

    def _is_due(self, event: TraceEvent, rank: int | None) -> bool:
        """Must ranks exchange before an event? Yes if it needs a result of another rank or of a waiting event, or
        changes an input of a waiting event.
        """
        known = self._exchanged | self.state
        if any(self.makers.get(number) not in (None, rank) and number not in known for number in event.inputs):
            return True
        waiting = [self.trace.events[index] for index in self._queue]
        made = {number for one in waiting for number in one.outputs}
        read = {number for one in waiting for number in one.inputs}
        if made.intersection(event.inputs) or read.intersection(event.changed):
            return True
        return event.name == END and bool(self._buffers)

    def _exchange(self, index: int) -> None:
        """Exchange what waits before an event, and let the events that waited for it run."""
        sends_gradient = any(self.trace.values[number].needs_gradient for number in self._waiting)
        forks = tuple(self._new_forks) if sends_gradient else ()
        results = {number: rank for number in self._waiting if (rank := self.makers[number]) is not None}
        if self.batch is None:
            made = _exchange(self.trace, {**results, **self._buffers})
        else:
            for number in results:
                self.batch.refuse_mixed(number, "of a branch's result to other ranks")
            buffers = _exchange(self.trace, self._buffers) if self._buffers else None
            made = replace(_exchange(self.trace, results), buffers=buffers)
        self.exchanges[index] = replace(made, forks=forks, has_backward=sends_gradient)
        self._exchanged.update(self._waiting)
        self._new_forks = [] if sends_gradient else self._new_forks
        queue, self._waiting, self._buffers, self._queue = self._queue, [], {}, []
        for waiting in queue:
            self._fork(waiting)

    def _fork(self, index: int) -> None:
        """Fork the tensors that all ranks have, and that the event's rank uses here first in a branch."""
        rank, known = self.ranks[index], self.state | self._forked
        if rank is None:
            return
        common = [n for n in self.trace.events[index].inputs if self.makers.get(n) != rank and n not in known]
        values = self.trace.values
        if self.batch is None:
            found = tuple(number for number in common if values[number].needs_gradient)
        else:
            found = tuple(number for number in common if number in self.batch.dims or number in self.batch.mixed)
            for number in found:
                self.batch.refuse_mixed(number, "of a tensor to the branches that use it")
        if found:
            self.forks[index] = found
            self._forked.update(found)
            self._new_forks += [number for number in found if values[number].needs_gradient]


def _foreign(trace: Trace, ranks: Sequence[int | None], makers: Mapping[int, int | None]) -> set[int]:
    """Returns the tensors that one rank makes and others use."""
    pairs = ((number, rank) for event, rank in zip(trace.events, ranks, strict=True) for number in event.inputs)
    state = set(trace.parameters.values())
    return {number for number, rank in pairs if makers.get(number) not in (None, rank) and number not in state}


def _exchange(trace: Trace, ranks: Mapping[int, int]) -> BranchExchange:
    """Returns the exchange of tensors, by number, that these ranks have."""
    sent, sizes, state = list[SentTensor](), dict[int, int](), set(trace.parameters.values())
    for number, rank in ranks.items():
        num_bytes = trace.values[number].num_bytes
        sent.append(SentTensor(number, rank, sizes.get(rank, 0), num_bytes, number in state))
        sizes[rank] = sizes.get(rank, 0) + -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return BranchExchange(tuple(sent), max(sizes.values(), default=0))


def _refuse_changes(
    event: TraceEvent, rank: int | None, makers: Mapping[int, int | None], state: set[int], exchanged: set[int]
) -> None:
    """Refuse an operation on one rank that changes a tensor in place of which others have a copy."""
    for number in event.changed:
        if number not in state and rank is not None and (makers.get(number) != rank or number in exchanged):
            raise PlanError(
                f"the model cannot be split into branches: one of them changes a tensor in place ('{event.name}') that "
                f"other ranks have, too; change a copy (no inplace=True at the start of a branch), or use branch = 1"
            )
