"""The program that checks a GPU, on a CPU: what it compares is equal, and what differs ends it with 1."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_checks

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_checks_find_nothing_wrong(name: str) -> None:
    found = list(islice(gpu_checks.CHECKS[name](CPU), 2))
    assert all(row["is_right"] for row in found)
    assert len(found) == (0 if name == "pools" else 2)  # which has kernels on GPUs alone


def test_averages_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "parallelize", lambda model, plan, mesh: torch.nn.Sequential(model[0], model[2]))
    assert not any(row["is_right"] for row in gpu_checks.averages(CPU))


def test_streamed_weights_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = gpu_checks._trained

    def off(plan: dict[str, Any], *rest: Any) -> Any:
        losses, parameters = trained(plan, *rest)
        if plan["memory"].get("weights") == 1.0:
            parameters["lm_head.weight"][5] *= 1.01
        return losses, parameters

    monkeypatch.setattr(gpu_checks, "_trained", off)
    assert not next(gpu_checks.weights(CPU))["is_right"]


def test_the_program_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    rows = [{"is_right": True}, {"is_right": False}]
    monkeypatch.setitem(gpu_checks.CHECKS, "goldfish", lambda device: iter(rows))
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--only", "goldfish", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        gpu_checks.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out.endswith("1 wrong of 2\n")
    assert json.loads(out.read_text())["goldfish"] == rows
