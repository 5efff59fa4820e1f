"""Small sums over symmetric memory: one kernel adds up what the ranks have, reading the memory of their GPUs.

All ranks of an axis have a buffer at which the others can read (`symmetric_buffer.py`), over NVLink or on one GPU. It
is made once, for the largest sum. Ranks of several nodes, or of GPUs that cannot read each other's memory, have none,
and neither have ranks that share a GPU, unless the variable TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.cluster.small_choice import Strategy
from weft.comm import collectives
from weft.comm.collectives import Axis, Pending
from weft.comm.ledger import Ledger
from weft.comm.symmetric_buffer import SymmetricBuffer

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
