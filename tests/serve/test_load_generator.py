"""`weft bench serve`: what it says of a server is what the server did."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands_for_tests import caller
from serve_for_tests import RepeatingEngine, serving

from weft.commands.bench_serve import _places, bench_serve_command, usual_lengths
from weft.errors import ConfigError
from weft.serve.load_generator import HEAD, LoadOptions, RateResult, open_target, run_load, svg, table_row
from weft.serve.scheduling.request import Request


def test_a_load_counts_what_clients_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every token that was generated is counted; arrivals do not depend on answers, and prompts are never the same."""
    engine = RepeatingEngine()
    weft = caller(monkeypatch, capfd)
    with serving(engine) as served:
        options = ["--rate", 40, "--rates", 2, "--requests", 12, "--prompt-tokens", 8, "--answer-tokens", 6]
        left = weft("bench", "serve", served.url, *options, "--out", tmp_path / "load", "--json")
    assert left.status == 0, left.err
    found = left.json
    assert [one["rate"] for one in found["rates"]] == [40, 80]
    assert [one["num_answered"] for one in found["rates"]] == [12, 12]
    assert len(engine.requests) == 24
    lengths = [(len(one.tokens), one.max_tokens) for one in engine.requests]
    assert sorted(lengths[:12]) == sorted(lengths[12:])
    assert len({one.tokens for one in engine.requests}) == 24
    assert sum(num_tokens for _, num_tokens in lengths) == engine.num_generated
    for one in found["rates"]:
        assert 0 < one["first_token"]["p50"] <= one["first_token"]["p90"] <= one["first_token"]["p99"]
        assert one["per_token"]["p50"] > 0
    assert json.loads((tmp_path / "load.json").read_text()) == found
    texts = [node.text for node in ElementTree.parse(tmp_path / "load.svg").iter() if node.tag.endswith("text")]
    assert {"time to first token, ms", "time per token, ms", "output tokens/s", "40", "80", "p99"} <= set(texts)


def test_the_load_ends_when_the_server_is_saturated_or_refuses() -> None:
    engine = RepeatingEngine()
    told: list[RateResult] = []
    with serving(engine, max_requests=1) as served:
        target = asyncio.run(open_target(served.url, None))
        options = LoadOptions(first_rate=1000.0, num_requests=20, mean_prompt_tokens=8, mean_answer_tokens=20)
        results = asyncio.run(run_load(target, options, told.append))
        with pytest.raises(ConfigError, match="up to 150 tokens do not fit the server's context of 64"):
            asyncio.run(run_load(target, LoadOptions(mean_prompt_tokens=68), told.append))
    assert results == told
    assert len(results) == 1
    (one,) = results
    assert one.num_answered < 20
    assert one.errors == {"status 429": 20 - one.num_answered}
    assert f"{one.num_answered} of 20" in table_row(one)
    nothing = RateResult(1.0, 2, 0, 0.0, {}, {}, {"unfinished": 2})
    assert "nothing was answered" in svg([nothing], "none")
    assert table_row(nothing).endswith("2 unfinished")
    times = {"p50": 0.0123, "p90": 9.9, "p99": 99.0}
    assert max(map(len, (HEAD, table_row(RateResult(512.0, 9999, 9999, 99999.0, times, times, {}))))) <= 80


class ShortEngine(RepeatingEngine):
    """Ends each answer after two tokens, however many were asked for."""

    def add(self, request: Request) -> None:
        super().add(replace(request, max_tokens=2))


def test_answers_of_fewer_tokens_than_were_asked_for_are_no_answers() -> None:
    with serving(ShortEngine()) as served:
        target = asyncio.run(open_target(served.url, None))
        options = LoadOptions(first_rate=1000.0, num_requests=5, mean_prompt_tokens=8, mean_answer_tokens=20)
        (one,) = asyncio.run(run_load(target, options, lambda result: None))
    assert (one.num_answered, one.errors) == (0, {"cut short": 5})


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:1",
        "http://127.0.0.1:9",
        "http://",
        "http://127.0.0.1:abc",
        "http://127.0.0.1:70000",
        "http://[::1",
    ],
)
def test_a_url_without_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no (server|address)"):
        asyncio.run(open_target(url, None))


@pytest.mark.parametrize(
    ("out", "words"),
    [("none/load", "lies in a folder that does not exist"), ("taken", "is a folder"), (".", "names no file")],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.svg").mkdir()
    with pytest.raises(ConfigError, match=words):
        bench_serve_command("http://127.0.0.1:9", out=Path(out))


@pytest.mark.parametrize(
    ("out", "name"), [("run-1.5", "run-1.5"), ("load", "load"), ("load.json", "load"), ("load.svg", "load")]
)
def test_results_have_the_name_that_was_given(tmp_path: Path, out: str, name: str) -> None:
    assert _places(tmp_path / out) == (tmp_path / f"{name}.json", tmp_path / f"{name}.svg")


@pytest.mark.processes
def test_a_folder_that_cannot_be_served_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended with status 2; it says above why"):
        bench_serve_command(str(tmp_path))


@pytest.mark.parametrize(("context", "lengths"), [(4096, (48, 32)), (120, (48, 32)), (64, (25, 17)), (8, (3, 2))])
def test_lengths_that_nobody_gave_fit_the_context(context: int, lengths: tuple[int, int]) -> None:
    found = usual_lengths(context)
    assert found == lengths
    assert sum(found) * 3 // 2 <= context
