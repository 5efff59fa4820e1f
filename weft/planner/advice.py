"""What would be better than a run's plan: the other form of the tensor axes, or the least on the host that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.memory.offload_activations import ACTIVATIONS
from weft.memory.offload_weights import WEIGHTS
from weft.planner.predict import Prediction, predict
from weft.run_file import Run
from weft.sharding.host_memory import KEPT_FREE_BYTES

HOST_SHARES = 20


@dataclass(frozen=True)
class Form:
    """Which form of the tensor axes is better for a run, and what it saves over the other."""

    sequence: bool
    seconds_saved: float | None
    bytes_saved: int

    def describe(self) -> str:
        form = "sequence-sharded (tensor.sequence = true)" if self.sequence else "all-reduced (tensor.sequence = false)"
        memory = f"{abs(self.bytes_saved) / 2**20:.4g} MiB {'less' if self.bytes_saved >= 0 else 'more'}"
        time = "" if self.seconds_saved is None else f" and {self.seconds_saved * 1e3:.3g} ms a step shorter"
        return f"the {form} is better: {memory}{time}"


def better_form(run: Run, cluster: Cluster) -> Form | None:
    """Whether a run with x > 1 had better split its residual stream along the sequence; None where it cannot.

    Both forms send as many bytes over x. One that fits where the other does not is better; else the faster one; among
    equals the one that holds less.
    """
    if run.plan.tensor.x == 1:
        return None
    found: dict[bool, Prediction] = {}
    for sequence in (False, True):
        tensor = replace(run.plan.tensor, sequence=sequence, regather=False, chunks=1)
        try:
            found[sequence] = predict(replace(run, plan=replace(run.plan, tensor=tensor)), cluster)
        except PlanError:
            return None
    best = min(found, key=lambda sequence: _badness(found[sequence]))
    mine, other = found[best], found[not best]
    saved = None
    if mine.step_seconds is not None and other.step_seconds is not None:
        saved = other.step_seconds - mine.step_seconds
    return Form(best, saved, other.cost.memory_bytes - mine.cost.memory_bytes)


def fitting_offload(run: Run, cluster: Cluster) -> Prediction | None:
    """The prediction with the least `memory.offload`, in twentieths, under which a run fits device and host that does
    not fit as it is; None where none does, or none is needed.
    """
    return _fitting(run, cluster, "offload")


def fitting_activations(run: Run, cluster: Cluster) -> Prediction | None:
    """The same of `memory.activations`; None also where the plan does not allow it."""
    try:
        return _fitting(run, cluster, ACTIVATIONS)
    except PlanError:
        return None


def fitting_weights(run: Run, cluster: Cluster) -> Prediction | None:
    """The same of `memory.weights`, the last resort: None also where less does."""
    if fitting_offload(run, cluster) is not None or fitting_activations(run, cluster) is not None:
        return None
    try:
        return _fitting(run, cluster, WEIGHTS)
    except PlanError:
        return None


def _fitting(run: Run, cluster: Cluster, name: str) -> Prediction | None:
    if cluster.node.host_link_bytes_per_second is None or _fits(predict(run, cluster)):
        return None

    def tried(share: int) -> Prediction:
        memory = replace(run.plan.memory, **{name: share / HOST_SHARES})  # type: ignore[arg-type]
        return predict(replace(run, plan=replace(run.plan, memory=memory)), cluster)

    low, high = 0, HOST_SHARES
    while low < high:  # the more on the host, the less on the device
        share = (low + high) // 2
        found = tried(share)
        low, high = (low, share) if found.cost.memory_bytes <= found.memory_limit_bytes else (share + 1, high)
    found = tried(low)
    return found if _fits(found) else None


def _fits(prediction: Prediction) -> bool:
    hosted = sum(prediction.cost.host_bytes.values())
    return (
        prediction.cost.memory_bytes <= prediction.memory_limit_bytes
        and hosted + KEPT_FREE_BYTES * bool(hosted) <= prediction.host_limit_bytes
    )


def _badness(prediction: Prediction) -> tuple[bool, float, int]:
    seconds = prediction.step_seconds or 0.0
    is_too_large = prediction.cost.memory_bytes > prediction.memory_limit_bytes
    return is_too_large, float(f"{seconds:.3g}"), prediction.cost.memory_bytes
