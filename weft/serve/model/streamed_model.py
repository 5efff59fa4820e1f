"""Models with blocks in host memory (`serve/weights/streamed_weights.py`): how one is made, and what its weights cost.

A streamed model is made of one that has its values, or is read into their places, so that the whole model is never in
one memory. `weft plan --serve --stream-weights` prices bytes of blocks and gathers by a model's config alone; the bytes
are those that `StreamedWeights` has and the ledger counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.comm import Key
from weft.models import TransformerConfig
from weft.serve.model.paged_model import PagedModel, layers_of
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import PartValues, RankPlace, block_bytes, build_part
from weft.serve.spec import EngineSizes
from weft.serve.weights.packed_linear import make_room
from weft.serve.weights.streamed_weights import (
    BlockLayout,
    StreamedWeights,
    move_all_but,
    refuse_resident,
    streamed_numbers,
)
from weft.serve.weights.weight_formats import WeightFormat


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


def all_block_bytes(
    config: TransformerConfig,
    place: RankPlace,
    dtype: torch.dtype,
    format: WeightFormat | None,
    with_experts: bool = True,
) -> tuple[int, ...]:
    """Return the bytes of each block of a rank, with linears and (`with_experts`) experts in a format if one is given.
    Replicas of the plan read together.
    """
    model, _ = build_part(config, place)
    model.to(dtype)
    if format is not None:
        make_room(model, format, with_experts)
    paged = PagedModel(model, 1)
    return tuple(BlockLayout(modules, place.plan.data).num_bytes for modules in paged.block_modules)


def copied_bytes(block_bytes: Sequence[int], ahead: int) -> list[int]:
    """Return the bytes of streamed blocks that each pass copies, given those of all: a block that has its place for
    itself stays there.
    """
    num_places, number = min(ahead + 1, len(block_bytes)), len(block_bytes)
    return [size for index, size in enumerate(block_bytes) if index >= num_places or index + num_places < number]


def pass_calls(block_bytes: Sequence[int], num_readers: int, ahead: int) -> Iterator[tuple[Key, int]]:
    """Yield the gathers of one pass through all blocks: (axis, operation) and bytes. `block_bytes` are those of
    streamed blocks.
    """
    if num_readers > 1:
        yield from ((("data", "all_gather"), size) for size in copied_bytes(block_bytes, ahead))


@dataclass(frozen=True)
class StreamedBytes:
    """The weights in host memory of a rank. A step copies `copied_bytes` and makes `calls`. The device holds
    `saved_bytes` less than all weights of the rank, among them the `resident_bytes` of blocks that stay there.
    """

    copied_bytes: int
    calls: tuple[tuple[Key, int], ...]
    saved_bytes: int
    resident_bytes: int
    host_bytes: int
    block_bytes: tuple[int, ...]
    num_resident: int
    num_places: int

    def fitting_blocks(self, num_bytes: float) -> int:
        """Return how many blocks could stay on the device if resident ones had so many bytes there. All of them, if
        those that are left fill the places of streamed ones.
        """
        number = max(0, int(num_bytes // max(self.block_bytes)))
        return len(self.block_bytes) if number >= len(self.block_bytes) - self.num_places else number


def streamed_bytes(
    config: TransformerConfig,
    place: RankPlace,
    dtype: torch.dtype,
    sizes: EngineSizes,
    form: WeightFormat | None,
    with_experts: bool,
) -> StreamedBytes | None:
    """Return the bytes of a rank whose weights are in host memory; None if they stay on the device."""
    ahead, num_resident, num_readers = sizes.stream_weights, sizes.resident_blocks, place.plan.data
    if not ahead:
        return None
    blocks = all_block_bytes(config, place, dtype, form, with_experts)
    refuse_resident(num_resident, len(blocks))
    streamed = [blocks[number] for number in streamed_numbers(len(blocks), num_resident)]
    num_places = min(ahead + 1, len(streamed))
    resident_bytes = sum(blocks) - sum(streamed)
    whole = sum(block_bytes(config, place, dtype.itemsize, form, with_experts))
    return StreamedBytes(
        sum(copied_bytes(streamed, ahead)) // num_readers,
        tuple(pass_calls(streamed, num_readers, ahead)),
        whole - num_places * max(streamed) - resident_bytes,
        resident_bytes,
        sum(streamed) // num_readers,
        blocks,
        num_resident,
        num_places,
    )
