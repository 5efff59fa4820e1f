"""Which rank of `data` inverts the factors of which layer, where they lie in messages, and the bytes of these.

Factors travel as sums over a rank's rows, each layer's followed by its number of rows; inverses are followed by the
statistics of the layer. With `owner-sharded`, a message has one equal part for each rank, padded to the longest, so
that one reduce-scatter takes the sums to their owners and one all-gather takes the inverses to all ranks. Other modes
have messages of one part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.comm import Key, Traffic
from weft.optim.kfac_layers import FactorSizes, KfacLayer
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
    """The rank that inverts each layer: the costliest layer first, each to the rank with the least work so far."""
    work, found = [0] * degree, [0] * len(layers)
    for index in sorted(range(len(layers)), key=lambda index: (-layers[index].inverse_cost, index)):
        found[index] = min(range(degree), key=lambda rank: work[rank])
        work[found[index]] += layers[index].inverse_cost
    return tuple(found)


def make_slots(layers: Sequence[FactorSizes], owners: Sequence[int], degree: int, extra: int) -> Slots:
    """Both factors and `extra` numbers of each layer, in the part of its owner."""
    filled, starts = [0] * degree, []
    for layer, owner in zip(layers, owners, strict=True):
        starts.append(filled[owner])
        filled[owner] += layer.numel + extra
    part = max(filled)
    return Slots(tuple(owner * part + start for owner, start in zip(owners, starts, strict=True)), part, degree)


def slot_views(message: Tensor, start: int, layer: FactorSizes, extra: int) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's two matrices and `extra` numbers from element `start` of a message."""
    middle, stop = start + layer.input_numel, start + layer.numel
    first, second = message[start:middle], message[middle:stop]
    return first.view(layer.input_shape), second.view(layer.output_shape), message[stop : stop + extra]


def kfac_traffic(layers: Sequence[FactorSizes], options: Kfac, degree: int, item_bytes: int) -> dict[Key, Traffic]:
    """The traffic over `data` of a step that samples factors and renews inverses, beyond that of its gradients."""
    if degree == 1 or not layers:
        return {}
    if options.mode != "owner-sharded":
        sums, inverses = (make_slots(layers, [0] * len(layers), 1, extra) for extra in (NUM_ROWS, NUM_STATISTICS))
        found = {("data", "all_reduce"): Traffic(1, sums.numel * item_bytes)}
        if options.mode == "sub-grid":
            found["data", "broadcast"] = Traffic(1, inverses.numel * item_bytes)
        elif options.mode == "sub-grid-async":  # whether they have come, and then they themselves
            found["data", "broadcast"] = Traffic(2, inverses.numel * item_bytes + FLAG_BYTES)
        return found
    owners = owners_of(layers, degree)
    sums, inverses = (make_slots(layers, owners, degree, extra) for extra in (NUM_ROWS, NUM_STATISTICS))
    return {
        ("data", "reduce_scatter"): Traffic(1, sums.numel * item_bytes),
        ("data", "all_gather"): Traffic(1, inverses.numel * item_bytes),
    }


def kfac_state_bytes(
    layers: Sequence[KfacLayer], sizes: Mapping[str, int], options: Kfac, degree: int, item_bytes: int
) -> int:
    """The bytes of the optimizer's state on the rank of `data` that has most. `sizes`: elements of each parameter.

    That is a momentum for parameters of layers, two moments for others, a step count each, factors and inverses.
    """
    own = {name for layer in layers for name in layer.parameter_names}
    moments = sum(numel * (1 if name in own else 2) for name, numel in sizes.items())
    numbers = [layer.numel for layer in layers]
    owners = owners_of(layers, degree) if options.mode == "owner-sharded" else [0] * len(layers)
    held = [sum(numel for numel, owner in zip(numbers, owners, strict=True) if owner == rank) for rank in range(degree)]
    return (moments + max(held) + sum(numbers)) * item_bytes + STEP_COUNTER_BYTES * len(sizes)
