"""Traces of one model under one plan: of its example, to cut it and to cost it, and of what a rank is given to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.inspection.nested_tensors import map_tensors
from weft.pipeline.trace import Trace, trace
from weft.plan import Plan
from weft.sharding.layout import COMPUTE_DTYPE
from weft.spatial.dry_run import cut_images, dry_stages
from weft.spatial.tiling import Tiling

Tile = tuple[int, int]  # its row and column
FIRST: Tile = (0, 0)


def tile_at(coordinates: Mapping[str, int] | None) -> Tile:
    """The tile of a rank; the first, unless its coordinates are given."""
    return FIRST if coordinates is None else (coordinates["rows"], coordinates["columns"])


@dataclass(frozen=True)
class Tracer:
    """Of a model on the meta device. `over_y` is over how many ranks of y go the features of what units hand on."""

    model: nn.Module
    plan: Plan
    over_y: int
    tiling: Tiling | None = None

    def example(self, example: Callable[[], Any], device: torch.device, at: Tile = FIRST) -> Trace:
        """The forward of an example of whole images, at a tile."""
        if self.tiling is None:
            return self.own(map_tensors(lambda tensor: tensor.to(device), example()), {}, device)
        with FakeTensorMode(allow_non_fake_inputs=True):  # a whole image may not fit
            own = cut_images(example, self.plan, at, self.tiling.sizes)
        return self.own(map_tensors(partial(_zeros, device=device), own), {}, device, at)

    def own(self, args: Any, kwargs: Mapping[str, Any], device: torch.device, at: Tile = FIRST) -> Trace:
        """The forward of what the rank at a tile is given."""
        dtype = COMPUTE_DTYPE[self.plan.precision]
        with torch.enable_grad():
            if self.tiling is None:
                return trace(self.model, args, kwargs, dtype, device, self.over_y)
            with dry_stages(self.model, self.plan, at, self.tiling.sizes, self.tiling.extras) as tiles:
                return trace(self.model, args, kwargs, dtype, device, self.over_y, tiles)


def _zeros(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
