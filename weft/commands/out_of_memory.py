"""The errors of plans that do not fit the memory: before a run by prediction, during it by the allocator.

Both state the predicted memory of the plan and the nearest plan that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.cluster.hardware import Cluster
from weft.errors import ConfigError, PlanError
from weft.plan import Plan
from weft.planner.advice import fitting_activations, fitting_offload, fitting_weights
from weft.planner.predict import Prediction, predict
from weft.run_file import Run

# A plan must need at most this part of what did not fit: one that needs hardly less would not fit either.
KEPT_FREE = 0.9


def out_of_memory(run: Run, cluster: Cluster, error: BaseException) -> PlanError:
    """Returns an error that states the predicted memory and a plan that fits, to replace the allocator's `error`."""
    prediction = predict(run, cluster)
    total, limit = prediction.cost.memory_bytes, prediction.memory_limit_bytes
    parts = {**prediction.cost.state_bytes, "activations": prediction.cost.saved_bytes}
    parts["temporary memory"] = prediction.cost.transient_bytes
    parts_in_words = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    first_line = (str(error).splitlines() or [""])[0]
    return PlanError(
        f"a device is out of memory ({first_line}). Of {run.plan.describe_axes()}, micro-batch "
        f"{run.split.micro_batch}, the prediction is {_size(total)} of {_size(limit)}: {parts_in_words}. "
        f"{_advice(run, cluster, prediction)}"
    )


def refuse_if_too_large(run: Run, cluster: Cluster, prediction: Prediction) -> None:
    """Raise PlanError, with the nearest plan that fits, if the prediction exceeds the memory of a device or host."""
    needed, limit = prediction.cost.memory_bytes, prediction.memory_limit_bytes
    hosted, host_limit = sum(prediction.cost.host_bytes.values()), prediction.host_limit_bytes
    if needed > limit:
        raise PlanError(
            f"the plan does not fit: {run.plan.describe_axes()}, micro-batch {run.split.micro_batch}, needs "
            f"{_size(needed)} on a device of {_size(limit)}. {_advice(run, cluster, prediction)}"
        )
    if hosted > host_limit > 0:
        raise PlanError(
            f"the plan does not fit: it keeps {_size(hosted)} of each rank in host memory, of which a rank has "
            f"{_size(host_limit)}; lower plan.memory.offload, activations or weights"
        )


def _advice(run: Run, cluster: Cluster, prediction: Prediction) -> str:
    total, limit = prediction.cost.memory_bytes, prediction.memory_limit_bytes
    why = "" if total > limit else "By that it fits: other programs may use the device. "
    if run.plan.ranks_per_device > 1:
        return (
            f"{why}Each of the {run.plan.ranks_per_device} ranks of a device has a whole model and its state: use "
            f"fewer, by plan.ranks_per_device and plan.data"
        )
    most = min(limit, int(total * KEPT_FREE))
    nearest = nearest_fitting(run, cluster, most)
    if nearest is None:
        return f"{why}No plan near it needs less than {_size(most)}; ask weft plan --search, or take more devices"
    change, size = nearest
    return f"{why}The nearest plan that needs less: {change} ({_size(size)})"


def nearest_fitting(run: Run, cluster: Cluster, most_bytes: int) -> tuple[str, int] | None:
    """Returns the smallest change, in words, to a plan that needs at most `most_bytes` on a device, and its bytes.

    None if there is no such plan.
    """
    for change, plan in _changes(run):
        try:
            size = predict(replace(run, plan=plan), cluster).cost.memory_bytes
        except ConfigError:
            continue
        if size <= most_bytes:
            return change, size
    sent = fitting_activations(run, cluster)
    if sent is not None:
        return f"plan.memory.activations = {sent.activations:g}", sent.cost.memory_bytes
    offloaded = fitting_offload(run, cluster)
    if offloaded is not None:
        return f"plan.memory.offload = {offloaded.offload:g}", offloaded.cost.memory_bytes
    streamed = fitting_weights(run, cluster)
    if streamed is not None:
        return f"plan.memory.weights = {streamed.weights:g}", streamed.cost.memory_bytes
    return None


def _changes(run: Run) -> Iterator[tuple[str, Plan]]:
    """Yields plans for the same ranks with the change in words, first those that cost the least time."""
    plan = run.plan
    recomputes = [plan.memory.recompute, *(["selective", "full"] if plan.memory.recompute == "none" else ["full"])]
    degrees = [plan.shard.degree * times for times in (1, 2, 4, 8, 16) if plan.data % times == 0]
    for degree in degrees:
        for recompute in dict.fromkeys(recomputes):
            size = run.split.micro_batch
            while size >= 1:
                words = {
                    f"plan.micro_batch = {size}": size != run.split.micro_batch,
                    f"plan.memory.recompute = '{recompute}'": recompute != plan.memory.recompute,
                    f"plan.shard = {degree} with plan.data = {plan.data * plan.shard.degree // degree}": (
                        degree != plan.shard.degree
                    ),
                }
                if any(words.values()):
                    yield (
                        " and ".join(word for word, changed in words.items() if changed),
                        replace(
                            plan,
                            data=plan.data * plan.shard.degree // degree,
                            shard=replace(plan.shard, degree=degree),
                            micro_batch=size,
                            memory=replace(plan.memory, recompute=recompute),  # type: ignore[arg-type]
                        ),
                    )
                size = size // 2 if size % 2 == 0 else 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.4g} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.4g} GiB"
