"""Says whether a run would be faster with fewer bits on its links: rounded gathers and reductions, or 1-bit Adam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.planner.predict import Prediction, predict
from weft.run_file import Run
from weft.run_tables import CompressedAdam

_PAYS = 0.02  # settings that save a smaller share of a step are not worth another mathematics
_AXES = ("data", "shard")


@dataclass(frozen=True)
class FewerBytes:
    """The seconds of a step, those that communication over data and shard adds to it, and the seconds that each setting
    saves at most: no more than what communication adds, because hidden communication costs nothing.
    """

    step_seconds: float
    added_seconds: float
    saved_seconds: Mapping[str, float]

    @property
    def pays(self) -> bool:
        """Does a setting save more than a fiftieth of the step?"""
        return any(saved > _PAYS * self.step_seconds for saved in self.saved_seconds.values())

    def describe(self) -> str:
        """Returns one sentence that says whether fewer bits pay, and how much each setting saves."""
        step, added = f"{self.step_seconds * 1e3:.3g} ms", f"{self.added_seconds * 1e3:.3g} ms"
        if not self.pays:
            return (
                f"Fewer bits on links do not pay here: communication over data and shard adds {added} to {step} a step"
            )
        saved = ", ".join(f"{seconds * 1e3:.3g} ms with {name}" for name, seconds in self.saved_seconds.items())
        return (
            f"Of {step} a step, communication over data and shard takes {added}; with plan.exact = false, fewer bits "
            f"would save up to {saved}"
        )


def fewer_bytes(run: Run, cluster: Cluster) -> FewerBytes | None:
    """Compares a run that sends exact numbers with its rounded and compressed forms.

    None if no rank reduces gradients with another, if the run sends fewer bits already, if ranks share devices, or if
    its time is not known.
    """
    plan, sends_less = run.plan, bool(run.plan.communication.rounded) or run.train.compressed is not None
    is_other = run.train.kfac is not None or plan.ranks_per_device > 1
    if (plan.data == 1 and plan.shard.degree == 1) or sends_less or is_other:
        return None
    exact = predict(run, cluster)
    if exact.step_seconds is None or exact.compute_seconds is None:
        return None
    now = _seconds(exact)
    added = min(now, max(0.0, exact.step_seconds - exact.compute_seconds))
    saved: dict[str, float] = {}
    for name, form in _forms(run):
        try:
            saved[name] = min(added, now - _seconds(predict(form, cluster)))
        except PlanError:
            continue  # the run does not allow it
    return FewerBytes(exact.step_seconds, added, saved)


def _forms(run: Run) -> Iterator[tuple[str, Run]]:
    """The run with fewer bits, by the setting that asks for it."""
    plan = run.plan
    keys = [key for key, uses in (("reduce", plan.data > 1), ("scatter", plan.shard.degree > 1)) if uses]
    if plan.shard.degree > 1 and plan.shard.stage == 3:
        keys.append("gather")
    for wire in ("bf16", "int8"):
        communication = replace(plan.communication, **dict.fromkeys(keys, wire))  # type: ignore[arg-type]
        text = ", ".join(f'{key} = "{wire}"' for key in keys)
        yield (
            f"plan.communication = {{{text}}}",
            replace(run, plan=replace(plan, exact=False, communication=communication)),
        )
    if plan.data > 1:
        train = replace(run.train, compressed=CompressedAdam("1bit", 1))
        yield "1-bit Adam (train.compressed)", replace(run, plan=replace(plan, exact=False), train=train)


def _seconds(prediction: Prediction) -> float:
    """The seconds of communication over data and shard, all their levels together."""
    found = prediction.communication_seconds.items()
    return sum(seconds for axis, seconds in found if axis.partition("/")[0] in _AXES)
