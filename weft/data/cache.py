"""Folders that are made once and then only read: built beside their place and renamed into it, one process at a time.

So a folder is there whole or not at all, whatever is killed, and processes that start together build it once.
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
    """Held by one process of this machine at a time; the system lets go of it if the process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is building %s; waiting for it", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_folder(cache: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside `cache`, and rename it there."""
    # The lock may not reach other machines that share the folder, so each has a place of its own to build in.
    building = cache.with_name(f"{cache.name}.building-{socket.gethostname()}")
    shutil.rmtree(building, ignore_errors=True)  # left by a process that was killed
    building.mkdir()
    try:
        write(building)
        sync_folder(building)
        try:
            building.rename(cache)
        except OSError:
            if not cache.exists():
                raise
            # Another machine was first; `building` is removed below and its cache, which is equal, is used.
        sync_folder(cache.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def flush_to_disk(file: Any) -> None:
    """Wait until a file's content is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes names in a folder survive a power cut, as fsync does for the content of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
