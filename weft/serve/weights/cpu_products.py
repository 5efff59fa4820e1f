"""Products on a CPU with quantised weights, by torch's own products, which dequantise no weight; and products of
one row with weights of 16 bits. Inputs are float32, bf16 or fp16, [rows, in]; results have their dtype.

    HalfWeight     fp16               x86 with AVX2     equals float32 but for the order of sums
    RowWeight      int8-row           x86 with AVX2     inputs have two digits of 7 bits
    DynamicWeight  int8, int4         ARM (KleidiAI)    inputs have 8 bits
    GroupWeight    int8, int4         other CPUs        inputs, scales, zero points and results have the bits of bf16

Each equals `WeightFormat.product` of the same weight (`weight_formats.py`) up to that rounding, and a row's result does
not depend on the other rows. That function is faster for many rows: a short measurement says from how many on.
"""

from __future__ import annotations

import math
import platform
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import takewhile
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.serve.weights.group_codes import joined_ranges, pack, split_ranges, unpack
from weft.serve.weights.weight_formats import Grouped, Half, RowInt8, WeightFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs
HALF_DTYPES = (torch.bfloat16, torch.float16)
ROWS = (1, 4, 16, 64, 256)  # that are measured
MEASURED_WEIGHTS = 1 << 20
MEASURED_BYTES = 1 << 23  # of a weight of 16 bits: more than the caches of a core hold

GROUPS = (32, 64, 128, 256)  # inputs of a group that the product takes
OUTPUT_MULTIPLE = 16  # of the outputs of a `GroupWeight`
ROW_BLOCK, ROW_BYTES = 8, 8  # outputs of a `DynamicWeight` side by side; bytes of one beside codes and scales

MIDDLE = 64  # of the bytes that stand for digits of a `RowWeight`: their zero point
BASE = 128  # of the low digit
LEAST_EXPONENT = -100  # of a row's power of two
MAX_INPUTS = 2**31 // (2 * MIDDLE * 128)  # whose sums cannot overflow 32 bits

_ROOMS = threading.local()  # a thread's memory for the digits of a row of a `RowWeight`


@dataclass(frozen=True)
class CpuWeight:
    """A quantised weight [out, in], in the order in which a product takes it."""

    max_rows: int  # more are computed faster by the plain function
    name: ClassVar[str]  # of the product
    tolerance: ClassVar[float] = 0.0  # of the trial's results

    @abstractmethod
    def product(self, hidden: Tensor) -> Tensor:
        """Return hidden [rows, in] @ weight.T."""

    @classmethod
    @abstractmethod
    def arrange(cls, form: Any, parts: Sequence[Tensor], max_rows: int) -> CpuWeight:
        """Arrange a weight that is given as the parts of its format."""

    @staticmethod
    def may_run() -> bool:
        """Return whether it is safe to try the product on this CPU: torch names those of FBGEMM on others than x86 too,
        where an illegal instruction ends the process.
        """
        return (
            platform.machine().lower() in ("x86_64", "amd64") and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
        )

    @staticmethod
    @abstractmethod
    def trial() -> tuple[WeightFormat, Sequence[Tensor], Tensor]:
        """Return a format, the parts of a weight, and rows whose products with it are exact."""

    @staticmethod
    def limit(form: Any, num_in: int) -> str | None:
        """Return why the product takes no weights with so many inputs; None if it does."""
        return None


@dataclass(frozen=True)
class HalfWeight(CpuWeight):
    """A weight in fp16, which torch's product widens in registers. Sums are float32. On ARM, it would round inputs."""

    packed: Any  # torch's own object
    name = "with fp16 weights"

    def product(self, hidden: Tensor) -> Tensor:
        multiply = packed_function("linear_dynamic_fp16")
        if hidden.dtype == torch.float32:
            return multiply(hidden, self.packed)
        return multiply(hidden.float(), self.packed).to(hidden.dtype)

    @classmethod
    def arrange(cls, form: Half, parts: Sequence[Tensor], max_rows: int) -> HalfWeight:
        weight = form.dequantise(parts, torch.float32)
        return cls(max_rows, torch.ops.quantized.linear_prepack_fp16(weight, None))

    @staticmethod
    def trial() -> tuple[WeightFormat, Sequence[Tensor], Tensor]:
        form = Half()
        return form, form.quantise(torch.arange(17.0 * 64).view(17, 64) - 500), torch.eye(64)


