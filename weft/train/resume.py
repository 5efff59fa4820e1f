"""Resuming from the newest checkpoint that all ranks can read, and refusing one that belongs to another run.

A checkpoint with damaged files is skipped with a message. Every rank tries to read its part, all ranks agree on whether
that worked, and otherwise the next older one is tried. Damaged ones are put aside when a whole one is found; if none is
whole, all stay where they are, so that the next start does not begin anew either. A checkpoint of other data, of
another model or with another order of samples is never skipped: it is a user's error, and resuming from an older
checkpoint would hide it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint import Checkpoint, Saver, steps
from weft.checkpoint.folder import step_name
from weft.checkpoint.manifest import MANIFEST
from weft.data.config import ChatConfig, changed_keys, is_of_earlier_tokens
from weft.errors import CheckpointError, ConfigError, DamagedError
from weft.optim.saved_state import load_state
from weft.resilience.memory_copies import MemoryCopies, all_agree
from weft.run_file import Run
from weft.saved_run import WHOLE_HASH, saved_end_token
from weft.schema import parse_toml, to_table
from weft.train.agreement import SEEN_SECONDS, flat, text_of_rank_0
from weft.train.batches import TrainingData
from weft.train.state import TrainState

logger = logging.getLogger("weft")
_NAMES = {"freeze": "train.freeze", "lora": "[lora]"}  # where a run file states what a model trains
DAMAGED_PREFIX = "damaged-"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint on disk, or in memory if `path` is None.

    It is complete by its name. Damage of its files is detected when they are read.
    """

    step: int
    path: Path | None = None


def found_checkpoints(folder: Path, in_memory: Sequence[int]) -> list[FoundCheckpoint]:
    """Returns the complete checkpoints that this process sees, newest first."""
    return newest_first(folder, steps(folder), in_memory)


def newest_first(folder: Path, on_disk: Sequence[int], in_memory: Sequence[int]) -> list[FoundCheckpoint]:
    """Returns checkpoints newest first; for the same step, the one in memory first."""
    found = [FoundCheckpoint(step, folder / step_name(step)) for step in on_disk] + [
        FoundCheckpoint(step) for step in in_memory
    ]
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path is None), reverse=True)


@dataclass(frozen=True)
class Resumed:
    """The step to continue from, and the other values of its checkpoint; `saved` is empty if there is none.

    `is_only_in_memory`: the disk does not have the step.
    """

    step: int = 0
    saved: Mapping[str, Any] = field(default_factory=dict)
    is_only_in_memory: bool = False


def resume(state: TrainState, memory: MemoryCopies | None, say: Callable[[str], None]) -> Resumed:
    """Loads the newest undamaged checkpoint, if there is one.

    Rank 0 lists the checkpoints, because another host may see an old listing of a shared folder.
    """
    folder, world = state.run.folder / "checkpoints", state.mesh["world"]
    resumed = Resumed()
    damage: DamagedError | None = None
    damaged: list[Path] = []
    on_disk: list[int] = json.loads(text_of_rank_0(json.dumps(steps(folder) if state.mesh.is_first else []), world))
    for found in newest_first(folder, on_disk, memory.steps() if memory is not None else []):
        saved, damage = _try(found, state, memory)
        if all_agree(damage is None, world):
            resumed = Resumed(found.step, saved, found.path is None and found.step not in on_disk)
            say(f"resumed at step {found.step} from {found.path or 'memory'}")
            break
        damage = damage or DamagedError(f"step {found.step}: another rank could not read its part")
        say(f"{damage}; older copies and checkpoints are tried")
        if found.path is not None:
            damaged.append(found.path)
    if memory is not None:
        memory.forget_after(resumed.step)
    if damage is not None:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole; the last that was tried: {damage}. To start anew, choose another "
            f"folder (folder = ...)"
        )
    for path in damaged:
        say(f"the damaged {path} is kept as {DAMAGED_PREFIX}{path.name}")
        if state.mesh.is_first:
            _put_aside(path)
    return resumed


