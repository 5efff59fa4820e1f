"""Matmuls of column and row linears that overlap with their collectives. A *region* lies between a column and its row.

    into_region     O_j = I·W_j of all columns with one input      dI = the sum of dO_j·W_j', summed over the axis
    out_of_region   O = I·W of a row, partial sums over x          dI = dO·W', summed over y

Weight gradients are computed while dI is reduced (AxoNN's overlapped all-reduce). If the residual stream is split along
the sequence over x, I is all-gathered before a region and O is reduce-scattered after it, in `chunks` pieces:

    sequence of 2 ranks × 3 chunks   0a 0b 0c 1a 1b 1c    (rank, chunk)
    its pieces                       0a 1a · 0b 1b · 0c 1c

The all-gathers of all pieces start at once. Each piece is multiplied when it has arrived, while later ones are still
sent. The reduce-scatter of a product runs while the next product is computed. Backward does the same with dO and dI.
All pieces together are the whole sequence in another order, so a weight's gradient is one matmul.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce, reduce_scatter
from weft.inspection.first_order import first_order
from weft.parallel.tensor.operations import apply, linear

SEQUENCE_DIM = 1  # of hidden states [batch, sequence, ..., features]


@dataclass(frozen=True)
class StreamSplit:
    """How the residual stream is split along the sequence.

    A rank's part is gathered and scattered in `chunks` pieces. With `regather`, the gathered input of a region is not
    saved, but gathered again in backward.
    """

    chunks: int = 1
    regather: bool = False


def into_region(
    value: Tensor, weights: Sequence[Tensor], transposed: bool, axis: Axis, stream: StreamSplit | None = None
) -> tuple[Tensor, ...]:
    """Returns the products of one input with weights [out, in] ([in, out] if `transposed`) split over the axis.

    With `stream` the input is a rank's part of the sequence, and the products are those of the whole sequence.
    """
    if axis.degree == 1:
        return tuple(linear(value, weight, transposed) for weight in weights)
    products: tuple[Tensor, ...]
    if stream is None:
        products = apply(_Columns, value, transposed, axis, *weights)
    else:
        products = apply(_GatheredColumns, value, transposed, axis, stream, *weights)
    return products


def out_of_region(value: Tensor, weight: Tensor, transposed: bool, x: Axis, y: Axis, stream: StreamSplit) -> Tensor:
    """Returns the product with a weight whose inputs are split over x and outputs over y.

    The result is summed over x, and is this rank's part of the sequence.
    """
    kept = _RowState(value.requires_grad)
    value = apply(_SaveRowInput, value, weight, kept)
    out: Tensor = apply(_ScatteredRow, value, weight, transposed, x, y, stream, kept)
    return out


# --- pieces


class _Gathering:
    """All-gathers of a sequence in chunks. The result is [chunks, ranks, tokens, batch, ..., features]."""

    def __init__(self, part: Tensor, axis: Axis, chunks: int) -> None:
        own: Tensor = part.unflatten(SEQUENCE_DIM, (chunks, -1))  # [batch, chunks, tokens, ..., features]
        self._own = own.movedim((1, 2), (0, 1)).contiguous()
        self._whole = self._own.new_empty(chunks, axis.degree, *self._own.shape[1:])
        parts = zip(self._whole, self._own, strict=True)
        self._pending = [all_gather(piece.view(-1), own.view(-1), axis) for piece, own in parts]

    def __iter__(self) -> Iterator[Tensor]:
        """Yields each piece when it has arrived: [ranks, tokens, batch, ..., features]."""
        for pending, piece in zip(self._pending, self._whole, strict=True):
            pending.wait()
            yield piece

    def wait(self) -> Tensor:
        """Wait for all pieces and return them."""
        for pending in self._pending:
            pending.wait()
        return self._whole


class _Scattering:
    """Reduce-scatters of partial sums, piece after piece."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._pending: list[tuple[Any, Tensor, Tensor]] = []

    def start(self, piece: Tensor) -> None:
        """Start the reduce-scatter of a piece [ranks, tokens, batch, ..., features]."""
        part = piece.new_empty(piece.shape[1:])
        self._pending.append((reduce_scatter(part.view(-1), piece.view(-1), self._axis), part, piece))

    def wait(self) -> Tensor:
        """Wait, and return this rank's part of the sum: [batch, part of the sequence, ..., features]."""
        for pending, _, _ in self._pending:
            pending.wait()
        parts = [part.movedim(1, 0) for _, part, _ in self._pending]  # [batch, tokens, ..., features]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, SEQUENCE_DIM)).contiguous()


