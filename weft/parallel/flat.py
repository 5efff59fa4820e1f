"""One flat buffer of a block: whole where it computes, sliced over `shard` where it rests.

`whole` holds the parameters in the compute dtype; `slice` is this rank's master copy, which the optimizer sees piece by
piece under each parameter's own name. Where both have one dtype and stages 1-2 keep `whole`, the slice is a view of it
and nothing is held twice. Gradients add up in `whole_gradient` in the master dtype and end in `slice_gradient`.

    slice ──all-gather over shard──▶ whole ──forward, backward──▶ whole_gradient
      ▲                                                               │ reduce-scatter over shard, all-reduce over data
      └────────────── optimizer ◀── slice_gradient ◀──────────────────┘   (mean over both)

With `shard` = 1 the gather is a cast (or nothing) and the reduction is data parallelism's all-reduce: one code path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from weft.comm import Axis, Pending, all_gather, all_reduce, reduce_scatter
from weft.errors import PlanError
from weft.parallel.layout import FlatLayout, Part

Owners = Sequence[tuple[nn.Module, str]]


class Flat:
    """A flat buffer, the parameters that live in it and the collectives that move it."""

    def __init__(
        self,
        layout: FlatLayout,
        owners: Sequence[Owners],
        values: Callable[[str], Tensor],
        shard: Axis,
        stage: int,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.owners, self.shard, self.stage = layout, owners, shard, stage
        self.compute_dtype, self.master_dtype, self.device = compute_dtype, master_dtype, device
        self.sum_over: list[Axis] = []  # gradients there are partial sums
        self.mean_over: list[Axis] = []  # and there of different samples
        self.copies = 1  # ranks along `pipe` that hold the same
        self.trainable = layout.parameters[0].trainable
        self._starts, self._parts = layout.starts, tuple(layout.parts(shard.index))
        self.frees_whole = stage == 3 and shard.degree > 1
        self.keeps_whole_gradient = stage == 1 or shard.degree == 1
        self.whole = torch.empty(layout.numel, dtype=compute_dtype, device=device)
        self.slice = self._make_slice(values)
        self.whole_gradient: Tensor | None = None
        self.slice_gradient: Tensor | None = None
        self._carried: Tensor | None = None
        self._targets: list[Tensor] = []  # the place of each parameter in `whole_gradient`
        self._filled: set[int] = set()
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self.whole_parameters = [self._whole_parameter(i) for i in range(len(layout.parameters))]
        self.pieces = [self._piece(part) for part in self._parts]
        self.is_whole = False
        self.refresh()
        if not self.trainable and not self.frees_whole:
            self._fill_whole(values)

    # --- parameters

    def start_gather(self) -> None:
        """Begin to make the buffer whole; does nothing when it is, or is about to be."""
        if self.is_whole or self._gathering is not None:
            return
        if self.frees_whole:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        part = self.slice
        if self.compute_dtype != self.master_dtype:
            part = self._own(self.whole).copy_(self.slice)
        self._gathering = all_gather(self.whole, part, self.shard)

    def finish_gather(self) -> None:
        """Wait for the gather and let the modules see whole parameters."""
        if self.is_whole:
            return
        self.start_gather()
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None
        self._install(self.whole_parameters)
        self.is_whole = True

    def release(self, stale: bool) -> None:
        """After use: stage 3 frees the whole buffer. `stale` says that the optimizer will now change the slices."""
        is_fetched = self.is_whole or self._gathering is not None
        if is_fetched and (self.frees_whole or (stale and self.trainable)):
            self.refresh()

    def refresh(self) -> None:
        """Show the pieces again, for the optimizer or a checkpoint to change; whoever computes next gathers anew."""
        if self._gathering is not None:  # fetched ahead and not used
            self._gathering.wait()
            self._gathering = None
        self._install(self.pieces)
        self.is_whole = False
        if self.frees_whole:
            self._free_whole()

    def is_freed_view(self, tensor: Tensor) -> bool:
        """Whether a tensor looks into the whole buffer, of which stage 3 leaves nothing to look at."""
        return self.frees_whole and tensor.untyped_storage()._cdata == self.whole.untyped_storage()._cdata

    # --- gradients

    def take_gradient(self, index: int) -> None:
        """Add the gradient that autograd left on a whole parameter to the flat gradient, in the master dtype.

        The mean over the ranks that take different samples is taken on the way: here it costs no pass of its own.
        """
        parameter = self.whole_parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if not self._filled:
            self._begin_gradient()
        if gradient.requires_grad:  # create_graph: a product into a buffer has no derivative
            gradient = gradient.detach()
        if index in self._filled:
            self._targets[index].addcmul_(gradient, self._mean)
        else:
            torch.mul(gradient, self._mean, out=self._targets[index])
            self._filled.add(index)

    def start_reduce(self) -> None:
        """Begin to reduce the flat gradient over `shard`; a parameter without a gradient counts as zero."""
        if not self._filled:
            self._begin_gradient()
        for index in range(len(self.whole_parameters)):
            if index not in self._filled:
                self._targets[index].zero_()
        self._filled.clear()
        assert self.whole_gradient is not None
        if self.keeps_whole_gradient:
            self.slice_gradient = self._own(self.whole_gradient)
        elif self.slice_gradient is None:
            self.slice_gradient = torch.empty(self.layout.slice_numel, dtype=self.master_dtype, device=self.device)
        self._reducing = reduce_scatter(self.slice_gradient, self.whole_gradient, self.shard)

    def continue_reduce(self) -> None:
        """Once reduced over `shard`: free the whole gradient, and begin to reduce the slice over the other axes."""
        self._wait_reduce()
        if not self.keeps_whole_gradient:
            self.whole_gradient, self._targets = None, []
        assert self.slice_gradient is not None
        for axis in (*self.sum_over, *self.mean_over):
            self._wait_reduce()
            self._reducing = all_reduce(self.slice_gradient, axis)

    def finish_reduce(self) -> None:
        """Wait, add what was carried, and show the optimizer its gradients."""
        self._wait_reduce()
        assert self.slice_gradient is not None
        if self._carried is not None:
            self.slice_gradient.add_(self._carried)
            self._carried = None
        for piece, part in zip(self.pieces, self._parts, strict=True):
            if part.stop > part.start:
                piece.grad = self.slice_gradient[part.offset : part.offset + part.stop - part.start]

    def discard_gradient(self) -> None:
        """Forget what a backward that was cut short has left; what was on the pieces before it is there again."""
        if self._reducing is not None:
            self._reducing.wait()
        if self._carried is not None and self.slice_gradient is not None:
            self.slice_gradient.copy_(self._carried)
        self._reducing = self._carried = None
        self._filled.clear()

    # --- inside

    def _make_slice(self, values: Callable[[str], Tensor]) -> Tensor:
        """Fill this rank's slice, one parameter at a time, so that no rank ever needs the whole model in memory."""
        if self.compute_dtype == self.master_dtype and not self.frees_whole:
            piece = self._own(self.whole)
            self.whole.zero_()
        else:
            piece = torch.zeros(self.layout.slice_numel, dtype=self.master_dtype, device=self.device)
        for part in self._parts:
            if part.stop > part.start:
                value = values(part.parameter.name).detach().reshape(-1)[part.start : part.stop]
                piece[part.offset : part.offset + part.stop - part.start].copy_(value)
        return piece

    def _fill_whole(self, values: Callable[[str], Tensor]) -> None:
        """What is frozen and stays whole never changes: every rank takes it from the source, and nothing is said."""
        for index, parameter in enumerate(self.layout.parameters):
            self._view(self.whole, index).copy_(values(parameter.name).detach())
        self._install(self.whole_parameters)
        self.is_whole = True

    def _whole_parameter(self, index: int) -> nn.Parameter:
        # Made from the storage, not as a view of `whole`: autograd's version counter of a parameter must not move when
        # the buffer is gathered again for backward.
        shape, start = self.layout.parameters[index].shape, self._starts[index]
        tensor = torch.empty(0, dtype=self.compute_dtype, device=self.device)
        stride = torch.empty(shape, device="meta").stride()
        tensor.set_(self.whole.untyped_storage(), start, shape, stride)
        return nn.Parameter(tensor, requires_grad=self.trainable)

    def _piece(self, part: Part) -> nn.Parameter:
        piece = nn.Parameter(
            self.slice[part.offset : part.offset + part.stop - part.start], requires_grad=self.trainable
        )
        if self.trainable:  # autograd reaches whole parameters only; a gradient here would not be reduced
            piece.register_post_accumulate_grad_hook(partial(_refuse_gradient, part.parameter.name))
        return piece

    def _own(self, buffer: Tensor) -> Tensor:
        return buffer.narrow(0, self.shard.index * self.layout.slice_numel, self.layout.slice_numel)

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        parameter, start = self.layout.parameters[index], self._starts[index]
        return buffer[start : start + parameter.numel].view(parameter.shape or 1)  # as a product with `_mean` has it

    @cached_property
    def _mean(self) -> Tensor:
        # One element, not a number: it makes a product in the master dtype of a gradient in a narrower one.
        ranks = math.prod((self.shard.degree, *(axis.degree for axis in self.mean_over)))
        return torch.full((1,), 1 / ranks, dtype=self.master_dtype, device=self.device)

    def _begin_gradient(self) -> None:
        # What an earlier backward left on the pieces, if the user has not cleared it, is added at the end.
        for piece, part in zip(self.pieces, self._parts, strict=True):
            if piece.grad is not None:
                if self._carried is None:
                    self._carried = torch.zeros(self.layout.slice_numel, dtype=self.master_dtype, device=self.device)
                self._carried[part.offset : part.offset + part.stop - part.start].copy_(piece.grad)
        if self.whole_gradient is None:
            self.whole_gradient = torch.empty(self.layout.numel, dtype=self.master_dtype, device=self.device)
            self._zero_padding(self.whole_gradient)  # it enters the norm; the rest is written before it is read
        if not self._targets:
            self._targets = [self._view(self.whole_gradient, i) for i in range(len(self.whole_parameters))]

    def _zero_padding(self, buffer: Tensor) -> None:
        ends = (start + parameter.numel for start, parameter in zip(self._starts, self.layout.parameters, strict=True))
        for end, start in zip(ends, (*self._starts[1:], self.layout.numel), strict=True):
            if end < start:
                buffer[end:start].zero_()

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for places, parameter in zip(self.owners, parameters, strict=True):
            for module, name in places:
                module._parameters[name] = parameter

    def _free_whole(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def _wait_reduce(self) -> None:
        assert self._reducing is not None
        self._reducing.wait()


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise PlanError(
        f"parameter '{name}' got a gradient outside the forward of its block; call the block (not its .forward, nor "
        f"its parameters), and add penalties on parameters through the optimizer (weight_decay)"
    )
