"""The pipeline at work: a rank's stages, and the lists of actions that they run.

One runtime for all schedules. It knows nothing of their order: `run.py` goes through this rank's list. Gradients add up
in each stage over its micro-batches and are reduced over `shard` and `data` behind the stage's last backward; at the
end of the step the copies of a stage (mirrored replicas), and the stages that share a tied parameter, add up theirs, so
that all copies take the same update.

With shadows (`shadow.py`), a step that was cut short by the loss of a rank goes on where it was, by the lists of
`take_over`.
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
from weft.mesh import Mesh
from weft.pipeline.nccl_queues import check_queues
from weft.pipeline.partition import Route
from weft.pipeline.sections import Sections
from weft.pipeline.shadow_gradients import Refresh
from weft.pipeline.shared_parameters import Copies
from weft.pipeline.step_run import Run, Stage, Work
from weft.pipeline.transport import Key, Transport
from weft.schedule.actions import Action, Schedule
from weft.schedule.activation_lifetimes import confirmed_sends
from weft.schedule.shadow import kept_actions, take_over
from weft.schedule.simulate import Span

__all__ = ["Pipeline", "Stage", "Work"]


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
        check_evaluation: Callable[[], None],
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.model for stage in stages)
        self.parts = {(stage.index, stage.replica): stage for stage in stages}
        self.copies, self.mesh, self.parameter_names = copies, mesh, tuple(parameter_names)
        self._make_schedule = make_schedule
        self.check_evaluation = check_evaluation  # raises if the stages cannot run the forward of evaluation
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
        self._under_way: Run | None = None  # the training step, until the next begins
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
            if uses_nccl(self.mesh["pipe"], self.mesh.device):
                check_queues(made, os.environ)
            self._schedules[key] = made if self._lost is None else take_over(made, self._lost)
            self._arrived[key] = confirmed_sends(self._schedules[key], self.mesh["pipe"].index)
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
                if stage not in run.reduced:
                    stage.units.reduce_all()
            self.copies.combine()
            self._exchange_gradients(run)
            was_cut = self._cut is not None and self._cut.number == run.number
            self.began, self.spans = run.began, () if was_cut else tuple(run.spans)
        for stage in self.parts.values():
            stage.units.end_step()
        run.is_complete = True
        self._num_steps += work.scale is not None
        return run.loss.clone()  # what is summed over ranks may have to be summed again

    def _begin(self, work: Work, schedule: Schedule) -> Run:
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
        run = Run(self.parts, self._routes_of(work), work, schedule, self._transport, self.mesh, self.timed, arrived)
        run.number, run.keeps = number, self.is_shadowed and work.scale is not None
        self._under_way = run
        if self._refresh is not None and self.shadow is not None and work.scale is not None:
            self._refresh.expect(self.shadow.units, self.mesh["pipe"].index + 1)
        return run

    def _exchange_gradients(self, run: Run) -> None:
        """Shadows take the gradients of what they shadow, for the same update."""
        if self._refresh is None:
            return
        here = self.mesh["pipe"].index
        if here > 0:
            self._refresh.give(self.own[0].units, here - 1, self._num_steps + 1)
        self._refresh.finish(None if self.shadow is None else self.shadow.units, self._num_steps + 1)
        run.has_gradients, self._shadow_steps = True, self._num_steps + 1
        if self.shadow is not None:
            self.shadow.live.clear()  # no backward will come

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
        rank's stage has its gradients, or not; see `shadow.kept_actions`.
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
                shadow.replica = 0
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
        return take_over(schedule, self.lost, kept_actions(schedule, self.lost, self.done, self.has_gradients))
