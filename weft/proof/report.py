"""The report of a proof: every check of a plan against the sequential model, and whether all of them passed.

An error of up to 1e-9 passes. If one is larger, ranks also compare the sequential model with itself, rounded in other
ways (`RoundedOtherwise`): the noise of each number, parameter, gradient, buffer and result. What differs by no more
than `NOISE_MULTIPLE` times its own noise cannot be told from rounding, and passes with that tolerance, of at most 1e-3,
which the report states. A larger difference within the noise proves nothing: the report says that the quantity is not
proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from weft.comm.backends import DeviceType
from weft.errors import PlanError, VerifyError
from weft.memory.offload_activations import ACTIVATIONS
from weft.plan import Plan
from weft.schema import build_dataclass, to_table

TOLERANCE = 1e-9
TRAFFIC = "traffic: "  # how the names of checks of traffic begin
NOISE_MULTIPLE = 10.0  # the rounding of a split model may differ from the measured noise by this factor
MAX_TOLERANCE = 1e-3
# Tolerances of bf16 against float64: a number has 8 bits, and the errors of forward and backward add up. Parameters
# after several updates are not compared: for a gradient near zero, AdamW makes a full step in the direction of its
# sign.
BF16_TOLERANCES = {"loss": 1e-2, "grad_norm": 5e-2, "gradient": 1e-1}


@dataclass(frozen=True)
class Check:
    """One comparison: the largest error and where it is, or predicted (`expected`) and counted (`found`) bytes."""

    what: str
    expected: str
    found: str
    where: str
    passed: bool


@dataclass(frozen=True)
class ProofReport:
    """All checks of one plan, and in words the parts of the run that they leave out."""

    plan: Plan
    checks: tuple[Check, ...]
    not_proved: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Are there checks, and did all of them pass?"""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def first_failure(self) -> Check | None:
        """The first check that did not pass."""
        return next((check for check in self.checks if not check.passed), None)

    def require(self) -> ProofReport:
        """Raise VerifyError with the first check that failed; return the report if all passed."""
        if not self.checks:
            raise VerifyError(f"{self.plan.describe_axes()} was not proved: {'; '.join(self.not_proved)}")
        failure = self.first_failure
        if failure is not None:
            raise VerifyError(
                f"{self.plan.describe_axes()} differs from the sequential model in {failure.what}: "
                f"expected {failure.expected}, found {failure.found} ({failure.where})"
            )
        return self


def report_to_json(report: ProofReport) -> dict[str, Any]:
    """Returns a report as JSON values, for another process."""
    checks = [asdict(check) for check in report.checks]
    return {"plan": to_table(report.plan), "checks": checks, "not_proved": list(report.not_proved)}


def report_from_json(values: Mapping[str, Any]) -> ProofReport:
    """Returns the report that `report_to_json` was given."""
    checks = tuple(Check(**check) for check in values["checks"])
    return ProofReport(build_dataclass(Plan, values["plan"], "plan"), checks, tuple(values["not_proved"]))


# --- from the answers of all ranks


def report_of(
    answers: list[dict[str, Any]],
    plan: Plan,
    not_proved: tuple[str, ...],
    tolerance: float | None,
    device: DeviceType = "cpu",
) -> ProofReport:
    """Returns the report on a plan from the answers of its ranks. A `tolerance`, if given, replaces all others.

    Raises a PlanError if nothing but the traffic differs, because of how the loss calls the model.
    """
    not_proved += tuple(dict.fromkeys(note for answer in answers for note in answer["notes"]))
    if "evaluation" not in answers[0]["errors"]:
        not_proved += ("evaluation: the running statistics of batch norms are each rank's own",)
    if device == "cuda" and plan.memory.activations:
        not_proved += (
            "bytes of memory.activations: attention on a GPU saves other tensors in a proof than in the run",
        )
        for answer in answers:
            answer["predicted_host"].pop(ACTIVATIONS, None)
            answer["counted_host"].pop(ACTIVATIONS, None)
    errors, unknown = _check_errors(answers, _tolerances(plan, tolerance), tolerance is None)
    sizes = _check_bytes(answers)
    differ = unknown or not all(check.passed for check in (*errors, *sizes))
    if (draws := answers[0]["draws"]) and differ:
        errors = [check for check in errors if check.passed]
        # Random numbers may choose blocks, and with them the collectives. Without its checks, nothing is proved.
        sizes = [check for check in sizes if check.passed or not check.what.startswith(TRAFFIC)]
        unknown = [
            f"the model draws random numbers ({', '.join(draws)}), and ranks draw others; prove it without them (a "
            f"rate of 0), or with fixed ones (as part of its inputs, for example)"
        ]
    checks = (*errors, *sizes, _check_coverage(answers, plan))
    failures = [check.what for check in checks if not check.passed]
    if answers[0]["calls"] and failures and all(what.startswith(TRAFFIC) for what in failures):
        raise PlanError(
            f"{plan.describe_axes()} computes what the unsplit model does, but sends other bytes than are predicted: "
            f"{answers[0]['calls'][0]}"
        )
    if unknown and all(check.passed for check in checks):
        checks = ()  # nothing is wrong, and too little is shown
    return ProofReport(plan, checks, (*not_proved, *unknown))


