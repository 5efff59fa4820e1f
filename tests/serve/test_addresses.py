"""What `weft serve` refuses before a model is read, what its ranks know of their host, and where it listens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve_for_tests import OPTIONS, ReachedError, RepeatingEngine, serving, to_serve
from serving_for_tests import tiny_model, tiny_recurrent

from weft.errors import ConfigError, PlanError
from weft.launch.environment import RankInfo
from weft.models import save_folder
from weft.plan import Plan
from weft.serve.attention.formats import Loki, save_loki
from weft.serve.http import run_server
from weft.serve.http.addresses import is_loopback, names_of
from weft.serve.http.run_server import refuse_options, run_rank
from weft.serve.loading import load_model


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
            run_server.run_server(to_serve(tmp_path, replace(OPTIONS, host=host)))

    async def status(app: Any, url: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return (await client.get(f"{url}/health")).status_code

    own, any_name = apps
    assert asyncio.run(status(own, "http://127.0.0.2:8000")) == 200
    assert asyncio.run(status(own, "http://evil.example")) == 403
    assert asyncio.run(status(any_name, "http://evil.example")) == 200


def test_a_rank_knows_how_many_are_on_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path, tiny_model("llama"))  # type: ignore[arg-type]
    given = list[Any]()

    def mesh(*arguments: Any) -> None:
        given.append(arguments)
        raise ReachedError

    monkeypatch.setattr(run_server, "init_process_group", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(run_server, "Mesh", mesh)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    plan, second_host = Plan(data=4), RankInfo(2, 4, 0, 2, 2, "torchrun")
    with pytest.raises(ReachedError):
        run_rank(to_serve(tmp_path, OPTIONS, plan), second_host)
    assert given == [(plan, torch.device("cpu"), 2)]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_a_recurrent_model_does_not_have_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_recurrent(kind, vocab_size=257))
    about = "a recurrent model is served on one rank, with its weights as they are, on the device, and keeps one "
    about += "state for each request and no keys and values; leave out "
    for options, plan, names in (
        ({"weights": "int4"}, Plan(), "--weights"),
        ({"weights": "int4", "calibration": "text"}, Plan(), "--weights and --calibration"),
        ({"merge_adapter": "adapter"}, Plan(), "--merge-adapter"),
        ({"stream_weights": 1, "resident_blocks": 1}, Plan(), "--stream-weights and --resident-blocks"),
        ({}, Plan(data=2), "the plan"),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse_options(tmp_path, replace(OPTIONS, **options), plan)  # type: ignore[arg-type]
        assert str(caught.value) == about + names
    refuse_options(tmp_path, OPTIONS, Plan())
    with pytest.raises(ConfigError) as caught:  # as weft generate --weights int4
        load_model(tmp_path, replace(OPTIONS, weights="int4"))
    assert str(caught.value) == about + "--weights"


def test_axes_are_of_the_weights_that_they_were_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path, tiny_model("llama"))  # type: ignore[arg-type]
    save_loki(tmp_path / "axes", Loki(torch.eye(4).expand(2, 2, 4, 4), identity="any"))
    monkeypatch.setattr(run_server, "require_run", lambda source: None)
    options = replace(OPTIONS, cache=f"loki={tmp_path / 'axes'}")
    with pytest.raises(ConfigError, match="--follow replaces weights, of which the axes of --cache loki are made; le"):
        refuse_options(tmp_path, replace(options, follow=True), Plan())
    with pytest.raises(PlanError, match=r"cannot compare them with the file of --cache .*loki; leave out plan\.data, "):
        refuse_options(tmp_path, replace(options, stream_weights=1), Plan(data=2))
    refuse_options(tmp_path, replace(options, stream_weights=1), Plan())
    refuse_options(tmp_path, options, Plan(data=2))
    refuse_options(tmp_path, replace(OPTIONS, cache="int4", follow=True), Plan(data=2))