@dataclass(frozen=True)
class RowWeight(CpuWeight):
    """A weight of 8 bits with a scale for each output, for torch's product of bytes.

    Each row of inputs is rounded to two digits of 7 bits, by the least power of two above its largest magnitude:

        row = power / 64 * (high + low / 128), rounded          high, low: integers from -64 to 64

    Both digits are rows of one product, so each code is read once. Its sums are exact integers, which are multiplied by
    powers of two and rounded once. A result differs from that with the dequantised weight by less than 2 ** -13 of the
    row's largest magnitude times the sum of the magnitudes of an output's weights. Digits of more than 7 bits would
    overflow on CPUs without VNNI, which add up two products of bytes in 16 bits.
    """

    packed: Any  # torch's own object
    name = "of bytes"

    def product(self, hidden: Tensor) -> Tensor:
        wide = hidden if hidden.dtype == torch.float32 else hidden.float()
        is_row = wide.shape[0] == 1 and not torch.is_grad_enabled()
        out = self._of_row(wide) if is_row else self._of_rows(wide)
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def _of_row(self, row: Tensor) -> Tensor:
        """Return the product of one row, by few calls, of views too: they take as long as reading a small weight."""
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

    @classmethod
    def arrange(cls, form: RowInt8, parts: Sequence[Tensor], max_rows: int) -> RowWeight:
        codes, scale = parts[0].view(torch.int8), parts[1].view(torch.float32)
        with warnings.catch_warnings():  # torch 2.13 says that such tensors will go; what it has instead is slower
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            zeros = torch.zeros(len(codes), dtype=torch.int64)
            weight = torch._make_per_channel_quantized_tensor(codes, scale[:, 0].double(), zeros, 0)
        return cls(max_rows, torch.ops.quantized.linear_prepack(weight, None))

    @staticmethod
    def trial() -> tuple[WeightFormat, Sequence[Tensor], Tensor]:
        codes = (torch.arange(16 * 64).view(16, 64) % 255 - 127).to(torch.int8)
        codes[:2] = torch.tensor([[127], [-127]])  # with rows of equal inputs, the largest sums
        rows = torch.cat([torch.eye(64), torch.ones(2, 64) * torch.tensor([[1.0], [-1.0]])])
        return RowInt8(), (codes.view(torch.uint8), torch.ones(16, 1).view(torch.int32)), rows

    @staticmethod
    def limit(form: RowInt8, num_in: int) -> str | None:
        is_too_long = num_in > MAX_INPUTS
        return (
            f"products of bytes add up at most {MAX_INPUTS} inputs, and a layer has {num_in}" if is_too_long else None
        )


