"""The benchmark of one GPU and the program that checks one, on a CPU: what they compare, and what they find wrong."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_checks
import harness
import one_gpu

CPU = torch.device("cpu")
NAMES = ("weft", "weft-fp8", "weft-weights", "plain", "transformers")


def arguments(losses: int = 0, text: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(steps=1, warm=0, losses=losses, text=text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.full
def test_contenders_train(name: str) -> None:
    found = one_gpu.work(name, one_gpu.CASES["tiny"], arguments())
    assert found["last_loss"] < found["first_loss"]
    assert 5.3 < found["first_loss"] < 5.8  # the log of 256 classes
    assert found["tokens_per_second"] == pytest.approx(32 / found["step_seconds"])
    assert found["gpu_bytes"] is None
    assert "tokens" not in one_gpu.show("tiny", name, found, 1e12)


def test_loss_curves_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc " * 200)
    curves = {n: one_gpu.work(n, one_gpu.CASES["tiny"], arguments(3, text)) for n in ("weft", "weft-fp8")}
    assert [len(one["losses"]) for one in curves.values()] == [3, 3]
    one_gpu.compare_losses(["weft", "weft-fp8", "gone"], {**curves, "gone": {"error": "is not installed"}})
    printed = capsys.readouterr().out
    assert "+0.000%" in printed
    assert "is not installed" in printed


def test_flops_are_those_of_the_definition() -> None:
    case = one_gpu.CASES["6.7b"]
    layer = 4096 * (4 * 4096 + 3 * 11008)
    expected = 4 * 2048 * (6 * (32 * layer + 4096 * 32000) + 6 * 32 * 4096 * 2048)
    assert case.flops == expected


def test_all_contenders_see_the_same_batches(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 4)
    one, other = (one_gpu.batches(one_gpu.CASES["tiny"], CPU, text) for _ in range(2))
    for step in range(3):
        (tokens, labels), again = one(step), other(step)
        assert torch.equal(tokens, again[0])
        assert torch.equal(tokens[:, 1:], labels[:, :-1])


@pytest.mark.processes
def test_a_contender_that_fails_says_why() -> None:
    with ExitStack() as stack, pytest.raises(KeyError):
        one_gpu.make_step("weft-nothing", one_gpu.CASES["tiny"], CPU, stack)
    assert "error" in harness.run_apart(["--worker", "weft", "no-such-shape"], 60, one_gpu.__file__)


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
