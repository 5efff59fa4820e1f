"""Going on: the newest checkpoint that all ranks can read, and the refusal of one that belongs to something else.

A checkpoint whose files were damaged is passed over, and said to be: every rank tries to read its part, all agree on
whether it worked, and the next older one is tried. A checkpoint of other data, another model or another order of
samples is never passed over: it is an error of the user's, and going on from an older one would hide it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint import Checkpoint, Saver, steps
from weft.checkpoint.folder import step_name
from weft.checkpoint.manifest import MANIFEST
from weft.checkpoint.model_state import load_state
from weft.data.config import changed_keys
from weft.errors import CheckpointError, DamagedError
from weft.resilience.memory_copies import MemoryCopies, all_agree
from weft.run_file import Run
from weft.schema import parse_toml, to_table
from weft.train.agreement import SEEN_SECONDS, first_says
from weft.train.batches import TrainingData
from weft.train.saving import settle_or_tell
from weft.train.state import TrainState

DAMAGED_PREFIX = "damaged-"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Found:
    """A complete checkpoint, by its name, or in memory; whether its files are whole is seen when they are read."""

    step: int
    path: Path | None = None


def found_checkpoints(folder: Path, in_memory: Sequence[int]) -> list[Found]:
    """The complete checkpoints, newest first, as this process sees them."""
    return newest_first(folder, steps(folder), in_memory)


def newest_first(folder: Path, on_disk: Sequence[int], in_memory: Sequence[int]) -> list[Found]:
    """The newest first; of one step, that in memory."""
    found = [Found(step, folder / step_name(step)) for step in on_disk] + [Found(step) for step in in_memory]
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path is None), reverse=True)


def resume(state: TrainState, memory: MemoryCopies | None, say: Callable[[str], None]) -> tuple[int, Mapping[str, Any]]:
    """Load the newest checkpoint that is whole, if there is one: the step to go on from, and what it says beside.

    Which checkpoints there are is what rank 0 finds: a listing of a shared folder may be old on another host.
    """
    folder, world = state.run.folder / "checkpoints", state.mesh["world"]
    step, saved = 0, dict[str, Any]()
    damage: DamagedError | None = None
    on_disk: list[int] = json.loads(first_says(json.dumps(steps(folder) if state.mesh.is_first else []), world))
    for found in newest_first(folder, on_disk, memory.steps() if memory is not None else []):
        saved, damage = _try(found, state, memory)
        if all_agree(damage is None, world):
            step = found.step
            say(f"resumed at step {step} from {found.path or 'memory'}")
            break
        damage = damage or DamagedError(f"step {found.step}: another rank could not read its part")
        if found.path is None:
            say(f"{damage}; older copies and checkpoints are tried")
        else:
            say(f"{damage}. It is kept as {DAMAGED_PREFIX}{found.path.name}")
            if state.mesh.is_first:
                _put_aside(found.path)
    if memory is not None:
        memory.forget_after(step)
    if damage is not None:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole; the last that was tried: {damage}. To start anew, choose another "
            f"folder (folder = ...)"
        )
    return step, saved


def go_back(
    state: TrainState, saver: Saver, memory: MemoryCopies | None, say: Callable[[str], None], far: bool
) -> tuple[int, Mapping[str, Any]]:
    """From the midst of training back to the newest state or, if it is to be `far`, the newest checkpoint on disk; as
    `resume`.
    """
    settle_or_tell(saver, partial(all_agree, world=state.mesh["world"]))
    if memory is not None:
        with suppress(CheckpointError, RuntimeError):  # the next save does without that copy
            memory.wait()
    step, saved = resume(state, None if far else memory, say)
    if not saved:
        raise CheckpointError(
            f"there is no checkpoint in {state.run.folder / 'checkpoints'} to go back to (numbers.on_bad = "
            f"'{state.run.numbers.on_bad}'); run again to go on from memory, or from the beginning"
        )
    if memory is not None and far:
        memory.forget_after(step)
    return step, saved


def _try(found: Found, state: TrainState, memory: MemoryCopies | None) -> tuple[dict[str, Any], DamagedError | None]:
    """Read this rank's part: what the checkpoint says, and what is wrong with the files, if anything is."""
    try:
        path = found.path
        if path is None:
            assert memory is not None, "who found it?"
            path = memory.assemble(found.step)
        else:
            wait_until_seen(path)
        checkpoint = Checkpoint(path)
        if found.path is None:
            _refuse_other_run(checkpoint, state.run_id)
        _refuse_other_data(checkpoint, state.data, state.run)
        _refuse_other_model(checkpoint, state.run)
        _refuse_other_order(checkpoint, state.run)
        load_state(checkpoint, state.model, state.optimizer)
    except DamagedError as error:
        return {}, error
    return checkpoint.state, None


