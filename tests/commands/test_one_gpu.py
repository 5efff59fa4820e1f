"""The benchmark of one GPU, tiny and on a CPU: every contender that is installed trains, and says the same things."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import harness
import one_gpu

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
    device = torch.device("cpu")
    one, other = (one_gpu.batches(one_gpu.CASES["tiny"], device, text) for _ in range(2))
    for step in range(3):
        (tokens, labels), again = one(step), other(step)
        assert torch.equal(tokens, again[0])
        assert torch.equal(tokens[:, 1:], labels[:, :-1])


@pytest.mark.processes
def test_a_contender_that_fails_says_why() -> None:
    with ExitStack() as stack, pytest.raises(KeyError):
        one_gpu.make_step("weft-nothing", one_gpu.CASES["tiny"], torch.device("cpu"), stack)
    assert "error" in harness.run_apart(["--worker", "weft", "no-such-shape"], 60, one_gpu.__file__)
