"""Matmuls where a region begins and ends, with collectives that travel while they compute.

    into_region     O_j = I·W_j of all columns with one input      dI = the sum of dO_j·W_j', summed over the axis
    out_of_region   O = I·W of a row, partial sums over x          dI = dO·W', summed over y

Weight gradients are computed while dI travels (AxoNN's overlapped all-reduce). Where the residual stream is split along
the sequence over x, I is gathered on its way in and O is reduce-scattered on its way out, in `chunks` pieces:

    sequence of 2 ranks × 3 chunks   0a 0b 0c 1a 1b 1c    (rank, chunk)
    its pieces                       0a 1a · 0b 1b · 0c 1c

All pieces start to be gathered at once, and each is multiplied when it has arrived, while the later ones travel; a
product starts to be scattered while the next is computed. Backward does the same with dO and dI. Pieces together are
whole but for their order, so that a weight's gradient is one matmul.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce, reduce_scatter
from weft.parallel.tensor.operations import apply, linear

SEQUENCE_DIM = 1  # of hidden states [batch, sequence, ..., features]


@dataclass(frozen=True)
class Stream:
    """The residual stream, split along the sequence: in how many chunks a rank's part goes into regions and comes out,
    and whether what went in is gathered again for backward instead of kept whole.
    """

    chunks: int = 1
    regather: bool = False


def into_region(
    value: Tensor, weights: Sequence[Tensor], transposed: bool, axis: Axis, stream: Stream | None = None
) -> tuple[Tensor, ...]:
    """The products of one input with weights [out, in] ([in, out] if `transposed`) that are split over the axis.

    With `stream` the input is a rank's part of the sequence, and the products are of the whole.
    """
    if axis.degree == 1:
        return tuple(linear(value, weight, transposed) for weight in weights)
    products: tuple[Tensor, ...]
    if stream is None:
        products = apply(_Columns, value, transposed, axis, *weights)
    else:
        products = apply(_GatheredColumns, value, transposed, axis, stream, *weights)
    return products


def out_of_region(value: Tensor, weight: Tensor, transposed: bool, x: Axis, y: Axis, stream: Stream) -> Tensor:
    """A rank's part of the sequence of the product with a weight whose inputs are split over x, and outputs over y."""
    kept = _Kept(value.requires_grad)
    value = apply(_Keep, value, weight, kept)
    out: Tensor = apply(_ScatteredRow, value, weight, transposed, x, y, stream, kept)
    return out


# --- pieces


class _Gathering:
    """A sequence under way from all ranks: [chunks, ranks, tokens, batch, ..., features]."""

    def __init__(self, part: Tensor, axis: Axis, chunks: int) -> None:
        own: Tensor = part.unflatten(SEQUENCE_DIM, (chunks, -1))  # [batch, chunks, tokens, ..., features]
        self._own = own.movedim((1, 2), (0, 1)).contiguous()
        self._whole = self._own.new_empty(chunks, axis.degree, *self._own.shape[1:])
        parts = zip(self._whole, self._own, strict=True)
        self._pending = [all_gather(piece.view(-1), own.view(-1), axis) for piece, own in parts]

    def __iter__(self) -> Iterator[Tensor]:
        """Each piece when it has arrived: [ranks, tokens, batch, ..., features]."""
        for pending, piece in zip(self._pending, self._whole, strict=True):
            pending.wait()
            yield piece

    def wait(self) -> Tensor:
        """All pieces."""
        for pending in self._pending:
            pending.wait()
        return self._whole


class _Scattering:
    """Partial sums on their way to the ranks that they belong to, piece after piece."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._under_way: list[tuple[Any, Tensor, Tensor]] = []

    def start(self, piece: Tensor) -> None:
        """Send [ranks, tokens, batch, ..., features]."""
        part = piece.new_empty(piece.shape[1:])
        self._under_way.append((reduce_scatter(part.view(-1), piece.view(-1), self._axis), part, piece))

    def wait(self) -> Tensor:
        """This rank's part of the sum: [batch, part of the sequence, ..., features]."""
        for pending, _, _ in self._under_way:
            pending.wait()
        parts = [part.movedim(1, 0) for _, part, _ in self._under_way]  # [batch, tokens, ..., features]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, SEQUENCE_DIM)).contiguous()


def _pieces(value: Tensor, chunks: int, ranks: int) -> Tensor:
    """[batch, sequence, ..., features] to [chunks, ranks, tokens, batch, ..., features]."""
    parted: Tensor = value.unflatten(SEQUENCE_DIM, (ranks, chunks, -1))  # [batch, ranks, chunks, tokens, ..., features]
    return parted.movedim((2, 1, 3), (0, 1, 2)).contiguous()


