"""An image model as a chain of sections: the work, saved bytes and communication of one rank for one image.

A section is a block, or the root's layers before or after the blocks. Sections of whole images come from the profile.
Sections of tiles come from a dry run (`spatial/dry_run.py`) of an inner tile of one reference grid, once for each
number of fused layers. All other grids are scaled from it by geometry. A tile has its share of the pixels. A halo strip
along an axis is as long as the tile's side and goes to no, one or two neighbours. Work and memory that tiles duplicate
grow with the tile's edge divided by its area. After the hand-over, sections have whole images: all of them (gather) or
a share of the batch (batch). A test compares this with dry runs of other grids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.compile.saved_bytes import compiled_profile
from weft.inspection.memory_traffic import MemoryTraffic, tensors_of
from weft.plan import Plan, Tile
from weft.planner.image_chain import (
    POLICIES,
    ImageSection,
    chain,
    filters_of,
    item_bytes_of,
    moved_of,
    products_of,
    section_of,
    smallest_images,
)
from weft.profiling import Block, Profile, RecordedCall, profile
from weft.profiling.workload import BlockWork, Call, Filter, Phase, Product
from weft.spatial.dry_run import DryRun, dry_run, image_sizes

LARGEST_REFERENCE = 4  # tiles along each dimension of the reference grid
Sizes = tuple[int, int]


class _TileOverhead(NamedTuple):
    """Extra work and memory of a reference tile over its share of the whole image, as a fraction of that share."""

    flops: float
    moved: float
    saved: Mapping[str, float]


class _ReferenceSection(NamedTuple):
    """One section of the reference grid, from a dry run."""

    extra: _TileOverhead
    # Memory traffic divided by the tile's share of the whole's, (eager, fused). It is the same for all grids: tiles
    # have their own norms.
    moved: tuple[float, float]
    num_kernels: int
    splits_products: bool  # do linear layers work on pixels, so that tiles split them?
    calls: tuple[Call, ...]


class ImageSections:
    """The sections of one model, under any tiling."""

    def __init__(self, profile: Profile) -> None:
        assert profile.example is not None
        self.profile = profile
        self._blocks = chain(profile)
        self.whole = tuple(
            section_of(block, index == 0, item_bytes_of(profile)) for index, block in enumerate(self._blocks)
        )
        with FakeTensorMode():  # images may be larger than this machine's memory
            self.sizes: Sizes = image_sizes(profile.example())
        self._found: dict[Tile, tuple[ImageSection, ...]] = {}
        self._ran: dict[int, DryRun] = {}
        self._references: dict[int, list[_ReferenceSection]] = {}
        self._tiled: dict[Tile, tuple[ImageSection, ...]] = {}
        self._ends = {id(section.part) for section in (self.whole[0], self.whole[-1])}

    def is_end(self, part: BlockWork) -> bool:
        """Is this the work of the root's layers, outside of blocks?"""
        return id(part) in self._ends

    @cached_property
    def compiled(self) -> tuple[ImageSection, ...]:
        """The sections of whole images with the saved bytes of compiled blocks.

        Layers outside of blocks count as uncompiled, which is cheap to find and no underestimate.
        """
        model, example = self.profile.model, self.profile.example
        assert model is not None
        blocks = compiled_profile(profile(model, example, _any_loss, self.profile.dtype)).blocks
        kept = {block.name: (block.saved_bytes or {})["none"] for block in blocks}
        return tuple(
            replace(one, saved_bytes={**one.saved_bytes, "none": kept.get(one.name, one.saved_bytes["none"])})
            for one in self.whole
        )

    def under(self, tile: Tile) -> tuple[ImageSection, ...]:
        """Returns the sections of a rank with an inner tile."""
        if tile.degree == 1:
            return self.whole
        if tile not in self._found:
            self._found[tile] = self._under(tile)
        return self._found[tile]

    @cached_property
    def _smaller(self) -> tuple[str, ...]:
        """The blocks before which a hand-over may pay: those with smaller images than all blocks before them."""
        found, before = [], math.inf
        for block in self._blocks[1:-1]:
            size = min(smallest_images(block))
            if size < before < math.inf:
                found.append(block.name)
            before = min(size, before)
        return tuple(found)

    @cached_property
    def points(self) -> tuple[str, ...]:
        """The blocks before which tiles can be handed over."""
        return () if self.no_point else self._smaller

    @cached_property
    def no_point(self) -> str:
        """The reason why tiles cannot be handed over before a block; "" if they can.

        A skip connection around the hand-over would bring tiles of larger images back.
        """
        if not self._smaller:
            return ""
        name = self._smaller[0]
        dry = dry_run(self.profile, Plan(tile=Tile(self._side, self._side, name)), {"rows": 1, "columns": 1})
        names = [block.name for block in self._blocks]
        later = set(names[names.index(name) + 1 : -1])
        back = next((one.block for one in dry.calls if one.block in later and one.call[0] in ("rows", "columns")), None)
        if back is None:
            return ""
        return (
            f"behind a hand-over before '{name}', block '{back}' takes larger images from before it, which are in "
            f"tiles, so all that follows is in tiles again; use until = '' (tiles to the end)"
        )

    def handed_over_at(self, tile: Tile) -> int:
        """The index of the first section with whole images; the number of sections if there is none."""
        for index, block in enumerate(self._blocks):
            is_named = bool(tile.until) and (block.name == tile.until or block.name.startswith(f"{tile.until}."))
            rows, columns = smallest_images(block)
            if is_named or rows < tile.rows or columns < tile.columns:
                return index
        return len(self._blocks)

    def _under(self, tile: Tile) -> tuple[ImageSection, ...]:
        """Tiled sections up to the hand-over, then sections of whole images."""
        at = self.handed_over_at(tile)
        found = list(self._in_tiles(replace(tile, until="", hand_over="gather"))[:at])
        if at == len(self.whole):
            return tuple(found)
        is_batch = tile.hand_over == "batch"
        for index in range(at, len(self.whole)):
            section = self.whole[index]
            calls: list[Call] = []
            if index == at and at > 0:
                taken = self._dry(1).taken.get(section.name) or (self.whole[at - 1].boundary_bytes,)
                calls += (call for num_bytes in taken for call in _hand_over(num_bytes, tile))
            if is_batch and self.profile.batch_mixers:
                calls += (one for one in self._reference(1)[index].calls if one.operation != "send")
            part = replace(section.part, tile_calls=tuple(calls)) if calls else section.part
            self._mark(index, part)
            found.append(replace(section, part=part, images=1 / tile.degree if is_batch else 1.0))
        return tuple(found)

    def _in_tiles(self, tile: Tile) -> tuple[ImageSection, ...]:
        """All sections under a tiling without a hand-over."""
        if tile not in self._tiled:
            references = self._reference(tile.fused)
            pairs = zip(self.whole, references, strict=True)
            self._tiled[tile] = tuple(self._tile(section, one, tile) for section, one in pairs)
            for index in (0, -1):
                self._mark(index % len(self.whole), self._tiled[tile][index].part)
        return self._tiled[tile]

    def _mark(self, index: int, part: BlockWork) -> None:
        """Remembers the work of the first and last section, so that `is_end` finds it."""
        if index in (0, len(self.whole) - 1):
            self._ends.add(id(part))  # the object lives as long as this one, so its id stays unique

    def _tile(self, section: ImageSection, reference: _ReferenceSection, tile: Tile) -> ImageSection:
        """Scales a section from the reference grid to an inner tile of another grid."""
        edge, extra, part = self._edge(tile.rows, tile.columns), reference.extra, section.part
        share, linear = 1 / tile.degree, 1 / tile.degree if reference.splits_products else 1.0
        outer = part.outer
        eager, fused = (share * times * (1 + extra.moved * edge) for times in reference.moved)
        tiled = replace(
            part,
            products=tuple(replace(one, rows=max(1, math.ceil(one.rows * linear))) for one in part.products),
            filters=tuple(one.shared(share * (1 + extra.flops * edge)) for one in part.filters),
            outer=MemoryTraffic(
                int(outer.num_bytes * eager),
                reference.num_kernels,
                int(outer.fused_bytes * fused),
                outer.fused_kernels,
            ),
            tile_calls=tuple(self._call(call, tile) for call in reference.calls if _exists_on(call, tile)),
        )
        saved = {kind: size * share * (1 + extra.saved[kind] * edge) for kind, size in section.saved_bytes.items()}
        return replace(
            section,
            part=tiled,
            saved_bytes=saved,
            boundary_bytes=section.boundary_bytes * (share if section is not self.whole[-1] else 1),
            largest_bytes=section.largest_bytes * share * (1 + max(0.0, extra.flops) * edge),
        )

    def _call(self, call: Call, tile: Tile) -> Call:
        """Scales a collective of the reference grid to another grid."""
        side = self._side
        if call.axis == "tile":
            grown = tile.degree / side**2 if call.operation == "all_gather" else 1
            return call._replace(num_bytes=call.num_bytes * grown)
        along, across = (tile.columns, tile.rows) if call.axis == "columns" else (tile.rows, tile.columns)
        times = call.times * _neighbours(along) / _neighbours(side)
        return call._replace(num_bytes=call.num_bytes * side / across, times=times)

    def _edge(self, rows: int, columns: int) -> float:
        """The edge length of an inner tile divided by its area, relative to the reference grid's."""
        height, width = self.sizes

        def one(down: int, right: int) -> float:
            return _neighbours(down) * down / height + _neighbours(right) * right / width

        return one(rows, columns) / one(self._side, self._side)

    # --- the reference grid

    @cached_property
    def _side(self) -> int:
        """Tiles along each side of the square reference grid.

        It is large enough that an inner tile has neighbours on all sides, if the images are large enough.
        """
        smallest = min(min(smallest_images(block)) for block in self._blocks)
        return int(max(2, min(LARGEST_REFERENCE, smallest)))

    def _reference(self, fused: int) -> list[_ReferenceSection]:
        if fused not in self._references:
            plain = self._dry(1)
            self._references[fused] = _compare(self._blocks, self._dry(fused), plain, self._side**2)
        return self._references[fused]

    def _dry(self, fused: int) -> DryRun:
        if fused not in self._ran:
            plan = Plan(tile=Tile(self._side, self._side, fused=fused))
            self._ran[fused] = dry_run(self.profile, plan, {"rows": 1, "columns": 1})
        return self._ran[fused]


