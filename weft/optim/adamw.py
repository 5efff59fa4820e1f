"""Weft's AdamW: torch's, over the flat slices of a model instead of its pieces, one pass over each.

Any torch optimizer trains a parallel model's pieces. This one also reads gradients in the compute dtype, scales them on
the way (clipping needs no pass of its own), writes the new weights where the next forward computes with them, and keeps
its state as the plan says. What lies side by side in a buffer and is treated alike is one *run*, updated at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import CheckpointError, PlanError
from weft.optim.buffer_state import Held
from weft.optim.delayed_update import KINDS as PENDING_KINDS
from weft.optim.delayed_update import is_pending, refuse_undelayed, stale_reason
from weft.optim.host_stream import Streams
from weft.optim.update import change_by, change_by_torch, numbers, scaled, update_on
from weft.optim.update import update as plain_update
from weft.parallel.model_state import all_flats, all_units
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import STAGING, STAGING_NUMEL, ParameterPart, moment_dtype, slot_shapes, streamed_slot_shapes

CHUNK_NUMEL = 1 << 22  # of a pass that is not one kernel, and whose results in between are kept
KERNEL_NUMEL = 1 << 26  # of one that is


_Work = tuple[Held, Tensor, Tensor | None, Tensor | None]  # a buffer, its gradient, the scale, and where weights go too


@dataclass(frozen=True)
class _Sent:
    """The scale of an update on its way to the host, when it is there, and the counts of steps that depend on it."""

    scale: Tensor
    event: torch.cuda.Event
    counts: list[Tensor] = field(default_factory=list)


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) over a model that `weft.parallelize` has laid out.

    `groups`: all trained pieces, or dictionaries with "params" and options, as torch's optimizers take them.
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
        nothing = torch.zeros(0, requires_grad=True)  # a stage may be frozen
        super().__init__(given or [nothing], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        group_of = {id(piece): n for n, group in enumerate(self.param_groups) for piece in group["params"]}
        known = {id(piece) for flat in flats for piece in flat.pieces}
        if not known >= group_of.keys() - {id(nothing)}:
            raise PlanError(
                f"{len(group_of.keys() - known)} of {len(group_of)} parameters are no trained pieces of the model; "
                f"give those of model.parameters() after weft.parallelize, or use torch.optim.AdamW"
            )
        self._numbers: dict[tuple[bool, int, int], Tensor] = {}
        self.held = [Held(flat, number, group_of) for number, flat in enumerate(flats)]
        away = [held.flat for held in self.held if held.flat.on_host]
        self._streams = _streams(away) if away else None
        self._no_seed = torch.zeros((), dtype=torch.int64, device=flats[0].device if flats else None)
        self._has_begun = False
        self._sent: _Sent | None = None
        self._places: dict[int, tuple[Held, int]] = {}
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
        """Update all that has a gradient, taken times `scale` []; nothing, where that is NaN or infinite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [held for held in self.held if held.flat.has_gradient]
        if any(held.flat.delays for held in ready):
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
        """Start the update that the last step put off; its weights take their place at the end of this one."""
        waiting = [held for held in self.held if held.pending is not None]
        if self._has_begun or not waiting:
            return
        self._has_begun = True
        work: list[_Work] = []
        for held in waiting:
            assert held.pending is not None
            held.flat.write()  # the weights before the update
            if held.following is None:
                held.following = torch.zeros_like(held.flat.own_whole)
            work.append((held, held.pending, held.pending_scale, held.following))
        self._update_all(work)
        for held in waiting:
            held.flat.mark_written()

    def _put_off(self, ready: Sequence[Held], scale: Tensor | None) -> None:
        """Let the weights of the update that has begun take their place, and keep these gradients for the next step."""
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
        """What is on the host by its own streams, what is on the device meanwhile."""
        self._settle()
        self._send(work[0][2] if work else None)  # one for all
        self._numbers.clear()
        if self._streams is not None:
            self._streams.begin()
        for held, gradient, scale, written in work:
            if held.flat.on_host:
                self._update(held, gradient, scale, written, self._streams)
        for held, gradient, scale, written in work:
            if not held.flat.on_host:
                self._update(held, gradient, scale, written, None)

    def _send(self, scale: Tensor | None) -> None:
        """Let the host know later whether this update's scale is a number; see `_settle`."""
        if scale is not None and scale.is_cuda:
            there = torch.empty((), dtype=scale.dtype, pin_memory=True)
            there.copy_(scale, non_blocking=True)
            self._sent = _Sent(there, torch.cuda.current_stream(scale.device).record_event())

    def _settle(self) -> None:
        """Count the last update only if its scale was a number. It was queued a forward and a backward ago: the device
        has work while the host waits here.
        """
        if self._sent is not None:
            self._sent.event.synchronize()
            if not math.isfinite(self._sent.scale):
                for steps in self._sent.counts:
                    steps -= 1
            self._sent = None

    def synchronize(self) -> None:
        """Wait until the host has the state that lives there."""
        if self._streams is not None:
            self._streams.synchronize()

    @property
    def beside(self) -> dict[str, list[Tensor]]:
        """What it holds on the device beside `state`, by kind: slots for state on the host, and delayed updates."""
        streams = self._streams
        slots = [] if streams is None else [tensor for slot in (*streams.slots, *streams.passing) for tensor in slot]
        pending = [held.pending for held in self.held if held.pending is not None]
        following = [held.following for held in self.held if held.following is not None]
        found = {STAGING: slots, "gradients": pending, "parameters": following}
        return {kind: tensors for kind, tensors in found.items() if tensors}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; buffers of them stay, and are written before they are read."""
        super().zero_grad(set_to_none)
        for held in self.held:
            held.flat.forget_gradient()

    # --- one buffer

    def _update(
        self,
        held: Held,
        gradient: Tensor,
        scale: Tensor | None,
        written: Tensor | None,
        streams: Streams | None,
    ) -> None:
        flat, store = held.flat, held.store
        if scale is not None and not scale.is_cuda and not math.isfinite(scale):
            held.done = None
            if written is not None:
                written.copy_(flat.slice)
            return
        is_fused = store.is_plain and flat.device.type == "cpu"
        update = update_on(flat.device)
        chunk = CHUNK_NUMEL if update is plain_update else KERNEL_NUMEL
        if is_fused:
            gradient = scaled(gradient, scale, flat.slice.dtype)
        for run in held.runs(joined=not (is_fused or store.has_scales)):
            store.steps[run.first : run.last] += 1
            if self._sent is not None:
                self._sent.counts.append(store.steps[run.first : run.last])
            step, group = int(store.steps[run.first]), self.param_groups[run.group]
            size = STAGING_NUMEL if streams else run.numel if is_fused else chunk
            for start, stop in run.chunks(size):
                own = slice(start, stop)
                whole = None if written is None else written[own]
                state = store.at(run.first, held.parts[run.first][0], start, stop)
                if is_fused:
                    change = partial(change_by_torch, store.steps[run.first], group)
                else:
                    with nullcontext() if streams is None else streams.updating(scale):
                        seed = (
                            _on(torch.tensor(held.seed(step, start)), flat.device)
                            if held.needs_draws
                            else self._no_seed
                        )
                        known = self._known(run.group, step, flat)
                        one = torch.ones((), device=flat.device) if scale is None else scale
                    change = partial(change_by, update, [one, known, seed])
                weight, changed = (None, (flat.slice[own], *state)) if flat.is_apart else (flat.slice[own], state)
                if streams is None:
                    change(weight, gradient[own], whole, changed)
                else:
                    streams.run(changed, partial(change, weight), gradient[own], whole, flat.is_streamed)
        held.done = None if streams is None else streams.updated(with_host=flat.frees_whole)

    def _known(self, group: int, step: int, flat: Flat) -> Tensor:
        """A group's numbers in one step, sent once to each stream that uses them."""
        key = (flat.on_host, group, step)
        if key not in self._numbers:
            found = torch.tensor(numbers(self.param_groups[group], step), dtype=torch.float64)
            self._numbers[key] = _on(found, flat.device)
        return self._numbers[key]

    # --- its state in checkpoints

    def read_state(self, piece: nn.Parameter) -> dict[str, Tensor]:
        """A piece's state as numbers: both moments, of codes their values, and the step."""
        self._settle()
        held, index, part = self._find(piece)
        first, second = held.store.read(index, part)
        found = {"step": held.store.steps[index].clone(), "exp_avg": first, "exp_avg_sq": second}
        if held.pending is not None:
            assert not self._has_begun, "between steps"
            one = torch.ones((), dtype=torch.float64)
            found["pending"] = held.pending[part.offset : part.offset + part.stop - part.start]
            found["pending_scale"] = one if held.pending_scale is None else held.pending_scale.clone()
            found["pending_step"] = held.store.steps[index] + 1
        return found

    def write_state(self, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set a piece's state from such numbers, between steps."""
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
        if not held.flat.delays:
            refuse_undelayed(name)
        pending, device = state["pending"].view(-1), held.flat.device
        if held.pending is None or held.pending.dtype != pending.dtype:
            held.pending = torch.zeros(held.flat.layout.slice_numel, dtype=pending.dtype, device=device)
        held.pending[part.offset : part.offset + part.stop - part.start].copy_(pending)
        held.pending_scale = state["pending_scale"].to(device)

    def forget_state(self, piece: nn.Parameter) -> None:
        """Set a piece's state as before the first update, between steps."""
        self._settle()
        held, index, part = self._find(piece)
        held.store.steps[index] = 0
        for tensor in held.store.at(index, part, part.offset, part.offset + part.stop - part.start):
            tensor.zero_()
        held.pending = None

    def state_dict(self) -> dict[str, Any]:
        """As torch's: groups, and the state of each parameter by its number."""
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        found = super().state_dict()
        found["state"] = {number: self.read_state(piece) for number, piece in enumerate(pieces) if piece.numel()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set options and state from such a dictionary, in place."""
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, state in state_dict["state"].items():
            self.write_state(pieces[number], state)

    def _find(self, piece: nn.Parameter) -> tuple[Held, int, ParameterPart]:
        held, index = self._places[id(piece)]
        return held, index, held.parts[index][0]


def _streams(flats: Sequence[Flat]) -> Streams:
    """For buffers whose state is on the host, which have one format."""
    flat, largest = flats[0], max(one.layout.slice_numel for one in flats)
    weight = flat.slice_dtype if any(one.is_apart for one in flats) else None
    shapes, passing = slot_shapes(largest, weight, moment_dtype(flat.state, flat.master_dtype)), []
    if any(one.is_streamed for one in flats):
        passing = streamed_slot_shapes(largest, flat.slice_dtype, flat.compute_dtype, flat.master_dtype)
    return Streams(shapes, flat.device, passing)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """A few bytes on their way to a device; the host does not wait for it."""
    return tensor.to(device, non_blocking=True)
