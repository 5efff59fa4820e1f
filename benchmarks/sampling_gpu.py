"""Measures draws with top_p, top_k and min_p on one GPU: by the kernel, and by sorting the vocabulary.

    python benchmarks/sampling_gpu.py              logits in bf16 of 128,256 tokens; a minute on an H200

The kernel's draws are compared with those by sorting, for the same noise. Times are medians of calls that the host
waits for. Writes benchmarks/results/sampling-gpu.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from torch import Tensor

from weft.serve.head import sampling
from weft.serve.head.sampling import filtered_draw, filtered_draw_by_sorting
from weft.serve.head.sampling_kernel import draw_by_kernel
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.scheduling.scheduler import ActiveRequest

NUM_TOKENS, REQUESTS = 128256, (1, 16, 64, 256)
SETTINGS = {
    "top_p 0.9": Sampling(temperature=0.7, top_p=0.9),
    "top_k 50": Sampling(temperature=0.7, top_k=50),
    "top_k 50, top_p 0.9, min_p 0.05": Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.05),
    "min_p 0.05": Sampling(temperature=1.0, min_p=0.05),
}


def seconds_of(call: Callable[[], Any]) -> float:
    call()
    return harness.call_seconds(call, torch.device("cuda"))


def measured(logits: Tensor, settings: sampling.SamplingRows, positions: Tensor) -> dict[str, float]:
    """Draws that differ, and seconds of each way."""
    by_kernel = partial(filtered_draw, logits, settings, positions)
    free = partial(draw_by_kernel, logits, settings.temperature, settings.keys, positions)

    def by_sorting() -> Tensor:
        return filtered_draw_by_sorting(logits.float(), settings, positions)

    return {
        "differ": int((by_kernel() != by_sorting()).sum()),
        "kernel_seconds": seconds_of(by_kernel),
        "sorting_seconds": seconds_of(by_sorting),
        "without_filters_seconds": seconds_of(free),
    }


@torch.inference_mode()
def main() -> None:
    given = harness.options(__doc__, "sampling-gpu.json").parse_args()
    device, rows = torch.device("cuda"), []
    torch.manual_seed(0)
    for number in REQUESTS:
        logits = (torch.randn(number, NUM_TOKENS, device=device) * 3).bfloat16()
        positions = torch.arange(number, device=device)
        for name, wanted in SETTINGS.items():
            members = [ActiveRequest(Request(str(i), (1,), 9, wanted), i, 99, i, [1], row=i) for i in range(number)]
            settings = sampling._settings_of(members, NUM_TOKENS, device)
            rows.append({"requests": number, "filters": name, **measured(logits, settings, positions)})
            print(rows[-1], flush=True)
    harness.write(given.out, {"tokens": NUM_TOKENS, "rows": rows}, device=device)


if __name__ == "__main__":
    main()
