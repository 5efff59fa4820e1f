"""Where each rank is: a page that it shares with whoever watches it, and that outlives it, whatever kills it.

A rank writes its step, what it does and in which block into a mapped file, which costs two microseconds; whoever
watches reads it when the rank has died or does not answer. What ended a rank, if it could still say so, is a small JSON
file beside it.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import ConfigError, CorruptionError, LaunchError, LostRankError, WeftError

FOLDER_VARIABLE = "WEFT_STATUS"
WAITING = "waiting in "  # how a rank's words begin while it waits for others
SAVING = "saving"
GOING_BACK = "loading a checkpoint"
RESERVING = "reserving memory for copies"  # pages of a large buffer are locked, which takes longer than steps do
FILES = (SAVING, GOING_BACK, RESERVING)  # may be silent for as long as a file system, or the kernel, takes
_PAGE = struct.Struct("<qqddd240s144s80s64s")  # see Seen; text that is too long is cut
_NO_STEP = -1
_STACK_POLL_SECONDS = 0.05
_LOST, _TAKEN = "lost.json", "taken-over.json"


@dataclass(frozen=True)
class Seen:
    """A rank as it was last seen: the steps of the run that were done, the collectives that it had entered, how long
    the last step took (0: none was done yet) and how much of that it computed or loaded data, when this was written
    (time.monotonic), and what it did: `inside` which block's forward or backward, if in any. `place` says where it is
    ("host b, pipe stage 2"), `peers` for which ranks it waits, where they are few.
    """

    step: int
    num_calls: int
    step_seconds: float
    busy_seconds: float
    at: float
    doing: str
    inside: str = ""
    place: str = ""
    peers: tuple[int, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self.doing.startswith(WAITING)


@dataclass(frozen=True)
class Failure:
    """The error that ended a rank. `final` ones would come again: a restart does not help. Those of `chance` (flipped
    bits) may come at any time; others come again unless some step was done before.
    """

    message: str
    trace: str
    status: int
    final: bool
    at: float
    chance: bool = False


class Status:
    """This rank's page; in memory of its own where nobody watches."""

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        self.rank, self.place = rank, ""
        self._page = mmap.mmap(-1, _PAGE.size)
        if FOLDER_VARIABLE in environ:
            folder = Path(environ[FOLDER_VARIABLE])
            self._map(folder)
            # Whoever watches may ask where every thread is. The file stays open for as long as the process.
            faulthandler.register(signal.SIGUSR1, open(stack_path(folder, rank), "w"))  # noqa: SIM115
        self._step, self._phase, self.inside, self._peers = _NO_STEP, "", "", ""
        self._step_seconds = self._busy_seconds = 0.0
        self._step_began_at = self._waiting_since = time.monotonic()
        self._waited_seconds = 0.0
        self.num_calls = 0
        self._write("")

    def show_in(self, folder: Path) -> None:
        """From now on others see the page, in a folder of this host."""
        self._map(folder)
        self._write(self._phase)

    def _map(self, folder: Path) -> None:
        path = page_path(folder, self.rank)
        with open(path, "w+b", buffering=0) as file:
            try:
                file.write(bytes(_PAGE.size))  # takes its room: without it, to write to the mapping ends the process
            except OSError as error:
                path.unlink(missing_ok=True)
                raise LaunchError(
                    f"{folder} has no room for a page of {_PAGE.size} bytes ({error.strerror})"
                ) from error
            self._page = mmap.mmap(file.fileno(), _PAGE.size)

    def seen(self) -> Seen | None:
        """This rank's own page, as others would see it."""
        return _read(bytes(self._page))

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
        self._phase, self.inside = doing, ""
        self._write(doing)

    def enters(self, block: str) -> None:
        """Of the phase, the rank is in this ("backward of block 7") from here on, until it enters another."""
        self.inside = block
        self._write(self._phase)

    def wait_begins(self, what: str, peers: Sequence[int] = ()) -> None:
        """The rank waits in this, for these other ranks."""
        self._waiting_since = time.monotonic()
        self._peers = ",".join(map(str, peers))
        self._write(WAITING + what)

    def wait_ends(self) -> None:
        """The rank goes on with what it did."""
        self._waited_seconds += time.monotonic() - self._waiting_since
        self._peers = ""
        self._write(self._phase)

    def _write(self, doing: str) -> None:
        times = (self._step_seconds, self._busy_seconds, time.monotonic())
        texts = (doing.encode(), self.inside.encode(), self.place.encode(), self._peers.encode())
        # Not pack_into, which clears the page first: whoever looks in between would see a rank that never did anything.
        self._page[:] = _PAGE.pack(self._step - _NO_STEP, self.num_calls, *times, *texts)


def last_seen(folder: Path, rank: int) -> Seen | None:
    """What a rank wrote last; None if it did not come so far, or has begun no step yet."""
    path = page_path(folder, rank)
    if not path.exists() or path.stat().st_size < _PAGE.size:
        return None
    return _read(path.read_bytes())


def _read(page: bytes) -> Seen | None:
    begun, num_calls, step_seconds, busy_seconds, at, *texts = _PAGE.unpack(page)
    doing, inside, place, peers = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    step = begun + _NO_STEP  # a page on which nothing was written yet says so too
    if step == _NO_STEP:
        return None
    numbers = tuple(int(peer) for peer in peers.split(",") if peer.isdecimal())
    return Seen(step, num_calls, step_seconds, busy_seconds, at, doing, inside, place, numbers)


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank's stacks go when it is sent SIGUSR1."""
    return folder / f"rank-{rank:05d}.stack"


def wait_for_stacks(paths: Sequence[Path], most_seconds: float) -> None:
    """Leave processes that were sent SIGUSR1 time to say where they are: until their files grow no more."""
    deadline, before = time.monotonic() + most_seconds, [0] * len(paths)
    while time.monotonic() < deadline:
        time.sleep(_STACK_POLL_SECONDS)
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        if all(sizes) and sizes == before:
            return
        before = sizes


def record_failure(environ: Mapping[str, str], rank: int, error: BaseException) -> int:
    """Leave a word on what ended this rank; the status to leave with."""
    final = isinstance(error, WeftError) and not isinstance(error, (LostRankError, CorruptionError))
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    status = 2 if isinstance(error, ConfigError) else 1
    trace, chance = "".join(traceback.format_exception(error)), isinstance(error, CorruptionError)
    failure = Failure(message, trace, status, final, time.monotonic(), chance)
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


def page_path(folder: Path, rank: int) -> Path:
    """Where a rank's page is."""
    return folder / f"rank-{rank:05d}.page"


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.failure"
