"""The folder of memory copies on one host: which parts it holds, whether they fit, and who may remove it.

It lies in /dev/shm, which is memory, and anybody may make folders there: this user's are private, and folders of others
are neither read nor removed. A job that ends removes its folder. What a job that was killed left behind is removed by
the next one, which sees by a lock that nobody uses it any more. The lock belongs to the open file (flock), so a process
may look at the lock of a folder that it holds without letting go of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from weft.checkpoint.folder import partial_name, shard_name
from weft.checkpoint.manifest import MANIFEST, decode, encode, merge
from weft.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"

_PREFIX = "weft-copies-"
_PARTS = re.compile(r"parts-([0-9]{8,19})-of-([0-9]{5,9})")
_PARTIAL = re.compile(r"rank-([0-9]{5,9})\.json")
_IDLE_SECONDS = 600.0  # ranks that torchrun starts again may leave a folder alone for a while

Key = tuple[int, int]  # step, number of ranks that saved


class Listing(dict[Key, dict[int, tuple[int, int]]]):
    """The parts on a host: by (step, ranks) and rank, the bytes of its pieces and of their manifest."""

    def encode(self) -> bytes:
        """As JSON, the smallest way."""
        rows = [[*key, [[rank, *sizes] for rank, sizes in parts.items()]] for key, parts in self.items()]
        return json.dumps(rows, separators=(",", ":")).encode()

    @staticmethod
    def decode(text: bytes) -> Listing:
        """From JSON."""
        return Listing(
            {
                (step, num_ranks): {rank: (shard, partial) for rank, shard, partial in parts}
                for step, num_ranks, parts in json.loads(text)
            }
        )


def folder_of(environ: Mapping[str, str], run_folder: Path, run_id: str) -> Path | None:
    """Where the ranks of a job keep their copies on this host; None where nobody would start them again.

    A launcher's name for a job may be that of another, so the run's folder and id are part of the name.
    """
    job = environ.get("TORCHELASTIC_RUN_ID")
    return None if job is None else copies_folder(job, run_folder, run_id)


def copies_folder(job: str, run_folder: Path, run_id: str) -> Path:
    """The folder of the copies of a run, in a job."""
    return job_folder(f"copies {job}\n{run_folder.resolve()}\n{run_id}")


def job_folder(name: str) -> Path:
    """The folder of this name, which says whose it is."""
    if not SHARED_MEMORY.is_dir():
        raise CheckpointError(f"checkpoint.memory_every needs {SHARED_MEMORY}, which this system does not have")
    return SHARED_MEMORY / f"{_PREFIX}{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def claim(folder: Path) -> IO[str]:
    """Use a folder for as long as the file that is returned is open; remove those that nobody uses."""
    _sweep(folder)
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _is_own(folder):
            raise CheckpointError(f"{folder} belongs to somebody else, or is no folder; remove it")
        folder.chmod(0o700)
        try:
            file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (the caller's)
        except FileNotFoundError:  # another job's sweep has just removed the folder
            continue
        fcntl.flock(file, fcntl.LOCK_SH)
        if _is_at(file.fileno(), folder / LOCK):
            return file
        file.close()  # it was removed while this process waited for the lock


def _sweep(own: Path) -> None:
    for folder in own.parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        if folder != own:
            with suppress(OSError):  # another sweep was faster, or it is not this user's to open
                _remove_if_idle(folder)


def _remove_if_idle(folder: Path) -> None:
    if not _is_own(folder):
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > _IDLE_SECONDS and _is_at(lock, folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, and this user's."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def parts_name(key: Key) -> str:
    """The folder of a step's parts."""
    return f"parts-{key[0]:08d}-of-{key[1]:05d}"


def files_of(parts: Path, rank: int) -> tuple[Path, Path]:
    """A part's pieces and, written after them, its manifest."""
    return parts / shard_name(rank), parts / partial_name(rank)


def listing(folder: Path) -> Listing:
    """The parts that are in a folder of this user's, each with its manifest."""
    found = Listing()
    for path in sorted(folder.iterdir()) if _is_own(folder) else []:
        match = _PARTS.fullmatch(path.name)
        if match is None:
            continue
        with suppress(FileNotFoundError):  # removed meanwhile
            ranks = [int(partial[1]) for name in os.listdir(path) if (partial := _PARTIAL.fullmatch(name))]
            found[int(match[1]), int(match[2])] = {rank: _sizes(path, rank) for rank in sorted(ranks)}
    return found


def complete_steps(folder: Path) -> list[int]:
    """The steps of which this host alone holds every part."""
    return sorted(step for (step, num_ranks), parts in listing(folder).items() if len(parts) == num_ranks)


def _sizes(parts: Path, rank: int) -> tuple[int, int]:
    shard, partial = files_of(parts, rank)
    return shard.stat().st_size if shard.exists() else 0, partial.stat().st_size


def assemble(parts: Path, whole: Path, num_ranks: int) -> None:
    """Make a checkpoint of the parts of all ranks, without copying them."""
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(parents=True)
    manifests = []
    for rank in range(num_ranks):
        shard, partial = files_of(parts, rank)
        manifests.append(decode(partial.read_bytes(), complete=False))
        if shard.exists():
            os.link(shard, whole / shard.name)
    (whole / MANIFEST).write_bytes(encode(merge(manifests)))


def mapped(path: Path, size_bytes: int) -> Tensor:
    """A file's bytes, to read or to write: it is made if it is not there. Its room is taken first, or refused by an
    OSError: to write to a mapped file that finds no room ends the process (SIGBUS).
    """
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_size < size_bytes or status.st_blocks * 512 < size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        if is_new:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)


def no_room(folder: Path, error: OSError) -> CheckpointError:
    """What to say of copies that found no room, or could not be written for another reason."""
    if error.errno != errno.ENOSPC:
        return CheckpointError(f"cannot write to {folder}: {error.strerror or error}")
    return CheckpointError(
        f"shared memory is full ({folder}, {free_bytes(folder):,} bytes are free); make it larger (mount -o "
        f"remount,size=... {SHARED_MEMORY}), or leave checkpoint.memory_every out"
    )


def free_bytes(folder: Path) -> int:
    """The memory that files in this folder may still take."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = re.search(r"^MemAvailable:\s+([0-9]+) kB$", meminfo.read_text(), re.MULTILINE)
        if available is not None:
            free = min(free, int(available[1]) * 1024)
    return free
