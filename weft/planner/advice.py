"""Suggestions to improve a run's plan: the better form of tensor parallelism, collectives in two levels, or the
smallest share of state, activations or weights in host memory with which the run fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.cluster.collective_choice import OPERATIONS
from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.memory.offload_activations import ACTIVATIONS
from weft.memory.offload_weights import WEIGHTS
from weft.mesh import level_degrees
from weft.planner.predict import Prediction, predict
from weft.run_file import Run
from weft.sharding.host_memory import KEPT_FREE_BYTES

HOST_SHARES = 20


@dataclass(frozen=True)
class TensorForm:
    """The better form of tensor parallelism for a run, and the time and memory that it saves over the other.

    `seconds_saved` is None where step times are not known.
    """

    sequence: bool
    seconds_saved: float | None
    bytes_saved: int

    def describe(self) -> str:
        """Returns one sentence that names the better form and its savings."""
        form = "sequence-sharded (tensor.sequence = true)" if self.sequence else "all-reduced (tensor.sequence = false)"
        memory = f"{abs(self.bytes_saved) / 2**20:.4g} MiB {'less' if self.bytes_saved >= 0 else 'more'}"
        time = "" if self.seconds_saved is None else f" and {self.seconds_saved * 1e3:.3g} ms a step shorter"
        return f"the {form} is better: {memory}{time}"


def better_form(run: Run, cluster: Cluster) -> TensorForm | None:
    """Compares sequence-sharded and all-reduced tensor parallelism for a run with x > 1, and returns the better.

    Returns None if x is 1 or if the model does not allow both forms. Both forms send the same number of bytes over x. A
    form that fits in memory is better than one that does not. Otherwise the faster form is better; if both are equally
    fast, the one that needs less memory.
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
    return TensorForm(best, saved, other.cost.memory_bytes - mine.cost.memory_bytes)


@dataclass(frozen=True)
class LevelForm:
    """Whether collectives in two levels pay for a run: the seconds of communication of a step, all axes together, with
    flat collectives and with the fastest ones; and the algorithms that these use, by axis and operation.
    """

    flat_seconds: float
    fastest_seconds: float
    algorithms: Mapping[str, tuple[str, ...]]

    @property
    def pays(self) -> bool:
        """Do they save more than a hundredth of the communication?"""
        return self.fastest_seconds < 0.99 * self.flat_seconds

    def describe(self) -> str:
        """Returns one sentence that says whether two levels pay, and which algorithms they use."""
        if not self.pays:
            return f"Two-level collectives do not pay here: flat ones take {self.flat_seconds * 1e3:.3g} ms a step"
        used = "; ".join(f"{name}: {', '.join(one)}" for name, one in self.algorithms.items())
        return (
            f"Two-level collectives (plan.hierarchical = true, plan.communication.between = 'fastest') take "
            f"{self.fastest_seconds * 1e3:.3g} ms of communication a step instead of {self.flat_seconds * 1e3:.3g} ms "
            f"({used})"
        )


def best_levels(run: Run, cluster: Cluster) -> LevelForm | None:
    """Compares flat collectives with the fastest ones over the axes that cross nodes; None if no axis does, or if ranks
    share devices, which have levels of their own.
    """
    if run.plan.ranks_per_device > 1:
        return None
    plan = replace(run.plan, hierarchical=True, communication=replace(run.plan.communication, between="fastest"))
    levels = level_degrees(plan, cluster.node.num_devices, cluster)
    communication = replace(run.plan.communication, between="library")
    flat = predict(replace(run, plan=replace(plan, hierarchical=False, communication=communication)), cluster)
    seconds, algorithms = [0.0, 0.0], dict[str, tuple[str, ...]]()
    for (axis, operation), value in flat.traffic.items():
        own = levels.get(axis)
        if own is None or own.links is None or operation not in OPERATIONS:
            continue
        used: dict[str, None] = {}
        for num_bytes, calls in value.sizes.items():
            algorithm = own.algorithm(operation, num_bytes)
            used[algorithm] = None
            seconds[0] += calls * own.seconds("flat", operation, num_bytes)
            seconds[1] += calls * own.seconds(algorithm, operation, num_bytes)
        algorithms[f"{operation} over {axis}"] = tuple(used)
    return LevelForm(seconds[0], seconds[1], algorithms) if algorithms else None


def fitting_offload(run: Run, cluster: Cluster) -> Prediction | None:
    """Returns the prediction for the smallest `memory.offload` with which the run fits into device and host memory.

    Shares are tried in steps of 1/20. Returns None if the run fits as it is, or if no share makes it fit.
    """
    return _fitting(run, cluster, "offload")


def fitting_activations(run: Run, cluster: Cluster) -> Prediction | None:
    """Returns the prediction for the smallest `memory.activations` with which the run fits into device and host memory.

    Shares are tried in steps of 1/20. Returns None if the run fits as it is, if no share makes it fit, or if the plan
    does not allow offloaded activations.
    """
    try:
        return _fitting(run, cluster, ACTIVATIONS)
    except PlanError:
        return None


def fitting_weights(run: Run, cluster: Cluster) -> Prediction | None:
    """Returns the prediction for the smallest `memory.weights` with which the run fits into device and host memory.

    This is the last resort: returns None if `memory.offload` or `memory.activations` alone makes the run fit. Returns
    None also if the run fits as it is, if no share makes it fit, or if the plan does not allow streamed weights.
    """
    if fitting_offload(run, cluster) is not None or fitting_activations(run, cluster) is not None:
        return None
    try:
        return _fitting(run, cluster, WEIGHTS)
    except PlanError:
        return None


def _fitting(run: Run, cluster: Cluster, name: str) -> Prediction | None:
    """Searches the smallest share of the field `name` of `[memory]` with which the run fits; None if none is needed or
    fits.
    """
    if cluster.node.host_link_bytes_per_second is None or _fits(predict(run, cluster)):
        return None

    def predict_share(share: int) -> Prediction:
        memory = replace(run.plan.memory, **{name: share / HOST_SHARES})  # type: ignore[arg-type]
        return predict(replace(run, plan=replace(run.plan, memory=memory)), cluster)

    low, high = 0, HOST_SHARES
    while low < high:  # bisection: a larger share on the host needs less device memory
        share = (low + high) // 2
        found = predict_share(share)
        low, high = (low, share) if found.cost.memory_bytes <= found.memory_limit_bytes else (share + 1, high)
    found = predict_share(low)
    return found if _fits(found) else None


def _fits(prediction: Prediction) -> bool:
    """Does the run fit into device memory, and its offloaded part into host memory?"""
    hosted = sum(prediction.cost.host_bytes.values())
    return (
        prediction.cost.memory_bytes <= prediction.memory_limit_bytes
        and hosted + KEPT_FREE_BYTES * bool(hosted) <= prediction.host_limit_bytes
    )


def _badness(prediction: Prediction) -> tuple[bool, float, int]:
    """A sort key: plans that fit come first, then faster ones (to three digits), then those that need less memory."""
    seconds = prediction.step_seconds or 0.0
    is_too_large = prediction.cost.memory_bytes > prediction.memory_limit_bytes
    return is_too_large, float(f"{seconds:.3g}"), prediction.cost.memory_bytes
