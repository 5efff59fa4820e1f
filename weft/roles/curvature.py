"""Curvature ranks: K-FAC's factors from training rank 0, and their damped inverses back.

Each layer belongs to one curvature rank. When inverses are due, training rank 0 sends each curvature rank the number of
its request and all factors of its layers, and gets back one message with their inverses and statistics. Nothing is
sent between requests, and curvature ranks keep nothing from one to the next: the sizes of layers are in the job's
store. The layers of a rank that is lost are inverted on training rank 0, by the same code, until the rank is back.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.comm.channel import PairChannel
from weft.errors import LostRankError
from weft.optim.kfac_layers import FactorSizes
from weft.optim.kfac_placement import NUM_STATISTICS, owners_of
from weft.optim.kfac_sub_grid import Factors, invert_message, pack_factors
from weft.roles.links import RoleLink, find_returned

CURVATURE = "curvature"
END = -1  # sent in place of a request's number when there are no more
_SIZES_KEY = "role/curvature/sizes"


class _Inversion:
    """A request to one curvature rank: the factors of its layers. `thread` brings the answer, or an error."""

    def __init__(self, sizes: Sequence[FactorSizes], factors: Tensor, answer_numel: int) -> None:
        self.sizes, self.factors = sizes, factors
        self.answer = factors.new_empty(answer_numel)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None


class CurvatureRanks:
    """Training rank 0's end: an `Inverter` over links to curvature ranks. `say` reports lost ranks."""

    def __init__(
        self,
        links: Sequence[RoleLink],
        own_digest: str,
        store: Store,
        sizes: Sequence[FactorSizes],
        dtype: torch.dtype,
        damping: float,
        timeout: timedelta,
        say: Callable[[str], None],
    ) -> None:
        self._links, self._digest, self._sizes, self._damping = links, own_digest, sizes, damping
        self._timeout, self._say = timeout, say
        owners = owners_of(sizes, len(links))
        self._layers = [[index for index, owner in enumerate(owners) if owner == link.number] for link in links]
        self._number, self._requests = 0, list[_Inversion]()
        store.set(_SIZES_KEY, _describe([[sizes[index] for index in own] for own in self._layers], dtype))

    def ask(self, factors: Sequence[Factors]) -> None:
        """Send each curvature rank the factors of its layers. Answers are awaited in threads: Gloo cannot be polled."""
        assert not self._requests, "an answer is outstanding"
        self._number += 1
        find_returned(self._links, self._digest, self._say)
        num_threads = torch.get_num_threads()
        for link, layers in zip(self._links, self._layers, strict=True):
            if not layers:
                continue
            sizes = [self._sizes[index] for index in layers]
            numel = sum(one.numel + NUM_STATISTICS for one in sizes)
            request = _Inversion(sizes, pack_factors([factors[index] for index in layers]), numel)
            request.thread = threading.Thread(target=self._run, args=(link, request, num_threads), daemon=True)
            request.thread.start()
            self._requests.append(request)

    def has_answer(self) -> bool:
        """Have the answers of all curvature ranks come?"""
        return all(one.thread is not None and not one.thread.is_alive() for one in self._requests)

    def take(self) -> Tensor:
        """Wait for all answers. Returns them as one message, in the order of layers."""
        found = dict[int, Tensor]()
        for request, layers in zip(self._requests, filter(None, self._layers), strict=True):
            assert request.thread is not None
            request.thread.join()
            if request.error is not None:
                raise request.error
            parts = request.answer.split([one.numel + NUM_STATISTICS for one in request.sizes])
            found |= dict(zip(layers, parts, strict=True))
        self._requests = []
        return torch.cat([found[index] for index in range(len(self._sizes))])

    def close(self) -> None:
        """Wait for what is outstanding, and tell the curvature ranks that there is no more."""
        if self._requests:
            self.take()
        for link in self._links:
            if link.channel is not None:
                with suppress(LostRankError):
                    link.channel.send(torch.tensor([END])).wait(self._timeout)

    def _run(self, link: RoleLink, request: _Inversion, num_threads: int) -> None:
        """What a thread does: get the answer, or keep the error for `take`."""
        try:
            torch.set_num_threads(num_threads)  # as in the thread that asks: OpenMP has a number for each
            self._answer(link, request)
        except BaseException as error:
            request.error = error

    def _answer(self, link: RoleLink, request: _Inversion) -> None:
        """Get a request's answer from its curvature rank, or compute it here if that rank is lost."""
        channel = link.channel
        if channel is not None:
            number = torch.tensor([self._number])
            try:
                messages = [channel.send(number), channel.send(request.factors), channel.receive(request.answer)]
                for message in messages:
                    message.wait(self._timeout)
                return
            except LostRankError as error:
                link.lose()
                self._say(f"{error}; training rank 0 inverts its factors, with the same result")
                # Gloo may still write to the tensor of a message that did not come in time.
                request.answer = request.answer.new_empty(len(request.answer))
        request.answer.copy_(invert_message(request.factors, request.sizes, self._damping))


def serve_curvature(channel: PairChannel, store: Store, number: int, damping: float) -> int:
    """A curvature rank's end: inverts what it is sent until training rank 0 ends or is lost.

    `number` is that of the curvature rank. Returns how many requests it has answered.
    """
    request, num_answered = torch.empty(1, dtype=torch.int64), 0
    try:
        while True:
            channel.receive(request).wait()
            if int(request) == END:
                return num_answered
            sizes, dtype = _read_sizes(store, number)
            factors = torch.empty(sum(one.numel for one in sizes), dtype=dtype)
            channel.receive(factors).wait()
            channel.send(invert_message(factors, sizes, damping)).wait()
            num_answered += 1
    except LostRankError:
        return num_answered


def _describe(parts: Sequence[Sequence[FactorSizes]], dtype: torch.dtype) -> str:
    """The sizes of each curvature rank's layers, and the dtype of factors, as JSON."""
    sizes = [[[one.groups, one.outputs, one.inputs] for one in part] for part in parts]
    return json.dumps({"dtype": str(dtype).removeprefix("torch."), "sizes": sizes})


def _read_sizes(store: Store, number: int) -> tuple[list[FactorSizes], torch.dtype]:
    table = json.loads(store.get(_SIZES_KEY).decode())
    return [FactorSizes(*one) for one in table["sizes"][number]], getattr(torch, table["dtype"])
