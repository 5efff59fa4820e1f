"""What streamed weights cost, by a model's config alone: bytes of each block, and gathers of ranks that read together.

`weft plan --serve --stream-weights` prices these; the bytes are those that `StreamedWeights` has and the ledger counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weft.comm import Key
from weft.models import TransformerConfig
from weft.serve.model.paged_model import PagedModel
from weft.serve.parallel.rank_part import RankPlace, build_part
from weft.serve.weights.packed_linear import make_room
from weft.serve.weights.streamed_layout import BlockLayout
from weft.serve.weights.weight_formats import WeightFormat


def all_block_bytes(
    config: TransformerConfig,
    place: RankPlace,
    dtype: torch.dtype,
    format: WeightFormat | None,
    with_experts: bool = True,
) -> tuple[int, ...]:
    """Bytes of each block of a rank, with linears and (`with_experts`) experts in a format if one is given. Replicas of
    the plan read together.
    """
    model, _ = build_part(config, place)
    model.to(dtype)
    if format is not None:
        make_room(model, format, with_experts)
    paged = PagedModel(model, 1)
    return tuple(BlockLayout(modules, place.plan.data).num_bytes for modules in paged.block_modules)


def copied_bytes(block_bytes: Sequence[int], ahead: int) -> list[int]:
    """The bytes of streamed blocks that each pass copies, given those of all: a block that has its place for itself
    stays there.
    """
    num_places, number = min(ahead + 1, len(block_bytes)), len(block_bytes)
    return [size for index, size in enumerate(block_bytes) if index >= num_places or index + num_places < number]


def pass_calls(block_bytes: Sequence[int], num_readers: int, ahead: int) -> Iterator[tuple[Key, int]]:
    """Yields the gathers of one pass through all blocks: (axis, operation) and bytes. `block_bytes` are those of
    streamed blocks.
    """
    if num_readers > 1:
        yield from ((("data", "all_gather"), size) for size in copied_bytes(block_bytes, ahead))
