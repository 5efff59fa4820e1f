"""The bytes of numbers that are rounded for a link: bf16, or int8 and fp8 in blocks with a scale each (ZeRO++).

`comm/rounded.py` converts tensors. This file has the sizes, which the runtime, the ledger's predictions and the planner
share, and the bound of the error that rounding makes.
"""

from __future__ import annotations

import math
from typing import Literal

Wire = Literal["exact", "bf16", "int8", "fp8"]
BLOCK = 256  # elements that share a scale
SCALE_BYTES = 4


def message_bytes(numel: float, wire: Wire) -> int:
    """The bytes of `numel` elements on a link; `wire` is not "exact"."""
    count = math.ceil(numel)
    return 2 * count if wire == "bf16" else count + SCALE_BYTES * -(-count // BLOCK)


def error_bound(value: float, largest: float, wire: Wire) -> float:
    """The largest error of one rounding of `value` in a block (in a message for bf16) whose largest magnitude is
    `largest`. Rounding of the scale itself to fp32 adds less than a millionth of `largest`.

    bf16 keeps 8 significant bits. int8 has 127 steps up to the largest. fp8 (e4m3) keeps 4 significant bits, down to
    steps of 2⁻⁹ of which 448 is the largest number.
    """
    scale_error = 1e-6 * largest
    if wire == "bf16":
        return abs(value) / 256
    if wire == "int8":
        return largest / 254 + scale_error
    return max(abs(value) / 16, largest / 448 / 1024) + scale_error
