"""The table of models and axes in docs/models.md: it is what its program found, and a sample of it is found again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sampled_for_tests import one_in

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from model_table import PAGE, PLANS, RESULTS, outcome_of, page
from zoo import zoo

FOUND: dict[str, Any] = json.loads(RESULTS.read_text())
ROWS: dict[str, dict[str, Any]] = FOUND["models"]
ENTRIES = {entry.name: entry for entry in zoo()}
CASES = {f"{name}, {plan}": (name, plan) for name in ROWS for plan in ROWS[name]}


def test_the_page_is_what_was_found() -> None:
    assert PAGE.read_text() == page(FOUND)


def test_every_model_is_there_under_every_plan() -> None:
    assert set(ROWS) == set(ENTRIES)
    assert len(ROWS) >= 60
    assert all(set(row) == set(PLANS) for row in ROWS.values())


def test_every_outcome_is_proved_or_refused_in_words() -> None:
    outcomes = {(name, plan): ROWS[name][plan]["outcome"] for name, plan in CASES.values()}
    assert not {case: found for case, found in outcomes.items() if found not in ("proved", "refused")}


@pytest.mark.processes
@pytest.mark.parametrize(("name", "plan"), one_in(83, CASES))
def test_the_outcome_is_found_again(name: str, plan: str) -> None:
    assert outcome_of(ENTRIES[name], PLANS[plan])["outcome"] == ROWS[name][plan]["outcome"]


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_of_transformers_are_proved_as_they_are(name: str) -> None:
    assert outcome_of(ENTRIES[name], PLANS["data"])["outcome"] == "proved"
