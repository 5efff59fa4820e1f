"""Measures products of some rows with weights in fewer bits on a CPU: with codes, and with the decoded weight.

    python benchmarks/cpu_products.py [--threads 1] [--out benchmarks/results/cpu-products.json]

Shapes are those of a Llama of 200M (`serve_cpu.py`). Products go over as many copies of a weight as no cache holds, and
a time is the least of three rounds. Next to it is torch's product with the float32 weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.serve.weights.cpu_products import CpuWeight, arranged, why_dequantised
from weft.serve.weights.weight_formats import weight_format

SHAPES = ((1024, 1536), (1024, 5632), (2816, 1024), (1024, 32000))  # inputs, outputs
FORMATS = ("fp16", "int8-row", "int8", "int4")
ROWS = (1, 2, 4, 8, 16, 64, 256)
COLD_BYTES = 100e6
FEW_ROWS = 16  # with more, products are not bound by memory, and one copy is enough


def milliseconds(computes: Sequence[Callable[[], Tensor]]) -> float:
    """Of one product; each goes to another copy of a weight."""
    computes[0]()
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for compute in computes:
            compute()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best / len(computes)


def arrange(name: str, parts: Sequence[Tensor]) -> CpuWeight:
    """A weight for products with codes."""
    found = arranged(weight_format(name), parts, torch.float32)
    if found is None:
        raise SystemExit(f"{name}: {why_dequantised(weight_format(name), parts[0].shape[1], torch.float32)}")
    return found


def times(num_in: int, num_out: int, num_rows: int) -> dict[str, float]:
    """Milliseconds of each way."""
    weight, hidden = torch.randn(num_out, num_in) / num_in**0.5, torch.randn(num_rows, num_in)

    def number(num_bytes: float) -> int:
        return max(2, int(COLD_BYTES / num_bytes)) if num_rows < FEW_ROWS else 1

    copies = [weight.clone() for _ in range(number(4 * weight.numel()))]
    found = {"float32": milliseconds([lambda one=one: F.linear(hidden, one) for one in copies])}  # type: ignore[misc]
    for name in FORMATS:
        form = weight_format(name)
        parts = form.quantise(weight)
        codes = [arrange(name, parts) for _ in range(number(parts[0].numel()))]
        found[name] = milliseconds([lambda one=one: one.product(hidden) for one in codes])  # type: ignore[misc]
        decoded = [lambda form=form, parts=parts: form.product(hidden, parts)]  # type: ignore[misc]
        found[f"{name} decoded"] = milliseconds(decoded)
    return found


def main() -> None:
    parser = harness.options(__doc__, "cpu-products.json")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    capability = torch.backends.cpu.get_cpu_capability()
    result: dict[str, Any] = {"capability": capability, "threads": given.threads}
    for num_in, num_out in SHAPES:
        for num_rows in ROWS:
            name = f"{num_rows} x {num_in} @ {num_in} x {num_out}"
            result[name] = times(num_in, num_out, num_rows)
            print(name, {way: round(one, 2) for way, one in result[name].items()}, flush=True)
    for name in FORMATS:
        form, sizes = weight_format(name), sorted({num_in for num_in, _ in SHAPES})
        chosen = {size: arrange(name, form.quantise(torch.ones(16, size))).max_rows for size in sizes}
        result[f"most rows with codes, {name}"] = chosen
        print(f"most rows with codes, {name}", chosen)
    harness.write(given.out, result, device="cpu")


if __name__ == "__main__":
    main()
