"""Which training rank inverts the factors of which layer, where they lie in messages, and the bytes of these.

Factors travel as sums over a rank's rows, each layer's followed by its number of rows; inverses are followed by the
statistics of the layer. With `owner-sharded`, a message has one equal part for each rank, padded to the longest, so
that one reduce-scatter takes the sums to their owners and one all-gather takes the inverses to all ranks. Other modes
have messages of one part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.comm import Key, Traffic, add_traffic
from weft.optim.kfac_layers import FactorSizes, KfacLayer
from weft.optim.kfac_ranks import AXES, traffic_of
from weft.run_tables import Kfac
from weft.sharding.layout import STEP_COUNTER_BYTES

NUM_ROWS = 1  # numbers behind the sums of a layer: its rows
NUM_STATISTICS = 3  # numbers behind the inverses of a layer: mean diagonals of A and G, and the damping that was used
FLAG_BYTES = 8  # of the message that says whether the curvature ranks have answered


@dataclass(frozen=True)
class Slots:
    """Where each layer begins in a message of `degree` equal parts."""

    starts: tuple[int, ...]
    part_numel: int
    degree: int

    @property
    def numel(self) -> int:
        """The elements of the whole message."""
        return self.part_numel * self.degree


def owners_of(layers: Sequence[FactorSizes], degree: int) -> tuple[int, ...]:
    """Deals layers to the ranks that invert them: the costliest first, each to the rank with the least work so far."""
    work, found = [0] * degree, [0] * len(layers)
    for index in sorted(range(len(layers)), key=lambda index: (-layers[index].inverse_cost, index)):
        found[index] = min(range(degree), key=lambda rank: work[rank])
        work[found[index]] += layers[index].inverse_cost
    return tuple(found)


def make_slots(layers: Sequence[FactorSizes], owners: Sequence[int], degree: int, extra: int) -> Slots:
    """Returns places for both factors and `extra` numbers of each layer, in the part of its owner."""
    filled, starts = [0] * degree, []
    for layer, owner in zip(layers, owners, strict=True):
        starts.append(filled[owner])
        filled[owner] += layer.numel + extra
    part = max(filled)
    return Slots(tuple(owner * part + start for owner, start in zip(owners, starts, strict=True)), part, degree)


def slot_views(message: Tensor, start: int, layer: FactorSizes, extra: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a layer's two matrices and `extra` numbers from element `start` of a message."""
    middle, stop = start + layer.input_numel, start + layer.numel
    first, second = message[start:middle], message[middle:stop]
    return first.view(layer.input_shape), second.view(layer.output_shape), message[stop : stop + extra]


def kfac_traffic(
    layers: Sequence[FactorSizes],
    options: Kfac,
    degrees: Mapping[str, int],
    item_bytes: int,
    gathered: Sequence[int] = (),
) -> dict[Key, Traffic]:
    """Returns the traffic of a step that samples factors and renews inverses, beyond that of its gradients.

    `degrees` gives the ranks along `data` and `shard`, and `gathered` the elements of each buffer whose gradients are
    gathered over `shard` in every step.
    """
    degree = math.prod(degrees[axis] for axis in AXES)
    if degree == 1 or not layers:
        return {}
    is_sharded = options.mode == "owner-sharded"
    owners, parts = (owners_of(layers, degree), degree) if is_sharded else ([0] * len(layers), 1)
    sums, inverses = (make_slots(layers, owners, parts, extra).numel for extra in (NUM_ROWS, NUM_STATISTICS))
    calls = [("scatter" if is_sharded else "sum", sums * item_bytes)]
    if is_sharded:
        calls.append(("gather", inverses * item_bytes))
    elif options.mode != "inline":
        calls.append(("broadcast", inverses * item_bytes))
        if options.mode == "sub-grid-async":
            calls.append(("broadcast", FLAG_BYTES))
    found: dict[Key, Traffic] = {}
    for operation, num_bytes in calls:
        found = add_traffic(found, dict(traffic_of(operation, num_bytes, degrees)))
    for numel in gathered:
        found = add_traffic(found, {("shard", "all_gather"): Traffic(1, numel * item_bytes)})
    return found


def kfac_state_bytes(
    layers: Sequence[KfacLayer], slices: Sequence[Mapping[str, int]], options: Kfac, data: int, item_bytes: int
) -> int:
    """Returns the bytes of the optimizer's state on the rank that has most.

    `slices` has, for each rank of `shard`, the elements of each parameter that it updates; `data` is the number of
    ranks that update the same ones.

    That is a momentum for parameters of layers, two moments for others, a step count each, factors and inverses.
    """
    own = {name for layer in layers for name in layer.parameter_names}
    numbers = [layer.numel for layer in layers]
    is_sharded = options.mode == "owner-sharded"
    owners = owners_of(layers, len(slices) * data) if is_sharded else None
    held = []
    for rank in range(len(slices) * data):
        sizes = slices[rank // data]
        moments = sum(numel * (1 if name in own else 2) for name, numel in sizes.items())
        factors = sum(number for index, number in enumerate(numbers) if owners is None or owners[index] == rank)
        held.append((moments + factors + sum(numbers)) * item_bytes + STEP_COUNTER_BYTES * len(sizes))
    return max(held)
