"""Attention to keys and values in pages, as plain functions that serve every storage, choice of tokens and share.

A storage (`plain.py`, `four_bits.py`) or a choice (`choice.py`) reads the keys and values that a decode attends to, and
says which of them it sees. Without a share, that gives the attention. Ranks of `context` that hold pages together
(`PageShare`) have the queries of all tokens. Each attends to its own pages, and gives for each query and head its
*part*: head_dim numbers, which are the attention to its own keys, and one more, the logarithm of their softmax
denominator. One all-gather brings the parts to all ranks, which add them up in the order of the ranks, so that all have
the same bits.

These functions run on a CPU and in dtypes other than fp16 and bf16. On GPUs, storages and choices have kernels instead,
where these have room in the GPU's shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm import Axis, all_gather
from weft.serve.attention.batch import CacheSizes, PagedBatch, PageShare

_SCORES = 1 << 24  # of a part that are computed at a time
A100, L40S = 166_912, 101_376  # bytes of shared memory that a program may have on these GPUs
_ROCM = 64 << 10  # where torch may not know it


class DecodeReader(Protocol):
    """What reads the keys and values that decodes attend to."""

    def requests_at_once(self, batch: PagedBatch) -> int:
        """Of how many requests keys and values are read at a time."""

    def read(self, query: Tensor, batch: PagedBatch, some: slice, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [requests, keys, key heads, head_dim] for the queries [requests, heads, head_dim] of some of
        a batch's decodes, and which of them each sees: [requests, keys] or [requests, key heads, keys].
        """


def takes_kernels(query: Tensor) -> bool:
    """Can kernels on GPUs compute with these queries?"""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the results of some tokens end to end. A single result is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def staging(batch: PagedBatch, sizes: CacheSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slots of a step's tokens, and empty keys and values for these tokens alone. Storages that change keys
    and values before they keep them have them written here first.
    """
    number = len(batch.slots)
    shape = (2, number, sizes.num_key_heads, sizes.head_dim)
    keys, values = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)
    return torch.arange(number, device=sizes.device), keys, values


def attend_decodes(query: Tensor, reader: DecodeReader, batch: PagedBatch, window: int | None) -> Tensor:
    """Return the attention of a batch's decodes [requests, heads, head_dim], or this rank's part of it."""
    number, at_once, parts = batch.num_decodes, reader.requests_at_once(batch), list[Tensor]()
    for begin in range(0, number, at_once):
        some = slice(begin, min(begin + at_once, number))
        key, value, mask = reader.read(query[some], batch, some, window)
        # Other requests may have left NaN in keys that are not seen, and weights of 0 times NaN are NaN.
        seen = (mask[..., None] if mask.dim() == 2 else mask.transpose(1, 2))[..., None]
        key, value = (torch.where(seen, one, 0) for one in (key, value))
        parts.append(attention_to(query[some, None], key, value, mask[:, None], batch.pages)[:, 0])
    return joined(parts)


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, end: int, window: int | None, share: PageShare) -> Tensor:
    """Return the attention of the last tokens before position `end` of a request, or this rank's part of it. Keys and
    values are those of the rank's tokens before `end`, in their order.
    """
    ends = torch.arange(end - len(query) + 1, end + 1, device=query.device)
    mask = share.sees(ends, len(key), window)
    at_once = len(query) if share.degree == 1 else max(1, _SCORES // max(1, len(key) * query.shape[1]))
    parts = [
        attention_to(some[None], key[None], value[None], seen[None], share)[0]
        for some, seen in zip(query.split(at_once), mask.split(at_once), strict=True)
    ]
    return joined(parts)


def attention_to(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, share: PageShare) -> Tensor:
    """Return the attention of queries [batch, tokens, heads, head_dim] to keys and values [batch, keys, key heads,
    head_dim], or a rank's part of it. A query sees the keys that the mask [batch, tokens, keys], or [batch, tokens, key
    heads, keys], names.
    """
    if share.degree == 1 and mask.dim() == 3:
        return masked_attention(query, key, value, mask[:, None])
    return partial_attention(query, key, value, mask, share.degree > 1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of [batch, tokens, heads, head_dim]; key heads may be fewer. The mask is broadcast over
    heads.
    """
    group = query.shape[2] // key.shape[2]
    key, value = (heads.repeat_interleave(group, dim=2).transpose(1, 2) for heads in (key, value))
    return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask).transpose(1, 2)


def partial_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, has_logs: bool = True) -> Tensor:
    """Return what `attention_to` returns, for any mask. With logarithms it is a part [batch, tokens, heads, head_dim +
    1], in float32 at least; where a query sees none of the keys, it is zeros and minus infinity.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(2, (key.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bqhgk", grouped, key.to(wide)) / query.shape[-1] ** 0.5
    mask = mask[:, :, None] if mask.dim() == 3 else mask
    scores = scores.masked_fill(~mask[:, :, :, None], -torch.inf)
    if not has_logs:
        mixed = torch.einsum("bqhgk,bkhd->bqhgd", scores.softmax(-1), value.to(wide))
        return mixed.flatten(2, 3).to(query.dtype)
    logs = scores.logsumexp(-1, keepdim=True)
    weights = (scores - logs.masked_fill(logs.isinf(), 0.0)).exp()
    mixed = torch.einsum("bqhgk,bkhd->bqhgd", weights, value.to(wide))
    return torch.cat([mixed, logs], dim=-1).flatten(2, 3)


def room_for_parts(query: Tensor) -> Tensor:
    """Return an empty tensor for a rank's part of the attention of queries."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty(*query.shape[:2], query.shape[2] + 1, dtype=wide, device=query.device)


def merged(own: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """Gather the parts [tokens, heads, head_dim + 1] of all ranks of an axis. Return their sum, the attention [tokens,
    heads, head_dim].
    """
    parts = gathered(own, axis)
    if parts.is_cuda and parts.dtype == torch.float32:
        from weft.serve.attention.decode_attention_kernel import add_up_by_kernel

        return add_up_by_kernel(parts, dtype)
    return add_up(parts, dtype)


def gathered(own: Tensor, axis: Axis) -> Tensor:
    """Return the tensors of all ranks of an axis: [ranks, ...]."""
    parts = own.new_empty(axis.degree, *own.shape)
    all_gather(parts.view(-1), own.contiguous().view(-1), axis).wait()
    return parts


def add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention [tokens, heads, head_dim] from the parts [ranks, tokens, heads, head_dim + 1]."""
    logs = parts[..., -1:]
    weights = (logs - logs.amax(0)).exp()  # some rank has the token itself, so the highest is a number
    total, mixed = torch.zeros_like(weights[0]), torch.zeros_like(parts[0, ..., :-1])
    for weight, part in zip(weights, parts[..., :-1], strict=True):
        total, mixed = total + weight, mixed + weight * part
    return (mixed / total).to(dtype)


def merge_bytes(num_tokens: int, num_heads: int, head_dim: int, degree: int, item_bytes: int) -> int:
    """Return the bytes that `merged` gathers in a layer."""
    return degree * num_tokens * num_heads * (head_dim + 1) * max(4, item_bytes)


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program on a GPU may have. For a CPU, where kernels are interpreted: an
    A100's.
    """
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
