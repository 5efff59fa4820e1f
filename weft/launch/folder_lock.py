"""A lock that allows one job per run folder: a second job would overwrite the first one's metrics and checkpoints.

The lock is a POSIX lock on a file. The kernel releases it when the process ends, even if it is killed, and child
processes do not inherit it. The kernel also releases it when the process closes any other descriptor of the file, so a
process that holds the lock never opens the file again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from weft.errors import LaunchError

LOCK = "lock"
logger = logging.getLogger("weft")
_held: dict[Path, int] = {}  # folder -> id of the process that holds its lock; a forked child does not hold it


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. Raises LaunchError if this or another process holds it."""
    key = folder.resolve()
    if _held.get(key) == os.getpid():
        raise LaunchError(
            f"{folder} is in use by this process ({os.getpid()}); wait until that run ends, or train in another folder "
            f"(folder = ...)"
        )
    with _opened(folder) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise LaunchError(
                f"{folder} is in use by {holder}; wait until that job ends, or train in another folder (folder = ...)"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): see to it that no second job uses it", folder, error)
        with suppress(OSError):  # on a full disk the lock works without the holder's name in the file
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())  # not buffered:
            # closing the file would write again what has failed
        _held[key] = os.getpid()
        try:
            yield
        finally:
            del _held[key]


def _opened(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the run's folder {folder} cannot be written: {error.strerror}; give it permission and space, or choose "
            f"another (folder = ...)"
        ) from error


def refuse_if_used(folder: Path) -> None:
    """Raise LaunchError if another job holds the folder's lock, or if the folder cannot be made: an early check, before
    the work that precedes `locked`.
    """
    if folder.exists():
        with locked(folder):
            pass
        return
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise LaunchError(
            f"the run's folder {folder} cannot be made: {above} is no folder that can be written; choose another "
            f"(folder = ...)"
        )
