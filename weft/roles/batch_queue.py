"""The queue of batches between loaders and a training rank, with credits.

A training rank asks for the batches of its next `depth` steps, one 8-byte message each, and receives each batch as one
message without a header. A loader computes a batch only when it is asked for, so no more than `depth` batches of a
training rank exist outside of it, and a rank that is slow holds up no other. Who makes a batch does not change it: the
loaders of a training rank take turns, a lost loader's batches are asked of the others, and if none is left the rank
makes them itself.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
from torch import Tensor

from weft.comm.channel import PairChannel, PendingMessage
from weft.errors import LostRankError
from weft.inspection.nested_tensors import tensors_in
from weft.roles.links import RoleLink, TrainingEndedError, find_returned
from weft.step.batch import Batch

END = -1  # asked for in place of a batch when a training rank needs no more
Make = Callable[[int], list[Batch]]


@dataclass(frozen=True)
class BatchLayout:
    """The dtypes and shapes of the tensors of a rank's batches of a step: `tensors` micro-batch by micro-batch."""

    tensors: tuple[tuple[tuple[torch.dtype, tuple[int, ...]], ...], ...]

    @staticmethod
    def of(batches: Sequence[Batch]) -> BatchLayout:
        """The layout of some batches, which must be tuples of tensors."""
        return BatchLayout(tuple(tuple((each.dtype, tuple(each.shape)) for each in batch) for batch in batches))

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(dtype.itemsize * prod(shape) for batch in self.tensors for dtype, shape in batch)

    def pack(self, batches: Sequence[Batch]) -> Tensor:
        """Returns the batches as bytes."""
        assert BatchLayout.of(batches) == self, "the batches of all steps have one layout"
        return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors_in(list(batches))])

    def unpack(self, packed: Tensor) -> list[Batch]:
        """Returns the batches that `pack` got."""
        found, offset = list[Batch](), 0
        for batch in self.tensors:
            tensors = []
            for dtype, shape in batch:
                size = dtype.itemsize * prod(shape)
                part = packed[offset : offset + size]
                # A dtype needs aligned bytes, and tensors before it may end anywhere.
                part = part if offset % dtype.itemsize == 0 else part.clone()
                tensors.append(part.view(dtype).view(shape))
                offset += size
            found.append(tuple(tensors))
        return found


@dataclass
class _Asked:
    """A batch that was asked for: from which link, the message that asks, and the message that brings the batch; no
    link if this rank makes it.
    """

    number: int
    link: RoleLink | None = None
    request: tuple[Tensor, PendingMessage] | None = None  # kept until the batch arrives, because Gloo reads the tensor
    packed: Tensor | None = None
    message: PendingMessage | None = None


class BatchQueue:
    """A training rank's end of the queue.

    `turn` is (the training rank, the number of training ranks), from which follows whose turn a batch is. `make` makes
    a batch on this rank. `say` reports lost loaders.
    """

    def __init__(
        self,
        links: Sequence[RoleLink],
        own_digest: str,
        turn: tuple[int, int],
        depth: int,
        make: Make,
        layout: BatchLayout,
        timeout: timedelta,
        say: Callable[[str], None],
    ) -> None:
        self._links, self._digest, self.depth, self._make, self._layout = links, own_digest, depth, make, layout
        self._turn, self._timeout, self._say = turn, timeout, say
        self._asked: deque[_Asked] = deque()

    def take(self, numbers: Sequence[int]) -> list[Batch]:
        """Returns the batch numbers[0], and asks for the others, those of the next steps, as far as `depth` allows."""
        find_returned(self._links, self._digest, self._say)
        while self._asked and self._asked[0].number != numbers[0]:  # the run went back to an earlier step
            self._receive(self._asked.popleft())
        self._ask(numbers)
        asked = self._asked.popleft()
        while not self._receive(asked):
            self._send(asked)
        self._ask(numbers[1:])
        return self._make(asked.number) if asked.packed is None else self._layout.unpack(asked.packed)

    def close(self) -> None:
        """Tells the loaders that this rank needs no more batches."""
        while self._asked:
            self._receive(self._asked.popleft())
        for link in self._links:
            if link.channel is not None:
                try:
                    link.channel.send(torch.tensor([END])).wait(self._timeout)
                except LostRankError:
                    link.lose()

    def _ask(self, numbers: Sequence[int]) -> None:
        """Asks for the batches that were not asked for yet, until `depth` are on their way."""
        for number in numbers[len(self._asked) : self.depth]:
            self._asked.append(_Asked(number))
            self._send(self._asked[-1])

    def _send(self, asked: _Asked) -> None:
        """Asks the loader whose turn it is, or any other that is there, for a batch."""
        asked.link = asked.request = asked.packed = asked.message = None
        while there := [link for link in self._links if link.channel is not None]:
            trainer, num_training = self._turn
            link = there[(asked.number * num_training + trainer) % len(there)]
            assert link.channel is not None
            try:
                packed = torch.empty(self._layout.num_bytes, dtype=torch.uint8)
                message, number = link.channel.receive(packed), torch.tensor([asked.number])
                asked.request = number, link.channel.send(number)
                asked.link, asked.packed, asked.message = link, packed, message
                return
            except LostRankError as error:
                self._lose(link, error)

    def _receive(self, asked: _Asked) -> bool:
        """Waits for a batch. Returns False if its loader was lost."""
        if asked.message is None or asked.link is None:
            return True
        try:
            asked.message.wait(self._timeout)
            return True
        except LostRankError as error:
            self._lose(asked.link, error)
            return False

    def _lose(self, link: RoleLink, error: LostRankError) -> None:
        """Goes on without a loader: the batches that it was asked for are asked of others."""
        if link.channel is None:
            return
        link.lose()
        num_left = sum(link.channel is not None for link in self._links)
        others = f"{num_left} other loader{'s' * (num_left > 1)} load" + "s" * (num_left == 1)
        self._say(f"{error}; {others if num_left else 'training ranks load'} its batches, and none is lost")
        for asked in self._asked:
            if asked.link is link:
                self._send(asked)


def serve_trainers(connect: Callable[[int], PairChannel], makers: Sequence[Make]) -> None:
    """A loader's end of all queues: serves every training rank in a thread of its own, as soon as it comes.

    A rank that is slow, or that comes late, holds up no other. `makers` make the batches of each training rank.
    """
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def serve(trainer: int, make: Make) -> None:
        try:
            with suppress(TrainingEndedError):
                serve_batches(connect(trainer), make)
            ends.put(None)
        except BaseException as error:  # this process ends, and the training ranks meet the same error themselves
            ends.put(error)

    for trainer, make in enumerate(makers):
        threading.Thread(target=serve, args=(trainer, make), daemon=True).start()
    for _ in makers:
        error = ends.get()
        if error is not None:
            raise error


def serve_batches(channel: PairChannel, make: Make) -> int:
    """A loader's end of the queue of one training rank: makes what it is asked for, until the rank ends or is lost.

    Returns how many batches it has sent.
    """
    layout: BatchLayout | None = None
    asked, num_sent = torch.empty(1, dtype=torch.int64), 0
    try:
        while True:
            channel.receive(asked).wait()
            if int(asked) == END:
                return num_sent
            batches = make(int(asked))
            layout = layout or BatchLayout.of(batches)
            channel.send(layout.pack(batches)).wait()
            num_sent += 1
    except LostRankError:
        return num_sent
