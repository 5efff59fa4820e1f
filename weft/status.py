"""Where each rank is: a page that it shares with whoever watches it, and that outlives it, whatever kills it.

A rank writes its step and what it does into a mapped file, which costs a microsecond; the agent reads it when the rank
has died or does not answer. What ended a rank, if it could still say so, is a small JSON file beside it.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import struct
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import ConfigError, CorruptionError, LostRankError, WeftError

FOLDER_VARIABLE = "WEFT_STATUS"
WAITING = "waiting in "  # how a rank's words begin while it waits for others
_TEXT_BYTES = 208
_PAGE = struct.Struct(f"<qqddd{_TEXT_BYTES}s")  # see Seen
_NO_STEP = -1
_LOST, _TAKEN = "lost.json", "taken-over.json"


@dataclass(frozen=True)
class Seen:
    """A rank as it was last seen: the steps of the run that were done, the collectives that it had entered, how long
    the last step took (0: none was done yet) and how much of that it computed or loaded data, when this was written
    (time.monotonic), and what it did.
    """

    step: int
    num_calls: int
    step_seconds: float
    busy_seconds: float
    at: float
    doing: str

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self.doing.startswith(WAITING)


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
        self._page = mmap.mmap(-1, _PAGE.size)
        if folder is not None:
            with open(_page_path(Path(folder), rank), "w+b") as file:
                file.truncate(_PAGE.size)
                self._page = mmap.mmap(file.fileno(), _PAGE.size)
            # Whoever watches may ask where every thread is. The file stays open for as long as the process.
            faulthandler.register(signal.SIGUSR1, open(stack_path(Path(folder), rank), "w"))  # noqa: SIM115
        self._step, self._phase = _NO_STEP, ""
        self._step_seconds = self._busy_seconds = 0.0
        self._step_began_at = self._waiting_since = time.monotonic()
        self._waited_seconds = 0.0
        self.num_calls = 0
        self._write("")

    def step_begins(self, step: int) -> None:
        """So many steps are done, and the next one begins."""
        now = time.monotonic()
        if self._step != _NO_STEP:
            self._step_seconds = now - self._step_began_at
        self._step, self._step_began_at, self._waited_seconds = step, now, 0.0

    def step_ends(self) -> None:
        """What every rank does in a step is done; what follows (logs, files) some do for all."""
        self._busy_seconds = time.monotonic() - self._step_began_at - self._waited_seconds
        self.phase("between steps")

    def phase(self, doing: str) -> None:
        """What the rank does from here on."""
        self._phase = doing
        self._write(doing)

    def wait_begins(self, what: str) -> None:
        """The rank waits for others, in this."""
        self._waiting_since = time.monotonic()
        self._write(WAITING + what)

    def wait_ends(self) -> None:
        """The rank goes on with what it did."""
        self._waited_seconds += time.monotonic() - self._waiting_since
        self._write(self._phase)

    def _write(self, doing: str) -> None:
        text = doing.encode()[:_TEXT_BYTES]
        times = (self._step_seconds, self._busy_seconds, time.monotonic())
        _PAGE.pack_into(self._page, 0, self._step, self.num_calls, *times, text)


def last_seen(folder: Path, rank: int) -> Seen | None:
    """What a rank wrote last; None if it did not come so far, or has begun no step yet."""
    path = _page_path(folder, rank)
    if not path.exists() or path.stat().st_size < _PAGE.size:
        return None
    step, num_calls, step_seconds, busy_seconds, at, text = _PAGE.unpack(path.read_bytes())
    doing = text.rstrip(b"\0").decode(errors="replace")
    return None if step == _NO_STEP else Seen(step, num_calls, step_seconds, busy_seconds, at, doing)


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank's stacks go when it is sent SIGUSR1."""
    return folder / f"rank-{rank:05d}.stack"


def record_failure(environ: Mapping[str, str], rank: int, error: BaseException) -> int:
    """Leave a word on what ended this rank; the status to leave with."""
    final = isinstance(error, WeftError) and not isinstance(error, (LostRankError, CorruptionError))
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    status = 2 if isinstance(error, ConfigError) else 1
    failure = Failure(message, "".join(traceback.format_exception(error)), status, final, time.monotonic())
    if FOLDER_VARIABLE in environ:
        _write_json(_failure_path(Path(environ[FOLDER_VARIABLE]), rank), asdict(failure))
    return status


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    """At once, or not at all."""
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").rename(path)


def failures(folder: Path, num_ranks: int) -> dict[int, Failure]:
    """The errors that ranks left, the earliest first: later ones are mostly that they lost a rank."""
    paths = {rank: _failure_path(folder, rank) for rank in range(num_ranks)}
    found = {rank: Failure(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}
    return dict(sorted(found.items(), key=lambda item: item[1].at))


@dataclass(frozen=True)
class Lost:
    """A rank that was lost and that the others are to do without; when (time.monotonic) they were told."""

    rank: int
    at: float


@dataclass(frozen=True)
class TakenOver:
    """A stage that another rank has taken over: in which step (from 1), how long after `Lost`."""

    stage: int
    by: int
    step: int
    seconds: float


def tell_lost(folder: Path, lost: Lost) -> None:
    """Let the ranks know that they are to go on without one."""
    _write_json(folder / _LOST, asdict(lost))


def read_lost(folder: Path) -> Lost | None:
    """What they were told, if they were."""
    return Lost(**json.loads((folder / _LOST).read_text())) if (folder / _LOST).exists() else None


def tell_taken_over(folder: Path, taken: TakenOver) -> None:
    """Let the agent know that a stage has been taken over."""
    _write_json(folder / _TAKEN, asdict(taken))


def read_taken_over(folder: Path) -> TakenOver | None:
    """What it was told, if it was."""
    return TakenOver(**json.loads((folder / _TAKEN).read_text())) if (folder / _TAKEN).exists() else None


def clear(folder: Path) -> None:
    """Forget the ranks that were."""
    for path in folder.iterdir():
        os.unlink(path)


def _page_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.page"


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.failure"
