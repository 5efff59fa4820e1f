"""Which formats of the cache (`layer_cache.py`) ranks of `context` can hold together."""

from __future__ import annotations

from weft.serve.attention.four_bit_cache import FourBitFormat
from weft.serve.attention.layer_cache import CacheFormat, PlainFormat
from weft.serve.attention.loki_cache import LokiFormat
from weft.serve.attention.split_four_bit_cache import SplitFourBitFormat
from weft.serve.attention.split_loki_cache import SplitLokiFormat


def split_format(form: CacheFormat) -> CacheFormat | None:
    """The format of pages that ranks hold together, whose answers are those of `form`; None if there is none."""
    if isinstance(form, PlainFormat):
        return form
    if isinstance(form, FourBitFormat):
        return SplitFourBitFormat(form.group)
    return SplitLokiFormat(form.axes, form.choice, form.identity) if isinstance(form, LokiFormat) else None
