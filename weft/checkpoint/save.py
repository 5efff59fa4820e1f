"""Saves checkpoints: every rank writes its pieces in the background, and rank 0 publishes them by one rename.

    .saving-step-00000100-<token>-<attempt>/     rank-00003.safetensors, then rank-00003.json (temp + rename)
    step-00000100/                               the same folder after manifest.json is in it and all is fsynced

Ranks communicate only through the shared folder, so no collective of a background thread can interleave with those of
training. Rank 0 waits for all partial manifests, checks them as the loader does, and renames the folder. A kill at any
time leaves the previous checkpoint or the new one. The token, one per run, and the number of the attempt distinguish
the folder of a save from those of crashed attempts.
"""

import json
import logging
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoint.folder import failed_name, partial_name, shard_name, step_name, steps
from weft.checkpoint.manifest import (
    DTYPE_NAMES,
    MANIFEST,
    Manifest,
    StoredPiece,
    TensorEntry,
    check_name,
    chunk_hashes,
    decode,
    encode,
    manifest_hash,
    merge,
    num_chunks,
    parse_json,
)
from weft.checkpoint.region import Region
from weft.errors import CheckpointError

_POLL_SECONDS = 0.02
logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Piece:
    """The part of a named tensor that this rank writes. If several ranks hold the same part, only one passes it."""

    name: str
    kind: str
    region: Region
    tensor: Tensor


