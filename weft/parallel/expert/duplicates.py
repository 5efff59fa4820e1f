"""Duplicate token dropping: ranks of x, which hold the same rows, send different ones to the experts.

    rows, the same on all ranks of x ──every x-th row──▶ all-to-alls and experts ──all-gather over x──▶ all results

Each rank sends 1/x of the bytes over `expert`, and its experts compute 1/x of the rows. Gradients of the experts are
then partial sums over x. The gradients of the rows are all-gathered over x in backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.comm import Axis, all_gather
from weft.errors import PlanError
from weft.inspection.first_order import Transposable

Compute = Callable[[Tensor, Tensor | None], Tensor]


@torch._disable_dynamo  # type: ignore[attr-defined]  # collectives and the ledger are not part of a compiled graph
def compute_own_rows(compute: Compute, x: Axis, num_experts: int, rows: Tensor, ends: Tensor | None) -> Tensor:
    """Returns `compute(rows, ends)`, of which this rank of x computes every x-th row."""
    divided = len(rows) if ends is not None else len(rows) // num_experts  # without `ends`, of each expert
    if divided % x.degree:
        if torch.is_grad_enabled():
            raise PlanError(refusal(divided, x.degree))
        return compute(rows, ends)  # an evaluation: all ranks of x send all rows
    results = compute(_TAKE_OWN.apply(rows, x), None if ends is None else own_ends(ends, x))
    return _ALL_ROWS.apply(results, x)


def refusal(num_rows: int, x: int) -> str:
    """Returns why ranks of x cannot send different rows."""
    return (
        f"tensor.drop_duplicates = true gives each rank of x = {x} as many of {num_rows} rows for experts; use a "
        f"micro-batch or a capacity with a multiple of {x}, or drop_duplicates = false"
    )


def own_ends(ends: Tensor, x: Axis) -> Tensor:
    """Returns before which of this rank's rows (x.index, x.index + x, ...) each expert ends."""
    return (ends - x.index + x.degree - 1) // x.degree


def _own_rows(rows: Tensor, x: Axis) -> Tensor:
    return rows[x.index :: x.degree].contiguous()


def _gathered(rows: Tensor, x: Axis) -> Tensor:
    parts = rows.new_empty(x.degree, *rows.shape)
    all_gather(parts, rows.contiguous()[None], x).wait()
    return parts.transpose(0, 1).flatten(0, 1)


_TAKE_OWN = Transposable(_own_rows, _gathered, "tensor.drop_duplicates")
_ALL_ROWS = Transposable(_gathered, _own_rows, "tensor.drop_duplicates")  # all ranks of x have the same gradients
