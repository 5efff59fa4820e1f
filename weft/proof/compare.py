"""Compares the results of a rank with those of the unsplit model, and the unsplit model with itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.proof.report import nan_as_inf
from weft.proof.sequential import SequentialResult
from weft.sharding.layout import ParameterPart

# Errors of tensors much smaller than the largest one are relative to this fraction of the largest. For example, the
# gradient of an attention key's bias is zero in theory and rounding noise in floating point.
FLOOR = 1e-6
_LEAST = 1e-300  # what errors are relative to where all that is expected is zero, infinite or NaN


class Worst(NamedTuple):
    """The largest error, and where it is."""

    error: float
    where: str


class Pair(NamedTuple):
    """A tensor, the one that it should equal, and the largest absolute value that its error is relative to.

    Infinite and NaN elements must be at the same places on both sides: there the difference is infinite or NaN.
    """

    name: str
    found: Tensor
    expected: Tensor
    scale: float


def worst_pair(pairs: Iterable[Pair], largest: float) -> Worst:
    """Returns the largest relative error of the pairs. `largest` is the largest scale, of which `FLOOR` counts."""
    worst = Worst(0.0, "-")
    for pair in pairs:
        difference = _difference(pair.found, pair.expected)
        error = difference / max(pair.scale, FLOOR * largest, _LEAST) if difference else 0.0
        worst = max(worst, Worst(error, pair.name), key=lambda one: nan_as_inf(one.error))
    return worst


def _difference(found: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute difference. Infinite and NaN elements that are the same on both sides are equal."""
    if not found.numel():
        return 0.0
    one, other = found.double(), expected.double()
    is_same = (one == other) | ((one != one) & (other != other))
    return float((one - other).abs().masked_fill(is_same, 0.0).max())


def largest_of(tensors: Iterable[Tensor]) -> float:
    """Returns the largest absolute value of all finite elements; 0 without any.

    An infinite one would make every error relative to it nothing, and NaN would make every error NaN.
    """
    sizes = (tensor.double().abs() for tensor in tensors if tensor.numel())
    return max((float(size.masked_fill(~size.isfinite(), 0.0).max()) for size in sizes), default=0.0)


def worst_number(found: Sequence[float], expected: Sequence[float], names: Sequence[str] = ()) -> Worst:
    """Returns the largest relative error of numbers. `names` are by default those of steps."""
    errors = [_error(one, other) for one, other in zip(found, expected, strict=True)]
    worst = max(range(len(errors)), key=lambda index: nan_as_inf(errors[index]))
    return Worst(errors[worst], names[worst] if names else f"step {worst + 1}")


def _error(found: float, expected: float) -> float:
    if found == expected or (found != found and expected != expected):  # both are NaN if no label counts
        return 0.0
    return abs(found - expected) / max(abs(expected), _LEAST)


def worst_piece(found: Iterable[tuple[ParameterPart, Tensor]], expected: Mapping[str, Tensor]) -> Worst:
    """Returns the largest error of parts of parameters, or of their gradients. One that the unsplit model does not have
    must be zero.
    """

    def pair(part: ParameterPart, tensor: Tensor) -> Pair:
        name, cut = part.parameter.name, part.parameter.cut
        whole = expected.get(name)
        if whole is None:
            return Pair(name, tensor, torch.zeros_like(tensor), 0.0)
        local = (whole if cut is None else cut.take(whole)).flatten()[part.start : part.stop]
        return Pair(name, tensor, local, largest_of([whole]))

    largest = largest_of(expected.values()) or 1.0
    return worst_pair((pair(part, tensor) for part, tensor in found), largest)


def worst_buffer(found: Iterable[tuple[str, Tensor]], expected: SequentialResult) -> Worst:
    """Returns the largest error of buffers.

    Small ones are relative to the largest one that forwards change: running means of 1e-15 are noise, and large
    constants (masks) say nothing about them.
    """
    changed = [expected.buffers[name] for name in expected.changed]
    largest = largest_of(tensor for tensor in changed if tensor.is_floating_point())
    pairs = (Pair(name, tensor, own := expected.buffers[name], largest_of([own])) for name, tensor in found)
    return worst_pair(pairs, largest)


def worst_result(pairs: Sequence[tuple[Tensor, Tensor]], largest: float) -> Worst:
    """Returns the largest error of the tensors that a model returned; pairs of those found and expected."""
    named = (Pair(f"tensor {i + 1}", one, other, largest_of([other])) for i, (one, other) in enumerate(pairs))
    return worst_pair(named, largest)


def worst_tensor(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest error of tensors by name; infinity if some are only on one side."""
    if set(found) != set(expected):
        return float("inf")
    pairs = (Pair(name, found[name], tensor, largest_of([tensor])) for name, tensor in expected.items())
    return worst_pair(pairs, largest_of(expected.values())).error


def noise_of(one: SequentialResult, other: SequentialResult, measures: Sequence[str]) -> dict[str, float]:
    """Returns how far the unsplit model is from itself, by quantity."""

    outputs = [pair for pairs in zip(other.outputs, one.outputs, strict=True) for pair in zip(*pairs, strict=True)]
    return {
        "loss": worst_number(other.losses, one.losses).error,
        "grad_norm": worst_number(other.norms, one.norms).error,
        "gradient": worst_tensor(other.gradients, one.gradients),
        "parameter": worst_tensor(other.parameters, one.parameters),
        "buffer": worst_buffer(other.buffers.items(), one).error,
        "evaluation": worst_number(other.measured, one.measured, measures).error,
        "result": worst_result(outputs, largest_of(tensor for tensors in one.outputs for tensor in tensors)).error,
    }
