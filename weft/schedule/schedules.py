"""Schedules: pure functions from (ranks, micro-batches, options) to lists of actions. p ranks, m micro-batches.

Makespans below are exact for free messages and equal stages, which take f seconds forward and b backward; w are
the weight gradients that zero-bubble splits off (b without them); max and min are the longer and shorter of f and b.

| name | order | makespan | activations held |
|---|---|---|---|
| gpipe | all forwards, then all backwards (arXiv 1811.06965) | (m + p - 1)(f + b) | m |
| 1f1b | backwards as early as possible (arXiv 2006.09503) | (m + p - 1)(f + b) | min(m, p - rank) |
| interleaved | v stages per rank (arXiv 2104.04473) | (v m + p - 1)(f + b) if m >= p | (v - 1)p + 2(p - rank) - 1 |
| zero-bubble | ZB-H1 (arXiv 2401.10241) | m(f + b + w) + (p - 1)(f + b - min(f, b, w)) if m >= p | min(m, p) |
| gems | two mirrored replicas in turn (SC 2020) | p f + (m - 1)(p max + min) + p b | 1 |
| bidirectional | both at once (Chimera, arXiv 2107.06925) | m(f + b) + (p - 2)(max + (m/p - 1)(max - min)) | <= p |
| message | what has arrived (AxoNN, arXiv 2110.13005) | (m + p - 1)(f + b) if f <= b | <= the cap |

`in_flight` caps the activations that a rank holds; below those of the table, ranks wait longer. A stage of interleaved
is 1/v of a rank's share, and f and b with it. The activations of interleaved and the makespan of bidirectional are for
p that divides m. On each stage of a replica backwards follow the order of micro-batches.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from weft.errors import PlanError
from weft.schedule.actions import Action, Schedule, Steps, chain
from weft.schema import nearest


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, **options: object) -> Schedule:
    """Return the schedule called `name` for a pipe axis of `num_ranks`. `options` are those of its function."""
    if name not in SCHEDULES:
        raise PlanError(f"unknown schedule '{name}'{nearest(name, SCHEDULES)}")
    make = SCHEDULES[name]
    known = list(inspect.signature(make).parameters)[2:]
    for option in options:
        if option not in known:
            hint = nearest(option, known) if known else "; it takes none"
            raise PlanError(f"schedule '{name}' has no option '{option}'{hint}")
    return make(num_ranks, num_micro_batches, **options)


@lru_cache(maxsize=1 << 10)
def refuse_schedule(name: str, num_ranks: int, num_micro_batches: int, **options: object) -> str | None:
    """Returns the reason why a schedule does not allow these ranks, micro-batches or options; None if it does."""
    try:
        make_schedule(name, num_ranks, num_micro_batches, **options)
    except PlanError as error:
        return str(error)
    return None


def gpipe(num_ranks: int, num_micro_batches: int, *, in_flight: int | None = None) -> Schedule:
    """All forwards, then all backwards. Simple, but it holds the activations of every micro-batch.

    With `in_flight`, so many micro-batches at a time.
    """
    _check_counts("gpipe", num_ranks, num_micro_batches)
    size = _cap("gpipe", in_flight, num_micro_batches)
    groups = [range(start, min(start + size, num_micro_batches)) for start in range(0, num_micro_batches, size)]
    lists = [
        [action for group in groups for kind in ("forward", "backward") for action in _actions(kind, rank, group)]
        for rank in range(num_ranks)
    ]
    return _schedule("gpipe", num_micro_batches, lists, [range(num_ranks)], **_given(in_flight))


def one_f_one_b(num_ranks: int, num_micro_batches: int, *, in_flight: int | None = None) -> Schedule:
    """Alternate one forward and one backward, after one forward for each stage behind the rank's.

    `in_flight` caps the micro-batches between a rank's forward and backward. Below p, ranks wait for gradients.
    """
    _check_counts("1f1b", num_ranks, num_micro_batches)
    cap = _cap("1f1b", in_flight, num_ranks)
    lists = [
        _by_turns(
            _actions("forward", rank, range(num_micro_batches)),
            _actions("backward", rank, range(num_micro_batches)),
            min(num_ranks - rank, cap) - 1,
        )
        for rank in range(num_ranks)
    ]
    return _schedule("1f1b", num_micro_batches, lists, [range(num_ranks)], **_given(in_flight))


def interleaved(num_ranks: int, num_micro_batches: int, *, chunks: int = 2, in_flight: int | None = None) -> Schedule:
    """`chunks` stages per rank, assigned round-robin: the bubble shrinks and the messages grow by that factor.

    Micro-batches go through a rank's stages in groups: all of a group at one stage before the next stage. A group of at
    least `num_ranks` leaves no wait between stages, so remaining micro-batches are spread over the groups.

    `in_flight` caps the forwards without a backward of a rank, over all of its stages. A rank needs at least those of
    one group at all stages but the last, and one. With v p, ranks wait only before their first backward.
    """
    _check_counts("interleaved", num_ranks, num_micro_batches)
    _check_count("interleaved", "chunks", chunks)
    num_groups = max(1, num_micro_batches // num_ranks)
    bounds = [index * num_micro_batches // num_groups for index in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in itertools.pairwise(bounds)]
    largest, least = max(map(len, groups)), least_in_flight(num_ranks, num_micro_batches, chunks)
    cap = _cap("interleaved", in_flight, least + 2 * num_ranks)
    if cap < least:
        raise PlanError(
            f"interleaved: in_flight = {cap} is too few: groups of {largest} micro-batches at {chunks} stages need at "
            f"least {least}"
        )
    lists = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = [action for group in groups for stage in stages for action in _actions("forward", stage, group)]
        backwards = [a for group in groups for stage in reversed(stages) for a in _actions("backward", stage, group)]
        # A rank's next stage is p stages later: the way to the last stage and back takes two actions per rank between.
        ahead = (chunks - 1) * largest + 2 * (num_ranks - rank - 1) if chunks > 1 else num_ranks - rank - 1
        lists.append(_by_turns(forwards, backwards, min(ahead, cap - 1)))
    placement = [rank for _ in range(chunks) for rank in range(num_ranks)]
    return _schedule("interleaved", num_micro_batches, lists, [placement], chunks=chunks, **_given(in_flight))


def least_in_flight(num_ranks: int, num_micro_batches: int, chunks: int) -> int:
    """The lowest `in_flight` of interleaved (of 1f1b, with one chunk): the largest group at all stages but the last,
    and one.
    """
    return (chunks - 1) * -(-num_micro_batches // max(1, num_micro_batches // num_ranks)) + 1


def zero_bubble(num_ranks: int, num_micro_batches: int, *, in_flight: int | None = None) -> Schedule:
    """ZB-H1: 1f1b with separate weight gradients.

    Rank r computes them r micro-batches late, which fills its last waits. No rank holds more activations than rank 0
    does under 1f1b. `in_flight` caps the micro-batches of a rank whose weight gradients are not computed yet.
    """
    _check_counts("zero-bubble", num_ranks, num_micro_batches)
    cap = _cap("zero-bubble", in_flight, num_ranks)
    lists = []
    for rank, steps in enumerate(one_f_one_b(num_ranks, num_micro_batches, in_flight=in_flight).lists):
        waiting = min(rank, cap - min(num_ranks - rank, cap))
        late: list[Action] = []
        for action in steps:
            assert isinstance(action, Action)
            late.append(action)
            if action.kind == "backward" and action.micro_batch >= waiting:
                late.append(Action("weight", rank, action.micro_batch - waiting))
        late += _actions("weight", rank, range(max(0, num_micro_batches - waiting), num_micro_batches))
        lists.append(tuple(late))
    return _schedule("zero-bubble", num_micro_batches, lists, [range(num_ranks)], **_given(in_flight))


def gems(num_ranks: int, num_micro_batches: int, *, batches: int | None = None) -> Schedule:
    """Two mirrored replicas in turn, each batch forward and backward before the next: one batch is alive at a time.

    The micro-batches are divided into `batches` equal parts (one each by default), which alternate between replica 0
    (stage i on rank i) and replica 1 (stage i on rank p-1-i), whose forward wave follows the other's backward wave. One
    batch is GEMS' Basic and needs no second replica, two are MAST, more are MASTER.
    """
    _check_counts("gems", num_ranks, num_micro_batches)
    batches = num_micro_batches if batches is None else batches
    _check_count("gems", "batches", batches)
    if num_micro_batches % batches:
        raise PlanError(f"gems: batches = {batches} does not divide micro_batches = {num_micro_batches}; use a divisor")
    if batches > 1 and batches % 2:
        raise PlanError(f"gems: batches = {batches} is odd; the two replicas take turns, so use 1 or an even number")
    placement = [range(num_ranks)] if batches == 1 else _mirrored("gems", num_ranks)
    size = num_micro_batches // batches
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    for batch in range(batches):
        part, replica = range(batch * size, (batch + 1) * size), batch % 2
        for stage, rank in enumerate(placement[replica]):
            lists[rank] += _actions("forward", stage, part, replica)
            lists[rank] += _actions("backward", stage, part, replica)
    return _schedule("gems", num_micro_batches, lists, placement, batches=batches)


def bidirectional(num_ranks: int, num_micro_batches: int, *, in_flight: int | None = None) -> Schedule:
    """Two mirrored replicas at once: even micro-batches go down and odd ones up (Chimera).

    At most p/2 micro-batches of each replica are in flight. The order is optimal for f = b. With longer backwards,
    ranks wait between groups of p micro-batches. `in_flight` caps those of both replicas on a rank together.
    """
    _check_counts("bidirectional", num_ranks, num_micro_batches)
    placement = _mirrored("bidirectional", num_ranks)
    cap = _cap("bidirectional", in_flight, num_ranks)
    if cap < 2:
        raise PlanError(f"bidirectional: in_flight = {cap} is too few: one micro-batch of each replica makes 2")
    lists = _first_come(num_micro_batches, placement, [min(cap, num_ranks) // 2] * num_ranks)
    return _schedule("bidirectional", num_micro_batches, lists, placement, **_given(in_flight))


def message(num_ranks: int, num_micro_batches: int, *, in_flight: int | Sequence[int] | None = None) -> Schedule:
    """AxoNN's message-driven order under equal times: each rank runs the action whose inputs have arrived.

    `in_flight` caps the micro-batches between a stage's forward and backward, for all stages or for each (p by
    default). Caps of p, p-1, ..., 1 give 1f1b.
    """
    _check_counts("message", num_ranks, num_micro_batches)
    same = num_ranks if in_flight is None else in_flight
    caps = list(same) if isinstance(same, Sequence) else [same] * num_ranks
    if len(caps) != num_ranks:
        raise PlanError(f"message: in_flight has {len(caps)} caps for {num_ranks} stages; give one number or one each")
    for cap in caps:
        _check_count("message", "in_flight", cap)
    placement = [range(num_ranks)]
    lists = _first_come(num_micro_batches, placement, caps)
    return _schedule("message", num_micro_batches, lists, placement, in_flight=tuple(caps))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "gems": gems,
    "bidirectional": bidirectional,
    "message": message,
}


def _schedule(
    name: str,
    num_micro_batches: int,
    lists: Iterable[Iterable[Action]],
    placement: Sequence[Sequence[int]],
    **options: object,
) -> Schedule:
    num_stages = len(placement[0])
    plain: tuple[Steps, ...] = tuple(tuple(steps) for steps in lists)
    homes = tuple(tuple(ranks) for ranks in placement)
    return Schedule(name, num_stages, num_micro_batches, plain, homes, chain(num_stages), options)


def _actions(kind: str, stage: int, micro_batches: Iterable[int], replica: int = 0) -> list[Action]:
    return [Action(kind, stage, micro_batch, replica) for micro_batch in micro_batches]


def _by_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Return `ahead` forwards, then alternately one forward and one backward, then the remaining backwards."""
    steady = max(0, len(forwards) - ahead)
    pairs = zip(forwards[-steady:] if steady else [], backwards, strict=False)
    return [*forwards[: len(forwards) - steady], *(action for pair in pairs for action in pair), *backwards[steady:]]