def _room(num_in: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory of this thread for the digits of a row: both [2, in], and each [in]."""
    rooms: dict[int, tuple[Tensor, Tensor, Tensor]] = vars(_ROOMS).setdefault("by_size", {})
    if num_in not in rooms:
        with torch.inference_mode(False):  # what is made in that mode can be changed in it alone
            digits = torch.empty(2, num_in)
            high, low = digits.unbind()
            rooms[num_in] = digits, high, low
    return rooms[num_in]


def _factors(top: float) -> tuple[Tensor, Tensor]:
    """Return what gives the digits [2, 1] of a row with this largest magnitude, and what adds up their products."""
    return _factors_of(math.frexp(top)[1] if math.isfinite(top) else None)


@cache
def _factors_of(exponent: int | None) -> tuple[Tensor, Tensor]:
    """By the exponent of a row's power of two; None: the row is not finite, and neither is its product."""
    power = math.nan if exponent is None else 2.0 ** max(exponent, LEAST_EXPONENT) / MIDDLE
    return torch.tensor([[1 / power], [BASE / power]]), torch.tensor([[power, power / BASE]])


def _product_of_bytes(digits: Tensor, packed: Any) -> Tensor:
    """Return rows of digits times a packed weight."""
    return packed_function("linear_with_input_q_dq_qweight_dq_output_fp32")(digits, 1.0, MIDDLE, packed)


@dataclass(frozen=True)
class FourBitDigits(CpuWeight):
    """A weight in groups of inputs, for products with 4-bit codes: codes of 8 bits are two digits of 4.

    code * scale + zero point = (code - 8) * scale + (zero point + 8 * scale)
    """

    digits: tuple[Any, ...]  # for each 4 bits of codes, what the product takes
    group: int

    @staticmethod
    def trial() -> tuple[WeightFormat, Sequence[Tensor], Tensor]:
        codes, ones = torch.arange(16 * 64).view(16, 64) % 16, torch.ones(16, 2, dtype=torch.float16)
        return Grouped(4, 32), (pack(codes.to(torch.uint8), 4, 32), joined_ranges(ones, ones)), torch.eye(64)

    @staticmethod
    def limit(form: Grouped, num_in: int) -> str | None:
        group = form.size_of_group(num_in)
        if group in GROUPS:
            return None
        return f"products with codes take groups of 32, 64 or 128 inputs, and a layer of {num_in} inputs has {group}"


def _digits_of(form: Grouped, parts: Sequence[Tensor]) -> tuple[int, list[tuple[Tensor, Tensor]], Tensor]:
    """Return the group's size, the codes and scales of each digit, and what a group's middle code stands for."""
    scale, zero_point = (one.float() for one in split_ranges(parts[1]))
    group = len(parts[0][0]) * 8 // form.bits // scale.shape[1]
    codes = unpack(parts[0], form.bits, group)
    if form.bits == 4:
        return group, [(codes, scale)], zero_point + 8 * scale
    return group, [(codes >> 4, 16 * scale), (codes & 15, scale)], zero_point + (8 * 16 + 8) * scale


@dataclass(frozen=True)
class GroupWeight(FourBitDigits):
    """The digits with their ranges, for torch's product in bf16. Sums are float32."""

    num_out: int
    name = "with 4-bit codes"

    def product(self, hidden: Tensor) -> Tensor:
        given = hidden.to(torch.bfloat16)
        (codes, ranges), *lower = self.digits
        out = torch._weight_int4pack_mm_for_cpu(given, codes, self.group, ranges)
        if lower:
            out = out.float()
            for codes, ranges in lower:
                out += torch._weight_int4pack_mm_for_cpu(given, codes, self.group, ranges)
        return (out if out.shape[1] == self.num_out else out[:, : self.num_out]).to(hidden.dtype)

    @classmethod
    def arrange(cls, form: Grouped, parts: Sequence[Tensor], max_rows: int) -> GroupWeight:
        """Outputs are filled up to a multiple of 16."""
        (group, digits, middle), num_out = _digits_of(form, parts), len(parts[0])
        padding, found = (0, 0, 0, -num_out % OUTPUT_MULTIPLE), []
        for index, (codes, scale) in enumerate(digits):
            ranges = torch.stack([scale, torch.zeros_like(scale) if index else middle], dim=-1)
            ranges = F.pad(ranges, (0, 0, *padding)).transpose(0, 1)  # [groups, out, 2]
            codes = torch._convert_weight_to_int4pack_for_cpu(F.pad(codes, padding).int(), 1)
            found.append((codes, ranges.to(torch.bfloat16).contiguous()))
        return cls(max_rows, tuple(found), group, num_out)

    @staticmethod
    def may_run() -> bool:
        return True

    @staticmethod
    def num_bytes(num_out: int, num_in: int, group: int, bits: int) -> int:
        """Return the bytes of a weight: 4 bits for each number and two of 16 bits for each group, for each digit."""
        rows = num_out + -num_out % OUTPUT_MULTIPLE
        return bits // 4 * rows * (num_in // 2 + 4 * num_in // group)


@dataclass(frozen=True)
class DynamicWeight(FourBitDigits):
    """The digits with their scales, for torch's product of bytes and 4-bit codes. It rounds each row of inputs to 8
    bits between its least and largest number (dynamic quantisation). Scales of several groups are rounded to bf16. What
    the middle codes stand for [groups, out] is multiplied in float32 with the sums of each group's inputs.
    """

    middles: Tensor
    name = "with 4-bit codes"
    tolerance = 1e-3

    def product(self, hidden: Tensor) -> Tensor:
        given, num_in, num_out = hidden.float(), hidden.shape[1], self.middles.shape[1]
        first, *lower = self.digits
        out = torch._dyn_quant_matmul_4bit(given, first, self.group, num_in, num_out)
        for digits in lower:
            out += torch._dyn_quant_matmul_4bit(given, digits, self.group, num_in, num_out)
        return out.addmm_(given.unflatten(1, (-1, self.group)).sum(2), self.middles).to(hidden.dtype)

    @classmethod
    def arrange(cls, form: Grouped, parts: Sequence[Tensor], max_rows: int) -> DynamicWeight:
        (group, digits, middle), found = _digits_of(form, parts), []
        for codes, scale in digits:
            num_out, num_in = codes.shape
            pairs = codes[:, ::2] | (codes[:, 1::2] << 4)  # the first of two neighbours lies in the low half of a byte
            scale = scale if group == num_in else scale.to(torch.bfloat16)  # torch has another product for one group
            found.append(torch._dyn_quant_pack_4bit_weight(pairs, scale, None, group, num_in, num_out))
        return cls(max_rows, tuple(found), group, middle.T.contiguous())

    @staticmethod
    def may_run() -> bool:
        kleidi = getattr(torch.backends, "kleidiai", None)
        return platform.machine().lower() in ("aarch64", "arm64") and kleidi is not None and kleidi.is_available()

    @staticmethod
    def num_bytes(num_out: int, num_in: int, group: int, bits: int) -> int:
        """Return the bytes of a weight."""
        groups, rows = num_in // group, num_out + -num_out % ROW_BLOCK
        scales = 4 if groups == 1 else 2 * groups
        return bits // 4 * rows * (num_in // 2 + scales + ROW_BYTES) + 4 * num_out * groups


# The products for each format. The first that this CPU has is used.
PRODUCTS: dict[type, tuple[type[CpuWeight], ...]] = {
    Half: (HalfWeight,),
    RowInt8: (RowWeight,),
    Grouped: (DynamicWeight, GroupWeight),
}


def arranged(form: WeightFormat, parts: Sequence[Tensor], dtype: torch.dtype) -> CpuWeight | None:
    """Return the weight for inputs of a dtype; None if it is dequantised for each product (`why_dequantised`)."""
    num_in = parts[0].shape[1] * 8 // getattr(form, "bits", 8)
    kind = product_of(form)
    if kind is None or why_dequantised(form, num_in, dtype) is not None:
        return None
    return kind.arrange(form, parts, measured_rows(form, num_in, dtype, torch.get_num_threads()))


def why_dequantised(form: WeightFormat, num_in: int, dtype: torch.dtype) -> str | None:
    """Return why this CPU dequantises a weight for products of one row with inputs of a dtype; None if it does not."""
    kinds = PRODUCTS.get(type(form), ())
    if not kinds:
        return "products with codes are for fp16, int8-row, int8 and int4"
    if dtype not in DTYPES:
        return f"products with codes take no inputs in {dtype}"
    if (reason := kinds[0].limit(form, num_in)) is not None:
        return reason
    if product_of(form) is None:
        return f"this torch has no products {kinds[0].name} for this CPU"
    if not measured_rows(form, num_in, dtype, torch.get_num_threads()):
        return f"dequantising was faster than products with codes in a short measurement with {num_in} inputs"
    return None


def limited(weight: CpuWeight | None, max_rows: int) -> CpuWeight | None:
    """Return the weight for products of at most so many rows; None if there are none."""
    return replace(weight, max_rows=max_rows) if weight is not None and max_rows else None


def product_of(form: WeightFormat) -> type[CpuWeight] | None:
    """Return this CPU's product for a format; None if it has none."""
    kinds = PRODUCTS.get(type(form), ())
    return next((kind for kind in kinds if has_product(kind)), None)  # type: ignore[arg-type]


@cache
@torch.inference_mode()
def has_product(kind: type[Any]) -> bool:
    """Return whether this torch has a product that gives what it should on this CPU."""
    if not kind.may_run():
        return False
    form, parts, rows = kind.trial()
    try:
        weight = kind.arrange(form, parts, 1)
        found = torch.cat([weight.product(rows), weight.product(rows[-1:])])
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = torch.cat([rows, rows[-1:]]) @ form.dequantise(parts, torch.float32).T
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=kind.tolerance)


