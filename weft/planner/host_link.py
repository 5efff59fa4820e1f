"""Time of copies between a device and its host in a step.

Activations, streamed weights and gradients are copied during forward and backward. Optimizer state is copied during the
update.
"""

from __future__ import annotations

from weft.cluster.hardware import Cluster
from weft.memory.offload_activations import ACTIVATIONS
from weft.memory.offload_weights import WEIGHTS, LinkTraffic, home_bytes
from weft.plan import Plan
from weft.planner.step import HOST_LINK_SHARE
from weft.profiling import Profile
from weft.sharding.layout import COMPUTE_DTYPE, NUM_DEVICE_BUFFERS, gradient_dtype
from weft.strategy import Cost


def copied_seconds(
    sent_bytes: int, trips: LinkTraffic, plan: Plan, compute: float, cluster: Cluster
) -> tuple[dict[str, float], float]:
    """Time on the host link for offloaded activations and streamed weights.

    Returns (seconds on the link by kind, seconds that forward and backward do not hide). Both directions of the link
    work at once. `sent_bytes` are the activations sent to the host in a step, `trips` the bytes of streamed weights and
    gradients, and `compute` the seconds of forward and backward.
    """
    link = cluster.node.host_link_bytes_per_second
    if link is None:
        return {}, 0.0
    rate = link * HOST_LINK_SHARE
    forward = compute / (4 if plan.memory.recompute == "full" else 3)
    busy_forward = max(sent_bytes, trips.up_forward_bytes) / rate
    busy_backward = max(sent_bytes + trips.up_backward_bytes, trips.down_bytes) / rate
    streamed = trips.up_forward_bytes + trips.up_backward_bytes + trips.down_bytes
    link_seconds = {ACTIVATIONS: 2 * sent_bytes / rate, WEIGHTS: streamed / rate}
    exposed = max(0.0, busy_forward - forward) + max(0.0, busy_backward - (compute - forward))
    return {kind: seconds for kind, seconds in link_seconds.items() if seconds}, exposed


def equal_trips(num_streamed: int, numel: float, plan: Plan, num_micro_batches: int) -> LinkTraffic:
    """The traffic of a step's streamed weights, as `link_traffic` counts it, if all streamed blocks are equal.

    `numel` are the parameters of a block.
    """
    weight = numel * COMPUTE_DTYPE[plan.precision].itemsize
    trained = num_streamed * numel * gradient_dtype(plan, num_micro_batches).itemsize
    whole, kept = num_streamed * weight, min(num_streamed, NUM_DEVICE_BUFFERS) * weight
    more = num_micro_batches - 1
    return LinkTraffic(
        int(whole + more * (whole - kept)),
        int(num_micro_batches * (whole - kept) + more * trained),
        int(num_micro_batches * trained),
    )


def update_seconds(one: Cost, profile: Profile, plan: Plan, cluster: Cluster) -> float:
    """Seconds on the host link for the update of state in host memory. Both directions work at once.

    The part that the next step's forward hides is not subtracted.
    """
    link = cluster.node.host_link_bytes_per_second
    state = sum(one.host_bytes.values()) - one.host_bytes.get(ACTIVATIONS, 0) - home_bytes(profile, plan)
    return 0.0 if link is None else state / link
