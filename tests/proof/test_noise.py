"""The noise of a proof is that of each tensor: no rounding is an alarm, and none hides a fault in another tensor."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sampled_for_tests import one_in
from token_shapes_for_tests import SHAPES

from weft.errors import PlanError
from weft.plan import Pipe, Plan, Shard, Tile
from weft.plan import Tensor as TensorAxes
from weft.proof.compare import Noise, Pairs, noise_of, training
from weft.proof.noise import NUM_RUNS
from weft.proof.prove import verify
from weft.proof.report import NOISE_MULTIPLE, ProofReport, severity
from weft.proof.sequential import SequentialResult, make_model, run_sequential
from weft.step.objective import CROSS_ENTROPY

RANK = importlib.import_module("weft.proof.rank")
Patch = pytest.MonkeyPatch
PARAMETERS = "worst parameter after the steps"
PLANS: dict[str, Plan] = {
    "data": Plan(data=2, statistics="batch"),
    "shard": Plan(shard=Shard(2, 3), statistics="batch", micro_batch=2),
    "x": Plan(tensor=TensorAxes(x=2)),
    "y": Plan(tensor=TensorAxes(y=2)),
    "pipe": Plan(pipe=Pipe(2), micro_batch=2),
    "rows": Plan(tile=Tile(rows=2), micro_batch=4),
}
FAULTS = 10.0  # a fault is this many times what is allowed


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


def _spoiled(
    quantity: str, pairs: Pairs, noise: Mapping[str, Noise], expected: SequentialResult, plan: Plan
) -> list[str]:
    """Spoils one tensor after the other, one element by ten times its tolerance. Returns those that are not noticed."""
    missed = []
    for index, (pair, _, scale) in enumerate(pairs.differences()):
        if not pair.found.is_floating_point() or not pair.found.numel():
            continue
        own = noise.get(quantity, {}).get(pair.name, 0.0)
        spoiled = pair.found.clone(memory_format=torch.contiguous_format)
        spoiled.view(-1)[-1] += FAULTS * max(1e-9 * scale, NOISE_MULTIPLE * own)
        others = [*pairs.pairs]
        others[index] = pair._replace(found=spoiled)
        worst = Pairs(others, pairs.least).worst(noise.get(quantity))
        if not severity(worst)[0]:
            missed.append(f"{quantity} {pair.name}")
    return missed


def prove_and_spoil(name: str, plan: Plan, monkeypatch: Patch) -> None:
    """Prove a plan, or see it refused; and see that every rank notices a fault in any one tensor."""
    original = RANK._worst

    def worst(*given: Any) -> Any:
        missed = _spoiled(*given)
        assert not missed, missed
        return original(*given)

    monkeypatch.setattr(RANK, "_worst", worst)
    try:
        report = verify(*SHAPES[name], plan)
    except PlanError as error:
        if "fails under" in str(error):  # no rule foresaw it
            raise
        return
    report.require()


CASES = {f"{name}, {plan}": (name, plan) for name in SHAPES for plan in PLANS}


@pytest.mark.processes
@pytest.mark.parametrize(("name", "plan"), one_in(41, CASES))
def test_every_shape_is_proved_or_refused_and_a_fault_in_any_tensor_is_found(
    name: str, plan: str, monkeypatch: Patch
) -> None:
    prove_and_spoil(name, PLANS[plan], monkeypatch)
