"""What a stage frees early: peaks of real steps, and of steps that free late, are those predicted for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import weft.pipeline.build
import weft.pipeline.cost
from weft.inspection.live_bytes import LiveTensors
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import token_loss
from weft.parallel.apply import cost, parallelize, stage
from weft.parallel.model_state import state_tensors
from weft.pipeline.stage import StagePass, StageRunner
from weft.pipeline.step_run import StepRun
from weft.plan import Pipe, Plan, split_batch
from weft.profiling import profile
from weft.schedule.actions import Action
from weft.schedule.activation_lifetimes import StageBytes
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

ROWS, WIDTH, INNER, CLASSES, COUNT, RANKS = 256, 32, 64, 8, 12, 3
MESSAGE_BYTES = ROWS * WIDTH * 4
Patch = pytest.MonkeyPatch


class Block(nn.Module):
    """Operations save the results of both tanh, not the block's input and not its result."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.leave(self.enter(torch.tanh(value)).tanh_())
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2 * RANKS)), nn.Linear(WIDTH, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        logits: Tensor = self.head(value)
        return logits


def micro_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def plan_of(schedule: str) -> Plan:
    split = tuple(f"blocks.{2 * rank}" for rank in range(1, RANKS))
    return Plan(pipe=Pipe(RANKS, schedule, split=split), micro_batch=ROWS)  # type: ignore[arg-type]


def measured_bytes(plan: Plan) -> list[int]:
    """The most that each rank held in its second step beside its state."""

    def rank(index: int) -> int:
        mesh, batches = Mesh(plan), [micro_batch(seed) for seed in range(COUNT)]
        model = parallelize(Blocks(), plan, mesh, example=lambda: micro_batch(0)[:1])
        optimizer = SGD(model.parameters(), lr=0.1)
        train_step(model, optimizer, batches, mesh)
        held = [tensor for tensors in state_tensors(model, optimizer).values() for tensor in tensors]
        with LiveTensors(ignored=held) as live:
            train_step(model, optimizer, batches, mesh)
        peak: int = live.peak_bytes
        return peak

    found: list[int] = run_local(rank, plan.num_ranks)
    return found


def predicted_bytes(plan: Plan) -> list[int]:
    """What the law says of the same bytes."""
    inputs, labels = micro_batch(0)
    found = profile(Blocks(), lambda: (inputs,), lambda logits: token_loss(logits, labels))
    staging, split = stage(found, plan), split_batch(plan, COUNT * ROWS, 1)
    at = [{**dict.fromkeys(plan.degrees, 0), "pipe": rank} for rank in range(RANKS)]
    costs = [cost(found, plan, split, one, staging) for one in at]
    return [one.memory_bytes - sum(one.state_bytes.values()) for one in costs]


def await_nothing(patch: Patch) -> None:
    """Ranks hold what they have sent until a message back confirms it."""
    patch.setattr(weft.pipeline.build, "with_awaited_sends", lambda schedule: schedule)


def keep_inputs(patch: Patch) -> None:
    """Stages hold what they received until their backward; the law counts it as saved."""
    taken, counted = StageRunner._taken, weft.pipeline.cost._stage_bytes

    def keep(self: StageRunner, number: int, now: StagePass) -> Tensor:
        now.kept[number] = taken(self, number, now)
        return now.kept[number]

    def count(own: Any, part: Any, plan: Plan) -> StageBytes:
        found = counted(own, part, plan)
        is_first = part.blocks[0].name == "blocks.0"
        return found if is_first else found._replace(saved_bytes=found.saved_bytes + MESSAGE_BYTES)

    patch.setattr(StageRunner, "_taken", keep)
    patch.setattr(weft.pipeline.cost, "_stage_bytes", count)


def keep_gradients(patch: Patch) -> None:
    """Stages hold the gradient that they received during all of their backward; the law counts it beside."""
    backward, counted = StepRun._roots, weft.pipeline.cost._stage_bytes

    def keep(self: StepRun, action: Action, done: StagePass) -> list[Tensor]:
        roots = backward(self, action, done)
        done.kept |= {-1 - number: gradient for number, gradient in done.arrived.items()}
        return roots

    def count(own: Any, part: Any, plan: Plan) -> StageBytes:
        found = counted(own, part, plan)
        is_last = part.blocks[-1].name == f"blocks.{2 * RANKS - 1}"
        return found if is_last else found._replace(peak_bytes=found.peak_bytes + MESSAGE_BYTES)

    patch.setattr(StepRun, "_roots", keep)
    patch.setattr(weft.pipeline.cost, "_stage_bytes", count)


class Late(NamedTuple):
    """A way to free late, where it shows. `slack`: messages that the law may be short of, as it counts no temporary
    tensors of a forward.
    """

    schedule: str
    patch: Callable[[Patch], None]
    slack: float = 0.01


LATE = {
    "inputs": Late("gpipe", keep_inputs),
    "gradients": Late("1f1b", keep_gradients),
    "results": Late("gpipe", await_nothing, 1.01),
}


@cache
def early_bytes(schedule: str) -> tuple[list[int], list[int]]:
    """Measured and predicted, as the runtime is."""
    return measured_bytes(plan_of(schedule)), predicted_bytes(plan_of(schedule))


@pytest.mark.parametrize("name", LATE)
@pytest.mark.sampled(3)
def test_what_is_freed_early_saves_what_is_predicted(name: str, monkeypatch: Patch) -> None:
    schedule, patch, slack = LATE[name]
    measured, predicted = early_bytes(schedule)
    assert measured == pytest.approx(predicted, abs=0.01 * MESSAGE_BYTES)
    patch(monkeypatch)
    late, expected = measured_bytes(plan_of(schedule)), predicted_bytes(plan_of(schedule))
    assert late == pytest.approx(expected, abs=slack * MESSAGE_BYTES)
    saved = [after - before for after, before in zip(late, measured, strict=True)]
    assert max(saved) > 0.9 * MESSAGE_BYTES
    assert late != pytest.approx(predicted, abs=max(slack, 0.9) * MESSAGE_BYTES)  # the law can tell the two apart
