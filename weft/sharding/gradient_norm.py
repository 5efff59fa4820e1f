"""Norms of gradients, summed with enough bits whatever the length.

On a CPU torch adds squares up one after the other in the dtype it is given: of four million float32 numbers the sum is
off by 1e-4, and a flat buffer is that long. There squares are summed in float64, some elements at a time. A GPU sums in
a tree, for which float32 is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

_CHUNK_NUMEL = 1 << 20  # whose copy in float64 is 8 MiB


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor [], in float32 at least and in float64 on a CPU; all are on one device."""
    if not tensors:
        return []
    if tensors[0].device.type != "cpu":
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)  # of the sums
        return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))
    chunks = [list(tensor.reshape(-1).split(_CHUNK_NUMEL)) for tensor in tensors]
    parts = [torch.stack(torch._foreach_norm(one, 2, dtype=torch.float64)) for one in chunks]
    return [torch.linalg.vector_norm(one) for one in parts]
