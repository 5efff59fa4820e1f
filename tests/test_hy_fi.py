"""Hy-Fi's comparison on Lassen: the order of its kinds of parallelism, as published, for a small AmoebaNet-D."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weft.models.vision import AmoebaNetDConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
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


def test_the_result_that_is_kept_has_the_order() -> None:
    kept = json.loads((BENCHMARKS / "results" / "hy-fi.json").read_text())
    assert kept["published"] == {"layer": 2.67, "pipeline": 1.68}
    least = {kind: each[0] for kind, each in kept["predicted"].items()}
    assert least["layer"] > least["pipeline"] > 1
    assert least["spatial + pipeline"] > 1
    fitting = {(row["model"], row["size"]) for row in kept["rows"] if row["kind"] == hy_fi.BEST and row["seconds"]}
    assert len(fitting) == 4
