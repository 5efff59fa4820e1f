"""The collectives of ranks in the order of their calls, which the process that started them compares.

All ranks of a group must start the same collectives in the same order. Ranks that call different blocks (layers that
each drops by its own random numbers) do not: they hang, fail in the middle of a message, or compute with the wrong
block's parameters. Each rank writes its calls to a file of its own, so that the first difference is found and named.

A proof keeps all calls, and they are compared while it runs. A run that trains keeps the last thousand of each rank (a
flight record), and they are compared when ranks hang or fail.
"""

from __future__ import annotations

import mmap
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "WEFT_CALLS"
NUM_KEPT = 1000  # calls of a flight record
_LINE_BYTES = 256  # of a flight record; text that is too long is cut
_MAX_NAMED = 16  # a larger group is known by its size and a hash of its ranks
# Axes whose ranks run the same blocks, one after another.
_SAME_BLOCKS = ("shard", "expert", "experts", "x", "y", "context")


class CallOrder:
    """Writes the collectives of this rank: all of them, or the last `num_kept`."""

    def __init__(self, folder: Path, rank: int, num_kept: int | None = None) -> None:
        self.rank = rank
        self._num_kept, self._num_written = num_kept, 0
        self._numbers: Counter[str] = Counter()  # calls of each group so far
        self._file = open(_path(folder, rank), "w+b", buffering=0)  # noqa: SIM115 (open as long as the rank runs)
        self._kept: mmap.mmap | None = None
        if num_kept is not None:
            self._file.write(bytes(num_kept * _LINE_BYTES))
            self._kept = mmap.mmap(self._file.fileno(), num_kept * _LINE_BYTES)

    def add(self, ranks: list[int], axis: str, operation: str, num_bytes: int | None, inside: str) -> None:
        """Write a call among `ranks`, made inside the forward or backward of a block.

        `num_bytes` is None if ranks may give different numbers of bytes.
        """
        members, block = _members(ranks), inside if axis.split(".")[0] in _SAME_BLOCKS else ""
        size = "" if num_bytes is None else f" of {num_bytes:,} bytes"
        self._numbers[members] += 1
        line = f"{members}\t{self._numbers[members]}\t{operation}{size} over {axis}\t{block}".encode()
        if self._kept is None or self._num_kept is None:
            self._file.write(line + b"\n")
            return
        start = self._num_written % self._num_kept * _LINE_BYTES
        self._kept[start : start + _LINE_BYTES] = line[: _LINE_BYTES - 1].ljust(_LINE_BYTES - 1) + b"\n"
        self._num_written += 1


def call_order(environ: Mapping[str, str], rank: int) -> CallOrder | None:
    """Returns the writer of a local rank; None if nobody compares calls."""
    folder = environ.get(FOLDER_VARIABLE)
    return None if folder is None else CallOrder(Path(folder), rank)


def find_difference(folder: Path, num_ranks: int) -> str | None:
    """Describes the first collective that is not the same on all ranks of its group; None if all are so far."""
    calls: dict[str, dict[int, dict[int, tuple[str, str]]]] = {}  # by group, rank and number
    for rank in range(num_ranks):
        path = _path(folder, rank)
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            fields = line.strip("\0").split("\t")
            if len(fields) == 4 and fields[1].isdecimal():  # else it is being written
                members, counted, call, block = fields
                calls.setdefault(members, {}).setdefault(rank, {})[int(counted)] = call, block.rstrip()
    for by_rank in calls.values():
        first, *others = by_rank.items()
        for rank, own in others:
            common = sorted(first[1].keys() & own.keys())
            number = next((one for one in common if first[1][one] != own[one]), None)
            if number is not None:
                return _describe(number, (first[0], *first[1][number]), (rank, *own[number]))
    return None


def _members(ranks: list[int]) -> str:
    text = ",".join(map(str, ranks))
    return text if len(ranks) <= _MAX_NAMED else f"{len(ranks)} ranks {zlib.crc32(text.encode()):08x}"


def _describe(number: int, one: tuple[int, str, str], other: tuple[int, str, str]) -> str:
    places = [f"rank {rank} is in {f'the {block}' if block else call}" for rank, call, block in (one, other)]
    return (
        f"ranks take different ways through the model: {places[0]} where {places[1]} (collective {number} among them: "
        f"{one[1]}, and {other[1]}); ranks that share parameters must call the same blocks in the same order: choose "
        f"blocks by numbers that are equal on all ranks, or use data, or shard stage 1 or 2, for ranks that differ"
    )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"calls-{rank}"
