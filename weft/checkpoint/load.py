"""Loads checkpoints: checks one and reads the regions that this rank needs, whatever layout saved it.

Opening reads the manifest and the header of every file, but no tensor. Reading copies the overlap of each stored piece
with the wanted region from memory-mapped files. The chunks that it reads are hashed first, each once per opened
checkpoint. Nothing is ever unpickled.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.checkpoint.folder import latest, step_name, step_of, steps
from weft.checkpoint.manifest import (
    DTYPE_NAMES,
    HASH_CHUNK_BYTES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    StoredPiece,
    TensorEntry,
    chunk_hashes,
    decode,
    manifest_hash,
    num_chunks,
)
from weft.checkpoint.region import Region, overlap
from weft.errors import CheckpointError, DamagedError, FormatError

__all__ = ["Checkpoint", "latest", "steps"]

Value = TypeVar("Value")
MAX_REASON = 1000  # characters of an error that are shown
# Errors of a process, a host or a file server. Another process, or the same one later, may read the same file.
_NAMES = "ENOMEM ESTALE EMFILE ENFILE EAGAIN EINTR EBUSY EACCES EPERM ENOLCK ETIMEDOUT ECONNREFUSED ECONNRESET"
_NAMES += " ECONNABORTED ENOTCONN ESHUTDOWN ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH"
_HOST_ERRORS = frozenset(getattr(errno, name) for name in _NAMES.split())
_PICKLED_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp")


class Checkpoint:
    """A complete checkpoint: its `step`, its `state` (JSON), and its tensors by name and kind."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.previous: str | None = None
        manifest = self._open_manifest()
        self.step: int = manifest.step
        self.state: dict[str, Any] = manifest.state
        self.previous = manifest.previous
        self._entries = {(entry.kind, entry.name): entry for entry in manifest.entries}
        self._files = {name: self._open_shard(name, manifest) for name in manifest.files}
        self._check_headers(manifest)
        self._verified: set[tuple[str, str, int]] = set()

    def entries(self, kind: str | None = None) -> list[TensorEntry]:
        """The stored tensors of one kind, or of all: the name, kind, dtype, global shape and pieces of each."""
        return [entry for entry in self._entries.values() if kind in (None, entry.kind)]

    def read(self, name: str, kind: str) -> Tensor:
        """Read a whole tensor, for use at once: the memory of one that is stored in one piece is that of its file."""
        entry = self._entry(name, kind)
        whole = Region.whole(entry.shape)
        if len(entry.pieces) == 1 and entry.pieces[0].region == whole:
            return self._stored(entry.pieces[0], np.array([[0, 0, whole.size]])).reshape(entry.shape)
        return self.read_region(name, kind, whole).reshape(entry.shape)

    def read_region(
        self, name: str, kind: str, region: Region, out: Tensor | None = None, cast: bool = False
    ) -> Tensor:
        """Read the elements of a region as a 1-D tensor, into `out` if given. If `out` has another dtype, raises
        CheckpointError unless `cast`.
        """
        entry = self._entry(name, kind)
        what = f"{kind} {name!r} of {self.path}"
        if region.shape != entry.shape:
            raise CheckpointError(f"{what} has shape {entry.shape}, the model wants {tuple(region.shape)}")
        if out is not None and out.shape != (region.size,):
            raise CheckpointError(f"{what}: the region has {region.size} elements, `out` has shape {tuple(out.shape)}")
        if out is not None and out.dtype != entry.dtype and not cast:
            raise CheckpointError(f"{what} is {entry.dtype}, `out` is {out.dtype}; pass cast=True to convert")
        # Many short copies to a device or with a cast are slow: gather on the host, then copy once.
        straight = out is not None and out.device.type == "cpu" and out.dtype == entry.dtype
        local = out if out is not None and straight else torch.empty(region.size, dtype=entry.dtype)
        with torch.no_grad():
            for piece in entry.pieces:
                runs = overlap(piece.region, region)
                if len(runs):
                    copy_runs(runs, self._stored(piece, runs), local)
            return local if out is None or straight else out.copy_(local)

    def stated(self, key: str, kind: type[Value]) -> Value:
        """Returns a value of the state. Raises CheckpointError if it is not of the type `kind`: another program may
        have written the manifest.
        """
        value = self.state.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"{self.path / MANIFEST} cannot be used: its state has no {kind.__name__} {key!r}; it was not saved by "
                f"weft train"
            )
        return value

    def _entry(self, name: str, kind: str) -> TensorEntry:
        if (kind, name) not in self._entries:
            raise CheckpointError(f"{self.path} has no {kind} {name!r}; it is of another model or optimizer")
        return self._entries[kind, name]

    def _open_manifest(self) -> Manifest:
        path = self.path / MANIFEST
        if not self.path.is_dir():
            found = "is a file" if self.path.exists() else "does not exist"
            raise CheckpointError(
                f"{self.path} {found}; give a run folder, a checkpoint folder or, where one is read, a Hugging Face "
                f"folder"
            )
        self._refuse_unreadable(self.path, os.R_OK | os.X_OK)
        pickled = sorted(name for name in os.listdir(self.path) if name.endswith(_PICKLED_SUFFIXES))
        if pickled:
            raise CheckpointError(f"{self.path / pickled[0]}: weft never unpickles; export it with safetensors first")
        if not path.is_file():
            newest = latest(self.path)
            advice = f"; did you mean {newest}?" if newest else ""
            raise CheckpointError(f"{self.path} has no {MANIFEST}, so it is no complete checkpoint{advice}")
        self._refuse_unreadable(path, os.R_OK)
        try:
            is_huge = path.stat().st_size > MAX_MANIFEST_BYTES
            raw = b"" if is_huge else path.read_bytes()
        except (OSError, MemoryError) as error:
            self._refuse_unread(MANIFEST, error)
        if is_huge:
            self._refuse(MANIFEST, f"it has more than {MAX_MANIFEST_BYTES} bytes")
        try:
            manifest = decode(raw)
        except FormatError as error:
            raise FormatError(f"{path}: {_one_line(str(error))}") from None
        except CheckpointError as error:
            self._refuse(MANIFEST, str(error))
        if step_of(self.path.name) not in (None, manifest.step):
            self._refuse(MANIFEST, f"it is of step {manifest.step}, not of the step in the folder's name")
        return manifest

    def _open_shard(self, name: str, manifest: Manifest) -> Any:
        path = self.path / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != manifest.files[name]:
                self._refuse(name, f"it has {status.st_size} bytes, the manifest says {manifest.files[name]}")
            self._refuse_unreadable(path, os.R_OK)
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            self._refuse(name, str(error))
        except (OSError, RuntimeError, MemoryError) as error:
            self._refuse_unread(name, error)

    def _check_headers(self, manifest: Manifest) -> None:
        """Raise DamagedError unless each file lists exactly the keys, dtypes and lengths that the manifest states."""
        stated: dict[str, dict[str, tuple[str, list[int]]]] = {name: {} for name in self._files}
        for entry in manifest.entries:
            for piece in entry.pieces:
                stated[piece.file][piece.key] = (DTYPE_NAMES[entry.dtype], [piece.region.size])
        for name, file in self._files.items():
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            found = {key: (part.get_dtype(), part.get_shape()) for key, part in slices.items()}
            if found != stated[name]:
                self._refuse(name, "its header does not list the keys, dtypes and lengths of the manifest")

    def _stored(self, piece: StoredPiece, runs: npt.NDArray[np.int64]) -> Tensor:
        """A piece in the memory of its file, of which the runs are read."""
        stored: Tensor = self._files[piece.file].get_tensor(piece.key)
        self._verify(piece, stored, runs)
        return stored

    def _verify(self, piece: StoredPiece, stored: Tensor, runs: npt.NDArray[np.int64]) -> None:
        """Check the hashes of the chunks of a piece that the runs read."""
        begin = runs[:, 0] * stored.itemsize // HASH_CHUNK_BYTES
        last = ((runs[:, 0] + runs[:, 2]) * stored.itemsize - 1) // HASH_CHUNK_BYTES
        depth = np.zeros(num_chunks(len(stored), stored.dtype) + 1, np.int64)
        np.add.at(depth, begin, 1)
        np.add.at(depth, last + 1, -1)
        read = np.flatnonzero(np.cumsum(depth)).tolist()
        chunks = [chunk for chunk in read if (piece.file, piece.key, chunk) not in self._verified]
        if chunk_hashes(stored, chunks) != [piece.sha256[chunk] for chunk in chunks]:
            self._refuse(piece.file, f"the bytes of {piece.key!r} do not match their SHA-256")
        self._verified.update((piece.file, piece.key, chunk) for chunk in chunks)

    def _refuse_unreadable(self, path: Path, mode: int) -> None:
        """Raise CheckpointError if the permission to read is missing. The file is not damaged, so no older checkpoint
        may be used instead.
        """
        if not os.access(path, mode, effective_ids=True):
            raise CheckpointError(f"{path} may not be read by user {os.geteuid()}; give it the permission")

    def _refuse_unread(self, file: str, error: Exception) -> NoReturn:
        """Raise CheckpointError if the host lacks memory or its file server fails, because the file is not damaged
        then. Otherwise raise DamagedError.
        """
        if isinstance(error, MemoryError) or _errno(error) in _HOST_ERRORS:
            raise CheckpointError(
                f"{self.path / file} cannot be read on this host now: {_one_line(str(error))}; the checkpoint is left "
                f"as it is. Free memory, or look at the file system, and start again"
            ) from error
        self._refuse(file, str(error))

    def _refuse(self, file: str, why: str) -> NoReturn:
        raise DamagedError(f"{self.path / file} cannot be used: {_one_line(why)}; {self._advice()}")

    def _advice(self) -> str:
        """Text that says which checkpoint to use instead. The manifest, if it could be read, has the hash of the
        manifest before it.
        """
        own = step_of(self.path.name)
        earlier = [step for step in steps(self.path.parent) if own is not None and step < own]
        if not earlier:
            return "there is no earlier checkpoint beside it"
        previous = self.path.parent / step_name(earlier[-1])
        with suppress(OSError):
            if self.previous not in (None, manifest_hash(previous)):
                return f"the earlier checkpoint {previous} is not the one that this was saved after"
        return f"use the previous checkpoint {previous}"


