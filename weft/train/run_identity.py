"""What identifies a run: the folder that it lives in, and an id that is made once and kept beside its checkpoints.

Two runs never have the same id, whatever their launcher calls the job and whatever their folders are called. Whoever
removes a run's checkpoints, or its folder, and starts again has another run.
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
    """The id of the run in a folder; None if there is none yet."""
    try:
        text = _path(folder).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return text.strip() if _ID.fullmatch(text) else None  # a power cut may leave an empty file


def make_run_id(folder: Path) -> str:
    """The id of the run in a folder. It is made if there is none; of several who make one at once, one succeeds."""
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
    """Give a file its name, unless another has it already."""
    if path.exists():  # but no id is in it
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