def _mirrored(name: str, num_ranks: int) -> list[range]:
    """Return the ranks of the stages of two replicas: replica 0 down the ranks, replica 1 up."""
    if num_ranks % 2:
        raise PlanError(f"{name}: {num_ranks} ranks are odd; two mirrored replicas need an even number of ranks")
    return [range(num_ranks), range(num_ranks - 1, -1, -1)]


def _first_come(num_micro_batches: int, placement: Sequence[Sequence[int]], caps: Sequence[int]) -> list[list[Action]]:
    """Return the order in which ranks run actions whose inputs have arrived, if each action takes one unit of time.

    Backwards come first, then forwards of later stages, then new micro-batches. At each stage, at most `caps[stage]`
    micro-batches of a replica are between forward and backward. Micro-batches alternate between replicas.
    """
    num_stages, num_replicas = len(placement[0]), len(placement)
    lists: list[list[Action]] = [[] for _ in range(num_stages)]
    live = [[0] * num_stages for _ in placement]
    ready: list[list[Action]] = [[] for _ in range(num_stages)]  # per rank
    for first in range(min(num_replicas, num_micro_batches)):
        ready[placement[first][0]].append(Action("forward", 0, first, first))
    while any(ready):
        running = []
        for rank in range(num_stages):
            may_run = [a for a in ready[rank] if a.kind == "backward" or live[a.replica][a.stage] < caps[a.stage]]
            if may_run:
                chosen = min(may_run, key=lambda a: (a.kind != "backward", a.stage == 0, a.micro_batch))
                ready[rank].remove(chosen)
                lists[rank].append(chosen)
                running.append(chosen)
        for action in running:
            live[action.replica][action.stage] += 1 if action.kind == "forward" else -1
            for follower in _followers(action, num_stages, num_micro_batches, num_replicas):
                ready[placement[follower.replica][follower.stage]].append(follower)
    return lists


