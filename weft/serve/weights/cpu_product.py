"""Products with codes on a CPU: weights in fewer bits as torch's products take them, so that no weight is decoded.

`cpu_group_product.py` is for weights in groups of inputs, `cpu_row_product.py` for one scale for each row of outputs,
`cpu_half_product.py` for fp16.
The plain function, which decodes the weight and multiplies (`weight_formats.py`), is faster for many rows: a short
measurement says from how many rows on. The codes are kept a second time, in the order that torch's product takes.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import Field, replace
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs
ROWS = (1, 4, 16, 64, 256)  # that are measured
MEASURED_WEIGHTS = 1 << 20

Product = Callable[[Tensor], Tensor]


class CpuWeight(Protocol):
    """A weight [out, in] in fewer bits, in the order in which a product takes it. It is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def max_rows(self) -> int:
        """More are computed faster by the plain function."""

    def product(self, hidden: Tensor) -> Tensor:
        """hidden [rows, in] @ weight.T."""


def limited(weight: CpuWeight | None, max_rows: int) -> CpuWeight | None:
    """The weight for products of at most so many rows; None if there are none."""
    return replace(weight, max_rows=max_rows) if weight is not None and max_rows else None


def most_rows(by_codes: Product, plain: Product, num_in: int, dtype: torch.dtype) -> int:
    """The most rows for which a product with codes is faster than the plain function; 0 if it is for none."""

    def is_faster(num_rows: int) -> bool:
        hidden = torch.ones(num_rows, num_in, dtype=dtype)
        return least_seconds(lambda: by_codes(hidden)) < least_seconds(lambda: plain(hidden))

    return most_of(ROWS, is_faster)


def most_of(numbers: tuple[int, ...], is_faster: Callable[[int], bool]) -> int:
    """The last of the numbers, in their order, up to which all are faster; 0 if the first is not."""
    found = 0
    for number in numbers:
        if not is_faster(number):
            break
        found = number
    return found


def slower_than_decoding(num_in: int) -> str:
    """Why weights are decoded for which `most_rows` is 0."""
    return f"decoding was faster than products with codes in a short measurement with {num_in} inputs"


def has_fbgemm() -> bool:
    """Do torch's products by FBGEMM run on this CPU? Torch names them on others too, where an illegal instruction ends
    the process.
    """
    return platform.machine().lower() in ("x86_64", "amd64") and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


@cache
def packed_function(name: str) -> Callable[..., Tensor]:
    """A function of torch that takes a weight in an object of torch's own. A plain call takes 24 us longer: a fifth of
    a small product.
    """
    function = getattr(torch.ops.quantized, name).default
    return partial(function.redispatch, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))


def least_seconds(compute: Callable[[], Tensor]) -> float:
    """The least of at least three times, and of more if they are short."""
    best, start, number = float("inf"), time.perf_counter(), 0
    while number < 3 or (number < 20 and time.perf_counter() - start < 0.01):
        begin = time.perf_counter()
        compute()
        best = min(best, time.perf_counter() - begin)
        number += 1
    return best