def go_back(
    state: TrainState, saver: Saver, memory: MemoryCopies | None, say: Callable[[str], None], far: bool
) -> Resumed:
    """Loads the newest saved state during training; if `far`, the newest checkpoint on disk.

    All ranks end the save in flight before that; a warning says if it failed.
    """
    error = saver.settle(partial(all_agree, world=state.mesh["world"]))
    if error is not None:
        logger.warning("weft: a checkpoint was not saved: %s; the newest checkpoint before it is used", error)
    if memory is not None:
        with suppress(CheckpointError, RuntimeError):  # the next save works without that copy
            memory.wait()
    resumed = resume(state, None if far else memory, say)
    if not resumed.saved:
        raise CheckpointError(
            f"there is no checkpoint in {state.run.folder / 'checkpoints'} to go back to (numbers.on_bad = "
            f"'{state.run.numbers.on_bad}'); run again to go on from memory, or from the beginning"
        )
    if memory is not None and far:
        memory.forget_after(resumed.step)
    return resumed


def _try(
    found: FoundCheckpoint, state: TrainState, memory: MemoryCopies | None
) -> tuple[dict[str, Any], DamagedError | None]:
    """Reads this rank's part of a checkpoint. Returns the checkpoint's other values, and the damage of its files or
    None.
    """
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
        refuse_other_training(checkpoint, state.data, state.run)
        _refuse_other_source(checkpoint, state)
        load_state(checkpoint, state.model, state.optimizer)
    except DamagedError as error:
        return {}, error
    return checkpoint.state, None


def wait_until_seen(path: Path, seconds: float = SEEN_SECONDS) -> None:
    """Waits until a shared folder shows the checkpoint that rank 0 has found. Raises CheckpointError after
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (path / MANIFEST).is_file():
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"rank 0 has found {path}, which this rank does not see after {seconds:.0f} s; all ranks must share "
                f"the run's folder"
            )
        time.sleep(_POLL_SECONDS)


def _put_aside(path: Path) -> None:
    """Renames a damaged checkpoint, so that the step can be saved again and a person can examine the files."""
    aside = path.with_name(DAMAGED_PREFIX + path.name)
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}-{number}")
    path.rename(aside)


def refuse_other_training(checkpoint: Checkpoint, data: TrainingData | None, run: Run) -> None:
    """Raises CheckpointError if a checkpoint was trained on other data, with another model, or in another order.

    Without `data`, which may take long to prepare, what the run file says of it is compared.
    """
    _refuse_other_data(checkpoint, data, run)
    _refuse_other_model(checkpoint, run)
    _refuse_other_order(checkpoint, run)


def changed_settings(checkpoint: Checkpoint, run: Run, tables: Sequence[str] = ("train", "plan")) -> list[str]:
    """Returns the keys of these tables that have changed since a checkpoint was saved, as texts
    "train.key = then, now ...". The number of steps may change.
    """
    saved = parse_toml(checkpoint.stated("run", str), str(checkpoint.path))
    then = flat({table: saved.get(table, {}) for table in tables})
    now = flat({table: to_table(getattr(run, table)) for table in tables})
    keys = [key for key in {**now, **then} if now.get(key) != then.get(key) and key != "train.steps"]
    return [f"{key} = {then.get(key, 'not given')}, now {now.get(key, 'not given')}" for key in keys]


def _refuse_other_run(checkpoint: Checkpoint, run_id: str) -> None:
    """Raises if a copy in memory belongs to another run.

    (A checkpoint on disk may have been copied from another folder.)
    """
    found = checkpoint.stated("run_id", str)
    if found != run_id:
        raise CheckpointError(f"{checkpoint.path} is of run {found}, and this is run {run_id}; remove it")


def _refuse_other_data(checkpoint: Checkpoint, data: TrainingData | None, run: Run) -> None:
    """Raises if the checkpoint was trained on other tokens or images, or on other samples of them.

    Data would be skipped, repeated, or held out after training on it.
    """
    saved = checkpoint.stated("data", dict)
    found, contents = saved.get("fingerprint"), saved.get("contents")  # an earlier weft had no hash of contents
    table = _saved_table(checkpoint)
    changed, places = changed_keys(table, run.data)
    if data is not None and found != data.fingerprint:
        if is_earlier := is_of_earlier_tokens(table):
            with suppress(ConfigError):  # the tokenizer is gone
                places = changed_keys(table | {"end_token": saved_end_token(checkpoint)}, run.data)[1]
        changed += [*places, f"fingerprint {found}, now {data.fingerprint}"]
        if is_earlier and isinstance(run.data, ChatConfig):
            changed.append("an earlier weft cut conversations into tokens part by part, which no key brings back")
    elif data is not None and contents and data.contents and contents != data.contents:
        changed += [*places, f"images of hash {contents}, now {data.contents}"]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data: {'; '.join(changed)}. Give the same data (and tokenizer), "
            f"or start anew in another folder (folder = ...)"
        )


def _saved_table(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the table `[data]` of the run that saved a checkpoint."""
    table = parse_toml(checkpoint.stated("run", str), str(checkpoint.path)).get("data")
    if not isinstance(table, dict):
        raise CheckpointError(f"{checkpoint.path} states a run without [data]; it was not saved by weft train")
    return table


