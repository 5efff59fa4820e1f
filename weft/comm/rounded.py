"""Gathers and reductions whose tensors are rounded for the link: to bf16, or to int8 or fp8 with a scale per block.

    all_gather       each rank sends its rounded part
    reduce_scatter   an all-to-all of rounded parts, which the receiver adds up in the order of ranks, not rounded again
    all_reduce       both: the sums are rounded once more for the gather

A number is thus rounded once for a gather, once for a reduce-scatter and twice for an all-reduce, however many ranks
there are: rings of a library would round partial sums at every hop. All ranks use the rounded parts, their own
included, so the results are equal on all of them. A block with a number that is not finite has NaN in the result. -0.0
stays -0.0, which says that a parameter has no gradient (`sharding/whole_gradient.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.cluster.wire_formats import BLOCK, Wire, message_bytes
from weft.comm import hierarchical
from weft.comm.collectives import Axis, Pending
from weft.comm.hierarchical import Chain

_MINUS_ZERO = -128  # no other number has this code
_LARGEST = {"int8": 127.0, "fp8": 448.0}


def all_gather(whole: Tensor, part: Tensor, axis: Axis, wire: Wire = "exact") -> Pending:
    """Fill `whole` with the parts of all ranks in order, each rounded for the link."""
    if wire == "exact" or axis.degree == 1:
        return hierarchical.all_gather(whole, part, axis)
    return Chain(_gather(whole, part, axis, wire))


def reduce_scatter(part: Tensor, whole: Tensor, axis: Axis, wire: Wire = "exact") -> Pending:
    """Sum `whole`, rounded for the link, over the axis, and write this rank's part of the sum to `part`."""
    if wire == "exact" or axis.degree == 1:
        return hierarchical.reduce_scatter(part, whole, axis)
    return Chain(_reduce_scatter(part, whole, axis, wire))


def all_reduce(tensor: Tensor, axis: Axis, wire: Wire = "exact") -> Pending:
    """Sum `tensor` in place over the axis; its elements and the sums are rounded for the link."""
    if wire == "exact" or axis.degree == 1:
        return hierarchical.all_reduce(tensor, axis)
    return Chain(_all_reduce(tensor, axis, wire))


def _gather(whole: Tensor, part: Tensor, axis: Axis, wire: Wire) -> Iterator[Pending]:
    sent = encode(part.detach().reshape(1, -1), wire)
    received = sent.new_empty(axis.degree, sent.shape[1])
    yield hierarchical.all_gather(received.view(-1), sent.view(-1), axis)
    whole.view(axis.degree, -1).copy_(decode(received, part.numel(), wire))


def _reduce_scatter(part: Tensor, whole: Tensor, axis: Axis, wire: Wire) -> Iterator[Pending]:
    sent = encode(whole.detach().reshape(axis.degree, -1), wire)
    received = torch.empty_like(sent)
    yield hierarchical.all_to_all(received, sent, axis)
    total = decode(received[:1], part.numel(), wire)
    for row in received[1:]:  # in the order of ranks
        total += decode(row.unsqueeze(0), part.numel(), wire)
    part.view(-1).copy_(total.view(-1))


def _all_reduce(tensor: Tensor, axis: Axis, wire: Wire) -> Iterator[Pending]:
    flat = tensor.detach().view(-1)
    part = flat.new_empty(-(-flat.numel() // axis.degree))
    padded = flat.new_zeros(part.numel() * axis.degree)
    padded[: flat.numel()].copy_(flat)
    yield from _reduce_scatter(part, padded, axis, wire)
    yield from _gather(padded, part, axis, wire)
    flat.copy_(padded[: flat.numel()])


def encode(rows: Tensor, wire: Wire) -> Tensor:
    """Encodes [rows, n] numbers as [rows, message_bytes(n)] uint8: the rounded numbers, then the scales of their
    blocks.
    """
    count = rows.shape[1]
    if wire == "bf16":
        return rows.to(torch.bfloat16).view(torch.uint8)
    blocks = _blocks(rows.float())
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / _LARGEST[wire])
    values = blocks / scales
    if wire == "int8":
        minus_zero = (blocks == 0) & blocks.signbit()
        codes = values.round().clamp(-127, 127).masked_fill(minus_zero, _MINUS_ZERO).to(torch.int8)
    else:
        codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    packed = codes.view(torch.uint8).flatten(1)[:, :count]
    return torch.cat([packed, scales.squeeze(-1).contiguous().view(torch.uint8)], dim=1)


def decode(messages: Tensor, count: int, wire: Wire) -> Tensor:
    """Decodes [rows, message_bytes(count)] uint8 to [rows, count] float32."""
    if wire == "bf16":
        return messages.view(torch.bfloat16).float()
    assert messages.shape[1] == message_bytes(count, wire)
    scales = messages[:, count:].clone(memory_format=torch.contiguous_format).view(torch.float32).unsqueeze(-1)
    codes = messages[:, :count].contiguous()
    if wire == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        whole = codes.view(torch.int8)
        values = whole.float().masked_fill(whole == _MINUS_ZERO, -0.0)
    return (_blocks(values) * scales).flatten(1)[:, :count]


def _blocks(rows: Tensor) -> Tensor:
    """Reshapes [rows, n] to [rows, blocks, BLOCK], padded with zeros."""
    missing = -rows.shape[1] % BLOCK
    return torch.nn.functional.pad(rows, (0, missing)).view(rows.shape[0], -1, BLOCK)
