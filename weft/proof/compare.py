"""Compares the results of a rank with those of the unsplit model, and the unsplit model with itself.

All comparisons are lists of pairs. A pair's error is relative to the largest value of its own tensor, and its tolerance
is that tensor's own: 1e-9, or a multiple of its noise if the noise was measured. So a tensor that is all rounding
raises the tolerance of no other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.proof.report import Worst, nan_as_inf, severity
from weft.proof.sequential import SequentialResult
from weft.sharding.layout import ParameterPart

# Errors of tensors much smaller than the largest one are relative to this fraction of the largest. For example, the
# gradient of an attention key's bias is zero in theory and rounding noise in floating point.
FLOOR = 1e-6
_LEAST = 1e-300  # what errors are relative to where all that is expected is zero, infinite or NaN
Noise = Mapping[str, float]  # of each tensor of a quantity: the largest absolute difference of the unsplit model's runs


class Pair(NamedTuple):
    """A tensor, the one that it should equal, and the largest absolute value that its error is relative to.

    Infinite and NaN elements must be at the same places on both sides: there the difference is infinite or NaN.
    """

    name: str
    found: Tensor
    expected: Tensor
    scale: float


class Pairs(NamedTuple):
    """All pairs of a quantity. `least` is what errors are relative to in tensors that are smaller."""

    pairs: Sequence[Pair]
    least: float

    def differences(self) -> Iterator[tuple[Pair, float, float]]:
        """Yields each pair, its largest absolute difference, and what that is relative to."""
        for pair in self.pairs:
            yield pair, _difference(pair.found, pair.expected), max(pair.scale, self.least, _LEAST)

    def worst(self, noise: Noise | None = None) -> Worst:
        """Returns the error that is the largest in units of its own tolerance, which the noise may raise."""
        worst, own = Worst(0.0, "-", 0.0), noise or {}
        for pair, difference, scale in self.differences():
            error = difference / scale if difference else 0.0
            worst = max(worst, Worst(error, pair.name, own.get(pair.name, 0.0) / scale), key=severity)
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


def numbers(found: Sequence[float], expected: Sequence[float], names: Sequence[str] = ()) -> Pairs:
    """Returns pairs of numbers. `names` are by default those of steps. Both may be NaN, if no label counts."""
    named = names or [f"step {number + 1}" for number in range(len(expected))]
    pairs = zip(named, found, expected, strict=True)
    return Pairs([Pair(name, _number(one), _number(other), abs(other)) for name, one, other in pairs], 0.0)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def pieces(found: Iterable[tuple[ParameterPart, Tensor]], expected: Mapping[str, Tensor]) -> Pairs:
    """Returns pairs of parts of parameters, or of their gradients. One that the unsplit model does not have must be
    zero.
    """

    def pair(part: ParameterPart, tensor: Tensor) -> Pair:
        name, cut = part.parameter.name, part.parameter.cut
        whole = expected.get(name)
        if whole is None:
            return Pair(name, tensor, torch.zeros_like(tensor), 0.0)
        local = (whole if cut is None else cut.take(whole)).flatten()[part.start : part.stop]
        return Pair(name, tensor, local, largest_of([whole]))

    return Pairs([pair(part, tensor) for part, tensor in found], FLOOR * (largest_of(expected.values()) or 1.0))


def buffers(found: Iterable[tuple[str, Tensor]], expected: SequentialResult) -> Pairs:
    """Returns pairs of buffers.

    Small ones are relative to the largest one that forwards change: running means of 1e-15 are noise, and large
    constants (masks) say nothing about them.
    """
    changed = [expected.buffers[name] for name in expected.changed]
    largest = largest_of(tensor for tensor in changed if tensor.is_floating_point())
    pairs = [Pair(name, tensor, own := expected.buffers[name], largest_of([own])) for name, tensor in found]
    return Pairs(pairs, FLOOR * largest)


def results(found: Iterable[tuple[str, Tensor, Tensor]], largest: float) -> Pairs:
    """Returns pairs of the tensors that a model returned: (name, found, expected)."""
    return Pairs([Pair(name, one, other, largest_of([other])) for name, one, other in found], FLOOR * largest)


def tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Pairs:
    """Returns pairs of tensors by name. One that is only on one side is compared with NaN."""
    nothing = torch.tensor(float("nan"))
    pairs = [
        Pair(name, found.get(name, nothing), other := expected.get(name, nothing), largest_of([other]))
        for name in {**expected, **found}
    ]
    return Pairs(pairs, FLOOR * largest_of(expected.values()))


def training(one: SequentialResult, other: SequentialResult) -> dict[str, Pairs]:
    """Returns the pairs of the training steps of two runs of the unsplit model, by quantity."""
    return {
        "loss": numbers(one.losses, other.losses),
        "grad_norm": numbers(one.norms, other.norms),
        "gradient": tensors(one.gradients, other.gradients),
        "parameter": tensors(one.parameters, other.parameters),
        "buffer": buffers(one.buffers.items(), other),
    }


def evaluation(one: SequentialResult, other: SequentialResult, measures: Sequence[str]) -> dict[str, Pairs]:
    """Returns the pairs of the evaluations of two runs of the unsplit model on the same parts of a batch."""
    outputs = [
        (f"tensor {index + 1}", *pair)
        for parts in zip(one.outputs, other.outputs, strict=True)
        for index, pair in enumerate(zip(*parts, strict=True))
    ]
    return {
        "evaluation": numbers(one.measured, other.measured, measures),
        "result": results(outputs, largest_of(tensor for part in other.outputs for tensor in part)),
    }


def noise_of(
    runs: Iterable[SequentialResult], expected: SequentialResult, measures: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Returns how far runs of the unsplit model are from each other: by quantity, the noise of each tensor."""
    noise: dict[str, dict[str, float]] = {}
    for run in runs:
        for quantity, pairs in (training(run, expected) | evaluation(run, expected, measures)).items():
            own = noise.setdefault(quantity, {})
            for pair, difference, _ in pairs.differences():
                own[pair.name] = max(own.get(pair.name, 0.0), nan_as_inf(difference))
    return noise