def _tolerances(plan: Plan, given: float | None) -> dict[str, float | None]:
    """Returns the tolerance of each quantity; None if it is not compared."""
    if plan.precision == "bf16":
        return {
            "parameter": None,
            "buffer": None,
            "evaluation": None,
            "result": None,
            **(BF16_TOLERANCES if given is None else dict.fromkeys(BF16_TOLERANCES, given)),
        }
    return dict.fromkeys(QUANTITIES, TOLERANCE if given is None else given)


class Worst(NamedTuple):
    """An error, where it is, and the noise of the unsplit model there; both are relative."""

    error: float
    where: str
    noise: float = 0.0


def allowed(noise: float) -> float:
    """Returns the tolerance of a tensor whose own noise was measured."""
    return min(max(TOLERANCE, NOISE_MULTIPLE * noise), MAX_TOLERANCE)


def is_too_noisy(worst: Worst) -> bool:
    """Is the error larger than any tolerance, and within the noise?"""
    return allowed(worst.noise) < worst.error <= NOISE_MULTIPLE * worst.noise


def severity(worst: Worst) -> tuple[bool, float]:
    """Returns the order of errors: differences, what is too noisy to tell, and errors within their tolerance."""
    excess = nan_as_inf(worst.error) / allowed(worst.noise)
    return excess > 1.0 and not is_too_noisy(worst), excess


def nan_as_inf(error: float) -> float:
    """Returns infinity for NaN, so that `max` finds it: NaN compares false with everything."""
    return float("inf") if error != error else error


QUANTITIES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "gradient": "worst gradient",
    "parameter": "worst parameter after the steps",
    "buffer": "worst buffer after the steps",
    "evaluation": "evaluation after the steps",
    "result": "worst result after the steps",
}


def _check_errors(
    answers: list[dict[str, Any]], tolerances: Mapping[str, float | None], with_noise: bool
) -> tuple[list[Check], list[str]]:
    """Returns the checks of errors, and in words the quantities that the model's own noise keeps from being proved."""
    checks, too_noisy = [], []
    for key, what in QUANTITIES.items():
        tolerance = tolerances[key]
        found = [
            (Worst(*answer["errors"][key]), rank) for rank, answer in enumerate(answers) if key in answer["errors"]
        ]
        if not found or tolerance is None:
            continue
        worst, rank = max(found, key=lambda one: severity(one[0]))
        where = f"rank {rank}, {worst.where}"
        if with_noise and worst.error > tolerance and allowed(worst.noise) > tolerance:
            tolerance = allowed(worst.noise)
            where = f"{where}; the model's own noise there is {worst.noise:.0e}"
            if is_too_noisy(worst):
                too_noisy.append(
                    f"{what} (error {worst.error:.0e}, ≤ {tolerance:.0e}, {where}): too much to prove equality"
                )
                continue
        checks.append(Check(what, f"≤ {tolerance:.0e}", f"{worst.error:.1e}", where, worst.error <= tolerance))
    return checks, too_noisy


def _check_bytes(answers: list[dict[str, Any]]) -> list[Check]:
    """Returns the checks of predicted against counted bytes."""
    keys = sorted({key for answer in answers for key in (*answer["predicted"], *answer["counted"])})
    checks = [_equal(f"{TRAFFIC}{key}", answers, "predicted", "counted", key, _traffic_text) for key in keys]
    kinds = answers[0]["predicted_state"]
    state = [_equal(f"state: {kind}", answers, "predicted_state", "counted_state", kind, _bytes_text) for kind in kinds]
    if made := answers[0]["made_buffers"]:
        reason = f"forwards register buffer '{made[0]}', which is not there before them; register it in __init__"
        state = [one if one.passed else replace(one, where=f"{one.where}: {reason}") for one in state]
    checks += state
    checks += [
        _equal(f"host: {kind}", answers, "predicted_host", "counted_host", kind, _bytes_text)
        for kind in sorted({key for answer in answers for key in (*answer["predicted_host"], *answer["counted_host"])})
    ]
    return checks


def _check_coverage(answers: list[dict[str, Any]], plan: Plan) -> Check:
    """Checks that every element of the parameters is held once in every replica. No other check finds missing ones."""
    compared = sum(answer["num_compared"] for answer in answers)
    expected = answers[0]["num_expected"] * (plan.num_ranks // plan.num_parts("stages", "weights"))
    return Check("parameters held", f"{expected:,}", f"{compared:,}", "all ranks", compared == expected)


def _equal(
    what: str, answers: list[dict[str, Any]], predicted: str, counted: str, key: str, text: Callable[[Any], str]
) -> Check:
    for rank, answer in enumerate(answers):
        expected, found = answer[predicted].get(key), answer[counted].get(key)
        # The prediction may be larger: transformers makes masks for shapes, but not for data.
        is_less = key == ACTIVATIONS and (found or 0) < (expected or 0)
        if expected != found and not is_less:
            return Check(what, text(expected), text(found), f"rank {rank}", False)
    value = text(answers[0][predicted].get(key))
    return Check(what, value, value, "all ranks", True)


def _traffic_text(value: list[int] | None) -> str:
    return "nothing" if value is None else f"{value[1]:,} B in {value[0]} calls"


def _bytes_text(value: int | None) -> str:
    return f"{value or 0:,} B"
