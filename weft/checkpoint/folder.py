"""The folder of checkpoints: the names of files, and the list of complete checkpoints.

A checkpoint gets its final name by one rename when it is complete. Folders whose name starts with a dot belong to a
save that runs or that crashed, and are never read.
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
    """The name of the file that holds a rank's pieces."""
    return f"rank-{rank:05d}.safetensors"


def partial_name(rank: int) -> str:
    """The name of the manifest of one rank's pieces, which exists until rank 0 has merged all of them."""
    return f"rank-{rank:05d}.json"


def failed_name(rank: int) -> str:
    """The name of the empty file with which a rank tells others that it could not write its part."""
    return f"rank-{rank:05d}.failed"


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order; empty if there is no folder."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    found = {step: name for name in names if (step := step_of(name)) is not None}
    return sorted(step for step, name in found.items() if (folder / name / MANIFEST).is_file())


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    complete = steps(folder)
    return Path(folder) / step_name(complete[-1]) if complete else None
