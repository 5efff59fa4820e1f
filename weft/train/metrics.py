"""Metrics of a run, and their logs: always JSON lines, optionally TensorBoard and W&B. Rank 0 writes them."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.errors import ConfigError
from weft.run_file import Run

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one line of the step display.

    `mfu` is None if the device's peak is not known. `unit` is the unit of the rates (tokens or images).
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    units_per_second: float
    units_per_second_per_device: float
    tflops_per_second_per_device: float
    mfu: float | None
    memory_bytes: int
    seconds_left: float
    unit: str = "tokens"
    start_seconds: float | None = None  # set for a process's first step, whose rates do not hold for later steps

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, with the unit in the names of the rates."""
        values = {key.replace("units", self.unit): value for key, value in asdict(self).items()}
        del values["unit"]
        return {key: value for key, value in values.items() if key != "start_seconds" or value is not None}


class Moment:
    """A point in time of this rank's work.

    On a GPU it is the time when the device has finished all work that was queued before. The host may read it much
    later.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds between two moments. Waits until the device has passed this one."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True)
class Rates:
    """Speed over some steps: of all ranks, of one device, and the seconds of a step."""

    units_per_second: float
    units_per_second_per_device: float
    tflops_per_second_per_device: float
    mfu: float | None
    step_seconds: float
    is_start: bool = False  # only a process's first step, which also compiles, connects and allocates


class Clock:
    """Computes rates over the steps since the last reading.

    The first step of a process also compiles, connects and allocates memory, so it counts only for its own rate.
    """

    def __init__(
        self,
        step: int,
        units_per_step: int,
        num_devices: int,
        flops_per_step: float,
        peak: float | None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (a value)
    ) -> None:
        """`flops_per_step` and `peak` are those of one device. `peak` is None if it is not known."""
        self._units, self._devices, self._flops, self._peak = units_per_step, num_devices, flops_per_step, peak
        self._device, self._first, self._warm = device, step + 1, Moment(device)
        self._has_begun = False
        self.skip(step)

    def moment(self) -> Moment:
        """Returns a moment after all work queued so far."""
        return Moment(self._device)

    def skip(self, step: int) -> None:
        """Excludes the time since the last reading (evaluation, saving) from the rates."""
        self._step, self._since = step, self.moment()

    def done(self, step: int, moment: Moment) -> None:
        """Records the end of a step. Call it for every step, in order, whether its rates are read or not."""
        if step == self._first:
            self._warm = moment

    def _began(self, before: int, step: int) -> bool:
        """Is this reading of a process's first step only? True at most once, although steps may be repeated."""
        is_start = not self._has_begun and before < step == self._first
        self._has_begun = True
        return is_start

    def read(self, step: int, moment: Moment) -> Rates:
        """Returns the rates of the steps since the last reading, up to the step that ended at `moment`."""
        since, before = self._since, self._step
        if before < self._first < step:
            since, before = self._warm, self._first
        seconds = moment.seconds_since(since) / max(1, step - before)
        self._step, self._since = step, moment
        rate = self._flops / seconds
        return Rates(
            self._units / seconds,
            self._units / seconds / self._devices,
            rate / 1e12,
            rate / self._peak if self._peak else None,
            seconds,
            is_start=self._began(before, step),
        )


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: the allocator's peak on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsLog:
    """Appends to metrics.jsonl and to the optional loggers, starting after `step`."""

    def __init__(self, run: Run, step: int) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        path = run.folder / "metrics.jsonl"
        _forget_after(path, step)
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (see close)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror or error}; give it space or permission, or choose another "
                f"folder (folder = ...)"
            ) from error
        self._is_full = False
        self._writers: list[Callable[[str, float, int], None]] = []
        self._closers: list[Callable[[], object]] = [self._file.close]
        if run.log.tensorboard:
            board = _TensorBoard(run.folder / "tensorboard", step)
            self._writers.append(board.write)
            self._closers.append(board.close)
        if run.log.wandb is not None:
            self._add_wandb(run.log.wandb, {"run": run.to_toml()})

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes one event, e.g. of kind 'step' or 'evaluation'."""
        self._append((json.dumps({"kind": kind, "step": step, "time": time.time(), **values}) + "\n").encode())
        for name, value in values.items():
            if isinstance(value, (int, float)) and name != "step":
                for writer in self._writers:
                    writer(f"{kind}/{name}", float(value), step)

    def step(self, metrics: StepMetrics) -> None:
        """Writes the metrics of one training step."""
        self.write("step", metrics.step, metrics.to_json())

    def _append(self, line: bytes) -> None:
        """Writes a whole line or nothing. A full disk is reported once and does not end the run."""
        size_bytes = os.fstat(self._file.fileno()).st_size
        try:
            if (self._file.write(line) or 0) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._is_full = False
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size_bytes)
            if not self._is_full:
                logger.warning(
                    "weft: %s cannot be written (%s): steps are missing in it", self._file.name, error.strerror
                )
            self._is_full = True

    def close(self) -> None:
        """Closes all logs."""
        for close in self._closers:
            close()

    def _add_wandb(self, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(f"log.wandb = '{project}' needs wandb; pip install 'weft[wandb]'") from None
        run = wandb.init(project=project, config=dict(config))
        self._writers.append(lambda name, value, step: run.log({name: value}, step=step))
        self._closers.append(run.finish)


class _TensorBoard:
    """A log for TensorBoard. Its writer does not work again after an error (a full disk), so nothing is logged then."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("log.tensorboard = true needs tensorboard; pip install 'weft[log]'") from None
        self._folder = folder
        self._board: SummaryWriter | None = None
        with self._telling():
            self._board = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, name: str, value: float, step: int) -> None:
        """Writes one value, later and in another thread."""
        if self._board is not None:
            with self._telling():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        if self._board is not None:
            with self._telling():
                self._board.close()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._board = None
            reason = error.strerror or error
            logger.warning("weft: %s cannot be written (%s): nothing is logged there any more", self._folder, reason)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns what a run has logged, in order, without lines that are damaged or incomplete."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [event for line in lines if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a line of the log; None if the line is damaged or incomplete."""
    try:
        found = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(found, dict) and isinstance(found.get("kind"), str) and isinstance(found.get("step"), int)
    return found if is_event else None


def _forget_after(path: Path, step: int) -> None:
    """Removes the lines after `step`, which a killed run logged after its last checkpoint and will log again.

    Removes also lines that are damaged or incomplete.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if (event := _event(line)) is not None and event["step"] <= step]
    if kept != lines:
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(b"".join(kept))
            temporary.replace(path)
        except OSError as error:  # the run goes on: nothing is lost
            whole = sum(len(line) for line in lines if line.endswith(b"\n"))
            with suppress(OSError):
                os.truncate(path, whole)  # an incomplete last line would spoil the next one
            with suppress(OSError):
                temporary.unlink()
            reason = error.strerror or error
            logger.warning("weft: %s cannot be written anew (%s): it keeps lines after step %d", path, reason, step)
