"""The training loop. `train` reads from top to bottom: build, resume, step, evaluate, save.

It runs on every rank; only rank 0 reports. Everything it decides together (to stop, to save) is a collective decision
or a function of the step, so ranks never part.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from weft.checkpoint.model_state import make_optimizer, pieces_to_save
from weft.compile.blocks import compile_blocks, wants_compile
from weft.health.rank_status import GOING_BACK, RESERVING, SAVING, Status
from weft.inspection.rng import keyed, seed_draws
from weft.launch.environment import Place, check_world
from weft.launch.folder_lock import locked
from weft.mesh import Mesh
from weft.models import LanguageConfig
from weft.parallel.apply import parallelize
from weft.pipeline.runtime import Pipeline
from weft.pipeline.sections import Sections
from weft.planner.predict import predict, run_cluster
from weft.resilience.bad_numbers import Bad, Guard, Policy
from weft.resilience.corruption import checks_of
from weft.resilience.faults import Faults
from weft.resilience.takeover import take_over_losses
from weft.run_file import Run
from weft.schema import to_table
from weft.sharding.host_memory import check_memory_fits
from weft.step.cuda_graph import Graph, own_stream
from weft.step.documents import has_separate_documents, separate_documents
from weft.step.examples import example_inputs, example_loss
from weft.step.layer_drop import Gates, drop_layers
from weft.step.objective import Batch
from weft.step.task import task_of
from weft.step.train_step import evaluate, train_step
from weft.train.agreement import agree_on_run
from weft.train.batches import TrainingData, prepare_data
from weft.train.learning_rate import learning_rate
from weft.train.metrics import Clock, MetricsLog, StepMetrics, memory_bytes
from weft.train.prefetch import Batches, Late
from weft.train.resume import Trained, go_back, resume
from weft.train.saving import finish_on_error, save_or_tell
from weft.train.setup import (
    attention,
    build_model,
    check_evaluation,
    first_values,
    lookout,
    make_clock,
    make_saver,
    memory_copies,
    set_determinism,
    show_status,
    world,
)
from weft.train.stop import Stop
from weft.train.timeline import draw_step, refuse_timeline

MAX_NAMED = 100  # of what is left out


class Reporter(Protocol):
    """What a run tells a person; only rank 0 calls it."""

    def step(self, metrics: StepMetrics) -> None:
        """After a step that is logged."""

    def say(self, message: str) -> None:
        """A line about what happens."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    loss: float | None = None
    evaluation_loss: float | None = None


