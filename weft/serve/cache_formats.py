"""The formats of the cache that `weft serve --cache` names."""

from __future__ import annotations

from pathlib import Path

from weft.errors import ConfigError
from weft.serve.four_bit_cache import FourBitFormat
from weft.serve.layer_cache import CacheFormat, PlainFormat
from weft.serve.loki_calibration import load

DEFAULT_BLOCK_SIZE = 16


def cache_format(name: str | None) -> CacheFormat:
    """The format of a name; None is that of keys and values as they are. Raises ConfigError."""
    if name is None:
        return PlainFormat()
    kind, _, path = name.partition("=")
    if name == "int4":
        return FourBitFormat()
    if kind == "loki" and path:
        return load(Path(path))
    raise ConfigError(f"--cache {name} is unknown; give int4, or loki=FILE with a file of weft calibrate")


def block_size_of(found: CacheFormat) -> int:
    """Tokens of a block of the cache, for `weft serve`."""
    return found.block_size or DEFAULT_BLOCK_SIZE
