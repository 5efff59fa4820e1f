"""0/1 Adam: signs before the freeze, and steps without any communication after it (Lu et al., ICLR 2023).

Before the freeze, steps that renew the second moment average gradients in full precision; they become rarer. The other
steps average the signs of gradients. After the freeze each rank updates by itself, and ranks exchange the signs of what
they have added up every `sync_interval` steps:

    m' = beta1 m + (1 - beta1) g;   u' = u + r m';   theta' = theta - r m' / (sqrt(v) + eps)
    at a synchronisation, with R = the sum of r since the last one:
    m = mean of signs of u / R;  theta = theta before - R m / (sqrt(v) + eps);  u = 0

where r is the learning rate with the bias correction of the first moment. As in 1-bit Adam, signs are weighted by
sqrt(v) + eps, and v follows the size of gradients at synchronisations. Between synchronisations ranks of `data` have
different weights, so a checkpoint has those of every rank beside their mean, which is the model: what is evaluated,
exported, served and sent to validators. The errors of the compression are forgotten at the freeze,
because another quantity is compressed from there on.

The published algorithm compresses u itself, so its errors have the learning rate of the step that made them. While
the learning rate falls, such errors become larger than what is added to them, and after some hundred steps the loss
rises. What is compressed here is u / R, a mean of first moments, which no learning rate changes. With a constant
learning rate and constant intervals both are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Axis, Ledger, all_reduce
from weft.optim.adamw import SharedWeights
from weft.optim.buffer_state import BufferState
from weft.optim.gradient_size import block_squares
from weft.optim.one_bit_adam import OneBitAdam, divided
from weft.sharding.flat_buffer import Flat

_BY_BLOCK = ("square_sum", "square_count")  # state with a value for each block of `gradient_size.py`


@lru_cache
def variance_steps(last: int, kappa: int) -> tuple[int, ...]:
    """Returns the updates up to `last`, counted from 1, that renew the second moment: gap j is 2^(j // kappa)."""
    found, number, gap = list[int](), 1, 0
    while number <= last:
        found.append(number)
        number += 2 ** (gap // kappa)
        gap += 1
    return tuple(found)


def sync_interval(number: int, freeze_step: int, scaler: int, longest: int) -> int:
    """Updates from one synchronisation to the next at update `number`: 1, doubled every `scaler` updates after the
    freeze, at most `longest`.
    """
    return 1 if number <= freeze_step else int(min(longest, 2 ** min(30, (number - freeze_step - 1) // scaler)))


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam over a model that `weft.parallelize` has split. `data` is the mesh's axis of that name."""

    def __init__(
        self,
        model: nn.Module,
        data: Axis,
        groups: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        freeze_step: int = 1000,
        kappa: int = 16,
        local_scaler: int = 32678,
        most_local: int = 16,
    ) -> None:
        super().__init__(model, data, groups, lr, betas, eps, weight_decay, freeze_step)
        self.kappa, self.local_scaler, self.most_local = kappa, local_scaler, most_local
        # Of each buffer: the weights of the last synchronisation, and since then the sum of r m, the sum of r by
        # element, the sum of mean squares by block, and the number of these.
        self._local: dict[int, dict[str, Tensor]] = {}

    def is_full_step(self, number: int) -> bool:
        """Does update `number`, counted from 1, exchange gradients in full precision?"""
        return number in variance_steps(self.freeze_step, self.kappa)

    def is_sync_step(self, number: int) -> bool:
        """Do ranks exchange something in update `number`?"""
        interval = sync_interval(number, self.freeze_step, self.local_scaler, self.most_local)
        return number <= self.freeze_step or (number - self.freeze_step) % interval == 0

    def _is_exact(self, number: int) -> bool:
        return False

    def _update_compressed(self, held: BufferState, gradient: Tensor, number: int) -> None:
        if number <= self.freeze_step:
            self._update_before(held, gradient, number)
        else:
            self._update_after(held, gradient, number)

    def _num_variances(self, number: int) -> int:
        """Returns how often the second moment was renewed up to update `number`."""
        return sum(step <= number for step in variance_steps(self.freeze_step, self.kappa))

    def _update_before(self, held: BufferState, gradient: Tensor, number: int) -> None:
        first, second = held.store.tensors
        beta1, beta2 = self.param_groups[0]["betas"]
        if self.is_full_step(number):
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            gradient = self.compressors[held.number].mean(gradient, self._below(held, number))
        first.lerp_(gradient, 1 - beta1)
        below = self._below(held, number)
        for place, group in self._places_of(held):
            self._decay(held.flat.slice[place], group)
            rate = group["lr"] / (1 - beta1**number)
            held.flat.slice[place].sub_(rate * divided(first[place], below[place]))

    def _follow_sizes(self, gradients: Mapping[BufferState, Tensor], number: int) -> None:
        """Add up mean squares, and let second moments follow them at synchronisations."""
        local = {held: self._local_state(held) for held in gradients}
        for held, gradient in gradients.items():
            local[held]["square_sum"].add_(block_squares(gradient))
            local[held]["square_count"].add_(1)
        if not gradients or not self.is_sync_step(number):
            return
        means = {held: own["square_sum"] / own["square_count"] for held, own in local.items()}
        self._exchange_squares(means, number, int(next(iter(local.values()))["square_count"][0]))
        for own in local.values():
            own["square_sum"].zero_()
            own["square_count"].zero_()

    def _update_after(self, held: BufferState, gradient: Tensor, number: int) -> None:
        first, local, below = held.store.tensors[0], self._local_state(held), self._below(held, number)
        beta1, _ = self.param_groups[0]["betas"]
        if number == self.freeze_step + 1:
            self.compressors[held.number].clear()
        first.lerp_(gradient, 1 - beta1)
        first.mul_(below > 0)
        for place, group in self._places_of(held):
            rate = group["lr"] / (1 - beta1**number)
            local["own_update"][place].add_(first[place], alpha=rate)
            local["rate_sum"][place].add_(rate)
            for weight in (held.flat.slice, local["anchor"]):
                self._decay(weight[place], group)
            held.flat.slice[place].sub_(rate * divided(first[place], below[place]))
        if not self.is_sync_step(number):
            return
        first.copy_(self.compressors[held.number].mean(divided(local["own_update"], local["rate_sum"]), below))
        update = first * local["rate_sum"]
        for place, _ in self._places_of(held):
            held.flat.slice[place].copy_(local["anchor"][place].sub_(divided(update[place], below[place])))
        local["own_update"].zero_()
        local["rate_sum"].zero_()

    def _mean_slices(self) -> dict[int, Tensor]:
        """Returns the means of slices over `data`, by number of the buffer; empty if all these ranks have the same
        weights.
        """
        number, data = self.num_updates, replace(self.data, ledger=Ledger())  # no part of a step's traffic
        if data.degree == 1 or number <= self.freeze_step or self.is_sync_step(number):
            return {}
        found = {}
        for held in self.held:
            if held.number in self._local:
                total = held.flat.slice.double()  # where all ranks have the same, the mean is that
                all_reduce(total, data).wait()
                found[held.number] = (total / data.degree).to(held.flat.slice.dtype)
        return found

    def shared_weights(self) -> SharedWeights:
        """Returns a function from a piece to the mean of its weights over `data`."""
        means = self._mean_slices()

        def weights(piece: nn.Parameter) -> Tensor:
            if not means or id(piece) not in self._places:
                return piece.detach()
            held, _, part = self._find(piece)
            mean = means.get(held.number)
            return piece.detach() if mean is None else mean[part.place].view(piece.shape)

        return weights

    @contextmanager
    def sharing_weights(self) -> Iterator[None]:
        """A context in which the model has the mean of the weights over `data`."""
        means = self._mean_slices()
        flats = {held.number: held.flat for held in self.held if held.number in means}
        own = {number: flat.slice.clone() for number, flat in flats.items()}
        try:
            _set_slices(flats, means)
            yield
        finally:
            _set_slices(flats, own)

    def _decay(self, weight: Tensor, group: Mapping[str, Any]) -> None:
        weight.mul_(1 - group["lr"] * group["weight_decay"])

    def _local_state(self, held: BufferState) -> dict[str, Tensor]:
        """Returns the tensors of local steps, made at the first of them."""
        if held.number not in self._local:
            zeros = torch.zeros_like(held.flat.slice)
            self._local[held.number] = {
                "anchor": held.flat.slice.clone(),
                "own_update": zeros,
                "rate_sum": zeros.clone(),
                **{kind: torch.zeros_like(self.sizes[held.number].sizes) for kind in _BY_BLOCK},
            }
        return self._local[held.number]

    def write_state(self, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set a piece's state, as `OneBitAdam` does."""
        super().write_state(piece, state)
        self._forget_local()

    def forget_state(self, piece: nn.Parameter) -> None:
        """Reset a piece's state to that before the first update."""
        super().forget_state(piece)
        self._forget_local()

    def _forget_local(self) -> None:
        """Before the freeze there are no local steps; the first after it begins at the weights that are there then."""
        if self.num_updates <= self.freeze_step:
            self._local.clear()

    def _initial(self, held: BufferState, kind: str, place: slice) -> Tensor:
        if kind in ("anchor", "own_weight", "own_moment"):
            shared = held.store.tensors[0] if kind == "own_moment" else held.flat.slice
            found: Tensor = shared[place].clone()
            return found
        return super()._initial(held, kind, place)

    def set_own(self, held: BufferState, kind: str, place: slice, values: Tensor) -> None:
        """Set a part of one of `own_tensors`."""
        if kind in _BY_BLOCK:
            self.sizes[held.number].gather(self._local_state(held)[kind], place, values)
        else:
            super().set_own(held, kind, place, values)

    def own_tensors(self, held: BufferState) -> dict[str, Tensor]:
        """Tensors of a slice that differ between the ranks of `data`; those of local steps once there were some."""
        found = super().own_tensors(held)
        if self.num_updates > self.freeze_step:
            local = self._local_state(held)
            by_block = {kind: self.sizes[held.number].spread(local[kind]) for kind in _BY_BLOCK}
            own = {"own_weight": held.flat.slice, "own_moment": held.store.tensors[0]}
            found |= {**local, **by_block, **own}
        return found


@torch.no_grad()
def _set_slices(flats: Mapping[int, Flat], values: Mapping[int, Tensor]) -> None:
    for number, flat in flats.items():
        flat.slice.copy_(values[number])
        flat.refresh()
