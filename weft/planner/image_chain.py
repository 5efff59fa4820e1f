"""The sections of an image model for one image: its blocks, and the layers of its root before the first and after the
last block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from weft.inspection.memory_traffic import MemoryTraffic
from weft.inspection.split_probe import is_convolution
from weft.profiling import Block, Convolution, Profile
from weft.profiling.workload import BlockWork, Filter, Product

POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class ImageSection:
    """The work and memory of one section for one image on one rank.

    `images` is the share of a micro-batch's images that the rank computes in this section.
    """

    name: str
    part: BlockWork
    numel: int
    saved_bytes: Mapping[str, float]  # by recompute policy
    boundary_bytes: float  # bytes of the section's output
    largest_bytes: float  # bytes of the largest input or output of a convolution
    images: float = 1.0


def chain(profile: Profile) -> list[Block]:
    """Returns the model as a list: the root's layers before the first block, the blocks, the root's layers after the
    last block.

    Both ends are returned as blocks with their share of the root's parameters, convolutions and bytes.
    """
    model, root = profile.model, profile.root
    assert model is not None
    inside = tuple(f"{block.name}." for block in profile.blocks)
    own = {block.name for block in profile.blocks}
    before: set[str] = {""}
    for name in profile.layers:
        if name.startswith(inside) or name in own:
            break
        before.add(name)
    num_before = sum(is_convolution(model.get_submodule(name)) for name in before if name)
    num_matmuls = sum(layer.is_linear for name, layer in profile.layers.items() if name in before)
    first, last = (
        replace(
            root,
            parameters=tuple(one for one in root.parameters if (one.name.rpartition(".")[0] in before) == is_first),
            convolutions=root.convolutions[:num_before] if is_first else root.convolutions[num_before:],
            matmuls={} if is_first and not num_matmuls else root.matmuls,
            traffic_by_layer={name: one for name, one in root.traffic_by_layer.items() if (name in before) == is_first},
            saved_bytes={
                kind: sum(
                    size for name, size in root.saved_by_layer.get(kind, {}).items() if (name in before) == is_first
                )
                for kind in POLICIES
            },
            boundary_bytes=profile.stream_numel * item_bytes_of(profile) if is_first else root.boundary_bytes,
        )
        for is_first in (True, False)
    )
    return [first, *profile.blocks, last]


def item_bytes_of(profile: Profile) -> int:
    """Bytes of one element in the profile's dtype."""
    return (profile.dtype or torch.get_default_dtype()).itemsize


def section_of(block: Block, is_first: bool, item_bytes: int) -> ImageSection:
    """Returns the section of a block. The first section needs no gradient of its input, the images."""
    filters = filters_of(block)
    if is_first and filters:  # no gradient of the images is needed
        filters = (filters[0]._replace(needs_gradient=False), *filters[1:])
    part = BlockWork(products_of(block), outer=moved_of(block), filters=filters)
    saved = {kind: float(size) for kind, size in (block.saved_bytes or {}).items()}
    sides = (max(one.rows * one.outputs, one.in_rows * one.inputs) * one.groups for one in filters)
    return ImageSection(
        block.name, part, block.numel, saved, float(block.boundary_bytes), item_bytes * max(sides, default=0.0)
    )


def products_of(block: Block) -> tuple[Product, ...]:
    """The matmuls of linear layers on vectors or pixels."""
    return tuple(
        Product(one.batch * one.rows, one.inner, one.columns, "whole")
        for one, times in block.matmuls.items()
        for _ in range(times)
    )


def filters_of(block: Block) -> tuple[Filter, ...]:
    """The block's convolutions, each as an implicit matmul."""
    return tuple(map(_filter, block.convolutions))


def _filter(one: Convolution) -> Filter:
    # A transposed convolution computes one row for each input pixel and adds up the products where they overlap.
    rows, in_rows = math.prod(one.out_size), math.prod(one.in_size)
    if one.is_transposed:
        rows, in_rows = in_rows, rows
    inputs, outputs = one.in_channels // one.groups, one.out_channels // one.groups
    return Filter(one.batch * rows, one.batch * in_rows, inputs, outputs, math.prod(one.kernel), one.groups)


def moved_of(block: Block) -> MemoryTraffic:
    """The memory traffic of a block's operations other than matmuls and convolutions."""
    total = MemoryTraffic()
    for one in block.traffic_by_layer.values():
        total = total.plus(one)
    return total


def smallest_images(block: Block) -> tuple[float, float]:
    """Rows and columns of the smallest output of a block's convolutions. Outputs of 1 × 1 (gates) are ignored."""
    sizes = [one.out_size[-2:] for one in block.convolutions if len(one.out_size) >= 2 and max(one.out_size[-2:]) > 1]
    rows, columns = (min((size[dim] for size in sizes), default=math.inf) for dim in (0, 1))
    return rows, columns
