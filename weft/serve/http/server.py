"""The HTTP server: listens, and stops without losing what it has begun.

On SIGTERM or Ctrl-C it takes no more requests (503) and finishes those that it has, for at most `drain_seconds`: an
HTTP request may ask for several answers, one after the other. A second signal stops it at once. If the engine fails, it
tells those who wait, and stops.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from weft.serve.http.connections import Connection, connection_places
from weft.serve.http.running_answer import LAST_WORDS_SECONDS
from weft.serve.spec import ServerLimits
from weft.serve.worker import EngineWorker

CLOSE_SECONDS = 3  # for responses to be sent after the last token
FORCED_END_SECONDS = 8  # after the drain; then what holds the process up, as a library's computation, is left behind
TICKS_A_SECOND = 10
STOPPING = "the server stops and takes no more requests; ask another one, or this one when it is back"


class HttpServer(uvicorn.Server):
    """Serves an application until a signal, or `drain`, and then until its requests are done.

    `ready` is called when it listens; `beside` run in its event loop as long as it serves.
    """

    def __init__(
        self,
        app: ASGIApp,
        worker: EngineWorker,
        limits: ServerLimits,
        ready: Callable[[], None],
        beside: Sequence[Coroutine[Any, Any, None]] = (),
    ) -> None:
        busy_seconds = limits.body_seconds + limits.request_seconds + 2 * LAST_WORDS_SECONDS
        config = uvicorn.Config(
            app,
            http=partial(Connection, places=connection_places(), busy_seconds=busy_seconds),  # type: ignore[arg-type]
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        super().__init__(config)
        self._worker, self._limits, self._ready, self._beside = worker, limits, ready, beside
        self._tasks: list[asyncio.Task[None]] = []
        self._drain_until: float | None = None
        self._forced_end: threading.Timer | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            if self._forced_end is not None:
                self._forced_end.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.start()
        await super().startup(sockets)
        self._tasks += map(asyncio.create_task, self._beside)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        self._worker.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal."""
        if self._drain_until is None:
            self.drain()
            self._end_after(self._limits.drain_seconds + FORCED_END_SECONDS)
        else:
            self.should_exit = True
            self._end_after(FORCED_END_SECONDS)

    def _end_after(self, seconds: float) -> None:
        """End the process by then, though a thread cannot be ended."""
        if self._forced_end is not None:
            self._forced_end.cancel()
        self._forced_end = threading.Timer(seconds, os._exit, (1,))
        self._forced_end.daemon = True
        self._forced_end.start()

    def drain(self) -> None:
        """Take no more requests, and stop when those that are held are done."""
        self._worker.refuse(STOPPING)
        self._drain_until = time.monotonic() + self._limits.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._worker.has_failed:  # ranks start again, or whoever watches this process starts it
            self.should_exit = True
        if self._drain_until is not None:
            is_done = self._worker.num_clients == 0 or self._worker.stalled_seconds is not None
            self.should_exit = self.should_exit or is_done or time.monotonic() > self._drain_until
        if counter % TICKS_A_SECOND == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.end_if_late()
        return await super().on_tick(counter)
