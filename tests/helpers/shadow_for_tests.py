"""Four ranks under the local agent that shadow each other and train a small chain, one of which kills itself.

Beside steps they vote, evaluate and save, as the training loop does, so that a rank can be lost at any of these.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pipeline_for_tests import CLASSES, WIDTH, Block, vectors
from torch import Tensor, nn

from weft.checkpoint import Piece, Region, Saver
from weft.comm import Ledger
from weft.health import lost_ranks as losses
from weft.health.rank_status import Status
from weft.launch.agent import Restarts, start_local
from weft.launch.environment import RankInfo, detect, init_process_group
from weft.launch.fork_server import ForkServer
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim import AdamW
from weft.optim.saved_state import pieces_to_save
from weft.parallel.apply import parallelize
from weft.pipeline import step_run as run_module
from weft.pipeline.runtime import Pipeline
from weft.plan import Pipe, Plan
from weft.resilience.memory_copies import MemoryCopies
from weft.resilience.takeover import take_over_losses
from weft.schedule.actions import Action
from weft.step.train_step import evaluate, train_step
from weft.train.checkpoints import save_or_tell
from weft.train.stop import Stop

RANKS, MICRO_BATCHES, NUM_STEPS, EVALUATED, SAVED = 4, 4, 5, 3, (2, 4)
TIMEOUT = timedelta(seconds=120)
IN_STEP = ["forward 0", "forward 2", "backward 0", "backward 1", "backward 3", "refresh 0", "refresh 2", "losses"]
IN_STEP += ["state", "update", "updated", "world"]
HELD: list[dist.ProcessGroup | None] = []  # as default arguments hold it (`group=dist.group.WORLD`)


@dataclass(frozen=True)
class Death:
    """A rank dies in a step (from 1), at a point: before an action ("backward 1"), a message of the refresh, a sum over
    an axis, the update; behind it; or in what comes after steps. It first waits for `seconds`, in which the others get
    as far as they can without it.
    """

    rank: int
    step: int
    point: str
    seconds: float = 0.0


def all_deaths() -> list[Death]:
    """Every rank but the first, at every step, at every point."""
    found = [Death(rank, step, point) for rank in (1, 2, 3) for step in range(1, NUM_STEPS + 1) for point in IN_STEP]
    found += [Death(rank, step, "shadow 1") for rank in (1, 2) for step in range(1, NUM_STEPS + 1)]
    found += [Death(rank, EVALUATED, point) for rank in (1, 2, 3) for point in ("evaluation", "evaluated")]
    return [
        *found,
        *(Death(rank, step, point) for rank in (1, 2, 3) for step in SAVED for point in ("saving", "saved")),
    ]


def some_deaths(number: int) -> list[Death]:
    """A few of them, of different points."""
    return random.Random(0).sample(all_deaths(), number)


class Chain(nn.Module):
    """Blocks with noise between them: draws must be those of the rank that was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(7))
        self.noise = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = self.noise(block(value))
        out: Tensor = self.head(value)
        return out


def make_chain(plan: Plan, mesh: Mesh) -> tuple[Pipeline, AdamW]:
    torch.manual_seed(0)
    model = parallelize(Chain(), plan, mesh, example=lambda: (torch.zeros(2, WIDTH),))
    assert isinstance(model, Pipeline)
    return model, AdamW(model, lr=0.05)


def batches_of(step: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(2) for tensor in vectors(2 * MICRO_BATCHES)(step)), strict=True))


def seed(step: int) -> Callable[[int], None]:
    return lambda micro_batch: void(torch.manual_seed(1000 * step + micro_batch))


def void(_: object) -> None:
    """Nothing."""


class Dying:
    """Kills its process where it is due."""

    def __init__(self, death: Death | None, folder: Path) -> None:
        self._death, self._folder, self.step, self._count = death, folder, 0, 0
        self._compute, self._record, self._update = run_module.StepRun.compute, Ledger.record, AdamW.step

    def at(self, point: str) -> None:
        if self._death is not None and (self._death.step, self._death.point) == (self.step, point):
            time.sleep(self._death.seconds)
            (self._folder / "died").write_text(point)
            os.kill(os.getpid(), signal.SIGKILL)

    def compute(self, run: Any, action: Action) -> None:
        if run.work.scales is None:
            self.at("evaluation")
        else:
            self.at(f"{action.kind} {action.micro_batch}")
        self._compute(run, action)

    def record(self, ledger: Ledger, axis: str, operation: str, num_bytes: int) -> None:
        self._record(ledger, axis, operation, num_bytes)
        if axis == "shadow":
            self.at(f"refresh {self._count}")
            self._count += 1
        else:
            self._count = 0
            self.at(axis)

    def update(self, *arguments: Any, **named: Any) -> None:
        self.at("update")
        self._update(*arguments, **named)
        self.at("updated")


