"""A process that forks ranks. It is created before this process computes anything, so a rank starts in milliseconds.

Importing torch takes seconds, on every rank and at every restart. The fork server is forked from a process that has
imported everything but has started no threads and used no GPU. It stays so: it only waits, forks ranks and reports
their exits.

    fork_server = ForkServer(main, jobs={"gpus": look})  # before anything else
    fork_server.call("gpus")                             # -> look()'s result, computed in a child, as JSON
    pids = fork_server.start(4, arguments, environ)      # runs main(arguments) on four ranks, each in its own session
    fork_server.next_exit(timeout_seconds)               # -> RankExit(rank, status), or None

This process and the fork server exchange lines of JSON over a socket pair that no other process can reach. When this
process dies, the fork server asks its ranks to save and stop.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from weft.cluster.local_gpus import VISIBLE_VARIABLE
from weft.errors import LaunchError, LocalError, WeftError, error_class
from weft.health.rank_status import record_failure
from weft.launch.fork import fork

Main = Callable[[list[str]], object]
Job = Callable[..., Any]  # takes keyword arguments and returns a result that JSON can represent

LOOPBACK = "127.0.0.1"
LISTENER_VARIABLE = "WEFT_LISTENER"  # the file descriptor of the socket on which rank 0's store listens
REJOIN_VARIABLE = "WEFT_REJOIN"  # set for a rank that was started again alone, while the others went on
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # whose handlers the fork server does not keep
SAVE_SECONDS = 600.0  # how long ranks that were asked to stop may take to save


@dataclass(frozen=True)
class RankExit:
    """The exit of a rank. `status` is its exit status, or -n if signal n killed it."""

    rank: int
    status: int


class ForkServer:
    """Starts the fork server and sends it requests. Ranks run `main(arguments)`. `jobs` maps names to functions that
    `call` runs in a child each. The fork server runs `warm` once, before the first rank but after the first job.
    """

    def __init__(
        self, main: Main, warm: Callable[[], object] = lambda: None, jobs: Mapping[str, Job] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            # A signal to the process group waits until the child has a session of its own and no handlers of ours.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            self._pid = fork()
            if self._pid == 0:
                try:
                    ours.close()
                    _become_server(held)
                    _Server(theirs, main, jobs or {}).serve(warm)
                finally:
                    os._exit(0)
        finally:  # also where nothing can be forked
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()
        self._lines = _JsonLines(ours)
        self._exits: deque[dict[str, Any]] = deque()  # exits of ranks that arrived while `call` waited for a job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        os.waitpid(self._pid, 0)

    def start(self, num_ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> list[int]:
        """Start all ranks. Each gets `environ` and the variables of its rank. Returns the process ids by rank."""
        self._lines.write({"num_ranks": num_ranks, "arguments": list(arguments), "environ": dict(environ)})
        answer = self._read(None)
        assert answer is not None
        return list(answer["pids"])

    def start_again(self, rank: int) -> int:
        """Start one rank of the last `start` again, whose others still run. Returns its process id."""
        self._lines.write({"rank": rank})
        while (answer := self._read(None)) is None or "pids" not in answer:
            if answer is not None:
                self._exits.append(answer)
        return int(answer["pids"][0])

    def next_exit(self, timeout_seconds: float) -> RankExit | None:
        """Wait for the next exit of a rank; None if there is none within `timeout_seconds`."""
        answer = self._exits.popleft() if self._exits else self._read(timeout_seconds)
        return None if answer is None else RankExit(answer["rank"], answer["status"])

    def call(self, job: str, **arguments: Any) -> Any:
        """Run a job in a child of the fork server and return its result. A WeftError of the job is raised here again;
        any other error, and the child's death, raise LocalError.
        """
        with tempfile.TemporaryDirectory(prefix="weft-job-") as folder:
            path = Path(folder) / "answer"
            self._lines.write({"job": job, "arguments": arguments, "path": str(path)})
            while (ended := self._read(None)) is None or "job" not in ended:
                if ended is not None:
                    self._exits.append(ended)
            if not path.exists():
                raise LocalError(f"the process of '{job}' died with status {ended['status']} and left no answer")
            answer = json.loads(path.read_text())
        if "error" not in answer:
            return answer["result"]
        kind = error_class(answer["error"]) if answer["is_expected"] else None
        if kind is None:
            raise LocalError(f"'{job}' failed: {answer['error']}: {answer['message']}\n{answer['trace']}")
        raise kind(answer["message"])

    def _read(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        try:
            return self._lines.read(timeout_seconds)
        except (EOFError, OSError):
            raise LaunchError("the process that starts the ranks was killed; run the same command to go on") from None


class _JsonLines:
    """Sends and receives JSON values over a socket, one per line."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._text = b""

    def write(self, value: Mapping[str, Any]) -> None:
        self.link.sendall(json.dumps(value).encode() + b"\n")

    def read(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        """Returns the next value, or None if none came in time. Raises EOFError if the other end is closed."""
        while b"\n" not in self._text:
            if not select.select([self.link], [], [], timeout_seconds)[0]:
                return None
            chunk = self.link.recv(1 << 16)
            if not chunk:
                raise EOFError
            self._text += chunk
        line, _, self._text = self._text.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value

    def close(self) -> None:
        self.link.close()


class _Server:
    """The loop that runs in the fork server's process."""

    def __init__(self, link: socket.socket, main: Main, jobs: Mapping[str, Job]) -> None:
        self._lines, self._main, self._jobs = _JsonLines(link), main, jobs
        self._ranks: dict[int, int] = {}  # process id -> rank, for ranks whose exit was not reported yet
        self._ended: list[int] = []  # ids of ranks that were reported but not reaped, so that their ids are not reused
        self._busy: set[int] = set()  # process ids of jobs
        self._started: tuple[int, list[str], dict[str, str], int]  # ranks, arguments, variables and port of `start`
        self._visible = os.environ.get(VISIBLE_VARIABLE)  # the visible GPUs; the parent may hide them from itself later

    def serve(self, warm: Callable[[], object]) -> None:
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake)
        is_warm = has_served = False
        with suppress(EOFError, OSError):  # OSError: the parent died while this process wrote to it
            while True:
                if not is_warm and has_served and not self._busy:
                    warm()
                    is_warm = True
                ready, _, _ = select.select([self._lines.link.fileno(), woken], [], [])
                if woken in ready:
                    os.read(woken, 4096)
                    self._report_exits()
                    self._report_jobs()
                if self._lines.link.fileno() in ready:
                    request = self._lines.read(None)
                    assert request is not None
                    if not is_warm and (has_served or "job" not in request):  # the first job does not wait for warm()
                        warm()
                        is_warm = True
                    has_served = True
                    if "job" in request:
                        self._start_job(request)
                    elif "rank" in request:
                        self._lines.write({"pids": [self._start_rank(request["rank"], None, {REJOIN_VARIABLE: "1"})]})
                    else:
                        self._lines.write({"pids": self._start(**request)})
        self._end()

    def _report_exits(self) -> None:
        """Report all ranks that have exited by now. They are not reaped yet: the parent may still send them signals,
        and the process id of a reaped process may be reused.
        """
        for pid in list(self._ranks):
            if hasattr(os, "waitid"):
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    continue
                status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                self._ended.append(pid)
            else:  # macOS
                reaped, code = os.waitpid(pid, os.WNOHANG)
                if not reaped:
                    continue
                status = os.waitstatus_to_exitcode(code)
            self._lines.write({"rank": self._ranks.pop(pid), "status": status})

    def _reap(self) -> None:
        while self._ended:
            os.waitpid(self._ended.pop(), 0)

    def _start_job(self, request: Mapping[str, Any]) -> None:
        pid = fork()
        if pid == 0:
            self._lines.close()
            _become_child()
            _run_job(self._jobs[request["job"]], request["arguments"], Path(request["path"]))
        self._busy.add(pid)

    def _report_jobs(self) -> None:
        """Report all jobs that have ended by now."""
        for pid in list(self._busy):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._busy.remove(pid)
                self._lines.write({"job": pid, "status": os.waitstatus_to_exitcode(status)})

    def _start(self, num_ranks: int, arguments: list[str], environ: dict[str, str]) -> list[int]:
        self._reap()
        environ.pop(VISIBLE_VARIABLE, None)
        environ |= {VISIBLE_VARIABLE: self._visible} if self._visible is not None else {}
        # Bound here, so that all ranks know the port and no other process can take it before rank 0 listens.
        with socket.create_server((LOOPBACK, 0)) as listener:
            self._started = num_ranks, arguments, environ, listener.getsockname()[1]
            return [self._start_rank(rank, listener, {}) for rank in range(num_ranks)]

    def _start_rank(self, rank: int, listener: socket.socket | None, more: dict[str, str]) -> int:
        """Fork one rank with the variables `more`. Rank 0 gets the socket that its store listens on."""
        num_ranks, arguments, environ, port = self._started
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        place |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": port}
        if rank == 0 and listener is not None:
            place[LISTENER_VARIABLE] = listener.fileno()
        pid = fork()
        if pid == 0:
            if rank == 0 and listener is not None:
                listener.set_inheritable(True)  # in case the rank calls exec
            elif listener is not None:
                listener.close()
            self._lines.close()
            own = {"MASTER_ADDR": LOOPBACK, **{name: str(value) for name, value in place.items()}}
            _run(self._main, arguments, environ | own | more)
        self._ranks[pid] = rank
        return pid

    def _end(self) -> None:
        """Stop after the parent has exited: kill jobs, let ranks save, wait for them, kill those that take too long."""
        self._reap()
        for pid in self._busy:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._ranks:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + SAVE_SECONDS
        while self._ranks and time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            self._ranks.pop(pid, None)
            time.sleep(0.05)
        for pid in self._ranks:
            os.killpg(pid, signal.SIGKILL)


def _run(main: Main, arguments: list[str], environ: dict[str, str]) -> None:
    """Run a rank in a forked child and exit with its status."""
    status = 1
    try:
        _become_child()
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))  # OpenMP was loaded before the variable was set
        main(arguments)
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        status = record_failure(environ, int(environ["RANK"]), error)
    finally:
        _leave(status)


def _leave(status: int) -> None:
    """End a forked child, without the parent's exit handlers."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _become_server(mask: Iterable[int]) -> None:
    """Start a new session, so that the terminal's signals go to the parent only; remove handlers, then set the mask."""
    os.setsid()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_child() -> None:
    """Start a new session and remove the fork server's signal handlers."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _run_job(job: Job, arguments: Mapping[str, Any], path: Path) -> None:
    """Run a job in a forked child, write its answer to `path` and exit. The file appears complete or not at all."""
    status = 1
    try:
        try:
            answer: dict[str, Any] = {"result": job(**arguments)}
            status = 0
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
            answer["is_expected"] = isinstance(error, WeftError)
        written = path.with_suffix(".part")
        written.write_text(json.dumps(answer))
        written.rename(path)
    finally:
        _leave(status)
