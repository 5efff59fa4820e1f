"""What tests of a pipeline's memory share: a chain whose stages save neither inputs nor results, peaks of real steps on
a CPU or a GPU, what is predicted for them, and ways to free late.
"""

from __future__ import annotations

from collections.abc import Callable
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
from weft.plan import Memory, Pipe, Plan, split_batch
from weft.profiling import profile
from weft.schedule.actions import Action
from weft.schedule.activation_lifetimes import StageBytes
from weft.step.train_step import train_step

CLASSES, COUNT, RANKS = 8, 12, 3
Patch = pytest.MonkeyPatch


class Size(NamedTuple):
    """Rows of a micro-batch, features of the chain, and features inside a block."""

    rows: int
    width: int
    inner: int

    @property
    def message_bytes(self) -> int:
        return self.rows * self.width * 4

    def micro_batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.rows, self.width, generator=generator)
        return inputs, torch.randint(CLASSES, (self.rows,), generator=generator)


SMALL, LARGE = Size(256, 32, 64), Size(8192, 512, 1024)  # for a CPU and for a GPU


class Block(nn.Module):
    """Operations save the results of both tanh, not the block's input and not its result.

    Linears have no bias: on a GPU, torch sums the gradient of a bias with a buffer of up to 64 MiB, in no relation to
    the pipeline's memory.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.enter = nn.Linear(size.width, size.inner, bias=False)
        self.leave = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.leave(self.enter(torch.tanh(value)).tanh_())
        return result


class Blocks(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(2 * RANKS))
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        logits: Tensor = self.head(value)
        return logits


def plan_of(schedule: str, first: int = 2, memory: Memory = Memory(), **options: Any) -> Plan:  # noqa: B008
    """Three stages; the first has `first` blocks."""
    split = () if "balance" in options else (f"blocks.{first}", "blocks.4")
    return Plan(pipe=Pipe(RANKS, schedule, split=split, **options), memory=memory)  # type: ignore[arg-type]


PLANS = {
    "gpipe": plan_of("gpipe"),
    "1f1b": plan_of("1f1b"),
    "three blocks first": plan_of("1f1b", 3),
    "by memory": plan_of("1f1b", balance="memory"),
    "two in flight": plan_of("1f1b", in_flight=2),
    "recompute in the first stage": plan_of("1f1b", memory=Memory("full", recompute_stages=1)),
}
# A plan, and one that needs less memory.
SMALLER = {
    "stages by memory": ("three blocks first", "by memory"),
    "a cap of micro-batches in flight": ("1f1b", "two in flight"),
    "recompute in the first stage": ("1f1b", "recompute in the first stage"),
}


def measured_bytes(plan: Plan, size: Size = SMALL, device: str = "cpu") -> list[int]:
    """The most that each rank held in its third step beside its state. The first goes through host memory on a GPU."""
    plan = _with_rows(plan, size)

    def rank(index: int) -> int:
        mesh = Mesh(plan, device)
        batches = [tuple(one.to(mesh.device) for one in size.micro_batch(seed)) for seed in range(COUNT)]
        model = parallelize(Blocks(size), plan, mesh, example=lambda: size.micro_batch(0)[:1])
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train_step(model, optimizer, batches, mesh)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            train_step(model, optimizer, batches, mesh)
            return torch.cuda.max_memory_allocated() - before
        held = [tensor for tensors in state_tensors(model, optimizer).values() for tensor in tensors]
        with LiveTensors(ignored=held) as live:
            train_step(model, optimizer, batches, mesh)
        peak: int = live.peak_bytes
        return peak

    found: list[int] = run_local(rank, plan.num_ranks, device=device)  # type: ignore[arg-type]
    return found


def predicted_bytes(plan: Plan, size: Size = SMALL) -> list[int]:
    """What the law says of the same bytes."""
    plan, (inputs, labels) = _with_rows(plan, size), size.micro_batch(0)
    found = profile(Blocks(size), lambda: (inputs,), lambda logits: token_loss(logits, labels))
    staging, split = stage(found, plan), split_batch(plan, COUNT * size.rows, 1)
    at = [{**dict.fromkeys(plan.degrees, 0), "pipe": rank} for rank in range(RANKS)]
    costs = [cost(found, plan, split, one, staging) for one in at]
    return [one.memory_bytes - sum(one.state_bytes.values()) for one in costs]


def _with_rows(plan: Plan, size: Size) -> Plan:
    return Plan(pipe=plan.pipe, memory=plan.memory, micro_batch=size.rows)


# --- ways to free late


def await_nothing(patch: Patch, size: Size) -> None:
    """Ranks hold what they have sent until a message back confirms it."""
    patch.setattr(weft.pipeline.build, "with_awaited_sends", lambda schedule: schedule)


def keep_inputs(patch: Patch, size: Size) -> None:
    """Stages hold what they received until their backward; the law counts it as saved."""
    taken, counted = StageRunner._taken, weft.pipeline.cost._stage_bytes

    def keep(self: StageRunner, number: int, now: StagePass) -> Tensor:
        now.kept[number] = taken(self, number, now)
        return now.kept[number]

    def count(own: Any, part: Any, plan: Plan) -> StageBytes:
        found = counted(own, part, plan)
        is_first = part.blocks[0].name == "blocks.0"
        return found if is_first else found._replace(saved_bytes=found.saved_bytes + size.message_bytes)

    patch.setattr(StageRunner, "_taken", keep)
    patch.setattr(weft.pipeline.cost, "_stage_bytes", count)


def keep_gradients(patch: Patch, size: Size) -> None:
    """Stages hold the gradient that they received during all of their backward; the law counts it beside."""
    backward, counted = StepRun._roots, weft.pipeline.cost._stage_bytes

    def keep(self: StepRun, action: Action, done: StagePass) -> list[Tensor]:
        roots = backward(self, action, done)
        done.kept |= {-1 - number: gradient for number, gradient in done.arrived.items()}
        return roots

    def count(own: Any, part: Any, plan: Plan) -> StageBytes:
        found = counted(own, part, plan)
        is_last = part.blocks[-1].name == f"blocks.{2 * RANKS - 1}"
        return found if is_last else found._replace(peak_bytes=found.peak_bytes + size.message_bytes)

    patch.setattr(StepRun, "_roots", keep)
    patch.setattr(weft.pipeline.cost, "_stage_bytes", count)


class Late(NamedTuple):
    """A way to free late, and the plan with which it shows.

    `slack`: messages that the law may be short of, as it counts no temporary tensors of a forward.
    """

    plan: str
    patch: Callable[[Patch, Size], None]
    slack: float = 0.01


LATE = {
    "inputs": Late("gpipe", keep_inputs),
    "gradients": Late("1f1b", keep_gradients),
    "results": Late("gpipe", await_nothing, 1.01),
}


def peaks(name: str, size: Size = SMALL, device: str = "cpu", late: str = "") -> tuple[list[int], list[int]]:
    """Measured and predicted bytes of each rank under a plan of PLANS, as the runtime is or as it would free late."""
    with pytest.MonkeyPatch.context() as patch:
        if late:
            LATE[late].patch(patch, size)
        return measured_bytes(PLANS[name], size, device), predicted_bytes(PLANS[name], size)
