"""Weights of blocks in host memory, copied to the device shortly before they are needed: models larger than a GPU.

The device has room for the weights of `ahead` + 1 blocks. The tensors of a block are views of its place there for good,
so the model computes as usual and gives the same bits. When a block has been computed, its place is filled with the
weights of the next block that lies there, while the blocks in between compute. All other weights stay on the device.

Ranks that compute with the same weights (replicas) read them together: each keeps an equal share of every block in host
memory and copies it to its place, and an all-gather completes the block on all of them. Such ranks must go through the
blocks equally often: a rank without work calls `pass_by`. Gathers then have the order of blocks on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from weft.comm import Axis, Pending, all_gather
from weft.serve.streamed_layout import BlockLayout
from weft.sharding.host_memory import host_zeros


class StreamedWeights:
    """The weights of blocks, each given by the modules that it is made of, in the order in which they compute.

    `readers` are the ranks that read together; None: this rank reads all.
    """

    def __init__(
        self, blocks: Sequence[Sequence[nn.Module]], device: torch.device, ahead: int, readers: Axis | None = None
    ) -> None:
        self._readers = readers
        degree, index = (1, 0) if readers is None else (readers.degree, readers.index)
        layouts = [BlockLayout(modules, degree) for modules in blocks]
        self.block_bytes = tuple(layout.num_bytes for layout in layouts)
        self.num_places = min(ahead + 1, len(blocks))
        self.places = torch.empty(self.num_places, max(self.block_bytes), dtype=torch.uint8, device=device)
        self.home = [host_zeros(layout.share_bytes, torch.uint8, device) for layout in layouts]
        for number, (layout, home) in enumerate(zip(layouts, self.home, strict=True)):
            begin = index * layout.share_bytes
            for start, piece in layout.read(begin, begin + layout.share_bytes):
                home[start : start + len(piece)].copy_(piece)
            layout.move_tensors(self.places[number % self.num_places])
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._copies is not None:
            self._has_come = [torch.cuda.Event() for _ in range(self.num_places)]
            self._is_free = [torch.cuda.Event() for _ in range(self.num_places)]
        self._number = [-1] * self.num_places  # of the block in each place
        self._gathers: list[Pending | None] = [None] * self.num_places
        for number in range(self.num_places):
            self._fetch(number)

    def need(self, index: int) -> None:
        """Block `index` is computed next: the device waits for its weights."""
        place = index % self.num_places
        if self._number[place] != index:  # blocks are not computed in their order
            self._fetch(index)
        self._wait_for_gather(place)
        if self._copies is not None:
            torch.cuda.current_stream().wait_event(self._has_come[place])

    def done(self, index: int) -> None:
        """Block `index` has been computed: its place is filled for the next block there, or for the next step."""
        place = index % self.num_places
        if self._copies is not None:
            self._is_free[place].record()
        following = index + self.num_places
        self._fetch(following if following < len(self.home) else place)

    def pass_by(self) -> None:
        """Give this rank's shares of all blocks to the other readers, while it computes nothing."""
        for index in range(len(self.home)):
            self.need(index)
            self.done(index)

    def _fetch(self, index: int) -> None:
        place, home = index % self.num_places, self.home[index]
        if self._number[place] == index:
            return
        self._number[place] = index
        self._wait_for_gather(place)
        block = self.places[place, : self.block_bytes[index]]
        own = block.view(-1, len(home))[0 if self._readers is None else self._readers.index]
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            if self._copies is not None:
                self._copies.wait_event(self._is_free[place])
            own.copy_(home, non_blocking=True)
            if self._readers is not None:
                self._gathers[place] = all_gather(block, own, self._readers)
            if self._copies is not None:
                self._has_come[place].record()

    def _wait_for_gather(self, place: int) -> None:
        gather, self._gathers[place] = self._gathers[place], None
        if gather is not None:
            gather.wait()


def move_all_but(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Move a model to a device, without some of its modules."""
    left = {id(one) for block in blocks for one in block.modules()}
    for module in model.modules():
        if id(module) not in left:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
