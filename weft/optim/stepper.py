"""One interface to an optimizer, weft's own or torch's: clipping, updating, and its state in a checkpoint.

`stepper(optimizer)` is the only place that asks which of them it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import CheckpointError
from weft.mesh import Mesh
from weft.optim.adamw import AdamW, SharedWeights
from weft.optim.buffer_state import is_pending, refuse_undelayed
from weft.optim.kfac import KFAC, MOMENTUM, ReadState
from weft.parallel.gradient_norm import clip_factor, clip_grad_norm, grad_norm

logger = logging.getLogger("weft")
Judge = Callable[
    [Tensor], Tensor
]  # of the gradient norm [] to a verdict []: 0 makes the update, anything else does not


class Stepper:
    """What weft needs of an optimizer, for one that keeps nothing beside torch's state of its parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def begin(self, num_targets: Tensor) -> None:
        """Called at the start of a step, before its forward, with the number of targets of all ranks []."""

    def synchronize(self) -> None:
        """Wait until the optimizer's state and the parameters are up to date."""

    def update(
        self, model: nn.Module, mesh: Mesh, clip: float | None, judge: Judge | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Clip gradients to a global norm of `clip` and update, unless the verdict is against it. Returns the norm
        before clipping (`norm`, if it is known already) and the verdict.
        """
        norm = clip_grad_norm(model, clip, mesh, norm)
        verdict = None if judge is None else judge(norm)
        self._step(norm, verdict)
        return norm, verdict

    def _step(self, norm: Tensor, verdict: Tensor | None) -> None:
        """Update with clipped gradients, unless the verdict is against it."""
        raise NotImplementedError

    def read_state(self, piece: nn.Parameter) -> Mapping[str, Tensor]:
        """Returns the state of one of this rank's pieces, by kind."""
        state: Mapping[str, Tensor] = self._optimizer.state.get(piece, {})
        return state

    def worker_kinds(self, kinds: Collection[str]) -> set[str]:
        """Returns the workers' states in a checkpoint (`worker_state.py`) that `write_state` needs on this rank."""
        return set()

    def read_own_state(self, piece: nn.Parameter) -> Mapping[str, Tensor]:
        """Returns the state of a piece that the other ranks of `data` do not have, by kind."""
        return {}

    def write_state(self, name: str, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set the state of a piece; empty for a checkpoint from before the first update. `finish_writing` comes after
        all.
        """
        raise NotImplementedError

    def shared_weights(self) -> SharedWeights:
        """Returns a function from one of this rank's pieces to the weights that a checkpoint and a validator have of
        it: where ranks of `data` have different ones, the mean of all. All these ranks call it at once.
        """
        return nn.Parameter.detach

    def sharing_weights(self) -> AbstractContextManager[None]:
        """A context in which the model itself has these weights. All ranks of `data` enter it at once."""
        return nullcontext()

    def whole_state(self) -> Iterable[tuple[str, str, Tensor]]:
        """State that this rank saves and that is not cut as its parameter is: name of the parameter, kind, value."""
        return ()

    def finish_writing(self, read: ReadState) -> None:
        """Finish after `write_state` of all pieces. `read` returns the whole of any state by name and kind, or None."""


class WeftStepper(Stepper):
    """Steps with weft's AdamW, which scales gradients in its own pass and makes no update where the scale is NaN."""

    _optimizer: AdamW

    def begin(self, num_targets: Tensor) -> None:
        self._optimizer.begin()

    def synchronize(self) -> None:
        self._optimizer.synchronize()

    def update(
        self, model: nn.Module, mesh: Mesh, clip: float | None, judge: Judge | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self._optimizer.prepare_gradients()
        norm = self._optimizer.shared_norm(grad_norm(model, mesh) if norm is None else norm)
        scale, verdict = clip_factor(norm, clip), None
        if judge is not None:
            verdict = judge(norm)
            scale = torch.where(verdict == 0, torch.ones_like(norm) if scale is None else scale, torch.nan)
        self._optimizer.step(scale=scale)
        return norm, verdict

    def read_state(self, piece: nn.Parameter) -> Mapping[str, Tensor]:
        return self._optimizer.read_state(piece) if piece.requires_grad else {}

    def worker_kinds(self, kinds: Collection[str]) -> set[str]:
        return self._optimizer.worker_kinds(kinds)

    def read_own_state(self, piece: nn.Parameter) -> Mapping[str, Tensor]:
        return self._optimizer.read_own_state(piece) if piece.requires_grad and piece.numel() else {}

    def write_state(self, name: str, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        if not piece.requires_grad:
            return
        refuse_kfac_state(name, state)
        if state:  # at once, so that no second copy of all state is ever there
            self._optimizer.write_state(piece, state)
        else:
            self._optimizer.forget_state(piece)

    def shared_weights(self) -> SharedWeights:
        return self._optimizer.shared_weights()

    def sharing_weights(self) -> AbstractContextManager[None]:
        return self._optimizer.sharing_weights()


class TorchStepper(Stepper):
    """Steps with any optimizer of torch."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._states: dict[nn.Parameter, Mapping[str, Tensor]] = {}

    def _step(self, norm: Tensor, verdict: Tensor | None) -> None:
        optimizer = self._optimizer
        # Torch's fused optimizers leave out an update by themselves, as for gradient scaling; others are not asked to.
        if verdict is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = (verdict != 0).float()
            optimizer.step()
            del optimizer.found_inf
        elif verdict is None or verdict.item() == 0:
            optimizer.step()

    def write_state(self, name: str, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        if is_pending(state):
            refuse_undelayed(name)
        refuse_kfac_state(name, state)
        self._states[piece] = state

    def finish_writing(self, read: ReadState) -> None:
        """Through the optimizer's own load_state_dict, which puts each value where it keeps it."""
        optimizer = self._optimizer
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.load_state_dict(
            {
                "state": {i: dict(self._states[one]) for i, one in enumerate(ordered) if self._states.get(one)},
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )


class KfacStepper(Stepper):
    """Steps with K-FAC, which samples forward and backward of a step, and makes no update if the norm is not finite."""

    _optimizer: KFAC

    def __init__(self, optimizer: KFAC) -> None:
        super().__init__(optimizer)
        self._is_whole = True

    def begin(self, num_targets: Tensor) -> None:
        self._optimizer.begin(num_targets)

    def synchronize(self) -> None:
        self._optimizer.synchronize()

    def _step(self, norm: Tensor, verdict: Tensor | None) -> None:
        if bool(norm.isfinite()) and (verdict is None or verdict.item() == 0):
            self._optimizer.step()
        else:
            self._optimizer.end()

    def write_state(self, name: str, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        if is_pending(state):
            refuse_undelayed(name)
        if piece.requires_grad:
            self._is_whole &= self._optimizer.write_piece(piece, state)

    def whole_state(self) -> Iterable[tuple[str, str, Tensor]]:
        return self._optimizer.layer_state()

    def finish_writing(self, read: ReadState) -> None:
        if not self._optimizer.write_layers(read) or not self._is_whole:
            logger.warning("weft: the checkpoint has no state of K-FAC for some parameters; theirs begins anew")


def refuse_kfac_state(name: str, state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a parameter's state is that of K-FAC, which no other optimizer can continue."""
    if MOMENTUM in state:
        raise CheckpointError(
            f"the checkpoint has K-FAC's state of '{name}', and train.kfac is not set; set it to resume, or start a "
            f"new run from these weights with model.from"
        )


def stepper(optimizer: Optimizer) -> Stepper:
    """Returns the interface to an optimizer."""
    if isinstance(optimizer, KFAC):
        return KfacStepper(optimizer)
    return WeftStepper(optimizer) if isinstance(optimizer, AdamW) else TorchStepper(optimizer)
