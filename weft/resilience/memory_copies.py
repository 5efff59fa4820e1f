"""Copies of the state in memory, so that a job which loses a rank goes on from a step ago and not from an hour ago.

    /dev/shm/weft-.../parts-00000006-of-00004/   rank-00000.safetensors, then rank-00000.json, as a checkpoint has them

Every n steps each rank writes its pieces there in the background: memory of the host, which outlives the rank. Where
there are several hosts it also gives them to the rank at its place on the next host (a ring), over a process group of
its own. The copy before is kept until every rank has the new one, so a kill at any instant leaves one that is whole.
After a restart the ranks tell each other which parts their hosts hold; parts that a host lacks are broadcast, and what
comes together is a checkpoint like any other: hashed, and readable under any plan.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from weft.checkpoint.folder import step_name
from weft.checkpoint.manifest import Manifest
from weft.checkpoint.save import Piece, Saver
from weft.comm import Axis, Ledger, all_gather, all_reduce, broadcast, shift
from weft.errors import CheckpointError, DamagedError
from weft.launch.environment import Place
from weft.mesh import Mesh
from weft.resilience.shared_memory import (
    Key,
    Listing,
    assemble,
    claim,
    files_of,
    free_bytes,
    listing,
    mapped,
    no_room,
    parts_name,
)

_LISTING_BYTES = 1 << 15
_ROOM = 0.9  # of the memory that is free


class MemoryCopies(Saver):
    """Every rank makes one, and all call its methods at the same steps."""

    def __init__(self, folder: Path, mesh: Mesh, place: Place, say: Callable[[str], None]) -> None:
        self._claim = claim(folder)
        super().__init__(folder, mesh.rank, mesh.plan.num_ranks, "memory")
        self._world, self._place, self._say = mesh["world"], place, say
        self._hop = place.num_local_ranks  # to the same place on the next host
        # With a ledger of its own: it waits in another thread, and what it says is no part of a step.
        self._ring = replace(mesh.with_own_group("world", "memory"), ledger=Ledger()) if place.num_hosts > 1 else None
        self._is_on: bool | None = None  # not known before the first save
        self._last: Key | None = None
        self._held: list[Listing] = []

    # --- saving

    @property
    def has_saved(self) -> bool:
        """Whether memory for a copy has been reserved, as the first save does."""
        return self._is_on is not None

    def save(self, step: int, pieces: Iterable[Piece], state: dict[str, Any], asynchronous: bool = True) -> None:
        """Keep a copy of the pieces, unless there is no room; forget copies older than the one before."""
        if self._is_on is False:
            return
        pieces = list(pieces)
        problem = self._problem(pieces)
        self._is_on = all_agree(problem is None, self._world)  # so every rank has its part of the last copy
        if not self._is_on:
            self._say(f"no copies are kept in memory from here on: {problem or 'another rank cannot'}")
            return
        if self._last is not None and self._place.local_rank == 0:
            for key in listing(self.folder):
                if key < self._last:
                    shutil.rmtree(self.folder / parts_name(key), ignore_errors=True)
        self._last = (step, self._num_ranks)
        super().save(step, pieces, state, asynchronous)

    def close(self) -> None:
        """The run has ended as it should: nobody needs the copies any more."""
        problem = self._problem([]) if self._is_on else None
        all_agree(problem is None, self._world)
        if self._place.local_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    def _problem(self, pieces: Sequence[Piece]) -> str | None:
        """Why this rank cannot save, if it cannot: the last save failed, or the first would not fit."""
        try:
            self.wait()
        except (CheckpointError, RuntimeError) as error:
            return str(error)
        if self._is_on is not None:
            return None
        if self._ring is not None and self._place.num_ranks != self._hop * self._place.num_hosts:
            return "the hosts run different numbers of ranks"
        num_copies = 2 if self._ring is None else 4  # the last and the next one; the neighbour's too
        need_bytes = sum(piece.tensor.nbytes for piece in pieces) * self._hop * num_copies
        free = free_bytes(self.folder)
        if need_bytes > free * _ROOM:
            return f"they need {need_bytes:,} bytes in {self.folder}, and {free:,} are free"
        return None

    def _write(self, attempt: int, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        """Write this rank's part and, where there are several hosts, give it to the next one. Ranks that cannot write
        still take part in what others wait for.
        """
        parts = self.folder / parts_name((manifest.step, self._num_ranks))
        problem: Exception | None = None
        try:
            self._write_part(parts, manifest, pieces)
        except Exception as error:
            problem = error
        if self._ring is not None:
            try:
                _pass_on(parts, self._ring, self._hop, has_part=problem is None)
            except OSError as error:
                problem = problem or error
        if isinstance(problem, SafetensorError) and f"os error {errno.ENOSPC}" in str(problem):
            problem = OSError(errno.ENOSPC, str(problem))
        if isinstance(problem, OSError):
            raise no_room(self.folder, problem) from problem
        if problem is not None:
            raise problem

    # --- loading

    def steps(self) -> list[int]:
        """The steps of which the hosts together hold every part, newest first; the same on every rank."""
        self._held = _gather(listing(self.folder), self._world)
        keys = {key for held in self._held for key in held}
        self._complete = {key[0]: key for key in sorted(keys) if None not in self._holders(key)}
        return sorted(self._complete, reverse=True)

    def assemble(self, step: int) -> Path:
        """A checkpoint of a step that `steps` found, on this host; parts that only other hosts hold are fetched."""
        key = self._complete[step]
        parts, whole = self.folder / parts_name(key), self.folder / "whole" / step_name(step)
        problem: str | None = None
        try:
            self._fetch(key, parts)
            if self._place.local_rank == 0:
                assemble(parts, whole, key[1])
        except (CheckpointError, OSError) as error:
            problem = str(error)
        if not all_agree(problem is None, self._world):
            raise DamagedError(f"{parts} cannot be used: {problem or 'another host could not put it together'}")
        return whole

    def forget_after(self, step: int) -> None:
        """The run goes on from a step: what was put together is not needed, and later copies are done again."""
        if self._place.local_rank == 0:
            shutil.rmtree(self.folder / "whole", ignore_errors=True)
            for key in listing(self.folder):
                if key[0] > step:
                    shutil.rmtree(self.folder / parts_name(key), ignore_errors=True)
        all_agree(True, self._world)  # before anybody writes such a step anew

    def _holders(self, key: Key) -> list[int | None]:
        """For each part, the first rank whose host holds it."""
        ranks = range(len(self._held))
        return [next((r for r in ranks if part in self._held[r].get(key, {})), None) for part in range(key[1])]

    def _fetch(self, key: Key, parts: Path) -> None:
        """Get the parts that this host lacks. Every rank takes part in every broadcast."""
        own = self._held[self._world.index].get(key, {})
        problem: OSError | None = None
        for part, holder in enumerate(self._holders(key)):
            assert holder is not None, "the step is complete"
            if all(part in held.get(key, {}) for held in self._held):
                continue
            parts.mkdir(exist_ok=True)
            for path, size_bytes in zip(files_of(parts, part), self._held[holder][key][part], strict=True):
                if size_bytes:
                    has = part in own
                    data = mapped(path, size_bytes) if has else torch.empty(size_bytes, dtype=torch.uint8)
                    broadcast(data, self._world, holder).wait()
                    if self._place.local_rank == 0 and not has:
                        try:
                            path.write_bytes(data.numpy().data)
                        except OSError as error:
                            problem = error  # the others wait for this rank in the next broadcast
        if problem is not None:
            raise problem


def all_agree(mine: bool, world: Axis) -> bool:
    """Whether all ranks say yes."""
    flag = torch.tensor([int(mine)], dtype=torch.int32)
    all_reduce(flag, world, "min").wait()
    return bool(flag.item())


def _gather(own: Listing, world: Axis) -> list[Listing]:
    """What the host of each rank holds."""
    text = Listing.encode(own)
    if len(text) > _LISTING_BYTES:
        text = Listing.encode(Listing())  # a host of thousands of ranks: it has nothing to offer
    part = torch.zeros(_LISTING_BYTES, dtype=torch.uint8)
    part[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    whole = torch.empty(world.degree * _LISTING_BYTES, dtype=torch.uint8)
    all_gather(whole, part, world).wait()
    return [Listing.decode(row.numpy().tobytes().rstrip(b"\0")) for row in whole.view(world.degree, -1)]


def _pass_on(parts: Path, ring: Axis, hop: int, has_part: bool) -> None:
    """Give this rank's part to the rank on the next host, and keep that of the rank on the host before.

    Ranks first tell each other how large their parts are, and then whether they have room: a rank without room, or
    without a part, keeps nobody waiting.
    """
    before = (ring.index - hop) % ring.degree
    own, other = files_of(parts, ring.index), files_of(parts, before)
    sizes = torch.tensor([path.stat().st_size if has_part and path.exists() else 0 for path in own])
    told = torch.empty_like(sizes)
    shift([told], [sizes], ring, hop).wait()
    temporaries = [target.with_name(f"{target.name}.tmp") for target in other]
    received = [torch.empty(1, dtype=torch.uint8) for _ in other]  # all say something
    problem: OSError | None = None
    try:
        parts.mkdir(exist_ok=True)
        for index, size_bytes in enumerate(told.tolist()):
            if size_bytes:
                received[index] = mapped(temporaries[index], size_bytes)
    except OSError as error:
        problem = error
        received = [torch.empty(1, dtype=torch.uint8) for _ in other]
    has_room, is_taken = torch.tensor([int(problem is None)]), torch.empty(1, dtype=torch.int64)
    shift([is_taken], [has_room], ring, -hop).wait()
    for path, own_bytes, data in zip(own, sizes.tolist(), received, strict=True):
        is_sent = own_bytes and is_taken.item()
        shift([data], [mapped(path, own_bytes) if is_sent else torch.zeros(1, dtype=torch.uint8)], ring, hop).wait()
    if problem is not None:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
        raise problem
    for temporary, target, size_bytes in zip(temporaries, other, told.tolist(), strict=True):
        if size_bytes:
            temporary.rename(target)  # the manifest comes last: with it the part counts
