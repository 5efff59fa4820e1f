"""Finds the axes of Loki's keys (`serve/attention/choice.py`) from a text.

The axes of a head are the principal axes of its keys on the text, without a mean: after rotation by position, or before
it. The cache keeps rotated keys, and a decode turns rotated keys and queries to either axes. On the text on which they
are found, axes after rotation explain most: no others explain more of the same keys. On other texts that need not hold,
so some rows are held out, and each head gets the axes that explain more of its rotated keys there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.models.attention import rotate
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat, CacheLayer, Loki, model_identity
from weft.serve.calibration.bars import Bar, no_bar
from weft.serve.model.model_part import ModelPart
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.step_inputs import text_inputs
from weft.serve.spec import EngineOptions

HELD_OUT = 4  # every fourth row of the text
AFTER, BEFORE = 0, 1  # rotation by position


class RecordedLayer(CacheLayer):
    """Keys and values as they are; sums of k k^T are added to what the format records."""

    def __init__(self, index: int, sizes: CacheSizes, recording: RecordingFormat) -> None:
        super().__init__(recording.storage.new_pages(sizes), sizes)
        self.counts = None
        self._index, self._recording = index, recording

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        self._recording.add(self._index, keys[batch.slots], batch.positions)
        return super().attend(query, keys, values, batch, window)


class RecordingFormat(CacheFormat):
    """The plain format, which records the keys of each block of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary: tuple[Tensor, Tensor] | None = None  # cos and sin of every position
        self.is_held_out = False  # the text that is computed
        # By block, and whether the text is held out: sums after and before rotation [2, key heads, head_dim, head_dim].
        self.sums: dict[tuple[int, bool], Tensor] = {}

    def layer(self, index: int, sizes: CacheSizes) -> CacheLayer:
        shape = (2, sizes.num_key_heads, sizes.head_dim, sizes.head_dim)
        for is_held_out in (False, True):
            self.sums.setdefault((index, is_held_out), torch.zeros(shape, dtype=torch.float64))
        return RecordedLayer(index, sizes, self)

    def add(self, index: int, keys: Tensor, positions: Tensor) -> None:
        """Record the rotated keys [tokens, key heads, head_dim] of a block."""
        after = keys.to("cpu", torch.float64)
        before = after
        if self.rotary is not None:
            cos, sin = (table[positions][:, None].to("cpu", torch.float64) for table in self.rotary)
            before = rotate(after, cos, -sin)
        for kind, own in ((AFTER, after), (BEFORE, before)):
            self.sums[index, self.is_held_out][kind] += torch.einsum("thd,the->hde", own, own)


class Calibration(NamedTuple):
    """The axes for a model; how much of the squares of its keys the axes up to each explain [layers, key heads,
    head_dim]; which heads have axes of keys before rotation [layers, key heads].
    """

    loki: Loki
    explained: Tensor
    is_before: Tensor


def calibrate(model: nn.Module, texts: Sequence[Tensor], choice: LokiChoice, bar: Bar = no_bar) -> Calibration:
    """Calibrate a model by rows of tokens, which may be longer than the positions that it states."""
    recording, rows = RecordingFormat(), [row for text in texts for row in text.tolist()]
    longest = max(map(len, rows), default=1)
    part = ModelPart(model, EngineOptions.of_texts(longest, recording))
    if not isinstance(part.paged, PagedModel):
        raise ConfigError("a recurrent model keeps no keys, so there is nothing to calibrate; give another model")
    recording.rotary = part.paged.rotary
    with bar("calibrating") as progress:
        for index, row in enumerate(rows):
            recording.is_held_out = index % HELD_OUT == HELD_OUT - 1
            part.hidden_states(text_inputs(row, part.layout.block_size))
            progress(index + 1, len(rows))
    layers = sorted({index for index, _ in recording.sums})
    fitted, held_out = (torch.stack([recording.sums[index, kind] for index in layers], 1) for kind in (False, True))
    if not bool((fitted + held_out).isfinite().all()):
        raise NumbersError("keys of the calibration text are NaN or infinite; the model's weights are damaged")
    axes, is_before = best_axes(fitted, held_out, choice.num_dims(fitted.shape[-1]))
    explained = explained_shares(axes, (fitted + held_out)[AFTER])
    return Calibration(Loki(axes, choice, model_identity(model)), explained, is_before)


def best_axes(fitted: Tensor, held_out: Tensor, num_dims: int) -> tuple[Tensor, Tensor]:
    """Return the axes [..., head_dim, head_dim] of heads, and which heads have those before rotation.

    Given are the sums [after and before, ..., head_dim, head_dim] of two parts of a text: axes are found on the first,
    and those whose first dims explain more of rotated keys on the second are taken, from both parts.
    """
    shares = explained_shares(principal_axes(fitted), held_out[AFTER].expand_as(held_out))[..., num_dims - 1]
    is_before = shares[BEFORE] > shares[AFTER] + 1e-9
    both = principal_axes(fitted + held_out)
    return torch.where(is_before[..., None, None], both[BEFORE], both[AFTER]), is_before


def principal_axes(sums: Tensor) -> Tensor:
    """Return axes in columns, most important first."""
    axes: Tensor = torch.linalg.eigh(sums)[1]
    return axes.flip(-1)


def explained_shares(axes: Tensor, sums: Tensor) -> Tensor:
    """Return the share of keys' squares, whose sums are [..., head_dim, head_dim], that axes up to each explain."""
    along = torch.einsum("...de,...dc,...ce->...e", axes, sums, axes).clamp(min=0)
    shares = along.cumsum(-1)
    return shares / shares[..., -1:].clamp(min=1e-300)
