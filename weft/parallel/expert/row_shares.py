"""Divides the rows of a layer of experts between ranks of x, or of y, before they are sent over `expert`.

Ranks of x hold the same rows. With `tensor.drop_duplicates` each sends other ones, 1/x of the bytes:

    rows ──every x-th row──▶ all-to-alls and experts ──all-gather over x──▶ all results

Ranks of y hold a part of the features of the same rows. They exchange features for rows:

    rows [rows, hidden / y]    ──all-to-all over y──▶ every y-th row [rows / y, hidden] ──▶ all-to-alls and experts
    results [rows, hidden / y] ◀──all-to-all over y── results [rows / y, hidden]

Each all-to-all over y sends rows · hidden / y elements. Backward makes the transposed calls with gradients. A rank's
experts compute 1/x or 1/y of the rows, so the gradients of experts that the axis does not split are partial sums over
it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.comm import Axis, all_gather, all_to_all
from weft.errors import PlanError
from weft.inspection.first_order import Transposable
from weft.parallel.tensor.operations import gather_along, slice_along

Compute = Callable[[Tensor, Tensor | None], Tensor]


@torch._disable_dynamo  # type: ignore[attr-defined]  # collectives and the ledger are not part of a compiled graph
def compute_own_rows(compute: Compute, axis: Axis, num_experts: int, rows: Tensor, ends: Tensor | None) -> Tensor:
    """Returns `compute(rows, ends)`, of which each rank of `axis` (x or y) computes a part of the rows.

    Over y, `rows` and the result have this rank's features.
    """
    divided = len(rows) if ends is not None else len(rows) // num_experts  # without `ends`, of each expert
    if divided % axis.degree == 0:
        take, join = (_OWN_ROWS, _ALL_ROWS) if axis.name == "x" else (_TO_ROWS, _TO_FEATURES)
        results = compute(take.apply(rows, axis), None if ends is None else own_ends(ends, axis))
        return join.apply(results, axis)
    if torch.is_grad_enabled():
        raise PlanError(refusal(divided, axis.name, axis.degree))
    if axis.name == "x":  # an evaluation: every rank sends all rows
        return compute(rows, ends)
    return slice_along(compute(gather_along(rows, axis, -1).contiguous(), ends), axis, -1).contiguous()


def refusal(num_rows: int, axis: str, degree: int) -> str:
    """Returns why the ranks of x or y cannot divide so many rows."""
    given, remedy = f"tensor.y = {degree} gives each of its ranks", "y = 1"
    if axis == "x":
        given, remedy = f"tensor.drop_duplicates = true gives each rank of x = {degree}", "drop_duplicates = false"
    return (
        f"{given} as many of {num_rows} rows for experts; use a micro-batch or a capacity with a multiple of {degree}, "
        f"or {remedy}"
    )


def own_ends(ends: Tensor, axis: Axis) -> Tensor:
    """Returns before which of this rank's rows (index, index + degree, ...) each expert ends."""
    return (ends - axis.index + axis.degree - 1) // axis.degree


def _own_rows(rows: Tensor, x: Axis) -> Tensor:
    return rows[x.index :: x.degree].contiguous()


def _all_rows(rows: Tensor, x: Axis) -> Tensor:
    parts = rows.new_empty(x.degree, *rows.shape)
    all_gather(parts, rows.contiguous()[None], x).wait()
    return parts.transpose(0, 1).flatten(0, 1)


def _to_rows(rows: Tensor, y: Axis) -> Tensor:
    """Returns every y-th row with all features [rows / y, hidden], from all rows with this rank's features."""
    return _exchange(rows.unflatten(0, (-1, y.degree)), y).flatten(1)


def _to_features(rows: Tensor, y: Axis) -> Tensor:
    """Returns all rows with this rank's features, from every y-th row with all features. It undoes `_to_rows`."""
    return _exchange(rows.unflatten(1, (y.degree, -1)), y).flatten(0, 1)


def _exchange(parts: Tensor, y: Axis) -> Tensor:
    """Sends part i of parts [rows / y, ranks, hidden / y] to rank i, and returns those of all ranks in this form."""
    sent = parts.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    all_to_all(received, sent, y).wait()
    return received.transpose(0, 1)


_OWN_ROWS = Transposable(_own_rows, _all_rows, "tensor.drop_duplicates")
_ALL_ROWS = Transposable(_all_rows, _own_rows, "tensor.drop_duplicates")  # all ranks of x have the same gradients
_TO_ROWS = Transposable(_to_rows, _to_features, "expert")
_TO_FEATURES = Transposable(_to_features, _to_rows, "expert")
