"""Collectives of the tensor axes in one block, in closed form for the planner.

They are those of `cost.py`, from a block's matmuls alone: without norms' moments, the embedding, the loss, and uneven
shares. A sum over x counts as an all-reduce with `tensor.sequence` too, because the
reduce-scatter and the all-gather that replace it take as long together.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.plan import Plan
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import Call
from weft.sharding.layout import COMPUTE_DTYPE


def block_calls(block: BlockPass, plan: Plan) -> Iterator[Call]:
    """Yields the collectives around a block's matmuls, in AxoNN's terms.

    Outputs are summed over the axis that splits the inputs, and the gradient of the input over the axis that splits the
    outputs.
    """
    x, y, software = plan.tensor.x, plan.tensor.y, block.software
    element_bytes = COMPUTE_DTYPE[plan.precision].itemsize
    scale = element_bytes * block.micro_batch / plan.num_parts("tokens")  # bytes of an element of all own tokens
    is_recomputed = plan.memory.recompute == "full" and plan.memory.repeats_collectives and block.is_block
    for product in block.work.products:
        over_out, over_in = (y, x) if product.kind == "row" else (x, y)
        out_axis, in_axis = ("y", "x") if product.kind == "row" else ("x", "y")
        if product.kind == "whole":
            continue
        if over_in > 1:
            num_bytes = scale * product.rows * product.outputs / over_out
            is_again = is_recomputed and not (product.is_last and software.stops_early)
            yield from _sums(in_axis, num_bytes, is_again, plan, software)
        if over_out > 1 and product.enters:
            num_bytes = scale * product.rows * product.inputs / over_in
            yield Call(out_axis, "all_reduce", num_bytes, "backward", copies=_copies("all_reduce", plan, software))
            if plan.tensor.regather and out_axis == "x":
                yield Call(out_axis, "all_gather", num_bytes, "backward", beside="input gradients")
            elif gathers_again(plan, software):
                yield Call(out_axis, "all_gather", num_bytes, "backward", copies=_copies("all_gather", plan, software))


def _sums(axis: str, num_bytes: float, is_again: bool, plan: Plan, software: Software) -> Iterator[Call]:
    """Yields the sums of a layer's outputs, in forward and if `is_again` in backward."""
    operations = [("all_reduce", num_bytes)]
    if gathers_fp8(plan, software) and axis == "x":
        operations = [("reduce_scatter", num_bytes), ("all_gather", num_bytes / 2)]
    for phase in ("forward", "backward") if is_again else ("forward",):
        for operation, size in operations:
            yield Call(axis, operation, size, phase, copies=_copies(operation, plan, software))  # type: ignore[arg-type]


def _copies(operation: str, plan: Plan, software: Software) -> int:
    """Returns the number of copies of gathered and scattered tensors."""
    if not (software.copies_sequence and plan.tensor.sequence):
        return 0
    return 2 if operation == "all_reduce" else 1


def gathers_fp8(plan: Plan, software: Software) -> bool:
    """Are tensors cast to fp8 before they are gathered along the sequence?"""
    return software.fp8 == "tensor" and plan.tensor.sequence


def gathers_again(plan: Plan, software: Software) -> bool:
    """Does selective recompute of matmuls gather the regions' inputs again?"""
    return plan.memory.recompute == "selective" and software.selective == "other" and plan.tensor.sequence
