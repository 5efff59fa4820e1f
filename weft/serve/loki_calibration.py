"""Finds the axes of Loki's keys (`loki_cache.py`) from a text, and keeps them in a file.

The axes of a head are the principal axes of its keys on the text, after rotation by position, without a mean: of all
axes, the first of these explain most of the keys that the cache keeps. The file is safetensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.serve.layer_cache import CacheSizes, LayerCache, PlainFormat, PlainLayer
from weft.serve.loki_cache import LokiFormat
from weft.serve.loki_choice import LokiChoice
from weft.serve.model_identity import model_identity
from weft.serve.model_part import EngineOptions, ModelPart
from weft.serve.paged_attention import PagedBatch
from weft.serve.step_inputs import text_inputs

KIND = "weft loki 2"


class RecordedLayer(PlainLayer):
    """Keys and values as they are; sums of k k^T are added to `moments` [key heads, head_dim, head_dim]."""

    def __init__(self, sizes: CacheSizes, moments: Tensor) -> None:
        super().__init__(sizes)
        self.counts = None
        self._moments = moments

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        own = keys[batch.slots].to("cpu", torch.float64)
        self._moments += torch.einsum("thd,the->hde", own, own)
        return super().attend(query, keys, values, batch, window)


class RecordingFormat(PlainFormat):
    """The plain format, which records the keys of each block of the model."""

    def __init__(self) -> None:
        self.moments: dict[int, Tensor] = {}

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        shape = (sizes.num_key_heads, sizes.head_dim, sizes.head_dim)
        return RecordedLayer(sizes, self.moments.setdefault(index, torch.zeros(shape, dtype=torch.float64)))


def calibrate(model: nn.Module, texts: Sequence[Tensor], choice: LokiChoice) -> tuple[LokiFormat, Tensor]:
    """The format for a model from rows of tokens, and how much of the keys' squares the axes up to each explain:
    [layers, key heads, head_dim].
    """
    recording = RecordingFormat()
    part = ModelPart(model, EngineOptions(num_blocks=1, max_running=1, cache=recording))
    for text in texts:
        for row in text.tolist():
            part.hidden_states(text_inputs(row, part.layout.block_size))
    moments = torch.stack([recording.moments[index] for index in sorted(recording.moments)])
    if not bool(moments.isfinite().all()):
        raise NumbersError("keys of the calibration text are NaN or infinite; the model's weights are damaged")
    sizes, axes = torch.linalg.eigh(moments)  # smallest first
    explained = sizes.clamp(min=0).flip(-1).cumsum(-1)
    explained = explained / explained[..., -1:].clamp(min=1e-300)
    return LokiFormat(axes.flip(-1), choice, model_identity(model)), explained


def save(path: Path, found: LokiFormat) -> None:
    """Write a file that `load` reads."""
    about = {"kind": KIND, "model": found.identity, **{key: str(value) for key, value in asdict(found.choice).items()}}
    try:
        save_file({"axes": found.axes.float().contiguous()}, str(path), about)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {path} ({error}); choose another place by --out") from None


def load(path: Path) -> LokiFormat:
    """Read the file that `weft calibrate` wrote. Raises ConfigError."""
    try:
        with safe_open(str(path), "pt") as file:
            about, axes = file.metadata() or {}, file.get_tensor("axes")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--cache loki={path} cannot be read ({error}); run weft calibrate") from None
    if about.get("kind") != KIND or axes.dim() != 4 or not bool(axes.isfinite().all()):
        raise ConfigError(f"--cache loki={path} is no file of weft calibrate, or of an older one; run weft calibrate")
    product = axes.double().mT @ axes.double()
    if float((product - torch.eye(axes.shape[-1])).abs().max()) > 1e-5:
        raise ConfigError(f"the axes in {path} are not orthogonal: the file is damaged; run weft calibrate")
    numbers = (float(about["dims"]), float(about["tokens"]), int(about["newest"]), int(about["dense_below"]))
    return LokiFormat(axes, LokiChoice(*numbers), about["model"])
