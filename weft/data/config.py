"""The `[data]` table of a run file. Its key `kind` selects text, synthetic slides or images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, NamedTuple

from weft.errors import ConfigError
from weft.schema import at_least, at_most, build_dataclass, nearest

MAX_SEQUENCE = 1 << 24
MAX_PIXELS = 1 << 20  # rows or columns of an image
OnBad = Literal["skip", "stop"]
SLIDE_CLASSES = 2
SMALLEST_SLIDE = 32  # pixels; in a smaller slide a lesion would have only a few pixels
LARGEST_SLIDE = 1 << 17


class ImageShape(NamedTuple):
    """The shape of an image."""

    height: int
    width: int
    channels: int

    def __str__(self) -> str:
        return f"{self.height} × {self.width} pixels of {self.channels} channels"


@dataclass(frozen=True)
class DataConfig:
    """Text: a file, a folder or "stdlib", split into sequences of `sequence` tokens.

    `end_token` ends a document; if it is not given, it is found in the tokenizer's files. With `add_special_tokens`, a
    document is surrounded as the tokenizer's file says: a token that marks its beginning, for example. Tokens of one
    document attend to other documents of the same sequence (`documents` = "joined"), or they do not ("separate").
    """

    source: str
    sequence: int
    kind: Literal["text"] = "text"
    tokenizer: str = "bytes"
    end_token: str | None = None
    add_special_tokens: bool = True
    text_field: str = "text"
    documents: Literal["joined", "separate"] = "joined"
    held_out: float = 0.05
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        at_least("data.sequence", self.sequence, 1)
        at_most("data.sequence", self.sequence, MAX_SEQUENCE)
        _check_held_out(self.held_out)


@dataclass(frozen=True)
class ChatConfig(DataConfig):
    """Conversations (`data/chat.py`): a .jsonl file, or a folder of them, packed into sequences of `sequence` tokens.

    `template` is a file with a chat template; if it is not given, the one in the tokenizer's folder is used.
    """

    kind: Literal["chat"] = "chat"  # type: ignore[assignment]
    documents: Literal["separate"] = "separate"  # type: ignore[assignment]
    template: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_field != "text":
            raise ConfigError(f"data.text_field = '{self.text_field}' is for data.kind = 'text'; leave it out")


@dataclass(frozen=True)
class PreferenceConfig(ChatConfig):
    """Preferences for DPO: a .jsonl file of prompts, each with a chosen and a rejected answer. A sample is a pair."""

    kind: Literal["preference"] = "preference"  # type: ignore[assignment]
    documents: Literal["joined"] = "joined"  # type: ignore[assignment]


@dataclass(frozen=True)
class SlidesConfig:
    """Synthetic slides, generated from `seed`: `images` images of `size` × `size` pixels, whose labels depend on the
    whole image. With `mirror`, half of the images to train on are mirrored, others in each epoch.
    """

    kind: Literal["slides"]
    images: int = 512
    size: int = 128
    seed: int = 0
    held_out: float = 0.2
    cache: str = "runs/cache"
    mirror: bool = False

    def __post_init__(self) -> None:
        at_least("data.images", self.images, 2)
        at_least("data.seed", self.seed, 0)
        if not SMALLEST_SLIDE <= self.size <= LARGEST_SLIDE:
            raise ConfigError(f"data.size = {self.size}; it must be from {SMALLEST_SLIDE} to {LARGEST_SLIDE}")
        _check_held_out(self.held_out)

    def shape(self, channels: int) -> ImageShape:
        """The shape of an image with `channels` channels."""
        return ImageShape(self.size, self.size, channels)


@dataclass(frozen=True)
class ImagesConfig:
    """A folder of images of one size with a labels.csv. `level` selects a level of a pyramidal TIFF.

    An image that cannot be used is left out (`on_bad = "skip"`) or ends the run ("stop"). With `mirror`, half of the
    images to train on are mirrored, others in each epoch.
    """

    kind: Literal["images"]
    source: str
    height: int
    width: int
    level: int = 0
    on_bad: OnBad = "stop"
    held_out: float = 0.2
    mirror: bool = False

    def __post_init__(self) -> None:
        for name, smallest in (("height", 1), ("width", 1), ("level", 0)):
            at_least(f"data.{name}", getattr(self, name), smallest)
            at_most(f"data.{name}", getattr(self, name), MAX_PIXELS)
        _check_held_out(self.held_out)

    def shape(self, channels: int) -> ImageShape:
        """The shape of an image with `channels` channels."""
        return ImageShape(self.height, self.width, channels)


Data = DataConfig | SlidesConfig | ImagesConfig
KINDS: dict[str, type[Data]] = {
    "text": DataConfig,
    "chat": ChatConfig,
    "preference": PreferenceConfig,
    "slides": SlidesConfig,
    "images": ImagesConfig,
}


def data_class(table: Mapping[str, Any]) -> type[Data]:
    """The class of a run file's table. `kind` is "text" by default."""
    kind = table.get("kind", "text")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"unknown 'data.kind' = {kind!r}{nearest(str(kind), KINDS)}")
    return KINDS[kind]


def data_from_table(table: Mapping[str, Any]) -> Data:
    """Build the config of a run file's table."""
    return build_dataclass(data_class(table), table, "data")


# Keys that say where the data is and how it is read. If they change the samples, they change the data's fingerprint.
_PLACES = ("source", "cache", "tokenizer", "end_token", "add_special_tokens", "text_field", "on_bad", "template")


def as_saved(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table `[data]` of a saved run, with the values of keys that runs did not have when it was saved."""
    return {**({"add_special_tokens": False} if is_of_earlier_tokens(table) else {}), **table}


def is_of_earlier_tokens(table: Mapping[str, Any]) -> bool:
    """Is a table `[data]` of a saved run of text of an earlier weft, which put no special tokens around texts and ended
    them with a token that no file beside the tokenizer names?
    """
    return issubclass(data_class(table), DataConfig) and "add_special_tokens" not in table


def changed_keys(saved: Mapping[str, Any], data: Data) -> tuple[list[str], list[str]]:
    """The differences between a saved `[data]` table and the current one, as texts "data.key = then, now ...".

    Returns two lists: keys that determine the samples, and keys that may change if the samples do not. A key counts as
    the former unless it is in `_PLACES`. A key that the saved table lacks had its default (`as_saved`).
    """
    table = {field.name: getattr(data, field.name) for field in fields(data)}
    before = {field.name: field.default for field in fields(data) if field.default is not MISSING} | as_saved(saved)
    changed = [key for key in {**table, **before} if table.get(key) != before.get(key)]
    words = {key: f"data.{key} = {_short(before.get(key))}, now {_short(table.get(key))}" for key in changed}
    return [words[key] for key in changed if key not in _PLACES], [words[key] for key in changed if key in _PLACES]


def _short(value: Any) -> str:
    return repr(value)[:200]


def _check_held_out(held_out: float) -> None:
    if not 0 <= held_out < 1:
        raise ConfigError(f"data.held_out = {held_out}; it is a fraction from 0 to below 1")
