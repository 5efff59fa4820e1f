"""The sections of a model of images: its blocks, and what its root does before and behind them, for one image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from weft.inspection.memory_traffic import MemoryTraffic
from weft.inspection.split_probe import is_convolution
from weft.planner.workload import Filter, Part, Product
from weft.profile import Block, Convolution, Profile

POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Section:
    """Figures of one image on one rank. `images` is the share of a micro-batch's that the rank computes there."""

    name: str
    part: Part
    numel: int
    saved_bytes: Mapping[str, float]  # by recompute
    boundary_bytes: float  # that it hands on
    largest_bytes: float  # of a convolution's operands
    images: float = 1.0


def chain(profile: Profile) -> list[Block]:
    """The blocks between the two parts of the root: what it computes before the first of them, and behind."""
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
    return (profile.dtype or torch.get_default_dtype()).itemsize


def section_of(block: Block, is_first: bool, item_bytes: int) -> Section:
    filters = filters_of(block)
    if is_first and filters:  # nobody asks for the gradient of the images
        filters = (filters[0]._replace(needs_gradient=False), *filters[1:])
    part = Part(products_of(block), outer=moved_of(block), filters=filters)
    saved = {kind: float(size) for kind, size in (block.saved_bytes or {}).items()}
    sides = (max(one.rows * one.outputs, one.in_rows * one.inputs) * one.groups for one in filters)
    return Section(
        block.name, part, block.numel, saved, float(block.boundary_bytes), item_bytes * max(sides, default=0.0)
    )


def products_of(block: Block) -> tuple[Product, ...]:
    """Matmuls of linears on vectors or pixels."""
    return tuple(
        Product(one.batch * one.rows, one.inner, one.columns, "whole")
        for one, times in block.matmuls.items()
        for _ in range(times)
    )


def filters_of(block: Block) -> tuple[Filter, ...]:
    return tuple(map(_filter, block.convolutions))


def _filter(one: Convolution) -> Filter:
    # Transposed, every input pixel is a row, and the products are added up where they overlap.
    rows, in_rows = math.prod(one.out_size), math.prod(one.in_size)
    if one.is_transposed:
        rows, in_rows = in_rows, rows
    inputs, outputs = one.in_channels // one.groups, one.out_channels // one.groups
    return Filter(one.batch * rows, one.batch * in_rows, inputs, outputs, math.prod(one.kernel), one.groups)


def moved_of(block: Block) -> MemoryTraffic:
    total = MemoryTraffic()
    for one in block.traffic_by_layer.values():
        total = total.plus(one)
    return total


def smallest_images(block: Block) -> tuple[float, float]:
    """Rows and columns of the smallest images that a block's convolutions make; single pixels (gates) do not count."""
    sizes = [one.out_size[-2:] for one in block.convolutions if len(one.out_size) >= 2 and max(one.out_size[-2:]) > 1]
    rows, columns = (min((size[dim] for size in sizes), default=math.inf) for dim in (0, 1))
    return rows, columns
