"""A model whose blocks are in host memory, with those that stay on the device: made of a model that has its values, or
read into these places, so that the whole model is never in one memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from weft.comm import Axis
from weft.errors import ConfigError
from weft.serve.model.paged_model import PagedModel, layers_of
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import PartValues
from weft.serve.weights.streamed_weights import StreamedWeights, move_all_but


@dataclass(frozen=True)
class Streaming:
    """How weights are streamed: those of `ahead` blocks are copied before they are needed, and those of `num_resident`
    of a rank's blocks stay on the device. `readers` are the ranks that read together, if there are several.
    """

    ahead: int
    num_resident: int = 0
    readers: Axis | None = None
    num_local_ranks: int = 1

    @staticmethod
    def of(ahead: int, num_resident: int, ranks: ServingRanks | None) -> Streaming | None:
        """What --stream-weights and --resident-blocks ask for, on one of several ranks if there are some. None if
        nothing is streamed. Raises ConfigError.
        """
        if num_resident and not ahead:
            raise ConfigError("--resident-blocks says how many blocks are not streamed; give --stream-weights too")
        if not ahead:
            return None
        return Streaming(ahead, num_resident, *(() if ranks is None else (ranks.readers, ranks.mesh.num_local_ranks)))


class StreamedModel(nn.Module):
    """A model and where the weights of its blocks are. The engine computes with it; its own forward would not wait."""

    def __init__(self, model: nn.Module, weights: StreamedWeights) -> None:
        super().__init__()
        self.model = model
        self.weights = weights


@torch.no_grad()
def stream_model(
    model: nn.Module, device: torch.device, streaming: Streaming, values: PartValues | None = None
) -> StreamedModel:
    """Move a model to its places. With `values` it is on the meta device, and is read into them weight by weight."""
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
        streaming.ahead,
        streaming.readers,
        streaming.num_resident,
        None if values is None else fill,
        streaming.num_local_ranks,
    )
    return StreamedModel(model.eval(), weights)
