"""Snapshots: the weights of a step, from the training ranks to a validator, and its measures back.

At the end of a step each training rank copies its pieces to host memory and goes on; the copy is sent behind the next
steps. Together the ranks send each element of the model once. Training rank 0 chooses the validator and broadcasts its
choice, so that all ranks send to the same one or none does: a step is skipped while every validator is busy, and no
training step waits for one. Measures come back to training rank 0, and carry the step of their snapshot.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Piece, Region, overlap
from weft.checkpoint.load import copy_runs
from weft.comm import Axis, broadcast
from weft.comm.channel import PairChannel, PendingMessage
from weft.errors import LostRankError
from weft.roles.links import RoleLink

END = -1  # sent in place of a step when there are no more snapshots
_NOBODY = -1


@dataclass(frozen=True)
class SnapshotResult:
    """The measures of the snapshot of a step; None if the validator was lost."""

    step: int
    validator: str
    measures: list[float] | None


def pack(pieces: Sequence[Piece], packed: Tensor) -> None:
    """Copies pieces to bytes of the host, one behind the other."""
    offset = 0
    for piece in pieces:
        size = piece.tensor.nbytes
        target = packed[offset : offset + size].view(piece.tensor.dtype)
        target.copy_(piece.tensor.reshape(-1), non_blocking=True)
        offset += size
    for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
        torch.cuda.synchronize(device)


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns pieces with the largest elements first, so that all are aligned one behind the other."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def describe(pieces: Sequence[Piece]) -> str:
    """Returns names, regions and dtypes of pieces as JSON."""
    values = [[one.name, one.kind, asdict(one.region), str(one.tensor.dtype).removeprefix("torch.")] for one in pieces]
    return json.dumps(values)


class SnapshotBuffer:
    """A validator's memory for the pieces of one training rank, which sent `describe` of them."""

    def __init__(self, description: str) -> None:
        self._parts = [
            (name, kind, _region(region), getattr(torch, dtype))
            for name, kind, region, dtype in json.loads(description)
        ]
        num_bytes = sum(region.size * dtype.itemsize for _, _, region, dtype in self._parts)
        self.packed = torch.empty(num_bytes, dtype=torch.uint8)

    def pieces(self) -> list[Piece]:
        """The pieces, as views of the memory."""
        found, offset = [], 0
        for name, kind, region, dtype in self._parts:
            size = region.size * dtype.itemsize
            found.append(Piece(name, kind, region, self.packed[offset : offset + size].view(dtype)))
            offset += size
        return found


def _region(table: dict[str, Any]) -> Region:
    intervals = tuple(tuple((begin, end) for begin, end in one) for one in table["intervals"])
    return Region(tuple(table["shape"]), intervals, table["start"], table["stop"])


def whole_tensors(pieces: Iterable[Piece]) -> dict[tuple[str, str], Tensor]:
    """Returns the whole tensors, by (name, kind), that the pieces of all ranks cover."""
    found: dict[tuple[str, str], Tensor] = {}
    for piece in pieces:
        key, shape = (piece.name, piece.kind), piece.region.shape
        if key not in found:
            found[key] = torch.empty(shape, dtype=piece.tensor.dtype)
        copy_runs(overlap(piece.region, Region.whole(shape)), piece.tensor.view(-1), found[key].view(-1))
    return found