def _join(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces [ranks, tokens, batch, ..., features] to [batch, sequence, ..., features]."""
    transposed = [piece.movedim(2, 0) for piece in pieces]  # [batch, ranks, tokens, ..., features]
    whole = transposed[0].unsqueeze(2) if len(transposed) == 1 else torch.stack(transposed, 2)
    joined = whole.flatten(1, 3).contiguous()
    # Nobody else sees the storage; as a view, autograd would forbid the model to change it in place.
    return torch.ops.aten._unsafe_view(joined, joined.shape)  # type: ignore[no-any-return]


# --- matmuls


def _input_gradient(gradients: Sequence[Tensor | None], weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """The sum of each dO with its weight."""
    total: Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is not None and total is None:
            total = linear(gradient, weight, not transposed).contiguous()
        elif gradient is not None and total is not None:
            total.view(-1, total.shape[-1]).addmm_(gradient.flatten(0, -2), weight.t() if transposed else weight)
    assert total is not None
    return total


def _weight_gradient(gradient: Tensor | None, value: Tensor, transposed: bool, needed: bool) -> Tensor | None:
    """dO and I, in whatever order of tokens, to dW."""
    if gradient is None or not needed:
        return None
    rows, columns = gradient.flatten(0, -2), value.flatten(0, -2)
    return columns.t() @ rows if transposed else rows.t() @ columns


class _Columns(Function):
    """Of an input that is whole."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, transposed: bool, axis: Axis, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.transposed, ctx.axis = transposed, axis
        ctx.save_for_backward(value if any(ctx.needs_input_grad[3:]) else None, *weights)
        return tuple(linear(value, weight, transposed) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        value, *weights = ctx.saved_tensors
        total = pending = None
        if ctx.needs_input_grad[0]:
            total = _input_gradient(gradients, weights, ctx.transposed)
            pending = all_reduce(total, ctx.axis)
        needed = ctx.needs_input_grad[3:]
        found = [_weight_gradient(g, value, ctx.transposed, n) for g, n in zip(gradients, needed, strict=True)]
        if pending is not None:
            pending.wait()
        return total, None, None, *found


class _GatheredColumns(Function):
    """Of an input of which each rank has a part of the sequence."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, transposed: bool, axis: Axis, stream: Stream, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.transposed, ctx.axis, ctx.stream = transposed, axis, stream
        gathering = _Gathering(value, axis, stream.chunks)
        products = [[linear(piece, weight, transposed) for weight in weights] for piece in gathering]
        kept = value if stream.regather else gathering.wait()
        ctx.save_for_backward(kept if any(ctx.needs_input_grad[4:]) else None, *weights)
        return tuple(_join(pieces) for pieces in zip(*products, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        kept, *weights = ctx.saved_tensors
        axis, stream, needed = ctx.axis, ctx.stream, ctx.needs_input_grad[4:]
        again = _Gathering(kept, axis, stream.chunks) if stream.regather and any(needed) else None
        pieces = [None if g is None else _pieces(g, stream.chunks, axis.degree) for g in gradients]
        scattering = _Scattering(axis)
        for chunk in range(stream.chunks if ctx.needs_input_grad[0] else 0):
            scattering.start(
                _input_gradient([None if p is None else p[chunk] for p in pieces], weights, ctx.transposed)
            )
        whole = kept if again is None else again.wait()
        found = [_weight_gradient(p, whole, ctx.transposed, n) for p, n in zip(pieces, needed, strict=True)]
        return scattering.wait() if ctx.needs_input_grad[0] else None, None, None, None, *found


class _Kept:
    """What a row's backward needs."""

    def __init__(self, needs_input: bool) -> None:
        self.needs_input = needs_input
        self.ctx: Any = None


class _Keep(Function):
    """Saves a row's input and weight before its forward sends anything: recompute stops at the last thing saved."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, kept: _Kept) -> Tensor:
        ctx.save_for_backward(value, weight)
        kept.ctx = ctx
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None


class _ScatteredRow(Function):
    """Of whose result each rank takes a part of the sequence."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, transposed: bool, x: Axis, y: Axis, stream: Stream, kept: _Kept
    ) -> Tensor:
        ctx.transposed, ctx.x, ctx.y, ctx.chunks, ctx.kept = transposed, x, y, stream.chunks, kept
        scattering = _Scattering(x)
        for piece in _pieces(value, stream.chunks, x.degree):
            scattering.start(linear(piece, weight, transposed))
        return scattering.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        value, weight = ctx.kept.ctx.saved_tensors
        gathering = _Gathering(gradients[0], ctx.x, ctx.chunks)
        total = pending = None
        if ctx.kept.needs_input:
            total = _join([linear(piece, weight, not ctx.transposed) for piece in gathering])
            pending = all_reduce(total, ctx.y)
        pieces = _pieces(value, ctx.chunks, ctx.x.degree)
        found = _weight_gradient(gathering.wait(), pieces, ctx.transposed, ctx.needs_input_grad[1])
        if pending is not None:
            pending.wait()
        return total, found, None, None, None, None, None