def rank_main(arguments: list[str]) -> None:
    """What each rank does."""
    spec = json.loads(arguments[0])
    folder, place = Path(spec["folder"]), detect(os.environ)
    assert place is not None
    died = [Death(**one) for one in spec["deaths"]] if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else []
    dying = Dying(next((death for death in died if death.rank == place.rank), None), folder)
    with (
        patch.object(run_module.StepRun, "compute", lambda run, action: dying.compute(run, action)),
        patch.object(Ledger, "record", lambda ledger, *given: dying.record(ledger, *given)),
        patch.object(AdamW, "step", lambda *given, **named: dying.update(*given, **named)),
    ):
        init_process_group(place, "cpu", TIMEOUT)
        HELD.append(dist.group.WORLD)
        train(folder, Plan(pipe=Pipe(place.num_ranks, spec["schedule"], shadow=True), micro_batch=2), dying)


def train(folder: Path, plan: Plan, dying: Dying) -> None:
    place = detect(os.environ)
    assert place is not None
    status, mesh, step = Status(os.environ, place.rank), Mesh(plan), 0
    model, optimizer = make_chain(plan, mesh)
    saver = Saver(folder / "checkpoints", mesh.rank, plan.num_ranks, "token" + os.environ["TORCHELASTIC_RESTART_COUNT"])
    if (folder / "stale").exists() and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        model._shadow_steps = -100
        patch.object(model, "_exchange_gradients", void).start()
    stop = Stop(mesh, take_over_losses(model, mesh, saver, place, lambda: step, TIMEOUT))
    found: list[list[float]] = []
    for step in range(NUM_STEPS):
        status.step_begins(step)
        status.phase("forward and backward")
        dying.step = step + 1
        result = train_step(model, optimizer, batches_of(step), mesh, before_micro_batch=seed(step))
        found.append([result.loss.item(), result.grad_norm.item()])
        stop.ask()
        if step + 1 == EVALUATED:
            found.append([evaluate(model, batches_of(100), mesh).item()])
            dying.at("evaluated")
        if step + 1 in SAVED:
            dying.at("saving")
            save_or_tell(saver, step + 1, pieces_to_save(model, optimizer, mesh), {}, True, False)
            dying.at("saved")
    save_or_tell(saver, NUM_STEPS, pieces_to_save(model, optimizer, mesh), {}, False, True)
    saver.wait(published=True)
    if mesh.is_first:
        (folder / "numbers.json").write_text(json.dumps(found))


def run_chain(
    folder: Path,
    deaths: list[Death],
    schedule: str = "1f1b",
    restarts: Restarts = Restarts(),  # noqa: B008 (frozen)
    num_ranks: int = RANKS,
) -> int:
    """Train under the agent; the exit status."""
    folder.mkdir(exist_ok=True)
    spec = {"folder": str(folder), "deaths": [vars(death) for death in deaths], "schedule": schedule}
    with (
        patch.dict(os.environ, OMP_NUM_THREADS="1"),
        patch.object(losses, "_BEGIN_SECONDS", TIMEOUT.total_seconds()),  # however busy the machine is
        ForkServer(rank_main) as fork_server,
    ):
        return start_local(fork_server, num_ranks, [json.dumps(spec)], {}, restarts, shadowed=True)


SHAPE = (10, 7)


def pieces_of(step: int, rank: int, num_ranks: int) -> list[Piece]:
    values = torch.arange(70.0) * step
    region = Region.flat(SHAPE, 70 * rank // num_ranks, 70 * (rank + 1) // num_ranks)
    return [Piece("w", "parameter", region, values[region.start : region.stop])]


def on_hosts(folder: Path, num_hosts: int, work: Callable[[MemoryCopies, list[str]], Any], num_ranks: int = 4) -> Any:
    """`work(copies, said)` on ranks that are spread over hosts, each of which has a folder of its own."""

    def rank(index: int) -> Any:
        num_local = num_ranks // num_hosts
        place = RankInfo(index, num_ranks, index % num_local, num_local, num_hosts)
        said: list[str] = []
        own = folder / f"host-{index // num_local}"
        return work(MemoryCopies(own, Mesh(Plan(data=num_ranks)), place, said.append), said)

    return run_local(rank, num_ranks)
