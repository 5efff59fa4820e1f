"""Hy-Fi's comparison on Lassen: the order of its kinds of parallelism, as published, for a small AmoebaNet-D."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.models.vision import AmoebaNetDConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import hy_fi  # noqa: E402

ORDER = (hy_fi.BEST, "spatial + pipeline", "pipeline", "layer")


def test_the_order_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small = AmoebaNetDConfig(layers=6, filters=208)
    monkeypatch.setattr(hy_fi, "load_model", lambda name: small)
    found = {row.kind: row for row in hy_fi.rows([("small", 2048)], (2,))}
    seconds = [found[kind].seconds for kind in ORDER]
    assert None not in seconds
    assert seconds == sorted(seconds)
    assert "bidirectional" in found[hy_fi.BEST].plan
    over = hy_fi.factors(list(found.values()))
    assert over["layer"][1] > over["pipeline"][1] > 1.2


def beside_best(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Seconds of the best kind and of spatial + pipeline, where both fit."""
    found = {(row["model"], row["size"], row["batch"], row["kind"]): row["seconds"] for row in rows}
    pairs = [(found[*key[:3], hy_fi.BEST], seconds) for key, seconds in found.items() if key[3] == "spatial + pipeline"]
    return [(best, other) for best, other in pairs if best and other]


def test_the_result_that_is_kept_has_the_order() -> None:
    kept = json.loads((BENCHMARKS / "results" / "hy-fi.json").read_text())
    assert kept["published"] == {"layer": 2.67, "pipeline": 1.68}
    least = {kind: each[0] for kind, each in kept["predicted"].items()}
    assert least["layer"] > least["pipeline"] > 1
    behind = [row for row in beside_best(kept["rows"]) if row[0] > row[1]]
    assert len(behind) <= 1  # of one micro-batch, which has no second direction
    assert least["spatial + pipeline"] > 0.9
    fitting = {(row["model"], row["size"]) for row in kept["rows"] if row["kind"] == hy_fi.BEST and row["seconds"]}
    assert len(fitting) == 4