def _any_loss(output: Any) -> Tensor:
    """A loss for the profile. The bytes that blocks save do not depend on it."""
    return torch.stack([one.float().sum() for one in tensors_of(output)]).sum()


def _compare(whole: Sequence[Block], dry: DryRun, plain: DryRun, degree: int) -> list[_ReferenceSection]:
    """Compares each section of a dry run with its share of the whole image's section."""
    names = [block.name for block in whole]
    calls = _calls_by_section(dry.calls, len(whole), {name: index for index, name in enumerate(names) if name})
    found = []
    for block, mine, base, said in zip(whole, chain(dry.profile), chain(plain.profile), calls, strict=True):
        filters = [_sum(filters_of(one)) for one in (block, mine)]
        matmuls = [_sum(products_of(one)) for one in (block, mine)]
        moved = [moved_of(one) for one in (block, mine, base)]
        saved = {
            kind: _over((mine.saved_bytes or {})[kind] * degree, (block.saved_bytes or {})[kind]) for kind in POLICIES
        }
        extra = _TileOverhead(
            _over(filters[1] * degree, filters[0]), _over(moved[1].num_bytes, moved[2].num_bytes), saved
        )
        splits = matmuls[1] * degree < 1.5 * matmuls[0]
        times = [moved[2][place] * degree / (moved[0][place] or 1) for place in (0, 2)]
        found.append(_ReferenceSection(extra, (times[0], times[1]), moved[1].num_kernels, splits, said))
    return found


