"""A batch: any nested value of tensors whose first dim is the samples (a tuple, a dict, a dataclass)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from weft.errors import DataError
from weft.inspection.nested_tensors import map_tensors, tensors_in

Batch: TypeAlias = Any


def plain_batch(batch: Batch) -> Batch:
    """Returns a batch that is a mapping of any kind (transformers' BatchEncoding) as a dict; any other unchanged."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def num_samples(batch: Batch) -> int:
    """Returns the number of samples. Raises a DataError if tensors of the batch differ in it."""
    counts = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    if not counts:
        raise DataError(f"the batch ({type(batch).__name__}) has no tensor with samples; return tensors [samples, ...]")
    if len(counts) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(batch))
        raise DataError(
            f"tensors of the batch have different first dims ({shapes}), and every tensor must have all samples in its "
            f"first dim; repeat what samples share, or let the model make it"
        )
    return counts.pop()


def take_samples(batch: Batch, rows: Tensor | slice) -> Batch:
    """Returns a batch with only these samples. Tensors without dims and other values stay."""
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, batch)
