"""AdamW over a model's flat slices: the algorithm of torch.optim.AdamW, in one pass over each slice.

Any torch optimizer can train the pieces of a parallel model. This one also reads gradients in the compute dtype, scales
them in the same pass (clipping needs no pass of its own), writes the new weights where the next forward reads them, and
keeps its state as the plan says. Neighbouring parts of a buffer with equal options are updated together, as one range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import CheckpointError, PlanError
from weft.optim.buffer_state import KINDS as PENDING_KINDS
from weft.optim.buffer_state import BufferState, is_pending, refuse_undelayed, stale_reason
from weft.optim.host_stream import HostStreams
from weft.optim.update import apply_fused_update, apply_update, scaled_gradient, update_constants, update_for
from weft.optim.update import update as plain_update
from weft.parallel.model_state import all_flats, all_units
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import STAGING, STAGING_NUMEL, ParameterPart, moment_dtype, slot_shapes, streamed_slot_shapes

CHUNK_NUMEL = 1 << 22  # elements per call of the plain update, which keeps intermediate results
KERNEL_NUMEL = 1 << 26  # elements per call of the kernel
SharedWeights = Callable[[nn.Parameter], Tensor]  # from a piece to its weights that leave the run
# A buffer, its gradient, the scale of the gradient, and a second tensor for new weights.
_Work = tuple[BufferState, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _ScaleCopy:
    """The scale of an update, being copied to the host.

    `event` marks the end of the copy. `counts` are the step counts that are reduced by 1 if the scale is not finite.
    """

    scale: Tensor
    event: torch.cuda.Event
    counts: list[Tensor] = field(default_factory=list)


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) over a model that `weft.parallelize` has split.

    `groups`: the trained pieces, or dictionaries with "params" and options, as torch's optimizers take them. If None,
    all trained pieces form one group.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not all_units(model):
            raise PlanError(
                "the model has no flat buffers: its plan has one rank and one precision, or weft.parallelize has not "
                "seen it; use torch.optim.AdamW(model.parameters(), fused=True)"
            )
        flats = [flat for flat in all_flats(model) if flat.trainable]
        given = list(groups if groups is not None else [piece for flat in flats for piece in flat.pieces])
        nothing = torch.zeros(0, requires_grad=True)  # a pipeline stage may have no trained parameters
        super().__init__(given or [nothing], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        group_of = {id(piece): n for n, group in enumerate(self.param_groups) for piece in group["params"]}
        known = {id(piece) for flat in flats for piece in flat.pieces}
        if not known >= group_of.keys() - {id(nothing)}:
            raise PlanError(
                f"{len(group_of.keys() - known)} of {len(group_of)} parameters are no trained pieces of the model; "
                f"give those of model.parameters() after weft.parallelize, or use torch.optim.AdamW"
            )
        self._numbers: dict[tuple[bool, int, int], Tensor] = {}
        self.held = [BufferState(flat, number, group_of) for number, flat in enumerate(flats)]
        away = [held.flat for held in self.held if held.flat.options.on_host]
        self._streams = _streams(away) if away else None
        self._no_seed = torch.zeros((), dtype=torch.int64, device=flats[0].device if flats else None)
        self._has_begun = False
        self._sent: _ScaleCopy | None = None
        self._places: dict[int, tuple[BufferState, int]] = {}
        for held in self.held:
            held.flat.is_read_flat = True
            for index, (part, piece) in enumerate(held.parts):
                self.state[piece] = held.store.views(index, part)
                self._places[id(piece)] = (held, index)

    @overload  # type: ignore[override]
    def step(self, closure: None = None, scale: Tensor | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], scale: Tensor | None = None) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, scale: Tensor | None = None) -> float | None:
        """Update all parameters that have a gradient, with the gradient multiplied by `scale` [].

        A scale that is NaN or infinite skips the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [held for held in self.held if held.flat.has_gradient]
        if any(held.flat.options.delays for held in ready):
            self.begin()
            self._put_off(ready, scale)
            return loss
        gradients = [held.flat.slice_gradient for held in ready]
        self._update_all(
            [(h, g, scale, h.flat.written) for h, g in zip(ready, gradients, strict=True) if g is not None]
        )
        for held in ready:
            held.flat.update_done = held.done
            if held.flat.written is not None:
                held.flat.mark_written()
        return loss

    def begin(self) -> None:
        """Start the update that the last step delayed. The new weights take effect at the end of this step."""
        waiting = [held for held in self.held if held.pending is not None]
        if self._has_begun or not waiting:
            return
        self._has_begun = True
        work: list[_Work] = []
        for held in waiting:
            assert held.pending is not None
            held.flat.write()  # weights before the update
            if held.following is None:
                held.following = torch.zeros_like(held.flat.own_whole)
            work.append((held, held.pending, held.pending_scale, held.following))
        self._update_all(work)
        for held in waiting:
            held.flat.mark_written()

    def _put_off(self, ready: Sequence[BufferState], scale: Tensor | None) -> None:
        """Make the weights of the started update take effect, and keep these gradients for the next step."""
        for held in self.held:
            if self._has_begun and held.following is not None and held.pending is not None:
                if held.done is not None:
                    torch.cuda.current_stream(held.flat.device).wait_event(held.done)
                held.flat.own_whole.copy_(held.following)
            held.pending, held.done = None, None
        self._has_begun = False
        for held in ready:
            assert held.flat.slice_gradient is not None
            held.pending, held.pending_scale = held.flat.slice_gradient.clone(), scale
            held.flat.mark_written()

    def _update_all(self, work: Sequence[_Work]) -> None:
        """Update all buffers: those on the host through their own streams, those on the device meanwhile."""
        self._settle()
        self._send(work[0][2] if work else None)  # all have the same scale
        self._numbers.clear()
        if self._streams is not None:
            self._streams.begin()
        for held, gradient, scale, written in work:
            if held.flat.options.on_host:
                self._update(held, gradient, scale, written, self._streams)
        for held, gradient, scale, written in work:
            if not held.flat.options.on_host:
                self._update(held, gradient, scale, written, None)

    def _send(self, scale: Tensor | None) -> None:
        """Start to copy the scale to the host, where `_settle` later checks whether it is finite."""
        if scale is not None and scale.is_cuda:
            there = torch.empty((), dtype=scale.dtype, pin_memory=True)
            there.copy_(scale, non_blocking=True)
            self._sent = _ScaleCopy(there, torch.cuda.current_stream(scale.device).record_event())

    def _settle(self) -> None:
        """Take back the step count of the last update if its scale was not finite.

        That update was queued a forward and a backward ago, so the device has work while the host waits here.
        """
        if self._sent is not None:
            self._sent.event.synchronize()
            if not math.isfinite(self._sent.scale):
                for steps in self._sent.counts:
                    steps -= 1
            self._sent = None

    def prepare_gradients(self) -> None:
        """Called when gradients are reduced, before their norm is taken. Does nothing here."""

    def shared_norm(self, norm: Tensor) -> Tensor:
        """Returns the norm to clip by: that of the gradients."""
        return norm

    def synchronize(self) -> None:
        """Wait until all state that is kept on the host has been copied there."""
        if self._streams is not None:
            self._streams.synchronize()

    @property
    def beside(self) -> dict[str, list[Tensor]]:
        """Its tensors on the device beside `state`, by kind: slots for state on the host, and delayed updates."""
        streams = self._streams
        slots = [] if streams is None else [tensor for slot in (*streams.slots, *streams.extra) for tensor in slot]
        pending = [held.pending for held in self.held if held.pending is not None]
        following = [held.following for held in self.held if held.following is not None]
        found = {STAGING: slots, "gradients": pending, "parameters": following}
        return {kind: tensors for kind, tensors in found.items() if tensors}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Mark all gradients as used. Their buffers stay allocated and are overwritten by the next backward."""
        super().zero_grad(set_to_none)
        for held in self.held:
            held.flat.forget_gradient()

    # --- one buffer

    def _update(
        self,
        held: BufferState,
        gradient: Tensor,
        scale: Tensor | None,
        written: Tensor | None,
        streams: HostStreams | None,
    ) -> None:
        flat, store = held.flat, held.store
        if scale is not None and not scale.is_cuda and not math.isfinite(scale):
            held.done = None
            if written is not None:
                written.copy_(flat.slice)
            return
        is_fused = store.is_plain and flat.device.type == "cpu"
        update = update_for(flat.device)
        chunk = CHUNK_NUMEL if update is plain_update else KERNEL_NUMEL
        if is_fused:
            gradient = scaled_gradient(gradient, scale, flat.slice.dtype)
        for run in held.runs(joined=not (is_fused or store.has_scales)):
            store.steps[run.first : run.last] += 1
            if self._sent is not None:
                self._sent.counts.append(store.steps[run.first : run.last])
            step, group = int(store.steps[run.first]), self.param_groups[run.group]
            size = STAGING_NUMEL if streams else run.numel if is_fused else chunk
            for start, stop in run.chunks(size):
                own = slice(start, stop)
                whole = None if written is None else written[own]
                state = store.at(run.first, held.parts[run.first][0], own)
                if is_fused:
                    change = partial(apply_fused_update, store.steps[run.first], group)
                else:
                    with nullcontext() if streams is None else streams.updating(scale):
                        seed = (
                            _on(torch.tensor(held.seed(step, start)), flat.device)
                            if held.needs_random_bits
                            else self._no_seed
                        )
                        known = self._known(run.group, step, flat)
                        one = torch.ones((), device=flat.device) if scale is None else scale
                    change = partial(apply_update, update, [one, known, seed])
                weight, changed = (None, (flat.slice[own], *state)) if flat.is_apart else (flat.slice[own], state)
                if streams is None:
                    change(weight, gradient[own], whole, changed)
                else:
                    streams.run(changed, partial(change, weight), gradient[own], whole, flat.is_streamed)
        held.done = None if streams is None else streams.updated(with_host=flat.frees_whole)

    def _known(self, group: int, step: int, flat: Flat) -> Tensor:
        """Returns the constants of a group's update in a step, copied to the device once for each stream."""
        key = (flat.options.on_host, group, step)
        if key not in self._numbers:
            found = torch.tensor(update_constants(self.param_groups[group], step), dtype=torch.float64)
            self._numbers[key] = _on(found, flat.device)
        return self._numbers[key]

    # --- its state in checkpoints

    def read_state(self, piece: nn.Parameter) -> dict[str, Tensor]:
        """Return a piece's state as floating-point tensors: the step and both moments (8-bit codes are decoded).

        If its update is delayed, the pending gradient, its scale and its step are included.
        """
        self._settle()
        held, index, part = self._find(piece)
        first, second = held.store.read(index, part)
        found = {"step": held.store.steps[index].clone(), "exp_avg": first, "exp_avg_sq": second}
        if held.pending is not None:
            assert not self._has_begun, "between steps"
            one = torch.ones((), dtype=torch.float64)
            found["pending"] = held.pending[part.place]
            found["pending_scale"] = one if held.pending_scale is None else held.pending_scale.clone()
            found["pending_step"] = held.store.steps[index] + 1
        return found

    def worker_kinds(self, kinds: Collection[str]) -> set[str]:
        """Returns the names of workers' states in a checkpoint (`worker_state.py`) that this rank needs: none here."""
        return set()

    def read_own_state(self, piece: nn.Parameter) -> dict[str, Tensor]:
        """State of a piece that other ranks of `data` do not have; there is none here."""
        return {}

    def write_state(self, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set a piece's state from a result of `read_state`. Call it between steps."""
        self._settle()
        held, index, part = self._find(piece)
        held.store.steps[index] = float(state["step"])
        held.store.write(index, part, state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        if not is_pending(state):
            held.pending = None
            return
        name, reason = part.parameter.name, stale_reason(state)
        if reason is not None:
            raise CheckpointError(
                f"the delayed update of '{name}' {reason}; remove {', '.join(PENDING_KINDS)} from its state"
            )
        if not held.flat.options.delays:
            refuse_undelayed(name)
        pending, device = state["pending"].view(-1), held.flat.device
        if held.pending is None or held.pending.dtype != pending.dtype:
            held.pending = torch.zeros(held.flat.layout.slice_numel, dtype=pending.dtype, device=device)
        held.pending[part.place].copy_(pending)
        held.pending_scale = state["pending_scale"].to(device)

    def forget_state(self, piece: nn.Parameter) -> None:
        """Reset a piece's state to that before the first update. Call it between steps."""
        self._settle()
        held, index, part = self._find(piece)
        held.store.steps[index] = 0
        for tensor in held.store.at(index, part, part.place):
            tensor.zero_()
        held.pending = None

    def state_dict(self) -> dict[str, Any]:
        """Return the groups and the state of each parameter by its number, in torch's format."""
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        found = super().state_dict()
        found["state"] = {number: self.read_state(piece) for number, piece in enumerate(pieces) if piece.numel()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set options and state from a result of `state_dict`, in place."""
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, state in state_dict["state"].items():
            self.write_state(pieces[number], state)

    def shared_weights(self) -> SharedWeights:
        """Returns a function from a piece to its weights that leave the run: here, those that it has."""
        return nn.Parameter.detach

    def sharing_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has these weights."""
        return nullcontext()

    def _find(self, piece: nn.Parameter) -> tuple[BufferState, int, ParameterPart]:
        held, index = self._places[id(piece)]
        return held, index, held.parts[index][0]


def _streams(flats: Sequence[Flat]) -> HostStreams:
    """Return streams for buffers whose state is on the host. All have the same dtypes."""
    flat, largest = flats[0], max(one.layout.slice_numel for one in flats)
    weight = flat.options.slice_dtype if any(one.is_apart for one in flats) else None
    shapes, extra = slot_shapes(largest, weight, moment_dtype(flat.options.state, flat.options.master_dtype)), []
    if any(one.is_streamed for one in flats):
        extra = streamed_slot_shapes(
            largest, flat.options.slice_dtype, flat.options.compute_dtype, flat.options.master_dtype
        )
    return HostStreams(shapes, flat.device, extra)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to a device; the host does not wait."""
    return tensor.to(device, non_blocking=True)
