"""A Triton kernel that copies a gradient and sums its squares in one pass, so that the norm needs no second pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit
def _first(program, BLOCK: tl.constexpr):
    """The index of a program's first element, in int64 because it may exceed 2^31."""
    return program.to(tl.int64) * BLOCK


@triton.jit
def _take(gradient_ptr, target_ptr, squares_ptr, numel, BLOCK: tl.constexpr):
    first, place = _first(tl.program_id(0), BLOCK), tl.arange(0, BLOCK)
    inside = place < numel - first
    values = tl.load(gradient_ptr + first + place, mask=inside, other=0.0)
    tl.store(target_ptr + first + place, values.to(target_ptr.dtype.element_ty), mask=inside)
    wide = values.to(tl.float32)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(wide * wide, 0))


def copy_with_squares(gradient: Tensor, target: Tensor) -> Tensor:
    """Copy `gradient` to `target` and return its sums of squares, one per program [programs]."""
    num_programs = triton.cdiv(gradient.numel(), _BLOCK)
    squares = torch.empty(num_programs, device=gradient.device)
    _take[(num_programs,)](gradient, target, squares, gradient.numel(), BLOCK=_BLOCK, num_warps=8)
    return squares
