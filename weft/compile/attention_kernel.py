"""Chooses the faster attention kernel for a run's shape on this GPU, flash attention or cuDNN's, by measuring both.

Which one is faster depends on the GPU, on torch's version and on the shape. The result is stored in a file of the
user's cache folder. Attention that neither kernel supports (with a mask, for example) uses torch's other kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.compile.blocks import cache_folder
from weft.models import DecoderConfig, GPT2Config
from weft.run_file import Run

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NUM_WARM, NUM_TIMED = 3, 10


class AttentionShape(NamedTuple):
    """Shape of one attention on one rank."""

    batch: int
    num_heads: int
    num_key_heads: int
    sequence: int
    head_dim: int


@contextmanager
def fastest_attention(shape: AttentionShape | None, dtype: torch.dtype, device: torch.device) -> Iterator[str | None]:
    """Inside the context, attention prefers the faster kernel. Yields its name, or None if there is no choice."""
    if device.type != "cuda" or shape is None or dtype != torch.bfloat16:
        yield None
        return
    name = choose_kernel(shape, dtype, device, cache_folder() / "attention.json")
    order = [KERNELS[name], *(kernel for other, kernel in KERNELS.items() if other != name), *OTHERS]
    with sdpa_kernel(order, set_priority=True):
        yield name


def attention_shape(run: Run) -> AttentionShape | None:
    """Returns the shape of the attention that a rank of the run computes; None for models of images."""
    batch, sequence, x, model = run.split.micro_batch, run.split.sequence, run.plan.tensor.x, run.model
    if isinstance(model, DecoderConfig):
        keys = max(1, model.num_key_value_heads // x)
        return AttentionShape(batch, model.num_attention_heads // x, keys, sequence, model.head_dim)
    if isinstance(model, GPT2Config):
        heads = model.n_head // x
        return AttentionShape(batch, heads, heads, sequence, model.n_embd // model.n_head)
    return None


def choose_kernel(shape: AttentionShape, dtype: torch.dtype, device: torch.device, file: Path) -> str:
    """Returns the name of the faster kernel, from `file` or else by measuring both."""
    key = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {dtype}, {tuple(shape)}"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text())
    if known.get(key) not in KERNELS:
        seconds = {name: _kernel_seconds(kernel, shape, dtype, device) for name, kernel in KERNELS.items()}
        known[key] = min(seconds, key=seconds.__getitem__)
        with suppress(OSError):  # without the file, the next run measures again
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(known, indent=1))
            draft.replace(file)  # atomic: several ranks may write at the same time
    return known[key]


def _kernel_seconds(kernel: SDPBackend, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the seconds of forward and backward; infinity if the kernel does not support the shape."""

    def heads(number: int) -> torch.Tensor:
        made = torch.randn(shape.batch, shape.sequence, number, shape.head_dim, dtype=dtype, device=device)
        return made.transpose(1, 2).requires_grad_()  # the layout that models use

    query, key, value = heads(shape.num_heads), heads(shape.num_key_heads), heads(shape.num_key_heads)
    is_grouped = shape.num_heads > shape.num_key_heads
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        with sdpa_kernel([kernel]):
            for number in range(NUM_WARM + NUM_TIMED):
                if number == NUM_WARM:
                    start.record()
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
                torch.autograd.grad(out, [query, key, value], out.detach())
            end.record()
        end.synchronize()
    except RuntimeError:
        return float("inf")
    return float(start.elapsed_time(end)) / 1e3 / NUM_TIMED