def _refuse_other_model(checkpoint: Checkpoint, run: Run) -> None:
    """Raises if the checkpoint's model differs.

    Shapes do not show every difference: with other rotary frequencies, for example, another network would be trained
    without an error.
    """
    of_model, of_tuning = checkpoint.stated("model", dict), checkpoint.state.get("tuning", {})
    for config, given in ((run.model, of_model), (run.tuning, of_tuning if isinstance(of_tuning, dict) else {})):
        # A key that an earlier weft did not know had the effect of its default.
        saved = {**{field.name: to_table(field.default) for field in fields(config) if field.init}, **given}
        now = to_table(config)
        for key in {**now, **saved}:
            if saved.get(key) != now.get(key):
                name = _NAMES.get(key, f"model.{key}")
                raise CheckpointError(
                    f"{checkpoint.path} was trained with {name} = {saved.get(key)}, now it is {now.get(key)}; give the "
                    f"same model, or start anew in another folder (folder = ...)"
                )


def _refuse_other_source(checkpoint: Checkpoint, state: TrainState) -> None:
    """Raises if the run started from other weights."""
    saved = str(checkpoint.state.get("source", ""))  # an earlier weft had no key for it
    if saved and state.source and not saved.startswith(WHOLE_HASH):
        state.say(
            f"{checkpoint.path} is of an earlier weft: whether the weights in model.from are the same is not known"
        )
        return
    if saved != state.source:
        then, now = (
            f"weights {one[len(WHOLE_HASH) :][:12]}" if one else "random weights" for one in (saved, state.source)
        )
        raise CheckpointError(
            f"{checkpoint.path} started from {then}, now model.from has {now}; give the same, or start anew in another "
            f"folder (folder = ...)"
        )


def _refuse_other_order(checkpoint: Checkpoint, run: Run) -> None:
    """Raises if the checkpoint was trained with another order of samples.

    The order follows from seed, step and batch size: with another one, data would be skipped or repeated.
    """
    samples, seed = checkpoint.stated("data", dict).get("samples"), checkpoint.stated("seed", int)
    batch = samples // max(1, checkpoint.step) if isinstance(samples, int) else None
    if not checkpoint.step:  # saved before the first step, so no order was used yet
        batch = run.split.batch
    if (batch, seed) != (run.split.batch, run.train.seed):
        raise CheckpointError(
            f"{checkpoint.path} was trained with {batch} {run.split.samples} a step and seed {seed}, now "
            f"{run.split.batch} and {run.train.seed}; keep both (any plan may change), or start anew in another folder "
            f"(folder = ...)"
        )
