"""All-reduces of small tensors in one or two calls, or in one kernel over symmetric memory (`cluster/small_choice.py`).

With symmetric memory all ranks of an axis have a buffer at which the others can read (`symmetric_buffer.py`), over
NVLink or on one GPU. It is made once, for the largest sum. Ranks of several nodes, or of GPUs that cannot read each
other's memory, have none, and neither have ranks that share a GPU, unless the variable
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from weft.cluster.small_choice import Strategy, padded_to_parts
from weft.comm import collectives
from weft.comm.collectives import Axis, Pending
from weft.comm.ledger import Ledger
from weft.comm.symmetric_buffer import SymmetricBuffer


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


MAX_BYTES = 1 << 20  # of a sum


def symmetric_sum(tensor: Tensor, axis: Axis, strategy: Strategy) -> Pending:
    """Sum a tensor in place over the axis, whose buffer takes it. The ledger counts an all-reduce."""
    assert axis.symmetric is not None
    collectives.record(axis, "all_reduce", tensor)
    axis.symmetric.sum(tensor, strategy)
    return Pending(None, axis, "all_reduce")


def with_symmetric_memory(axis: Axis, device: torch.device) -> tuple[Axis, str | None]:
    """Returns the axis with a symmetric buffer, or as it is with the reason why it has none. All ranks of the axis must
    call it, and get the same.
    """
    reason = _reason_without(axis, device)
    if reason is not None:
        return axis, reason
    buffer: SymmetricBuffer | None = None
    try:
        buffer = _rendezvous(axis, device)
    except (RuntimeError, ImportError, AttributeError, NotImplementedError) as error:
        reason = f"torch does not give it ({(str(error).splitlines() or [type(error).__name__])[0]})"
    has_it = torch.tensor([int(buffer is not None)], device=device)
    collectives.all_reduce(has_it, replace(axis, ledger=Ledger()), "min").wait()
    if not int(has_it):
        return axis, reason or "torch does not give it to another rank"
    return replace(axis, symmetric=buffer), None


def _reason_without(axis: Axis, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"these ranks compute on {device.type}, and it is memory of GPUs"
    if axis.levels is not None:
        return "the ranks that add up are on several nodes"
    return None


def _rendezvous(axis: Axis, device: torch.device) -> SymmetricBuffer:
    import torch.distributed._symmetric_memory as symmetric_memory

    assert axis.group is not None
    name = axis.group.group_name
    buffer = symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(buffer, name)
    return SymmetricBuffer(buffer, name, axis.degree)
