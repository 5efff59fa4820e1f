"""Whole gradients of K-FAC's layers, which `shard` leaves in slices.

K-FAC multiplies matrices of gradients, and a slice is any part of one. Stage 1 keeps a buffer for the whole gradient,
and this rank's slice of the sum over ranks is a part of it. So one all-gather for each buffer that has a parameter of a
layer brings the sum to all ranks, without more memory. Each rank then updates its slice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

from weft.comm import all_gather
from weft.errors import PlanError
from weft.parallel.model_state import all_flats
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import FlatLayout


def refuse_buffers(model: nn.Module) -> None:
    """Raise PlanError if gradients of the model cannot be made whole on the device."""
    for flat in all_flats(model):
        is_away = flat.is_streamed or flat.options.on_host or flat.options.delays
        if is_away or (flat.trainable and not flat.keeps_whole_gradient):
            raise PlanError(
                "K-FAC needs whole gradients on the device; set plan.shard.stage to 1, plan.memory.offload and weights "
                "to 0, and plan.memory.delay to false"
            )


def gathered_layouts(layouts: Sequence[FlatLayout], names: Collection[str]) -> list[FlatLayout]:
    """The buffers whose gradients are gathered: those with a parameter of `names`."""
    return [one for one in layouts if one.degree > 1 and any(own.name in names for own in one.parameters)]


class WholeGradients:
    """Reads the gradients of the parameters `names`. `pieces` are those that this rank updates, by name."""

    def __init__(self, model: nn.Module, names: Collection[str], pieces: Mapping[str, nn.Parameter]) -> None:
        self._names, self._pieces = names, pieces
        self._flats = [flat for flat in all_flats(model) if gathered_layouts([flat.layout], names)]

    def read(self) -> dict[str, Tensor]:
        """The gradient of each parameter that has one, by name. All ranks of `shard` must call it."""
        if not self._flats:
            found = ((name, self._pieces[name].grad) for name in self._names)
            return {name: gradient for name, gradient in found if gradient is not None}
        return {name: gradient for flat in self._flats for name, gradient in self._of(flat)}

    def _of(self, flat: Flat) -> Iterator[tuple[str, Tensor]]:
        whole = flat.whole_gradient.tensor
        if whole is None or flat.slice_gradient is None:
            return
        all_gather(whole, flat.slice_gradient, flat.shard).wait()
        for index, (parameter, view) in enumerate(zip(flat.layout.parameters, flat.layout.views(whole), strict=True)):
            if parameter.name not in self._names:
                continue
            # A parameter that no rank has a gradient of is -0.0 in every element (`sharding/gradient_rules.py`).
            if index in flat.whole_gradient.received or not bool((view.signbit() & (view == 0)).all()):
                yield parameter.name, view
