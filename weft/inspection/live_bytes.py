"""Counts the bytes of live tensors after every operation. Tests compare predicted memory with it on a CPU.

Every storage that an operation allocates is counted until it is freed. Storages that exist before (`held`) are measured
each time, because buffers that are freed and filled again are resized. Backward is counted too: on a CPU it runs in the
thread that calls it. Memory that a kernel allocates and frees before it returns is not counted. Fake tensors count like
real ones.
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

from weft.inspection.memory_traffic import storage_key


class LiveTensors(TorchDispatchMode):
    """Context manager that counts the bytes of live tensors.

    `held` are tensors that exist before it is entered and are counted; `ignored` are tensors that are never counted.
    """

    def __init__(self, held: Iterable[Tensor] = (), ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = self._made_bytes = 0
        self._held = {storage_key(tensor): tensor.untyped_storage() for tensor in held}
        self._known = {*self._held, *(storage_key(tensor) for tensor in ignored)}
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    @property
    def now_bytes(self) -> int:
        """The bytes of all storages that are alive now."""
        return self._made_bytes + sum(storage.nbytes() for storage in self._held.values())

    def restart(self) -> None:
        """Start a new peak from the bytes that are alive now."""
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
