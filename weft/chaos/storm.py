"""Faults at random times, from a seed: what `weft chaos` does to a job.

    schedule(kinds, mtbf, num_ranks, seed)      faults one after the other, as a Poisson process brings them
    Storm                                       when each strikes what, and the times that are taken
    StormForkServer(main)                         ranks that meet a storm; the agent above it knows of nothing

The agent asks its fork server for exits ten times a second. A fork server with a `Storm` first looks at the pages (see
rank_status.py), takes the times, and strikes if the next fault is due. No thread, and no code of weft's that is not in
use when ranks really die.
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

KINDS = ("kill", "hang", "slow", "nan", "flip", "partition")
HARMLESS = ("slow",)  # nothing to recover from
SLOW_SECONDS = 2.0  # stopped for every other tenth of a second of this
HANG_SECONDS = 3  # a stopped rank is found after so long, and after ten steps
TIMEOUT_SECONDS = 30  # of a collective: finds ranks that are stopped where silence is allowed, as in a save
NO_LIMIT = 1_000_000  # of restarts


@dataclass(frozen=True)
class Fault:
    """A fault, so long after the one before, at a rank; `seed` says where inside it."""

    after_seconds: float
    kind: str
    rank: int
    seed: int


def schedule(kinds: Sequence[str], mtbf_seconds: float, num_ranks: int, seed: int) -> Iterator[Fault]:
    """Faults without end: exponential gaps with this mean, kinds and victims at random; all follow from the seed."""
    draw = random.Random(seed)
    while True:
        gap = draw.expovariate(1 / mtbf_seconds)
        yield Fault(gap, draw.choice(kinds), draw.randrange(num_ranks), draw.getrandbits(32))


def parse_kinds(text: str) -> tuple[str, ...]:
    """`kill,nan` as a tuple, in the order of KINDS."""
    given = [word.strip() for word in text.split(",")]
    for word in given:
        if word not in KINDS:
            raise ConfigError(f"--kinds {text}: '{word}' is no kind of fault; there are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in given)


def settings(run: Run, kinds: Sequence[str]) -> list[str]:
    """Overrides under which a run can survive these kinds; what its file says is left, or refused where it cannot."""
    if run.plan.num_ranks == 1:
        raise ConfigError("weft chaos: the plan has one rank, which nobody starts again; give e.g. plan.data=2")
    changes = [f"restart.limit={NO_LIMIT}", f"restart.hang_seconds={min(HANG_SECONDS, run.restart.hang_seconds)}"]
    changes.append(f"train.timeout_seconds={min(TIMEOUT_SECONDS, run.train.timeout_seconds)}")
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
class Struck:
    """A fault that was done: when (since training began), with how many steps finished; and what followed."""

    kind: str
    ranks: list[int]
    at_seconds: float
    step: int
    restarts_before: int
    seconds: float | None = None  # until the next step that had not been finished before
    redone: int = 0  # finished steps that were done again
    cut_short: bool = False  # by the next fault, which came before that


@dataclass
class Storm:
    """What happens to one job: its faults, as they come, and the times that are taken."""

    run: Run
    faults: Iterator[Fault]
    kinds: Sequence[str]
    requests: Path
    told: Callable[[int, int], None] = lambda step, num_faults: None  # finished steps, faults
    most: int | None = None
    struck: list[Struck] = field(default_factory=list)
    restarts: int = -1
    began_at: float | None = None
    ended_at: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    recovering_seconds: float = 0.0  # from a fault to the next step, over all
    _pids: Sequence[int] = ()
    _folder: Path = Path()
    _resumed: int = 0
    _step: int = -1  # finished ones, as last seen
    _is_over: bool = True  # the attempt
    _next: Fault | None = None
    _due_at: float = 0.0
    _asked: Fault | None = None  # of a rank, which has not done it yet
    _open: list[Struck] = field(default_factory=list)
    _slow: tuple[int, float] | None = None  # a rank's process, and until when
    _is_stopped: bool = False

    # --- what the fork server tells

    def starts(self, pids: Sequence[int], environ: Mapping[str, str]) -> None:
        """All ranks were started, once more."""
        self.restarts += 1
        self._pids, self._folder, self._is_over = pids, Path(environ[FOLDER_VARIABLE]), False
        run_id = known_run_id(self.run.folder)
        copies = copies_folder(environ["TORCHELASTIC_RUN_ID"], self.run.folder, run_id) if run_id is not None else None
        self._resumed = newest_source(self.run, copies).step
        self._slow, self._is_stopped = None, False

    def died(self, rank_exit: RankExit) -> None:
        """A rank has ended."""
        self.ended_at = time.monotonic()
        self._is_over |= rank_exit.status != 0

    def look(self) -> None:
        """Take the times, and strike if it is time to."""
        now = time.monotonic()
        found = [read_page(self._folder, rank) for rank in range(len(self._pids))]
        seen = [one for one in found if one is not None]
        if not self._is_over and len(seen) == len(self._pids):
            self._take_times(seen, now)
        self._go_on_slowly(now)
        if self._asked is not None and not request_path(self.requests, self._asked.rank).exists():
            self._note(self._asked.kind, [self._asked.rank], now)
            self._asked = None
        if self.began_at is None or self._step >= self.run.train.steps - 1:
            return  # the last step ends in peace: behind it there is nothing to go on with
        if self._next is not None and now >= self._due_at and not self._is_over:
            fault, self._next = self._next, None
            is_training = len(seen) == len(self._pids) and all(one.step_seconds for one in seen)
            self._strike(fault, is_training and not self._open and self._asked is None, now)
        num_faults = len(self.struck) + (self._asked is not None)
        if self._next is None and (self.most is None or num_faults < self.most):
            self._next = next(self.faults, None)
            self._due_at = now + (self._next.after_seconds if self._next is not None else 0)

    def _take_times(self, seen: Sequence[StatusPage], now: float) -> None:
        if self.began_at is None:
            self.began_at = now
        newest = max(seen, key=lambda one: one.step)
        if newest.step_seconds and newest.step > self._step and not self._open:
            self.step_seconds.append(newest.step_seconds)
        self._step = max(self._step, newest.step)
        waiting = [one for one in self._open if newest.step <= one.step or not self._is_answered(one)]
        if self._open and not waiting:
            self.recovering_seconds += now - self.began_at - self._open[0].at_seconds
            for one in self._open:
                one.seconds = now - self.began_at - one.at_seconds
                one.redone = max(0, one.step - self._resumed) if one.kind != "nan" else 0
                one.cut_short = one is not self._open[-1]
            self._open = []
        self.told(self._step, len(self.struck))

    def _is_answered(self, one: Struck) -> bool:
        """Others may finish a step that the rank at fault has done its part of: only a restart ends that."""
        return one.kind == "nan" or self.restarts > one.restarts_before

    # --- strikes

    def _strike(self, fault: Fault, is_training: bool, now: float) -> None:
        """Do a fault. Ranks that start, or recover, can only be killed: whatever comes then is a kill, if kills are
        among the kinds, and nothing otherwise.
        """
        kind, ranks = fault.kind, [fault.rank]
        if not is_training:
            if "kill" not in self.kinds:
                return
            kind = "kill"
        self._end_slowness()
        if kind in RANK_KINDS:
            request_fault(self.requests, fault.rank, kind, fault.seed)
            self._asked = fault
            return
        if kind == "partition":
            half = len(self._pids) // 2
            ranks = list(range(half) if fault.seed % 2 else range(half, len(self._pids)))
        if kind == "slow":
            self._slow = self._pids[fault.rank], now + SLOW_SECONDS
        else:
            self._signal([self._pids[rank] for rank in ranks], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self._note(kind, ranks, now)

    def _note(self, kind: str, ranks: list[int], now: float) -> None:
        assert self.began_at is not None
        one = Struck(kind, ranks, now - self.began_at, self._step, self.restarts)
        self.struck.append(one)
        if kind not in HARMLESS:
            self._open.append(one)

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

    # --- what was learned

    @property
    def seconds(self) -> float:
        """From the first step to the end."""
        return self.ended_at - self.began_at if self.began_at is not None else 0.0


class StormForkServer(ForkServer):
    """A fork server whose ranks meet a storm."""

    storm: Storm | None = None

    def start(self, num_ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> list[int]:
        """As a fork server does."""
        pids = super().start(num_ranks, arguments, environ)
        if self.storm is not None:
            self.storm.starts(pids, environ)
        return pids

    def next_exit(self, timeout_seconds: float) -> RankExit | None:
        """As a fork server does, after a look at what is due."""
        if self.storm is not None:
            self.storm.look()
        rank_exit = super().next_exit(timeout_seconds)
        if self.storm is not None and rank_exit is not None:
            self.storm.died(rank_exit)
        return rank_exit
