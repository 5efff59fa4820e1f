"""AxoNN's message-driven order (Singh and Bhatele 2022): a rank runs the forward or backward whose input arrived first.

Each stage takes its micro-batches in order, in forward and in backward; only the choice between the two is free. If
both could run, the kind that did not run last does: otherwise backwards that have queued up behind a late rank would
starve the stages after this one. At most `in_flight` micro-batches are between a stage's forward and backward.
Gradients are therefore summed in one order whatever the arrival times, and a run and its replay are bit-identical.

NCCL can be polled for a message. Gloo cannot, so with Gloo a thread per channel waits for messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

from weft.comm import Pending
from weft.errors import PlanError
from weft.pipeline.transport import Key, Transport
from weft.schedule.actions import Action, Channel, Message, Schedule

AHEAD = 2  # micro-batches in each direction whose receives are posted before they are used
POLL_SECONDS = 20e-6


class Arrivals:
    """Tracks which posted messages have arrived."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.is_polled = transport.can_poll
        self._come: set[Key] = set()
        self._under_way: dict[Key, Pending] = {}  # with polling: messages that have not arrived
        self._lines: dict[Channel, SimpleQueue[tuple[Key, Pending] | None]] = {}  # without: what each thread waits for
        self._news = threading.Condition()  # a thread has seen a message arrive

    def expect(self, message: Message) -> None:
        """Track a message that has been posted."""
        pending = self.transport.pending(message.key)
        if self.is_polled:
            self._under_way[message.key] = pending
            return
        if message.channel not in self._lines:
            self._lines[message.channel] = SimpleQueue()
            threading.Thread(target=self._watch, args=(self._lines[message.channel],), daemon=True).start()
        self._lines[message.channel].put((message.key, pending))

    def have(self, keys: Collection[Key]) -> bool:
        """Return whether all of these messages have arrived."""
        for key in [key for key in keys if key in self._under_way and self._under_way[key].is_done()]:
            self._come.add(key)
            del self._under_way[key]
        return self._come.issuperset(keys)

    def wait_for_one(self, sets: Sequence[Collection[Key]]) -> None:
        """Wait until all messages of one of these sets have arrived or failed.

        The taker of a failed message gets its error.
        """
        with self.transport.waiting(key for keys in sets for key in keys if key not in self._come):
            if self.is_polled:
                while not any(map(self.have, sets)):
                    time.sleep(POLL_SECONDS)
                return
            with self._news:
                self._news.wait_for(lambda: any(map(self._come.issuperset, sets)))

    def close(self) -> None:
        """Stop the threads."""
        for line in self._lines.values():
            line.put(None)

    def _watch(self, line: SimpleQueue[tuple[Key, Pending] | None]) -> None:
        while (item := line.get()) is not None:
            key, pending = item
            pending.block()
            with self._news:
                self._come.add(key)
                self._news.notify_all()


class MessageDrivenOrder:
    """The order of actions of a rank's only stage, decided as messages arrive, or given by a replay."""

    def __init__(self, schedule: Schedule, stage: int, arrivals: Arrivals, post: Callable[[Message], None]) -> None:
        self.schedule, self.stage, self.arrivals, self._post = schedule, stage, arrivals, post
        caps = schedule.options["in_flight"]
        assert isinstance(caps, Sequence)
        self.in_flight = int(caps[stage])
        self._done = {"forward": 0, "backward": 0}
        self._last = "forward"
        self._posted = {"forward": 0, "backward": 0}

    def next(self, replay: Action | None = None) -> Action | None:
        """Wait until an action can run and return it; None at the end.

        `replay` is the action that must be next, if given.
        """
        while self._done["backward"] < self.schedule.num_micro_batches:
            self._post_ahead()
            may_run = self._may_run()
            if replay is not None:
                may_run = [action for action in may_run if action == replay]
                if not may_run:
                    raise PlanError(f"the replayed order comes to the {replay}, which cannot run yet; replay another")
            needs = [self._needs(action) for action in may_run]
            for action, keys in zip(may_run, needs, strict=True):
                if self.arrivals.have(keys):
                    self._done[action.kind] += 1
                    self._last = action.kind
                    self._post_ahead()  # the next message travels while this one is used
                    return action
            self.arrivals.wait_for_one(needs)
        return None

    def _may_run(self) -> list[Action]:
        """Return the next backward and forward that the stage allows, with the kind that did not run last first."""
        forward, backward = self._done["forward"], self._done["backward"]
        found = []
        if backward < forward:
            found.append(Action("backward", self.stage, backward))
        if forward < self.schedule.num_micro_batches and forward - backward < self.in_flight:
            found.append(Action("forward", self.stage, forward))
        return found if self._last == "forward" else found[::-1]

    def _post_ahead(self) -> None:
        """Post the receives of a micro-batch once those of the one before have arrived.

        A receive behind another one of its NCCL stream cannot start, and an operation that has not started blocks all
        streams that share its hardware queue.
        """
        for kind, done in self._done.items():
            while self._posted[kind] < min(done + AHEAD, self.schedule.num_micro_batches):
                micro_batch = self._posted[kind]
                if micro_batch > 0 and not self.arrivals.have(self._needs(Action(kind, self.stage, micro_batch - 1))):
                    break
                for message in self.schedule.messages(Action(kind, self.stage, micro_batch))[0]:
                    self._post(message)
                    self.arrivals.expect(message)
                self._posted[kind] += 1

    def _needs(self, action: Action) -> list[Key]:
        return [message.key for message in self.schedule.messages(action)[0]]
