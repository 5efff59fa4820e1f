"""A chain of blocks that sleep in forward and backward, over `pipe` on forked ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import SGD

from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.pipeline.runtime import Pipeline
from weft.plan import Pipe, Plan
from weft.profiling import profile
from weft.step.objective import Batch, Objective
from weft.step.train_step import StepResult, evaluate, train_step

WIDTH = 6
OBJECTIVE = Objective(
    count=lambda batch: torch.tensor(len(batch[0])),
    total=lambda model, batch: (model(batch[0]) - batch[1]).square().sum(),
)


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
    """Sleeps at least `seconds` each way, and up to `late_seconds` more."""

    def __init__(self, seconds: float, late_seconds: float, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds, self.late_seconds, self.draw = seconds, late_seconds, random.Random(seed)

    def forward(self, hidden: Tensor) -> Tensor:
        late = [self.seconds + self.late_seconds * self.draw.random() for _ in range(2)]
        out: Tensor = Sleep.apply(torch.tanh(self.linear(hidden)), *late)
        return out


class Chain(nn.Module):
    def __init__(self, num_blocks: int, seconds: float = 0.0, late_seconds: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(seconds, late_seconds, seed + number) for number in range(num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def run_ranks(function: Callable[[int], Any], num_ranks: int) -> list[Any]:
    """`run_local`, with what a first profile imports (it takes seconds) imported once for all ranks."""
    profile(Chain(1), _example)
    return run_local(function, num_ranks)


def _example() -> tuple[Tensor]:
    return (torch.zeros(2, WIDTH),)


def micro_batches(count: int, step: int = 0) -> list[Batch]:
    """Inputs and targets [2, WIDTH] each."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(2, 2 * count, WIDTH, generator=generator)
    return list(zip(rows[0].split(2), rows[1].split(2), strict=True))


class Trainer:
    """One rank of a chain under a schedule."""

    def __init__(self, pipe: Pipe, model: Chain) -> None:
        plan = Plan(pipe=pipe)
        self.mesh = Mesh(plan)
        built = parallelize(model, plan, self.mesh, example=_example)
        assert isinstance(built, Pipeline)
        self.model = built
        self.pieces = [piece for _, piece in named_pieces(built)]
        self.gradients: list[list[float]] = []  # of each step
        self.optimizer = SGD(self.pieces, lr=0.1)
        self.optimizer.register_step_pre_hook(self._keep_gradients)

    def step(self, batches: list[Batch]) -> StepResult:
        return train_step(self.model, self.optimizer, batches, self.mesh, OBJECTIVE)

    def evaluate(self, batches: list[Batch]) -> float:
        return evaluate(self.model, batches, self.mesh, OBJECTIVE).item()

    @property
    def weights(self) -> list[float]:
        found: list[float] = torch.cat(self.pieces).tolist()
        return found

    def _keep_gradients(self, *_: Any) -> None:
        gradients = [piece.grad for piece in self.pieces if piece.grad is not None]
        assert len(gradients) == len(self.pieces)
        self.gradients.append(torch.cat(gradients).tolist())
