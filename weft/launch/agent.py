"""The local agent: starts the ranks of one machine, watches them, and starts them again when one dies.

When a rank is killed or fails, the agent kills the other ranks and starts all of them again; they load the newest
complete checkpoint. The agent prints one paragraph: which rank died, how, in which step, where the run resumes and how
many steps are lost. It does not restart after an error that would happen again: an error that the user must fix
(status 2), or an error before any step was finished, or before ranks that count none have worked.

If ranks shadow each other (plan.pipe.shadow), the agent restarts nothing when the first rank is killed, unless it is
rank 0. It tells the other ranks, which continue without the lost one (resilience/takeover.py). If they fail to, all
ranks start again. Ranks of other roles than training are started again alone (`RoleRestarts`).

    start_local(fork_server, num_ranks, arguments, ..) -> the exit status of the job
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.health.call_order import find_difference
from weft.health.lost_ranks import LostRankTracker, describe_failures
from weft.health.rank_status import FOLDER_VARIABLE, Failure, clear, forget_failure, read_failures, read_page
from weft.health.watchdog import Deadline, Watchdog, ask_for_stacks, collect_stacks
from weft.launch.environment import LOCAL_RUN_ID_PREFIX
from weft.launch.fork_server import ForkServer
from weft.launch.stop_signal import StopSignal, say

_POLL_SECONDS = 0.1
_CAUSE_SECONDS = 0.5  # how long to wait for the exit of the rank that caused another rank's error
_END_SECONDS = 30.0  # how long ranks may take that were asked to stop, once one has failed or training has ended
_HUNG = 124  # the exit status of a job that hung, as timeout(1) uses it


@dataclass(frozen=True)
class Restarts:
    """When to restart: at most `limit` times within `window_seconds`. Ranks count as hung after no sign of life for
    `hang_seconds` and for ten steps (before a step was measured, ten times the predicted `step_seconds`).
    """

    limit: int = 0
    window_seconds: float = 3600.0
    hang_seconds: float = 60.0
    step_seconds: float | None = None


@dataclass(frozen=True)
class ResumePoint:
    """Where ranks that start now resume: the step of the newest complete checkpoint, and where it is stored.

    A job without steps says in `words` what its ranks do after a restart. `saved_step` is the newest step on disk, if
    the checkpoint is in memory.
    """

    step: int = 0
    where: str = "the beginning: there is no checkpoint yet"
    words: str | None = None
    saved_step: int | None = None

    @property
    def is_only_in_memory(self) -> bool:
        """Whether the end of the job would lose the step."""
        return self.saved_step is not None and self.step > self.saved_step


def start_local(
    fork_server: ForkServer,
    num_ranks: int,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    restarts: Restarts = Restarts(),
    newest: Callable[[], ResumePoint] = ResumePoint,
    stacks: Path | None = None,
    shadowed: bool = False,
    num_roles: int = 0,
    stopping: str = "save and stop",
    has_worked: Callable[[], bool] = lambda: False,
) -> int:
    """Run the fork server's program as `num_ranks` local ranks and return the exit status of the job.

    Ranks get this process's environment and `environ`. The status is 0 when all ranks exit with 0. When one fails,
    hangs or is killed, the others are killed and all start again, as often as `restarts` allows. After that one line
    names the rank, and the status is that rank's, or 128 + the number of its signal. `newest` returns where a restart
    resumes. Stacks of ranks that hang go to a file in the folder `stacks`. With `shadowed` ranks, one may be lost
    without a restart. The last `num_roles` ranks do not train. The first SIGTERM, SIGHUP, SIGQUIT or Ctrl-C in this
    process sends SIGTERM to the ranks (see `StopSignal`), which have 10 minutes to save; a second Ctrl-C kills them.
    `stopping` says in words what they do after the first. `has_worked` tells, of ranks that count no steps, whether
    this start did what it is for, so that another one may succeed after an error.
    """
    job = LOCAL_RUN_ID_PREFIX + uuid.uuid4().hex
    num_training = num_ranks - num_roles
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores // num_training))}  # sums depend on it, so not by all ranks
    ended_at: list[float] = []

    def train(ranks: int) -> list[bool]:
        return [read_page(Path(name), rank) is not None for rank in range(ranks)]

    watching = StopSignal.watching(lambda: any(train(num_ranks)), stopping)
    with tempfile.TemporaryDirectory(prefix="weft-") as name, watching as stop:
        start = newest()
        while True:
            kills = memory_kills()
            own = {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": str(len(ended_at)), FOLDER_VARIABLE: name}
            pids = fork_server.start(num_ranks, arguments, {**threads, **os.environ, **own, **environ})
            watchdog = Watchdog(Path(name), num_training, Deadline(restarts.hang_seconds, restarts.step_seconds))
            lost_ranks = LostRankTracker(Path(name), num_training, watchdog, shadowed)
            roles = RoleRestarts(Path(name), num_training, fork_server.start_again, restarts)
            codes, hang = _watch(fork_server, pids, stop, watchdog, lost_ranks, roles)
            if hang is None and not any(codes.values()):
                return 0
            hang = _with_stacks(hang, Path(name), num_ranks, stacks)
            attempt = _FailedAttempt.of(Path(name), codes, num_ranks, start.step, hang, memory_kills() > kills)
            if stop.order is signal.SIGTERM and attempt.was_killed and not any(train(num_ranks)):
                return stop.end_before_first_step(start.step)
            recent = [at for at in ended_at if at > time.monotonic() - restarts.window_seconds]
            retry = attempt.may_succeed_again(has_worked()) and len(recent) < restarts.limit
            clear(Path(name))
            start = newest()
            stop.hold_back(start.step if retry and start.is_only_in_memory else None, lambda: all(train(num_training)))
            if stop.order is not None or not retry:
                say(attempt.final_message(restarts if recent and stop.order is None else None))
                return attempt.status
            ended_at.append(time.monotonic())
            say(attempt.restart_message(start, len(recent) + 1, restarts))


def _with_stacks(hang: str | None, folder: Path, num_ranks: int, target: Path | None) -> str | None:
    """Collects the stacks of ranks that hang in the folder `target`. Returns the description of the hang, and where
    they are, or why they cannot be written there.
    """
    if hang is None or target is None:
        return hang
    try:
        return f"{hang}; their stacks are in {collect_stacks(folder, num_ranks, target)}"
    except OSError as error:  # a full disk does not end the job
        return f"{hang}; their stacks cannot be written to {target} ({error.strerror or error})"


def _watch(
    fork_server: ForkServer,
    pids: list[int],
    stop: StopSignal,
    watchdog: Watchdog,
    lost_ranks: LostRankTracker,
    roles: RoleRestarts,
) -> tuple[dict[int, int], str | None]:
    """Wait until all ranks have exited, one has failed, or they hang. Kills all ranks that are left.

    Returns the exit code of each rank that exited, up to the first that failed and those that died with it, and a
    description of the hang, or None.
    """
    codes: dict[int, int] = {}
    hang: str | None = None
    stop.watch(pids)

    def num_gone() -> int:
        return len(codes) + lost_ranks.num_lost + roles.num_lost

    try:
        while num_gone() < len(pids) and not any(codes.values()) and hang is None:
            _collect(fork_server, codes)
            for message in roles.accept_losses(codes, pids, stop.order is not None):
                stop.watch(pids)
                say(message)
            if not any(codes.values()):
                stop.poll()
            if stop.order is None:
                lost_ranks.accept_loss(codes)
                takeover = lost_ranks.poll(codes)
                if takeover is not None:
                    say(f"weft: {takeover}")
            if not codes:
                hang, slow = watchdog.check()
                if slow is not None:
                    say(f"weft: {slow}")
            if roles.are_overdue(codes):
                break  # training has ended without an error; what is left is killed below
        deadline = time.monotonic() + _END_SECONDS
        while stop.order is not None and num_gone() < len(pids) and time.monotonic() < deadline:
            _collect(fork_server, codes)  # all were asked to stop: the others may still be saving
        if hang is not None or any(codes.values()):
            lost_ranks.restore_exit_code(codes)
        if hang is not None:
            ask_for_stacks(watchdog.folder, pids)
    finally:
        stop.watch([])
        for pid in pids:  # ranks that run, ranks that do not lead a session yet, and children left by dead ranks
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
    for _ in range(len(pids) - num_gone()):
        while fork_server.next_exit(_POLL_SECONDS) is None:
            pass
    return codes, hang


def _collect(fork_server: ForkServer, codes: dict[int, int]) -> None:
    """Add exit codes of ranks to `codes`. Waits briefly; after an error longer, for the rank that caused it."""
    rank_exit = fork_server.next_exit(_POLL_SECONDS)
    while rank_exit is not None:
        codes[rank_exit.rank] = rank_exit.status
        is_explained = not any(codes.values()) or min(codes.values()) < 0  # peers of a killed rank may exit before it
        rank_exit = fork_server.next_exit(0 if is_explained else _CAUSE_SECONDS)


@dataclass(frozen=True)
class _FailedAttempt:
    """A start of the ranks that failed: their exit codes, the error that one of them recorded, the steps they did."""

    codes: Mapping[int, int]
    culprit: int | None
    failure: Failure | None
    step: int | None  # the last step that the failed rank finished
    done: int  # the last step that any rank finished
    began_at: int
    hang: str | None = None
    for_memory: bool = False  # did the system kill a rank for memory?
    difference: str | None = None  # the first collective that was not the same on all ranks of its group

    @staticmethod
    def of(
        folder: Path, codes: Mapping[int, int], num_ranks: int, began_at: int, hang: str | None, memory_killed: bool
    ) -> _FailedAttempt:
        codes = {rank: code for rank, code in codes.items() if code}
        seen = {rank: found.step for rank in range(num_ranks) if (found := read_page(folder, rank)) is not None}
        done = max(seen.values(), default=began_at)
        if hang is not None:
            return _FailedAttempt(
                {}, None, None, done, done, began_at, hang, difference=find_difference(folder, num_ranks)
            )
        killed = [rank for rank, code in codes.items() if code < 0]
        errors = read_failures(folder, num_ranks)
        if killed or not errors:  # a killed rank explains the others' errors
            step = seen.get(min(killed or codes))
            for_memory = memory_killed and -signal.SIGKILL in codes.values()
            return _FailedAttempt(codes, None, None, step, done, began_at, None, for_memory)
        culprit = next(iter(errors))
        difference = None if errors[culprit].final else find_difference(folder, num_ranks)
        return _FailedAttempt(codes, culprit, errors[culprit], seen.get(culprit), done, began_at, difference=difference)

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended a rank."""
        return any(code < 0 for code in self.codes.values())

    def may_succeed_again(self, has_worked: bool) -> bool:
        """Whether a restart may succeed: after a kill, a hang or flipped bits; after an error, or a kill for memory,
        only if a step ended, or ranks that count none have worked.
        """
        has_worked = has_worked or self.done > self.began_at
        if self.for_memory and not has_worked:
            return False
        if self.hang is not None or self.was_killed:
            return True
        if self.failure is None or self.failure.final:
            return False
        return self.failure.chance or has_worked

    @property
    def status(self) -> int:
        if self.hang is not None:
            return _HUNG
        return self.failure.status if self.failure is not None else describe_failures(self.codes)[1]

    def _cause(self) -> str:
        found = self._own_cause()
        return found if self.difference is None else f"{found}; {self.difference}"

    def _own_cause(self) -> str:
        if self.hang is not None:
            return self.hang
        if self.failure is None and self.for_memory:
            return (
                f"{describe_failures(self.codes)[0]}; the kernel did it, for memory: use a smaller model or batch, or "
                f"fewer ranks on this machine"
            )
        if self.failure is None:
            return describe_failures(self.codes)[0]
        return f"rank {self.culprit} failed: {self.failure.message}"

    def final_message(self, restarts: Restarts | None) -> str:
        """The message that says why the job ends."""
        if self.failure is not None and self.failure.final:
            return f"weft: {self.failure.message}"
        trace = f"{self.failure.trace}\n" if self.failure is not None else ""
        often = ""
        if restarts is not None:
            often = (
                f"; that was after {restarts.limit} restarts within {restarts.window_seconds:.0f} s, the most that "
                f"[restart] allows: look for the cause, then run the same command to go on"
            )
        return f"{trace}weft: {self._cause()}{often}"

    def restart_message(self, resume_point: ResumePoint, number: int, restarts: Restarts) -> str:
        """The message of a restart: which rank died, how and when, where the run resumes, and the steps lost."""
        trace = f"{self.failure.trace}\n" if self.failure is not None else ""
        often = f"restart {number} of at most {restarts.limit} within {restarts.window_seconds:.0f} s"
        if resume_point.words is not None:
            return f"{trace}weft: {self._cause()}. All ranks start again ({often}) and {resume_point.words}."
        when = "before the first step" if self.step is None else f"in step {self.step + 1}"
        again = max(0, self.done - resume_point.step)
        lost = "no finished step is lost" if not again else f"{again} finished step{'s' * (again > 1)} to do again"
        return (
            f"{trace}weft: {self._cause()}, {when}. All ranks start again ({often}) and go on after step "
            f"{resume_point.step}, from {resume_point.where}; {lost}."
        )


