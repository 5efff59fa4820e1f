"""One exchange for several layers: how many pixels beside its own a rank computes of each, so that none is missing.

Layers that follow one another form groups in which `fused` of them look at neighbours. From the last layer of a group
backwards, what its outputs need of its input is what the layer before has to compute: h(l-1) = s·h(l) + lo (and hi).
The first of a group fetches all of it. Pixels outside of the image are filled anew in every layer, and norms count own
pixels only, so nothing changes but the number of messages and the work that is done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.spatial.ownership import Line
from weft.spatial.place import Needs, Place
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
        for before, layer in zip(reversed(group[:-1]), reversed(group[1:]), strict=True):
            extra = layer.before(extra)
            found[before.position] = extra
    return found


def _groups(layers: Sequence[Layer], fused: int) -> list[list[Layer]]:
    groups: list[list[Layer]] = []
    num_talking = 0
    for layer in layers:
        follows = bool(groups) and groups[-1][-1].given.sizes == layer.taken.sizes
        if not follows or num_talking + layer.talks > fused:
            groups.append([])
            num_talking = 0
        groups[-1].append(layer)
        num_talking += layer.talks
    return groups
