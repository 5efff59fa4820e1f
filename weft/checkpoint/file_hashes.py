"""Hashes of whole files, remembered for as long as the files stay as they are.

A file that has changed anywhere has another hash. A thread hashes 1 to 2 GB/s, so a record keeps the hash of each file
beside its inode, size and times. Programs cannot set the time of an inode's last change (ctime), so a file with an
equal entry is not read again. A copy of it is, and has the same hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from weft.checkpoint.manifest import chunk_hashes, num_chunks

_NEW_SECONDS = 2.0  # a file may change again within one tick of its file system's clock, so new files are not recorded
_known: dict[str, str] = {}  # hashes by `_identity`, in this process


def file_hashes(files: Sequence[Path], record: Path) -> list[str]:
    """Returns a hash of the bytes of each file. One process of those that share the record hashes, others wait for it.

    A record that cannot be written is done without.
    """
    with _shared(record) as known:
        found = []
        for path in files:
            identity = _identity(path)
            if identity not in known:
                known[identity] = _hash(path)
            found.append(known[identity])
            if _is_new(path) or _identity(path) != identity:
                del known[identity]
        return found


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _is_new(path: Path) -> bool:
    return time.time() - path.stat().st_ctime < _NEW_SECONDS


def _hash(path: Path) -> str:
    """The SHA-256 of the SHA-256 of a file's chunks, which threads share."""
    if not path.stat().st_size:
        return hashlib.sha256().hexdigest()
    content = torch.from_numpy(np.memmap(path, np.uint8, "c"))  # private: torch refuses arrays that are read-only
    chunks = chunk_hashes(content, range(num_chunks(len(content), content.dtype)))
    return hashlib.sha256("".join(chunks).encode()).hexdigest()


@contextmanager
def _shared(record: Path) -> Iterator[dict[str, str]]:
    """A context with the hashes that this process and the record know. At its end the record has all of them."""
    descriptor = -1
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(record, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
    try:
        with suppress(OSError, ValueError, TypeError):  # not there, cut off by a crash, or of another program
            _known.update(json.loads(record.read_text(encoding="utf-8")))
        before = dict(_known)
        yield _known
        if descriptor >= 0 and _known != before:
            with suppress(OSError):  # a full disk
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_known).encode(), 0)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