@cache
@torch.inference_mode()
def measured_rows(form: WeightFormat, num_in: int, dtype: torch.dtype, threads: int) -> int:
    """Return the most rows for which a product with codes is faster than the plain function; 0 if it is for none.

    It is measured once, with a million weights. `threads` are those in use.
    """
    weight = torch.randn(max(16, MEASURED_WEIGHTS // num_in), num_in, generator=torch.Generator().manual_seed(0))
    parts, kind = form.quantise(weight), product_of(form)
    assert kind is not None
    own = kind.arrange(form, parts, 1)

    def is_faster(num_rows: int) -> bool:
        hidden = torch.ones(num_rows, num_in, dtype=dtype)
        by_codes = least_seconds(lambda: own.product(hidden))
        return by_codes < least_seconds(lambda: F.linear(hidden, form.dequantise(parts, dtype)))

    return max(takewhile(is_faster, ROWS), default=0)


def least_seconds(compute: Callable[[], Tensor]) -> float:
    """Return the least of at least three times, and of more if they are short."""
    best, start, number = float("inf"), time.perf_counter(), 0
    while number < 3 or (number < 20 and time.perf_counter() - start < 0.01):
        begin = time.perf_counter()
        compute()
        best = min(best, time.perf_counter() - begin)
        number += 1
    return best


@cache
def packed_function(name: str) -> Callable[..., Tensor]:
    """Return a function of torch that takes a packed weight. A plain call takes 24 us longer than this."""
    function = getattr(torch.ops.quantized, name).default
    return partial(function.redispatch, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))


def takes_vectors(layer: nn.Linear) -> bool:
    """Return whether one row is multiplied faster as a vector with the linear's weight of 16 bits.

    On some CPUs torch's product of matrices reads such weights at half the rate. Both add up in float32 and round once.
    """
    return is_faster(layer.weight.shape[1], layer.weight.dtype, torch.get_num_threads())


@cache
@torch.inference_mode()
def is_faster(num_in: int, dtype: torch.dtype, threads: int) -> bool:
    """Return whether a product with a vector is faster than one with a matrix of one row. `threads` are in use."""
    weight = torch.ones(max(16, MEASURED_BYTES // dtype.itemsize // num_in), num_in, dtype=dtype)
    row = torch.ones(1, num_in, dtype=dtype)
    return least_seconds(lambda: torch.mv(weight, row[0])[None]) < least_seconds(lambda: F.linear(row, weight))
