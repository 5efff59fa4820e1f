"""Norms of gradients, summed precisely for tensors of any length.

On a CPU torch sums squares one after another in the given dtype: over four million float32 numbers, the length of a
flat buffer, the error is 1e-4. On a CPU squares are therefore summed in float64, in chunks. A GPU sums in a tree, for
which float32 is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

_CHUNK_NUMEL = 1 << 20  # a chunk's copy in float64 is 8 MiB


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor [], in float64 on a CPU and at least float32 elsewhere.

    All tensors are on one device.
    """
    if not tensors:
        return []
    if tensors[0].device.type != "cpu":
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)  # of the sums
        return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))
    chunks = [list(tensor.reshape(-1).split(_CHUNK_NUMEL)) for tensor in tensors]
    parts = [torch.stack(torch._foreach_norm(one, 2, dtype=torch.float64)) for one in chunks]
    return [torch.linalg.vector_norm(one) for one in parts]
