"""Finds ranks that take different ways through a model, before they exchange parameters of different blocks.

In shard stage 3 a block's parameters are gathered when it is called, so all ranks of `shard` must call the same blocks
in the same order. Ranks that do not (each drops layers by its own random numbers) would compute with a mixture of two
blocks, or hang. A rank that calls its blocks as in the last pass agrees with nobody, which costs nothing. A rank that
comes to another block than in the last pass writes that to the store of torch.distributed, and goes on when all others
have come to the same block. If one does not within `PATIENCE_SECONDS`, the ranks take different ways, and the error
names the blocks and the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from weft.errors import PlanError

PATIENCE_SECONDS = 120.0
_END = "the end of the forward"
_numbers = itertools.count()  # all ranks make their agreements in the same order


class WayAgreement:
    """Compares the order in which this rank calls blocks with the last pass, and with the other ranks if it differs.

    `ranks` are the ranks that must call the same blocks, this one (`rank`) among them. `usual` is the order of the
    first pass if nothing is unusual.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], usual: Sequence[str]) -> None:
        self._store, self._rank, self._ranks = store, rank, tuple(ranks)
        self._last, self._now = list(usual), list[str]()
        self._place = 0  # in the last pass
        self._num_changes = 0
        self._prefix = f"weft/way/{next(_numbers)}/{'-'.join(map(str, self._ranks))}"

    def begin(self) -> None:
        """Begin a pass."""
        self._now, self._place = [], 0

    def enters(self, block: str) -> None:
        """Check a block that this rank is about to call, and whose parameters it will gather."""
        expected = self._last[self._place] if self._place < len(self._last) else _END
        if block != expected:
            self._agree(f"block '{block}'")
        rest = self._last[self._place :]
        self._place += rest.index(block) + 1 if block in rest else 0
        self._now.append(block)

    def end(self) -> None:
        """End the forward. Backward gathers the same blocks again."""
        if self._place < len(self._last):
            self._agree(_END)
        self._last = self._now

    def _agree(self, where: str) -> None:
        """Wait until all ranks have come here; raise a PlanError if one came elsewhere, or did not come."""
        self._num_changes += 1
        prefix = f"{self._prefix}/{self._num_changes}"
        place = f"{where} as call {len(self._now) + 1}"
        self._store.set(f"{prefix}/{self._rank}", place)
        for rank in self._ranks:
            key = f"{prefix}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=PATIENCE_SECONDS))
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # the time is up; only some stores have a class of error for it
                raise self._refusal(
                    where, f"rank {rank} did not leave the order of its last pass within {PATIENCE_SECONDS:.0f} s"
                ) from None
            if (theirs := self._store.get(key).decode()) != place:
                raise self._refusal(where, f"rank {rank} comes to {theirs.rpartition(' as call ')[0]}")
        self._store.delete_key(f"{self._prefix}/{self._num_changes - 1}/{self._rank}")  # all ranks have read it

    def _refusal(self, where: str, other: str) -> PlanError:
        return PlanError(
            f"ranks take different ways through the model: rank {self._rank} comes to {where} where {other}; in shard "
            f"stage 3, ranks must call the same blocks in the same order: choose blocks by numbers that are equal on "
            f"all ranks, or use data, or shard stage 1 or 2"
        )
