"""The gradient of a whole flat buffer before its reduction: parameters' gradients are copied into it, or added."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from weft.sharding.layout import FlatLayout

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
        """End the sum of this step. A parameter without a gradient gets -0.0, see `gradient_rules.py`."""
        for index, view in enumerate(self.views):
            if index not in self.filled:
                view.fill_(-0.0)
        self.filled.clear()

    def discard(self) -> None:
        """Drop the gradients of this step. The tensor stays."""
        self.filled.clear()
        self.held.clear()
        self.square_sums.clear()