def train(run: Run, place: Place, reporter: Reporter, step_seconds: float | None = None) -> Outcome:
    """Train a run to its end, or until asked to stop; every rank calls it. `step_seconds` is what is predicted."""
    check_world(place, run.plan.num_ranks, run.plan.degrees)
    if run.train.timeline is not None:
        refuse_timeline(run.plan, Path(run.train.timeline))
    if run.plan.memory.activations or run.plan.memory.weights:  # what is there besides follows from the run
        hosted = predict(run, run_cluster(run, place.num_hosts)).cost.host_bytes
        check_memory_fits(sum(hosted.values()), 0, torch.device("cpu"), place.num_local_ranks)
    objective = task_of(run).objective
    data = prepare_data(run)  # what is wrong with it is told before ranks wait for each other
    status = Status(os.environ, place.rank)
    lock = locked(run.folder) if place.rank == 0 else nullcontext()
    with lock, world(run, place) as mesh, attention(run, mesh) as kernel, ExitStack() as inside:
        run_id = agree_on_run(run, data, mesh)
        is_recorded = inside.enter_context(own_stream(run, mesh.device))
        set_determinism(run)
        model = parallelize(
            build_model(run), run.plan, mesh, first_values(run), partial(example_inputs, run), example_loss(run)
        )
        check_evaluation(model)
        if has_separate_documents(run):
            separate_documents(model, run.tokenizer.end, mesh["context"])
        say = reporter.say if mesh.is_first else _say_nothing
        if wants_compile(run, mesh.device):
            say("the first step compiles the model's blocks" + (f"; attention by {kernel}" if kernel else ""))
            compile_blocks(model, say)
        graph = Graph(model, say) if is_recorded else None
        data = data.on_tile(mesh)
        optimizer = make_optimizer(model, run.train)
        drop = run.train.layer_drop
        gates = None if drop is None else drop_layers(model, drop, run.train.seed, run.plan, optimizer)
        saver = make_saver(run, mesh)
        memory = memory_copies(run, run_id, mesh, place, say)
        show_status(status, model, mesh, place)
        inside.enter_context(lookout(run, place, status, step_seconds))
        inside.push(finish_on_error(saver, status))
        trained = Trained(run, model, optimizer, data, mesh, run_id)
        guard, policy = Guard(run.numbers, mesh), Policy(run.numbers)
        step, saved = resume(trained, memory, say)
        policy.load(saved.get("numbers", {}), guard)
        state = partial(_state, run, run_id, data, policy, guard)
        if run.numbers.on_bad in ("repeat", "rollback") and not saved:  # there must be something to go back to
            saver.save(step, pieces_to_save(model, optimizer, mesh), state(step), asynchronous=False)
        log = MetricsLog(run, step) if mesh.is_first else None
        if log is not None and data.skipped:
            _report_skipped(data, log, step, reporter)
        timeout = timedelta(seconds=run.train.timeout_seconds)
        sections: Sections | None = None
        if isinstance(model, Pipeline):
            sections = take_over_losses(model, mesh, saver, place, lambda: step, timeout)
        stop, clock = Stop(mesh, sections), make_clock(run, mesh, step)
        loss: float | None = None
        late: Late | None = None
        evaluation: dict[str, float] = {}
        faults = Faults.of(os.environ, place.rank)
        batches = Batches(partial(_batches, run, data, policy, mesh), run.train.steps, mesh.device)
        report = partial(_report, run, clock, mesh, log, reporter, policy)
        while step < run.train.steps and not stop.agreed:
            status.step_begins(step)
            if faults is not None:
                faults.strike(model)
            rate = _set_learning_rate(run, optimizer, step)
            status.phase("loading data")
            given = batches.take(step)
            before = partial(_before_micro_batch, run, step, mesh, gates)
            if isinstance(model, Pipeline):
                model.timed = run.train.timeline is not None and step == run.train.steps - 1
            status.phase("forward and backward")
            checks = checks_of(run, step, guard, model, optimizer, mesh)
            result = train_step(model, optimizer, given, mesh, objective, run.train.clip, before, checks, graph)
            step += 1
            batches.prepare(step)
            status.step_ends()
            stop.ask()
            done = [] if late is None else [late]  # the device has the next step to do
            late = Late(step, rate, result, clock.moment(), given)
            clock.done(step, late.moment)
            if _pauses(run, step) or stop.agreed or mesh.device.type == "cpu":
                done, late = [*done, late], None
            bad: Bad | None = None
            while done and (bad is None or bad.follows == "skip"):
                loss, bad = report(done.pop(0))
            if bad is not None and bad.follows != "skip":
                status.phase(GOING_BACK)
                step, saved = go_back(trained, saver, memory, say, far=bad.follows == "rollback")
                policy.went_back(bad, step, saved.get("numbers", {}), guard)
                _report_return(bad, step, policy, log, reporter)
                late = None
                clock.skip(step)
                continue
            if _due(step, run.train.evaluate_every, run.train.steps):
                status.phase("evaluating")
                held_out = data.evaluation_batches(run, mesh["batch"], mesh.device)
                if held_out:
                    means = evaluate(model, held_out, mesh, objective).flatten().tolist()
                    evaluation = dict(zip(objective.measures, means, strict=True))
                if log is not None and evaluation:
                    log.write("evaluation", step, evaluation)
                    reporter.say(f"step {step}: held-out " + ", ".join(f"{k} {v:.4f}" for k, v in evaluation.items()))
                clock.skip(step)
            if memory is not None and step % (run.checkpoint.memory_every or 1) == 0:
                status.phase("copying to memory" if memory.has_saved else RESERVING)  # the former not for ever
                memory.save(step, pieces_to_save(model, optimizer, mesh), state(step))
            if _due(step, run.checkpoint.every, run.train.steps) or stop.agreed:
                status.phase(SAVING)
                pieces = pieces_to_save(model, optimizer, mesh)
                policy.saved()
                is_last = step == run.train.steps or stop.agreed
                save_or_tell(saver, step, pieces, state(step), _is_asynchronous(run), is_last)
                clock.skip(step)
        status.phase(SAVING)
        saver.wait(published=True)
        if memory is not None:
            memory.close()
        _draw_step(run, model, mesh, reporter)
        stop.close()  # last: a signal must not end a rank that still writes
        if log is not None:
            log.close()
        return Outcome(step, step >= run.train.steps, loss, evaluation.get("loss"))


# --- each step


def _say_nothing(message: str) -> None:
    """What ranks behind the first say."""


def _report_skipped(data: TrainingData, log: MetricsLog, step: int, reporter: Reporter) -> None:
    """Say what is left out of the data, once and with a name."""
    name, reason = next(iter(data.skipped.items()))
    reporter.say(f"{len(data.skipped)} of the images of {data.description} are left out, {name} first: {reason}")
    log.write("data", step, {"skipped": len(data.skipped), "names": list(data.skipped)[:MAX_NAMED]})


