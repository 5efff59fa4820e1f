"""Saving: every rank writes its pieces in the background, rank 0 publishes them by one rename.

    .saving-step-00000100-<token>-<attempt>/     rank-00003.safetensors, then rank-00003.json (temp + rename)
    step-00000100/                               the same folder once manifest.json is in it and all is fsynced

Ranks meet only in the shared folder: there is no collective that a background thread could mix up with training's.
Rank 0 waits for all partial manifests, checks them as the loader would, and renames. A kill at any instant leaves
the previous checkpoint or the new one. The token, one per run, and the attempt keep apart what crashed attempts left.
"""

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoint.folder import failed_name, partial_name, shard_name, step_name, steps
from weft.checkpoint.manifest import (
    DTYPE_NAMES,
    MANIFEST,
    Entry,
    Manifest,
    StoredPiece,
    check_name,
    chunk_hash,
    decode,
    encode,
    manifest_hash,
    merge,
    num_chunks,
    parse_json,
)
from weft.checkpoint.region import Region
from weft.checkpoint.snapshot import HostBuffer
from weft.errors import CheckpointError

_POLL_SECONDS = 0.02
logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Piece:
    """The part of a named tensor that this rank writes. Of replicas, one rank passes the piece."""

    name: str
    kind: str
    region: Region
    tensor: Tensor