def _followers(action: Action, num_stages: int, num_micro_batches: int, num_replicas: int) -> Iterator[Action]:
    """Yield the actions that `action` makes ready: the next stage's and, after a first forward, the next
    micro-batch's.
    """
    stage, micro_batch, replica = action.stage, action.micro_batch, action.replica
    if action.kind == "backward":
        if stage > 0:
            yield Action("backward", stage - 1, micro_batch, replica)
        return
    if stage < num_stages - 1:
        yield Action("forward", stage + 1, micro_batch, replica)
    else:
        yield Action("backward", stage, micro_batch, replica)
    if stage == 0 and micro_batch + num_replicas < num_micro_batches:
        yield Action("forward", 0, micro_batch + num_replicas, replica)


def _cap(name: str, in_flight: int | None, default: int) -> int:
    """Return the cap on the micro-batches in flight of a rank."""
    if in_flight is None:
        return default
    _check_count(name, "in_flight", in_flight)
    return in_flight


def _given(in_flight: int | None) -> dict[str, object]:
    return {} if in_flight is None else {"in_flight": in_flight}


def _check_counts(name: str, num_ranks: int, num_micro_batches: int) -> None:
    _check_count(name, "ranks", num_ranks)
    _check_count(name, "micro_batches", num_micro_batches)


def _check_count(name: str, what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}: {what} = {value!r} must be a whole number from 1 on")
