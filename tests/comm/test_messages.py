"""Messages between two ranks, also those that go through host memory because Gloo cannot send from a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import (
    Axis,
    Ledger,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    exchange,
    receive,
    reduce_scatter,
    send,
    sends_from_host,
    shift,
)
from weft.launch.local_ranks import run_local

pytestmark = pytest.mark.processes


class HostCopies:
    """Sends every tensor through a host copy, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _: dist.ProcessGroup | None, __: Tensor) -> bool:
        self.count += 1
        return True


def world(rank: int, ledger: Ledger, copies: HostCopies | None) -> Axis:
    axis = Axis("world", 2, rank, dist.group.WORLD, ledger)
    return axis if copies is None else replace(axis, through_host=copies)


def numbers(rank: int, shape: tuple[int, ...] = (3, 4)) -> Tensor:
    return torch.arange(12.0).reshape(shape) + 100 * rank


@pytest.mark.parametrize("through_host", [False, True])
def test_messages_bring_the_same_directly_and_through_the_host(through_host: bool) -> None:
    def rank(index: int) -> dict[str, Any]:
        ledger, copies, other = Ledger(), HostCopies() if through_host else None, 1 - index
        axis = world(index, ledger, copies)
        shifted, exchanged, received = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
        shift([shifted], [numbers(index)], axis).wait()
        exchange([(other, exchanged)], [(other, numbers(index) + 1)], axis).wait()
        arriving = receive(received, axis, other, "a message")
        sending = send(numbers(index) + 2, axis, other, "a message")
        arriving.wait()
        arriving.wait()  # again: does nothing
        sending.wait()
        found = [shifted, exchanged - 1, received - 2]
        assert ledger.entries()["world", "send"].num_bytes == 3 * 12 * 4
        return {"equal": [torch.equal(t, numbers(other)) for t in found], "copies": copies.count if copies else 0}

    assert run_local(rank, 2) == [{"equal": [True] * 3, "copies": 6 if through_host else 0}] * 2


def test_a_receive_through_the_host_fills_its_tensor_when_it_is_waited_for() -> None:
    """Also where a thread has waited for the message before, and where the tensor has gaps."""

    def rank(index: int) -> list[bool]:
        axis = world(index, Ledger(), HostCopies())
        if index == 0:
            gradient = numbers(0).t()  # not contiguous
            pending = send(gradient, axis, 1, "a message")
            gradient.zero_()  # a copy travels
            pending.wait()
            return [True]
        room = torch.zeros(4, 6)
        pending = receive(room[:, ::2], axis, 0, "a message")
        pending.block()
        before = bool((room == 0).all())
        pending.wait()
        return [before, torch.equal(room[:, ::2], numbers(0).t()), bool((room[:, 1::2] == 0).all())]

    assert run_local(rank, 2) == [[True], [True, True, True]]


def test_host_copies_are_for_gloo_and_tensors_on_gpus_alone() -> None:
    class OnGPU:
        is_cuda = True

    def rank(_: int) -> list[bool]:
        group, gpu = dist.group.WORLD, OnGPU()
        return [sends_from_host(group, gpu), sends_from_host(group, torch.ones(1)), sends_from_host(None, gpu)]

    assert run_local(rank, 2) == [[True, False, False]] * 2


def test_collectives_bring_the_same_directly_and_through_the_host() -> None:
    def rank(index: int) -> list[list[list[float]]]:
        found = []
        for copies in (None, HostCopies()):
            axis = world(index, Ledger(), copies)
            own, whole, part = numbers(index), torch.zeros(6, 4), torch.zeros(3, 2)
            summed, given = numbers(index), numbers(index)
            all_reduce(summed, axis).wait()
            all_gather(whole, own, axis).wait()
            reduce_scatter(part.view(-1), own.view(-1), axis).wait()
            traded = torch.zeros(4, 3)
            all_to_all(traded, numbers(index, (4, 3)), axis).wait()
            broadcast(given, axis, 1).wait()
            found.append([one.flatten().tolist() for one in (summed, whole, part, traded, given)])
            assert copies is None or copies.count == 8
        return found

    for directly, through_host in run_local(rank, 2):
        assert directly == through_host
