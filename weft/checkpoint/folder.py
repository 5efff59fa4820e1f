"""The folder of checkpoints: what a published one is called, and which there are.

A checkpoint gets its name by one rename when it is complete. Names that start with a dot are a saver's work, or
what a crash left of it, and are never looked into.
"""

import os
import re
from pathlib import Path

from weft.checkpoint.manifest import MANIFEST

_STEP = re.compile(r"step-([0-9]{8,19})")


def step_name(step: int) -> str:
    """The name of a step's checkpoint, e.g. step-00000100."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def shard_name(rank: int) -> str:
    """The file of a rank's pieces."""
    return f"rank-{rank:05d}.safetensors"


def partial_name(rank: int) -> str:
    """The manifest of a rank's pieces, until there is one of all."""
    return f"rank-{rank:05d}.json"


def failed_name(rank: int) -> str:
    """The mark of a rank that could not write its part, so that nobody waits for it."""
    return f"rank-{rank:05d}.failed"


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order; none if there is no folder."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    found = {step: name for name in names if (step := step_of(name)) is not None}
    return sorted(step for step, name in found.items() if (folder / name / MANIFEST).is_file())


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    complete = steps(folder)
    return Path(folder) / step_name(complete[-1]) if complete else None
