"""One exchange for several layers: how many pixels beside its own a rank computes of each, so that none is missing.

Layers that follow one another form groups in which `fused` of them look at neighbours; a group begins where its first
such layer's block does, and a layer beside the last one (a shortcut) computes as much as that. From the last layer of a
group backwards, what its outputs need of its input is what the layer before has to compute: h(l-1) = s·h(l) + lo (and
hi). The first of a group fetches all of it, for itself and for whoever uses the same input. Pixels outside of the image
are filled anew in every layer, and norms count own pixels only, so nothing changes but the number of messages and the
work that is done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.spatial.ownership import Line
from weft.spatial.tile_layout import Needs, Place
from weft.spatial.windows import Extra


@dataclass(frozen=True)
class Layer:
    """An operation that looks at neighbours: where it is, where its input and output lie, and what outputs need."""

    position: tuple[str, int]
    taken: Place
    given: Place
    needs: tuple[Needs, Needs]

    @property
    def talks(self) -> bool:
        """Whether own outputs need pixels of others."""
        return self.before(((0, 0), (0, 0))) != ((0, 0), (0, 0))

    def before(self, extra: Extra) -> Extra:
        """What has to be held beside own inputs, to compute so much beside own outputs."""
        lines = zip((self.taken.rows, self.taken.columns), (self.given.rows, self.given.columns), strict=True)
        found = [_margins(*pair, need, more) for pair, need, more in zip(lines, self.needs, extra, strict=True)]
        return found[0], found[1]


def _margins(taken: Line, given: Line, need: Needs, extra: tuple[int, int]) -> tuple[int, int]:
    wide = Line.of(given.size, given.degree, extra)
    needs = [need(held) for held in wide.held]
    before = [own[0] - max(0, one[0]) for own, one in zip(taken.owned, needs, strict=True)]
    after = [min(taken.size, one[1]) - own[1] for own, one in zip(taken.owned, needs, strict=True)]
    return max(0, *before), max(0, *after)


def fuse(layers: Sequence[Layer], fused: int) -> dict[tuple[str, int], Extra]:
    """What each layer has to compute beside its own pixels, by its position."""
    found: dict[tuple[str, int], Extra] = {}
    for group in _groups(layers, fused):
        extra: Extra = ((0, 0), (0, 0))
        for place in reversed(group):
            for layer in place:
                found[layer.position] = extra
            extra = place[0].before(extra)
    return {position: extra for position, extra in found.items() if extra != ((0, 0), (0, 0))}


def _groups(layers: Sequence[Layer], fused: int) -> list[list[list[Layer]]]:
    """Groups of layers in turn, each with those beside it."""
    groups: list[list[list[Layer]]] = []
    num_talking = 0
    for layer in layers:
        last = groups[-1][-1][0] if groups else None
        if last is not None and layer.taken.sizes != last.given.sizes and layer.given.sizes == last.given.sizes:
            groups[-1][-1].append(layer)
            continue
        if last is None or layer.taken.sizes != last.given.sizes:
            groups.append([])
            num_talking = 0
        elif num_talking + layer.talks > fused:
            groups.append(_end_of_block(groups[-1], layer))
            num_talking = 0
        groups[-1].append([layer])
        num_talking += layer.talks
    return groups


def _end_of_block(group: list[list[Layer]], layer: Layer) -> list[list[Layer]]:
    """Take the last layers off a group that are in one block with the next and look at no neighbours."""
    moved: list[list[Layer]] = []
    block = layer.position[0]
    while len(group) > 1 and block and group[-1][0].position[0] == block and not group[-1][0].talks:
        moved.insert(0, group.pop())
    return moved
