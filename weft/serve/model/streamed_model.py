"""A model whose blocks are in host memory, with those that stay on the device: made of a model that has its values, or
read into these places, so that the whole model is never in one memory.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.serve.model.paged_model import PagedModel, layers_of
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import PartValues
from weft.serve.spec import EngineSizes
from weft.serve.weights.streamed_weights import StreamedWeights, move_all_but


class StreamedModel(nn.Module):
    """A model and where the weights of its blocks are. The engine computes with it; its own forward would not wait."""

    def __init__(self, model: nn.Module, weights: StreamedWeights) -> None:
        super().__init__()
        self.model = model
        self.weights = weights


@torch.no_grad()
def stream_model(
    model: nn.Module,
    device: torch.device,
    sizes: EngineSizes,
    ranks: ServingRanks | None = None,
    values: PartValues | None = None,
) -> StreamedModel:
    """Move a model to its places: those of `sizes.stream_weights` and `sizes.resident_blocks`, shared with replicas if
    `ranks` read together. With `values` it is on the meta device, and is read into them weight by weight.
    """
    layers = layers_of(model)
    blocks = PagedModel(model, 1).block_modules
    others = move_all_but(model, layers, device)  # first, so that it is known what is left for blocks
    if values is not None:
        values.give(others)

    def fill(number: int) -> None:
        assert values is not None
        values.give(layers[number].modules())

    weights = StreamedWeights(
        blocks,
        device,
        sizes.stream_weights,
        None if ranks is None else ranks.readers,
        sizes.resident_blocks,
        None if values is None else fill,
        1 if ranks is None else ranks.mesh.num_local_ranks,
    )
    return StreamedModel(model.eval(), weights)
