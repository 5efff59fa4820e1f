"""What a server says of its work: a line for each request, rates while there is work, and no texts."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from serve_for_tests import RepeatingEngine

from weft.errors import ConfigError
from weft.serve.http.metrics import RequestLog, ServerMetrics, say_rates
from weft.serve.spec import ServingSpec
from weft.serve.worker import EngineWorker


def logged(path: str, fails: bool = False, status: int | None = 200, answer: Any = None) -> str:
    said = list[str]()
    times = iter([3.0, 4.5])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if answer is not None:
            scope["answer"] = answer
        if status is not None:
            await send({"type": "http.response.start", "status": status})
        if fails:
            raise RuntimeError("broken")

    async def send(message: Any) -> None:
        assert message["status"] == status

    scope = {"type": "http", "path": path, "method": "POST", "client": ("127.0.0.1", 5)}
    with suppress(RuntimeError):
        asyncio.run(RequestLog(app, said.append, lambda: next(times))(scope, None, send))  # type: ignore[arg-type]
    assert len(said) == 1
    return said[0]


def test_each_request_has_a_line_without_texts() -> None:
    answer = SimpleNamespace(num_prompt_tokens=7, num_tokens=20)
    assert logged("/v1/completions", answer=answer) == "127.0.0.1 POST /v1/completions 200, 7 + 20 tokens, 1.500 s"
    assert logged("/x", status=404) == "127.0.0.1 POST /x 404, 1.500 s"
    assert logged("/x", fails=True, status=None) == "127.0.0.1 POST /x no answer, 1.500 s"


def test_a_path_stays_in_its_line() -> None:
    line = logged("/a\nweft: all is well\x1b[2J" + "b" * 1000)
    assert line.isprintable()
    assert "\\nweft" in line
    assert len(line) < 200


def test_rates_are_said_while_there_is_work() -> None:
    said = list[str]()

    async def main() -> None:
        engine = RepeatingEngine()
        worker, metrics = EngineWorker(engine), ServerMetrics()
        task = asyncio.create_task(say_rates(worker, metrics, said.append, 0.01))
        await asyncio.sleep(0.1)
        assert not said
        metrics.num_prompt_tokens += 50
        metrics.whole.add(1.0)
        while not said:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()

    asyncio.run(main())
    assert len(said) == 1
    given = re.fullmatch(r"([0-9.]+) requests/s, ([0-9]+) prompt and 0 generated tokens/s; 0 running, .*", said[0])
    assert given is not None
    assert float(given[2]) == pytest.approx(50 * float(given[1]), rel=0.2)


def test_an_unknown_log_is_refused() -> None:
    with pytest.raises(ConfigError, match="--log all is unknown; give rates, requests or none"):
        ServingSpec(log="all")
