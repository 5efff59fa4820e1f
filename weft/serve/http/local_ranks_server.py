"""Serves a model on several ranks of this machine: starts them, and answers 503 while none of them serves.

    this process     listens, watches the ranks (launch/agent.py), answers 503 until they are ready
      fork server    starts ranks, which inherit the socket
        rank 0       accepts connections when the model is loaded; schedules
        rank 1, ..   compute

When a rank dies, all are started again and read the weights that were served last. The socket stays open
throughout, so no client is refused a connection.
"""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.launch.agent import Restarts, ResumePoint, start_local
from weft.launch.environment import detect
from weft.launch.fork_server import ForkServer
from weft.plan import Plan
from weft.schema import build_dataclass, to_table
from weft.serve.calibration.bars import Bar, no_bar
from weft.serve.http.answers import error_body
from weft.serve.http.run_server import Ready, Say, run_rank
from weft.serve.spec import ServingSpec
from weft.serve.weights.usable_weights import ServedRecord

RESTARTS = Restarts(limit=5, window_seconds=3600.0)
HEAD_BYTES = 1 << 16
HEAD_SECONDS = 2.0
POLL_SECONDS = 0.1


def start_server(fork_server: ForkServer, sock: socket.socket, source: Path, spec: ServingSpec, plan: Plan) -> int:
    """Serve on local ranks until SIGTERM or Ctrl-C. Returns the exit status.

    The fork server must have been started after `sock` was made, with a program that calls `serve_as_rank`.
    """
    with tempfile.TemporaryDirectory(prefix="weft-serve-") as folder:
        is_ready = Path(folder) / "ready"
        order = {
            "source": str(source),
            "spec": spec.to_json(),
            "plan": to_table(plan),
            "socket": sock.fileno(),
            "ready": str(is_ready),
            "served": str(Path(folder) / "served"),
        }

        def before_start() -> ResumePoint:
            with suppress(FileNotFoundError):
                is_ready.unlink()
            return ResumePoint(words="read the weights that were served last; requests get 503 until then")

        with UnreadyAnswers(sock, is_ready.exists):
            return start_local(
                fork_server,
                plan.num_ranks,
                [json.dumps(order)],
                {},
                RESTARTS,
                before_start,
                stopping="finish their requests and stop",
                has_worked=is_ready.exists,
            )


def serve_as_rank(arguments: list[str], ready: Ready, say: Say, bar: Bar = no_bar) -> None:
    """Run a rank of `start_server`."""
    order = json.loads(arguments[0])
    rank_info = detect(os.environ)
    assert rank_info is not None
    spec = ServingSpec.from_json(order["spec"])
    sock: socket.socket | None = socket.socket(fileno=order["socket"])
    if rank_info.rank > 0:
        assert sock is not None
        sock.close()
        sock = None

    def say_ready(about: dict[str, Any]) -> None:
        Path(order["ready"]).touch()
        ready(about)

    plan = build_dataclass(Plan, order["plan"], "plan")
    record = ServedRecord(Path(order["served"]))
    run_rank(Path(order["source"]), spec, plan, rank_info, sock, say_ready, say, bar, record)


class UnreadyAnswers:
    """Answers every connection with 503, in a thread, as long as `is_ready` is false."""

    def __init__(self, sock: socket.socket, is_ready: Callable[[], bool]) -> None:
        self._sock, self._is_ready = sock, is_ready
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unready", daemon=True)

    def __enter__(self) -> None:
        self._sock.setblocking(False)  # also for the ranks, whose socket is the same
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            if self._is_ready():
                self._end.wait(POLL_SECONDS)
                continue
            if select.select([self._sock], [], [], POLL_SECONDS)[0] and not self._is_ready():
                with suppress(OSError):  # the client is gone, or a rank took the connection
                    connection, _ = self._sock.accept()
                    threading.Thread(target=_refuse, args=(connection,), daemon=True).start()


def _refuse(connection: socket.socket) -> None:
    """Answer one connection with 503, once its request's head is read."""
    body = json.dumps(error_body(503, "the model is being loaded; try again in some seconds")).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with connection, suppress(OSError):
        connection.settimeout(HEAD_SECONDS)
        given, until = b"", time.monotonic() + HEAD_SECONDS
        while b"\r\n\r\n" not in given and len(given) < HEAD_BYTES and time.monotonic() < until:
            chunk = connection.recv(4096)
            if not chunk:
                break
            given += chunk
        connection.sendall(head.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        with suppress(TimeoutError):
            # A reset before the client reads would lose the answer.
            while time.monotonic() < until and connection.recv(1 << 16):
                pass
