"""One AdamW update of a range of elements in one pass: gradient scale, moments, weight decay, new weights.

`update` is plain torch over 1-D tensors. On a GPU it is one kernel (`update_kernel.py`), which reads and writes each
byte once. State in fp32 or fp64 on a CPU is updated by torch's fused kernel, so results are bit-identical to
torch.optim.AdamW(fused=True).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from weft.optim.rounding import (
    from_signed_codes,
    from_square_codes,
    random_bits,
    signed_codes,
    sixteen_bits,
    square_codes,
    to_bf16,
)


def update_constants(group: Mapping[str, Any], step: int) -> list[float]:
    """Return the scalars that `update` needs for a group's `step`-th update. Differences are computed in fp64 here."""
    rate, (beta1, beta2) = float(group["lr"]), group["betas"]
    size, correction = rate / (1 - beta1**step), math.sqrt(1 - beta2**step)
    return [1 - rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, group["eps"], size, correction]


def update(
    weight: Tensor,
    gradient: Tensor,
    state: tuple[Tensor, ...],
    whole: Tensor | None,
    scale: Tensor,
    constants: Tensor,
    seed: Tensor,
) -> None:
    """Update `weight` [n] and `state` in place, and write the new weight to `whole` [n] too if it is given.

    `state` is both moments [n], or both as codes [n], each followed by its scales [blocks]. If `scale` is not finite,
    nothing changes; the device decides that, so the host need not wait.
    """
    good = scale.isfinite()
    wide = torch.promote_types(weight.dtype, torch.float32)
    keep, new1, beta2, new2, epsilon, size, correction = constants.to(wide).unbind()
    bits = random_bits(seed, weight.numel()) if needs_random_bits(weight, state) else None
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
    codes = (*signed_codes(first, sixteen_bits(bits, 1)), *square_codes(second, sixteen_bits(bits, 2)))
    for place, found in zip(state, codes, strict=True):
        place.copy_(torch.where(good, found, place))


def decode(state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return both moments as floating-point tensors."""
    if len(state) == 2:
        return state[0], state[1]
    return from_signed_codes(*state[:2]), from_square_codes(*state[2:])


def encode(state: tuple[Tensor, ...], first: Tensor, second: Tensor) -> None:
    """Set both moments, rounded to nearest."""
    if len(state) == 2:
        state[0].copy_(first)
        state[1].copy_(second)
        return
    half = torch.full(first.shape, 1 << 15, dtype=torch.int32, device=state[0].device)
    for place, found in zip(state[:2], signed_codes(first.to(half.device), half), strict=True):
        place.copy_(found)
    for place, found in zip(state[2:], square_codes(second.to(half.device), half), strict=True):
        place.copy_(found)


def needs_random_bits(weight: Tensor, state: tuple[Tensor, ...]) -> bool:
    """Return whether any of the tensors is rounded randomly: those of less than 4 bytes per element."""
    return any(tensor.element_size() < 4 for tensor in (weight, *state))


def _put(place: Tensor, values: Tensor, bits: Tensor | None, which: int, good: Tensor) -> None:
    if place.dtype == torch.bfloat16:
        assert bits is not None
        values = to_bf16(values, sixteen_bits(bits, which))
    place.copy_(torch.where(good, values.to(place.dtype), place))


def update_for(device: torch.device) -> Callable[..., None]:
    """Return `update`, or the equal Triton kernel if there is one for the device."""
    if device.type != "cuda" or not has_triton():
        return update
    from weft.optim.update_kernel import update_by_kernel

    return update_by_kernel


def scaled_gradient(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a gradient times `scale` in `dtype`; in place if it has that dtype."""
    if scale is None:
        return gradient.to(dtype)
    return gradient.mul_(scale) if gradient.dtype == dtype else gradient * scale.to(dtype).view(1)


def apply_fused_update(
    step: Tensor,
    group: Mapping[str, Any],
    weight: Tensor | None,
    gradient: Tensor,
    whole: Tensor | None,
    changed: Sequence[Tensor],
) -> None:
    """Apply torch's fused kernel. `step` already counts this update.

    `changed` is the weight and both moments, or only the moments if `weight` is given.
    """
    own, first, second = changed if weight is None else (weight, *changed)
    torch._fused_adamw_(
        [own],
        [gradient],
        [first],
        [second],
        [],
        [step],
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    if whole is not None:
        whole.copy_(own)


def apply_update(
    update: Callable[..., None],
    small: Sequence[Tensor],
    weight: Tensor | None,
    gradient: Tensor,
    whole: Tensor | None,
    changed: Sequence[Tensor],
) -> None:
    """Apply `update`.

    `small` are its scale, constants and seed; `weight` and `changed` are as in `apply_fused_update`.
    """
    own, *state = changed if weight is None else (weight, *changed)
    update(own, gradient, tuple(state), whole, *small)
