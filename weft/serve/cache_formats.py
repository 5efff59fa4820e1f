"""The formats of the cache that `weft serve --cache` names."""

from __future__ import annotations

from weft.errors import ConfigError
from weft.serve.four_bit_cache import FourBitFormat
from weft.serve.layer_cache import CacheFormat, PlainFormat

DEFAULT_BLOCK_SIZE = 16


def cache_format(name: str | None) -> CacheFormat:
    """The format of a name; None is that of keys and values as they are. Raises ConfigError."""
    if name is None:
        return PlainFormat()
    if name == "int4":
        return FourBitFormat()
    raise ConfigError(f"--cache {name} is unknown; give int4")


def block_size_of(found: CacheFormat) -> int:
    """Tokens of a block of the cache, for `weft serve`."""
    return found.block_size or DEFAULT_BLOCK_SIZE
