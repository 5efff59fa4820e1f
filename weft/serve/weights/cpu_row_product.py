"""Products with weights of 8 bits and a scale for each row of outputs on a CPU, by torch's product of bytes.

Each row of inputs is rounded to two digits of 7 bits, by the least power of two above its largest magnitude:

    row = power / 64 * (high + low / 128), rounded          high, low: integers from -64 to 64

Both digits are rows of one product, so each code is read once, and the sums of a product are exact integers. So is what
follows but for one rounding, because it multiplies by powers of two. So a row's result does not depend on the other
rows, to the bit. It differs from that with the decoded weight by less than 2 ** -13 of the row's largest magnitude
times the sum of the magnitudes of an output's weights. Digits have 7 bits because CPUs without VNNI add up two
products of bytes in 16 bits, which more would overflow.
"""

from __future__ import annotations

import math
import threading
import warnings
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

MIDDLE = 64  # of the bytes that stand for digits: the zero point
BASE = 128  # of the low digit
LEAST_EXPONENT = -100  # of a row's power of two
MAX_INPUTS = 2**31 // (2 * MIDDLE * 128)  # whose sums cannot overflow 32 bits


class DigitRooms(threading.local):
    """Memory for the digits of one row, by the number of inputs: a thread's own."""

    def __init__(self) -> None:
        self.by_size: dict[int, tuple[Tensor, Tensor, Tensor]] = {}


_rooms = DigitRooms()


@dataclass(frozen=True)
class RowWeight:
    """A weight [out, in] as torch's product takes it."""

    packed: Any  # torch's own object
    max_rows: int  # more are computed faster by the plain function

    def product(self, hidden: Tensor) -> Tensor:
        """hidden [rows, in] @ weight.T."""
        wide = hidden if hidden.dtype == torch.float32 else hidden.float()
        is_row = wide.shape[0] == 1 and not torch.is_grad_enabled()
        out = self._of_row(wide) if is_row else self._of_rows(wide)
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def _of_row(self, row: Tensor) -> Tensor:
        """The product of one row, by few calls, of views too: they take as long as reading a small weight."""
        digits_of, sum_of = _factors(float(row.abs().max()))
        digits, high, low = _room(row.shape[1])
        torch.mul(row, digits_of, out=digits)
        high.round_()
        low.sub_(high, alpha=BASE)
        return torch.mm(sum_of, _product_of_bytes(digits, self.packed))

    def _of_rows(self, rows: Tensor) -> Tensor:
        top = rows.abs().amax(1, keepdim=True)
        exponent = torch.frexp(top).exponent.clamp(min=LEAST_EXPONENT) - MIDDLE.bit_length() + 1
        power = torch.ldexp(torch.ones_like(top), exponent) + 0 * top  # NaN if a row is not finite
        scaled = rows / power
        high = scaled.round()
        digits = torch.cat([high, (scaled - high) * BASE])
        high, low = _product_of_bytes(digits, self.packed).chunk(2)
        return torch.add(high, low, alpha=1 / BASE) * power


def _room(num_in: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of this thread for the digits of a row: both [2, in], and each [in]."""
    rooms = _rooms.by_size
    if num_in not in rooms:
        with torch.inference_mode(False):  # what is made in that mode can be changed in it alone
            digits = torch.empty(2, num_in)
            high, low = digits.unbind()
            rooms[num_in] = digits, high, low
    return rooms[num_in]


def _factors(top: float) -> tuple[Tensor, Tensor]:
    """For a row with this largest magnitude: what gives its digits [2, 1], and what adds up their products [1, 2]."""
    return _factors_of(math.frexp(top)[1] if math.isfinite(top) else None)


@cache
def _factors_of(exponent: int | None) -> tuple[Tensor, Tensor]:
    """By the exponent of a row's power of two; None: the row is not finite, and so is its product."""
    power = math.nan if exponent is None else 2.0 ** max(exponent, LEAST_EXPONENT) / MIDDLE
    return torch.tensor([[1 / power], [BASE / power]]), torch.tensor([[power, power / BASE]])


def row_weight(codes: Tensor, scale: Tensor, max_rows: int) -> RowWeight:
    """The weight codes (int8) [out, in] * scale [out, 1]."""
    with warnings.catch_warnings():  # torch 2.13 says that such tensors will go; what it has instead is slower
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        zeros = torch.zeros(len(codes), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(codes, scale[:, 0].double(), zeros, 0)
    return RowWeight(torch.ops.quantized.linear_prepack(weight, None), max_rows)


def _product_of_bytes(digits: Tensor, packed: Any) -> Tensor:
    """Rows of digits times a packed weight."""
    return packed_function("linear_with_input_q_dq_qweight_dq_output_fp32")(digits, 1.0, MIDDLE, packed)


def arranged(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> RowWeight | None:
    """The weight for inputs of a dtype; None if it is decoded for each product (`refusal`)."""
    num_in = codes.shape[1]
    if refusal(num_in, dtype) is not None:
        return None
    return row_weight(codes, scale, measured_rows(num_in, dtype, torch.get_num_threads()))


def refusal(num_in: int, dtype: torch.dtype) -> str | None:
    """Why weights with so many inputs are decoded for products of one row; None if they are not."""
    if dtype not in DTYPES:
        return f"products with codes take no inputs in {dtype}"
    if num_in > MAX_INPUTS:
        return f"products of bytes add up at most {MAX_INPUTS} inputs, and a layer has {num_in}"
    if not has_product():
        return "this torch has no products of bytes for this CPU"
    if not measured_rows(num_in, dtype, torch.get_num_threads()):
        return slower_than_decoding(num_in)
    return None


@cache
@torch.inference_mode()
def has_product() -> bool:
    """Has this torch the product, and does it give what it should on this CPU?"""
    if not has_fbgemm():
        return False
    codes = (torch.arange(16 * 64).view(16, 64) % 255 - 127).to(torch.int8)
    codes[:2] = torch.tensor([[127], [-127]])  # with rows of equal inputs, the largest sums
    rows = torch.cat([torch.eye(64), torch.ones(2, 64) * torch.tensor([[1.0], [-1.0]])])
    try:
        weight = row_weight(codes, torch.ones(16, 1), 1)
        found = torch.cat([weight.product(rows), weight.product(rows[-1:])])
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(found, torch.cat([rows, rows[-1:]]) @ codes.float().T)


@cache
@torch.inference_mode()
def measured_rows(num_in: int, dtype: torch.dtype, threads: int) -> int:
    """The most rows for which a product with codes is faster than the plain function; 0 if it is for none.

    It is measured once, with as many outputs as make a million weights. `threads` are those in use.
    """
    num_out = max(16, MEASURED_WEIGHTS // num_in)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, generator=generator)
    scale = torch.ones(num_out, 1)
    weight = row_weight(codes, scale, 1)
    return most_rows(weight.product, lambda hidden: F.linear(hidden, codes.to(dtype) * scale.to(dtype)), num_in, dtype)