class Saver:
    """Saves checkpoints of one run. Every rank creates one, and all ranks call `save` with the same steps."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        num_ranks: int,
        token: str,
        keep_last: int | None = None,
        keep_every: int | None = None,
        timeout_seconds: float = 600.0,
        at: Callable[[str], None] = lambda point: None,
        tries_folder: bool = True,
    ) -> None:
        """`token` is a random word that is the same on all ranks. `keep_last` is the number of checkpoints to keep;
        None keeps all. Checkpoints of multiples of `keep_every` steps are also kept. `at` is called before and after
        every disk action, for tests. With `tries_folder`, one that cannot be written is refused now.
        """
        if not re.fullmatch(r"[A-Za-z0-9]{4,64}", token):
            raise CheckpointError(f"token {token!r} must be 4 to 64 letters and digits")
        if not 0 <= rank < num_ranks:
            raise CheckpointError(f"rank {rank} is outside the {num_ranks} ranks")
        if (keep_last is not None and keep_last < 1) or (keep_every is not None and keep_every < 1):
            raise CheckpointError(f"keep_last = {keep_last} and keep_every = {keep_every} must be 1 or more, or None")
        self.folder = Path(folder)
        self._rank, self._num_ranks, self._token = rank, num_ranks, token
        self._keep_last, self._keep_every = keep_last, keep_every
        self._timeout_seconds = timeout_seconds
        self._at = at
        self._attempt = self._given_up = 0
        self._abandoned: str | None = None  # why rank 0 must not wait for more parts of the current save
        self._part_ended = threading.Event()  # set when this rank's part of the current save is durable or has failed
        self._buffer = HostBuffer()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._final: Path | None = None
        with _explain_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self._remove_leftovers(self._attempt)
            if rank == 0 and tries_folder:
                probe = self.folder / f".saving-step-0-{token}-0"
                probe.mkdir()
                probe.rmdir()

    def save(self, step: int, pieces: Iterable[Piece], state: dict[str, Any], asynchronous: bool = True) -> None:
        """Copy the pieces now and write them in the background; if not `asynchronous`, write them without a copy and
        wait. `state` is JSON; rank 0's is stored.

        One save runs at a time: this waits for the save before, and raises its error. A step that is already saved
        stays unchanged.
        """
        self._attempt += 1  # before anything can fail, so that the count is the same on all ranks
        self.wait()
        if self._attempt <= self._given_up:
            raise CheckpointError(f"step {step} was not saved: a rank was lost when others had saved their part of it")
        pieces = list(pieces)
        _check(step, pieces)
        manifest = Manifest(step, self._num_ranks, _json_copy(state), None, {}, ())
        self._final = self.folder / step_name(step)
        if (self._final / MANIFEST).exists():
            logger.warning("%s is complete already and is left as it is", self._final)
            return
        tensors = [piece.tensor.detach() for piece in pieces]
        to_copy = [tensor for tensor in tensors if asynchronous or tensor.is_cuda]
        copied = iter(self._buffer.copy(to_copy))
        # A synchronous save of host tensors needs no copy, for which there may be no memory.
        copies = [next(copied) if asynchronous or tensor.is_cuda else tensor.reshape(-1) for tensor in tensors]
        stored = [replace(piece, tensor=copy) for piece, copy in zip(pieces, copies, strict=True)]
        self._part_ended.clear()
        self._thread = threading.Thread(target=self._run, args=(self._attempt, manifest, stored))
        self._thread.start()
        if not asynchronous:
            self.wait()

    @property
    def num_saves(self) -> int:
        """The number of saves that have begun; the same on all ranks."""
        return self._attempt

    @property
    def is_in_flight(self) -> bool:
        """Whether a save has begun that was not waited for yet."""
        return self._thread is not None

    def continue_without(self, lost: int, num_saves: Sequence[int]) -> None:
        """Continue after rank `lost` was lost. `num_saves` has the number of saves that each other rank has begun. A
        save that lacks the lost rank's part is abandoned.
        """
        is_even = min(num_saves) == max(num_saves)
        self._given_up = 0 if is_even else max(num_saves)
        name = "" if self._final is None else f".saving-{self._final.name}-{self._token}-{self._attempt}"
        if not (is_even and (self.folder / name / partial_name(lost)).exists()):
            self._abandoned = "a rank was lost before it had saved its part"
        if self._thread is not None:
            self._thread.join()  # the next save raises its error
        self._abandoned = None
        self._rank -= self._rank > lost
        self._num_ranks -= 1

    def wait(self, published: bool = False) -> None:
        """Return when this rank's part is durable (on rank 0: published), or raise the error of the save.

        With `published`, every rank waits until the last save has its final name.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if published and self._final is not None:
            manifest = self._final / MANIFEST
            self._poll(manifest.exists, lambda: f"rank 0 did not publish {self._final}")

    def settle(self, agree: Callable[[bool], bool]) -> BaseException | None:
        """End the current save on all ranks: it is published, or abandoned as soon as one rank's part has failed.

        Every rank calls this. `agree(value)` returns whether `value` is true on all ranks. Returns this rank's error if
        the step was not saved. Afterwards no rank writes to the folder.
        """
        if self._thread is not None:
            self._part_ended.wait()
        if not agree(self._error is None):
            self._abandoned = "another rank could not save its part"
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error, self._abandoned, self._final = self._error, None, None, None
        agree(True)  # a barrier: rank 0 has published by now, or will not
        return error

    def _run(self, attempt: int, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        try:
            with _explain_errors(self.folder):
                self._write(attempt, manifest, pieces)
        except BaseException as error:
            self._error = error  # wait() raises it in the caller's thread
        finally:
            self._part_ended.set()

    def _write(self, attempt: int, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        """Write this rank's part durably. Rank 0 then publishes the checkpoint."""
        final = self.folder / step_name(manifest.step)
        saving = self.folder / f".saving-{final.name}-{self._token}-{attempt}"
        if self._rank == 0:
            self._remove_leftovers(attempt)  # a failed attempt of this run may still fill the disk
        try:
            own = self._write_part(saving, manifest, pieces)
        except Exception:
            with suppress(OSError):  # an empty file can mostly be created even on a full disk
                (saving / failed_name(self._rank)).touch()
            raise
        self._part_ended.set()
        if self._rank == 0:
            self._publish(own, saving, final)
            self._retain(manifest.step)

    def _write_part(self, saving: Path, manifest: Manifest, pieces: Sequence[Piece]) -> Manifest:
        """Write this rank's pieces to a folder and then their partial manifest, which it returns."""
        saving.mkdir(exist_ok=True)
        shard = saving / shard_name(self._rank)
        entries, tensors = _index(shard.name, pieces)
        files = {}
        if tensors:
            self._do(f"write {shard.name}", save_file, tensors, shard)
            shard.chmod(saving.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read
            self._do(f"fsync {shard.name}", _fsync, shard)
            files = {shard.name: shard.stat().st_size}
        own = replace(manifest, files=files, entries=entries)
        partial = shard.with_suffix(".json")
        temporary = partial.with_suffix(".json.tmp")
        self._write_file(temporary, encode(own))
        self._do(f"fsync {saving.name}", _fsync, saving)
        # After this rename rank 0 may rename the folder. Rank 0's fsync makes this rename durable.
        self._do(f"rename {partial.name}", temporary.rename, partial)
        return own

    def _publish(self, own: Manifest, saving: Path, final: Path) -> None:
        """Merge the ranks' manifests and rename the folder to its final name."""
        partials = [saving / partial_name(rank) for rank in range(self._num_ranks)]
        failed = [saving / failed_name(rank) for rank in range(self._num_ranks)]

        def is_decided() -> bool:
            lost = [rank for rank, mark in enumerate(failed) if mark.exists()]
            if lost:
                raise CheckpointError(f"step {own.step} was not published: ranks {lost} could not save their part")
            if self._abandoned is not None:
                raise CheckpointError(f"step {own.step} was not published: {self._abandoned}")
            return all(partial.exists() for partial in partials)

        self._poll(
            is_decided,
            lambda: (
                f"step {own.step} was not published: no part from ranks "
                f"{[rank for rank, partial in enumerate(partials) if not partial.exists()]}"
            ),
        )
        merged = merge([own, *(decode(partial.read_bytes(), complete=False) for partial in partials[1:])])
        data = encode(replace(merged, previous=self._previous(own.step)))
        decode(data)  # raises if the loader would, so that no such checkpoint is published
        self._write_file(saving / MANIFEST, data)
        for partial in partials:
            self._do(f"remove {partial.name}", partial.unlink)
        self._do(f"fsync {saving.name}", _fsync, saving)
        self._do(f"rename {final.name}", saving.rename, final)
        self._do(f"fsync {self.folder.name}", _fsync, self.folder)

    def _previous(self, step: int) -> str | None:
        """The hash of the manifest of the checkpoint before this step, which the new manifest stores. None if there is
        no such manifest, or if it cannot be read now, which is no reason to fail the save.
        """
        with suppress(OSError):
            earlier = [other for other in steps(self.folder) if other < step]
            return manifest_hash(self.folder / step_name(earlier[-1])) if earlier else None
        return None

    def _retain(self, saved: int) -> None:
        """Delete the checkpoints that the retention rules do not keep, but never the one just saved. A checkpoint that
        cannot be deleted is only logged, because the save has succeeded.
        """
        if self._keep_last is None:
            return
        complete: list[int] = []
        with suppress(OSError):
            complete = steps(self.folder)
        for step in complete[: -self._keep_last]:
            if step == saved or (self._keep_every is not None and step % self._keep_every == 0):
                continue
            self.delete(step)

    def delete(self, step: int) -> None:
        """Delete a checkpoint that no rank writes. One that cannot be deleted is only logged."""
        path = self.folder / step_name(step)
        deleted = self.folder / f".deleting-{path.name}-{self._token}"
        try:
            self._do(f"rename {deleted.name}", path.rename, deleted)
            self._do(f"remove {deleted.name}", shutil.rmtree, deleted)
        except OSError as error:
            logger.warning(
                "weft: %s is not needed any more and cannot be deleted: %s; the next save tries again", path, error
            )

    def _remove_leftovers(self, attempt: int) -> None:
        """Remove folders of saves that no longer run. Ranks ahead of this one may already write a later attempt under
        the same token; those are kept.
        """
        for path in self.folder.iterdir():
            saving = re.fullmatch(r"\.saving-step-[0-9]+-([A-Za-z0-9]+)-([0-9]+)", path.name)
            alive = saving and saving[1] == self._token and int(saving[2]) >= attempt
            if path.name.startswith((".saving-step-", ".deleting-step-")) and not alive:
                shutil.rmtree(path, ignore_errors=True)  # a dying process may still write there; the next save retries

    def _write_file(self, path: Path, data: bytes) -> None:
        self._do(f"write {path.name}", path.write_bytes, data)
        self._do(f"fsync {path.name}", _fsync, path)

    def _do(self, action: str, function: Callable[..., object], *arguments: object) -> None:
        self._at(f"before {action}")
        function(*arguments)
        self._at(f"after {action}")

    def _poll(self, ready: Callable[[], bool], failure: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not ready():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{failure()} within {self._timeout_seconds} s. Look for their errors, and whether all ranks see "
                    f"the same folder {self.folder}; earlier checkpoints there are untouched"
                )
            time.sleep(_POLL_SECONDS)


@contextmanager
def _explain_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot save to {folder}: {error}; earlier checkpoints there are untouched. "
            "Give it space or permission, or choose another folder"
        ) from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _json_copy(state: dict[str, Any]) -> dict[str, Any]:
    try:
        copy: dict[str, Any] = parse_json(json.dumps(state, allow_nan=False).encode())
        return copy
    except (TypeError, ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"the state to save must be plain JSON: {error}") from error


def _check(step: int, pieces: Sequence[Piece]) -> None:
    if not 0 <= step < 2**63:
        raise CheckpointError(f"step {step} must be 0 or more and below 2**63")
    for piece in pieces:
        check_name(piece.name, piece.kind)
        if piece.tensor.numel() != piece.region.size:
            raise CheckpointError(
                f"the piece of {piece.kind} {piece.name!r} has {piece.tensor.numel()} elements, its {piece.region} "
                f"has {piece.region.size}"
            )
        if piece.tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(DTYPE_NAMES.values())
            raise CheckpointError(f"{piece.kind} {piece.name!r} has {piece.tensor.dtype}; a checkpoint holds {known}")


def _index(file: str, pieces: Sequence[Piece]) -> tuple[tuple[TensorEntry, ...], dict[str, Tensor]]:
    """Returns the manifest's entries for the pieces, and the tensors by their key in the file."""
    entries: dict[tuple[str, str], TensorEntry] = {}
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        dtype, shape = piece.tensor.dtype, piece.region.shape
        entry = entries.get((piece.kind, piece.name), TensorEntry(piece.name, piece.kind, dtype, shape, ()))
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(f"the pieces of {piece.kind} {piece.name!r} differ in dtype or global shape")
        key = f"{piece.kind}/{piece.name}@{len(entry.pieces)}"  # unique: a kind has no '/', a number no '@'
        hashes = chunk_hashes(piece.tensor, range(num_chunks(piece.region.size, dtype)))
        stored = StoredPiece(file, key, piece.region, tuple(hashes))
        entries[piece.kind, piece.name] = replace(entry, pieces=(*entry.pieces, stored))
        tensors[key] = piece.tensor
    return tuple(entries.values()), tensors


_ALIGNMENT_BYTES = 64


class HostBuffer:
    """Host memory for a copy of a checkpoint's tensors, so that training can go on while a thread writes them.

    One buffer holds all pieces: the first save allocates it, later ones only copy. For CUDA tensors it is page-locked,
    the copies run asynchronously, and one synchronize per device waits for them. The buffer is registered rather than
    allocated as pinned memory, because torch's pinned allocator rounds up to a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize[[int], HostBuffer] | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the tensors to the host. Returns one 1-D tensor each, valid until the next call."""
        sizes_bytes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._reserve(sum(sizes_bytes), page_locked=bool(devices))
        copies = []
        offset = 0
        for tensor, size_bytes in zip(tensors, sizes_bytes, strict=True):
            copy = self._bytes[offset : offset + tensor.nbytes].view(tensor.dtype)
            copies.append(copy.copy_(tensor.detach().reshape(-1), non_blocking=True))
            offset += size_bytes
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _reserve(self, size_bytes: int, page_locked: bool) -> None:
        if size_bytes > len(self._bytes):
            if self._unlock is not None:
                self._unlock()
                self._unlock = None
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8)
        if page_locked and self._unlock is None and size_bytes:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self._bytes.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(self._bytes), 0)))
            self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
