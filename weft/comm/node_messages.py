"""Collectives between nodes that are made of messages, in the rounds of `cluster/rounds.py`.

Each function is a sequence of operations under way (`Pending`); the caller waits for one before it asks for the next.
Sums are made in an order that follows from the rounds alone, so they do not depend on which message arrives first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from weft.cluster.rounds import Algorithm, exchange_rounds, gather_rounds
from weft.comm.collectives import Axis, Pending, Reduction, exchange

_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def gather(whole: Tensor, part: Tensor, axis: Axis, algorithm: Algorithm) -> Iterator[Pending]:
    """Fill `whole` with the parts of all ranks in order."""
    held = part.new_empty(axis.degree, part.numel())
    held[0].copy_(part.view(-1))
    for distance, first, count in gather_rounds(algorithm, axis.degree):
        ours, theirs = held[first - distance : first - distance + count], held[first : first + count]
        yield _pass(theirs, ours, axis, -distance)
    whole.view(axis.degree, -1).copy_(_rotated(held, axis.index))


def reduce_scatter(
    part: Tensor, whole: Tensor, axis: Axis, algorithm: Algorithm, reduction: Reduction = "sum"
) -> Iterator[Pending]:
    """Reduce `whole` over the axis and write this rank's part of the result to `part`."""
    held = _rotated(whole.view(axis.degree, -1), -axis.index).contiguous()
    for distance, first, count in reversed(gather_rounds(algorithm, axis.degree)):
        arrived = torch.empty_like(held[:count])
        yield _pass(arrived, held[first : first + count], axis, distance)
        sums = held[first - distance : first - distance + count]
        _COMBINE[reduction](sums, arrived, out=sums)
    part.view(-1).copy_(held[0])


def all_reduce(tensor: Tensor, axis: Axis, algorithm: Algorithm, reduction: Reduction = "sum") -> Iterator[Pending]:
    """Reduce `tensor`, whose size the axis divides, in place: a reduce-scatter and a gather."""
    part = tensor.new_empty(tensor.numel() // axis.degree)
    yield from reduce_scatter(part, tensor, axis, algorithm, reduction)
    yield from gather(tensor, part, axis, algorithm)


def all_to_all(received: Tensor, sent: Tensor, axis: Axis, algorithm: Algorithm) -> Iterator[Pending]:
    """Send the i-th part of `sent` to rank i, and receive its part for this rank."""
    held = _rotated(sent.view(axis.degree, -1), -axis.index).contiguous()  # by the distance to the receiver
    for distance, offsets in exchange_rounds(algorithm, axis.degree):
        ours = held[list(offsets)]
        theirs = torch.empty_like(ours)
        yield _pass(theirs, ours, axis, distance)
        held[list(offsets)] = theirs
    # Now held[offset] comes from the rank at -offset.
    received.view(axis.degree, -1).copy_(_rotated(held.flip(0), axis.index + 1))


def _pass(received: Tensor, sent: Tensor, axis: Axis, distance: int) -> Pending:
    """Send to the rank at +distance in the circle, and receive from the one at -distance."""
    after, before = (axis.index + distance) % axis.degree, (axis.index - distance) % axis.degree
    return exchange([(before, received)], [(after, sent)], axis)


def _rotated(blocks: Tensor, by: int) -> Tensor:
    """Returns the blocks moved by `by` places in the circle."""
    return blocks.roll(by, 0)
