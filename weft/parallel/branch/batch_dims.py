"""Finds where a model's tensors have their samples, by tracing it with a rank's samples and with those of all ranks.

If the ranks of `branch` have different samples, operations outside of branches run on a rank's own samples, and those
of branches on the samples of all ranks. Two traces of the same forward, with b and with degree · b samples, tell both
forms of every tensor. The dim that has b and degree · b entries is the one of samples. Numbers in the arguments of an
operation that differ between the traces (`x.view(len(x), -1)`) depend on the samples, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.errors import PlanError
from weft.inspection.nested_tensors import map_tensors
from weft.pipeline.trace import Trace
from weft.pipeline.trace_watch import RecordedTensor


@dataclass(frozen=True)
class BatchDims:
    """The dim of samples of each tensor that has one, by number, and the trace with the samples of all ranks.

    `mixed` tensors depend on the number of samples in another way, such as a dim of samples times tokens.
    """

    whole: Trace
    degree: int
    dims: Mapping[int, int]
    mixed: frozenset[int]

    def refuse_mixed(self, number: int, what: str) -> None:
        """Raise a PlanError if ranks cannot exchange samples of a tensor. `what` says where they would."""
        if number in self.dims:
            return
        form = list(self.whole.values[number].shape)
        reason = (
            f"the samples of a tensor {form} are not a dim of it"
            if number in self.mixed
            else f"a tensor {form} has no samples, and each rank would have another one"
        )
        raise PlanError(
            f"branch.batch = 'split' sends samples {what}, but there {reason}; let branches begin and end with "
            f"tensors [samples, ...], or use branch.batch = 'same'"
        )


def all_samples(given: Any, degree: int) -> Any:
    """Returns inputs with as many samples as all ranks have together, without their values, for a trace."""

    def enlarged(tensor: Tensor) -> Tensor:
        return tensor if not tensor.dim() else torch.cat([tensor.detach()] * degree)

    return map_tensors(enlarged, given)


def find_batch_dims(own: Trace, whole: Trace, degree: int) -> BatchDims:
    """Compares two traces of one forward, with a rank's samples and with those of all ranks."""
    pairs = zip(own.events, whole.events, strict=False)
    is_equal = len(own.events) == len(whole.events) and all(one == other for one, other in pairs)
    given = [own.values[number].shape[0] for number in own.inputs if own.values[number].shape]
    if not is_equal or not given:
        raise PlanError(
            "branch.batch = 'split' needs a forward that does the same for any number of samples"
            + (", and this one does not" if given else ", and this one is given no tensor [samples, ...]")
            + "; use branch.batch = 'same'"
        )
    dims, mixed = dict[int, int](), set[int]()
    for number, (one, other) in enumerate(zip(own.values, whole.values, strict=True)):
        if one.shape == other.shape:
            continue
        places = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if sizes[0] != sizes[1]]
        is_plain = len(one.shape) == len(other.shape) and [one.shape[dim] for dim in places] == [given[0]]
        if is_plain and other.shape[places[0]] == degree * given[0]:
            dims[number] = places[0]
        else:
            mixed.add(number)
    return BatchDims(whole, degree, dims, frozenset(mixed))


def with_sizes(live: Any, here: Any, there: Any, check: Callable[[Tensor, RecordedTensor], None]) -> Any:
    """Returns the live arguments of an operation, with the numbers of `here` where these depend on the samples.

    `here` and `there` are the operation's arguments in two traces with different numbers of samples: a number depends
    on the samples if it differs between them. `check` is called with each tensor, and what was recorded of it.
    """
    again = partial(with_sizes, check=check)
    if isinstance(here, RecordedTensor):
        check(live, here)
        return live
    if isinstance(live, (tuple, list)) and type(live) in (tuple, list, torch.Size):
        if not len(live) == len(here) == len(there):
            raise PlanError(
                "branch.batch = 'split': an operation takes a list whose length depends on the number of samples, "
                "which weft does not follow; use branch.batch = 'same'"
            )
        return type(live)(again(*items) for items in zip(live, here, there, strict=True))
    if isinstance(live, dict):
        return {key: again(value, here[key], there[key]) for key, value in live.items()}
    if isinstance(live, slice):
        ends = zip(*((one.start, one.stop, one.step) for one in (live, here, there)), strict=True)
        return slice(*(again(*values) for values in ends))
    return here if type(here) is int and type(there) is int and here != there else live
