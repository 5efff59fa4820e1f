"""Parameters that several ranks of a pipeline hold: mirrored replicas of a stage, and parameters tied across stages.

Each copy has the gradient of the samples that passed through it. The sum over all copies is the gradient, and every
copy makes the same update, so copies stay bit-identical. Running statistics of BatchNorm in mirrored replicas are
averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.comm import Axis, Pending, all_reduce
from weft.sharding.flat_buffer import Flat


@dataclass(frozen=True)
class SharedBuffers:
    """An axis of ranks that hold the same parameters, with this rank's buffers.

    Each tuple lists the rank's copies of one.
    """

    axis: Axis
    flats: tuple[tuple[Flat, ...], ...]
    buffers: tuple[Tensor, ...] = ()


class SharedParameters:
    """All parameters that this rank shares with others, in an order that is the same on all ranks."""

    def __init__(self, sharings: Sequence[SharedBuffers]) -> None:
        self.sharings = tuple(sharings)

    def combine(self) -> None:
        """Set every copy's gradient to the sum over all copies, and average the running statistics."""
        for sharing in self.sharings:
            under_way: list[tuple[Pending, Sequence[Flat], list[Tensor]]] = []
            for own in sharing.flats:
                gradients = [flat.slice_gradient for flat in own if flat.slice_gradient is not None]
                for other in gradients[1:]:
                    gradients[0].add_(other)
                under_way.append((all_reduce(gradients[0], sharing.axis), own, gradients))
            for pending, flats, gradients in under_way:
                pending.wait()
                for other in gradients[1:]:
                    other.copy_(gradients[0])
                for flat in flats:
                    flat.show_gradient()  # another copy may have a gradient where this one has none
            for buffer in sharing.buffers:
                all_reduce(buffer, sharing.axis).wait()
                buffer.div_(sharing.axis.degree, rounding_mode=None if buffer.is_floating_point() else "floor")


def running_statistics(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the running statistics of all BatchNorms."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            found += [module.running_mean, module.running_var, module.num_batches_tracked]
    return tuple(tensor for tensor in found if isinstance(tensor, torch.Tensor))


def tied_stages(uses: Sequence[Mapping[str, str]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages hold, with those stages.

    `uses` maps each stage's names to whole names.
    """
    holders: dict[str, list[int]] = {}
    for stage, names in enumerate(uses):
        for name in dict.fromkeys(names.values()):
            holders.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in sorted(holders.items()) if len(stages) > 1}