def _set_learning_rate(run: Run, optimizer: Optimizer, step: int) -> float:
    config = run.train
    rate = learning_rate(
        step,
        peak=config.learning_rate,
        schedule=config.schedule,
        steps=config.steps,
        warmup=config.warmup_steps,
        decay=config.decay_steps,
        final=config.final_learning_rate,
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _batches(run: Run, data: TrainingData, policy: Policy, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's micro-batches of a step, of the batches that are not left out."""
    return data.batches(run, policy.batch_of(step), mesh["batch"], mesh.device)


def _before_micro_batch(run: Run, step: int, mesh: Mesh, gates: Gates | None, micro_batch: int) -> None:
    """Random draws are keyed by (seed, step, micro-batch, batch rank): a resumed run repeats them. Where ranks of one
    batch hold different elements, `inspection/rng.py` makes them differ.
    """
    if gates is not None:
        gates.begin(step, micro_batch)
    seed_draws(keyed(run.train.seed, step, micro_batch, mesh["batch"].index), mesh.device)


def _report(
    run: Run, clock: Clock, mesh: Mesh, log: MetricsLog | None, reporter: Reporter, policy: Policy, done: Late
) -> tuple[float, Bad | None]:
    """Log a step's numbers where that is due and this rank's task; the loss, and what was bad about the step."""
    status = mesh.ledger.status
    assert status is not None, "the loop shows where it is"
    status.wait_begins(f"the device's work of step {done.step}")
    loss, norm, verdict = done.read()
    status.wait_ends()
    if log is not None and _due(done.step, run.train.log_every, run.train.steps):
        metrics = _measure(run, clock, mesh, done, loss, norm)
        log.step(metrics)
        reporter.step(metrics)
    num_classes = run.model.vocab_size if isinstance(run.model, LanguageConfig) else run.model.num_classes
    bad = policy.after(done.step, verdict, loss, norm, partial(done.wrong_labels, num_classes))
    if bad is not None and log is not None and bad.follows == "skip":
        log.write("numbers", done.step, {"bad": bad.step, "what": str(bad), "num_bad": policy.num_bad})
        reporter.say(f"{bad}: its update was skipped on all ranks (bad steps so far: {policy.num_bad})")
    return loss, bad


def _report_return(bad: Bad, step: int, policy: Policy, log: MetricsLog | None, reporter: Reporter) -> None:
    """Say that the run went back to a step, on account of a bad one."""
    if log is not None:
        left_out = [list(interval) for interval in policy.left_out]
        values = {"bad": bad.step, "what": str(bad), "num_bad": policy.num_bad, "left_out": left_out}
        log.write("numbers", step, values)
        words = ", ".join(f"{first} to {stop - 1}" for first, stop in policy.left_out)
        what_now = "to do it again" if bad.follows == "repeat" else f"batches left out from now on: {words}"
        reporter.say(f"{bad}: back to step {step}; {what_now}")


def _measure(run: Run, clock: Clock, mesh: Mesh, done: Late, loss: float, grad_norm: float) -> StepMetrics:
    rates = clock.read(done.step, done.moment)
    return StepMetrics(
        step=done.step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=done.rate,
        units_per_second=rates.units_per_second,
        units_per_second_per_device=rates.units_per_second_per_device,
        tflops_per_second_per_device=rates.tflops_per_second_per_device,
        mfu=rates.mfu,
        memory_bytes=memory_bytes(mesh.device),
        seconds_left=(run.train.steps - done.step) * rates.step_seconds,
        unit=task_of(run).unit,
        start_seconds=rates.step_seconds if rates.is_start else None,
    )


def _pauses(run: Run, step: int) -> bool:
    """Whether something else than training follows a step."""
    every = (run.train.evaluate_every, run.checkpoint.every, run.checkpoint.memory_every)
    return any(_due(step, each, run.train.steps) for each in every)


def _due(step: int, every: int | None, last: int) -> bool:
    return step == last or (every is not None and step % every == 0)


def _draw_step(run: Run, model: nn.Module, mesh: Mesh, reporter: Reporter) -> None:
    """The timeline of the last step, if it is asked for and was taken down."""
    if not isinstance(model, Pipeline) or not model.timed or not mesh.is_first_of_stage:
        return
    if not model.spans:  # the step lost a rank
        return
    assert run.train.timeline is not None
    if draw_step(model, mesh, run.split.accumulation, Path(run.train.timeline)):
        reporter.say(f"drew the last step to {run.train.timeline}")


def _state(run: Run, run_id: str, data: TrainingData, policy: Policy, guard: Guard, step: int) -> dict[str, Any]:
    """What a checkpoint says beside its tensors."""
    return {
        "run_id": run_id,
        "data": {"fingerprint": data.fingerprint, "samples": step * run.split.batch},
        "numbers": policy.to_state(guard),
        "seed": run.train.seed,
        "model": to_table(run.model),
        "plan": run.plan.to_toml(),
        "run": run.to_toml(),
    }


def _is_asynchronous(run: Run) -> bool:
    """State on the host is not copied there once more: it is written while training waits."""
    return run.checkpoint.asynchronous and not run.plan.memory.keeps_state_on_host
