"""Status pages: each rank writes what it does to a memory-mapped file, which remains when the rank is killed.

A rank writes its step, its phase and the block that it runs, which costs two microseconds. The agent reads the page
when the rank has died or does not answer. A rank that fails with an error also writes the error to a small JSON file
beside its page.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import DEFECT, CorruptionError, EngineError, LaunchError, LostRankError, WeftError, exit_status

FOLDER_VARIABLE = "WEFT_STATUS"
WAITING = "waiting in "  # the prefix of `StatusPage.doing` while a rank waits for others
SAVING = "saving"
GOING_BACK = "loading a checkpoint"
RESERVING = "reserving memory for copies"  # locking the pages of a large buffer takes longer than a step
VALIDATING = "waiting for the validator"  # after the last step
# A rank in one of these waits for the file system, the kernel or a rank that does not train: no hang.
FILE_PHASES = (SAVING, GOING_BACK, RESERVING, VALIDATING)
_PAGE = struct.Struct("<qqddd240s144s80s64s")  # the fields of StatusPage; text that is too long is truncated
_NO_STEP = -1
_RESTARTABLE = (LostRankError, CorruptionError, EngineError)  # errors that a restart may not meet again
_STACK_POLL_SECONDS = 0.05
_LOST, _TAKEN = "lost.json", "taken-over.json"


@dataclass(frozen=True)
class StatusPage:
    """The contents of a rank's status page."""

    step: int  # the number of steps of the run that are done
    num_calls: int  # the number of collectives that the rank has started
    step_seconds: float  # the time of the last step; 0 if none was done yet
    busy_seconds: float  # the part of it in which the rank computed or loaded data, and did not wait for other ranks
    at: float  # when the page was written (time.monotonic)
    doing: str  # the phase, or WAITING and the operation that the rank waits for
    inside: str = ""  # the block whose forward or backward runs, if any
    place: str = ""  # where the rank is, e.g. "host b, pipe stage 2"
    peers: tuple[int, ...] = ()  # the ranks that it waits for, if they are few

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for other ranks."""
        return self.doing.startswith(WAITING)


@dataclass(frozen=True)
class Failure:
    """The error that ended a rank. A `final` error would happen again after a restart. An error by `chance` (flipped
    bits) may happen at any time. Any other error is expected to happen again unless a step was done before it.
    """

    message: str
    trace: str
    status: int
    final: bool
    at: float
    chance: bool = False


class Status:
    """Writes this rank's status page: a file in the folder FOLDER_VARIABLE; private memory if it is not set."""

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        self.rank, self.place = rank, ""
        self.on_phase: Callable[[str], None] | None = None  # called with each phase that begins
        self._page = mmap.mmap(-1, _PAGE.size)
        if FOLDER_VARIABLE in environ:
            folder = Path(environ[FOLDER_VARIABLE])
            self._map(folder)
            # SIGUSR1 writes the stacks of all threads to this file, which stays open as long as the process runs.
            faulthandler.register(signal.SIGUSR1, open(stack_path(folder, rank), "w"))  # noqa: SIM115
        self._step, self.current_phase, self.inside, self._peers = _NO_STEP, "", "", ""
        self._step_seconds = self._busy_seconds = 0.0
        self._step_began_at = self._waiting_since = time.monotonic()
        self._waited_seconds = 0.0
        self.num_calls = 0
        self._write("")

    def publish_in(self, folder: Path) -> None:
        """Write the page to a file in this folder from now on, where other processes of the host can read it."""
        self._map(folder)
        self._write(self.current_phase)

    def _map(self, folder: Path) -> None:
        path = page_path(folder, self.rank)
        with open(path, "w+b", buffering=0) as file:
            try:
                file.write(bytes(_PAGE.size))  # allocates disk space: else a write to the mapping may kill the process
            except OSError as error:
                path.unlink(missing_ok=True)
                raise LaunchError(
                    f"{folder} has no room for a page of {_PAGE.size} bytes ({error.strerror})"
                ) from error
            self._page = mmap.mmap(file.fileno(), _PAGE.size)

    def page(self) -> StatusPage | None:
        """This rank's own page; None before its first step."""
        return _read(bytes(self._page))

    def step_begins(self, step: int) -> None:
        """Record that `step` steps are done and the next one begins."""
        now = time.monotonic()
        if self._step != _NO_STEP:
            self._step_seconds = now - self._step_began_at
        self._step, self._step_began_at, self._waited_seconds = step, now, 0.0

    def step_ends(self) -> None:
        """Record the end of the part of a step that all ranks take part in. Logs and files, which only some ranks
        write, follow.
        """
        self._busy_seconds = time.monotonic() - self._step_began_at - self._waited_seconds
        self.phase("between steps")

    def phase(self, doing: str) -> None:
        """Record what the rank does from now on."""
        self.current_phase, self.inside = doing, ""
        if self.on_phase is not None:
            self.on_phase(doing)
        self._write(doing)

    def enters(self, block: str) -> None:
        """Record the part of the phase that runs ("backward of block 7"), until the next call."""
        self.inside = block
        self._write(self.current_phase)

    def wait_begins(self, what: str, peers: Sequence[int] = ()) -> None:
        """Record that the rank waits in the operation `what` for the ranks `peers`."""
        self._waiting_since = time.monotonic()
        self._peers = ",".join(map(str, peers))
        self._write(WAITING + what)

    def wait_ends(self) -> None:
        """Record that the wait has ended and the phase continues."""
        self._waited_seconds += time.monotonic() - self._waiting_since
        self._peers = ""
        self._write(self.current_phase)

    def _write(self, doing: str) -> None:
        times = (self._step_seconds, self._busy_seconds, time.monotonic())
        texts = (doing.encode(), self.inside.encode(), self.place.encode(), self._peers.encode())
        # Not pack_into, which clears the page first: a reader could then see the page of a rank that has done nothing.
        self._page[:] = _PAGE.pack(self._step - _NO_STEP, self.num_calls, *times, *texts)