def wait_until_seen(path: Path, seconds: float = SEEN_SECONDS) -> None:
    """Leave a shared folder time to show what rank 0 has found in it."""
    deadline = time.monotonic() + seconds
    while not (path / MANIFEST).is_file():
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"rank 0 has found {path}, which this rank does not see after {seconds:.0f} s; all ranks must share "
                f"the run's folder"
            )
        time.sleep(_POLL_SECONDS)


def _put_aside(path: Path) -> None:
    """Under another name, so that the step can be saved again and a person can look."""
    aside = path.with_name(DAMAGED_PREFIX + path.name)
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}-{number}")
    path.rename(aside)


def _refuse_other_run(checkpoint: Checkpoint, run_id: str) -> None:
    """Copies in memory are of one run. (A checkpoint on disk may have been put there from another folder.)"""
    found = checkpoint.stated("run_id", str)
    if found != run_id:
        raise CheckpointError(f"{checkpoint.path} is of run {found}, and this is run {run_id}; remove it")


def _refuse_other_data(checkpoint: Checkpoint, data: TrainingData, run: Run | None = None) -> None:
    """Other tokens or images, or other samples of them: data would be skipped, repeated, or held out after training."""
    found = checkpoint.stated("data", dict).get("fingerprint")
    changed, places = ([], []) if run is None else changed_keys(_saved_table(checkpoint), run.data)
    if found != data.fingerprint:
        changed += [*places, f"fingerprint {found}, now {data.fingerprint}"]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data: {'; '.join(changed)}. Give the same data (and tokenizer), "
            f"or start anew in another folder (folder = ...)"
        )


def _saved_table(checkpoint: Checkpoint) -> dict[str, Any]:
    """The table `[data]` of the run that saved a checkpoint."""
    table = parse_toml(checkpoint.stated("run", str), str(checkpoint.path)).get("data")
    if not isinstance(table, dict):
        raise CheckpointError(f"{checkpoint.path} states a run without [data]; it was not saved by weft train")
    return table


def _refuse_other_model(checkpoint: Checkpoint, run: Run) -> None:
    """Shapes do not tell: other rotary frequencies, say, would go on in silence with another network."""
    saved, now = checkpoint.stated("model", dict), to_table(run.model)
    for key in {**now, **saved}:
        if saved.get(key) != now.get(key):
            raise CheckpointError(
                f"{checkpoint.path} was trained with model.{key} = {saved.get(key)}, now it is {now.get(key)}; give "
                f"the same model, or start anew in another folder (folder = ...)"
            )


def _refuse_other_order(checkpoint: Checkpoint, run: Run) -> None:
    """The order of samples follows from seed, step and batch: with another, data would be skipped or repeated."""
    samples, seed = checkpoint.stated("data", dict).get("samples"), checkpoint.stated("seed", int)
    batch = samples // max(1, checkpoint.step) if isinstance(samples, int) else None
    if not checkpoint.step:  # saved before the first step, and free of any order
        batch = run.split.batch
    if (batch, seed) != (run.split.batch, run.train.seed):
        raise CheckpointError(
            f"{checkpoint.path} was trained with {batch} {run.split.samples} a step and seed {seed}, now "
            f"{run.split.batch} and {run.train.seed}; keep both (any plan may change), or start anew in another folder "
            f"(folder = ...)"
        )
