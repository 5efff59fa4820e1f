"""The folder of memory copies on one host: which parts it holds, whether they fit, and which process may remove it.

It is in /dev/shm, which is memory, and where every user may create folders. The folders of this user are private;
folders of other users are neither read nor removed. A job that ends removes its folder. The next job removes the folder
of a job that was killed: a lock shows that no process uses it. The lock belongs to the open file (flock), so a process
can test the lock of a folder that it holds without releasing it.
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
_IDLE_SECONDS = 600.0  # while torchrun restarts ranks, no process may hold the folder for a while

CopyKey = tuple[int, int]  # the step, and the number of ranks that saved


class PartListing(dict[CopyKey, dict[int, tuple[int, int]]]):
    """The parts on a host: by (step, number of ranks) and rank, the bytes of its pieces and of their manifest."""

    def encode(self) -> bytes:
        """Encode as compact JSON."""
        rows = [[*key, [[rank, *sizes] for rank, sizes in parts.items()]] for key, parts in self.items()]
        return json.dumps(rows, separators=(",", ":")).encode()

    @staticmethod
    def decode(text: bytes) -> PartListing:
        """Decode the JSON of `encode`."""
        return PartListing(
            {
                (step, num_ranks): {rank: (shard, partial) for rank, shard, partial in parts}
                for step, num_ranks, parts in json.loads(text)
            }
        )


def folder_of(environ: Mapping[str, str], run_folder: Path, run_id: str) -> Path | None:
    """The folder of the copies of a job on this host; None if no launcher would restart the ranks.

    Two jobs may have the same name in their launchers, so the run's folder and id are part of the folder's name.
    """
    job = environ.get("TORCHELASTIC_RUN_ID")
    return None if job is None else copies_folder(job, run_folder, run_id)


def copies_folder(job: str, run_folder: Path, run_id: str) -> Path:
    """The folder of the copies of a run in a job."""
    return job_folder(f"copies {job}\n{run_folder.resolve()}\n{run_id}")


def job_folder(name: str) -> Path:
    """A folder in shared memory whose path is the user id and a hash of `name`."""
    if not SHARED_MEMORY.is_dir():
        raise CheckpointError(f"checkpoint.memory_every needs {SHARED_MEMORY}, which this system does not have")
    return SHARED_MEMORY / f"{_PREFIX}{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def claim(folder: Path) -> IO[str]:
    """Create and lock a folder. It is in use as long as the returned file is open. Also removes this user's folders
    that no process uses.
    """
    for other in folder.parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        if other != folder:
            with suppress(OSError):  # another job has removed it, or this user may not open it
                _remove_if_idle(other)
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _is_own(folder):
            raise CheckpointError(f"{folder} belongs to somebody else, or is no folder; remove it")
        folder.chmod(0o700)
        try:
            file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (the caller's)
        except FileNotFoundError:  # another job has just removed the folder
            continue
        fcntl.flock(file, fcntl.LOCK_SH)
        if _is_at(file.fileno(), folder / LOCK):
            return file
        file.close()  # the folder was removed while this process waited for the lock


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
    """Whether the path is a folder that belongs to this user."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def parts_name(key: CopyKey) -> str:
    """The name of the folder of a step's parts."""
    return f"parts-{key[0]:08d}-of-{key[1]:05d}"


def part_files(parts: Path, rank: int) -> tuple[Path, Path]:
    """The files of a rank's part: its pieces and, written after them, its manifest."""
    return parts / shard_name(rank), parts / partial_name(rank)


def list_parts(folder: Path) -> PartListing:
    """The parts in a folder of this user that have a manifest."""
    found = PartListing()
    for path in sorted(folder.iterdir()) if _is_own(folder) else []:
        match = _PARTS.fullmatch(path.name)
        if match is None:
            continue
        with suppress(FileNotFoundError):  # the folder was removed meanwhile
            ranks = [int(partial[1]) for name in os.listdir(path) if (partial := _PARTIAL.fullmatch(name))]
            found[int(match[1]), int(match[2])] = {rank: _sizes(path, rank) for rank in sorted(ranks)}
    return found


def complete_steps(folder: Path) -> list[int]:
    """The steps of which this host holds every part."""
    return sorted(step for (step, num_ranks), parts in list_parts(folder).items() if len(parts) == num_ranks)


def _sizes(parts: Path, rank: int) -> tuple[int, int]:
    shard, partial = part_files(parts, rank)
    return shard.stat().st_size if shard.exists() else 0, partial.stat().st_size


def assemble(parts: Path, whole: Path, num_ranks: int) -> None:
    """Create a checkpoint in the folder `whole` from the parts of all ranks, by hard links."""
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(parents=True)
    manifests = []
    for rank in range(num_ranks):
        shard, partial = part_files(parts, rank)
        manifests.append(decode(partial.read_bytes(), complete=False))
        if shard.exists():
            os.link(shard, whole / shard.name)
    (whole / MANIFEST).write_bytes(encode(merge(manifests)))


def map_file(path: Path, size_bytes: int) -> Tensor:
    """Map a file's bytes, to read or write; the file is created if it does not exist. Its memory is allocated first,
    which may raise OSError: a write to a mapped file for which there is no memory would kill the process (SIGBUS).
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


def write_error(folder: Path, error: OSError) -> CheckpointError:
    """The error to raise for copies that could not be written, for lack of memory or another reason."""
    if error.errno != errno.ENOSPC:
        return CheckpointError(f"cannot write to {folder}: {error.strerror or error}")
    return CheckpointError(
        f"shared memory is full ({folder}, {free_bytes(folder):,} bytes are free); make it larger (mount -o "
        f"remount,size=... {SHARED_MEMORY}), or leave checkpoint.memory_every out"
    )


def free_bytes(folder: Path) -> int:
    """The bytes of memory that are free for files in this folder."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = re.search(r"^MemAvailable:\s+([0-9]+) kB$", meminfo.read_text(), re.MULTILINE)
        if available is not None:
            free = min(free, int(available[1]) * 1024)
    return free
