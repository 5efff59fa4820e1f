"""Bytes that backward needs of a forward, by `memory.recompute`: what autograd saves, parameters and buffers aside.

A storage counts once, for the block that is the first to save it. `none` keeps all of it. `full` keeps the inputs of
blocks, and `selective` also the results of matmuls, convolutions and attention; what the root saves all three keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

POLICIES = ("none", "selective", "full")


class SavedTally:
    """Saved bytes by policy, block, and the layer behind which they were saved."""

    def __init__(self) -> None:
        self.by_place: dict[str, dict[str, dict[str, int]]] = {policy: {} for policy in POLICIES}
        self.since = 0  # bytes that `none` saved since someone last set this
        self.sendable: dict[str, dict[str, dict[int, int]]] = {}  # by block and policy; storages by number
        self._staying = set[int]()  # storages that no block sends: state, and what several blocks are given
        self._numbers: dict[int, int] = {}  # of storages, in the order of their first use
        self._seen: dict[str, set[int]] = {policy: set() for policy in POLICIES}
        self._alive: list[Tensor] = []  # a storage's address means something only while it lives

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """No block sends these anywhere."""
        for tensor in tensors:
            self._staying.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)

    def ignore(self, tensors: Collection[Tensor]) -> None:
        """Parameters and buffers are state, not saved bytes."""
        for tensor in tensors:
            for seen in self._seen.values():
                seen.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)
        self.stay(tensors)

    def add(self, policies: Iterable[str], tensor: Tensor, block: str, behind: str) -> None:
        """These policies keep the tensor."""
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
            saved = self.by_place[policy].setdefault(block, {})
            saved[behind] = saved.get(behind, 0) + storage.nbytes()
