"""One streamed answer before the server is ready, by its own application: modules that are imported late, parsers and
threads of the first answer are then those of none that a client waits for.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from weft.errors import WeftError
from weft.serve.http.addresses import url_name
from weft.serve.http.end_points import Api, build_app
from weft.serve.served_model import ServedModel
from weft.serve.spec import ServerLimits
from weft.serve.worker import EngineWorker, StepEngine

_NUM_TOKENS = 4
_END_SECONDS = 10.0


def answer_once(model: ServedModel, engine: StepEngine, limits: ServerLimits, host: str) -> None:
    """Answer a made-up request as a server does, by a thread and counts of its own. Raises WeftError."""
    if model.context_length < _NUM_TOKENS:
        return
    worker = EngineWorker(engine)
    app = build_app(Api(model, worker, limits), (), host)
    body = {"model": model.name, "prompt": [0], "max_tokens": _NUM_TOKENS - 1, "stream": True}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", url_name(host).encode()), (b"content-type", b"application/json")],
    }
    sent = list[dict[str, Any]]()

    async def answered() -> None:
        worker.start()
        parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            return parts.pop() if parts else await asyncio.Future()  # the client stays

        async def send(message: Any) -> None:
            sent.append(message)

        try:
            await app(scope, receive, send)  # type: ignore[arg-type]
        finally:
            worker.close()
            worker.join(_END_SECONDS)

    asyncio.run(answered())
    answer = b"".join(one.get("body", b"") for one in sent).decode()
    if worker.has_failed or sent[0]["status"] != 200 or "[DONE]" not in answer:
        raise WeftError(f"the answer before the server was ready failed: {worker.failure or answer[:500]}")
