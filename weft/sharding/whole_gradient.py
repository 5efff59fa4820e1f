"""The gradient of a whole flat buffer before its reduction: parameters' gradients are copied into it, or added.

torch's optimizers pass over a parameter without a gradient. Ranks find out without communication which parameters have
none: a rank that has no gradient of a parameter gives -0.0 to the sum over ranks. It is the identity of addition: x +
-0.0 is x for every x, 0.0 and -0.0 too. So the sum is -0.0 in every element if no rank has a gradient, and else the sum
of those that there are. A rank looks only at parameters that it has no gradient of itself. (A gradient that is -0.0 in
every element, on other ranks and not on this one, is taken for none.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from weft.errors import PlanError
from weft.sharding.layout import FlatLayout, ParameterPart

KERNEL_NUMEL = 1 << 20  # a gradient of at least this many elements is copied by a kernel launch of its own


class WholeGradient:
    """One tensor for the gradients of all parameters of a flat buffer, and what has been copied into it.

    Gradients are held as backward made them until `copy_held` copies many at once. Parameters are known by their index
    in the layout.
    """

    def __init__(self, layout: FlatLayout, is_unsummed: bool, sums_squares: bool) -> None:
        """`sums_squares`: copies of large gradients on a GPU also sum their squares, while `is_unsummed`."""
        self.tensor: Tensor | None = None  # [layout.numel]
        self.views: list[Tensor] = []  # of each parameter in `tensor`
        self.filled: set[int] = set()  # parameters whose view holds a gradient of this step
        self.held: dict[int, Tensor] = {}  # gradients that are not copied yet
        self.received: set[int] = set()  # parameters that this rank has a gradient of, in this sum or the last
        self.square_sums: dict[int, Tensor] = {}  # of the views whose copy has computed it
        self.is_unsummed = is_unsummed  # True until a gradient is added to another; False if ranks sum gradients
        self._layout, self._sums_squares = layout, sums_squares

    @property
    def is_empty(self) -> bool:
        """Is there no gradient of this step yet?"""
        return not self.filled and not self.held

    @property
    def adds_held(self) -> bool:
        """Would `copy_held` add a gradient to one that was copied before?"""
        return not self.filled.isdisjoint(self.held)

    @property
    def norms(self) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs of the gradient norm: sums of squares, and the views whose squares are not summed yet."""
        return list(self.square_sums.values()), [one for i, one in enumerate(self.views) if i not in self.square_sums]

    def set_tensor(self, tensor: Tensor) -> None:
        """Use this tensor, whose values are kept."""
        self.tensor, self.views = tensor, self._layout.views(tensor)

    def free(self) -> None:
        """Drop the tensor."""
        self.tensor, self.views = None, []

    def zero_padding(self) -> None:
        """Zero the elements between parameters, which are part of the norm and are not written by gradients."""
        assert self.tensor is not None
        starts = self._layout.starts
        ends = (start + one.numel for start, one in zip(starts, self._layout.parameters, strict=True))
        for end, start in zip(ends, (*starts[1:], self._layout.numel), strict=True):
            if end < start:
                self.tensor[end:start].zero_()

    def copy_held(self, mean: Tensor, is_mean: bool) -> None:
        """Copy all held gradients, times `mean` if `is_mean`, or add them. Plain copies share one kernel launch."""
        held, self.held = self.held, {}
        added = {index: gradient for index, gradient in held.items() if index in self.filled}
        new = {index: gradient for index, gradient in held.items() if index not in self.filled}
        if added:
            self.square_sums.clear()
        for index, gradient in added.items():
            self.views[index].addcmul_(gradient, mean)
        if is_mean:
            for index, gradient in new.items():
                torch.mul(gradient, mean, out=self.views[index])
        else:
            is_plain = not (self.is_unsummed and self._sums_squares)
            small = {index: one for index, one in new.items() if is_plain or not self._copy_with_squares(index, one)}
            if small:
                views = [self.views[index] for index in small]
                torch._foreach_copy_(
                    views, [gradient.view(one.shape) for gradient, one in zip(small.values(), views, strict=True)]
                )
        self.filled.update(new)

    def _copy_with_squares(self, index: int, gradient: Tensor) -> bool:
        """Copy a large gradient and sum its squares in one pass, if a GPU can; return whether it did."""
        if not (gradient.is_cuda and gradient.numel() >= KERNEL_NUMEL and gradient.is_contiguous()):
            return False
        if gradient.dtype == torch.float64 or not has_triton():
            return False
        from weft.sharding.gradient_kernel import copy_with_squares

        self.square_sums[index] = copy_with_squares(gradient, self.views[index])
        return True

    def finish(self) -> None:
        """End the sum of this step. A parameter without a gradient gets -0.0 (see above)."""
        for index, view in enumerate(self.views):
            if index not in self.filled:
                view.fill_(-0.0)
        self.filled.clear()

    def discard(self) -> None:
        """Drop the gradients of this step. The tensor stays."""
        self.filled.clear()
        self.held.clear()
        self.square_sums.clear()


def unused_pieces(
    gradient: Tensor,
    parts: Sequence[ParameterPart],
    pieces: Sequence[nn.Parameter],
    received: Collection[int],
    before: frozenset[int],
) -> frozenset[int]:
    """Returns the ids of pieces whose parameters have no gradient on any rank.

    `gradient` is the sum over ranks, in which `parts` say where the piece of each parameter lies. `received` are the
    parameters that this rank has a gradient of. A step that is being recorded as a CUDA graph keeps the result of the
    step `before`.
    """
    if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return before
    indices = [i for i, part in enumerate(parts) if i not in received and part.numel]
    sums = [gradient[parts[i].place] for i in indices]
    flags = torch.stack([(one.signbit() & (one == 0)).all() for one in sums]).tolist() if sums else []
    return frozenset(id(pieces[i]) for i, is_unused in zip(indices, flags, strict=True) if is_unused)


def refuse_gradient(name: str, _: Tensor) -> None:
    """Raise a PlanError: a piece, which is not what a block computes with, got a gradient."""
    raise PlanError(
        f"parameter '{name}' got a gradient outside the forward of its block; call the block (not its .forward, nor "
        f"its parameters), and add penalties on parameters through the optimizer (weight_decay)"
    )


_CHUNK_NUMEL = 1 << 20  # a chunk's copy in float64 is 8 MiB


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norm of each tensor [], in float64 on a CPU and at least float32 elsewhere. All are on one device.

    On a CPU torch sums squares one after another in the given dtype: over four million float32 numbers, the length of a
    flat buffer, the error is 1e-4. There squares are summed in float64, in chunks. A GPU sums in a tree, for which
    float32 is enough.
    """
    if not tensors:
        return []
    if tensors[0].device.type != "cpu":
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)  # of the sums
        return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))
    chunks = [list(tensor.reshape(-1).split(_CHUNK_NUMEL)) for tensor in tensors]
    parts = [torch.stack(torch._foreach_norm(one, 2, dtype=torch.float64)) for one in chunks]
    return [torch.linalg.vector_norm(one) for one in parts]
