"""Going on: the newest checkpoint that all ranks can read, and the refusal of one that belongs to something else.

A checkpoint whose files were damaged is passed over, and said to be: every rank tries to read its part, all agree on
whether it worked, and the next older one is tried. A checkpoint of other data, another model or another order of
samples is never passed over: it is an error of the user's, and going on from an older one would hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from weft.checkpoint import Checkpoint, steps
from weft.checkpoint.folder import step_name
from weft.comm import all_reduce
from weft.config import Run
from weft.errors import CheckpointError, DamagedError
from weft.mesh import Mesh
from weft.schema import to_table
from weft.train.batches import TrainingData
from weft.train.state import load_state

DAMAGED_PREFIX = "damaged-"


@dataclass(frozen=True)
class Found:
    """A complete checkpoint, by its name; whether its files are whole is seen when they are read."""

    step: int
    path: Path


def found_checkpoints(folders: list[Path]) -> list[Found]:
    """The complete checkpoints in some folders, newest first; of one step, that of the folder named first."""
    found = {step: Found(step, folder / step_name(step)) for folder in reversed(folders) for step in steps(folder)}
    return [found[step] for step in sorted(found, reverse=True)]


def resume(
    run: Run, model: nn.Module, optimizer: Optimizer, data: TrainingData, mesh: Mesh, say: Callable[[str], None]
) -> int:
    """Load the newest checkpoint that is whole, if there is one, and return the step to go on from."""
    damage: DamagedError | None = None
    for found in found_checkpoints([run.folder / "checkpoints"]):
        damage = _try(found, run, model, optimizer, data)
        if _all_did(damage is None, mesh):
            say(f"resumed at step {found.step} from {found.path}")
            return found.step
        damage = damage or DamagedError(f"{found.path} cannot be used: another rank could not read its part")
        say(f"{damage}: it is kept as {DAMAGED_PREFIX}{found.path.name} and the one before is used")
        if mesh.is_first:
            _put_aside(found.path)
    if damage is not None:
        raise CheckpointError(
            f"no checkpoint in {run.folder / 'checkpoints'} is whole; the last that was tried: {damage}. To start "
            f"anew, choose another folder (folder = ...)"
        )
    return 0


def _try(found: Found, run: Run, model: nn.Module, optimizer: Optimizer, data: TrainingData) -> DamagedError | None:
    """Read this rank's part; what is wrong with the files, if anything is."""
    try:
        checkpoint = Checkpoint(found.path)
        _refuse_other_data(checkpoint, data)
        _refuse_other_model(checkpoint, run)
        _refuse_other_order(checkpoint, run)
        load_state(checkpoint, model, optimizer)
    except DamagedError as error:
        return error
    return None


def _all_did(mine: bool, mesh: Mesh) -> bool:
    flag = torch.tensor([int(mine)], dtype=torch.int32)
    all_reduce(flag, mesh["world"], "min").wait()
    return bool(flag.item())


def _put_aside(path: Path) -> None:
    """Under another name, so that the step can be saved again and a person can look."""
    aside = path.with_name(DAMAGED_PREFIX + path.name)
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}-{number}")
    path.rename(aside)


def _refuse_other_data(checkpoint: Checkpoint, data: TrainingData) -> None:
    found = checkpoint.state.get("data", {}).get("fingerprint")
    if found != data.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data (fingerprint {found}, now {data.fingerprint}); give the same "
            f"data (and tokenizer), or start anew in another folder (folder = ...)"
        )


def _refuse_other_model(checkpoint: Checkpoint, run: Run) -> None:
    """Shapes do not tell: other rotary frequencies, say, would go on in silence with another network."""
    saved, now = checkpoint.state["model"], to_table(run.model)
    for key in {**now, **saved}:
        if saved.get(key) != now.get(key):
            raise CheckpointError(
                f"{checkpoint.path} was trained with model.{key} = {saved.get(key)}, now it is {now.get(key)}; give "
                f"the same model, or start anew in another folder (folder = ...)"
            )


def _refuse_other_order(checkpoint: Checkpoint, run: Run) -> None:
    """The order of samples follows from seed, step and batch: with another, data would be skipped or repeated."""
    batch, seed = checkpoint.state["data"]["samples"] // max(1, checkpoint.step), checkpoint.state["seed"]
    if (batch, seed) != (run.split.batch, run.train.seed):
        raise CheckpointError(
            f"{checkpoint.path} was trained with {batch} {run.split.samples} a step and seed {seed}, now "
            f"{run.split.batch} and {run.train.seed}; keep both (any plan may change), or start anew in another folder "
            f"(folder = ...)"
        )
