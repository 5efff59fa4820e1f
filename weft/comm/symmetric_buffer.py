"""A buffer of symmetric memory, and torch's kernels that sum over it: each rank reads the others' buffers.

`one_shot` copies a tensor to the own buffer, waits for the other ranks and adds up all buffers, in the order of ranks.
`two_shot` adds up a part on each rank and reads the parts of others. Both wait for the others again at their end, so
the next sum may use the buffer. Results have the bits of `small_sums.py`'s one_shot. Both may be in CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.cluster.small_choice import Strategy

_DTYPES = (torch.float32, torch.bfloat16)
_TWO_SHOT_DEGREES = (2, 4, 8)  # for which torch has a kernel that writes the result elsewhere
_ALIGNMENT_BYTES = 16


class SymmetricBuffer:
    """This rank's buffer, of bytes, at which the other ranks of a group can read. `kernels` are torch's."""

    def __init__(self, buffer: Tensor, group_name: str, degree: int, kernels: Any = None) -> None:
        self._views = {dtype: buffer.view(dtype) for dtype in _DTYPES}
        self._num_bytes, self._device = buffer.numel(), buffer.device
        self._group_name, self._degree = group_name, degree
        self._kernels = torch.ops.symm_mem if kernels is None else kernels

    def takes(self, tensor: Tensor) -> bool:
        """Can this tensor be summed? The answer is the same on all ranks."""
        num_bytes = tensor.numel() * tensor.element_size()
        is_aligned = num_bytes % 4 == 0 and tensor.storage_offset() * tensor.element_size() % _ALIGNMENT_BYTES == 0
        fits = 0 < num_bytes <= self._num_bytes and tensor.device == self._device
        return tensor.dtype in _DTYPES and is_aligned and fits and tensor.is_contiguous()

    def sum(self, tensor: Tensor, strategy: Strategy) -> None:
        """Sum a tensor in place over the ranks, on the current stream."""
        flat = tensor.detach().view(-1)
        own = self._views[tensor.dtype][: flat.numel()]
        if strategy == "symmetric_one_shot":
            self._kernels.one_shot_all_reduce_copy_out(own, flat, "sum", self._group_name, flat)
            return
        own.copy_(flat)
        if self._degree in _TWO_SHOT_DEGREES:
            self._kernels.two_shot_all_reduce_out(own, "sum", self._group_name, flat)
        else:
            self._kernels.two_shot_all_reduce_(own, "sum", self._group_name)
            flat.copy_(own)