def _errno(error: Exception) -> int | None:
    """The number of a system error. Errors of libraries outside Python contain only its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((code for code in _HOST_ERRORS if f"{os.strerror(code)} (" in str(error)), None)


def _one_line(text: str) -> str:
    """Shorten an error's text and escape its control characters, because it may quote the file's contents."""
    shown = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)


def copy_runs(runs: npt.NDArray[np.int64], stored: Tensor, out: Tensor) -> None:
    """Copy each run. Runs of equal length at equal distances, as in a tensor split by columns, are one strided copy."""
    for group in _evenly_spaced_groups(runs):
        length = int(group[0, 2])
        if len(group) == 1:  # torch copies views of the form below by one thread
            begin, at = int(group[0, 0]), int(group[0, 1])
            out[at : at + length].copy_(stored[begin : begin + length])
            continue
        # [runs, length] views of the 1-D tensors
        source, target = (
            tensor[int(at[0]) : int(at[-1]) + length].unfold(0, length, int(at[1] - at[0]))
            for tensor, at in ((stored, group[:, 0]), (out, group[:, 1]))
        )
        target.copy_(source)


def _evenly_spaced_groups(runs: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Group consecutive runs of equal length and distance. The flat ranges may shorten the first or last run."""
    step = np.diff(runs, axis=0)
    # [runs - 1]: whether a run and the next can be in one copy
    even = ((step[:, :2] > 0).all(axis=1) & (step[:, 2] == 0)).tolist()
    turns = np.flatnonzero((step[1:] != step[:-1]).any(axis=1)) + 1  # runs whose distances on either side differ
    first = 0
    while first < len(runs):
        last = first
        if first < len(even) and even[first]:
            turn = int(np.searchsorted(turns, first + 1))
            last = int(turns[turn]) if turn < len(turns) else len(runs) - 1
        yield runs[first : last + 1]
        first = last + 1
