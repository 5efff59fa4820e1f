"""A storm: the faults, drawn from a seed, that `weft chaos` injects into a job.

    schedule(kinds, mtbf, num_ranks, seed)      an iterator of faults, whose times are a Poisson process
    Storm                                       injects the faults into one job and measures recoveries
    StormForkServer(main)                       a fork server that injects the faults of a storm

The agent asks its fork server for exits ten times a second. A fork server with a `Storm` first reads the status pages
of the ranks (health/rank_status.py), measures times, and injects the next fault if it is due. So there is no extra
thread, and the code that recovers is the code that runs when ranks really die.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import ConfigError
from weft.health.rank_status import FOLDER_VARIABLE, StatusPage, read_page
from weft.launch.fork_server import ForkServer, RankExit
from weft.resilience.faults import RANK_KINDS, request_fault, request_path
from weft.resilience.shared_memory import copies_folder
from weft.run_file import Run
from weft.train.local_job import newest_source
from weft.train.run_identity import known_run_id
from weft.train.setup import device_type

KINDS = ("kill", "hang", "slow", "nan", "flip", "partition")
ROLE = "role"  # kills a rank that does not train, if the run has any
HARMLESS = ("slow", ROLE)  # kinds that need no recovery of training ranks
SLOW_SECONDS = 2.0  # for this time a slow rank is stopped in every other tenth of a second
HANG_SECONDS = 3  # a stopped rank is detected after this time, and after ten steps
TIMEOUT_SECONDS = 30  # of a collective: detects ranks that are stopped while they save, where a hang is not detected
NO_LIMIT = 1_000_000  # restarts
REPEATABLE = "train.deterministic=true"  # kernels of GPUs do not repeat their bits by themselves


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, `after_seconds` after the fault before. `seed` determines its details."""

    after_seconds: float
    kind: str
    rank: int
    seed: int


def schedule(kinds: Sequence[str], mtbf_seconds: float, num_ranks: int, seed: int) -> Iterator[Fault]:
    """An endless sequence of faults: exponential gaps with the mean `mtbf_seconds`, random kinds and ranks. The seed
    determines all of it.
    """
    rng = random.Random(seed)
    while True:
        gap = rng.expovariate(1 / mtbf_seconds)
        yield Fault(gap, rng.choice(kinds), rng.randrange(num_ranks), rng.getrandbits(32))


def parse_kinds(text: str) -> tuple[str, ...]:
    """Parse a list like `kill,nan` to a tuple in the order of KINDS, with ROLE last."""
    given, known = [word.strip() for word in text.split(",")], (*KINDS, ROLE)
    for word in given:
        if word not in known:
            raise ConfigError(f"--kinds {text}: '{word}' is no kind of fault; there are {', '.join(known)}")
    return tuple(kind for kind in known if kind in given)


def survival_overrides(run: Run, kinds: Sequence[str]) -> list[str]:
    """Overrides of the run file with which a run survives these kinds of faults. Raises ConfigError if a setting of the
    run file prevents that.
    """
    if run.plan.num_ranks == 1:
        raise ConfigError("weft chaos: the plan has one rank, which nobody starts again; give e.g. plan.data=2")
    if ROLE in kinds and not run.roles.num_ranks:
        raise ConfigError(
            "--kinds role kills ranks that do not train, and there are none; give e.g. roles.loader=1, or leave it out"
        )
    if run.train.kfac is not None and run.train.kfac.mode == "sub-grid-async":
        raise ConfigError(
            "weft chaos compares two runs bit by bit, and with train.kfac.mode = 'sub-grid-async' runs differ by when "
            "inverses arrive; use 'sub-grid'"
        )
    changes = [f"restart.limit={NO_LIMIT}", f"restart.hang_seconds={min(HANG_SECONDS, run.restart.hang_seconds)}"]
    changes.append(f"train.timeout_seconds={min(TIMEOUT_SECONDS, run.train.timeout_seconds)}")
    if device_type(run) == "cuda" and not run.train.deterministic:
        changes.append(REPEATABLE)
    if run.checkpoint.memory_every is None:
        changes.append("checkpoint.memory_every=1")
    if run.checkpoint.every is None:
        changes.append(f"checkpoint.every={run.train.steps}")
    if "nan" in kinds and run.numbers.on_bad != "repeat":
        if "numbers.on_bad" in run.origins:
            raise ConfigError(
                f"--kinds nan: with numbers.on_bad = '{run.numbers.on_bad}' a NaN by chance changes the result; leave "
                f"it out of the run file, or give 'repeat'"
            )
        changes.append("numbers.on_bad=repeat")
    if "flip" in kinds:
        if run.plan.data == 1:
            raise ConfigError(
                "--kinds flip: with plan.data = 1 there is no second copy of a parameter to find a flipped bit by; "
                "give plan.data=2, or leave flip out"
            )
        if run.numbers.compare_every is None:
            changes.append("numbers.compare_every=1")
    return changes


