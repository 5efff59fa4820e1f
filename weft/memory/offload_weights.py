"""Memory policy `weights`: a share of the blocks keep weights, gradients and optimizer state in host memory. Exact.

For models whose weights and gradients do not fit the device. `sharding/streamed_buffer.py` implements it as a kind of
flat buffer, and `parallel/shard.py` counts its bytes with those of all buffers. With N streamed elements, of c bytes
per weight and g per gradient, a step copies

    up     N·c before forward, N·c before backward (less what is still there: see `link_traffic`)
    down   N·g after backward; with several micro-batches also up again, to be added to

in addition to the copies of the update: `memory.offload` is implied for these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan import Plan
from weft.profiling import Profile
from weft.sharding.layout import (
    COMPUTE_DTYPE,
    NUM_DEVICE_BUFFERS,
    DeviceBufferKey,
    FlatLayout,
    flat_layouts,
    gradient_dtype,
    slice_dtype,
    streamed_blocks,
)
from weft.strategy import Strategy

WEIGHTS = "weights"


class WeightPolicy(Strategy):
    """The strategy of `memory.weights`, a share of the blocks: what it refuses."""

    name = WEIGHTS

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        share = plan.memory.weights
        if not share:
            return None
        if not profile.blocks:
            return (
                f"memory.weights = {share:g} keeps blocks on the host, and the model has none (nn.ModuleList or "
                f"nn.Sequential with parameters); use 0"
            )
        beside = {axis: degree for axis, degree in plan.degrees.items() if degree > 1}
        if beside:
            found = ", ".join(f"{axis} = {degree}" for axis, degree in beside.items())
            return (
                f"memory.weights = {share:g} works on one rank, and the plan has {found}: use weights = 0 there, with "
                f"shard.stage = 3 and memory.offload, which keep a rank's share of the model only"
            )
        return None


@dataclass(frozen=True)
class LinkTraffic:
    """The bytes that streamed blocks copy between host and device in a step, without those of the update."""

    up_forward_bytes: int = 0
    up_backward_bytes: int = 0
    down_bytes: int = 0


def link_traffic(profile: Profile, plan: Plan, accumulation: int) -> LinkTraffic:
    """Return the traffic of a chain that runs in order, forward and backward.

    The weights that forward used last are still on the device when backward begins, and those that backward used last
    when the next micro-batch begins: one streamed buffer in each device buffer.
    """
    buffers = _streamed(profile, plan)
    compute, gradient = COMPUTE_DTYPE[plan.precision].itemsize, gradient_dtype(plan, accumulation).itemsize
    weights = sum(layout.numel for _, layout in buffers) * compute
    last = sum(layout.numel for layout in dict(buffers).values()) * compute  # one per device buffer
    first = sum(layout.numel for layout in dict(reversed(buffers)).values()) * compute
    trained = sum(layout.numel for _, layout in buffers if layout.parameters[0].trainable) * gradient
    more = accumulation - 1
    return LinkTraffic(
        weights + more * (weights - first), accumulation * (weights - last) + more * trained, accumulation * trained
    )


def home_bytes(profile: Profile, plan: Plan) -> int:
    """Returns the bytes of weights on the host that blocks compute with, if the optimizer has weights of its own."""
    dtype = COMPUTE_DTYPE[plan.precision]
    return 0 if dtype == slice_dtype(plan) else sum(one.numel for _, one in _streamed(profile, plan)) * dtype.itemsize


def _streamed(profile: Profile, plan: Plan) -> list[tuple[DeviceBufferKey, FlatLayout]]:
    """Return the streamed buffers in order, each with the key of its device buffer."""
    order = streamed_blocks(profile.all, plan)
    return [
        ((number, order[block.name] % NUM_DEVICE_BUFFERS), layout)
        for block in profile.blocks
        if block.name in order
        for number, layout in enumerate(flat_layouts(block.parameters, plan.shard.degree))
    ]
