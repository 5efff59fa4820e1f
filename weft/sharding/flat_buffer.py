"""One flat buffer of a block's parameters: whole while the block computes, split over `shard` between uses.

`whole` holds the parameters in the compute dtype. `slice` is this rank's part in the dtype of the master weights; the
optimizer sees it as one piece per parameter, under the parameter's own name. If both dtypes are equal and stage 1 or 2
keeps `whole`, the slice is a view of it. Gradients are summed in `whole_gradient` in the master dtype and end in
`slice_gradient`. A gradient that is neither summed nor reduced stays in the compute dtype if weft's optimizer reads it.

    slice ──all-gather over shard──▶ whole ──forward, backward──▶ whole_gradient
      ▲                                                               │ reduce-scatter over shard, all-reduce over data
      └────────────── optimizer ◀── slice_gradient ◀──────────────────┘   (mean over both)

With `shard` = 1 the gather is a cast (or nothing) and the reduction is the all-reduce of data parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from weft.cluster.communication import Communication
from weft.comm import Axis, Pending
from weft.comm.rounded import all_gather, all_reduce, reduce_scatter
from weft.errors import PlanError
from weft.profiling import Parameter
from weft.sharding.host_memory import host_zeros
from weft.sharding.layout import FlatLayout, ParameterPart
from weft.sharding.whole_gradient import WholeGradient, refuse_gradient, unused_pieces

Owners = Sequence[tuple[nn.Module, str]]
GRADIENT_BATCH_BYTES = 1 << 24  # small gradients are copied in batches of this size, one launch per batch


@dataclass(frozen=True)
class FlatOptions:
    """What a plan says about a flat buffer: the ZeRO stage, dtypes, and where and when its state is updated."""

    stage: int
    compute_dtype: torch.dtype
    master_dtype: torch.dtype
    slice_dtype: torch.dtype
    state: str  # the plan's `memory.state`
    is_alone: bool  # there is one rank, so gradients are never reduced
    on_host: bool  # the slice and the optimizer state are in host memory
    delays: bool  # the optimizer applies each update one step late
    communication: Communication  # how parameters and gradients are rounded for links
    num_sending_ranks: int = 1  # gradients are also means over these ranks' samples; other code has summed them


class Flat:
    """A flat buffer, the parameters that are views of it, and the collectives that gather and reduce it."""

    is_streamed = False  # True for a buffer that lives in host memory (`streamed_buffer.py`)

    def __init__(
        self,
        layout: FlatLayout,
        owners: Sequence[Owners],
        values: Callable[[str], Tensor],
        shard: Axis,
        device: torch.device,
        *,
        options: FlatOptions,
    ) -> None:
        """`owners`: for each parameter, the modules and attributes that use it. `values` returns its value by name."""
        self.layout, self.owners, self.shard = layout, owners, shard
        self.device, self.options = device, options
        self.sum_over: list[Axis] = []  # axes over which gradients are partial sums
        self.mean_over: list[Axis] = []  # axes whose ranks have different samples: gradients are means over them
        self.copies = 1  # ranks along `pipe` that hold the same parameters
        self.trainable = layout.parameters[0].trainable
        self.is_read_flat = False  # True if weft's optimizer reads `slice_gradient` itself; it takes any dtype
        self.update_done: torch.cuda.Event | None = None  # end of an update on another stream
        self.parts = tuple(layout.parts(shard.index))
        self.frees_whole = self.is_streamed or (options.stage == 3 and shard.degree > 1)
        # False: the slice is a view of `whole`
        self.is_apart = self.frees_whole or options.compute_dtype != options.slice_dtype
        self.keeps_whole_gradient = options.stage == 1 or shard.degree == 1
        self.whole = self._make_whole()
        self.slice = self._make_slice(values)
        self.whole_gradient = WholeGradient(layout, options.is_alone, sums_squares=not self.is_streamed)
        self.slice_gradient: Tensor | None = None
        self._carried: Tensor | None = None  # a gradient of an earlier backward, which is added at the end
        self.unused: frozenset[int] = frozenset()  # ids of pieces whose parameters have no gradient on any rank
        self.hides_gradient = False  # True if `slice_gradient` cannot be `.grad` of the pieces (other dtype or device)
        self.gradient_norm: Tensor | None = None  # [], if it was computed before the copy to the host
        self._written_version = -1
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        starts = zip(layout.parameters, layout.starts, strict=True)
        self.whole_parameters = [self._whole_parameter(parameter, start) for parameter, start in starts]
        self.pieces = [self._piece(part) for part in self.parts]
        self.is_whole = False
        self.refresh()
        if not self.trainable and not self.frees_whole:
            self._fill_whole(values)

    # --- parameters

    def start_gather(self) -> None:
        """Start the all-gather of the parameters. Does nothing if the buffer is whole or a gather is under way."""
        if self.is_whole or self._gathering is not None:
            return
        if self.frees_whole:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        part = self.slice
        if self.shard.degree > 1 or self._written_version != self.slice._version:
            self.await_update()  # otherwise `finish_gather` waits
        if self.is_apart and (self.options.on_host or self.options.compute_dtype != self.options.slice_dtype):
            part = self.own_whole
            self.write()
        self._gathering = all_gather(self.whole, part, self.shard, self.options.communication.gather)

    def finish_gather(self) -> None:
        """Wait for the gather and make the whole parameters visible to the modules."""
        self.await_update()
        if self.is_whole:
            return
        self.start_gather()
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None
        self._install(self.whole_parameters)
        self.is_whole = True

    @property
    def own_whole(self) -> Tensor:
        """This rank's part of `whole`."""
        return self._own(self.whole)

    @property
    def written(self) -> Tensor | None:
        """A second tensor for updated weights, in the compute dtype, which the optimizer writes; None if not kept."""
        return self.own_whole if self.is_apart and not self.frees_whole else None

    def await_update(self) -> None:
        """Make the current stream wait for an update that runs on another stream."""
        if self.update_done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.update_done)
            self.update_done = None

    def write(self) -> None:
        """Copy the slice to this rank's part of `whole` if the slice has changed since the last copy."""
        if self._written_version != self.slice._version:
            self.own_whole.copy_(self.slice.to(self.device, non_blocking=True))  # the device casts, not the host
            if not self.frees_whole:
                self.mark_written()

    def mark_written(self) -> None:
        """Record that this rank's part of `whole` equals the slice, because the optimizer wrote both.

        A later change of a piece is found by its version counter, except one through `.data`: then call `refresh`.
        """
        self._written_version = self.slice._version

    def release(self, stale: bool) -> None:
        """Free the whole buffer after use if stage 3 says so. `stale`: the optimizer is about to change the slices."""
        is_fetched = self.is_whole or self._gathering is not None
        if is_fetched and (self.frees_whole or (stale and self.trainable)):
            self.refresh()

    def refresh(self) -> None:
        """Make the pieces visible to the modules, to be changed in place. The next use gathers again."""
        if self._gathering is not None:  # prefetched and not used
            self._gathering.wait()
            self._gathering = None
        self._install(self.pieces)
        self.is_whole = False
        self._written_version = -1
        if self.frees_whole:
            self._free_whole()

    def is_freed_view(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a view of the whole buffer, whose storage stage 3 frees."""
        return self.frees_whole and tensor.untyped_storage()._cdata == self.whole.untyped_storage()._cdata

    # --- gradients

    def keep_local(self, axis: str) -> None:
        """Do not average gradients over this axis: the optimizer does it. Call it before the first backward."""
        assert self.whole_gradient.is_empty
        self.mean_over = [one for one in self.mean_over if one.name != axis]
        for cached in ("_num_means", "_mean"):
            self.__dict__.pop(cached, None)

    @property
    def has_gradient(self) -> bool:
        """Whether a reduced gradient is ready for the optimizer."""
        return self.hides_gradient or any(piece.grad is not None for piece in self.pieces)

    def take_gradient(self, index: int) -> None:
        """Add the `.grad` of whole parameter `index` to the flat gradient, and clear it.

        The copy also divides by the number of ranks that have different samples, so the mean costs no extra pass.
        """
        parameter = self.whole_parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.whole_gradient.is_empty:
            self._begin_gradient()
        if index in self.whole_gradient.held:
            self.place_gradients()
        held = self.whole_gradient.held
        # with create_graph=True the gradient requires grad; the copy into the buffer is not differentiable
        self.whole_gradient.received.add(index)
        held[index] = gradient.detach() if gradient.requires_grad else gradient
        held_bytes = sum(one.numel() for one in held.values()) * gradient.element_size()
        if self.device.type == "cpu" or held_bytes > GRADIENT_BATCH_BYTES:
            self.place_gradients()

    def place_gradients(self) -> None:
        """Copy all gradients taken so far into the flat gradient."""
        if self.whole_gradient.adds_held:
            self._widen()
        self.whole_gradient.copy_held(self._mean, self._num_means > 1)

    @property
    def norms(self) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs of the gradient norm: sums of squares, and tensors whose squares are not summed yet."""
        if self.slice_gradient is None:
            return [], []
        return self.whole_gradient.norms if self.whole_gradient.square_sums else ([], [self.slice_gradient])

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the flat gradient over `shard`. See `whole_gradient.py` for -0.0."""
        self.place_gradients()
        if not self.whole_gradient.filled:
            self._begin_gradient()
        self.whole_gradient.finish()
        whole = self.whole_gradient.tensor
        assert whole is not None
        if self.keeps_whole_gradient:
            self.slice_gradient = self._own(whole)
        elif self.slice_gradient is None:
            self.slice_gradient = torch.empty(
                self.layout.slice_numel, dtype=self.options.master_dtype, device=self.device
            )
        wire = self.options.communication.scatter
        self._reducing = reduce_scatter(self.slice_gradient, whole, self.shard, wire)

    def continue_reduce(self) -> None:
        """Wait for the reduction over `shard`, free the whole gradient, and start to reduce over the other axes.

        Only `finish_reduce` reduces over `branch`: its ranks send other messages over it in backward, and they are done
        with a block at different times, each with its own branches of it.
        """
        self._wait_reduce()
        if not self.keeps_whole_gradient:
            self.whole_gradient.free()
        if "branch" not in self.layout.sums:
            self._reduce_over_axes()

    def _reduce_over_axes(self) -> None:
        assert self.slice_gradient is not None
        for axis in (*self.sum_over, *self.mean_over):
            self._wait_reduce()
            wire = self.options.communication.reduce if axis.name == "data" else "exact"
            self._reducing = all_reduce(self.slice_gradient, axis, wire)

    def finish_reduce(self) -> None:
        """Wait for the reductions, add the gradient of an earlier backward, and show the sum to the optimizer."""
        if "branch" in self.layout.sums:
            self._reduce_over_axes()
        self._wait_reduce()
        assert self.slice_gradient is not None
        if self._carried is not None:
            self.slice_gradient.add_(self._carried)
            self._carried = None
            self.whole_gradient.square_sums.clear()
        self.show_gradient()

    def room_for_gradient(self) -> Tensor:
        """Return a buffer for a gradient that another rank has reduced; call `show_gradient` once it is filled."""
        self._begin_gradient()
        assert self.whole_gradient.tensor is not None
        self.slice_gradient = self._own(self.whole_gradient.tensor)
        return self.slice_gradient

    def forget_norm(self, factor: Tensor) -> None:
        """Update or drop the stored norms after a caller has multiplied the gradient by `factor`."""
        self.whole_gradient.square_sums.clear()
        if self.gradient_norm is not None:
            self.gradient_norm = self.gradient_norm * factor.to(self.gradient_norm.dtype)

    def expect_gradient(self) -> None:
        """Called when backward reaches the block, before its first gradient. Does nothing here."""

    def keep_gradient(self) -> None:
        """Called when this micro-batch adds no more gradients and the sum is not reduced yet."""
        self.place_gradients()

    def forget_gradient(self) -> None:
        """Mark the gradient as used. Its buffers stay allocated and are overwritten by the next backward."""
        self.hides_gradient = False

    @property
    def device_gradients(self) -> list[Tensor | None]:
        """The gradient buffers in device memory."""
        return [self.whole_gradient.tensor, self.slice_gradient]

    def show_gradient(self) -> None:
        """Make the gradient visible to the optimizer: as `.grad` of the pieces, or through `slice_gradient`."""
        assert self.slice_gradient is not None
        received = self.whole_gradient.received
        self.unused = unused_pieces(self.slice_gradient, self.parts, self.pieces, received, self.unused)
        if (self.slice_gradient.dtype, self.slice_gradient.device) != (self.slice.dtype, self.slice.device):
            if not self.is_read_flat:
                raise PlanError(
                    f"plan.memory keeps the weights of '{self.layout.parameters[0].name}' on {self.slice.device} in "
                    f"{self.slice.dtype} and its gradient on {self.device} in {self.slice_gradient.dtype}, which only "
                    f"weft.AdamW(model, ...) takes; use it, or offload = 0 and master = true"
                )
            self.hides_gradient = True
            return
        for piece, part in zip(self.pieces, self.parts, strict=True):
            if part.numel and id(piece) not in self.unused:
                piece.grad = self.slice_gradient[part.place]

    def discard_gradient(self) -> None:
        """Drop the gradients of an interrupted backward and restore the gradient that the pieces had before it."""
        if self._reducing is not None:
            self._reducing.wait()
        if self._carried is not None and self.slice_gradient is not None:
            self.slice_gradient.copy_(self._carried)
        self._reducing = self._carried = None
        self.whole_gradient.discard()

    # --- internal

    def _make_whole(self) -> Tensor:
        return torch.empty(self.layout.numel, dtype=self.options.compute_dtype, device=self.device)

    def _make_slice(self, values: Callable[[str], Tensor]) -> Tensor:
        """Fill this rank's slice, one parameter at a time, so that no rank ever needs the whole model in memory."""
        if not self.is_apart:
            piece = self.own_whole
            self.whole.zero_()
        else:
            piece = self.state_zeros(self.layout.slice_numel, self.options.slice_dtype)
        for part in self.parts:
            if part.numel:
                value = values(part.parameter.name).detach().reshape(-1)[part.start : part.stop]
                piece[part.place].copy_(value)
        return piece

    def _fill_whole(self, values: Callable[[str], Tensor]) -> None:
        """Fill `whole` from `values`, without communication: frozen parameters that stay whole never change."""
        for parameter, view in zip(self.layout.parameters, self.layout.views(self.whole), strict=True):
            view.copy_(values(parameter.name).detach())
        self._install(self.whole_parameters)
        self.is_whole = True

    def _whole_parameter(self, parameter: Parameter, start: int) -> nn.Parameter:
        # Made from the storage, not as a view of `whole`: the parameter's version counter, which autograd checks, must
        # not change when the buffer is gathered again for backward.
        tensor = torch.empty(0, dtype=self.options.compute_dtype, device=self.device)
        stride = torch.empty(parameter.shape, device="meta").stride()
        tensor.set_(self.whole.untyped_storage(), start, parameter.shape, stride)
        return nn.Parameter(tensor, requires_grad=self.trainable)

    def _piece(self, part: ParameterPart) -> nn.Parameter:
        piece = nn.Parameter(self.slice[part.place], requires_grad=self.trainable)
        if self.trainable:  # autograd must reach whole parameters only; a gradient of a piece is never reduced
            piece.register_post_accumulate_grad_hook(partial(refuse_gradient, part.parameter.name))
        return piece

    def state_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros for a tensor that lives from step to step, on the host or the device as the plan says."""
        if self.options.on_host:
            return host_zeros(numel, dtype, self.device)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def _own(self, buffer: Tensor) -> Tensor:
        return buffer.narrow(0, self.shard.index * self.layout.slice_numel, self.layout.slice_numel)

    @cached_property
    def _num_means(self) -> int:
        ranks = (self.shard.degree, self.options.num_sending_ranks, *(axis.degree for axis in self.mean_over))
        return math.prod(ranks)

    @cached_property
    def _mean(self) -> Tensor:
        # A tensor of one element, not a number: its product with a narrower gradient is computed in the master dtype.
        return torch.full((1,), 1 / self._num_means, dtype=self.options.master_dtype, device=self.device)

    def _begin_gradient(self) -> None:
        self.await_update()  # the update reads the last gradient
        self.whole_gradient.square_sums.clear()
        self.whole_gradient.received.clear()
        # A gradient that an earlier backward left on the pieces, and that nobody cleared, is added at the end.
        if self.hides_gradient:
            self._widen()
            assert self.slice_gradient is not None
            self._carried, self.hides_gradient = self.slice_gradient.clone(), False
        for piece, part in zip(self.pieces, self.parts, strict=True):
            if piece.grad is not None:
                if self._carried is None:
                    self._carried = torch.full(
                        (self.layout.slice_numel,), -0.0, dtype=self.options.master_dtype, device=self.device
                    )
                self._carried[part.place].copy_(piece.grad)
        if self.whole_gradient.tensor is None:
            is_narrow = self.whole_gradient.is_unsummed and self.is_read_flat
            dtype = self.options.compute_dtype if is_narrow else self.options.master_dtype
            self.whole_gradient.set_tensor(torch.empty(self.layout.numel, dtype=dtype, device=self.device))
            self.whole_gradient.zero_padding()

    def _widen(self) -> None:
        """Switch the flat gradient to the master dtype, because gradients are now summed."""
        self.whole_gradient.is_unsummed = False
        before = self.whole_gradient.tensor
        if before is not None and before.dtype != self.options.master_dtype:
            after = before.to(self.options.master_dtype)
            self.whole_gradient.set_tensor(after)
            if self.slice_gradient is not None:
                self.slice_gradient = self._own(after)

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for places, parameter in zip(self.owners, parameters, strict=True):
            for module, name in places:
                module._parameters[name] = parameter

    def _free_whole(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def _wait_reduce(self) -> None:
        assert self._reducing is not None
        self._reducing.wait()
