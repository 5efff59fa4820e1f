"""The collectives of local ranks in the order of their calls, which the process that started them compares.

All ranks of a group must start the same collectives in the same order. Ranks that call different blocks (layers that
each drops by its own random numbers) do not: they hang, fail in the middle of a message, or compute with the wrong
block's parameters. Each rank writes its calls to a file of its own, so that the first difference is found and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "WEFT_CALLS"
# Axes whose ranks run the same blocks, one after another.
_SAME_BLOCKS = ("shard", "expert", "experts", "x", "y", "context")


class CallOrder:
    """Writes the collectives of this rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._file = open(_path(folder, rank), "ab", buffering=0)  # noqa: SIM115 (open as long as the rank runs)

    def add(self, ranks: list[int], axis: str, operation: str, num_bytes: int | None, inside: str) -> None:
        """Write a call among `ranks`, made inside the forward or backward of a block.

        `num_bytes` is None if ranks may give different numbers of bytes.
        """
        members, block = ",".join(map(str, ranks)), inside if axis.split(".")[0] in _SAME_BLOCKS else ""
        size = "" if num_bytes is None else f" of {num_bytes:,} bytes"
        self._file.write(f"{members}\t{operation}{size} over {axis}\t{block}\n".encode())


def call_order(environ: Mapping[str, str], rank: int) -> CallOrder | None:
    """Returns the writer of a local rank; None if nobody compares calls."""
    folder = environ.get(FOLDER_VARIABLE)
    return None if folder is None else CallOrder(Path(folder), rank)


def find_difference(folder: Path, num_ranks: int) -> str | None:
    """Describes the first collective that is not the same on all ranks of its group; None if all are so far."""
    calls: dict[str, dict[int, list[tuple[str, str]]]] = {}
    for rank in range(num_ranks):
        path = _path(folder, rank)
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.count("\t") == 2:  # else it is being written
                members, call, block = line.split("\t")
                calls.setdefault(members, {}).setdefault(rank, []).append((call, block))
    for by_rank in calls.values():
        first, *others = by_rank.items()
        for rank, own in others:
            pairs = zip(first[1], own, strict=False)
            number, found = next(((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1]), (0, None))
            if found is not None:
                return _describe(number, (first[0], *found[0]), (rank, *found[1]))
    return None


def _describe(number: int, one: tuple[int, str, str], other: tuple[int, str, str]) -> str:
    places = [f"rank {rank} is in {f'the {block}' if block else call}" for rank, call, block in (one, other)]
    return (
        f"ranks take different ways through the model: {places[0]} where {places[1]} (collective {number} among them: "
        f"{one[1]}, and {other[1]}); ranks that share parameters must call the same blocks in the same order: choose "
        f"blocks by numbers that are equal on all ranks, or use data, or shard stage 1 or 2, for ranks that differ"
    )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"calls-{rank}"
