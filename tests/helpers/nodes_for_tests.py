"""Collectives on simulated nodes: payloads that say whose they are, every operation against them, and what was told."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.comm import Axis, all_gather, all_reduce, all_to_all, reduce_scatter
from weft.proof.prove import ProofReport

WIDE = [torch.float64, torch.float32, torch.int64, torch.int32]  # hold rank · 10⁴ + place exactly, and sums of it
SMALL = [torch.bfloat16, torch.float16, torch.uint8, torch.int8]  # hold small whole numbers exactly


def payload(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers that say whose element it is and where it stands, as far as sums of the dtype are exact."""
    places = torch.arange(size)
    return (rank * 10_000 + places if dtype in WIDE else (5 * rank + 3 * places) % 7).to(dtype)


def wrong_results(axis: Axis, payloads: Iterable[tuple[int, torch.dtype]]) -> list[str]:
    """The operations whose result differs in any bit from what the payloads say."""
    wrong, degree, index = [], axis.degree, axis.index
    for size, dtype in payloads:
        wholes = [payload(size * degree, rank, dtype) for rank in range(degree)]
        parts = [payload(size, rank, dtype) for rank in range(degree)]
        gathered, scattered, traded = (torch.zeros(n, dtype=dtype) for n in (size * degree, size, size * degree))
        totals = {name: parts[index].clone() for name in ("sum", "max", "min")}
        pending = [
            all_gather(gathered, parts[index], axis),
            reduce_scatter(scattered, wholes[index].clone(), axis),
            all_to_all(traded, wholes[index], axis),
            *(all_reduce(total, axis, name) for name, total in totals.items()),
        ]
        for one in pending:
            one.wait()
        stacked = torch.stack(parts)
        expected = {
            "all_gather": (gathered, torch.cat(parts)),
            "reduce_scatter": (scattered, torch.stack(wholes).sum(0, dtype=dtype).view(degree, size)[index]),
            "all_to_all": (traded, torch.cat([one.view(degree, size)[index] for one in wholes])),
            "sum": (totals["sum"], stacked.sum(0, dtype=dtype)),
            "max": (totals["max"], stacked.amax(0)),
            "min": (totals["min"], stacked.amin(0)),
        }
        wrong += [f"{name} of {size} × {dtype}" for name, (found, right) in expected.items() if not found.equal(right)]
    return wrong


def compared(report: ProofReport) -> set[str]:
    """Axes and operations of the traffic that was compared."""
    return {line.what.removeprefix("traffic: ") for line in report.checks if line.what.startswith("traffic: ")}
