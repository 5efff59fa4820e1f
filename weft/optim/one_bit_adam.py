"""1-bit Adam, which sends one bit per parameter over `data` (Tang et al., ICML 2021). It is not exact.

It is AdamW up to `freeze_step` updates. Then the second moment keeps its proportions and only follows the size of
gradients (`gradient_size.py`), each rank adds its own gradient to the first moment, and ranks exchange the signs of
that, weighted by the root of the second moment (`sign_compression.py`). Gradients are reduced over `shard` and other
axes as for AdamW, and each rank's slice is compressed over `data` alone.

Elements whose second moment is 0 at the freeze (rows of an embedding that never had a gradient) are not updated any
more: signs cannot say 0. A step of signs is clipped by the root of the mean squared norm of the ranks' own gradients,
which is at least the norm of their mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Axis, all_reduce
from weft.errors import PlanError
from weft.optim.adamw import AdamW
from weft.optim.buffer_state import BufferState
from weft.optim.gradient_size import GradientSize, block_squares
from weft.optim.sign_compression import SignCompressor
from weft.optim.worker_state import SERVER_ERROR, kinds_to_read, state_for_worker, worker_kind

logger = logging.getLogger("weft")


class OneBitAdam(AdamW):
    """1-bit Adam over a model that `weft.parallelize` has split. `data` is the mesh's axis of that name.

    Make it before the first backward: from then on gradients are not averaged over `data` by the model.
    """

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
    ) -> None:
        super().__init__(model, groups, lr, betas, eps, weight_decay)
        self.data, self.freeze_step = data, freeze_step
        self.compressors: dict[int, SignCompressor] = {}
        self.sizes: dict[int, GradientSize] = {}
        self._own_squares: dict[int, Tensor] = {}  # of this rank's gradients, before they are averaged
        for held in self.held:
            flat = held.flat
            if flat.is_streamed or flat.options.on_host or flat.options.delays or not held.store.is_plain:
                raise PlanError(
                    "1-bit and 0/1 Adam keep their state in the master dtype on the device and update at once; set "
                    "plan.memory.offload and weights to 0, delay to false, master to true and state to 'master', or "
                    "use AdamW"
                )
            flat.keep_local(data.name)
            self.compressors[held.number] = SignCompressor(flat.layout.slice_numel, data, flat.device, flat.slice.dtype)
            self.sizes[held.number] = GradientSize(flat.layout.slice_numel, flat.device, flat.slice.dtype)

    @property
    def num_updates(self) -> int:
        """The number of updates so far."""
        self._settle()
        return max((int(held.store.steps.max()) for held in self.held if len(held.store.steps)), default=0)

    def is_full_step(self, number: int) -> bool:
        """Does update `number`, counted from 1, exchange gradients in full precision?"""
        return number <= self.freeze_step

    def prepare_gradients(self) -> None:
        """Average gradients over `data`, if the next update needs them in full precision."""
        if not self.is_full_step(self.num_updates + 1):
            return
        for held in self._ready():
            gradient = held.flat.slice_gradient
            assert gradient is not None
            self._own_squares[held.number] = block_squares(gradient)
            gradient.mul_(1 / self.data.degree)
            all_reduce(gradient, self.data).wait()
            held.flat.show_gradient()

    def shared_norm(self, norm: Tensor) -> Tensor:
        """Returns the norm to clip by, equal on all ranks of `data`."""
        if self.is_full_step(self.num_updates + 1):
            return norm
        squared = norm.double().square() / self.data.degree
        all_reduce(squared, self.data).wait()
        return squared.sqrt()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, scale: Tensor | None = None
    ) -> float | None:
        """Update all parameters, with gradients multiplied by `scale` []. One that is NaN or infinite, which must be so
        on all ranks, skips the update.
        """
        number = self.num_updates + 1
        skips = scale is not None and not math.isfinite(scale)
        if not skips and self.is_full_step(number):
            factor = 1.0 if scale is None else float(scale) ** 2
            self._exchange_squares({held: factor * self._own_squares[held.number] for held in self._ready()}, number, 1)
        if self._is_exact(number):
            return super().step(closure, scale)  # type: ignore[arg-type]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if skips:
            return loss
        gradients = {}
        for held in self._ready():
            gradient = held.flat.slice_gradient
            assert gradient is not None
            wide = gradient.to(held.flat.slice.dtype)
            gradients[held] = wide if scale is None else wide * scale.to(wide.device, wide.dtype)
        if number > self.freeze_step:
            self._follow_sizes(gradients, number)
        for held, gradient in gradients.items():
            held.store.steps.fill_(number)
            self._update_compressed(held, gradient, number)
            if held.flat.written is not None:
                held.flat.written.copy_(held.flat.slice)
                held.flat.mark_written()
        return loss

    def _is_exact(self, number: int) -> bool:
        """Is this update the same as AdamW's?"""
        return number <= self.freeze_step

    def _ready(self) -> list[BufferState]:
        """Returns all buffers of which this step has reduced a gradient: the same on all ranks of `data`."""
        return [held for held in self.held if held.flat.slice_gradient is not None]

    def _follow_sizes(self, gradients: Mapping[BufferState, Tensor], number: int) -> None:
        """Let second moments follow the size of the gradients of this update on all ranks of `data`."""
        self._exchange_squares({held: block_squares(one) for held, one in gradients.items()}, number, 1)

    def _exchange_squares(self, squares: Mapping[BufferState, Tensor], number: int, num_steps: int) -> None:
        """Average mean squares of `num_steps` steps over `data`. After the freeze, the second moments follow them."""
        if not squares:
            return
        together = torch.cat(list(squares.values())) / self.data.degree
        all_reduce(together, self.data).wait()
        decay, count = self.param_groups[0]["betas"][1], self._num_variances(number) + max(0, number - self.freeze_step)
        for held, own in zip(squares, together.split([len(one) for one in squares.values()]), strict=True):
            sizes, second = self.sizes[held.number], held.store.tensors[1]
            change = sizes.renew(own, decay, count, num_steps)
            if number > self.freeze_step:
                second.mul_(sizes.spread(change).to(second.dtype))

    def _update_compressed(self, held: BufferState, gradient: Tensor, number: int) -> None:
        first, _ = held.store.tensors
        beta1, _ = self.param_groups[0]["betas"]
        own, below = first.lerp(gradient, 1 - beta1), self._below(held, number)
        first.copy_(self.compressors[held.number].mean(own, below))
        for place, group in self._places_of(held):
            size = group["lr"] / (1 - group["betas"][0] ** number)
            weight = held.flat.slice[place].mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(size * divided(first[place], below[place]))

    def _num_variances(self, number: int) -> int:
        """Returns how often the second moment was renewed up to update `number`."""
        return min(number, self.freeze_step)

    def _below(self, held: BufferState, number: int) -> Tensor:
        """Returns what Adam divides the first moment by, which also weights signs: 0 where the second moment is 0."""
        second = held.store.tensors[1]
        below = torch.zeros_like(second)
        for place, group in self._places_of(held):
            correction = float(1 - group["betas"][1] ** self._num_variances(number))
            root = (second[place] / correction).sqrt() + float(group["eps"])
            below[place] = torch.where(second[place] > 0, root, 0.0)
        return below

    def _places_of(self, held: BufferState) -> Iterator[tuple[slice, Mapping[str, Any]]]:
        """Yields the place of each trained part in the slice, with its group."""
        for (part, _), group in zip(held.parts, held.group_of, strict=True):
            if group is not None:
                yield part.place, self.param_groups[group]

    # --- state of this rank alone, in checkpoints

    def own_tensors(self, held: BufferState) -> dict[str, Tensor]:
        """Tensors of a slice that differ between the ranks of `data`, by kind; each has an element for each of its."""
        compressor = self.compressors[held.number]
        numel, part = compressor.numel, compressor.server_error.numel()
        server = compressor.server_error.new_zeros(self.data.degree * part)
        server[self.data.index * part : (self.data.index + 1) * part] = compressor.server_error
        sizes = self.sizes[held.number]
        return {
            "worker_error": compressor.worker_error,
            SERVER_ERROR: server[:numel],
            "gradient_size": sizes.spread(sizes.sizes),
        }

    def set_own(self, held: BufferState, kind: str, place: slice, values: Tensor) -> None:
        """Set a part of one of `own_tensors`."""
        if kind == "gradient_size":
            self.sizes[held.number].gather(self.sizes[held.number].sizes, place, values)
            return
        if kind != SERVER_ERROR:
            self.own_tensors(held)[kind][place].copy_(values)
            return
        error = self.compressors[held.number].server_error
        start = self.data.index * error.numel()
        low, high = max(place.start, start), min(place.stop, start + error.numel())
        if low < high:
            error[low - start : high - start] = values[low - place.start : high - place.start]

    def read_own_state(self, piece: nn.Parameter) -> dict[str, Tensor]:
        """Returns a piece's state that no other rank of `data` has, by names that tell the rank."""
        held, _, part = self._find(piece)
        index, degree, tensors = self.data.index, self.data.degree, self.own_tensors(held)
        return {worker_kind(kind, index, degree): own[part.place].clone() for kind, own in tensors.items()}

    def write_state(self, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set a piece's state. Workers' states may be of another plan (`worker_state.py`)."""
        super().write_state(piece, state)
        held, _, part = self._find(piece)
        given = state_for_worker(state, self.data.index, self.data.degree)
        kinds = list(self.own_tensors(held))
        for kind in kinds:
            values = given[kind].view(-1) if kind in given else self._initial(held, kind, part.place)
            self.set_own(held, kind, part.place, values)
        if not given.keys() >= set(kinds) and int(state["step"]) > self.freeze_step:
            logger.warning(
                "weft: the checkpoint has no errors of compression of '%s' and others; they begin at 0",
                part.parameter.name,
            )

    def forget_state(self, piece: nn.Parameter) -> None:
        """Reset a piece's state to that before the first update, also that of this rank alone."""
        super().forget_state(piece)
        held, _, part = self._find(piece)
        for kind in self.own_tensors(held):
            self.set_own(held, kind, part.place, self._initial(held, kind, part.place))

    def _initial(self, held: BufferState, kind: str, place: slice) -> Tensor:
        """Returns the value of a part of one of `own_tensors` that a checkpoint does not have."""
        return torch.zeros_like(held.flat.slice[place])

    def worker_kinds(self, kinds: Collection[str]) -> set[str]:
        """Returns the names of workers' states in a checkpoint that this rank needs."""
        return kinds_to_read(kinds, self.data.index, self.data.degree)


def divided(values: Tensor, below: Tensor) -> Tensor:
    """Returns values / below, and 0 where `below` is 0."""
    return torch.where(below > 0, values / torch.where(below > 0, below, 1.0), 0.0)