def _pieces(value: Tensor, chunks: int, ranks: int) -> Tensor:
    """Rearranges [batch, sequence, ..., features] to [chunks, ranks, tokens, batch, ..., features]."""
    split: Tensor = value.unflatten(SEQUENCE_DIM, (ranks, chunks, -1))  # [batch, ranks, chunks, tokens, ..., features]
    return split.movedim((2, 1, 3), (0, 1, 2)).contiguous()


def _join(pieces: Sequence[Tensor]) -> Tensor:
    """Joins pieces [ranks, tokens, batch, ..., features] to [batch, sequence, ..., features]."""
    transposed = [piece.movedim(2, 0) for piece in pieces]  # [batch, ranks, tokens, ..., features]
    whole = transposed[0].unsqueeze(2) if len(transposed) == 1 else torch.stack(transposed, 2)
    joined = whole.flatten(1, 3).contiguous()
    # Not a view: autograd would forbid the model to change one in place. No other tensor uses this storage.
    return torch.ops.aten._unsafe_view(joined, joined.shape)  # type: ignore[no-any-return]


# --- matmuls


def _input_gradient(gradients: Sequence[Tensor | None], weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """Returns dI, the sum of the products of each dO with its weight."""
    total: Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is not None and total is None:
            total = linear(gradient, weight, not transposed).contiguous()
        elif gradient is not None and total is not None:
            total.view(-1, total.shape[-1]).addmm_(_rows(gradient), weight.t() if transposed else weight)
    assert total is not None
    return total


def _weight_gradient(gradient: Tensor | None, value: Tensor, transposed: bool, needed: bool) -> Tensor | None:
    """Returns dW from dO and I, whose tokens may be in any common order; None if it is not needed."""
    if gradient is None or not needed:
        return None
    rows, columns = _rows(gradient), _rows(value)
    return columns.t() @ rows if transposed else rows.t() @ columns


def _rows(value: Tensor) -> Tensor:
    """Returns [..., features] as [rows, features]; a vector is one row."""
    return value.reshape(-1, value.shape[-1])


class _Columns(Function):
    """Products of columns with an input that every rank of the axis holds whole."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, transposed: bool, axis: Axis, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.transposed, ctx.axis = transposed, axis
        ctx.save_for_backward(value if any(ctx.needs_input_grad[3:]) else None, *weights)
        return tuple(linear(value, weight, transposed) for weight in weights)

    @staticmethod
    @first_order("tensor.x and tensor.y")
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
    """Products of columns with an input of which each rank has a part of the sequence."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, transposed: bool, axis: Axis, stream: StreamSplit, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.transposed, ctx.axis, ctx.stream = transposed, axis, stream
        gathering = _Gathering(value, axis, stream.chunks)
        products = [[linear(piece, weight, transposed) for weight in weights] for piece in gathering]
        kept = value if stream.regather else gathering.wait()
        ctx.save_for_backward(kept if any(ctx.needs_input_grad[4:]) else None, *weights)
        return tuple(_join(pieces) for pieces in zip(*products, strict=True))

    @staticmethod
    @first_order("tensor.x and tensor.y")
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


class _RowState:
    """Links `_SaveRowInput` to the backward of `_ScatteredRow`, which needs its saved tensors."""

    def __init__(self, needs_input: bool) -> None:
        self.needs_input = needs_input
        self.ctx: Any = None


class _SaveRowInput(Function):
    """Saves a row's input and weight before its forward communicates.

    Recompute stops after the last tensor is saved, so it does not repeat the communication.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, kept: _RowState) -> Tensor:
        ctx.save_for_backward(value, weight)
        kept.ctx = ctx
        return value.view_as(value)

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None


class _ScatteredRow(Function):
    """Product of a row, of which each rank gets its part of the sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        transposed: bool,
        x: Axis,
        y: Axis,
        stream: StreamSplit,
        kept: _RowState,
    ) -> Tensor:
        ctx.transposed, ctx.x, ctx.y, ctx.chunks, ctx.kept = transposed, x, y, stream.chunks, kept
        scattering = _Scattering(x)
        for piece in _pieces(value, stream.chunks, x.degree):
            scattering.start(linear(piece, weight, transposed))
        return scattering.wait()

    @staticmethod
    @first_order("tensor.x and tensor.y")
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
