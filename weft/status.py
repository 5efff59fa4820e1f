"""Where each rank is: a page that it shares with whoever watches it, and that outlives it, whatever kills it.

A rank writes its step and what it does into a mapped file, which costs a microsecond; the agent reads it when the rank
has died or does not answer. What ended a rank, if it could still say so, is a small JSON file beside it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import ConfigError, LostRankError, WeftError

FOLDER_VARIABLE = "WEFT_STATUS"
_PAGE = struct.Struct("<qd240s")  # steps done, when this was written, what the rank does
_NO_STEP = -1


@dataclass(frozen=True)
class Seen:
    """A rank as it was last seen: how many steps of the run were done, what it did, and when (time.monotonic)."""

    step: int
    doing: str
    at: float


@dataclass(frozen=True)
class Failure:
    """The error that ended a rank. `final` ones would come again: a restart does not help."""

    message: str
    trace: str
    status: int
    final: bool
    at: float


class Status:
    """This rank's page; in memory of its own where nobody watches."""

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        folder = environ.get(FOLDER_VARIABLE)
        self._step, self._page = _NO_STEP, mmap.mmap(-1, _PAGE.size)
        if folder is not None:
            with open(_page_path(Path(folder), rank), "w+b") as file:
                file.truncate(_PAGE.size)
                self._page = mmap.mmap(file.fileno(), _PAGE.size)

    def note(self, doing: str, step: int | None = None) -> None:
        """Say what the rank does now, and how many steps are done."""
        self._step = self._step if step is None else step
        _PAGE.pack_into(self._page, 0, self._step, time.monotonic(), doing.encode()[:240])


def last_seen(folder: Path, rank: int) -> Seen | None:
    """What a rank wrote last; None if it did not come so far, or has done no step yet."""
    path = _page_path(folder, rank)
    if not path.exists() or path.stat().st_size < _PAGE.size:
        return None
    step, at, doing = _PAGE.unpack(path.read_bytes())
    return None if step == _NO_STEP else Seen(step, doing.rstrip(b"\0").decode(errors="replace"), at)


def record_failure(environ: Mapping[str, str], rank: int, error: BaseException) -> int:
    """Leave a word on what ended this rank; the status to leave with."""
    final = isinstance(error, WeftError) and not isinstance(error, LostRankError)
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    status = 2 if isinstance(error, ConfigError) else 1
    failure = Failure(message, "".join(traceback.format_exception(error)), status, final, time.monotonic())
    if FOLDER_VARIABLE in environ:
        path = _failure_path(Path(environ[FOLDER_VARIABLE]), rank)
        path.with_suffix(".tmp").write_text(json.dumps(asdict(failure)))
        path.with_suffix(".tmp").rename(path)
    return status


def failures(folder: Path, num_ranks: int) -> dict[int, Failure]:
    """The errors that ranks left, the earliest first: later ones are mostly that they lost a rank."""
    paths = {rank: _failure_path(folder, rank) for rank in range(num_ranks)}
    found = {rank: Failure(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}
    return dict(sorted(found.items(), key=lambda item: item[1].at))


def clear(folder: Path) -> None:
    """Forget the ranks that were."""
    for path in folder.iterdir():
        os.unlink(path)


def _page_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.page"


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.failure"
