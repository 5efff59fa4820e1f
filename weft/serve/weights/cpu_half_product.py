"""Products with weights in fp16 on a CPU, by torch's product that widens them in registers.

Inputs, sums and results are float32, so results are those of a float32 product with the rounded weight but for the
order of sums, which does not depend on the other rows. On x86 only: on ARM, torch's product rounds inputs to fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.serve.weights.cpu_product import (
    DTYPES,
    MEASURED_WEIGHTS,
    has_fbgemm,
    most_rows,
    packed_function,
    slower_than_decoding,
)


@dataclass(frozen=True)
class HalfWeight:
    """A weight [out, in] as torch's product takes it."""

    packed: Any  # torch's own object
    max_rows: int  # more are computed faster by the plain function

    def product(self, hidden: Tensor) -> Tensor:
        """hidden [rows, in] @ weight.T."""
        multiply = packed_function("linear_dynamic_fp16")
        if hidden.dtype == torch.float32:
            return multiply(hidden, self.packed)
        return multiply(hidden.float(), self.packed).to(hidden.dtype)


def half_weight(weight: Tensor, max_rows: int) -> HalfWeight:
    """A weight (float16) [out, in]."""
    return HalfWeight(torch.ops.quantized.linear_prepack_fp16(weight.float(), None), max_rows)


def arranged(weight: Tensor, dtype: torch.dtype) -> HalfWeight | None:
    """The weight for inputs of a dtype; None if it is decoded for each product (`refusal`)."""
    num_in = weight.shape[1]
    if refusal(num_in, dtype) is not None:
        return None
    return half_weight(weight, measured_rows(num_in, dtype, torch.get_num_threads()))


def refusal(num_in: int, dtype: torch.dtype) -> str | None:
    """Why weights with so many inputs are decoded for products of one row; None if they are not."""
    if dtype not in DTYPES:
        return f"products with codes take no inputs in {dtype}"
    if not has_product():
        return "this torch has no products with fp16 weights for this CPU"
    if not measured_rows(num_in, dtype, torch.get_num_threads()):
        return slower_than_decoding(num_in)
    return None


@cache
def has_product() -> bool:
    """Has this torch the product, and does it give what it should on this CPU?"""
    if not has_fbgemm():
        return False
    weight = (torch.arange(17.0 * 64).view(17, 64) - 500).half()
    try:
        found = half_weight(weight, 1).product(torch.eye(64))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(found.T, weight.float())


@cache
def measured_rows(num_in: int, dtype: torch.dtype, threads: int) -> int:
    """The most rows for which this product is faster than the plain function; 0 if it is for none.

    It is measured once, with as many outputs as make a million weights. `threads` are those in use.
    """
    values = torch.ones(max(16, MEASURED_WEIGHTS // num_in), num_in, dtype=torch.float16)
    return most_rows(half_weight(values, 1).product, lambda hidden: F.linear(hidden, values.to(dtype)), num_in, dtype)
