"""Counts the bytes of activations that autograd saves for backward, for each value of `memory.recompute`.

Parameters and buffers are not counted. A storage counts once, for the block that is the first to save it. `none` saves
all of it. `full` saves the inputs of blocks. `selective` saves these and the results of matmuls, convolutions and
attention. All three save what the root saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

POLICIES = ("none", "selective", "full")


class SavedTally:
    """Saved bytes by policy, block, and the linear or convolution after which they were saved."""

    def __init__(self) -> None:
        self.by_layer: dict[str, dict[str, dict[str, int]]] = {policy: {} for policy in POLICIES}
        self.since = 0  # bytes that `none` saved since this was last set to 0
        self.sendable: dict[str, dict[str, dict[int, int]]] = {}  # block -> policy -> number of a storage -> bytes
        self._staying = set[int]()  # storages that are not sent to the host: state, and inputs of several blocks
        self._numbers: dict[int, int] = {}  # storage -> number, in the order of first use
        self._seen: dict[str, set[int]] = {policy: set() for policy in POLICIES}
        self._alive: list[Tensor] = []  # keeps storages alive: addresses of freed ones are used again

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors that no block may send to the host."""
        for tensor in tensors:
            self._staying.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)

    def ignore(self, tensors: Collection[Tensor]) -> None:
        """Mark parameters and buffers, which are not counted as saved activations."""
        for tensor in tensors:
            for seen in self._seen.values():
                seen.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)
        self.stay(tensors)

    def add(self, policies: Iterable[str], tensor: Tensor, block: str, layer: str) -> None:
        """Count a tensor that these policies save in `block`, after the layer `layer`."""
        storage = tensor.untyped_storage()
        for policy in policies:
            if storage._cdata not in self._staying:
                number = self._numbers.setdefault(storage._cdata, len(self._numbers))
                self.sendable.setdefault(block, {}).setdefault(policy, {})[number] = storage.nbytes()
            if storage._cdata in self._seen[policy]:
                continue
            self._seen[policy].add(storage._cdata)
            self._alive.append(tensor)
            self.since += storage.nbytes() if policy == "none" else 0
            saved = self.by_layer[policy].setdefault(block, {})
            saved[layer] = saved.get(layer, 0) + storage.nbytes()
