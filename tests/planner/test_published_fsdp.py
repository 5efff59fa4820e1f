"""Published rows of models with experts under Megatron-Core's own FSDP: the facts about it are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_planner_accuracy import CONTROL, FOLDING, cases, mean_error


@pytest.mark.soak
def test_published_rows_with_experts_are_met_within_a_tenth_in_the_mean() -> None:
    rows = cases(FOLDING)
    assert len(rows) == 79
    assert mean_error(rows) < 0.1
    assert mean_error([one for one in rows if one.table.endswith("FSDP")]) < 0.13


@pytest.mark.parametrize(
    ("row", "broken"),
    [
        # All parameters but experts would be gathered over one rank of each node.
        ("Qwen2-57B-A14B FSDP + EP 1024", {"shards_over_expert": False}),
        ("Mixtral-8x22B FSDP 128", {"gradient_bytes": 2}),
    ],
)
def test_what_megatrons_own_fsdp_does_is_seen(row: str, broken: dict[str, Any]) -> None:
    sample = [next(one for one in cases(FOLDING) if one.label.startswith(row))]
    less = [replace(one, software=replace(one.software, **broken)) for one in sample]
    assert mean_error(sample) < 0.08
    assert mean_error(less) > mean_error(sample) + CONTROL
