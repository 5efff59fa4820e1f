"""One step under way on a rank: it goes through a list of actions, posts receives, computes and sends.

An action is done, or not begun: where ranks may be lost, all that it takes has come before it starts. What was made for
others is then kept until the step ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.mesh import Mesh
from weft.pipeline.deferred_weight_grads import Deferred
from weft.pipeline.message_order import Arrivals, AsTheyCome
from weft.pipeline.partition import Route
from weft.pipeline.stage import Pass, Walk
from weft.pipeline.trace import Value
from weft.pipeline.transport import Key, Transport
from weft.profile import Parameter
from weft.schedule.actions import SHADOW, Action, Message, Schedule
from weft.schedule.simulate import Span
from weft.sharding.units import Units

Batch = tuple[Tensor, ...]


@dataclass(eq=False)
class Stage:
    """A stage of one replica on this rank."""

    index: int
    replica: int
    model: nn.Module
    units: Units
    walk: Walk
    names: Mapping[str, str]  # of its parameters, in the whole model
    deferred: Deferred | None = None
    live: dict[int, Pass] = field(default_factory=dict)  # by micro-batch, from forward to backward
    late: dict[int, Callable[[], None]] = field(default_factory=dict)  # weight gradients put down, by micro-batch

    def in_whole(self, parameter: Parameter) -> Parameter:
        """A parameter of the stage by its name in the whole model; copies are counted over stages, then replicas."""
        order = parameter.stages.index(self.index) if parameter.stages else 0
        copy = order + len(parameter.stages or (0,)) * self.replica
        return replace(parameter, name=self.names[parameter.name], copy=copy)


@dataclass(frozen=True)
class Work:
    """What a step is to compute: the loss of each batch, times `scale`; without it, forward only.

    `shape` is that of what `total` gives: several numbers may be summed, forward only.
    """

    batches: Sequence[Batch]
    total: Callable[[nn.Module, Batch], Tensor]
    scale: Tensor | None = None
    before: Callable[[int], None] = lambda index: None
    shape: tuple[int, ...] = ()


class Run:
    """One step under way."""

    def __init__(
        self,
        parts: Mapping[tuple[int, int], Stage],
        routes: Sequence[Route],
        work: Work,
        schedule: Schedule,
        transport: Transport,
        mesh: Mesh,
        timed: bool,
        arrived: Mapping[Key, Sequence[Key]],
    ) -> None:
        self.parts, self.routes, self.work, self.schedule = parts, routes, work, schedule
        self.transport: Transport | None = transport
        self.here, self._status = mesh["pipe"].index, mesh.ledger.status
        self.number = -1  # of the section that it is in
        self.keeps = False  # whether what was made is kept until the step ends
        self.done: set[Action] = set()
        self.is_complete = False
        self.has_gradients = False  # whether the shadow has those of this step
        self._stream = torch.cuda.current_stream(mesh.device) if timed and mesh.device.type == "cuda" else None
        self.loss = torch.zeros(work.shape, dtype=torch.float64, device=mesh.device)
        self.shadow_loss = torch.zeros_like(self.loss)
        self.spans: list[Span] = []
        self.reduced: set[Stage] = set()
        self._kept: dict[Key, Tensor] = {}  # what a stage has made for another of this rank, or is about to send
        self.began, self._began, self._started = time.time(), time.perf_counter(), 0.0
        self._ahead: dict[Key, Tensor] = {}  # what has come for an action, before it begins
        self._last = self._last_backwards()
        self._answers = {} if schedule.name == "message" else arrived

    def go_on(self, schedule: Schedule, transport: Transport, here: int) -> None:
        """Do the rest by other lists."""
        self.schedule, self.transport, self.here = schedule, transport, here
        self._answers, self._last = {}, self._last_backwards()
        self._ahead.clear()

    def _last_backwards(self) -> dict[tuple[int, int], Action]:
        own = self.schedule.compute(self.here)
        backwards = [a for a in own if a.kind == "backward" and a.stage not in self.schedule.split_stages]
        return {(action.stage, action.replica): action for action in backwards}

    def in_order(self, steps: Sequence[Action | Message]) -> None:
        """Go through a list; without gradients, through its forwards."""
        for step in steps:
            if isinstance(step, Message):
                if self.work.scale is None and step.direction == "backward":
                    continue
                if step.is_send:
                    self._send(step)
                else:
                    self._post(step)
            elif self.work.scale is not None or step.kind == "forward":
                self.compute(step)

    def as_they_come(self, replay: Sequence[Action] | None) -> None:
        """Run what has arrived first, or in the order of `replay`."""
        (stage,) = self.parts.values()
        own = self.schedule.compute(self.here)
        if replay is not None and Counter(replay) != Counter(own):
            raise PlanError(
                f"the replayed order has {len(replay)} actions, which are not the {len(own)} of stage {stage.index} in "
                f"a step of {len(self.work.batches)} micro-batches; replay the order of such a step of this rank"
            )
        assert self.transport is not None
        arrivals = Arrivals(self.transport)
        order = AsTheyCome(self.schedule, stage.index, arrivals, self._post)
        kept = iter(replay or ())
        while (action := order.next(next(kept, None))) is not None:
            self.compute(action)
            for message in self.schedule.messages(action)[1]:
                self._send(message)
        arrivals.close()

    def compute(self, action: Action) -> None:
        """Do one action, waiting for what it needs."""
        if self._status is not None:
            self._status.enters(str(action))
        self._start()
        stage = self.parts[action.stage, action.replica + (action.kind == SHADOW)]
        if self.keeps:  # so that an action is done, or not begun
            for message in self.schedule.messages(action)[0]:
                self._ahead[message.key] = self._receive_now(message.key)
        do = {"forward": self._forward, "backward": self._backward, "weight": self._weight, SHADOW: self._forward}
        do[action.kind](stage, action)
        self.done.add(action)

    # --- actions

    def _forward(self, stage: Stage, action: Action) -> None:
        batch = self.work.batches[action.micro_batch]
        self.work.before(action.micro_batch)
        route, take = self.routes[action.micro_batch], partial(self._receive, action)
        done = stage.walk.forward(partial(self.work.total, stage.model, batch), route, take)
        if done.total is not None:
            loss = self.shadow_loss if action.kind == SHADOW else self.loss
            loss += done.total.detach()
        if self.work.scale is not None:
            stage.live[action.micro_batch] = done
        for index in self.schedule.edges_out_of[action.stage]:
            made = done.made[route.edge_numbers[index]]
            self._kept[index, action.micro_batch, action.replica, "forward"] = made
        self._note(action)

    def _backward(self, stage: Stage, action: Action) -> None:
        done = stage.live[action.micro_batch]
        tensors, gradients = self._gradients(action, done)
        if done.total is not None:
            assert self.work.scale is not None
            tensors.append(done.total * self.work.scale.to(done.total.dtype))
            gradients.append(None)
        self._start()
        stage.units.sync = self._last.get((action.stage, action.replica)) == action
        if tensors:
            torch.autograd.backward(tensors, gradients)
            if stage.units.sync:
                self.reduced.add(stage)
        del stage.live[action.micro_batch]
        if stage.deferred is not None:
            stage.late[action.micro_batch] = stage.deferred.collect()
        for number, leaf in done.received.items():
            if leaf.requires_grad:
                edge = done.route.edge_indices[number, action.stage]
                key = (edge, action.micro_batch, action.replica, "backward")
                self._kept[key] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        self._note(action)

    def _weight(self, stage: Stage, action: Action) -> None:
        self._start()
        stage.late.pop(action.micro_batch)()
        self._note(action)

    def _gradients(self, action: Action, done: Pass) -> tuple[list[Tensor], list[Tensor | None]]:
        """What the stage made, each with the sum of what comes back from all who took it."""
        sums: dict[int, Tensor] = {}
        for index in self.schedule.edges_out_of[action.stage]:
            edge = self.schedule.edges[index]
            if not edge.backward:
                continue
            gradient = self._take((index, action.micro_batch, action.replica, "backward"))
            number = done.route.edge_numbers[index]
            sums[number] = gradient if number not in sums else sums[number] + gradient
        return [done.made[number] for number in sums], list(sums.values())

    # --- tensors

    def _receive(self, action: Action, number: int) -> Tensor:
        """What another stage made, as a leaf of this one."""
        edge = self.routes[action.micro_batch].edge_indices[number, action.stage]
        tensor = self._take((edge, action.micro_batch, action.replica, "forward")).detach()
        self._start()
        return tensor.requires_grad_(self.work.scale is not None and self.schedule.edges[edge].backward)

    def _post(self, message: Message) -> None:
        assert self.transport is not None
        self.transport.post(message, self._value(message))

    def _send(self, message: Message) -> None:
        assert self.transport is not None
        self.transport.send(message, self._kept[message.key] if self.keeps else self._kept.pop(message.key))

    def _take(self, key: Key) -> Tensor:
        if key in self._ahead:
            return self._ahead.pop(key)
        if key in self._kept:
            return self._kept[key] if self.keeps else self._kept.pop(key)
        return self._receive_now(key)

    def _receive_now(self, key: Key) -> Tensor:
        assert self.transport is not None
        tensor = self.transport.take(key)
        # A rank that chooses its own order has at least used what it sends the gradient of.
        self.transport.answered(self._answers.get(key, [(*key[:3], "forward")]))
        return tensor

    def _value(self, message: Message) -> Value:
        route = self.routes[message.micro_batch]
        return route.trace.values[route.edge_numbers[message.edge]]

    # --- when

    def _start(self) -> None:
        """The action has what it needs."""
        self._started = self._now()

    def _now(self) -> float:
        if self._stream is not None:  # the whole device would also wait for receives that are posted ahead
            self._stream.synchronize()
        return time.perf_counter() - self._began

    def _note(self, action: Action) -> None:
        now = self._now()
        free = self.spans[-1].end_seconds if self.spans else 0.0
        started = max(free, self._started)
        if started > free:
            self.spans.append(Span(free, started, "wait"))
        self.spans.append(Span(started, now, action))
