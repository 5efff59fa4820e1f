"""Lets a kernel start while the kernel before it ends (programmatic dependent launch, on NVIDIA GPUs from Hopper on).

A small kernel takes a few microseconds to start and to end, in which the memory is idle. A kernel that is launched
early does what needs no results of others, such as reading its weights, and then calls `wait_for_results`. After that,
everything that kernels before it wrote can be read. All kernels of a chain must call it, so that each knows that those
before the one before it are done, too.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_results(IS_EARLY: tl.constexpr):
    """Let the next kernel start, and wait until the kernels before this one are done."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early_launch(tensor: Tensor) -> dict[str, bool]:
    """Arguments for a kernel that has IS_EARLY: it is launched early if the device can."""
    is_early = tensor.is_cuda and _can_launch_early(tensor.device)
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}


@cache
def _can_launch_early(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
