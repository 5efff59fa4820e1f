"""The pipeline at work: a rank's stages, and the lists of actions that they run.

One runtime for all schedules. It knows nothing of their order: it goes through this rank's list, posts the receives
that stand there, computes, and sends. Gradients add up in each stage over its micro-batches and are reduced over
`shard` and `data` behind the stage's last backward; at the end of the step the copies of a stage (mirrored replicas),
and the stages that share a tied parameter, add up theirs, so that all copies take the same update.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.mesh import Mesh
from weft.parallel.unit import Units
from weft.pipeline.actions import Action, Message, Schedule
from weft.pipeline.arrivals import Arrivals, AsTheyCome
from weft.pipeline.copies import Copies
from weft.pipeline.deferred import Deferred
from weft.pipeline.held import answers
from weft.pipeline.partition import Route
from weft.pipeline.simulate import Span
from weft.pipeline.stage import Pass, Walk
from weft.pipeline.trace import Value
from weft.pipeline.transport import Key, Transport

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


class Pipeline(nn.Module):
    """A model over `pipe`, as one rank holds it; `train_step` runs it."""

    parts: dict[tuple[int, int], Stage]  # by (stage, replica)

    def __init__(
        self,
        stages: Sequence[Stage],
        copies: Copies,
        make_schedule: Callable[[int, bool], Schedule],
        mesh: Mesh,
        parameter_names: Sequence[str],
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.model for stage in stages)
        self.parts = {(stage.index, stage.replica): stage for stage in stages}
        self.copies, self.mesh, self.parameter_names = copies, mesh, tuple(parameter_names)
        self._make_schedule = make_schedule
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._arrived: dict[tuple[int, bool], Mapping[Key, Sequence[Key]]] = {}  # what each message that comes tells
        self._transport: Transport | None = None
        self._routes: dict[Any, Route] = {}  # by the shapes of a batch
        self.timed = False  # whether the next steps wait for the device at each action, so that spans are its times
        self.spans: tuple[Span, ...] = ()  # what the last training step did, and when: seconds since `began`
        self.began = 0.0  # by the host's clock
        self.replay: Sequence[Action] | None = None  # an earlier `order`, for a message-driven schedule to keep to

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise PlanError("a model over pipe is run by its schedule, not called; use weft.train_step or weft.evaluate")

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last step, in the order in which this rank did them."""
        return tuple(span.action for span in self.spans if isinstance(span.action, Action))

    def schedule(self, num_micro_batches: int, with_backward: bool = True) -> Schedule:
        """The checked schedule of a step, with its messages."""
        key = num_micro_batches, with_backward
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(*key)
            self._arrived[key] = answers(self._schedules[key], self.mesh["pipe"].index)
        return self._schedules[key]

    def run(self, work: Work) -> Tensor:
        """Forward and, with a scale, backward of all batches; the sum of the losses that this rank has seen."""
        schedule = self.schedule(len(work.batches), work.scale is not None)
        if self._transport is None:
            self._transport = Transport(self.mesh, schedule)
        for stage in self.parts.values():
            stage.units.sync = False
            stage.units.begin_step()
        arrived = self._arrived[len(work.batches), work.scale is not None]
        run = _Run(self.parts, self._routes_of(work), work, schedule, self._transport, self.mesh, self.timed, arrived)
        with torch.set_grad_enabled(work.scale is not None):
            if schedule.name == "message" and work.scale is not None:
                run.as_they_come(self.replay)
            else:
                run.in_order(schedule.lists[self.mesh["pipe"].index])
        self._transport.finish()
        if work.scale is not None:
            for stage in self.parts.values():
                if stage not in run.reduced:
                    stage.units.reduce_all()
            self.copies.combine()
            self.began, self.spans = run.began, tuple(run.spans)
        for stage in self.parts.values():
            stage.units.end_step()
        return run.loss

    def _routes_of(self, work: Work) -> list[Route]:
        """The route of each batch: receives are posted before a forward could tell what shapes it has."""
        routes = []
        for batch in work.batches:
            key = (self.training, *((tensor.shape, tensor.dtype) for tensor in batch))
            if key not in self._routes:
                stage = next(iter(self.parts.values()))
                self._routes[key] = stage.walk.look(partial(work.total, stage.model, batch))
            routes.append(self._routes[key])
        return routes


