"""Traces a model under one plan: its example, to cut the model and for costs, and the inputs of a rank, to run it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from weft.inspection.functional_call import arguments
from weft.inspection.nested_tensors import map_tensors
from weft.pipeline.trace import Trace, trace
from weft.pipeline.trace_watch import FOR_STAGES, TracePurpose
from weft.plan import Plan
from weft.sharding.layout import COMPUTE_DTYPE
from weft.spatial.dry_run import Tiling, cut_images, dry_stages

TilePosition = tuple[int, int]  # row and column of a tile
FIRST: TilePosition = (0, 0)


def tile_at(coordinates: Mapping[str, int] | None) -> TilePosition:
    """Return the tile of a rank; the first if `coordinates` is None."""
    return FIRST if coordinates is None else (coordinates["rows"], coordinates["columns"])


@dataclass(frozen=True)
class Tracer:
    """Traces a model on the meta device. Inputs of the same shapes are traced once in training and once in evaluation.

    `over_y`: the number of ranks of y over which units' outputs split their features.
    """

    model: nn.Module
    plan: Plan
    over_y: int
    tiling: Tiling | None = None
    purpose: TracePurpose = FOR_STAGES
    _traces: dict[Hashable, Trace] = field(default_factory=dict, compare=False, repr=False)

    def example(self, example: Callable[[], Any], device: torch.device, at: TilePosition = FIRST) -> Trace:
        """Trace the forward of an example of whole images, at a tile."""
        if self.tiling is None:
            return self.own(*arguments(map_tensors(lambda tensor: tensor.to(device), example())), device)
        with FakeTensorMode(allow_non_fake_inputs=True):  # a whole image may not fit
            own = cut_images(example, self.plan, at, self.tiling.sizes)

        def zeros(tensor: Tensor) -> Tensor:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

        return self.own(*arguments(map_tensors(zeros, own)), device, at)

    def own(self, args: Any, kwargs: Mapping[str, Any], device: torch.device, at: TilePosition = FIRST) -> Trace:
        """Trace the forward of the inputs that the rank at a tile is given, in the model's mode."""
        key = _shapes(args, kwargs), device, at, self.model.training
        if key not in self._traces:
            self._traces[key] = self._trace(args, kwargs, device, at)
        return self._traces[key]

    def _trace(self, args: Any, kwargs: Mapping[str, Any], device: torch.device, at: TilePosition) -> Trace:
        dtype = COMPUTE_DTYPE[self.plan.precision]
        with torch.enable_grad():
            if self.tiling is None:
                return trace(self.model, args, kwargs, dtype, device, self.over_y, purpose=self.purpose)
            with dry_stages(self.model, self.plan, at, self.tiling.sizes, self.tiling.extras) as tiles:
                return trace(self.model, args, kwargs, dtype, device, self.over_y, tiles)


def _shapes(args: Any, kwargs: Mapping[str, Any]) -> Hashable:
    """Return what a trace depends on: the form of the arguments, shapes and dtypes of tensors, other values."""
    leaves, form = tree_flatten((args, dict(kwargs)))
    return str(form), tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )
