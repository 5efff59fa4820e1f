"""The noise of a proof is that of each tensor: no rounding is an alarm, and none hides a fault in another tensor."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sampled_for_tests import one_in
from token_shapes_for_tests import SHAPES

from weft.proof.compare import noise_of, training
from weft.proof.prove import verify
from weft.proof.report import NOISE_MULTIPLE, ProofReport
from weft.proof.sequential import NUM_RUNS, SequentialResult, make_model, run_sequential
from weft.step.objective import CROSS_ENTROPY

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from proof_noise import MODELS, PLANS, RESULTS, outcome_of

RANK = importlib.import_module("weft.proof.rank")
Patch = pytest.MonkeyPatch
PARAMETERS = "worst parameter after the steps"


def failures(report: ProofReport) -> dict[str, str]:
    """The checks that did not pass, and where."""
    return {check.what: check.where for check in report.checks if not check.passed}


# --- the noise


def run(name: str, rounding: int = 0) -> SequentialResult:
    """Three steps of the unsplit model."""
    make, batch = SHAPES[name]
    return run_sequential(make_model(make), batch, CROSS_ENTROPY, 3, 1.0, 4, [], rounding)


def noise(name: str) -> tuple[SequentialResult, dict[str, dict[str, float]]]:
    """The unsplit model and its noise."""
    expected = run(name)
    return expected, noise_of((run(name, number + 1) for number in range(NUM_RUNS)), expected, ["loss"])


def test_rounding_in_another_way_changes_nothing_but_rounding() -> None:
    expected, found = noise("vit")
    assert max(pairs.worst().error for pairs in training(run("vit", 1), expected).values()) < 1e-9
    assert set(found["gradient"]) == set(expected.gradients)
    assert list(found["loss"]) == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize(
    ("name", "cancelling"),
    [("unet", "third.0.0.bias"), ("mobilenet_v3", "blocks.0.3.1.bias"), ("cait", "blocks.0.mixer.k.bias")],
)
def test_a_gradient_of_zero_is_known_by_the_rounding_of_the_terms_that_cancel(name: str, cancelling: str) -> None:
    """A bias before batch norm, of a norm before it, or of attention keys: its terms add up to nothing."""
    expected, found = noise(name)
    is_rounding = {
        key: float(gradient.abs().max()) <= NOISE_MULTIPLE * found["gradient"][key]
        for key, gradient in expected.gradients.items()
    }
    assert is_rounding[cancelling]
    assert not is_rounding["head.bias"]


# --- no false alarm, and every fault


@pytest.mark.processes
def test_undetermined_steps_are_no_alarm_and_are_said_to_be_such() -> None:
    report = verify(*SHAPES["mobilenet_v3"], PLANS["data"]).require()
    worst = next(check for check in report.checks if check.what == PARAMETERS)
    assert float(worst.found) > 1e-9
    assert "whose gradient is rounding and nothing else, so its steps are not determined" in worst.where


@pytest.mark.processes
def test_the_noise_of_one_parameter_hides_no_fault_of_another(monkeypatch: Patch) -> None:
    """The noise of a bias before batch norm once raised the tolerance of all parameters to 4e-05."""

    def spoil(model: Any) -> Any:
        found = original(model)
        for part, piece in found:
            if part.parameter.name == "head.weight":
                piece[0] += 1e-8
        return found

    original = RANK._pieces
    monkeypatch.setattr(RANK, "_pieces", spoil)
    found = failures(verify(*SHAPES["mobilenet_v3"], PLANS["data"]))
    assert list(found) == [PARAMETERS]
    assert found[PARAMETERS].endswith(", head.weight")


FOUND: dict[str, Any] = json.loads(RESULTS.read_text())
CASES = {f"{name}, {plan}": (name, plan) for name, row in FOUND["models"].items() for plan in row}


def test_no_right_plan_of_60_models_failed_and_no_fault_was_missed() -> None:
    assert not [one for one in FOUND["plans"] if one["failed though right"] or one["faults missed"]]
    assert set(FOUND["models"]) == set(MODELS)
    assert len(MODELS) >= 60
    assert all(set(row) == set(PLANS) for row in FOUND["models"].values())
    proved = [found for row in FOUND["models"].values() for found in row.values() if found["outcome"] == "proved"]
    assert len(proved) == sum(one["proved"] for one in FOUND["plans"])
    assert all(found["faults"] and not found["missed"] for found in proved)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "plan"), one_in(109, CASES))
def test_a_plan_is_proved_or_refused_again_and_a_fault_in_any_tensor_is_found(name: str, plan: str) -> None:
    found = outcome_of(name, plan)
    assert (found["outcome"], found.get("missed", [])) == (FOUND["models"][name][plan]["outcome"], []), found


@pytest.mark.processes
def test_a_fault_that_is_allowed_is_reported_as_missed(monkeypatch: Patch) -> None:
    monkeypatch.setattr("proof_noise.FAULTS", 0.5)
    assert outcome_of("squeezenet", "data")["missed"]
