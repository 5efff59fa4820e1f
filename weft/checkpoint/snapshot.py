"""Copies of tensors in host memory, so that training can continue while a thread writes them.

One buffer holds all pieces and is kept between saves: the first save allocates the memory, later ones only copy. For
CUDA tensors the buffer is page-locked, the copies run asynchronously, and one synchronize per device waits for them.
The buffer is registered rather than allocated as pinned memory, because torch's pinned allocator rounds up to a power
of two.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


class HostBuffer:
    """Host memory for a copy of a checkpoint's tensors. It is allocated once and overwritten by each `copy`."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize[[int], HostBuffer] | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the tensors to the host. Returns one 1-D tensor each, valid until the next call."""
        sizes_bytes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._reserve(sum(sizes_bytes), page_locked=bool(devices))
        copies = []
        offset = 0
        for tensor, size_bytes in zip(tensors, sizes_bytes, strict=True):
            copy = self._bytes[offset : offset + tensor.nbytes].view(tensor.dtype)
            copies.append(copy.copy_(tensor.detach().reshape(-1), non_blocking=True))
            offset += size_bytes
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _reserve(self, size_bytes: int, page_locked: bool) -> None:
        if size_bytes > len(self._bytes):
            if self._unlock is not None:
                self._unlock()
                self._unlock = None
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8)
        if page_locked and self._unlock is None and size_bytes:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self._bytes.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(self._bytes), 0)))
            self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
