"""Decodes of one request on a CPU, by C functions that are compiled when first needed: products with weights in bf16,
int8 and int4, and attention over pages.

torch's own products of bf16 are slow on CPUs without instructions for it, and codes would be decoded for each product.
`cpu_products.c` reads weights as they are. Sums are in float32, as torch's are. If the machine has no C compiler, a
warning says so once, and torch computes. Threads are torch's number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("cpu_products.c")
COMPILERS = ("cc", "gcc", "clang")
# Each is tried if the one before fails: a compiler may not know vectors of 512 bits, this CPU, or OpenMP.
FLAGS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native",),
    (),
)


def bf16_row_product(hidden: Tensor, weight: Tensor) -> Tensor | None:
    """hidden [1, in] @ weight.T of bf16, or None if torch is to compute it."""
    is_bf16 = weight.dtype == torch.bfloat16
    functions = _functions() if is_bf16 and _is_for_functions(hidden, weight) else None
    if functions is None:
        return None
    row, out = hidden.float(), torch.empty(1, len(weight))
    sizes = (ctypes.c_long(len(weight)), ctypes.c_long(weight.shape[1]), torch.get_num_threads())
    functions.weft_bf16_product(_place(weight), _place(row), _place(out), *sizes)
    return out.to(hidden.dtype)


def group_row_product(
    hidden: Tensor, codes: Tensor, ranges: Tensor, block: tuple[int, int, int]
) -> Tensor | None:  # fmt: skip
    """hidden [1, in] @ weight.T of codes in groups, or None if torch is to compute it.

    `block`: bits, inputs of a block and groups of a block (`weight_formats.py`).
    """
    bits, size, groups = block
    functions = _functions() if _is_for_functions(hidden, codes) and size % 32 == 0 else None
    if functions is None:
        return None
    row, out = hidden.float(), torch.empty(1, len(codes))
    sums = row.view(-1, size // 2 if bits == 4 else size).sum(1)
    tensors = [_place(one) for one in (codes, ranges, row, sums, out)]
    sizes = [ctypes.c_long(number) for number in (len(codes), hidden.shape[1], size)]
    if bits == 4:
        functions.weft_int4_product(*tensors, *sizes, groups, torch.get_num_threads())
    else:
        functions.weft_int8_product(*tensors, *sizes, torch.get_num_threads())
    return out.to(hidden.dtype)


def cpu_decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, block_size: int, window: int | None
) -> Tensor | None:
    """`paged_attention.decode_attention` of one request in bf16, or None if torch is to compute it. Pages are read in
    place.
    """
    is_one = len(query) == 1 and query.device.type == "cpu" and query.shape[-1] % 16 == 0
    is_for_functions = is_one and query.dtype == keys.dtype == torch.bfloat16
    functions = _functions() if is_for_functions and keys.is_contiguous() and values.is_contiguous() else None
    if functions is None:
        return None
    (_, num_heads, head_dim), num_key_heads, length = query.shape, keys.shape[1], int(lengths[0])
    begin = 0 if window is None else max(0, length - window)
    places = torch.arange(begin, length, dtype=torch.int32)
    slots = tables[0].to(torch.int32)[places // block_size] * block_size + places % block_size
    given, out = query.float().contiguous(), torch.empty(1, num_heads, head_dim)
    room = torch.empty(num_heads, length - begin)
    tensors = [_place(one) for one in (given, keys, values, slots, room, out)]
    sizes = [ctypes.c_long(number) for number in (length - begin, num_heads, num_key_heads, head_dim)]
    scale = ctypes.c_float(head_dim**-0.5)
    functions.weft_bf16_attention(*tensors, *sizes, scale, torch.get_num_threads())
    return out.to(query.dtype)


def _is_for_functions(hidden: Tensor, weight: Tensor) -> bool:
    """Is this one row, on a CPU, of numbers that float32 holds, and does the weight lie end to end?"""
    is_row = hidden.dim() == 2 and len(hidden) == 1 and hidden.device.type == "cpu"
    return is_row and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32) and weight.is_contiguous()


def _place(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _functions() -> ctypes.CDLL | None:
    """The compiled functions; None, after a warning, if they cannot be compiled."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    said = f"there is no C compiler ({', '.join(COMPILERS)})"
    if compiler is not None:
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            built = Path(folder) / "products.so"
            for flags in FLAGS:
                command = [
                    compiler,
                    "-O3",
                    "-ffast-math",
                    "-shared",
                    "-fPIC",
                    *flags,
                    str(SOURCE),
                    "-o",
                    str(built),
                    "-lm",
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    return ctypes.CDLL(str(built))
            said = f"{compiler} failed ({(done.stderr.strip().splitlines() or ['without a word'])[-1][:200]})"
    warnings.warn(
        f"{said}, so torch computes products on this CPU, which is slower for weights in bf16, int8 and int4; install "
        f"a C compiler, or serve in float32",
        stacklevel=2,
    )
    return None


def fastest_threads(most: int, seconds_of: Callable[[int], float] | None = None) -> int:
    """The number of threads with which a product takes least time: a power of two, or `most`. More must gain 5 %."""
    if most == 1:
        return 1
    numbers = [number for number in (2**power for power in range(most.bit_length())) if number < most] + [most]
    seconds = {number: (seconds_of or _seconds_of_product)(number) for number in numbers}
    best = 1
    for number in numbers:
        best = number if seconds[number] < 0.95 * seconds[best] else best
    return best


def _seconds_of_product(threads: int) -> float:
    """The least of some times of a product with a weight of 32 MB."""
    before = torch.get_num_threads()
    weight, row = torch.zeros(4096, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bfloat16)
    torch.set_num_threads(threads)
    try:
        best = float("inf")
        for _ in range(8):
            begin = time.perf_counter()
            if bf16_row_product(row, weight) is None:
                torch.nn.functional.linear(row, weight)
            best = min(best, time.perf_counter() - begin)
        return best
    finally:
        torch.set_num_threads(before)