def read_page(folder: Path, rank: int) -> StatusPage | None:
    """Read a rank's page; None if the rank has no page or has begun no step yet."""
    path = page_path(folder, rank)
    if not path.exists() or path.stat().st_size < _PAGE.size:
        return None
    return _read(path.read_bytes())


def _read(page: bytes) -> StatusPage | None:
    begun, num_calls, step_seconds, busy_seconds, at, *texts = _PAGE.unpack(page)
    doing, inside, place, peers = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    step = begun + _NO_STEP  # zero bytes, before the first write, also mean no step
    if step == _NO_STEP:
        return None
    numbers = tuple(int(peer) for peer in peers.split(",") if peer.isdecimal())
    return StatusPage(step, num_calls, step_seconds, busy_seconds, at, doing, inside, place, numbers)


def stack_path(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks when it receives SIGUSR1."""
    return folder / f"rank-{rank:05d}.stack"


def wait_for_stacks(paths: Sequence[Path], most_seconds: float) -> None:
    """Wait until processes that were sent SIGUSR1 have written their stacks: until the files no longer grow."""
    deadline, before = time.monotonic() + most_seconds, [0] * len(paths)
    while time.monotonic() < deadline:
        time.sleep(_STACK_POLL_SECONDS)
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        if all(sizes) and sizes == before:
            return
        before = sizes


def record_failure(environ: Mapping[str, str], rank: int, error: BaseException) -> int:
    """Write the error that ends this rank to its failure file, if there is a folder, and return the exit status."""
    final = isinstance(error, WeftError) and not isinstance(error, _RESTARTABLE)
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    status = exit_status(error) if isinstance(error, WeftError) else DEFECT
    trace, chance = "".join(traceback.format_exception(error)), isinstance(error, CorruptionError)
    failure = Failure(message, trace, status, final, time.monotonic(), chance)
    if FOLDER_VARIABLE in environ:
        _write_json(_failure_path(Path(environ[FOLDER_VARIABLE]), rank), asdict(failure))
    return status


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write the file atomically."""
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").rename(path)


def read_failures(folder: Path, num_ranks: int) -> dict[int, Failure]:
    """Read the errors that ranks recorded, the earliest first. Later ones are mostly that a rank lost another one."""
    paths = {rank: _failure_path(folder, rank) for rank in range(num_ranks)}
    found = {rank: Failure(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}
    return dict(sorted(found.items(), key=lambda item: item[1].at))


def forget_failure(folder: Path, rank: int) -> None:
    """Delete the error that a rank recorded, as the others go on without that rank."""
    _failure_path(folder, rank).unlink(missing_ok=True)


@dataclass(frozen=True)
class LostRank:
    """A lost rank without which the others continue. `at` is when they were told (time.monotonic)."""

    rank: int
    at: float


@dataclass(frozen=True)
class StageTakeover:
    """Rank `by` has taken over pipe stage `stage` in step `step` (counted from 1), `seconds` after `LostRank.at`."""

    stage: int
    by: int
    step: int
    seconds: float


def write_lost_rank(folder: Path, lost: LostRank) -> None:
    """Tell the ranks to continue without a lost rank."""
    _write_json(folder / _LOST, asdict(lost))


def read_lost_rank(folder: Path) -> LostRank | None:
    """Read the lost rank that the agent reported; None if it reported none."""
    return LostRank(**json.loads((folder / _LOST).read_text())) if (folder / _LOST).exists() else None


def write_takeover(folder: Path, taken: StageTakeover) -> None:
    """Tell the agent that a stage was taken over."""
    _write_json(folder / _TAKEN, asdict(taken))


def read_takeover(folder: Path) -> StageTakeover | None:
    """Read the takeover that a rank reported; None if there was none."""
    return StageTakeover(**json.loads((folder / _TAKEN).read_text())) if (folder / _TAKEN).exists() else None


def clear(folder: Path) -> None:
    """Delete all files of an earlier attempt."""
    for path in folder.iterdir():
        os.unlink(path)


def page_path(folder: Path, rank: int) -> Path:
    """The file of a rank's status page."""
    return folder / f"rank-{rank:05d}.page"


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.failure"