@dataclass
class FaultRecord:
    """A fault that was injected, and the recovery from it."""

    kind: str
    ranks: list[int]
    at_seconds: float  # when, since training began
    step: int  # the number of steps that were finished then
    restarts_before: int
    seconds: float | None = None  # until the end of the next step that had not been finished before
    redone: int = 0  # the number of finished steps that were done again
    cut_short: bool = False  # whether the next fault came before the recovery ended


@dataclass
class Storm:
    """Injects faults into one job and measures the recoveries. `requests` is the folder for faults that ranks cause
    themselves (resilience/faults.py).
    """

    run: Run
    faults: Iterator[Fault]
    kinds: Sequence[str]
    requests: Path
    on_progress: Callable[[int, int], None] = lambda step, num_faults: None  # called with finished steps and faults
    max_faults: int | None = None
    records: list[FaultRecord] = field(default_factory=list)
    restarts: int = -1
    began_at: float | None = None
    warm_at: float | None = None  # when the first step had ended, which also compiles and allocates
    ended_at: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    recovering_seconds: float = 0.0  # the total time of all recoveries
    _pids: list[int] = field(default_factory=list)  # of the training ranks, then those of other roles
    _folder: Path = Path()
    _resumed: int = 0
    _step: int = -1  # the number of finished steps, by the last poll
    _is_over: bool = True  # whether the attempt has failed or not begun
    _next: Fault | None = None
    _due_at: float = 0.0
    _requested: Fault | None = None  # a fault that a rank was asked to cause and has not caused yet
    _unrecovered: list[FaultRecord] = field(default_factory=list)
    _slow: tuple[int, float] | None = None  # the process id of a slow rank, and when it ends
    _is_stopped: bool = False

    # --- called by the fork server

    def ranks_started(self, pids: Sequence[int], environ: Mapping[str, str]) -> None:
        """Record that all ranks were started."""
        self.restarts += 1
        self._pids, self._folder, self._is_over = list(pids), Path(environ[FOLDER_VARIABLE]), False
        run_id = known_run_id(self.run.folder)
        copies = copies_folder(environ["TORCHELASTIC_RUN_ID"], self.run.folder, run_id) if run_id is not None else None
        self._resumed = newest_source(self.run, copies).step
        self._slow, self._is_stopped = None, False

    def rank_started_again(self, rank: int, pid: int) -> None:
        """Record that a rank of another role than training was started again alone."""
        self._pids[rank] = pid

    def rank_exited(self, rank_exit: RankExit) -> None:
        """Record that a rank has exited. The loss of one that does not train ends nothing."""
        self.ended_at = time.monotonic()
        self._is_over |= rank_exit.status != 0 and rank_exit.rank < self._num_training

    def poll(self) -> None:
        """Measure times, and inject the next fault if it is due."""
        now = time.monotonic()
        found = [read_page(self._folder, rank) for rank in range(min(self._num_training, len(self._pids)))]
        seen = [one for one in found if one is not None]
        if not self._is_over and seen and len(seen) == self._num_training:
            self._take_times(seen, now)
        self._go_on_slowly(now)
        if self._requested is not None and not request_path(self.requests, self._requested.rank).exists():
            self._record(self._requested.kind, [self._requested.rank], now)
            self._requested = None
        if self.began_at is None or self._step >= self.run.train.steps - 1:
            return  # no fault in the last step: no later step would show the recovery
        if self._next is not None and now >= self._due_at and not self._is_over:
            fault, self._next = self._next, None
            is_training = len(seen) == self._num_training and all(one.step_seconds for one in seen)
            self._inject(fault, is_training and not self._unrecovered and self._requested is None, now)
        num_faults = len(self.records) + (self._requested is not None)
        if self._next is None and (self.max_faults is None or num_faults < self.max_faults):
            self._next = next(self.faults, None)
            self._due_at = now + (self._next.after_seconds if self._next is not None else 0)

    def _take_times(self, seen: Sequence[StatusPage], now: float) -> None:
        if self.began_at is None:
            self.began_at = now
        newest = max(seen, key=lambda one: one.step)
        if self.warm_at is None and newest.step > 0:
            self.warm_at = now
        if newest.step_seconds and newest.step > self._step and not self._unrecovered:
            self.step_seconds.append(newest.step_seconds)
        self._step = max(self._step, newest.step)
        waiting = [one for one in self._unrecovered if newest.step <= one.step or not self._is_answered(one)]
        if self._unrecovered and not waiting:
            self.recovering_seconds += now - self.began_at - self._unrecovered[0].at_seconds
            for one in self._unrecovered:
                one.seconds = now - self.began_at - one.at_seconds
                one.redone = max(0, one.step - self._resumed) if one.kind != "nan" else 0
                one.cut_short = one is not self._unrecovered[-1]
            self._unrecovered = []
        self.on_progress(self._step, len(self.records))

    def _is_answered(self, one: FaultRecord) -> bool:
        """Whether the job has reacted to a fault. Other ranks may finish a step after the faulty rank has done its
        part, so only a restart counts, except for a NaN.
        """
        return one.kind == "nan" or self.restarts > one.restarts_before

    # --- faults

    def _inject(self, fault: Fault, is_training: bool, now: float) -> None:
        """Inject a fault. Ranks that start or recover can only be killed. Then any fault becomes a kill if kills are
        among the kinds, and is left out otherwise.
        """
        kind, ranks = fault.kind, [fault.rank]
        if not is_training:
            if "kill" not in self.kinds:
                return
            kind = "kill"
        self._end_slowness()
        if kind in RANK_KINDS:
            request_fault(self.requests, fault.rank, kind, fault.seed)
            self._requested = fault
            return
        if kind == "partition":
            half = self._num_training // 2
            ranks = list(range(half) if fault.seed % 2 else range(half, self._num_training))
        if kind == ROLE:
            ranks = [self._num_training + fault.seed % self.run.roles.num_ranks]
        if kind == "slow":
            self._slow = self._pids[fault.rank], now + SLOW_SECONDS
        else:
            self._signal(
                [self._pids[rank] for rank in ranks], signal.SIGKILL if kind in ("kill", ROLE) else signal.SIGSTOP
            )
        self._record(kind, ranks, now)

    def _record(self, kind: str, ranks: list[int], now: float) -> None:
        assert self.began_at is not None
        one = FaultRecord(kind, ranks, now - self.began_at, self._step, self.restarts)
        self.records.append(one)
        if kind not in HARMLESS:
            self._unrecovered.append(one)

    def _go_on_slowly(self, now: float) -> None:
        if self._slow is None:
            return
        if now > self._slow[1] or self._is_over:
            self._end_slowness()
            return
        self._is_stopped = not self._is_stopped
        self._signal([self._slow[0]], signal.SIGSTOP if self._is_stopped else signal.SIGCONT)

    def _end_slowness(self) -> None:
        if self._slow is not None:
            self._signal([self._slow[0]], signal.SIGCONT)
        self._slow, self._is_stopped = None, False

    def _signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def _num_training(self) -> int:
        return self.run.plan.num_ranks

    # --- results

    @property
    def seconds(self) -> float:
        """The time from the end of the first step to the end of the run."""
        return self.ended_at - self.warm_at if self.warm_at is not None else 0.0


class StormForkServer(ForkServer):
    """A fork server that injects the faults of its `storm` into its ranks."""

    storm: Storm | None = None

    def start(self, num_ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> list[int]:
        """Start the ranks, and tell the storm."""
        pids = super().start(num_ranks, arguments, environ)
        if self.storm is not None:
            self.storm.ranks_started(pids, environ)
        return pids

    def start_again(self, rank: int) -> int:
        """Start one rank again, and tell the storm."""
        pid = super().start_again(rank)
        if self.storm is not None:
            self.storm.rank_started_again(rank, pid)
        return pid

    def next_exit(self, timeout_seconds: float) -> RankExit | None:
        """Wait for the next exit of a rank, after the storm has injected a fault if one is due."""
        if self.storm is not None:
            self.storm.poll()
        rank_exit = super().next_exit(timeout_seconds)
        if self.storm is not None and rank_exit is not None:
            self.storm.rank_exited(rank_exit)
        return rank_exit
