"""Tries schemas in processes of their own before this process compiles them: a schema may take hours, or all memory.

    trials = SchemaTrials(vocabulary)
    trials.run(schema, trial := SchemaTrial())       # raises RequestError if it does not compile within limits
    trial.cancel()                             # from another thread: the process ends, and `run` raises

A process is kept for the next schema, so an ordinary one costs milliseconds. A schema that was refused is remembered.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.serve.scheduling.request import RequestError
from weft.serve.scheduling.schema_compile import (
    MAX_MATCHER_BYTES,
    TRIAL_BYTES,
    TRIAL_CPU_SECONDS,
    VocabularyText,
    told,
    unusable,
)

NUM_PROCESSES = 2
WALL_SECONDS = 20.0  # of a trial on a machine that is busy
START_SECONDS = 60.0  # for a process to read a vocabulary
MAX_REMEMBERED = 256  # schemas that were refused
FRESH_BYTES = 8 << 20  # a process that grew by more ends: memory that it uses again would not be counted


class TrialCancelledError(WeftError):
    """Nobody waits for the trial any more."""


class SchemaTrial:
    """A trial that another thread may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: TrialProcess | None = None
        self.is_cancelled = False

    def begin(self, process: TrialProcess) -> None:
        """Say that the trial runs in this process. Raises TrialCancelledError if it is cancelled."""
        with self._lock:
            if self.is_cancelled:
                raise TrialCancelledError("the client is gone")
            self._process = process

    def end(self) -> None:
        """Say that the process is used for other trials from now on."""
        with self._lock:
            self._process = None

    def cancel(self) -> None:
        """End the trial, and its process if it runs."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.kill()


class TrialProcess:
    """A process that tries one schema after the other."""

    def __init__(self, vocabulary: VocabularyText) -> None:
        root = str(Path(__file__).parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "weft.serve.scheduling.schema_compile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._is_new = True
        self.is_late = False  # did the answer not come in time, though no limit of its own ended the process?
        with suppress(OSError):  # a process that ended is found when it is asked
            self._write(told(vocabulary))

    def ask(self, schema: str) -> dict[str, Any] | None:
        """Returns the program's answer; None if a limit ended it, or `kill`."""
        assert self._popen.stdout is not None
        seconds = WALL_SECONDS + (START_SECONDS if self._is_new else 0)
        self._is_new = False
        data, until = b"", time.monotonic() + seconds
        try:
            self._write(json.dumps(schema) + "\n")
            while not data.endswith(b"\n"):
                left = until - time.monotonic()
                if left <= 0 or not select.select([self._popen.stdout], [], [], left)[0]:
                    self.is_late = True
                    return None
                part = os.read(self._popen.stdout.fileno(), 1 << 16)
                if not part:
                    return None
                data += part
        except OSError:
            return None
        answer: dict[str, Any] = json.loads(data)
        return answer

    @property
    def has_ended(self) -> bool:
        """Is the process gone?"""
        return self._popen.poll() is not None

    def kill(self) -> None:
        """End the process, from any thread."""
        self._popen.kill()

    def close(self) -> None:
        """End the process, and let go of it."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _write(self, line: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line.encode())
        self._popen.stdin.flush()


class SchemaTrials:
    """Tries schemas in a few processes, which are started when they are first needed. Several threads may use it."""

    def __init__(self, vocabulary: VocabularyText) -> None:
        self._vocabulary = vocabulary
        self._places, self._lock = threading.Semaphore(NUM_PROCESSES), threading.Lock()
        self._idle: list[TrialProcess] = []
        self._refused: OrderedDict[str, RequestError] = OrderedDict()
        weakref.finalize(self, _close_all, self._idle, os.getpid())

    def run(self, schema: str, trial: SchemaTrial) -> int:
        """Returns the bytes that a compiled schema keeps. Raises RequestError, or TrialCancelledError."""
        with self._lock:
            if schema in self._refused:
                raise self._refused[schema]
        try:
            with self._places:
                return self._run(schema, trial)
        except RequestError as refusal:
            if refusal.reason != "invalid":
                raise
            with self._lock:
                self._refused[schema] = refusal.with_traceback(None)
                while len(self._refused) > MAX_REMEMBERED:
                    self._refused.popitem(last=False)
            raise

    def _run(self, schema: str, trial: SchemaTrial) -> int:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or TrialProcess(self._vocabulary)
        answer, num_bytes = None, 0
        try:
            trial.begin(process)
            answer = process.ask(schema)
            num_bytes = 0 if answer is None else int(answer.get("bytes", 0))
        finally:
            trial.end()
            if answer is None or num_bytes > FRESH_BYTES:
                process.close()
            else:
                with self._lock:
                    self._idle.append(process)
        if trial.is_cancelled:
            raise TrialCancelledError("the client is gone")
        if process.is_late:
            raise RequestError(
                "queue_full", "the schema was not tried in time, as this machine is busy; try again later"
            )
        if answer is None:
            raise unusable(
                f"it takes more than {TRIAL_CPU_SECONDS} s or {TRIAL_BYTES >> 20} MiB to compile, as patterns under "
                f"'allOf' or a large 'multipleOf' may",
                schema,
            )
        if answer["error"] is not None:
            raise RequestError("invalid", answer["error"])
        if num_bytes > MAX_MATCHER_BYTES:
            raise unusable(
                f"it needs {num_bytes >> 20} MiB of memory, at most {MAX_MATCHER_BYTES >> 20} MiB are given", schema
            )
        return num_bytes


def _close_all(processes: Iterable[TrialProcess], owner: int) -> None:
    """End processes, in the process that started them: a forked one has copies."""
    if os.getpid() == owner:
        for process in processes:
            process.close()
