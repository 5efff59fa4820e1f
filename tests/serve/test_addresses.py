"""Which addresses are this machine's alone, and the names under which a server answers there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_for_tests import OPTIONS, ReachedError, RepeatingEngine, serving
from serving_for_tests import tiny_model

from weft.models import save_folder
from weft.serve.http import run_server
from weft.serve.http.addresses import is_loopback, names_of


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LocalHost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("127.example.com", False),
        ("127.", False),
        ("0.0.0.0", False),
        ("::", False),
        ("203.0.113.1", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_addresses_of_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert (names_of(host) is not None) is expected


def test_a_server_answers_under_the_address_that_it_listens_on() -> None:
    with serving(RepeatingEngine(), host="127.0.0.2") as served:
        for name, status in (("127.0.0.2:1", 200), ("localhost", 200), ("127.0.0.3", 403), ("evil.example", 403)):
            assert served.get("/health", headers={"Host": name}).status_code == status
        assert served.get("/health").status_code == 200
    assert names_of("0:0:0:0:0:0:0:1") == ("localhost", "127.0.0.1", "[::1]", "[0:0:0:0:0:0:0:1]")


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The applications that would be served."""
    found = list[Any]()

    def server(app: Any, *rest: Any) -> None:
        found.append(app)
        raise ReachedError

    monkeypatch.setattr(run_server, "HttpServer", server)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # no time is spent on the best number
    return found


def test_weft_serve_answers_under_its_own_url(tmp_path: Path, apps: list[Any]) -> None:
    save_folder(tmp_path, tiny_model("llama"))  # type: ignore[arg-type]
    for host in ("127.0.0.2", "0.0.0.0"):
        with pytest.raises(ReachedError):
            run_server.run_server(tmp_path, replace(OPTIONS, host=host), lambda about: None, lambda message: None)

    async def status(app: Any, url: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return (await client.get(f"{url}/health")).status_code

    own, any_name = apps
    assert asyncio.run(status(own, "http://127.0.0.2:8000")) == 200
    assert asyncio.run(status(own, "http://evil.example")) == 403
    assert asyncio.run(status(any_name, "http://evil.example")) == 200
