"""The identity of a run: its folder, and an id that is made once and kept beside its checkpoints.

Two runs never have the same id, even if their launchers' job names or their folders are equal. If a run's checkpoints
or its folder are removed, the next start is another run.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from weft.errors import CheckpointError

RUN_ID = "run-id"
_ID = re.compile(r"[0-9a-f]{32}\n?")


def known_run_id(folder: Path) -> str | None:
    """Returns the id of the run in a folder; None if it has none."""
    try:
        text = _path(folder).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return text.strip() if _ID.fullmatch(text) else None  # after a power cut the file may be empty


def make_run_id(folder: Path) -> str:
    """Returns the id of the run in a folder, and makes one if there is none.

    If several processes make one at once, all return the same.
    """
    path = _path(folder)
    temporary = path.with_name(f".{RUN_ID}-{uuid.uuid4().hex}")
    try:
        found = known_run_id(folder)
        if found is not None:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "w", encoding="ascii") as file:
                file.write(uuid.uuid4().hex + "\n")
                file.flush()
                os.fsync(file.fileno())
            _publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        made = known_run_id(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {path.parent}: {error.strerror or error}; give it space or permission, or choose another "
            f"folder (folder = ...)"
        ) from error
    assert made is not None
    return made


def _publish(temporary: Path, path: Path) -> None:
    """Renames a temporary file to its final name, unless another process has written that file."""
    if path.exists():  # without a valid id
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        with suppress(FileNotFoundError):
            temporary.replace(path)


def _path(folder: Path) -> Path:
    return folder / "checkpoints" / RUN_ID
