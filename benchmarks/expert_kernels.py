"""What kernels of experts take that frameworks build from torch's own operations: measured, for the planner.

    python benchmarks/expert_kernels.py

Matmuls of gradients that add their result up in fp32, beside those that write bf16; and the operations with which rows
are sent to experts and summed again where nothing is fused, beside a copy of the rows. The weights of four experts are
multiplied in turn. And torch's grouped matmul of few rows for each expert, as decodes have them, which reads other
experts in each call, so that no cache has them; in CUDA graphs. Writes benchmarks/results/expert-kernels-h200.json.
One run on one machine, which is named in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import harness
import torch

NUM_EXPERTS, WARM_CALLS, NUM_CALLS = 4, 5, 30
DEPTHS, WEIGHTS = (256, 512, 1024, 2048, 4096), ((6144, 4096), (2048, 6144), (3584, 5120), (6144, 32768))
FEW_WEIGHTS = ((4096, 28672), (14336, 4096), (2048, 2816), (1408, 2048), (4096, 4096), (2048, 8192), (7168, 4096),
               (2048, 1536), (768, 2048), (1536, 5120), (5120, 3072), (4096, 1024))  # fmt: skip
FEW_USED, FEW_ROWS, STACK, READ_BYTES = (1, 2, 4, 6, 8, 16, 32, 51, 64), (1, 2, 4), 64, 1.5e9
ROWS = ((1024, 8, 6144), (2048, 2, 6144), (2048, 8, 3584))  # tokens, experts of a token, hidden size


def microseconds(call: Callable[[], object], num_calls: int = NUM_CALLS) -> float:
    """Mean device time of a call."""
    return 1e6 * harness.gpu_seconds(call, num_calls, WARM_CALLS)


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


def grouped_microseconds(weights: torch.Tensor, used: int, rows: int) -> float:
    """Mean device time of grouped matmuls with `used` of the experts, each with so many rows."""
    number, outputs, inputs = weights.shape
    num_calls = max(6, min(40, int(READ_BYTES / (used * 2 * inputs * outputs))))
    given, every, calls = normal(used * rows, inputs), number // used, list[torch.Tensor]()
    for index in range(num_calls):
        counts = torch.zeros(number, dtype=torch.int32, device="cuda")
        counts[(index * used + every * torch.arange(used)) % number] = rows
        calls.append(counts.cumsum(0).to(torch.int32))
    multiply = partial(torch._grouped_mm, given, weights.transpose(1, 2))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        multiply(offs=calls[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for ends in calls:
            multiply(offs=ends)
    return microseconds(graph.replay, num_calls=5) / num_calls


def few_rows(inputs: int, outputs: int) -> list[dict[str, float]]:
    """Microseconds of grouped matmuls, and terabytes of weights a second."""
    weights, found = normal(STACK, outputs, inputs), []
    for used, rows in product(FEW_USED, FEW_ROWS):
        taken = grouped_microseconds(weights, used, rows)
        read = used * 2 * inputs * outputs / 1e6 / taken
        found.append({"inputs": inputs, "outputs": outputs, "used": used, "rows": rows})
        found[-1] |= {"microseconds": round(taken, 1), "terabytes_per_second": round(read, 2)}
    return found


def main() -> None:
    """The command."""
    given = harness.options(__doc__, "expert-kernels-h200.json").parse_args()
    found = {
        "tflops": [{"rows": depth, "weight": shape, **matmuls(depth, *shape)} for depth in DEPTHS for shape in WEIGHTS],
        "microseconds": [
            {"tokens": one[0], "chosen": one[1], "hidden": one[2], **row_operations(*one)} for one in ROWS
        ],
        "few_rows": [one for shape in FEW_WEIGHTS for one in few_rows(*shape)],
    }
    harness.write(given.out, found, device="cuda")


if __name__ == "__main__":
    main()
