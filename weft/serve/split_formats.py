"""Which formats of the cache (`layer_cache.py`) ranks of `context` can hold together."""

from __future__ import annotations

from weft.serve.four_bit_cache import FourBitFormat
from weft.serve.four_bit_loki_cache import FourBitLokiFormat
from weft.serve.layer_cache import CacheFormat, PlainFormat
from weft.serve.split_four_bit_cache import SplitFourBitFormat


def split_format(form: CacheFormat) -> CacheFormat | None:
    """The format of pages that ranks hold together, whose answers are those of `form`; None if there is none."""
    if isinstance(form, PlainFormat):
        return form
    if isinstance(form, FourBitFormat) and not isinstance(form, FourBitLokiFormat):
        return SplitFourBitFormat(form.group)
    return None
