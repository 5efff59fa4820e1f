"""Copies of the training state in host memory, from which a job resumes after it has lost a rank.

    /dev/shm/weft-.../parts-00000006-of-00004/   rank-00000.safetensors, then rank-00000.json, as in a checkpoint

Every n steps each rank writes its pieces there in the background. This memory of the host remains when the rank dies,
so the job resumes from a recent step, not from the last checkpoint on disk. With several hosts, each rank also sends
its pieces to the rank with the same local index on the next host (a ring), over its own process group. The previous
copy is kept until every rank has the new one, so a kill at any time leaves a complete copy. After a restart, ranks
exchange lists of the parts that their hosts hold, and broadcast parts that a host lacks. The assembled parts are an
ordinary checkpoint: hashed, and readable under any plan.
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
from weft.launch.environment import RankInfo
from weft.mesh import Mesh
from weft.resilience.shared_memory import (
    CopyKey,
    PartListing,
    assemble,
    claim,
    free_bytes,
    list_parts,
    map_file,
    part_files,
    parts_name,
    write_error,
)

_LISTING_BYTES = 1 << 15
_ROOM = 0.9  # the share of the free memory that copies may use


class MemoryCopies(Saver):
    """Saves and assembles copies of the state in host memory. Every rank creates one, and all ranks call its methods at
    the same steps.
    """

    def __init__(self, folder: Path, mesh: Mesh, rank_info: RankInfo, say: Callable[[str], None]) -> None:
        self._claim = claim(folder)
        super().__init__(folder, mesh.rank, mesh.plan.num_ranks, "memory")
        self._world, self._rank_info, self._say = mesh["world"], rank_info, say
        self._hop = rank_info.num_local_ranks  # the distance to the rank with the same local index on the next host
        # It has its own ledger because it waits in another thread and its messages are not part of a step.
        self._ring = (
            replace(mesh.with_own_group("world", "memory"), ledger=Ledger()) if rank_info.num_hosts > 1 else None
        )
        self._is_enabled: bool | None = None  # not known before the first save
        self._last: CopyKey | None = None
        self._listings: list[PartListing] = []

    # --- saving

    @property
    def has_saved(self) -> bool:
        """Whether memory for a copy has been reserved, as the first save does."""
        return self._is_enabled is not None

    def save(self, step: int, pieces: Iterable[Piece], state: dict[str, Any], asynchronous: bool = True) -> None:
        """Save a copy of the pieces, unless there is not enough memory. Deletes copies older than the previous one."""
        if self._is_enabled is False:
            return
        pieces = list(pieces)
        problem = self._problem(pieces)
        self._is_enabled = all_agree(problem is None, self._world)  # if true, every rank has its part of the last copy
        if not self._is_enabled:
            self._say(f"no copies are kept in memory from here on: {problem or 'another rank cannot'}")
            return
        if self._last is not None and self._rank_info.local_rank == 0:
            for key in list_parts(self.folder):
                if key < self._last:
                    shutil.rmtree(self.folder / parts_name(key), ignore_errors=True)
        self._last = (step, self._num_ranks)
        super().save(step, pieces, state, asynchronous)

    def close(self) -> None:
        """Delete the copies, after the run has ended normally."""
        problem = self._problem([]) if self._is_enabled else None
        all_agree(problem is None, self._world)
        if self._rank_info.local_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    def _problem(self, pieces: Sequence[Piece]) -> str | None:
        """The reason why this rank cannot save: the last save failed, or the first would not fit. None if it can."""
        try:
            self.wait()
        except (CheckpointError, RuntimeError) as error:
            return str(error)
        if self._is_enabled is not None:
            return None
        if self._ring is not None and self._rank_info.num_ranks != self._hop * self._rank_info.num_hosts:
            return "the hosts run different numbers of ranks"
        num_copies = 2 if self._ring is None else 4  # the previous and the new copy; with a ring, the neighbour's too
        need_bytes = sum(piece.tensor.nbytes for piece in pieces) * self._hop * num_copies
        free = free_bytes(self.folder)
        if need_bytes > free * _ROOM:
            return f"they need {need_bytes:,} bytes in {self.folder}, and {free:,} are free"
        return None

    def _write(self, attempt: int, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        """Write this rank's part and, with several hosts, send it to the next one. A rank that cannot write still takes
        part in the messages that others wait for.
        """
        parts = self.folder / parts_name((manifest.step, self._num_ranks))
        problem: Exception | None = None
        try:
            self._write_part(parts, manifest, pieces)
        except Exception as error:
            problem = error
        if self._ring is not None:
            try:
                _exchange_parts(parts, self._ring, self._hop, has_part=problem is None)
            except OSError as error:
                problem = problem or error
        if isinstance(problem, SafetensorError) and f"os error {errno.ENOSPC}" in str(problem):
            problem = OSError(errno.ENOSPC, str(problem))
        if isinstance(problem, OSError):
            raise write_error(self.folder, problem) from problem
        if problem is not None:
            raise problem

    # --- loading

    def steps(self) -> list[int]:
        """The steps of which the hosts together hold every part, the newest first. The same on every rank."""
        self._listings = _gather(list_parts(self.folder), self._world)
        keys = {key for held in self._listings for key in held}
        self._complete = {key[0]: key for key in sorted(keys) if None not in self._holders(key)}
        return sorted(self._complete, reverse=True)

    def assemble(self, step: int) -> Path:
        """Assemble the checkpoint of a step that `steps` returned, and return its folder on this host. Parts that only
        other hosts hold are received from them.
        """
        key = self._complete[step]
        parts, whole = self.folder / parts_name(key), self.folder / "whole" / step_name(step)
        problem: str | None = None
        try:
            self._fetch(key, parts)
            if self._rank_info.local_rank == 0:
                assemble(parts, whole, key[1])
        except (CheckpointError, OSError) as error:
            problem = str(error)
        if not all_agree(problem is None, self._world):
            raise DamagedError(f"{parts} cannot be used: {problem or 'another host could not put it together'}")
        return whole

    def forget_after(self, step: int) -> None:
        """Delete the assembled checkpoint and the copies of later steps, after the run has resumed from `step`."""
        if self._rank_info.local_rank == 0:
            shutil.rmtree(self.folder / "whole", ignore_errors=True)
            for key in list_parts(self.folder):
                if key[0] > step:
                    shutil.rmtree(self.folder / parts_name(key), ignore_errors=True)
        all_agree(True, self._world)  # a barrier, before a rank writes a later step again

    def _holders(self, key: CopyKey) -> list[int | None]:
        """For each part, the first rank whose host holds it; None if no host does."""
        ranks = range(len(self._listings))
        return [next((r for r in ranks if part in self._listings[r].get(key, {})), None) for part in range(key[1])]

    def _fetch(self, key: CopyKey, parts: Path) -> None:
        """Receive the parts that this host lacks. Every rank takes part in every broadcast."""
        own = self._listings[self._world.index].get(key, {})
        problem: OSError | None = None
        for part, holder in enumerate(self._holders(key)):
            assert holder is not None, "the step is complete"
            if all(part in held.get(key, {}) for held in self._listings):
                continue
            for path, size_bytes in zip(part_files(parts, part), self._listings[holder][key][part], strict=True):
                if size_bytes:
                    has = part in own
                    data = torch.zeros(size_bytes, dtype=torch.uint8)
                    # Errors are raised later: the other ranks wait for this one in the broadcasts.
                    try:
                        data = map_file(path, size_bytes) if has else data
                    except OSError as error:
                        problem = error
                    broadcast(data, self._world, holder).wait()
                    try:
                        if self._rank_info.local_rank == 0 and not has:
                            parts.mkdir(exist_ok=True)
                            path.write_bytes(data.numpy().data)
                    except OSError as error:
                        problem = error
        if problem is not None:
            raise problem


def all_agree(mine: bool, world: Axis) -> bool:
    """Whether `mine` is true on all ranks of the axis."""
    flag = torch.tensor([int(mine)], dtype=torch.int32)
    all_reduce(flag, world, "min").wait()
    return bool(flag.item())


def _gather(own: PartListing, world: Axis) -> list[PartListing]:
    """Gather, for each rank, the list of the parts that its host holds."""
    text = PartListing.encode(own)
    if len(text) > _LISTING_BYTES:
        text = PartListing.encode(PartListing())  # too long for thousands of ranks per host: report no parts
    part = torch.zeros(_LISTING_BYTES, dtype=torch.uint8)
    part[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    whole = torch.empty(world.degree * _LISTING_BYTES, dtype=torch.uint8)
    all_gather(whole, part, world).wait()
    return [PartListing.decode(row.numpy().tobytes().rstrip(b"\0")) for row in whole.view(world.degree, -1)]


def _exchange_parts(parts: Path, ring: Axis, hop: int, has_part: bool) -> None:
    """Send this rank's part to the rank on the next host, and store the part of the rank on the previous host.

    Ranks first exchange the sizes of their parts, and then whether they have memory for them. So a rank without memory,
    or without a part, does not make others wait.
    """
    before = (ring.index - hop) % ring.degree
    own, other = part_files(parts, ring.index), part_files(parts, before)
    problems: list[OSError] = []  # raised at the end, because other ranks wait for this one's messages
    outgoing, sizes = [torch.zeros(1, dtype=torch.uint8) for _ in own], torch.zeros(len(own), dtype=torch.int64)
    try:
        for index, path in enumerate(own):
            num_bytes = path.stat().st_size if has_part and path.exists() else 0
            outgoing[index] = map_file(path, num_bytes) if num_bytes else outgoing[index]
            sizes[index] = num_bytes
    except OSError as error:
        problems.append(error)
        sizes.zero_()
    incoming_sizes = torch.empty_like(sizes)
    shift([incoming_sizes], [sizes], ring, hop).wait()
    temporaries = [target.with_name(f"{target.name}.tmp") for target in other]
    received = [torch.empty(1, dtype=torch.uint8) for _ in other]  # every rank sends at least one byte
    has_room, is_taken = torch.tensor([1]), torch.empty(1, dtype=torch.int64)
    try:
        parts.mkdir(exist_ok=True)
        for index, size_bytes in enumerate(incoming_sizes.tolist()):
            if size_bytes:
                received[index] = map_file(temporaries[index], size_bytes)
    except OSError as error:
        problems.append(error)
        has_room.zero_()
        received = [torch.empty(1, dtype=torch.uint8) for _ in other]
    shift([is_taken], [has_room], ring, -hop).wait()
    for part, num_bytes, data in zip(outgoing, sizes.tolist(), received, strict=True):
        is_sent = num_bytes and is_taken.item()
        shift([data], [part if is_sent else torch.zeros(1, dtype=torch.uint8)], ring, hop).wait()
    for temporary, target, size_bytes in zip(temporaries, other, incoming_sizes.tolist(), strict=True):
        if not has_room.item():
            temporary.unlink(missing_ok=True)
        elif size_bytes:
            temporary.rename(target)  # the manifest is last: a part counts if its manifest exists
    if problems:
        raise problems[0]
