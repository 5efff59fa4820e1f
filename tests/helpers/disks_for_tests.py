"""A disk without room: a small file system in memory, where the tests run as root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Callable[[str], None]]:
    """A file system of this size on a folder; the function mounts it again with other options."""

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)

    if os.geteuid() != 0:
        pytest.skip("a small disk needs root")
    folder.mkdir()
    mount(f"size={size_bytes}")
    try:
        yield lambda options: mount(f"remount,{options}")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # files may still be mapped
