"""One linear of a served model, with the norm in front of it and what follows: silu(gate) * up, or a residual.

Its kind is chosen when the model is built (`served_linear`), and the block then calls it as `linear(hidden)` or
`linear(hidden, residual)`:

    PlainLinear      a weight as it was read
    QuantisedLinear  a weight in fewer bits
    AdaptedLinear    a weight as it was read, with the updates of the tokens' adapters
    ShardedLinear    a rank's part of either, as training's tensor axes cut it (`parallel/tensor/cuts.py`):
                       column  [out / x, in / y]  this rank's outputs; partial sums over the inputs are added over y
                       row     [out / y, in / x]  takes what columns gave; partial sums are added over x

Every rank of an axis makes the same calls in the same order. Kernels for a number of rows follow from
`serve/weights/fast_path.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm import Axis, all_reduce
from weft.models.attention import RMSNorm
from weft.parallel.tensor.norm import split_norm
from weft.serve.weights.fast_path import FEW_ROWS, Place, fast_path, kernel_of
from weft.serve.weights.packed_linear import PackedLinear
from weft.serve.weights.steps import WITH_NORM, AfterProduct, plain_gate, plain_norm

Transform = Callable[[Tensor], Tensor]


class Updates(Protocol):
    """The updates of adapters to a linear."""

    def of(self, hidden: Tensor) -> Tensor | None:
        """Return what is added to the result for inputs [tokens, in]; None if no token has an adapter."""


@dataclass(frozen=True)
class ModelAxes:
    """The axes over which ranks hold parts of each layer; None where they do not."""

    x: Axis | None = None
    y: Axis | None = None
    expert: Axis | None = None
    context: Axis | None = None  # over pages of the cache, not over weights


def summed(value: Tensor, axis: Axis | None) -> Tensor:
    """Return the sum of a value over an axis, in place."""
    if axis is not None:
        all_reduce(value, axis).wait()
    return value


def served_norm(norm: nn.Module, place: Place, features: Axis | None = None) -> Transform:
    """Return the function of a norm for hidden states [tokens, hidden], which may be split over an axis."""
    if features is not None:
        return partial(split_norm, norm, features)
    kernel = kernel_of(fast_path("norm", place), 1) if isinstance(norm, RMSNorm) else "module"
    if kernel == "kernel":
        from weft.serve.model.fused_kernel import norm_by_kernel

        return lambda hidden: norm_by_kernel(hidden, norm.weight, norm.eps)  # type: ignore[arg-type]
    return partial(plain_norm, norm=norm) if kernel == "few calls" else norm  # type: ignore[arg-type]


def served_gate(place: Place) -> Transform:
    """Return the function silu(gate) * up of [tokens, gate and up end to end]."""
    if kernel_of(fast_path("gate", place), 1) == "plain":
        return plain_gate
    from weft.serve.model.fused_kernel import gated_by_kernel

    return gated_by_kernel


class PlainLinear:
    """A linear whose weight is as it was read."""

    def __init__(self, layer: nn.Linear, place: Place, norm: nn.Module | None = None, is_gated: bool = False) -> None:
        self.layer, self.place, self.norm, self.is_gated = layer, place, norm, is_gated
        self.normed = None if norm is None else served_norm(norm, place)
        self.gate = served_gate(place)
        self.choose(False)

    def choose(self, takes_vectors: bool) -> None:
        """Choose the kernel for one row. On a CPU, `takes_vectors` says whether it is multiplied as a vector."""
        kernel = kernel_of(fast_path("linear", self.place, measured_rows=int(takes_vectors)), 1)
        has_norm = self.norm is None or isinstance(self.norm, RMSNorm)
        self.for_row = kernel if kernel != "row" or has_norm else "matmul"

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return linear(norm(hidden)) of [tokens, in], and what follows. The residual may be overwritten."""
        layer = self.layer
        if self.for_row == "row" and len(hidden) == 1:
            from weft.serve.model.fused_kernel import row_linear_by_kernel

            return row_linear_by_kernel(hidden, layer.weight, layer.bias, residual, self.norm, self.is_gated)  # type: ignore[arg-type]
        if self.normed is not None:
            hidden = self.normed(hidden)
        bias = layer.bias
        if residual is None:
            out = self.product(hidden, bias)
            return self.gate(out) if self.is_gated else out
        if bias is not None:
            return residual + self.product(hidden, bias)
        if self.for_row == "vector" and len(hidden) == 1:
            return self.product(hidden, residual[0])
        return residual.addmm_(hidden, layer.weight.T)

    def product(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return hidden @ weight.T + bias by torch."""
        weight = self.layer.weight
        if self.for_row == "vector" and len(hidden) == 1:
            return (torch.mv(weight, hidden[0]) if bias is None else torch.addmv(bias, weight, hidden[0]))[None]
        return F.linear(hidden, weight, bias)


class AdaptedLinear(PlainLinear):
    """A linear with the updates of adapters to it."""

    def __init__(self, plain: PlainLinear, updates: Updates) -> None:
        super().__init__(plain.layer, plain.place, plain.norm, plain.is_gated)
        self.choose(plain.for_row == "vector")
        self._updates = updates

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        given = hidden if self.normed is None else self.normed(hidden)
        out, added = self.product(given, self.layer.bias), self._updates.of(given)
        out = out if added is None else out + added
        out = self.gate(out) if self.is_gated else out
        return out if residual is None else residual + out


class QuantisedLinear:
    """A linear whose weight is in fewer bits."""

    def __init__(
        self, layer: PackedLinear, place: Place, norm: nn.Module | None = None, is_gated: bool = False
    ) -> None:
        layer.choose(place)
        self.layer, self.norm, self.is_gated, self.gate = layer, norm, is_gated, served_gate(place)
        self._normed = None if norm is None else served_norm(norm, place)
        self._rms = norm if isinstance(norm, RMSNorm) else None

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        layer, rows = self.layer, hidden.shape[0]
        kernel = kernel_of(layer.paths, rows)
        after = AfterProduct(layer.bias if layer.has_bias else None, residual, self.is_gated)
        if kernel in WITH_NORM:
            given = hidden if self._rms is not None or self._normed is None else self._normed(hidden)
            return layer.multiply(given, kernel, after, self._rms)
        if self._rms is not None and rows <= FEW_ROWS and kernel != "codes":
            hidden = self._rms(hidden)  # rounded as the kernels of few rows round it
        elif self._normed is not None:
            hidden = self._normed(hidden)
        return layer.multiply(hidden, kernel, after)

    def product(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return hidden @ weight.T + bias."""
        return self.layer.multiply(hidden, kernel_of(self.layer.paths, len(hidden)), AfterProduct(bias))


class ShardedLinear:
    """A linear of which this rank has a part, whose partial sums are added over an axis."""

    def __init__(self, own: PlainLinear | QuantisedLinear, axis: Axis, normed: Transform | None) -> None:
        self.layer, self.own, self._axis, self._normed = own.layer, own, axis, normed

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        given, bias = hidden if self._normed is None else self._normed(hidden), self.layer.bias
        out = summed(self.own.product(given, None), self._axis)
        out = out if residual is None else residual + out
        out = out if bias is None else out + bias
        return self.own.gate(out) if self.own.is_gated else out


Linear = PlainLinear | QuantisedLinear | ShardedLinear


def served_linear(
    layer: nn.Linear,
    place: Place,
    sums: Axis | None = None,
    norm: nn.Module | None = None,
    is_gated: bool = False,
) -> Linear:
    """Return the object that computes a linear. Its partial sums are added over `sums`; its input is then split over
    the same axis, and so is the norm.
    """
    own: PlainLinear | QuantisedLinear
    own_norm = norm if sums is None else None
    if isinstance(layer, PackedLinear):
        own = QuantisedLinear(layer, place, own_norm, is_gated)
    else:
        own = PlainLinear(layer, place, own_norm, is_gated)
    if sums is None:
        return own
    return ShardedLinear(own, sums, None if norm is None else served_norm(norm, place, sums))


def adapted(linear: Linear, updates: Mapping[nn.Module, Updates]) -> Linear:
    """Return the linear with the updates of adapters to it, if there are any."""
    own = updates.get(linear.layer)
    return AdaptedLinear(linear, own) if own is not None and isinstance(linear, PlainLinear) else linear


def plain_of(linear: Linear) -> PlainLinear | None:
    """Return what multiplies with the weight of a linear if this is as it was read."""
    own = linear.own if isinstance(linear, ShardedLinear) else linear
    return own if isinstance(own, PlainLinear) else None
