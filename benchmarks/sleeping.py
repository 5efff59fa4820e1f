"""Schedules with kernels that sleep: what a step takes and how long ranks wait, measured against the simulation.

Blocks sleep fixed times in forward and backward, so more ranks than cores run as if each had a device of its own. Each
stage is one block. The same times go into `simulate`. A zero-bubble schedule sleeps for weight gradients where it
computes them; any other sleeps for them in backward.

`slowed` has one stage that sleeps longer at random (the same draws for all): a message-driven order, with as many
micro-batches in flight as 1f1b's first rank and with twice as many, against 1f1b, by turns in one run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import SGD

from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.pipeline.deferred_weight_grads import DeferredWeightGrads
from weft.pipeline.runtime import Pipeline
from weft.plan import Pipe, Plan
from weft.schedule import Schedule, simulate
from weft.step.objective import Objective
from weft.step.train_step import train_step

RANKS, MICRO_BATCHES, WIDTH = 4, 8, 8
STEPS = 5
CONVENTIONS = {
    "step_seconds": "median over steps of the slowest rank: forwards, backwards, norm and update",
    "bubble_share": "the share of all ranks' time in which no action runs",
    "slowed": "in_flight is the most micro-batches that any rank held between forward and backward",
}
OBJECTIVE = Objective(count=lambda batch: torch.tensor(len(batch[0])), total=lambda model, batch: model(batch[0]).sum())


@dataclass(frozen=True)
class Seconds:
    """How long a stage sleeps: forward, gradients of its input, gradients of its weights."""

    forward: float
    backward: float
    weight: float

    def __truediv__(self, parts: int) -> Seconds:
        return Seconds(self.forward / parts, self.backward / parts, self.weight / parts)


SECONDS = Seconds(0.06, 0.08, 0.04)


class Sleep(Function):
    """The identity, slowly."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Block(nn.Module):
    """A linear that sleeps. `late` draws what each forward and backward sleeps beyond its time."""

    def __init__(self, seconds: Seconds, splits_weights: bool, late: random.Random | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.forward_seconds = seconds.forward
        self.backward_seconds = seconds.backward + (0 if splits_weights else seconds.weight)
        self.late = late

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = Sleep.apply(
            self.linear(hidden), self._lengthen(self.forward_seconds), self._lengthen(self.backward_seconds)
        )
        return out

    def _lengthen(self, seconds: float) -> float:
        """Three times as long, each third time."""
        return seconds * (3 if self.late is not None and self.late.random() < 1 / 3 else 1)


class Chain(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Sleeper:
    """One rank of a pipeline of sleeping blocks."""

    def __init__(self, pipe: Pipe, slow_stage: int | None = None) -> None:
        self.plan = Plan(pipe=pipe)
        chunks = pipe.chunks or 1
        self.seconds = SECONDS / chunks
        late = {slow_stage: random.Random(0)}
        splits_weights = pipe.schedule == "zero-bubble"
        torch.manual_seed(0)
        model = Chain([Block(self.seconds, splits_weights, late.get(n)) for n in range(pipe.degree * chunks)])
        self.mesh = Mesh(self.plan)
        built = parallelize(model, self.plan, self.mesh, example=lambda: (torch.zeros(1, WIDTH),))
        assert isinstance(built, Pipeline)
        self.model = built
        self.optimizer = SGD([piece for _, piece in named_pieces(built)], lr=0.0)
        self.batches = [(row,) for row in torch.ones(MICRO_BATCHES, WIDTH).split(1)]

    @property
    def schedule(self) -> Schedule:
        return self.model.schedule(MICRO_BATCHES)

    def step(self) -> tuple[float, float]:
        """Seconds of a step, and of them those in which actions ran."""
        dist.barrier()
        start = time.perf_counter()
        with _late_weights_sleep(self.seconds.weight):
            train_step(self.model, self.optimizer, self.batches, self.mesh, OBJECTIVE)
        seconds = time.perf_counter() - start
        spans = [span for span in self.model.spans if span.action != "wait"]
        return seconds, sum(span.end_seconds - span.start_seconds for span in spans)


@contextmanager
def _late_weights_sleep(seconds: float) -> Iterator[None]:
    """Weight gradients that were put off take time too."""
    finish = DeferredWeightGrads._finish

    def slow(*args: Any) -> None:
        time.sleep(seconds)
        finish(*args)

    with patch.object(DeferredWeightGrads, "_finish", slow):
        yield


# --- against the simulation


def pipes() -> Iterator[Pipe]:
    """The schedules that are simulated."""
    for name in ("gpipe", "1f1b", "zero-bubble", "gems", "bidirectional", "message"):
        yield Pipe(RANKS, name)
    yield Pipe(RANKS, "interleaved", chunks=2)


def measure_times(pipe: Pipe) -> dict[str, Any]:
    """A schedule's step and waits, measured over simulated."""

    def rank(index: int) -> dict[str, Any]:
        sleeper = Sleeper(pipe)
        sleeper.step()
        timeline = simulate(sleeper.schedule, *vars(sleeper.seconds).values())
        steps = [sleeper.step() for _ in range(STEPS)]
        dist.barrier()
        return {"steps": steps, "simulated": [timeline.makespan_seconds, timeline.bubble_share]}

    answers = run_local(rank, pipe.degree, timeout_seconds=300.0)
    found = []
    for step in zip(*(answer["steps"] for answer in answers), strict=True):
        seconds = max(taken for taken, _ in step)
        found.append((seconds, 1 - sum(busy for _, busy in step) / (seconds * pipe.degree)))
    makespan, bubble = answers[0]["simulated"]
    seconds, waits = (statistics.median(column) for column in zip(*found, strict=True))
    return {
        "schedule": pipe.schedule,
        "step_ratio": seconds / makespan,
        "step_seconds": {"measured": seconds, "simulated": makespan},
        "bubble_share": {"measured": waits, "simulated": bubble},
    }


# --- one slow stage


def measure_slowed(slow_stage: int) -> dict[str, Any]:
    """Message-driven orders over 1f1b while one stage is late at random."""
    more = Pipe(RANKS, "message", in_flight=2 * RANKS)
    sides = {"message": Pipe(RANKS, "message"), f"message ({more.in_flight} in flight)": more, "1f1b": Pipe(RANKS)}

    def rank(index: int) -> dict[str, Any]:
        sleepers = {name: Sleeper(pipe, slow_stage) for name, pipe in sides.items()}
        held = {name: _watch_held(sleeper.model) for name, sleeper in sleepers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(1 + STEPS):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                taken, _ = sleepers[name].step()
                if number:
                    seconds[name].append(taken)
        dist.barrier()
        return {"seconds": seconds, "held": {name: most() for name, most in held.items()}}

    answers = run_local(rank, RANKS, timeout_seconds=300.0)
    slowest = {
        name: [max(step) for step in zip(*(answer["seconds"][name] for answer in answers), strict=True)]
        for name in sides
    }
    return {
        "slow_stage": slow_stage,
        "step_ratio": {
            name: statistics.median(a / b for a, b in zip(steps, slowest["1f1b"], strict=True))
            for name, steps in slowest.items()
        },
        "step_seconds": {name: statistics.median(steps) for name, steps in slowest.items()},
        "in_flight": {name: [answer["held"][name] for answer in answers] for name in sides},
    }


def _watch_held(model: Pipeline) -> Callable[[], int]:
    """The most micro-batches that a rank's only stage has held, asked when all is done."""
    (stage,) = model.parts.values()

    class Watched(dict[int, Any]):
        most = 0

        def __setitem__(self, key: int, value: Any) -> None:
            super().__setitem__(key, value)
            self.most = max(self.most, len(self))

    stage.live = watched = Watched()
    return lambda: watched.most


def results() -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each result with its section and a line for people."""
    for pipe in pipes():
        one = measure_times(pipe)
        bubble = one["bubble_share"]
        waits = f"waits {bubble['measured']:.3f} (simulated {bubble['simulated']:.3f})"
        yield "simulation", one, f"{pipe.schedule:24}step over simulated {one['step_ratio']:6.3f}  {waits}"
    for stage in range(2):
        one = measure_slowed(stage)
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in one["step_ratio"].items())
        yield "slowed", one, f"stage {stage} late at random: step over 1f1b's: {ratios}"