class _Run:
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
        self.parts, self.routes, self.work, self.schedule, self.transport = parts, routes, work, schedule, transport
        self.here, self._status = mesh["pipe"].index, mesh.ledger.status
        self._stream = torch.cuda.current_stream(mesh.device) if timed and mesh.device.type == "cuda" else None
        self.loss = torch.zeros(work.shape, dtype=torch.float64, device=mesh.device)
        self.spans: list[Span] = []
        self.reduced: set[Stage] = set()
        self._kept: dict[Key, Tensor] = {}  # what a stage has made for another of this rank, or is about to send
        self.began, self._began, self._started = time.time(), time.perf_counter(), 0.0
        self._edge = {(int(edge.name), edge.target): index for index, edge in enumerate(schedule.edges)}
        backwards = [
            a for a in schedule.compute(self.here) if a.kind == "backward" and a.stage not in schedule.split_stages
        ]
        self._last = {(action.stage, action.replica): action for action in backwards}
        self._answers = {} if schedule.name == "message" else arrived

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
        stage = self.parts[action.stage, action.replica]
        {"forward": self._forward, "backward": self._backward, "weight": self._weight}[action.kind](stage, action)

    # --- actions

    def _forward(self, stage: Stage, action: Action) -> None:
        batch = self.work.batches[action.micro_batch]
        self.work.before(action.micro_batch)
        route, take = self.routes[action.micro_batch], partial(self._receive, action)
        done = stage.walk.forward(partial(self.work.total, stage.model, batch), route, take)
        if done.total is not None:
            self.loss += done.total.detach()
        if self.work.scale is not None:
            stage.live[action.micro_batch] = done
        for index in self.schedule.edges_out_of[action.stage]:
            made = done.made[int(self.schedule.edges[index].name)]
            self._kept[index, action.micro_batch, action.replica, "forward"] = made
        self._note(action)

    def _backward(self, stage: Stage, action: Action) -> None:
        done = stage.live.pop(action.micro_batch)
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
        if stage.deferred is not None:
            stage.late[action.micro_batch] = stage.deferred.collect()
        for number, leaf in done.received.items():
            if leaf.requires_grad:
                key = (self._edge[number, action.stage], action.micro_batch, action.replica, "backward")
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
            number = int(edge.name)
            sums[number] = gradient if number not in sums else sums[number] + gradient
        return [done.made[number] for number in sums], list(sums.values())

    # --- tensors

    def _receive(self, action: Action, number: int) -> Tensor:
        """What another stage made, as a leaf of this one."""
        edge = self._edge[number, action.stage]
        tensor = self._take((edge, action.micro_batch, action.replica, "forward")).detach()
        self._start()
        return tensor.requires_grad_(self.work.scale is not None and self.schedule.edges[edge].backward)

    def _post(self, message: Message) -> None:
        self.transport.post(message, self._value(message))

    def _send(self, message: Message) -> None:
        self.transport.send(message, self._kept.pop(message.key))

    def _take(self, key: Key) -> Tensor:
        if key in self._kept:
            return self._kept.pop(key)
        tensor = self.transport.take(key)
        # A rank that chooses its own order has at least used what it sends the gradient of.
        self.transport.answered(self._answers.get(key, [(*key[:3], "forward")]))
        return tensor

    def _value(self, message: Message) -> Value:
        number = int(self.schedule.edges[message.edge].name)
        return self.routes[message.micro_batch].trace.values[number]

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
