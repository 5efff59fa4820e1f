"""Which kernels of prompts have room in the shared memory of a GPU; where one has none, plain functions compute.

What compiled kernels need is tested (`tests/serve/test_kernel_memory.py`).
"""

from __future__ import annotations

import torch

A100, L40S = 166_912, 101_376  # bytes of a program on these GPUs
_ROCM = 64 << 10  # where torch may not know it


def shared_bytes(device: torch.device) -> int:
    """The shared memory that a program on a GPU may have. For a CPU, where kernels are interpreted: an A100's."""
    if device.type != "cuda":
        return A100
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _ROCM))


def has_room_for_tiles(num_heads: int, num_key_heads: int, head_dim: int, shared: int) -> bool:
    """Has the kernel of prompts in 16 bits (`prompt_attention_kernel.py`) room in so many bytes?"""
    group, width = (1 << (number - 1).bit_length() for number in (num_heads // num_key_heads, head_dim))
    most_width, most = (256, 2048) if shared >= A100 else (128, 2048) if shared >= L40S else (128, 512)
    return width <= most_width and group * width <= most


def has_room_for_four_bits(shared: int) -> bool:
    """Has the kernel of prompts over 4 bits (`four_bit_prompt_kernel.py`) room in so many bytes?"""
    return shared >= L40S
