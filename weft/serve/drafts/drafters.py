"""The drafter that an engine is asked for. Drafts by lookup are here: what followed the last tokens where they stood
before in the same request. They cost nothing, and are often right where a text repeats itself: code, tables, quotations
of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import nn

from weft.serve.drafts.model_drafts import EarlyLayersDrafter, ModelDrafter
from weft.serve.model.model_part import ModelPart
from weft.serve.scheduling.scheduler import ActiveRequest
from weft.serve.scheduling.speculation import Drafter, EarlyLayers
from weft.serve.spec import EngineOptions

SIZES = (4, 3, 2)  # of the n-grams that are looked for, in this order


class NgramIndex:
    """Where each n-gram of a growing text stood last, but for its end."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind it
        self._num_indexed = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Index what was added to a text. The n-grams at its very end are left out: nothing follows them yet."""
        for end in range(self._num_indexed, len(tokens)):
            for size in SIZES:
                if size <= end:
                    self._places[tuple(tokens[end - size : end])] = end
        self._num_indexed = len(tokens)

    def following(self, tokens: Sequence[int], number: int) -> list[int]:
        """Return what followed the last tokens before: `number` tokens, or none. A text that repeats goes round."""
        for size in SIZES:
            place = self._places.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if place is not None:
                found = list(tokens[place : place + number])
                period = len(tokens) - place
                while len(found) < number:
                    found.append(found[-period])
                return found
        return []


class NgramDrafter:
    """Drafts for requests by their own tokens."""

    context_length = 1 << 62

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[ActiveRequest, NgramIndex] = WeakKeyDictionary()

    def draft(self, wanted: Sequence[tuple[ActiveRequest, int]]) -> list[list[int]]:
        found = []
        for active, number in wanted:
            index = self._indices.setdefault(active, NgramIndex())
            index.add(active.tokens)
            found.append(index.following(active.tokens, number))
        return found


def make_drafter(options: EngineOptions, part: ModelPart, num_rows: int, vocab_size: int) -> Drafter:
    """Return the drafter that `options.speculate` names, for the engine's own `part` of the model."""
    if isinstance(options.speculate, EarlyLayers):
        return EarlyLayersDrafter(part, options.speculate.number, num_rows, vocab_size)
    if isinstance(options.speculate, nn.Module):
        return ModelDrafter(options.speculate, options, part.layout, num_rows, vocab_size)
    return NgramDrafter()
