"""The page of a run: its curves, long runs, values that are not finite, and a run without steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands_for_tests import Weft, caller

from weft.recording.curves import MAX_POINTS, run_page


def events(count: int) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = [
        {"kind": "step", "step": n, "loss": 4.0 / n, "tokens_per_second": 1000.0 + n % 7} for n in range(1, count + 1)
    ]
    return [*steps, {"kind": "evaluation", "step": count, "loss": 1.25, "accuracy": 0.5}]


def test_the_page_has_the_losses_and_the_speed_and_loads_nothing() -> None:
    page = run_page("a <run>", events(40))
    assert "a &lt;run&gt;" in page
    for words in ("training loss", "held-out loss", "tokens per second", "1.2500", "0.1000"):
        assert words in page
    curves = re.findall(r'<polyline [^>]*points="([^"]*)"', page)
    assert [len(one.split()) for one in curves] == [40, 1, 40]
    heights = [float(point.split(",")[1]) for point in curves[0].split()]
    assert heights == sorted(heights)  # the loss falls
    for outside in ("http://", "https://", "src=", "<script", "@import"):
        assert outside not in page


def test_long_runs_and_broken_numbers_are_drawn() -> None:
    long = run_page("long", events(10 * MAX_POINTS + 3))
    assert all(len(one.split()) <= MAX_POINTS for one in re.findall(r'points="([^"]*)"', long))
    broken = [{"kind": "step", "step": 3, "loss": float("nan"), "images_per_second": 2.0}]
    page = run_page("broken", broken)
    assert "nan" not in page.lower().replace("nan</h1>", "")
    assert "images per second" in page
    assert "<polyline" not in run_page("empty", [])


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weft: Weft = caller(monkeypatch, capfd)
    assert "has no metrics.jsonl; give the folder of a run" in weft("report", tmp_path).err
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.5, "tokens_per_second": 9.0}\n')
    assert weft("report", tmp_path, "--json").json["page"] == str(tmp_path / "report.html")
    assert "2.5000" in (tmp_path / "report.html").read_text()
