"""What stands before every end point: the API key, the host's name, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.errors import ConfigError, NumbersError
from weft.serve.http.answers import error_body
from weft.serve.http.metrics import ServerMetrics
from weft.serve.http.request_body import ApiError
from weft.serve.scheduling.request import RequestError
from weft.serve.spec import ServerLimits
from weft.serve.worker import EngineWorker, UnavailableError

T = TypeVar("T")
OPEN_PATHS = ("/", "/health")  # need no API key
MAX_MESSAGE_CHARACTERS = 1000
DISCARDED_BYTES = 16 << 20  # of a body that is too large: many clients read the answer only after they sent all of it


class HttpGuard:
    """Refuses requests without a key, and counts responses. In `scope["tenant"]` is the number of the key used.

    A server that is meant for this machine alone answers under its own `names` only: the page of a stranger, open in a
    browser on this machine, could otherwise reach it under a name of its own (DNS rebinding). `paths` are those of end
    points, by the functions that answer there.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        names: Sequence[str] | None,
        metrics: ServerMetrics,
        paths: Mapping[Any, str],
    ) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]
        self._names, self._metrics, self._paths = names, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = self._paths.get(scope.get("endpoint"), "other")
                self._metrics.responses[path, message["status"]] += 1
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, counted)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._names is not None and name not in self._names:
            return _refused(403, f"this server answers on {', '.join(self._names)} only, not as '{name:.100}'")
        if not self._keys:
            scope["tenant"] = "0"
            return None
        scheme, _, key_given = headers.get(b"authorization", b"").partition(b" ")
        given = key_given.strip() if scheme.lower() == b"bearer" else b""
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all, in constant time
        scope["tenant"] = str(matches.index(True)) if any(matches) else ""
        if any(matches) or scope["path"] in OPEN_PATHS:
            return None
        return _refused(
            401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", "invalid_api_key"
        )


class OpenRequests:
    """Counts the requests to an end point that computes, from their beginning until they are answered. Refuses more of
    them when the server stops.
    """

    def __init__(self, app: ASGIApp, worker: EngineWorker) -> None:
        self._app, self._worker = app, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._worker.client():
            await self._app(scope, receive, send)


async def read_body(request: HttpRequest, limits: ServerLimits) -> bytes:
    """Returns the JSON body of a request, within the limits. Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of a stranger can send other types without the browser's asking
        raise ApiError(415, f"the body's type is '{kind:.100}'; send 'Content-Type: application/json'")
    data = bytearray()
    num_bytes = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= limits.body_bytes:
                    data += part
                elif num_bytes > limits.body_bytes + DISCARDED_BYTES:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    if num_bytes > limits.body_bytes:
        raise ApiError(413, f"the body is larger than {limits.body_bytes} bytes; send a shorter prompt")
    return bytes(data)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which is cancelled as soon as the client is gone. Then raises ClientDisconnect."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


LATE = "the answer was not finished within the server's time limit; ask for fewer tokens or texts"


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body for an error."""
    status, message, code = 500, str(error), None
    match error:
        case ApiError():
            status, code = error.status, error.code
        case RequestError(reason="queue_full"):
            status, code = 429, "queue_full"
        case RequestError(reason="too_long"):
            status, code = 400, "context_length_exceeded"
        case UnavailableError():
            status, code = 503, "unavailable"
        case NumbersError():
            code = "not_a_number"
        case RequestError() | ConfigError():
            status = 400
        case TimeoutError():
            status, message, code = 504, LATE, "timeout"
        case HTTPException():
            status, message = error.status_code, error.detail
        case _:
            message = f"an error of the server: {type(error).__name__}; its log says more"
    return status, error_body(status, message[:MAX_MESSAGE_CHARACTERS], code)


async def respond_to_error(request: HttpRequest, error: Exception) -> Response:
    """Returns the response for an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it; it is counted
    status, body = error_answer(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


_HANDLED = (
    ApiError,
    RequestError,
    UnavailableError,
    ConfigError,
    NumbersError,
    TimeoutError,
    HTTPException,
    ClientDisconnect,
)
ERROR_HANDLERS: dict[Any, Callable[[HttpRequest, Exception], Awaitable[Response]]] = dict.fromkeys(
    (*_HANDLED, Exception), respond_to_error
)


def _refused(status: int, message: str, code: str | None = None) -> Response:
    return JSONResponse(error_body(status, message, code), status)
