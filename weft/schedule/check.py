"""Checks that a schedule is complete, in order, has matching messages, and is free of deadlock, on NCCL too.

All checks are arithmetic on the lists, so a wrong schedule is found before a process starts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from weft.errors import PlanError
from weft.schedule.actions import COMPUTE_KINDS, SHADOW, Action, Channel, Message, Need, Schedule
from weft.schedule.nccl_order import GroupOf, by_channel, check_nccl_order


def check(schedule: Schedule, group_of: GroupOf = by_channel) -> None:
    """Raise a PlanError that names rank, action and what is missing, unless the schedule is consistent.

    `group_of` returns the process group of a message, whose messages NCCL runs in order.
    """
    _check_complete(schedule)
    _check_order(schedule)
    if schedule.has_messages:
        _check_messages(schedule)
        _check_channels(schedule)
    for _ in run_order(schedule):
        pass
    if schedule.has_messages:
        check_nccl_order(schedule, group_of)


def run_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield the computations as (rank, action) in an order in which the lists can run, as `order_with_needs` does."""
    return ((rank, action) for rank, action, _ in order_with_needs(schedule))


def order_with_needs(schedule: Schedule) -> Iterator[tuple[int, Action, list[Need]]]:
    """Yield the computations as (rank, action, what it needs) in an order in which the lists can run. Raise PlanError
    if they deadlock.

    Each rank goes through its list: a computation waits for what it needs; a send or a posted receive does not wait. If
    the schedule has messages, an action of another rank counts as done once its send has run.
    """
    position = [0] * schedule.num_ranks
    done = set(schedule.done)
    sent: set[tuple[int, int, int, str]] = set()
    by_messages = schedule.has_messages
    needs_of: dict[int, list[Need]] = {}  # rank -> what the action needs that it waits to run

    def missing(rank: int, action: Action) -> Action | None:
        for need, edge in needs_of[rank]:
            remote = by_messages and schedule.rank_of(need.stage, need.replica) != rank
            met = (edge, action.micro_batch, action.replica, action.kind) in sent if remote else need in done
            if not met:
                return need
        return None

    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.lists):
            while position[rank] < len(steps):
                step = steps[position[rank]]
                if isinstance(step, Action):
                    if rank not in needs_of:
                        needs_of[rank] = schedule.needs(step)
                    if missing(rank, step) is not None:
                        break
                    done.add(step)
                    yield rank, step, needs_of.pop(rank)
                elif step.is_send:
                    sent.add(step.key)
                position[rank] += 1
                moved = True
    for rank, steps in enumerate(schedule.lists):
        if position[rank] < len(steps):
            stuck = steps[position[rank]]
            assert isinstance(stuck, Action)
            need = missing(rank, stuck)
            assert need is not None
            other = schedule.rank_of(need.stage, need.replica)
            raise PlanError(
                f"{schedule.name} deadlocks: rank {rank} waits at the {stuck} for the {need} on rank {other}, "
                "which never comes; reorder the lists"
            )


def _check_complete(schedule: Schedule) -> None:
    """Each micro-batch belongs to one replica and has one forward and one backward (and weight) on every stage."""
    where = f"{schedule.name} with {schedule.num_stages} stages and {schedule.num_micro_batches} micro-batches"
    count: Counter[Action] = Counter(schedule.done)
    replica_of: dict[int, int] = {}
    for rank, steps in enumerate(schedule.lists):
        for action in steps:
            if isinstance(action, Message):
                continue
            if (
                action.kind not in (*COMPUTE_KINDS, SHADOW)
                or not 0 <= action.stage < schedule.num_stages
                or not 0 <= action.micro_batch < schedule.num_micro_batches
                or not 0 <= action.replica < len(schedule.placement)
            ):
                raise PlanError(f"{where}: rank {rank} has a {action}, which does not exist")
            home = schedule.home(action)
            if home != rank:
                raise PlanError(f"{where}: rank {rank} has the {action}, which belongs on rank {home}")
            count[action] += 1
            if count[action] > 1:
                raise PlanError(f"{where}: rank {rank} has the {action} more than once")
            if replica_of.setdefault(action.micro_batch, action.replica) != action.replica:
                raise PlanError(f"{where}: rank {rank} has the {action}, but another replica has that micro-batch too")
    for micro_batch in range(schedule.num_micro_batches):
        replica = replica_of.get(micro_batch, 0)
        for stage in range(schedule.num_stages):
            kinds = COMPUTE_KINDS if stage in schedule.split_stages else COMPUTE_KINDS[:2]
            for kind in kinds:
                action = Action(kind, stage, micro_batch, replica)
                if not count[action]:
                    raise PlanError(f"{where}: rank {schedule.rank_of(stage, replica)} lacks the {action}")


def _check_order(schedule: Schedule) -> None:
    """An action that another action of the same rank needs comes earlier in the rank's list."""
    for rank in range(schedule.num_ranks):
        seen = set(schedule.done)
        for action in schedule.compute(rank):
            for need, _ in schedule.needs(action):
                if schedule.rank_of(need.stage, need.replica) == rank and need not in seen:
                    raise PlanError(f"{schedule.name}: rank {rank} has the {action} before the {need}, which it needs")
            seen.add(action)


def _check_messages(schedule: Schedule) -> None:
    """Each action has its receives before it and its sends after it, with the right peers; nothing else is sent."""
    for rank, steps in enumerate(schedule.lists):
        place: dict[Action | Message, int] = {}
        for index, step in enumerate(steps):
            if step in place:
                raise PlanError(f"{schedule.name}: rank {rank} has the {step} more than once")
            place[step] = index
        expected: set[Message] = set(schedule.resent_messages(rank))
        for message in expected - place.keys():
            raise PlanError(
                f"{schedule.name}: rank {rank} lacks the {message}, of what was made before its list begins"
            )
        for action in schedule.compute(rank):
            received, sent = schedule.messages(action)
            expected.update(received, sent)
            for message in (*received, *sent):
                if message not in place:
                    raise PlanError(f"{schedule.name}: rank {rank} has the {action} but lacks its {message}")
                if (place[message] < place[action]) == message.is_send:
                    wrong = "before" if message.is_send else "after"
                    raise PlanError(f"{schedule.name}: rank {rank} has the {message} {wrong} the {action}")
        for step in steps:
            if isinstance(step, Message) and step not in expected:
                raise PlanError(f"{schedule.name}: rank {rank} has a {step} that no action of it needs")


def _check_channels(schedule: Schedule) -> None:
    """Both ends of every (sender, receiver, direction) list the same messages in the same order."""
    sends: dict[Channel, list[Message]] = defaultdict(list)
    receives: dict[Channel, list[Message]] = defaultdict(list)
    for steps in schedule.lists:
        for step in steps:
            if isinstance(step, Message):
                (sends if step.is_send else receives)[step.channel].append(step)
    for channel in sorted({*sends, *receives}):
        for send, receive in zip(sends[channel], receives[channel], strict=True):
            if send.key != receive.key:
                sender, receiver, _ = channel
                raise PlanError(
                    f"{schedule.name}: rank {sender} sends in another order than rank {receiver} receives: "
                    f"{send} meets {receive}"
                )
