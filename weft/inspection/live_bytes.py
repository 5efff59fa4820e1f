"""The bytes of tensors alive, operation by operation: what predicted memory is held against where no allocator counts.

Every storage that an operation makes is counted until it dies. Those that are alive before (`held`) are asked for their
size each time, because buffers that are freed and filled again are resized. Backward is seen too: on a CPU it runs in
the thread that calls it. What a kernel allocates for itself and frees before it returns is not seen. Fake tensors count
as real ones would.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts while it is entered; tensors in `ignored` never."""

    def __init__(self, held: Iterable[Tensor] = (), ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = self._made_bytes = 0
        self._held = {_key(tensor): tensor.untyped_storage() for tensor in held}
        self._known = {*self._held, *(_key(tensor) for tensor in ignored)}
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    @property
    def now_bytes(self) -> int:
        """Of all storages that are alive now."""
        return self._made_bytes + sum(storage.nbytes() for storage in self._held.values())

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.now_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._sizes:
            self._sizes[key] = weakref.ref(storage, partial(self._end, key)), storage.nbytes()
            self._made_bytes += storage.nbytes()

    def _end(self, key: int, _: object) -> None:
        self._made_bytes -= self._sizes.pop(key)[1]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
