"""The formats of the cache that `weft serve --cache` names."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.errors import ConfigError
from weft.serve.attention.four_bit_cache import GROUP, GROUPS, FourBitFormat
from weft.serve.attention.layer_cache import CacheFormat, PlainFormat
from weft.serve.calibration.loki_calibration import load

DEFAULT_BLOCK_SIZE = 16
FOUR_BITS = {"int4" if group == GROUP else f"int4-{group}": group for group in GROUPS}


def cache_format(name: str | None) -> CacheFormat:
    """The format of a name; None is that of keys and values as they are. Raises ConfigError."""
    if name is None:
        return PlainFormat()
    if name in FOUR_BITS:
        return FourBitFormat(FOUR_BITS[name])
    if name.startswith("loki=") and name != "loki=":
        return load(Path(name.removeprefix("loki=")))
    raise ConfigError(
        f"--cache {name} is unknown; give int4, int4-32 or int4-128, or loki=FILE with a file of weft calibrate"
    )


def why_slow(found: CacheFormat, device: str, dtype: torch.dtype) -> list[str]:
    """Why decodes with a cache of this format are slow on a device, if they are; the model computes in `dtype`."""
    if device == "cpu" or found.name == PlainFormat.name:
        return []
    if not found.has_kernel:
        return [f"--cache {found.name} has no kernels for decodes on GPUs: plain functions attend, which is slow"]
    if dtype.itemsize == 2:
        return []
    return [
        f"--cache {found.name} has kernels for 16 bits alone, and this GPU computes in {dtype}: plain functions "
        f"attend, which is slow"
    ]


def block_size_of(found: CacheFormat) -> int:
    """Tokens of a block of the cache, for `weft serve`."""
    return found.block_size or DEFAULT_BLOCK_SIZE