class Saver:
    """Saves checkpoints of one run. Every rank makes one, and all call `save` with the same steps."""

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
    ) -> None:
        """`token`: a random word that all ranks agree on. `keep_last`: None keeps all. `at`: see every disk action."""
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
        self._abandoned: str | None = None  # why rank 0 is not to wait for more parts of the save under way
        self._part_ended = threading.Event()  # this rank's part of the save under way is durable, or will not be
        self._buffer = HostBuffer()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._final: Path | None = None
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self._remove_leftovers(self._attempt)
                probe = self.folder / f".saving-step-0-{token}-0"  # what cannot be written is told before training
                probe.mkdir()
                probe.rmdir()

    def save(self, step: int, pieces: Iterable[Piece], state: dict[str, Any], asynchronous: bool = True) -> None:
        """Copy the pieces now and write them in the background, or write them as they are and wait for it. `state` is
        JSON; rank 0's is stored.

        One save is in flight at a time: this waits for the one before, and raises its error. A step that is there
        already is left as it is.
        """
        self._attempt += 1  # first of all, so that ranks count alike whatever fails
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
        there = [tensor for tensor in tensors if asynchronous or tensor.is_cuda]
        copied = iter(self._buffer.copy(there))
        # What is on the host already and waited for needs no room of its own, which there may not be.
        copies = [next(copied) if asynchronous or tensor.is_cuda else tensor.reshape(-1) for tensor in tensors]
        stored = [replace(piece, tensor=copy) for piece, copy in zip(pieces, copies, strict=True)]
        self._part_ended.clear()
        self._thread = threading.Thread(target=self._run, args=(self._attempt, manifest, stored))
        self._thread.start()
        if not asynchronous:
            self.wait()

    @property
    def num_saves(self) -> int:
        """How many have begun; all ranks count alike."""
        return self._attempt

    @property
    def is_in_flight(self) -> bool:
        """Whether a save has begun whose end nobody has waited for."""
        return self._thread is not None

    def without(self, lost: int, num_saves: Sequence[int]) -> None:
        """Go on without a rank, when living ranks have begun so many saves. One that lacks its part is given up."""
        is_even = min(num_saves) == max(num_saves)
        self._given_up = 0 if is_even else max(num_saves)
        name = "" if self._final is None else f".saving-{self._final.name}-{self._token}-{self._attempt}"
        if not (is_even and (self.folder / name / partial_name(lost)).exists()):
            self._abandoned = "a rank was lost before it had saved its part"
        if self._thread is not None:
            self._thread.join()  # what it has to say is said by the next save
        self._abandoned = None
        self._rank -= self._rank > lost
        self._num_ranks -= 1

    def wait(self, published: bool = False) -> None:
        """Return when this rank's part is durable (on rank 0: published), or raise why it is not.

        With `published` every rank waits until the last save has its final name.
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
        """End the save under way on all ranks: published, or given up as soon as one rank's part has failed.

        Every rank calls this; `agree(mine)` says whether all ranks say yes. Returns why the step was not saved, as far
        as this rank knows. After it no rank writes, and what is in the folder stays as it is.
        """
        if self._thread is not None:
            self._part_ended.wait()
        if not agree(self._error is None):
            self._abandoned = "another rank could not save its part"
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error, self._abandoned, self._final = self._error, None, None, None
        agree(True)  # rank 0 has published by now, or never will
        return error

    def _run(self, attempt: int, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        try:
            with _explained(self.folder):
                self._write(attempt, manifest, pieces)
        except BaseException as error:
            self._error = error  # wait() raises it in the caller's thread
        finally:
            self._part_ended.set()

    def _write(self, attempt: int, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        """Make this rank's part durable, and on rank 0 publish."""
        final = self.folder / step_name(manifest.step)
        saving = self.folder / f".saving-{final.name}-{self._token}-{attempt}"
        if self._rank == 0:
            self._remove_leftovers(attempt)  # a failed attempt of this run may still fill the disk
        try:
            own = self._write_part(saving, manifest, pieces)
        except Exception:
            with suppress(OSError):  # an empty file mostly finds room where nothing else does
                (saving / failed_name(self._rank)).touch()
            raise
        self._part_ended.set()
        if self._rank == 0:
            self._publish(own, saving, final)
            self._retain(manifest.step)

    def _write_part(self, saving: Path, manifest: Manifest, pieces: Sequence[Piece]) -> Manifest:
        """Write this rank's pieces to a folder and, last of all, their partial manifest, which it returns."""
        saving.mkdir(exist_ok=True)
        shard = saving / shard_name(self._rank)
        entries, tensors = _index(shard.name, pieces)
        files = {}
        if tensors:
            self._do(f"write {shard.name}", save_file, tensors, shard)
            shard.chmod(saving.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
            self._do(f"fsync {shard.name}", _fsync, shard)
            files = {shard.name: shard.stat().st_size}
        own = replace(manifest, files=files, entries=entries)
        partial = shard.with_suffix(".json")
        temporary = partial.with_suffix(".json.tmp")
        self._write_file(temporary, encode(own))
        self._do(f"fsync {saving.name}", _fsync, saving)
        # From here on rank 0 may rename the folder: its own fsync makes this last rename durable.
        self._do(f"rename {partial.name}", temporary.rename, partial)
        return own

    def _publish(self, own: Manifest, saving: Path, final: Path) -> None:
        """Merge the ranks' manifests and give the folder its name."""
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
        decode(data)  # what the loader would refuse is not published
        self._write_file(saving / MANIFEST, data)
        for partial in partials:
            self._do(f"remove {partial.name}", partial.unlink)
        self._do(f"fsync {saving.name}", _fsync, saving)
        self._do(f"rename {final.name}", saving.rename, final)
        self._do(f"fsync {self.folder.name}", _fsync, self.folder)

    def _previous(self, step: int) -> str | None:
        """The hash of the manifest before this step's: each checkpoint vouches for the one before. None if there is no
        such manifest, or it cannot be read now: this save is no worse for it.
        """
        with suppress(OSError):
            earlier = [other for other in steps(self.folder) if other < step]
            return manifest_hash(self.folder / step_name(earlier[-1])) if earlier else None
        return None

    def _retain(self, saved: int) -> None:
        """Delete what the retention rules do not keep; never what was just saved. It is published: what cannot be
        deleted is told.
        """
        if self._keep_last is None:
            return
        complete: list[int] = []
        with suppress(OSError):
            complete = steps(self.folder)
        for step in complete[: -self._keep_last]:
            if step == saved or (self._keep_every is not None and step % self._keep_every == 0):
                continue
            path = self.folder / step_name(step)
            doomed = self.folder / f".deleting-{path.name}-{self._token}"
            try:
                self._do(f"rename {doomed.name}", path.rename, doomed)
                self._do(f"remove {doomed.name}", shutil.rmtree, doomed)
            except OSError as error:
                logger.warning(
                    "weft: %s is not needed any more and cannot be deleted: %s; the next save tries again", path, error
                )

    def _remove_leftovers(self, attempt: int) -> None:
        """Remove what no running save can own: ranks ahead of this one write under the same token, later attempts."""
        for path in self.folder.iterdir():
            saving = re.fullmatch(r"\.saving-step-[0-9]+-([A-Za-z0-9]+)-([0-9]+)", path.name)
            alive = saving and saving[1] == self._token and int(saving[2]) >= attempt
            if path.name.startswith((".saving-step-", ".deleting-step-")) and not alive:
                shutil.rmtree(path, ignore_errors=True)  # a dying process may still write there; next time, then

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
def _explained(folder: Path) -> Iterator[None]:
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


def _index(file: str, pieces: Sequence[Piece]) -> tuple[tuple[Entry, ...], dict[str, Tensor]]:
    """The entries that describe the pieces, and the tensors by their key in the file."""
    entries: dict[tuple[str, str], Entry] = {}
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        dtype, shape = piece.tensor.dtype, piece.region.shape
        entry = entries.get((piece.kind, piece.name), Entry(piece.name, piece.kind, dtype, shape, ()))
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(f"the pieces of {piece.kind} {piece.name!r} differ in dtype or global shape")
        key = f"{piece.kind}/{piece.name}@{len(entry.pieces)}"  # a kind has no '/', a number no '@': one key each
        hashes = tuple(chunk_hash(piece.tensor, chunk) for chunk in range(num_chunks(piece.region.size, dtype)))
        stored = StoredPiece(file, key, piece.region, hashes)
        entries[piece.kind, piece.name] = replace(entry, pieces=(*entry.pieces, stored))
        tensors[key] = piece.tensor
    return tuple(entries.values()), tensors
