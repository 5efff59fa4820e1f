"""Runs one step on a rank: goes through a list of actions, posts receives, computes and sends.

An action is either done or not begun: if ranks may be lost, all its inputs have arrived before it starts, and results
for other ranks are kept until the step ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.mesh import Mesh
from weft.models.router import take_router_losses
from weft.pipeline.deferred_weight_grads import DeferredWeightGrads
from weft.pipeline.message_order import Arrivals, MessageDrivenOrder
from weft.pipeline.partition import Route
from weft.pipeline.stage import StagePass, StageRunner
from weft.pipeline.trace import TracedTensor
from weft.pipeline.transport import Key, Transport
from weft.profiling import Parameter
from weft.schedule.actions import SHADOW, Action, Message, Schedule
from weft.schedule.simulate import Span
from weft.sharding.units import Units


@dataclass(eq=False)
class Stage:
    """A stage of one replica on this rank."""

    index: int
    replica: int
    model: nn.Module
    units: Units
    walk: StageRunner
    names: Mapping[str, str]  # of its parameters, in the whole model
    deferred: DeferredWeightGrads | None = None
    live: dict[int, StagePass] = field(default_factory=dict)  # by micro-batch, from forward to backward
    late: dict[int, Callable[[], None]] = field(default_factory=dict)  # deferred weight gradients, by micro-batch

    def in_whole(self, parameter: Parameter) -> Parameter:
        """A parameter of the stage by its name in the whole model; copies are counted over stages, then replicas."""
        order = parameter.stages.index(self.index) if parameter.stages else 0
        copy = order + len(parameter.stages or (0,)) * self.replica
        return replace(parameter, name=self.names[parameter.name], copy=copy)


@dataclass(frozen=True)
class Work:
    """The work of a step: the loss of each batch, times the first of `scales`; losses of routers times the second.
    Without `scales`, only forwards run.

    `total` returns a tensor of shape `shape`: forward only, several numbers may be summed. `before` is called with the
    index of each batch before its forward.
    """

    batches: Sequence[Any]  # nested values of tensors
    total: Callable[[nn.Module, Any], Tensor]
    scales: Tensor | None = None
    before: Callable[[int], None] = lambda index: None
    shape: tuple[int, ...] = ()


class StepRun:
    """One step in progress."""

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
        self.number = -1  # of the section that it belongs to
        self.keeps = False  # whether results are kept until the step ends
        self.done: set[Action] = set()
        self.is_complete = False
        self.has_gradients = False  # whether the shadow has the gradients of this step
        self._stream = torch.cuda.current_stream(mesh.device) if timed and mesh.device.type == "cuda" else None
        self.loss = torch.zeros(work.shape, dtype=torch.float64, device=mesh.device)
        self.shadow_loss = torch.zeros_like(self.loss)
        self.spans: list[Span] = []
        self.reduced: set[Stage] = set()
        self._results: dict[Key, Tensor] = {}  # results for other stages of this rank, or about to be sent
        self.began, self._began, self._started = time.time(), time.perf_counter(), 0.0
        self._prefetched: dict[Key, Tensor] = {}  # inputs received for an action before it begins
        self._last = self._last_backwards()
        self._confirmed = {} if schedule.name == "message" else arrived

    def resume(self, schedule: Schedule, transport: Transport, here: int) -> None:
        """Continue an interrupted step with other lists."""
        self.schedule, self.transport, self.here = schedule, transport, here
        self._confirmed, self._last = {}, self._last_backwards()
        self._prefetched.clear()

    def _last_backwards(self) -> dict[tuple[int, int], Action]:
        own = self.schedule.compute(self.here)
        backwards = [a for a in own if a.kind == "backward" and a.stage not in self.schedule.split_stages]
        return {(action.stage, action.replica): action for action in backwards}

    def run_list(self, steps: Sequence[Action | Message]) -> None:
        """Run a list of actions and messages; without `scales`, only its forwards."""
        for step in steps:
            if isinstance(step, Message):
                if self.work.scales is None and step.direction == "backward":
                    continue
                if step.is_send:
                    self._send(step)
                else:
                    self._post(step)
            elif self.work.scales is not None or step.kind == "forward":
                self.compute(step)

    def run_on_arrival(self, replay: Sequence[Action] | None) -> None:
        """Run actions as their messages arrive, or in the order of `replay`."""
        (stage,) = self.parts.values()
        own = self.schedule.compute(self.here)
        if replay is not None and Counter(replay) != Counter(own):
            raise PlanError(
                f"the replayed order has {len(replay)} actions, which are not the {len(own)} of stage {stage.index} in "
                f"a step of {len(self.work.batches)} micro-batches; replay the order of such a step of this rank"
            )
        assert self.transport is not None
        arrivals = Arrivals(self.transport)
        order = MessageDrivenOrder(self.schedule, stage.index, arrivals, self._post)
        replayed = iter(replay or ())
        while (action := order.next(next(replayed, None))) is not None:
            self.compute(action)
            for message in self.schedule.messages(action)[1]:
                self._send(message)
        arrivals.close()

    def compute(self, action: Action) -> None:
        """Run one action after waiting for its inputs."""
        if self._status is not None:
            self._status.enters(str(action))
        self._start()
        stage = self.parts[action.stage, action.replica + (action.kind == SHADOW)]
        if self.keeps:  # so that an action is either done or not begun
            for message in self.schedule.messages(action)[0]:
                self._prefetched[message.key] = self._receive_now(message.key)
        do = {"forward": self._forward, "backward": self._backward, "weight": self._weight, SHADOW: self._forward}
        do[action.kind](stage, action)
        self.done.add(action)

    # --- actions

    def _forward(self, stage: Stage, action: Action) -> None:
        batch = self.work.batches[action.micro_batch]
        self.work.before(action.micro_batch)
        route, take = self.routes[action.micro_batch], partial(self._receive, action)
        with stage.units.reads.watching():
            done = stage.walk.forward(partial(self.work.total, stage.model, batch), route, take)
        # An evaluation has no losses of routers: those that are there are of the last recompute.
        routers = None if self.work.scales is None else take_router_losses(stage.model)
        if routers is not None:
            assert self.work.scales is not None
            routers = routers * (self.work.scales[1] / self.work.scales[0]).to(routers)
            done.total = routers if done.total is None else done.total + routers.to(done.total)
        if done.total is not None:
            loss = self.shadow_loss if action.kind == SHADOW else self.loss
            loss += done.total.detach()
        if self.work.scales is not None:
            stage.live[action.micro_batch] = done
        made = done.free_results()
        for index in self.schedule.edges_out_of[action.stage]:
            self._results[index, action.micro_batch, action.replica, "forward"] = made[route.edge_numbers[index]]
        self._note(action)

    def _backward(self, stage: Stage, action: Action) -> None:
        done = stage.live[action.micro_batch]
        roots = self._roots(action, done)
        if done.total is not None:
            assert self.work.scales is not None
            roots.append(done.total * self.work.scales[0].to(done.total.dtype))
        self._start()
        stage.units.sync = self._last.get((action.stage, action.replica)) == action
        if roots:
            stage.walk.recomputes = done
            torch.autograd.backward(roots)
            stage.walk.recomputes = None
            if stage.units.sync:
                self.reduced.add(stage)
        del stage.live[action.micro_batch]
        if stage.deferred is not None:
            stage.late[action.micro_batch] = stage.deferred.collect()
        for number in done.needs_gradient:
            edge, gradient = done.route.edge_indices[number, action.stage], done.gradients.pop(number, None)
            if gradient is None:
                value = done.route.trace.values[number]
                gradient = torch.zeros(value.shape, dtype=value.dtype, device=self.loss.device)
            self._results[edge, action.micro_batch, action.replica, "backward"] = gradient
        self._note(action)

    def _weight(self, stage: Stage, action: Action) -> None:
        self._start()
        stage.late.pop(action.micro_batch)()
        self._note(action)

    def _roots(self, action: Action, done: StagePass) -> list[Tensor]:
        """Return the roots of what the stage made for others, once the sums of their gradients have arrived."""
        sums = done.arrived
        for index in self.schedule.edges_out_of[action.stage]:
            edge = self.schedule.edges[index]
            if not edge.backward:
                continue
            gradient = self._take((index, action.micro_batch, action.replica, "backward"))
            number = done.route.edge_numbers[index]
            sums[number] = gradient if number not in sums else sums[number] + gradient
        return [done.roots[number] for number in sums]

    # --- tensors

    def _receive(self, action: Action, number: int) -> tuple[Tensor, bool]:
        """Return a tensor that another stage made, and whether its gradient goes back."""
        edge = self.routes[action.micro_batch].edge_indices[number, action.stage]
        tensor = self._take((edge, action.micro_batch, action.replica, "forward")).detach()
        self._start()
        return tensor, self.work.scales is not None and self.schedule.edges[edge].backward

    def _post(self, message: Message) -> None:
        assert self.transport is not None
        self.transport.post(message, self._value(message))

    def _send(self, message: Message) -> None:
        assert self.transport is not None
        if message.channel in self.schedule.awaited:
            self.transport.await_last(message)
        self.transport.send(message, self._results[message.key] if self.keeps else self._results.pop(message.key))

    def _take(self, key: Key) -> Tensor:
        if key in self._prefetched:
            return self._prefetched.pop(key)
        if key in self._results:
            return self._results[key] if self.keeps else self._results.pop(key)
        return self._receive_now(key)

    def _receive_now(self, key: Key) -> Tensor:
        assert self.transport is not None
        tensor = self.transport.take(key)
        # A rank that chooses its own order has at least used the tensor whose gradient it sends.
        self.transport.release(self._confirmed.get(key, [(*key[:3], "forward")]))
        return tensor

    def _value(self, message: Message) -> TracedTensor:
        route = self.routes[message.micro_batch]
        return route.trace.values[route.edge_numbers[message.edge]]

    # --- times

    def _start(self) -> None:
        """Record that the action starts now, with all its inputs."""
        self._started = self._now()

    def _now(self) -> float:
        if self._stream is not None:  # not the whole device, which would also wait for receives that are posted ahead
            self._stream.synchronize()
        return time.perf_counter() - self._began

    def _note(self, action: Action) -> None:
        now = self._now()
        free = self.spans[-1].end_seconds if self.spans else 0.0
        started = max(free, self._started)
        if started > free:
            self.spans.append(Span(free, started, "wait"))
        self.spans.append(Span(started, now, action))
