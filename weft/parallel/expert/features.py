"""Rows whose features are split over y: ranks of y exchange features for rows, and each computes whole rows.

    rows [rows, hidden / y], the same rows on all ranks of y ──all-to-all over y──▶ every y-th row [rows / y, hidden]
                                                                                   experts, wherever they are
    results [rows, hidden / y]                               ◀──all-to-all over y── results [rows / y, hidden]

Each all-to-all sends rows · hidden / y elements, and backward makes the same two for gradients. Each rank's experts
compute 1/y of the rows, so gradients of experts that y does not split are partial sums over y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis, all_to_all
from weft.errors import PlanError
from weft.inspection.first_order import Transposable
from weft.parallel.expert.duplicates import Compute, own_ends
from weft.parallel.tensor.operations import gather_along, slice_along


@torch._disable_dynamo  # type: ignore[attr-defined]  # collectives and the ledger are not part of a compiled graph
def compute_whole_rows(compute: Compute, y: Axis, num_experts: int, rows: Tensor, ends: Tensor | None) -> Tensor:
    """Returns this rank's features of `compute(rows, ends)`, given this rank's features of rows."""
    divided = len(rows) if ends is not None else len(rows) // num_experts  # without `ends`, of each expert
    if divided % y.degree:
        if torch.is_grad_enabled():
            raise PlanError(refusal(divided, y.degree))
        results = compute(gather_along(rows, y, -1).contiguous(), ends)  # an evaluation: all ranks of y send all rows
        return slice_along(results, y, -1).contiguous()
    own = compute(_TO_ROWS.apply(rows, y), None if ends is None else own_ends(ends, y))
    return _TO_FEATURES.apply(own, y)


def refusal(num_rows: int, y: int) -> str:
    """Returns why ranks of y cannot exchange features for rows."""
    return (
        f"tensor.y = {y} gives each of its ranks as many of {num_rows} rows for experts; use a micro-batch or a "
        f"capacity with a multiple of {y}, or y = 1"
    )


def _to_rows(rows: Tensor, y: Axis) -> Tensor:
    """Returns every y-th row with all features [rows / y, hidden], from all rows with this rank's features."""
    sent = rows.unflatten(0, (-1, y.degree)).transpose(0, 1).contiguous()  # [ranks, rows / y, hidden / y]
    received = torch.empty_like(sent)
    all_to_all(received, sent, y).wait()
    return received.transpose(0, 1).flatten(1)


def _to_features(rows: Tensor, y: Axis) -> Tensor:
    """Returns all rows with this rank's features, from every y-th row with all features. It undoes `_to_rows`."""
    sent = rows.unflatten(1, (y.degree, -1)).transpose(0, 1).contiguous()  # [ranks, rows / y, hidden / y]
    received = torch.empty_like(sent)
    all_to_all(received, sent, y).wait()
    return received.transpose(0, 1).flatten(0, 1)


_TO_ROWS = Transposable(_to_rows, _to_features, "expert")
_TO_FEATURES = Transposable(_to_features, _to_rows, "expert")
