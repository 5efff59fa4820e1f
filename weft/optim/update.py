"""One AdamW update of a run of elements, in one pass: gradient scale, moments, decay, new weights in every precision.

`update` is plain torch over 1-D tensors. On a GPU it is one kernel (`update_kernel.py`), which moves each byte once;
what is held in fp32 or fp64 on a CPU goes through torch's own fused kernel: the bits of torch.optim.AdamW(fused=True).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from weft.optim.rounding import (
    draws,
    from_signed_codes,
    from_square_codes,
    signed_codes,
    sixteen,
    square_codes,
    to_bf16,
)


def numbers(group: Mapping[str, Any], step: int) -> list[float]:
    """What `update` needs to know of a group's options in its `step`-th update; differences are taken in fp64 here."""
    rate, (beta1, beta2) = float(group["lr"]), group["betas"]
    size, correction = rate / (1 - beta1**step), math.sqrt(1 - beta2**step)
    return [1 - rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, group["eps"], size, correction]


def update(
    weight: Tensor,
    gradient: Tensor,
    state: tuple[Tensor, ...],
    whole: Tensor | None,
    scale: Tensor,
    numbers: Tensor,
    seed: Tensor,
) -> None:
    """Change `weight` [n] and `state` in place, and write the new weight to `whole` [n] too, where there is one.

    `state` is both moments [n], or both as codes [n], each followed by its scales [blocks]. Where `scale` is no number,
    all stays as it is: the device decides that, and the host need not wait to know.
    """
    good = scale.isfinite()
    wide = torch.promote_types(weight.dtype, torch.float32)
    keep, new1, beta2, new2, epsilon, size, correction = numbers.to(wide).unbind()
    bits = draws(seed, weight.numel()) if needs_draws(weight, state) else None
    scaled = gradient.to(wide) * scale.to(wide)
    first, second = (moment.to(wide) for moment in decode(state))
    first = first + new1 * (scaled - first)
    second = beta2 * second + new2 * scaled * scaled
    new = weight.to(wide) * keep - size * first / (second.sqrt() / correction + epsilon)
    if whole is not None:
        whole.copy_(torch.where(good, new, weight.to(wide)))
    _put(weight, new, bits, 0, good)
    if len(state) == 2:
        _put(state[0], first, bits, 1, good)
        _put(state[1], second, bits, 2, good)
        return
    assert bits is not None
    codes = (*signed_codes(first, sixteen(bits, 1)), *square_codes(second, sixteen(bits, 2)))
    for place, found in zip(state, codes, strict=True):
        place.copy_(torch.where(good, found, place))


def decode(state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Both moments as numbers."""
    if len(state) == 2:
        return state[0], state[1]
    return from_signed_codes(*state[:2]), from_square_codes(*state[2:])


def encode(state: tuple[Tensor, ...], first: Tensor, second: Tensor) -> None:
    """Set both moments, to nearest."""
    if len(state) == 2:
        state[0].copy_(first)
        state[1].copy_(second)
        return
    half = torch.full(first.shape, 1 << 15, dtype=torch.int32, device=state[0].device)
    for place, found in zip(state[:2], signed_codes(first.to(half.device), half), strict=True):
        place.copy_(found)
    for place, found in zip(state[2:], square_codes(second.to(half.device), half), strict=True):
        place.copy_(found)


def needs_draws(weight: Tensor, state: tuple[Tensor, ...]) -> bool:
    """Whether any of it is rounded at random."""
    return any(tensor.element_size() < 4 for tensor in (weight, *state))


def _put(place: Tensor, values: Tensor, bits: Tensor | None, which: int, good: Tensor) -> None:
    if place.dtype == torch.bfloat16:
        assert bits is not None
        values = to_bf16(values, sixteen(bits, which))
    place.copy_(torch.where(good, values.to(place.dtype), place))


def update_on(device: torch.device) -> Callable[..., None]:
    """`update` as one kernel, where there is one for the device."""
    if device.type != "cuda" or not has_triton():
        return update
    from weft.optim.update_kernel import update_by_kernel

    return update_by_kernel


def _fused(tensors: Sequence[Tensor], group: Mapping[str, Any]) -> None:
    """Torch's fused AdamW: weight, gradient, both moments and the step, which counts this update already."""
    weight, gradient, first, second, step = ([tensor] for tensor in tensors)
    torch._fused_adamw_(
        weight,
        gradient,
        first,
        second,
        [],
        step,
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def scaled(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A gradient in the weights' dtype, times a scale; in place where it has it."""
    if scale is None:
        return gradient.to(dtype)
    return gradient.mul_(scale) if gradient.dtype == dtype else gradient * scale.to(dtype).view(1)


def change_by_torch(
    step: Tensor,
    group: Mapping[str, Any],
    weight: Tensor | None,
    gradient: Tensor,
    whole: Tensor | None,
    changed: Sequence[Tensor],
) -> None:
    """Torch's kernel over a weight and its moments; the weight is the first of `changed`, unless it is given."""
    own, first, second = changed if weight is None else (weight, *changed)
    _fused([own, gradient, first, second, step], group)
    if whole is not None:
        whole.copy_(own)


def change_by(
    update: Callable[..., None],
    small: Sequence[Tensor],
    weight: Tensor | None,
    gradient: Tensor,
    whole: Tensor | None,
    changed: Sequence[Tensor],
) -> None:
    """Weft's kernel over the same."""
    own, *state = changed if weight is None else (weight, *changed)
    update(own, gradient, tuple(state), whole, *small)
