"""The `[data]` table of a run file. Its key `kind` selects text, synthetic slides or images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple

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


HeldOut = Annotated[float, "the share of samples that is not trained on, for evaluation"]
CacheFolder = Annotated[str, "the folder of prepared data"]
Mirror = Annotated[bool, "mirror half of the images to train on, others in each epoch"]
_PREFERENCE = "preference: prompts with a chosen and a rejected answer (DPO)"


@dataclass(frozen=True)
class DataConfig:
    """Text, split into sequences of tokens."""

    source: Annotated[str, 'a file, a folder, or "stdlib": the text of Python\'s standard library']
    sequence: Annotated[int, "tokens of a sequence"]
    kind: Annotated[Literal["text"], "text, the default"] = "text"
    tokenizer: Annotated[str, '"bytes", a tokenizer.json, or a folder with one'] = "bytes"
    end_token: Annotated[str | None, "the token that ends a document; by default found in the tokenizer's files"] = None
    add_special_tokens: Annotated[
        bool, "surround each text with the tokens that the tokenizer's file adds, such as one that begins it"
    ] = True
    text_field: Annotated[str, "the field of JSON lines and tables that holds the text"] = "text"
    documents: Annotated[
        Literal["joined", "separate"],
        "do documents of one sequence attend to each other (joined) or not (separate)?",
    ] = "joined"
    held_out: HeldOut = 0.05
    cache: CacheFolder = "runs/cache"

    def __post_init__(self) -> None:
        at_least("data.sequence", self.sequence, 1)
        at_most("data.sequence", self.sequence, MAX_SEQUENCE)
        _check_held_out(self.held_out)


@dataclass(frozen=True)
class ChatConfig(DataConfig):
    """Conversations (`data/chat.py`), packed into sequences of tokens."""

    source: Annotated[str, "a .jsonl file, or a folder of them"]
    kind: Annotated[Literal["chat"], "chat: conversations"] = "chat"  # type: ignore[assignment]
    add_special_tokens: Annotated[bool, "the same for texts; messages have what their template writes"] = True
    text_field: Annotated[str, "not used"] = "text"
    documents: Annotated[Literal["separate"], "follows from the kind"] = "separate"  # type: ignore[assignment]
    template: Annotated[str | None, "a file with a chat template; by default the one in the tokenizer's folder"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_field != "text":
            raise ConfigError(f"data.text_field = '{self.text_field}' is for data.kind = 'text'; leave it out")


@dataclass(frozen=True)
class PreferenceConfig(ChatConfig):
    """Preferences for DPO. A sample is a prompt with a pair of answers."""

    kind: Annotated[Literal["preference"], _PREFERENCE] = "preference"  # type: ignore[assignment]
    documents: Annotated[Literal["joined"], "follows from the kind"] = "joined"  # type: ignore[assignment]


@dataclass(frozen=True)
class SlidesConfig:
    """Synthetic slides: square images whose labels depend on the whole image."""

    kind: Annotated[Literal["slides"], "synthetic slides"]
    images: Annotated[int, "the number of images"] = 512
    size: Annotated[int, "rows and columns of an image"] = 128
    seed: Annotated[int, "of the images"] = 0
    held_out: HeldOut = 0.2
    cache: CacheFolder = "runs/cache"
    mirror: Mirror = False

    def __post_init__(self) -> None:
        at_least("data.images", self.images, 2)
        at_least("data.seed", self.seed, 0)
        if not SMALLEST_SLIDE <= self.size <= LARGEST_SLIDE:
            raise ConfigError(f"data.size = {self.size}; it must be from {SMALLEST_SLIDE} to {LARGEST_SLIDE}")
        _check_held_out(self.held_out)

    def shape(self, channels: int) -> ImageShape:
        """Returns the shape of an image with `channels` channels."""
        return ImageShape(self.size, self.size, channels)


@dataclass(frozen=True)
class ImagesConfig:
    """A folder of images of one size with their labels."""

    kind: Annotated[Literal["images"], "a folder of images"]
    source: Annotated[str, "the folder, with a labels.csv"]
    height: Annotated[int, "rows of every image"]
    width: Annotated[int, "columns of every image"]
    level: Annotated[int, "the level of a pyramidal TIFF"] = 0
    on_bad: Annotated[OnBad, "what to do with an image that cannot be used: leave it out (skip), or end the run"] = (
        "stop"
    )
    held_out: HeldOut = 0.2
    mirror: Mirror = False

    def __post_init__(self) -> None:
        for name, smallest in (("height", 1), ("width", 1), ("level", 0)):
            at_least(f"data.{name}", getattr(self, name), smallest)
            at_most(f"data.{name}", getattr(self, name), MAX_PIXELS)
        _check_held_out(self.held_out)

    def shape(self, channels: int) -> ImageShape:
        """Returns the shape of an image with `channels` channels."""
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
    """Returns the class of a run file's table. `kind` is "text" by default."""
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
    """Returns the differences between a saved `[data]` table and the current one, as texts "data.key = then, now ...".

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
