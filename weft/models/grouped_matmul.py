"""Matmuls of rows in groups, each group by a matrix of its own, as the tokens of experts are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_ALIGNED_BYTES = 16  # torch._grouped_mm takes rows of a multiple of these


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
    """Multiply rows [rows, in], sorted by group, by the weight [groups, out, in] of their group.

    Group i ends before row `ends[i]` (int32); without `ends`, all groups have equally many rows. Nothing waits for the
    device, unless torch has no kernel: for float64, and for sizes that are not a multiple of 16 bytes.
    """
    right = weight.transpose(1, 2)
    if ends is None:
        return torch.bmm(rows.unflatten(0, (len(weight), -1)), right).flatten(0, 1)
    is_aligned = all(size * rows.element_size() % _ALIGNED_BYTES == 0 for size in weight.shape[1:])
    if rows.dtype == torch.float64 or not is_aligned:
        return grouped_product(rows, right, ends)
    product: Tensor = torch._grouped_mm(rows, right, offs=ends)
    return product


def grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **_: Any
) -> Tensor:
    """Returns torch's grouped_mm, in any dtype; the host reads `offs`.

    Rows of `left` [rows, in] up to `offs[i]` are multiplied by `right[i]` [in, out]; rows behind the last are zero.
    With `left` [in, rows] and `right` [rows, out], each group's product is one of the result [groups, in, out].
    """
    if left.dim() == 3 and right.dim() == 3:
        return left @ right
    assert offs is not None
    if isinstance(left, FakeTensor) or left.is_meta:  # only shapes count
        return left @ (right[0] if right.dim() > left.dim() else right)
    ends = [int(end) for end in offs.tolist()]
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if right.dim() == 2:
        return torch.stack([left[..., start:end] @ right[start:end] for start, end in groups])
    products = [left[start:end] @ right[index] for index, (start, end) in enumerate(groups)]
    behind = left.new_zeros(len(left) - ends[-1], right.shape[-1])
    return torch.cat([*products, behind])
