"""What kernels of experts take that frameworks build from torch's own operations: measured, for the planner.

    python benchmarks/expert_kernels.py

Matmuls of gradients that add their result up in fp32, beside those that write bf16; and the operations with which rows
are sent to experts and summed again where nothing is fused, beside a copy of the rows. The weights of four experts are
multiplied in turn. Writes benchmarks/results/expert-kernels-h200.json. One run on one machine, which is named in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

RESULT = Path(__file__).parent / "results" / "expert-kernels-h200.json"
NUM_EXPERTS, WARM_CALLS, NUM_CALLS = 4, 5, 30
DEPTHS, WEIGHTS = (256, 512, 1024, 2048, 4096), ((6144, 4096), (2048, 6144), (3584, 5120), (6144, 32768))
ROWS = ((1024, 8, 6144), (2048, 2, 6144), (2048, 8, 3584))  # tokens, experts of a token, hidden size


def microseconds(call: Callable[[], object]) -> float:
    """Mean device time of a call."""
    for _ in range(WARM_CALLS):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / NUM_CALLS * 1e3


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def matmuls(depth: int, inputs: int, outputs: int) -> dict[str, float]:
    """TFLOP/s of forward, of the weight's gradient in bf16, and of one that is added up in fp32."""
    rows, gradients = ([normal(depth, size) for _ in range(NUM_EXPERTS)] for size in (inputs, outputs))
    weights = [normal(inputs, outputs) for _ in range(NUM_EXPERTS)]
    sums = [torch.zeros(inputs, outputs, device="cuda") for _ in range(NUM_EXPERTS)]
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: [a @ w for a, w in zip(rows, weights, strict=True)],
        "gradient": lambda: [a.t() @ g for a, g in zip(rows, gradients, strict=True)],
        "added": lambda: [
            torch.addmm(c, a.t(), g, out_dtype=torch.float32, out=c)  # type: ignore[call-overload]
            for a, g, c in zip(rows, gradients, sums, strict=True)
        ],
    }
    flops = 2 * NUM_EXPERTS * depth * inputs * outputs
    return {name: round(flops / 1e6 / microseconds(call)) for name, call in calls.items()}


def row_operations(tokens: int, chosen: int, hidden: int) -> dict[str, float]:
    """Microseconds of the operations around experts."""
    given, rows, weights = normal(tokens, hidden), normal(tokens * chosen, hidden), normal(tokens * chosen)
    index = torch.randint(tokens, (tokens * chosen,), device="cuda")
    wide = index[:, None].expand(-1, hidden)
    calls: dict[str, Callable[[], object]] = {
        "index_select": lambda: given.index_select(0, index),
        "index_add": lambda: torch.zeros_like(given).index_add_(0, index, rows),
        "mul": lambda: rows * weights[:, None],
        "scatter_add": lambda: torch.zeros_like(given).scatter_add_(0, wide, rows),
        "gather": lambda: given.gather(0, wide),
        "pgrad": lambda: (rows * rows).sum(1),
        "cat": lambda: torch.cat(rows.split(len(rows) // 64)[::-1]),
        "copy": lambda: rows.clone(),
    }
    return {name: round(microseconds(call), 1) for name, call in calls.items()}


def main() -> None:
    """The command."""
    found = {
        "device": torch.cuda.get_device_name(),
        "tflops": [{"rows": depth, "weight": shape, **matmuls(depth, *shape)} for depth in DEPTHS for shape in WEIGHTS],
        "microseconds": [
            {"tokens": one[0], "chosen": one[1], "hidden": one[2], **row_operations(*one)} for one in ROWS
        ],
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
