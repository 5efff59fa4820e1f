"""Cache folders that are built once and then only read. One process at a time builds a folder and renames it when done.

So a folder is complete or absent even if a process is killed, and processes that start together build it only once.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger("weft")


@contextlib.contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock that one process of this machine can hold at a time. The system releases it if the process is killed.
    `what` names the thing that is built, for the log.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is building %s; waiting for it", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_folder(cache: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder beside `cache`, then rename it to `cache`."""
    # The lock may not work across machines that share the folder, so each machine builds in its own folder.
    building = cache.with_name(f"{cache.name}.building-{socket.gethostname()}")
    shutil.rmtree(building, ignore_errors=True)  # left by a process that was killed
    try:
        building.mkdir()
        write(building)
        sync_folder(building)
        try:
            building.rename(cache)
        except OSError:
            if not cache.exists():
                raise
            # Another machine was first: its cache, which is equal, is used, and `building` is removed below.
        sync_folder(cache.parent)
    except OSError as error:
        error.filename = error.filename or str(cache)  # a write to a full disk does not say where
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def flush_to_disk(file: Any) -> None:
    """Wait until a file's content is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write a folder's list of names to disk, so that it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
