"""The training loop. `train` reads from top to bottom: build, resume, step, judge, evaluate, save.

It runs on every rank; only rank 0 reports. Every decision (to stop, to save, to go back) is a collective or a function
of the step, so all ranks decide the same.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from weft.health.rank_status import Status
from weft.launch.environment import RankInfo
from weft.launch.folder_lock import locked
from weft.launch.role_ranks import TRAIN, JobRank, job_rank
from weft.resilience.bad_numbers import Bad, Guard, Policy
from weft.resilience.corruption import checks_of
from weft.resilience.takeover import take_over_losses
from weft.roles.links import end_roles
from weft.run_file import Run
from weft.step.cuda_graph import Graph, own_stream
from weft.step.task import task_of
from weft.step.train_step import train_step
from weft.train.agreement import agree_on_run
from weft.train.batches import TrainingData, prepare_data
from weft.train.checkpoints import Checkpoints
from weft.train.early_stopping import has_stopped_early
from weft.train.parts import Evaluation, make_parts
from weft.train.prefetch import make_batches
from weft.train.recording import CommunicationProfile
from weft.train.role_advice import RoleAdvice
from weft.train.role_links import RoleLinks, batch_queue, job_store, use_curvature_ranks
from weft.train.role_rank import serve_role
from weft.train.setup import attention, build_state, refuse_start, show_status, watched, world
from weft.train.step_results import Reporter, StepResults
from weft.train.stop import Stop
from weft.train.validation import make_evaluation


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    step: int
    finished: bool
    loss: float | None = None
    evaluation_loss: float | None = None


def train(run: Run, rank_info: RankInfo, reporter: Reporter, step_seconds: float | None = None) -> Outcome:
    """Trains a run to its end, or until it is asked to stop. Every rank calls it, also those of other roles.

    `step_seconds` is the predicted time of a step.
    """
    refuse_start(run, rank_info)
    data = prepare_data(run).with_contents(run.folder)  # bad data is reported before ranks wait for each other
    rank = job_rank(rank_info, run.roles.counts)
    if rank.role != TRAIN:
        serve_role(run, rank, data)
        return Outcome(0, finished=True)
    return _train(run, rank, data, reporter, step_seconds)


def _train(run: Run, rank: JobRank, data: TrainingData, reporter: Reporter, step_seconds: float | None) -> Outcome:
    """Trains as one of the training ranks."""
    rank_info, store = rank.training, job_store(run, rank)
    status = Status(os.environ, rank_info.rank)
    lock = locked(run.folder) if rank_info.rank == 0 else nullcontext()
    with (
        lock,
        world(run, rank_info, store) as mesh,
        attention(run, mesh) as kernel,
        own_stream(run, mesh.device) as is_recorded,
    ):
        run_id = agree_on_run(run, data, mesh)
        say = reporter.say if mesh.is_first else lambda message: None
        links = RoleLinks.connect(run, data, mesh, store, say)
        state = build_state(run, run_id, data, mesh, status, say, kernel)
        use_curvature_ranks(links, state, store)
        state.graph = Graph(state.model, say) if is_recorded else None
        show_status(status, state.model, mesh, rank_info)
        guard, policy = Guard(run.numbers, mesh), Policy(run.numbers)
        checkpoints = Checkpoints(state, rank_info, guard, policy)
        with watched(state, rank_info, checkpoints.saver, step_seconds):
            checkpoints.resume()
            results = StepResults(state, policy, reporter)  # on a GPU, losses and norms are read one step late
            evaluation = make_evaluation(state, results.log, links, store)
            batches = make_batches(state, policy, batch_queue(links, state))
            advice = RoleAdvice(state, batches, evaluation)
            parts = make_parts(state, evaluation, checkpoints, CommunicationProfile(state), results.log, advice)
            timeout = timedelta(seconds=run.train.timeout_seconds)
            sections = take_over_losses(state.model, mesh, checkpoints.saver, rank_info, lambda: state.step, timeout)
            stop = Stop(mesh, sections, evaluation.wants_stop, has_stopped_early(run, state.step, mesh))
            objective, model, optimizer = task_of(run).objective, state.model, state.optimizer
            while state.step < run.train.steps and not stop.agreed:
                status.step_begins(state.step)
                parts.before_step(state.step)
                status.phase("loading data")
                given = batches.take(state.step)
                status.phase("forward and backward")
                before = partial(parts.before_micro_batch, state.step)
                checks = checks_of(run, state.step, guard, model, optimizer, mesh)
                result = train_step(
                    model, optimizer, given, mesh, objective, run.train.clip, before, checks, state.graph
                )
                state.step += 1
                batches.prepare(state.step)
                status.step_ends()
                stop.ask()
                waits = parts.pauses_after(state.step) or stop.agreed
                bad = results.add(state.step, result, given, waits)
                if bad is not None:
                    _go_back(bad, checkpoints, results, evaluation, stop)
                elif parts.after_step(state.step, stop.agreed):
                    results.skip_time(state.step)
            parts.end()
            batches.close()
            stop.close()  # last, because a signal must not end a rank that is still writing
            results.close()
            evaluation.mark(state.step)
            if store is not None and mesh.is_first:
                end_roles(store)
        is_finished = stop.is_early or state.step >= run.train.steps
        return Outcome(state.step, is_finished, results.loss, evaluation.means.get("loss"))


def _go_back(bad: Bad, checkpoints: Checkpoints, results: StepResults, evaluation: Evaluation, stop: Stop) -> None:
    """Loads the state before a bad step. What followed from the steps since then does not count any more."""
    step = checkpoints.go_back(bad)
    results.went_back(bad, step)
    evaluation.went_back(step)
    stop.went_back()
