"""The pipeline at work: a rank's stages, and the lists of actions that they run.

One runtime for all schedules. It knows nothing of their order: it goes through this rank's list, posts the receives
that stand there, computes, and sends. Gradients add up in each stage over its micro-batches and are reduced over
`shard` and `data` behind the stage's last backward; at the end of the step the copies of a stage (mirrored replicas),
and the stages that share a tied parameter, add up theirs, so that all copies take the same update.

With shadows (`shadow.py`), what was sent is kept until the step ends, and a step that was cut short by the loss of a
rank goes on where it was, by the lists of `take_over`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft.errors import LostRankError, PlanError
from weft.mesh import Mesh
from weft.parallel.unit import Units
from weft.pipeline.actions import SHADOW, Action, Message, Schedule
from weft.pipeline.arrivals import Arrivals, AsTheyCome
from weft.pipeline.copies import Copies
from weft.pipeline.deferred import Deferred
from weft.pipeline.held import answers
from weft.pipeline.partition import Route
from weft.pipeline.refresh import Refresh
from weft.pipeline.sections import Sections
from weft.pipeline.shadow import kept, take_over
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
    taken_over: bool = False  # from a rank that was lost
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
        self.is_shadowed, self.num_stages = mesh.plan.pipe.shadow, mesh.plan.pipe.num_stages
        self.shadow = stages[-1] if self.is_shadowed and stages[-1].replica else None  # the next rank's stage
        self.sections: Sections | None = None  # where somebody tells of lost ranks
        self._refresh: Refresh | None = None
        self._num_steps = self._shadow_steps = 0  # done, and of which the shadow has the gradients
        self._under_way: _Run | None = None  # the training step, until the next begins
        self._lost: int | None = None  # the rank whose stage another has taken over
        self._cut: _CutShort | None = None

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
            made = self._make_schedule(*key)
            self._schedules[key] = made if self._lost is None else take_over(made, self._lost)
            self._arrived[key] = answers(self._schedules[key], self.mesh["pipe"].index)
        return self._schedules[key]

    @property
    def own(self) -> list[Stage]:
        """The stages that this rank answers for."""
        return [stage for stage in self.parts.values() if stage is not self.shadow]

    def run(self, work: Work) -> Tensor:
        """Forward and, with a scale, backward of all batches; the sum of the losses that this rank has seen."""
        schedule = self.schedule(len(work.batches), work.scale is not None)
        if self._transport is None:
            self._transport = Transport(self.mesh, schedule)
            self._refresh = Refresh(self.mesh) if self.is_shadowed and self._lost is None else None
        run = self._begin(work, schedule)
        with torch.set_grad_enabled(work.scale is not None):
            if schedule.name == "message" and work.scale is not None:
                run.as_they_come(self.replay)
            else:
                run.in_order(run.schedule.lists[run.here])
        self._transport.finish()
        if run.is_complete:
            return run.loss.clone()
        if work.scale is not None:
            for stage in self.own:
                if stage not in run.reduced and not (stage.taken_over and run.has_gradients):
                    stage.units.reduce_all()
            self.copies.combine()
            self._exchange_gradients(run)
            self.began, self.spans = run.began, tuple(run.spans)
        for stage in self.parts.values():
            stage.units.end_step()
        run.is_complete = True
        self._num_steps += work.scale is not None
        return run.loss.clone()  # what is summed over ranks may have to be summed again

    def _begin(self, work: Work, schedule: Schedule) -> _Run:
        """A new run, or the one that the loss of a rank has cut short, with what is left of it."""
        assert self._transport is not None
        number = -1 if self.sections is None else self.sections.number
        arrived = self._arrived[len(work.batches), work.scale is not None]
        if self._cut is not None and self._cut.number == number and work.scale is not None:
            schedule, arrived = self._cut.rest_of(self._make_schedule(len(work.batches), True)), {}
            if self._under_way is not None and self._under_way.number == number:
                self._under_way.go_on(schedule, self._transport, self.mesh["pipe"].index)
                return self._under_way
        for stage in self.parts.values():
            stage.units.sync = False
            stage.units.begin_step()
        run = _Run(self.parts, self._routes_of(work), work, schedule, self._transport, self.mesh, self.timed, arrived)
        run.number, run.keeps = number, self.is_shadowed and work.scale is not None
        self._under_way = run
        if self._refresh is not None and self.shadow is not None and work.scale is not None:
            self._refresh.expect(self.shadow.units, self.mesh["pipe"].index + 1)
        return run

    def _exchange_gradients(self, run: _Run) -> None:
        """Shadows take the gradients of what they shadow, for the same update."""
        if self._refresh is None:
            return
        here = self.mesh["pipe"].index
        if here > 0:
            self._refresh.give(self.own[0].units, here - 1, self._num_steps + 1)
        self._refresh.finish(None if self.shadow is None else self.shadow.units, self._num_steps + 1)
        run.has_gradients, self._shadow_steps = True, self._num_steps + 1

    # --- the loss of a rank

    def progress(self) -> tuple[list[Action], bool]:
        """What this rank has done of the training step of the section under way, and whether its shadow has the
        gradients of it.
        """
        run = self._under_way
        if run is None or self.sections is None or run.number != self.sections.number or run.work.scale is None:
            return [], False
        return sorted(run.done, key=str), run.has_gradients

    def let_go(self) -> None:
        """Forget all that could hold a connection."""
        self._transport = self._refresh = None
        if self._under_way is not None:
            self._under_way.transport = None

    def take_over(self, lost: int, number: int, done: Collection[Action], has_gradients: bool) -> None:
        """Go on without a rank. In the section `number` living ranks have `done` this, and the shadow of the lost
        rank's stage has its gradients, or not; see `shadow.kept`.
        """
        self._cut, self._lost = _CutShort(lost, number, frozenset(done), has_gradients), lost
        self._schedules.clear()
        self._arrived.clear()
        shadow, self.shadow = self.shadow, None
        if shadow is not None and shadow.index == lost and self._shadow_steps < self._num_steps:
            raise LostRankError(
                f"stage {lost} was lost with its rank: its shadow has the gradients of {self._shadow_steps} steps, and "
                f"{self._num_steps} are done"
            )
        if shadow is not None:
            del self.parts[shadow.index, shadow.replica]
            if shadow.index == lost:  # stages and ranks are numbered alike
                shadow.replica, shadow.taken_over = 0, True
                self.parts[lost, 0] = shadow
                if self._under_way is not None:
                    self._under_way.loss += self._under_way.shadow_loss
        self.stages = nn.ModuleList(stage.model for stage in self.parts.values())

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


@dataclass(frozen=True)
class _CutShort:
    """The section in which a rank was lost, and what living ranks had done of its training step."""

    lost: int
    number: int
    done: frozenset[Action]
    has_gradients: bool

    def rest_of(self, schedule: Schedule) -> Schedule:
        return take_over(schedule, self.lost, kept(schedule, self.lost, self.done, self.has_gradients))


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
        self.parts, self.routes, self.work, self.schedule = parts, routes, work, schedule
        self.transport: Transport | None = transport
        self.here = mesh["pipe"].index
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
        self._edge = {(int(edge.name), edge.target): index for index, edge in enumerate(schedule.edges)}
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
            made = done.made[int(self.schedule.edges[index].name)]
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