class SnapshotSender:
    """A training rank's end. `pieces` returns its pieces, always the same ones. All ranks call it at once."""

    def __init__(
        self,
        links: Sequence[RoleLink],
        own_digest: str,
        pieces: Callable[[], Iterable[Piece]],
        num_measures: int,
        world: Axis,
        store: Store,
    ) -> None:
        self._links, self._digest, self._pieces, self._world = links, own_digest, pieces, world
        self._num_measures = num_measures
        first = in_order(pieces())
        self._num_bytes = sum(piece.tensor.nbytes for piece in first)
        self._pins = any(piece.tensor.is_cuda for piece in first)
        store.set(layout_key(world.index), describe(first))
        self._staged: dict[int, tuple[Tensor, PendingMessage]] = {}  # by validator; sent, or on its way
        self._results: queue.SimpleQueue[SnapshotResult] = queue.SimpleQueue()
        self._busy: dict[int, int] = {}  # the step that a validator measures, by its number; on training rank 0

    def offer(self, step: int) -> bool:
        """Sends the snapshot of a step if a validator is free. All training ranks call it. Returns whether it did."""
        choice = torch.tensor([_NOBODY, 0], dtype=torch.int64)
        if self._world.index == 0:
            free = next((link for link in self._links if link.number not in self._busy and self._is_there(link)), None)
            if free is not None:
                choice[0], choice[1] = free.number, free.start
        broadcast(choice, self._world).wait()
        number, start = choice.tolist()
        if number == _NOBODY:
            return False
        link = self._links[number]
        if self._world.index == 0:
            self._busy[number] = step
        pieces = in_order(self._pieces())  # on all ranks, which may exchange weights for it
        try:
            self._send(link, start, step, pieces)
        except LostRankError:
            link.lose()
            if self._world.index == 0:
                self._results.put(SnapshotResult(step, link.name, None))
        return True

    def results(self, wait_seconds: float = 0.0) -> list[SnapshotResult]:
        """The results that have come, on training rank 0. If none has, waits so long for one that is outstanding; a
        validator that does not answer in that time counts as lost.
        """
        found: list[SnapshotResult] = []
        while not self._results.empty() or (wait_seconds and not found and self._busy):
            try:
                result = self._results.get(timeout=wait_seconds or None)
            except queue.Empty:
                number, step = self._busy.popitem()
                self._links[number].lose()
                found.append(SnapshotResult(step, self._links[number].name, None))
                continue
            if result.step in self._busy.values():
                self._busy = {number: step for number, step in self._busy.items() if step != result.step}
                found.append(result)
        return found

    @property
    def outstanding(self) -> Collection[int]:
        """The steps whose measures have not come yet, on training rank 0."""
        return self._busy.values()

    @property
    def has_validators(self) -> bool:
        """Is a validator there? On training rank 0."""
        return any(map(self._is_there, self._links))

    def close(self, timeout: timedelta) -> None:
        """Tells the validators that there are no more snapshots."""
        for _, message in self._staged.values():
            with suppress(LostRankError):
                message.wait(timeout)
        for link in self._links if self._world.index == 0 else ():
            if link.channel is not None:
                with suppress(LostRankError):
                    link.channel.send(torch.tensor([END])).wait(timeout)

    def _is_there(self, link: RoleLink) -> bool:
        """Is a validator there? One that was lost and has started again is connected."""
        start = link.newer_start() if link.channel is None else None
        if start is not None:
            with suppress(LostRankError):
                link.connect(self._digest, start)
        return link.channel is not None

    def _send(self, link: RoleLink, start: int, step: int, pieces: Sequence[Piece]) -> None:
        if link.channel is None or link.start != start:
            link.connect(self._digest, start)
        channel = link.channel
        assert channel is not None
        packed, sent = self._staged.get(link.number, (None, None))
        if packed is not None and sent is not None and sent.channel is not channel:
            _keep_until_sent(packed, sent)  # Gloo may never report a message to a validator that was killed
            packed = None
        elif sent is not None:
            with suppress(LostRankError):
                sent.wait()  # it has arrived, or its connection is lost: the validator is free
        if packed is None:
            packed = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self._pins)
        pack(pieces, packed)
        if self._world.index == 0:
            self._await_result(link, channel, step)
        self._staged[link.number] = packed, channel.send(packed)

    def _await_result(self, link: RoleLink, channel: PairChannel, step: int) -> None:
        """Announces a snapshot, and waits for its result in a thread, because Gloo's messages cannot be polled."""
        number, measures = torch.tensor([step]), torch.empty(self._num_measures, dtype=torch.float64)
        announcement, answer = channel.send(number), channel.receive(measures)

        def wait() -> None:
            try:
                announcement.wait()
                answer.wait()
                self._results.put(SnapshotResult(int(number), link.name, measures.tolist()))
            except LostRankError:
                link.lose()
                self._results.put(SnapshotResult(step, link.name, None))

        threading.Thread(target=wait, daemon=True).start()


def _keep_until_sent(packed: Tensor, message: PendingMessage) -> None:
    """Hold the tensor of a message over a lost connection, from which Gloo may read, without waiting for it here."""

    kept = [packed]

    def wait() -> None:
        with suppress(LostRankError):
            message.wait()
        del kept[:]

    threading.Thread(target=wait, daemon=True).start()


def layout_key(trainer: int) -> str:
    """The key of the job's store under which a training rank describes its pieces."""
    return f"role/snapshot/{trainer}"


def serve_snapshots(
    channels: Sequence[PairChannel], store: Store, measure: Callable[[int, dict[tuple[str, str], Tensor]], list[float]]
) -> int:
    """A validator's end: measures the snapshots that it gets, until the training ranks end or are lost.

    Returns how many it has measured.
    """
    number, num_measured = torch.empty(1, dtype=torch.int64), 0
    buffers: list[SnapshotBuffer] = []
    try:
        while True:
            channels[0].receive(number).wait()
            if int(number) == END:
                return num_measured
            buffers = buffers or [SnapshotBuffer(store.get(layout_key(rank)).decode()) for rank in range(len(channels))]
            arriving = [channel.receive(buffer.packed) for channel, buffer in zip(channels, buffers, strict=True)]
            for message in arriving:
                message.wait()
            tensors = whole_tensors(piece for buffer in buffers for piece in buffer.pieces())
            measures = measure(int(number), tensors)
            channels[0].send(torch.tensor(measures, dtype=torch.float64)).wait()
            num_measured += 1
    except LostRankError:
        return num_measured