def _sum(products: Iterable[Filter | Product]) -> float:
    return sum(one.flops for one in products)


def _over(mine: float, share: float) -> float:
    """The fraction by which `mine` exceeds `share`."""
    return mine / share - 1 if share else 0.0


def _calls_by_section(said: Iterable[RecordedCall], count: int, index_of: Mapping[str, int]) -> list[tuple[Call, ...]]:
    """Adds up the recorded collectives of a dry run by section.

    Equal collectives of a section become one with their mean bytes. The phase is "again" for collectives of forward
    that recompute repeats.
    """
    numbers: list[Counter[tuple[str, str, Phase]]] = [Counter() for _ in range(count)]
    sizes: list[Counter[tuple[str, str, Phase]]] = [Counter() for _ in range(count)]
    index = 0
    for one in said:
        index = index_of.get(one.block, 0 if index == 0 else count - 1)
        axis, operation, num_bytes = one.call
        phase: Phase = "backward" if one.is_backward else "again" if one.recomputed else "forward"
        numbers[index][axis, operation, phase] += 1
        sizes[index][axis, operation, phase] += num_bytes
    return [
        tuple(
            Call(axis, op, size[axis, op, phase] / times, phase, times) for (axis, op, phase), times in number.items()
        )
        for number, size in zip(numbers, sizes, strict=True)
    ]


def _hand_over(num_bytes: float, tile: Tile) -> list[Call]:
    """The sends that turn tiles of an image of `num_bytes` into whole images, and back in backward."""
    own = num_bytes / tile.degree
    if tile.hand_over == "batch":
        sent = [("tile", own / tile.degree, tile.degree - 1)]
    else:
        sent = [("columns", own, tile.columns - 1), ("rows", own * tile.columns, tile.rows - 1)]
    phases: tuple[Phase, ...] = ("forward", "backward")
    return [Call(axis, "send", size, phase, times) for axis, size, times in sent if times for phase in phases]


def _neighbours(degree: int) -> int:
    """The neighbours of an inner tile along an axis of `degree` tiles."""
    return min(2, degree - 1)


def _exists_on(call: Call, tile: Tile) -> bool:
    """Does the collective exist on this grid, i.e. does its axis have more than one rank?"""
    return {"rows": tile.rows, "columns": tile.columns, "tile": tile.degree}[call.axis] > 1
