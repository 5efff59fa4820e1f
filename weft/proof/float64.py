"""Computes a model in float64 although its own code casts to narrower types, uses kernels without float64, or drops.

A proof compares two runs to 1e-9. A cast to float32 inside of a model (many norms, rotations and losses have one) would
round both to 6e-8. In this mode such a cast keeps float64; tensors that the model makes are float64 if it gives no
dtype; products of groups of experts, which torch computes in float32 or less, are computed one by one; dropout drops
nothing, and random masks (stochastic depth) have their mean everywhere. `notes` says in words where the model's code
was changed in this way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from weft.memory.recompute_context import register_state
from weft.models.experts import grouped_product

NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS: dict[Any, Callable[..., Tensor]] = dict.fromkeys(
    (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16), torch.Tensor.double
)
_GROUPED = {one for one in (getattr(functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if one}
# Functions of dropout, with the name and the position of the probability.
_DROPOUTS: dict[Any, tuple[str, int]] = {
    **dict.fromkeys(
        (
            functional.dropout,
            functional.dropout1d,
            functional.dropout2d,
            functional.dropout3d,
            functional.alpha_dropout,
            functional.feature_alpha_dropout,
            torch.dropout,
        ),
        ("p", 1),
    ),
    functional.scaled_dot_product_attention: ("dropout_p", 4),
}
_RANDOM = {
    *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.randperm),
    *(torch.normal, torch.poisson, torch.multinomial, functional.gumbel_softmax, functional.rrelu),
    *(torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_, torch.Tensor.random_),
    torch.Tensor.multinomial,
}
_MASKS = {torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_}
_WEFT = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_MAX_PLACES = 3
_DEFAULT = torch.get_default_dtype()


class Float64(TorchFunctionMode):
    """The mode. With `is_wide` false it only keeps dropout and masks from dropping, for runs in another precision."""

    def __init__(self, is_wide: bool = True) -> None:
        super().__init__()
        self._is_wide = is_wide
        self._places: dict[str, dict[str, None]] = {}  # what was changed -> where, in order
        self._is_paused = False
        self.draws: dict[str, None] = {}  # places that draw random numbers
        self.gradients: dict[str, None] = {}  # places that compute gradients by torch.autograd.grad

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed of the model's own code, and where, in words."""
        return tuple(f"{what} ({_list(places)})" for what, places in self._places.items())

    def __enter__(self) -> Float64:
        self._pause(False)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._pause(True)

    def pause_in(self, optimizer: Optimizer) -> None:
        """Leave the steps of an optimizer, which chooses the types of its own state, as they are."""
        optimizer.register_step_pre_hook(lambda *_: self._pause(True))
        optimizer.register_step_post_hook(lambda *_: self._pause(False))

    def stay_in_recompute(self, model: nn.Module) -> None:
        """Compute in the mode, too, where backward recomputes a block: torch runs backward outside of modes."""
        for module in model.modules():
            register_state(module, _Entered(self))

    def _pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        if self._is_wide:
            torch.set_default_dtype(_DEFAULT if is_paused else torch.float64)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            args, kwargs = self._without_dropout(func, args, kwargs)
        elif func in _MASKS and args[0].is_floating_point():
            self._note("random masks (bernoulli): the proof uses their mean, as if nothing were dropped")
            return _mean_of_mask(func, *args, **kwargs)
        elif func is torch.autograd.grad:
            self.gradients[_place()[0]] = None
        elif func in _RANDOM or func in _MASKS:
            self.draws[_place()[0]] = None
        elif self._is_wide and func in _CASTS:
            self._note("casts to narrower floating point: the proof computes them in float64")
            func, args, kwargs = _CASTS[func], args[:1], {}
        elif self._is_wide and func in _GROUPED and args[0].dtype == torch.float64:
            self._note("grouped products, which torch does not compute in float64: the proof computes one by one")
            return grouped_product(*args, **kwargs)
        if self._is_wide and _names_narrow(args, kwargs):
            self._note("casts to narrower floating point: the proof computes them in float64")
            args, kwargs = [_widened(one) for one in args], {name: _widened(one) for name, one in kwargs.items()}
        return func(*args, **kwargs)

    def _without_dropout(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of a function of dropout with a probability of 0."""
        name, position = _DROPOUTS[func]
        given = args[position] if len(args) > position else kwargs.get(name, 0.0 if name == "dropout_p" else 0.5)
        is_training = kwargs.get("training", args[2] if len(args) > 2 and name == "p" else True)
        if not given or not is_training:
            return args, kwargs
        self._note(f"dropout {given:g}: the proof drops nothing")
        if len(args) > position:
            return (*args[:position], 0.0, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: 0.0}

    def _note(self, what: str) -> None:
        """Record the place in the model's code that calls a changed function.

        weft's own casts depend on the type of the data, and are none of the model's.
        """
        place, file = _place()
        if not file.startswith(_WEFT) or what.startswith("dropout"):
            self._places.setdefault(what, {})[place] = None


class _Entered:
    """Is a mode entered? A state of forwards (`memory/recompute_context.py`)."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode

    def get(self) -> bool:
        return self._mode in _get_current_function_mode_stack()

    def set(self, value: bool) -> None:
        """Enter or leave the mode; not by its own methods, because it has been entered by these before."""
        if value and not self.get():
            TorchFunctionMode.__enter__(self._mode)
        elif not value and self.get():
            TorchFunctionMode.__exit__(self._mode, None, None, None)


def _mean_of_mask(func: Any, value: Tensor, p: Any = None, **_: Any) -> Tensor:
    """Returns the mean of what bernoulli draws: `p`, or the value itself where it holds the probabilities."""
    if func is torch.Tensor.bernoulli_:
        return value.copy_(torch.as_tensor(0.5 if p is None else p))
    return value.clone() if p is None else torch.full_like(value, p)


def _place() -> tuple[str, str]:
    """Returns the line and the file outside of torch that called a function in the mode."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{Path(file).name}:{frame.f_lineno}", file


def _names_narrow(args: Any, kwargs: Any) -> bool:
    return any(_is_narrow(one) for one in args) or any(_is_narrow(one) for one in kwargs.values())


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in NARROW


def _widened(value: Any) -> Any:
    return torch.float64 if _is_narrow(value) else value


def _list(places: dict[str, None]) -> str:
    named = list(places)
    more = f" and {len(named) - _MAX_PLACES} more" if len(named) > _MAX_PLACES else ""
    return ", ".join(named[:_MAX_PLACES]) + more
