"""Flash attention over pages: long prompts attend to the cache as it lies, without a copy of keys and values.

torch's `varlen_attn` takes block tables from version 2.12 on, with FlashAttention 3 (the module `flash_attn_interface`,
GPUs with compute capability 9.0). Where all of that is installed, FlashAttention 3 is activated for the process when
the first long prompt comes, and its attention over pages is compared with the plain function once. Where it fails or
differs, a warning says so, and keys and values are copied for flash attention without pages.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from functools import cache
from typing import cast

import torch
import torch.nn.attention.varlen as varlen
from torch import Tensor

from weft.serve.attention.batch import PagedBatch
from weft.serve.attention.plain import prompt_attention

_LARGEST_ERROR = 0.02  # of results near 1, in 16 bits: a wrong page or mask gives errors near 1


def paged_flash_attention(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
    """Equals `prompt_attention`, by torch's flash attention, which finds keys and values by the block tables."""
    prompts = slice(batch.num_decodes, batch.num_decodes + len(batch.prompt_queries))
    pages = (-1, batch.block_size, *keys.shape[1:])
    mixed = varlen.varlen_attn(
        query,
        keys.view(pages),
        values.view(pages),
        batch.prompt_starts,
        None,
        max(batch.prompt_queries),
        max(batch.prompt_lengths),
        window_size=(-1 if window is None else window - 1, 0),  # right 0: the last query sees the last key
        enable_gqa=True,
        seqused_k=batch.lengths[prompts],
        block_table=batch.tables[prompts],
    )
    return cast("Tensor", mixed)


@cache
def has_paged_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether flash attention over pages is installed for a GPU and equals the plain function there."""
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        return False
    if importlib.util.find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        if torch.nn.attention.current_flash_attention_impl() != "FA3":
            torch.nn.attention.activate_flash_attention_impl("FA3")
        error = largest_error(device, dtype, head_dim)
        trouble = f"differs by {error:.2g} from the plain function" if error > _LARGEST_ERROR else ""
    except (RuntimeError, ImportError, TypeError, ValueError) as failure:
        trouble = f"fails ({failure})"
    if trouble:
        what = "FlashAttention 3 is installed, but its attention over pages"
        warnings.warn(f"{what} {trouble}: keys and values of long prompts are copied instead", stacklevel=2)
    return not trouble


def largest_error(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Return how far `paged_flash_attention` is from the plain function, on two small chunks of prompts in shuffled
    pages.
    """
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(tokens, heads, head_dim, generator=generator).to(device, dtype)
        for tokens, heads in ((40, 4), (128, 2), (128, 2))
    )
    tables = torch.randperm(8, generator=generator).to(torch.int32).view(2, 4).to(device)
    lengths = torch.tensor([33, 57], dtype=torch.int32, device=device)
    unused = torch.empty(0, device=device)
    batch = PagedBatch(unused, unused, unused, tables, lengths, unused, 16, 0, (20, 20), (33, 57))
    given = (query, keys, values, batch)
    errors = [paged_flash_attention(*given, window) - prompt_attention(*given, window) for window in (None, 9)]
    return float(torch.stack(errors).abs().max())
