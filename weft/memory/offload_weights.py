"""Memory policy `weights`: the weights of a share of the blocks live in host memory, with their gradients and all state
of the optimizer. Exact.

For models whose weights and gradients are more than the device has. `sharding/streamed_buffer.py` does it, as a kind of
flat buffer, and `parallel/shard.py` counts its bytes among those of all buffers. A step moves, of c bytes a weight and
g a gradient of N elements that are streamed,

    up     N·c before forward, N·c before backward (but for what is still there: see `trips`)
    down   N·g behind backward; with several micro-batches also up again, to be added to

beside what the update moves: `memory.offload` is implied for these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan import Plan
from weft.profile import Profile
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
    """`memory.weights`, the share of blocks: what it refuses."""

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
class Trips:
    """The bytes that streamed blocks move over the link in a step, the update's apart."""

    up_forward_bytes: int = 0
    up_backward_bytes: int = 0
    down_bytes: int = 0


def trips(profile: Profile, plan: Plan, accumulation: int) -> Trips:
    """Of a chain that is run in order, forward and back. What forward used last is there when backward begins, and what
    that used last when the next micro-batch does: one buffer in each room.
    """
    buffers = _streamed(profile, plan)
    compute, gradient = COMPUTE_DTYPE[plan.precision].itemsize, gradient_dtype(plan, accumulation).itemsize
    weights = sum(layout.numel for _, layout in buffers) * compute
    last = sum(layout.numel for layout in dict(buffers).values()) * compute  # in each room
    first = sum(layout.numel for layout in dict(reversed(buffers)).values()) * compute
    trained = sum(layout.numel for _, layout in buffers if layout.parameters[0].trainable) * gradient
    more = accumulation - 1
    return Trips(
        weights + more * (weights - first), accumulation * (weights - last) + more * trained, accumulation * trained
    )


def home_bytes(profile: Profile, plan: Plan) -> int:
    """Weights on the host that computations read and the optimizer only writes."""
    dtype = COMPUTE_DTYPE[plan.precision]
    return 0 if dtype == slice_dtype(plan) else sum(one.numel for _, one in _streamed(profile, plan)) * dtype.itemsize


def _streamed(profile: Profile, plan: Plan) -> list[tuple[DeviceBufferKey, FlatLayout]]:
    """The streamed buffers in order, and their rooms."""
    order = streamed_blocks(profile.all, plan)
    return [
        ((number, order[block.name] % NUM_DEVICE_BUFFERS), layout)
        for block in profile.blocks
        if block.name in order
        for number, layout in enumerate(flat_layouts(block.parameters, plan.shard.degree))
    ]
