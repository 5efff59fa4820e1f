"""Connections with limits of their own: idle and slow ones end, and give their places to clients that ask.

uvicorn waits for a request's head for ever. Here a connection that waits longer than `WAIT_SECONDS` for a whole head is
closed, however it sends its bytes, and so is one that reads no answer. When all places are taken, the connection that
has waited longest for its head gives its place to a new one. So clients without a key, whose requests are refused at
once, cannot keep out those that have one. Errors are JSON.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.serve.http.addresses import MAX_CONNECTIONS
from weft.serve.http.answers import error_body, json_text

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
