"""Which kernel computes each step of a served model: the one place that chooses. Nothing here computes.

    operation  format            device, dtype      rows   kernel
    linear     none              GPU, 16 bits       1      row: norm, product and what follows
               none              CPU, 16 bits       1      vector, where a measurement finds it faster
               none              any                any    matmul
               grouped, float8   GPU, 16 bits       1      token: inputs as integers, if they fit registers
                                                    4      few rows: norm, product and what follows
                                                    64     tiles: product and what follows
               float8            GPU of 2022, bf16  any    float8: torch's product of float8
               quantised         CPU                some   codes: torch's product, up to the rows that were measured
               quantised         any                any    dequantise
    norm       none              GPU, 16 bits       any    kernel
                                 CPU, 32, 64 bits   any    few calls
                                 any                any    module
    gate       none              GPU, 16 bits       any    kernel; otherwise plain
    rotate     none              GPU, 16 bits       any    kernel; otherwise plain
    route      none              GPU, 16 bits       64     kernel; otherwise plain
    experts    grouped, float8   GPU, 16 bits       any    kernel; otherwise plain

The norm is an RMSNorm; other norms are the module's own. Kernels of grouped and float8 weights take inputs in multiples
of 32, and the kernel of one token with float8 needs a GPU that converts it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch

from weft.serve.weights.weight_formats import Grouped, RowFp8, WeightFormat

MAX_KERNEL_ROWS = 64  # of a product by a kernel, which is bound by memory; weights are dequantised for more
MAX_TOKEN_BYTES = 8192  # codes of one output of a product by the kernel for one row, which holds them in registers
KERNEL_INPUTS = 32  # of a group, or of a weight of float8, at least: kernels take no others
FEW_ROWS = 4  # of a product by the kernel for few rows
MAX_PAIRS = 128  # of tokens and experts that one program puts in order
MAX_ROUTED_TOKENS = 64  # that go to experts by the router's kernel, of which each is one program
MAX_ROUTED_EXPERTS = 256
HALF = (torch.float16, torch.bfloat16)

Operation = Literal["linear", "norm", "gate", "rotate", "route", "experts"]
Kernel = Literal[
    "row", "vector", "matmul", "token", "few rows", "tiles", "float8", "codes", "dequantise",
    "kernel", "few calls", "module", "plain",
]  # fmt: skip
Paths = tuple[tuple[float, Kernel], ...]  # the most rows of each kernel, rising; the last takes any number


class Place(NamedTuple):
    """Where a model computes, and the dtype of its hidden states."""

    device: str  # its type
    dtype: torch.dtype
    capability: tuple[int, int] = (0, 0)  # of a GPU
    is_hip: bool = False

    @property
    def has_kernels(self) -> bool:
        return self.device == "cuda" and self.dtype in HALF


NOWHERE = Place("meta", torch.float32)  # has no kernels


@cache
def place_of(device: torch.device, dtype: torch.dtype) -> Place:
    if device.type != "cuda":
        return Place(device.type, dtype)
    return Place("cuda", dtype, torch.cuda.get_device_capability(device), torch.version.hip is not None)


def fast_path(
    operation: Operation,
    place: Place,
    form: WeightFormat | None = None,
    sizes: tuple[int, int] = (0, 0),
    measured_rows: int = 0,
) -> Paths:
    """Return the kernels of an operation. `sizes` are outputs and inputs of a weight, of "experts" the inputs of both
    stacks, of "route" the number of experts twice. `measured_rows` were found faster by a CPU's product of one vector,
    or with codes.
    """
    if operation == "linear":
        return _plain_linear(place, measured_rows) if form is None else _quantised(place, form, sizes, measured_rows)
    if operation == "norm" and not place.has_kernels:
        is_wide = place.device == "cpu" and place.dtype in (torch.float32, torch.float64)
        return ((math.inf, "few calls" if is_wide else "module"),)
    if operation == "experts" and not all(has_kernel(form, size) for size in sizes):
        return ((math.inf, "plain"),)
    if operation == "route" and place.has_kernels and max(sizes) <= MAX_ROUTED_EXPERTS:
        return (MAX_ROUTED_TOKENS, "kernel"), (math.inf, "plain")
    return ((math.inf, "kernel" if place.has_kernels and operation != "route" else "plain"),)


def _plain_linear(place: Place, measured_rows: int) -> Paths:
    if place.has_kernels:
        return (1, "row"), (math.inf, "matmul")
    return ((1, "vector"), (math.inf, "matmul")) if measured_rows else ((math.inf, "matmul"),)


def _quantised(place: Place, form: WeightFormat, sizes: tuple[int, int], measured_rows: int) -> Paths:
    paths, (num_out, num_in) = list[tuple[float, Kernel]](), sizes
    if measured_rows:
        paths.append((measured_rows, "codes"))
    if place.has_kernels and has_kernel(form, num_in):
        can_convert = isinstance(form, Grouped) or place.capability >= (8, 9)
        if can_convert and fits_registers(form.bits if isinstance(form, Grouped) else 8, num_in):
            paths.append((1, "token"))
        paths += [(FEW_ROWS, "few rows"), (MAX_KERNEL_ROWS, "tiles")]
    is_new = place.device == "cuda" and not place.is_hip and place.capability >= (9, 0)
    if isinstance(form, RowFp8) and is_new and place.dtype == torch.bfloat16 and num_out % 16 == 0 == num_in % 16:
        return (*paths, (math.inf, "float8"))
    return (*paths, (math.inf, "dequantise"))


def kernel_of(paths: Paths, rows: int) -> Kernel:
    """Return the kernel for so many rows."""
    for most, kernel in paths:
        if rows <= most:
            return kernel
    raise AssertionError("the last kernel takes any number of rows")


def has_kernel(form: WeightFormat | None, num_in: int) -> bool:
    """Return whether kernels of GPUs take weights of a format with so many inputs."""
    if isinstance(form, Grouped):
        return form.size_of_group(num_in) >= KERNEL_INPUTS
    return isinstance(form, RowFp8) and num_in % KERNEL_INPUTS == 0


def fits_registers(bits: int, num_in: int) -> bool:
    """Return whether the kernel for one row holds the codes of an output."""
    return num_in * bits <= 8 * MAX_TOKEN_BYTES
