"""Experts from the command line: train, verify, resume under another degree, and faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands_for_tests import Weft
from experts_for_tests import RUN_FILE
from runs_for_tests import losses, write_run_file

pytestmark = pytest.mark.processes

FOLDED = ("plan.tensor.x=2", 'plan.expert_over=["x"]')


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run_file(tmp_path, RUN_FILE)


@pytest.mark.soak
def test_a_run_is_trained_and_goes_on_under_other_degrees(run_file: Path, weft: Weft) -> None:
    own = ("train", run_file, "folder=run")
    left = weft(*own, "plan.expert=2", "train.steps=2")
    assert left.status == 0, left.err
    assert "verified in float64" in left.out
    for plan, steps, before in ((FOLDED, 4, 2), ((), 6, 4)):
        left = weft(*own, *plan, f"train.steps={steps}", "--no-verify")
        assert left.status == 0, left.err
        assert f"resumed at step {before} from run/checkpoints/step-0000000{before}" in left.out
    assert weft("train", run_file, "folder=one", "train.steps=6", "--no-verify").status == 0
    assert losses(Path("run")) == pytest.approx(losses(Path("one")), rel=1e-4)


FP8 = ("plan.precision=bf16", "plan.exact=false", "plan.matmul=fp8")


def fp8_run_file(folder: Path, has_capacity: bool = False) -> Path:
    lines = RUN_FILE.replace("moe_intermediate_size = 8", "moe_intermediate_size = 16").splitlines()
    return write_run_file(folder, "\n".join(one for one in lines if has_capacity or not one.startswith("capacity")))


def test_experts_in_fp8_are_refused_in_words(tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_file = fp8_run_file(tmp_path)
    for given, words in (
        (("plan.precision=bf16",), "precision = 'bf16' and exact = true; use 'bf16' and exact = false"),
        (("plan.precision=fp32", "plan.exact=false"), "precision = 'fp32' and exact = false; use 'bf16'"),
    ):
        left = weft("train", run_file, "folder=no", "plan.matmul=fp8", *given, "--no-verify")
        assert left.status == 2
        assert words in " ".join(left.err.split())
        assert "Traceback" not in left.err
        assert not Path("no").exists()


@pytest.mark.soak
def test_experts_train_in_fp8(tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU numbers are rounded as on a GPU. Experts on several ranks multiply in fp8, too."""
    monkeypatch.chdir(tmp_path)
    run_file, found = fp8_run_file(tmp_path), {}
    plans = {"bf16": FP8[:2], "fp8": FP8, "ranks": (*FP8, "plan.expert=2")}
    plans["sharded"] = (*FP8, "plan.shard.degree=2", "plan.shard.stage=3", "plan.memory.recompute=full")
    for name, plan in plans.items():
        left = weft("train", run_file, f"folder={name}", *plan, "train.steps=3", "--no-verify")
        assert left.status == 0, left.err
        found[name] = losses(Path(name))
    assert found["fp8"][-1] < found["fp8"][0]
    for name in ("fp8", "ranks", "sharded"):
        assert found[name] != found["bf16"]
        assert found[name] == pytest.approx(found["bf16"], rel=0.02)


@pytest.mark.soak
def test_experts_with_a_capacity_train_in_fp8(tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_file, found = fp8_run_file(tmp_path, has_capacity=True), {}
    for name, plan in {"bf16": FP8[:2], "ranks": (*FP8, "plan.expert=2")}.items():
        left = weft("train", run_file, f"folder={name}", *plan, "train.steps=3", "--no-verify")
        assert left.status == 0, left.err
        found[name] = losses(Path(name))
    assert found["ranks"] != found["bf16"]
    assert found["ranks"] == pytest.approx(found["bf16"], rel=0.02)


def test_verify_proves_folded_experts_and_refuses_in_words(run_file: Path, weft: Weft) -> None:
    left = weft("verify", run_file, "plan.expert=2", *FOLDED, "--json")
    assert left.status == 0, left.err
    checks = {check["what"]: check for check in left.json["checks"]}
    assert checks["traffic: experts all_to_all"]["passed"]
    left = weft("verify", run_file, "plan.expert=4", *FOLDED)
    assert left.status == 2
    assert "expert = 4 × x = 2 does not divide the 4 experts" in " ".join(left.err.split())
    assert "Traceback" not in left.err
