"""The pipeline at run time: runs a rank's stages for one step of training or evaluation.

`Pipeline.run` asks the schedule for this rank's list of actions, and `StepRun` (`step_run.py`) goes through the list;
both are the same for all schedules. Each stage sums gradients over its micro-batches. After the stage's last backward
they are reduced over `shard` and `data`. At the end of the step, ranks that hold copies of the same parameters sum
their gradients, so that all copies make the same update: mirrored replicas of a stage, and stages that share a tied
parameter.

With `pipe.shadow`, each rank also keeps a copy of the next rank's stage, a shadow (`schedule/shadow.py`). If a rank is
lost in the middle of a step, `Pipeline.take_over` puts the shadow in the place of the lost stage, and the next call of
`run` continues that step with the actions that are left of it.
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
from weft.comm.backends import MOST_QUEUES, QUEUES_VARIABLE
from weft.errors import LostRankError, PlanError
from weft.inspection.nested_tensors import tensors_in
from weft.mesh import Mesh
from weft.pipeline.partition import Route
from weft.pipeline.sections import Sections
from weft.pipeline.shadow_gradients import ShadowRefresh
from weft.pipeline.shared_parameters import SharedParameters
from weft.pipeline.step_run import Stage, StepRun, Work
from weft.pipeline.transport import Key, Transport
from weft.schedule.actions import Action, Schedule
from weft.schedule.activation_lifetimes import confirmed_sends
from weft.schedule.nccl_order import check_nccl_order
from weft.schedule.shadow import kept_actions, take_over
from weft.schedule.simulate import Span

__all__ = ["Pipeline", "Stage", "Work"]


class Pipeline(nn.Module):
    """One rank's stages of a model that is split over `pipe`. `train_step` and `evaluate` run it."""

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
        # by the key of a schedule: this rank's sends that have arrived when it receives a message
        self._arrived: dict[tuple[int, bool], Mapping[Key, Sequence[Key]]] = {}
        self._transport: Transport | None = None
        self._routes: dict[Any, Route] = {}  # by the shapes of a batch
        self._done: set[Any] = set()  # kinds of steps that have run: with backward or not, and the shapes of batches
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
        self._interrupted: _InterruptedStep | None = None  # the step in which it was lost

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
            was_cut = self._interrupted is not None and self._interrupted.number == run.number
            self.began, self.spans = run.began, () if was_cut else tuple(run.spans)
        for stage in self.parts.values():
            stage.units.end_step()
        run.is_complete = True
        self._num_steps += work.scales is not None
        return run.loss.clone()  # a copy, because the caller sums it over ranks in place and may do so again

    def _begin(self, work: Work, schedule: Schedule) -> StepRun:
        """Return the step to run: a new one, or the one in which a rank was lost, with the actions that are left."""
        assert self._transport is not None
        number = -1 if self.sections is None else self.sections.number
        arrived = self._arrived[len(work.batches), work.scales is not None]
        cut = self._interrupted
        if cut is not None and cut.number == number and work.scales is not None:
            schedule, arrived = cut.rest_of(self._make_schedule(len(work.batches), True)), {}
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
        """Send this stage's gradients to the rank that shadows it, and receive those of the stage shadowed here.

        Both ranks then make the same update.
        """
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
        """Return what this rank has done of the current section's training step: its actions, and whether gradients
        have been exchanged with shadows. Ranks compare this when one of them is lost. An evaluation or a vote, which is
        run again from its beginning, has no progress.
        """
        run = self._under_way
        if run is None or self.sections is None or run.number != self.sections.number or run.work.scales is None:
            return [], False
        return sorted(run.done, key=str), run.has_gradients

    def let_go(self) -> None:
        """Drop the objects that hold connections to other ranks, so that these connections close."""
        self._transport = self._refresh = None
        if self._under_way is not None:
            self._under_way.transport = None

    def take_over(self, lost: int, number: int, done: Collection[Action], has_gradients: bool) -> None:
        """Continue without the rank `lost`; on the rank before it, the shadow becomes a stage of its own.

        `number` is the section that was interrupted, and `done` what the other ranks have done of its training step.
        `has_gradients` says whether the shadow of the lost stage has got the gradients of that step.
        """
        self._interrupted, self._lost = _InterruptedStep(lost, number, frozenset(done), has_gradients), lost
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
        """Return the route of each batch: receives are posted before a forward, so the shapes must be known before."""
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
    """The step in which a rank was lost; see `Pipeline.take_over`."""

    lost: int
    number: int
    done: frozenset[Action]
    has_gradients: bool

    def rest_of(self, schedule: Schedule) -> Schedule:
        return take_over(schedule, self.lost, kept_actions(schedule, self.lost, self.done, self.has_gradients))


_NUM_STREAMS = 32  # torch takes streams of groups from a pool in turn; groups with one stream share an order
MAX_CHANNELS = 24  # per rank; the other streams are for the other axes


def check_queues(schedule: Schedule, environ: Mapping[str, str]) -> None:
    """Raise a PlanError if the streams of a rank's channels could block each other on this machine's GPUs."""
    for rank in range(schedule.num_ranks):
        count = sum(rank in channel[:2] for channel in schedule.channels)
        if count > MAX_CHANNELS:
            raise PlanError(
                f"pipe rank {rank} has {count} channels to other ranks, each with a CUDA stream; torch has "
                f"{_NUM_STREAMS} streams for all groups of a rank, so use at most {MAX_CHANNELS} channels: fewer ranks "
                f"of pipe, or other stages (pipe.split), so that fewer stages exchange tensors"
            )
    if environ.get(QUEUES_VARIABLE) != "1":
        return
    reason = None
    try:
        check_nccl_order(schedule, one_queue=True)
    except PlanError as error:
        reason = str(error)
    if schedule.name == "message":
        reason = "pipe.schedule = 'message' posts receives in no fixed order"
    if reason is not None:
        raise PlanError(
            f"{QUEUES_VARIABLE}=1 makes a GPU start all operations in one order, in which this pipeline can wait for "
            f"ever: {reason}; export {QUEUES_VARIABLE}={MOST_QUEUES}"
        )
