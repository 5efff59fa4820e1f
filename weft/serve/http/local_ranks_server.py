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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.launch.agent import Restarts, ResumePoint, start_local
from weft.launch.environment import detect
from weft.launch.fork_server import ForkServer
from weft.serve.http.answers import error_body
from weft.serve.http.run_server import Serving, run_rank
from weft.serve.weights.usable_weights import ServedRecord

RESTARTS = Restarts(limit=5, window_seconds=3600.0)
HEAD_BYTES = 1 << 16
HEAD_SECONDS = 2.0
POLL_SECONDS = 0.1
READY, SERVED = "ready", "served"  # files: the server listens; the weights that it serves


def start_server(serving: Serving, sock: socket.socket) -> int:
    """Serve on local ranks, on a socket that listens, until SIGTERM or Ctrl-C. Returns the exit status."""
    main = partial(_serve_as_rank, serving, sock)
    with ForkServer(main) as fork_server, tempfile.TemporaryDirectory(prefix="weft-serve-") as folder:
        is_ready = Path(folder) / READY

        def before_start() -> ResumePoint:
            with suppress(FileNotFoundError):
                is_ready.unlink()
            return ResumePoint(words="read the weights that were served last; requests get 503 until then")

        with UnreadyAnswers(sock, is_ready.exists):
            return start_local(
                fork_server,
                serving.plan.num_ranks,
                [folder],
                {},
                RESTARTS,
                before_start,
                stopping="finish their requests and stop",
                has_worked=is_ready.exists,
            )


def _serve_as_rank(serving: Serving, sock: socket.socket, arguments: list[str]) -> None:
    """Serve as a rank, which is forked from the process that made `sock`. Rank 0 takes its connections. What ranks say
    to the process that starts them is in the folder that `arguments` name.
    """
    rank_info, folder = detect(os.environ), Path(arguments[0])
    assert rank_info is not None
    if rank_info.rank > 0:
        sock.close()

    def ready(about: dict[str, Any]) -> None:
        (folder / READY).touch()
        serving.ready(about)

    record = ServedRecord(folder / SERVED)
    run_rank(replace(serving, ready=ready), rank_info, sock if rank_info.rank == 0 else None, record)


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
        head_data, until = b"", time.monotonic() + HEAD_SECONDS
        while b"\r\n\r\n" not in head_data and len(head_data) < HEAD_BYTES and time.monotonic() < until:
            chunk = connection.recv(4096)
            if not chunk:
                break
            head_data += chunk
        connection.sendall(head.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        with suppress(TimeoutError):
            # A reset before the client reads would lose the answer.
            while time.monotonic() < until and connection.recv(1 << 16):
                pass
