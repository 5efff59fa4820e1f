"""One exchange for several layers: the extra pixels that a rank computes in each layer, so that later ones need none.

Consecutive layers form groups in which `fused` of them need neighbouring pixels. A group begins where the block of its
first such layer does, and a layer parallel to the last one (a shortcut) computes as much as that. Going backwards from
the last layer of a group, what its outputs need of its input is what the layer before has to compute: h(l-1) = s·h(l) +
lo (and hi). The first layer of a group fetches all of it, for itself and for all others that use the same input. Pixels
outside of the image are filled again in every layer, and norms count own pixels only, so only the number of messages
and the work that is done twice change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.spatial.ownership import Line
from weft.spatial.tile_layout import Needs, TileLayout
from weft.spatial.windows import Extra


@dataclass(frozen=True)
class NeighbourLayer:
    """An operation that needs neighbouring pixels: its position, input and output layouts, what outputs need."""

    position: tuple[str, int]
    input_layout: TileLayout
    output_layout: TileLayout
    needs: tuple[Needs, Needs]

    @property
    def communicates(self) -> bool:
        """Whether own outputs need pixels of other ranks."""
        return self.before(((0, 0), (0, 0))) != ((0, 0), (0, 0))

    def before(self, extra: Extra) -> Extra:
        """Return the extra pixels of the input that are needed to compute `extra` pixels of the output."""
        lines = zip(
            (self.input_layout.rows, self.input_layout.columns),
            (self.output_layout.rows, self.output_layout.columns),
            strict=True,
        )
        found = [_margins(*pair, need, more) for pair, need, more in zip(lines, self.needs, extra, strict=True)]
        return found[0], found[1]


def _margins(input_line: Line, output_line: Line, need: Needs, extra: tuple[int, int]) -> tuple[int, int]:
    wide = Line.of(output_line.size, output_line.degree, extra)
    needs = [need(held) for held in wide.held]
    before = [own[0] - max(0, one[0]) for own, one in zip(input_line.owned, needs, strict=True)]
    after = [min(input_line.size, one[1]) - own[1] for own, one in zip(input_line.owned, needs, strict=True)]
    return max(0, *before), max(0, *after)


def fuse(layers: Sequence[NeighbourLayer], fused: int) -> dict[tuple[str, int], Extra]:
    """Return the extra pixels that each layer has to compute, by its position."""
    found: dict[tuple[str, int], Extra] = {}
    for group in _groups(layers, fused):
        extra: Extra = ((0, 0), (0, 0))
        for step in reversed(group):
            for layer in step:
                found[layer.position] = extra
            extra = step[0].before(extra)
    return {position: extra for position, extra in found.items() if extra != ((0, 0), (0, 0))}


def _groups(layers: Sequence[NeighbourLayer], fused: int) -> list[list[list[NeighbourLayer]]]:
    """Return groups of consecutive layers. Each step of a group is a list: a layer and those parallel to it."""
    groups: list[list[list[NeighbourLayer]]] = []
    num_communicating = 0
    for layer in layers:
        last = groups[-1][-1][0] if groups else None
        if (
            last is not None
            and layer.input_layout.sizes != last.output_layout.sizes
            and layer.output_layout.sizes == last.output_layout.sizes
        ):
            groups[-1][-1].append(layer)
            continue
        if last is None or layer.input_layout.sizes != last.output_layout.sizes:
            groups.append([])
            num_communicating = 0
        elif num_communicating + layer.communicates > fused:
            groups.append(_end_of_block(groups[-1], layer))
            num_communicating = 0
        groups[-1].append([layer])
        num_communicating += layer.communicates
    return groups


def _end_of_block(group: list[list[NeighbourLayer]], layer: NeighbourLayer) -> list[list[NeighbourLayer]]:
    """Remove and return the last layers of a group that share a block with `layer` and need no neighbouring pixels."""
    moved: list[list[NeighbourLayer]] = []
    block = layer.position[0]
    while len(group) > 1 and block and group[-1][0].position[0] == block and not group[-1][0].communicates:
        moved.insert(0, group.pop())
    return moved