def memory_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Returns how many processes the kernel has killed for memory since it started; 0 if it does not say."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class RoleRestarts:
    """Handles the exits of ranks that do not train (from `num_training` on), while the training ranks go on.

    A killed one is started again alone and joins the training ranks where they are: `start` starts a rank and returns
    its process id, as often as `restarts` allows. One that fails with an error would fail again, so the training ranks
    go on without it. Before all training ranks have begun a step the job cannot go on without any rank, and all ranks
    start again.
    """

    def __init__(self, folder: Path, num_training: int, start: Callable[[int], int], restarts: Restarts) -> None:
        self._folder, self._num_training, self._start, self._restarts = folder, num_training, start, restarts
        self._restarted_at: list[float] = []
        self._ended_at = math.inf  # when all training ranks had ended
        self.num_lost = 0  # the number of ranks that ended and were not started again

    def are_overdue(self, codes: dict[int, int]) -> bool:
        """Have all training ranks ended, and other ranks not, for too long?"""
        if self._ended_at == math.inf and all(rank in codes for rank in range(self._num_training)):
            self._ended_at = time.monotonic()
        return time.monotonic() > self._ended_at + _END_SECONDS

    def accept_losses(self, codes: dict[int, int], pids: list[int], is_stopping: bool) -> list[str]:
        """Removes ranks that failed from `codes`, and starts those again that were killed. Returns what to say."""
        failed = {rank: code for rank, code in codes.items() if code and rank >= self._num_training}
        if not failed or any(code for rank, code in codes.items() if code and rank < self._num_training):
            return []  # a training rank explains the others
        if any(read_page(self._folder, rank) is None for rank in range(self._num_training)):
            return []
        messages = []
        for rank, code in failed.items():
            del codes[rank]
            now, what = time.monotonic(), describe_failures({rank: code})[0]
            recent = [at for at in self._restarted_at if at > now - self._restarts.window_seconds]
            if code < 0 and not is_stopping and len(recent) < self._restarts.limit:
                self._restarted_at.append(now)
                pids[rank] = self._start(rank)
                messages.append(f"weft: {what}. It does not train, so it starts again alone; no step is lost")
                continue
            self.num_lost += 1
            failure = read_failures(self._folder, rank + 1).get(rank)
            why = "" if failure is None else f": {failure.message}"
            forget_failure(self._folder, rank)  # a later failure has another cause
            messages.append(f"weft: {what}{why}. It does not train, so training goes on without it")
        return messages
