"""The HTTP server: listens, and stops without losing what it has begun.

On SIGTERM, SIGHUP or Ctrl-C it takes no more requests (503) and finishes those that it has, for at most
`drain_seconds`: an HTTP request may ask for several answers, one after the other. A second signal stops it at once. If
the engine fails, it tells those who wait, and stops.

uvicorn waits for a request's head for ever. Here a connection that waits longer than `WAIT_SECONDS` for a whole head is
closed, however it sends its bytes, and so is one that reads no answer. When all places are taken, the connection that
has waited longest for its head gives its place to a new one. So clients without a key, whose requests are refused at
once, cannot keep out those that have one. Errors are JSON.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.serve.http.addresses import MAX_CONNECTIONS
from weft.serve.http.answers import error_body, json_text
from weft.serve.http.running_answer import LAST_WORDS_SECONDS
from weft.serve.spec import ServerLimits
from weft.serve.worker import EngineWorker

CLOSE_SECONDS = 3  # for responses to be sent after the last token
FORCED_END_SECONDS = 8  # after the drain; then what holds the process up, as a library's computation, is left behind
TICKS_A_SECOND = 10
STOPPING = "the server stops and takes no more requests; ask another one, or this one when it is back"
WAIT_SECONDS = 10.0  # for the whole head of a request, from the connection's beginning or the last answer on
SHORT_SECONDS = 30.0  # of an answer that needs no body, or is refused, until its client has read it
OTHER_FILES = 256  # that the process may open beside connections
SPARE_PLACES = 64  # for answers that no place is free
FULL = "all connections of this server are in use; try again in some seconds"


class Connection(H11Protocol):
    """One connection. `places` connections are served; `busy_seconds` is the longest that a request may take."""

    def __init__(self, *given: Any, places: int = MAX_CONNECTIONS, busy_seconds: float = 1e9, **options: Any) -> None:
        super().__init__(*given, **options)
        self._places, self._busy_seconds = places, busy_seconds
        self._since = self.loop.time()  # when it began to wait for a head, or its request began

    @property
    def is_waiting(self) -> bool:
        """Does it wait for the head of a request?"""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self._places:
            return
        others = [one for one in self.connections if one is not self and isinstance(one, Connection)]
        waiting = [one for one in others if one.is_waiting and not one.transport.is_closing()]
        if waiting:
            min(waiting, key=lambda one: one._since).refuse(503, FULL)
        elif len(self.connections) <= self._places + SPARE_PLACES:
            self.app = JSONResponse(error_body(503, FULL), 503, {"Retry-After": "2", "Connection": "close"})
        else:
            transport.abort()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._since = self.loop.time()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg)

    def refuse(self, status: int, words: str) -> None:
        """Answer with an error, if the state of the connection allows it, and close it."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json_text(error_body(status, words)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def end_if_late(self) -> None:
        """Close the connection if its time is over."""
        seconds = self.loop.time() - self._since
        if self.transport.is_closing():
            return
        if self.is_waiting:
            if seconds > WAIT_SECONDS:
                self.refuse(408, f"the head of the request did not arrive within {WAIT_SECONDS:g} s")
            return
        is_short = self.scope["method"] != "POST" or not self.scope.get("tenant")
        if seconds > (min(SHORT_SECONDS, self._busy_seconds) if is_short else self._busy_seconds):
            self.transport.abort()


def connection_places() -> int:
    """Returns how many connections this process can hold, after it asked the system for as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_PLACES + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = wanted if soft == resource.RLIM_INFINITY else soft
    return max(1, min(MAX_CONNECTIONS, left - SPARE_PLACES - OTHER_FILES))


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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A terminal that is closed stops the server too, unless nohup has SIGHUP ignored."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGHUP)
        heeds = is_main and before is not signal.SIG_IGN
        if heeds:
            signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            if heeds:
                signal.signal(signal.SIGHUP, before)

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
