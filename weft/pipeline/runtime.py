"""The pipeline at run time: a rank's stages, and the schedules that they run.

The runtime is the same for all schedules: `step_run.py` goes through this rank's list of actions. Each stage sums
gradients over its micro-batches; they are reduced over `shard` and `data` after the stage's last backward. At the end
of the step the copies of a stage (mirrored replicas), and the stages that share a tied parameter, sum their gradients,
so all copies make the same update.

With shadows (`schedule/shadow.py`), a step that was interrupted by the loss of a rank continues where it was, with the
lists of `take_over`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft.comm import uses_nccl
from weft.errors import LostRankError, PlanError
from weft.inspection.nested_tensors import tensors_in
from weft.mesh import Mesh
from weft.pipeline.nccl_queues import check_queues
from weft.pipeline.partition import Route
from weft.pipeline.sections import Sections
from weft.pipeline.shadow_gradients import ShadowRefresh
from weft.pipeline.shared_parameters import SharedParameters
from weft.pipeline.step_run import Stage, StepRun, Work
from weft.pipeline.transport import Key, Transport
from weft.schedule.actions import Action, Schedule
from weft.schedule.activation_lifetimes import confirmed_sends
from weft.schedule.shadow import kept_actions, take_over
from weft.schedule.simulate import Span

__all__ = ["Pipeline", "Stage", "Work"]


class Pipeline(nn.Module):
    """A model over `pipe`, as one rank holds it. `train_step` runs it."""

    parts: dict[tuple[int, int], Stage]  # by (stage, replica)

    def __init__(
        self,
        stages: Sequence[Stage],
        copies: SharedParameters,
        make_schedule: Callable[[int, bool], Schedule],
        mesh: Mesh,
        parameter_names: Sequence[str],
        check_evaluation: Callable[[], None],
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.model for stage in stages)
        self.parts = {(stage.index, stage.replica): stage for stage in stages}
        self.copies, self.mesh, self.parameter_names = copies, mesh, tuple(parameter_names)
        self._make_schedule = make_schedule
        self.check_evaluation = check_evaluation  # raises if the stages cannot run the forward of evaluation
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        # own sends confirmed by each received message
        self._arrived: dict[tuple[int, bool], Mapping[Key, Sequence[Key]]] = {}
        self._transport: Transport | None = None
        self._routes: dict[Any, Route] = {}  # by the shapes of a batch
        self._done: set[Any] = set()  # kinds of steps that have run
        self.timed = False  # if True, steps wait for the device at each action, so that spans are device times
        self.spans: tuple[Span, ...] = ()  # of the last training step, in seconds since `began`
        self.began = 0.0  # by the host's clock
        self.replay: Sequence[Action] | None = None  # an earlier `order` that a message-driven schedule must repeat
        self.is_shadowed, self.num_stages = mesh.plan.pipe.shadow, mesh.plan.pipe.num_stages
        self.shadow = stages[-1] if self.is_shadowed and stages[-1].replica else None  # the next rank's stage
        self.sections: Sections | None = None  # set if lost ranks are reported
        self._refresh: ShadowRefresh | None = None
        self._num_steps = self._shadow_steps = 0  # steps done, and steps whose gradients the shadow has
        self._under_way: StepRun | None = None  # the training step, until the next one begins
        self._lost: int | None = None  # the rank whose stage another rank has taken over
        self._cut: _InterruptedStep | None = None

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise PlanError("a model over pipe is run by its schedule, not called; use weft.train_step or weft.evaluate")

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last step, in the order in which this rank ran them."""
        return tuple(span.action for span in self.spans if isinstance(span.action, Action))

    def schedule(self, num_micro_batches: int, with_backward: bool = True) -> Schedule:
        """Return the checked schedule of a step, with its messages."""
        key = num_micro_batches, with_backward
        if key not in self._schedules:
            made = self._make_schedule(*key)
            if uses_nccl(self.mesh["pipe"], self.mesh.device):
                check_queues(made, os.environ)
            self._schedules[key] = made if self._lost is None else take_over(made, self._lost)
            self._arrived[key] = confirmed_sends(self._schedules[key], self.mesh["pipe"].index)
        return self._schedules[key]

    @property
    def own(self) -> list[Stage]:
        """The stages whose parameters this rank owns: all but the shadow."""
        return [stage for stage in self.parts.values() if stage is not self.shadow]

    def run(self, work: Work) -> Tensor:
        """Run forward and, with scales, backward of all batches. Return the sum of this rank's losses."""
        schedule = self.schedule(len(work.batches), work.scales is not None)
        if self._transport is None:
            self._transport = Transport(self.mesh, schedule)
            self._refresh = ShadowRefresh(self.mesh) if self.is_shadowed and self._lost is None else None
        kind = (work.scales is not None, *map(self._shapes, work.batches))
        self._transport.uses_host = kind not in self._done
        run = self._begin(work, schedule)
        with torch.set_grad_enabled(work.scales is not None):
            if schedule.name == "message" and work.scales is not None:
                run.run_on_arrival(self.replay)
            else:
                run.run_list(run.schedule.lists[run.here])
        self._transport.finish()
        self._done.add(kind)
        if run.is_complete:
            return run.loss.clone()
        if work.scales is not None:
            for stage in self.own:
                if stage not in run.reduced:
                    stage.units.reduce_all()
            self.copies.combine()
            self._exchange_gradients(run)
            was_cut = self._cut is not None and self._cut.number == run.number
            self.began, self.spans = run.began, () if was_cut else tuple(run.spans)
        for stage in self.parts.values():
            stage.units.end_step()
        run.is_complete = True
        self._num_steps += work.scales is not None
        return run.loss.clone()  # a copy, because the caller sums it over ranks in place and may do so again

    def _begin(self, work: Work, schedule: Schedule) -> StepRun:
        """Return a new run, or the run that the loss of a rank has interrupted, with its remaining actions."""
        assert self._transport is not None
        number = -1 if self.sections is None else self.sections.number
        arrived = self._arrived[len(work.batches), work.scales is not None]
        if self._cut is not None and self._cut.number == number and work.scales is not None:
            schedule, arrived = self._cut.rest_of(self._make_schedule(len(work.batches), True)), {}
            if self._under_way is not None and self._under_way.number == number:
                self._under_way.resume(schedule, self._transport, self.mesh["pipe"].index)
                return self._under_way
        for stage in self.parts.values():
            stage.units.sync = False
            stage.units.begin_step()
        run = StepRun(
            self.parts, self._routes_of(work), work, schedule, self._transport, self.mesh, self.timed, arrived
        )
        run.number, run.keeps = number, self.is_shadowed and work.scales is not None
        self._under_way = run
        if self._refresh is not None and self.shadow is not None and work.scales is not None:
            self._refresh.expect(self.shadow.units, self.mesh["pipe"].index + 1)
        return run

    def _exchange_gradients(self, run: StepRun) -> None:
        """Send each stage's gradients to its shadow, which makes the same update."""
        if self._refresh is None:
            return
        here = self.mesh["pipe"].index
        if here > 0:
            self._refresh.give(self.own[0].units, here - 1, self._num_steps + 1)
        self._refresh.finish(None if self.shadow is None else self.shadow.units, self._num_steps + 1)
        run.has_gradients, self._shadow_steps = True, self._num_steps + 1
        if self.shadow is not None:
            self.shadow.live.clear()  # the shadow runs no backward

    # --- the loss of a rank

    def progress(self) -> tuple[list[Action], bool]:
        """Return the actions that this rank has done of the current training step, and whether its shadow has its
        gradients.

        The step is that of the current section; without one, there is no progress.
        """
        run = self._under_way
        if run is None or self.sections is None or run.number != self.sections.number or run.work.scales is None:
            return [], False
        return sorted(run.done, key=str), run.has_gradients

    def let_go(self) -> None:
        """Drop all references that could keep a connection open."""
        self._transport = self._refresh = None
        if self._under_way is not None:
            self._under_way.transport = None

    def take_over(self, lost: int, number: int, done: Collection[Action], has_gradients: bool) -> None:
        """Continue without the rank `lost`.

        In the section `number` living ranks have `done` these actions. `has_gradients`: the shadow of the lost rank's
        stage has the gradients of the step; see `shadow.kept_actions`.
        """
        self._cut, self._lost = _InterruptedStep(lost, number, frozenset(done), has_gradients), lost
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
            if shadow.index == lost:  # stage and rank have the same number
                shadow.replica = 0
                self.parts[lost, 0] = shadow
                if self._under_way is not None:
                    self._under_way.loss += self._under_way.shadow_loss
        self.stages = nn.ModuleList(stage.model for stage in self.parts.values())

    def _shapes(self, batch: Any) -> Any:
        return (self.training, *((tensor.shape, tensor.dtype) for tensor in tensors_in(batch)))

    def _routes_of(self, work: Work) -> list[Route]:
        """Return the route of each batch. Receives are posted before a forward could tell the shapes."""
        routes = []
        for batch in work.batches:
            key = self._shapes(batch)
            if key not in self._routes:
                stage = next(iter(self.parts.values()))
                self._routes[key] = stage.walk.trace_route(partial(work.total, stage.model, batch))
            routes.append(self._routes[key])
        return routes


@dataclass(frozen=True)
class _InterruptedStep:
    """The section in which a rank was lost, and the actions that living ranks had done of its training step."""

    lost: int
    number: int
    done: frozenset[Action]
    has_gradients: bool

    def rest_of(self, schedule: Schedule) -> Schedule:
        return take_over(schedule, self.lost, kept_actions(schedule, self.lost, self.done, self.has_gradients))
