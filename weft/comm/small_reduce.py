"""All-reduces of small tensors in one or two calls, as `cluster/small_choice.py` describes them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from weft.cluster.small_choice import Strategy, padded_to_parts
from weft.comm import collectives
from weft.comm.collectives import Axis, Pending


def small_steps(tensor: Tensor, axis: Axis, strategy: Strategy) -> Iterator[Pending]:
    """Sum a contiguous `tensor` in place over the axis by "one_shot" or "two_shot"; each call needs the one before."""
    return _one_shot(tensor.view(-1), axis) if strategy == "one_shot" else _two_shot(tensor.view(-1), axis)


def _one_shot(flat: Tensor, axis: Axis) -> Iterator[Pending]:
    every = flat.new_empty(axis.degree * flat.numel())
    yield collectives.all_gather(every, flat, axis)
    first, *others = every.view(axis.degree, -1)
    flat.copy_(first)
    for part in others:  # in the order of ranks, so sums have the same bits on all of them
        flat.add_(part)


def _two_shot(flat: Tensor, axis: Axis) -> Iterator[Pending]:
    number = padded_to_parts(flat.numel() * flat.element_size(), axis.degree) // flat.element_size()
    whole = flat
    if number > flat.numel():
        whole = flat.new_zeros(number)
        whole[: flat.numel()].copy_(flat)
    part = flat.new_empty(number // axis.degree)
    yield collectives.reduce_scatter(part, whole, axis)
    yield collectives.all_gather(whole, part, axis)
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])
