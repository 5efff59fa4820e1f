"""A model of the order in which NCCL runs a schedule's messages, and a check that no ranks wait in a cycle.

The rules, for communicators that are made eagerly (`init_process_group(device_id=...)`) and messages that are not
batched:

    1. A process group has one communicator and one stream on each rank. Its sends and receives run one after another,
       in the order in which the rank issues them.
    2. A send is complete when its receive runs, and the reverse. Nothing is buffered.
    3. A send or receive starts after the computations that the rank has issued before it. A computation starts after
       the computations issued before it and after its own receives are complete. The host never waits. All that
       follows a send in an awaited channel starts after the message before it in that channel is complete.
    4. With one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`), a rank's operations also start in the order of its
       list, whatever their streams. A GPU has 8 queues unless that variable says otherwise, and more streams than
       queues share them; a list that completes with one queue completes with any number.

`GroupOf` maps a message to its group. Weft's groups are channels: one ordered pair of ranks and one direction of the
pipeline. Coarser groups have cycles (`tests/schedule/test_nccl_order.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from weft.errors import PlanError
from weft.schedule.actions import Action, Channel, Message, Schedule

GroupOf = Callable[[Message], Hashable]  # returns the process group of a message
Key = tuple[int, int, int, str]  # of a message
ListPosition = tuple[int, int]  # a rank and an index into its list
_MAX_NAMED = 8  # operations of a cycle that an error names


def by_channel(message: Message) -> Channel:
    """Return the channel of a message, which has a group of its own."""
    return message.channel


def check_nccl_order(schedule: Schedule, group_of: GroupOf = by_channel, one_queue: bool = False) -> None:
    """Raise a PlanError that names the cycle if the lists cannot complete on NCCL.

    An evaluation runs only the forwards of its lists. They complete if the lists do, since leaving out actions adds no
    wait.
    """
    model = _NcclModel(schedule, group_of, one_queue)
    stuck = model.run()
    if stuck is not None:
        raise PlanError(
            f"{schedule.name} with {schedule.num_stages} stages and {schedule.num_micro_batches} micro-batches "
            f"deadlocks on NCCL, where a group runs its messages one after another: {model.cycle(stuck)}; reorder the "
            f"lists, or give these messages groups of their own"
        )


def with_awaited_sends(schedule: Schedule) -> Schedule:
    """Return the schedule with as many awaited channels as it has without a cycle of waiting ranks.

    They are all channels, or those along the ranks, or none. Interleaved stages with a cap on micro-batches in flight
    have those along the ranks: the last rank runs ahead of what the first one may take. Neither ranks that choose their
    own order nor ranks with shadows, which keep what they send, await sends.
    """
    if schedule.name == "message" or schedule.has_shadows:
        return schedule
    along = frozenset(one for one in schedule.channels if (one.source < one.target) == (one.direction == "forward"))
    choices = [along] if is_ahead(schedule.name, schedule.options) else [frozenset(schedule.channels), along]
    stuck_before = [_is_stuck(schedule, one_queue) for one_queue in (False, True)]
    for channels in choices:
        found = replace(schedule, awaited=channels)
        if not any(_is_stuck(found, bool(queue)) for queue, was_stuck in enumerate(stuck_before) if not was_stuck):
            return found
    return schedule


def is_ahead(name: str, options: Mapping[str, object]) -> bool:
    """Does the last rank of a schedule send results to the first one long before it takes them?"""
    return name == "interleaved" and "in_flight" in options


def _is_stuck(schedule: Schedule, one_queue: bool) -> bool:
    return _NcclModel(schedule, by_channel, one_queue).run() is not None


class _NcclModel:
    """The state of a simulated run of the lists: which operations have started, and which messages are complete."""

    def __init__(self, schedule: Schedule, group_of: GroupOf, one_queue: bool) -> None:
        self.lists, self.one_queue = schedule.lists, one_queue
        # per rank: by the position of a send, the key of the message before it in its channel, if it is awaited
        self.awaited: list[dict[int, Key]] = []
        self.next_action = [0] * schedule.num_ranks  # the first computation that is not done
        self.next_start = [0] * schedule.num_ranks  # with one queue: the first operation that has not started
        # per rank and group: positions of messages left, the last first
        self.streams: list[dict[Hashable, list[int]]] = []
        self.keys: list[dict[int, Key]] = []  # per rank: the keys of its messages by position
        # per rank: positions of the receives that each computation needs
        self.needs: list[dict[Action, list[int]]] = []
        self.ends: dict[Key, list[ListPosition]] = defaultdict(list)
        self.started: set[ListPosition] = set()
        self.complete: set[Key] = set()
        for rank, steps in enumerate(self.lists):
            streams: dict[Hashable, list[int]] = defaultdict(list)
            keys: dict[int, Key] = {}
            needs: dict[Action, list[int]] = defaultdict(list)
            awaited: dict[int, Key] = {}
            last: dict[Channel, Key] = {}
            for place, step in enumerate(steps):
                if isinstance(step, Action):
                    continue
                if step.is_send and step.channel in schedule.awaited:
                    if step.channel in last:
                        awaited[place] = last[step.channel]
                    last[step.channel] = step.key
                streams[group_of(step)].append(place)
                keys[place] = step.key
                self.ends[step.key].append((rank, place))
                if not step.is_send:
                    needs[Action(step.direction, step.stage, step.micro_batch, step.replica)].append(place)
            self.streams.append({group: places[::-1] for group, places in streams.items()})
            self.keys.append(keys)
            self.needs.append(needs)
            self.awaited.append(awaited)

    def run(self) -> ListPosition | None:
        """Run until nothing can start. Return an operation that never completes, or None."""
        changed = list(range(len(self.lists)))
        while changed:
            rank = changed.pop()
            peers = self._advance(rank)
            changed += [*peers, rank] if peers else []
        for rank, steps in enumerate(self.lists):
            left = [places[-1] for places in self.streams[rank].values() if places]
            if left:
                return rank, min(left)
            if self.next_action[rank] < len(steps):
                return rank, self.next_action[rank]
        return None

    def _advance(self, rank: int) -> list[int]:
        """Start all operations of a rank that can start. Return the peers of the messages that this completes."""
        peers = []
        moved = True
        while moved:
            moved = self._compute(rank)
            for places in self.streams[rank].values():
                while places and self._start(rank, places[-1]):
                    moved = True
                    peer = self._complete(rank, places[-1])
                    if peer is None:
                        break
                    peers.append(peer)
        return peers

    def _start(self, rank: int, place: int) -> bool:
        """Start the first message of a stream if its conditions are met. Return whether it started."""
        if (rank, place) in self.started or place > self.next_action[rank]:
            return False
        if self.one_queue:
            if place != self.next_start[rank]:
                return False
            self.next_start[rank] += 1
        self.started.add((rank, place))
        return True

    def _complete(self, rank: int, place: int) -> int | None:
        """Complete a message if both its ends have started. Return the peer, or None if it is not complete."""
        key = self.keys[rank][place]
        ends = self.ends[key]
        if len(ends) < 2 or not all(end in self.started for end in ends):
            return None
        self.complete.add(key)
        for other, at in ends:
            next(places for places in self.streams[other].values() if places and places[-1] == at).pop()
        return next(other for other, _ in ends if other != rank)

    def _compute(self, rank: int) -> bool:
        """Run the computations whose receives are complete. Return whether there were any."""
        steps, place, moved = self.lists[rank], self.next_action[rank], False
        awaited = self.awaited[rank]
        while place < len(steps):
            step = steps[place]
            if place in awaited and awaited[place] not in self.complete:
                break
            if isinstance(step, Action):
                if (self.one_queue and self.next_start[rank] < place) or self._missing(rank, step) is not None:
                    break
                self.next_start[rank] = place + 1
                moved = True
            place += 1
        self.next_action[rank] = place
        return moved

    def _missing(self, rank: int, action: Action) -> int | None:
        """Return the position of a receive that the computation still waits for; None if there is none."""
        needs = self.needs[rank].get(action, ())
        return next((place for place in needs if self.keys[rank][place] not in self.complete), None)

    # --- what waits for what

    def cycle(self, stuck: ListPosition) -> str:
        """Describe a cycle of operations that wait for each other."""
        path: list[ListPosition] = []
        current: ListPosition | None = stuck
        while current is not None and current not in path:
            path.append(current)
            current = self._waits_for(*current)
        circle = path if current is None else [*path[path.index(current) :], current]
        names = [f"rank {rank}'s {self.lists[rank][place]}" for rank, place in circle]
        if len(names) > _MAX_NAMED:
            names[_MAX_NAMED - 1 : -1] = [f"{len(names) - _MAX_NAMED} more"]
        return " waits for ".join(names) + (" for ever" if current is None else "")

    def _waits_for(self, rank: int, place: int) -> ListPosition | None:
        """Return the operation that a given one waits for."""
        step = self.lists[rank][place]
        if (rank, place) in self.started:
            return next((end for end in self.ends[self.keys[rank][place]] if end[0] != rank), None)
        if self.one_queue and self.next_start[rank] < place:
            return rank, self.next_start[rank]
        if isinstance(step, Action):
            if self.next_action[rank] < place:
                return rank, self.next_action[rank]
            missing = self._missing(rank, step)
            return None if missing is None else (rank, missing)
        if self.next_action[rank] < place:
            return rank, self.next_action[rank]
        return rank, next(places for places in self.streams[rank].values() if place in places)[-1]
