"""The `[data]` table of a run file. Its key `kind` says what is trained on: text, slides that are made, or images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.data import slides
from weft.data.formats import Shape
from weft.data.images import OnBad
from weft.errors import ConfigError
from weft.schema import at_least, build_dataclass, nearest


@dataclass(frozen=True)
class DataConfig:
    """Text: a file, a folder or "stdlib", cut into sequences of `sequence` tokens.

    `documents` that share a sequence see each other ("joined"), or do not ("separate").
    """

    source: str
    sequence: int
    kind: Literal["text"] = "text"
    tokenizer: str = "bytes"
    text_field: str = "text"
    documents: Literal["joined", "separate"] = "joined"
    held_out: float = 0.05
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        at_least("data.sequence", self.sequence, 1)
        _check_held_out(self.held_out)


@dataclass(frozen=True)
class SlidesConfig:
    """Slides made from `seed`, `images` of them of `size` × `size` pixels, whose labels need the whole of each."""

    kind: Literal["slides"]
    images: int = 512
    size: int = 128
    seed: int = 0
    held_out: float = 0.2
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        at_least("data.images", self.images, 2)
        at_least("data.seed", self.seed, 0)
        if not slides.SMALLEST <= self.size <= slides.LARGEST:
            raise ConfigError(f"data.size = {self.size}; it must be from {slides.SMALLEST} to {slides.LARGEST}")
        _check_held_out(self.held_out)

    def shape(self, channels: int) -> Shape:
        """The shape of an image for a model that takes `channels`."""
        return Shape(self.size, self.size, channels)


@dataclass(frozen=True)
class ImagesConfig:
    """A folder of images of one size with a labels.csv. `level` is that of a pyramidal TIFF.

    An image that cannot be used is left out (`on_bad = "skip"`) or fatal ("stop").
    """

    kind: Literal["images"]
    source: str
    height: int
    width: int
    level: int = 0
    on_bad: OnBad = "stop"
    held_out: float = 0.2

    def __post_init__(self) -> None:
        for name, smallest in (("height", 1), ("width", 1), ("level", 0)):
            at_least(f"data.{name}", getattr(self, name), smallest)
        _check_held_out(self.held_out)

    def shape(self, channels: int) -> Shape:
        """The shape of an image for a model that takes `channels`."""
        return Shape(self.height, self.width, channels)


Data = DataConfig | SlidesConfig | ImagesConfig
KINDS: dict[str, type[Data]] = {"text": DataConfig, "slides": SlidesConfig, "images": ImagesConfig}


def data_from_table(table: Mapping[str, Any]) -> Data:
    """The config of a run file's table; `kind` is "text" if left out."""
    kind = table.get("kind", "text")
    if kind not in KINDS:
        raise ConfigError(f"unknown 'data.kind' = {kind!r}{nearest(str(kind), KINDS)}")
    return build_dataclass(KINDS[kind], table, "data")


def _check_held_out(held_out: float) -> None:
    if not 0 <= held_out < 1:
        raise ConfigError(f"data.held_out = {held_out}; it is a fraction from 0 to below 1")
