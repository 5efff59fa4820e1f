"""Attention over pages that the ranks of `context` hold together (`batch.py`).

All ranks have the queries of all tokens. Each attends to its own pages, and gives for each query and head its *part*:
head_dim numbers, which are the attention to its own keys, and one more, the logarithm of their softmax denominator. One
all-gather brings the parts to all ranks, which add them up in the order of the ranks, so that all have the same bits.

On a CPU, in float32, and for decodes with a sliding window, the plain functions below run. GPUs use the kernels for
decodes and for tiles of prompts; flash attention has no mask for pages that lie apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis, all_gather
from weft.serve.attention.batch import PagedBatch, slots_of
from weft.serve.attention.paged_attention import fits_tiles

_SCORES = 1 << 24  # that plain functions compute at a time


def attend_over_ranks(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, axis: Axis
) -> Tensor:
    """`attend` of `paged_attention.py`, of a batch whose pages the ranks of an axis hold together."""
    return merged(attend_own_pages(query, keys, values, batch, window), axis, query.dtype)


def merged(own: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """The attention [tokens, heads, head_dim] from the parts [tokens, heads, head_dim + 1] of all ranks of an axis."""
    parts = own.new_empty(axis.degree, *own.shape)
    all_gather(parts.view(-1), own.view(-1), axis).wait()
    if parts.is_cuda and parts.dtype == torch.float32:
        from weft.serve.attention.split_attention_kernel import add_up_by_kernel

        return add_up_by_kernel(parts, dtype)
    return add_up(parts, dtype)


def add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The attention [tokens, heads, head_dim] from the parts [ranks, tokens, heads, head_dim + 1]."""
    logs = parts[..., -1:]
    weights = (logs - logs.amax(0)).exp()  # some rank has the token itself, so the highest is a number
    total, mixed = torch.zeros_like(weights[0]), torch.zeros_like(parts[0, ..., :-1])
    for weight, part in zip(weights, parts[..., :-1], strict=True):
        total, mixed = total + weight, mixed + weight * part
    return (mixed / total).to(dtype)


def merge_bytes(num_tokens: int, num_heads: int, head_dim: int, degree: int, item_bytes: int) -> int:
    """Bytes that `merged` gathers in a layer."""
    return degree * num_tokens * num_heads * (head_dim + 1) * max(4, item_bytes)


def attend_own_pages(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
    """This rank's part [tokens, heads, head_dim + 1] of the attention of all tokens, in float32 at least.

    Where it has no key for a query: zeros, and minus infinity.
    """
    number, out = batch.num_decodes, room_for_parts(query)
    if number:
        decode = _decodes_by_kernel if _has_kernels(query) and window is None else _decodes
        decode(query[:number], keys, values, batch, window, out[:number])
    if batch.prompt_queries:
        attend_own_prompts(query[number:], keys, values, batch, window, out[number:])
    return out


def attend_own_prompts(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, out: Tensor
) -> None:
    """`attend_own_pages` of the tokens of prompts alone, into `out`."""
    prompt = _prompts_by_kernel if _has_kernels(query) and fits_tiles(query, keys) else _prompts
    prompt(query, keys, values, batch, window, out)


def room_for_parts(query: Tensor) -> Tensor:
    """An empty tensor for a rank's part of the attention of queries."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty(*query.shape[:2], query.shape[2] + 1, dtype=wide, device=query.device)


def _has_kernels(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256


def _decodes(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, out: Tensor) -> None:
    slots, mask = batch.own_places(window)
    out.copy_(partial_attention(query[:, None], keys[slots], values[slots], mask[:, None])[:, 0])


def _prompts(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, out: Tensor) -> None:
    share = batch.share
    assert share is not None
    chunks = zip(*(one.split(list(batch.prompt_queries)) for one in (query, out)), batch.prompt_lengths, strict=True)
    for index, (chunk, of_chunk, length) in enumerate(chunks, batch.num_decodes):
        ends = torch.arange(length - len(chunk) + 1, length + 1, device=query.device)  # of what each query may see
        number = int(share.count(torch.tensor(length)))
        slots = slots_of(batch.tables[index, None], number, batch.block_size)[0]
        key, value, mask = keys[slots][None], values[slots][None], share.sees(ends, number, window)
        at_once = max(1, _SCORES // max(1, number * query.shape[1]))
        for begin in range(0, len(chunk), at_once):
            some = slice(begin, begin + at_once)
            of_chunk[some] = partial_attention(chunk[None, some], key, value, mask[None, some])[0]


def partial_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The part [batch, tokens, heads, head_dim + 1] of attention to some of the keys.

    Each query sees those that the mask [batch, tokens, keys], or [batch, tokens, key heads, keys], names.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    seen = mask.any(1)  # where no query sees, other requests may have left NaN, and weights of 0 times NaN are NaN
    seen = seen[..., None] if seen.dim() == 2 else seen.transpose(1, 2)
    value = value.masked_fill(~seen[..., None], 0)
    grouped = query.to(wide).unflatten(2, (key.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bqhgk", grouped, key.to(wide)) / query.shape[-1] ** 0.5
    mask = mask[:, :, None] if mask.dim() == 3 else mask
    scores = scores.masked_fill(~mask[:, :, :, None], -torch.inf)
    logs = scores.logsumexp(-1, keepdim=True)
    weights = (scores - logs.masked_fill(logs.isinf(), 0.0)).exp()
    mixed = torch.einsum("bqhgk,bkhd->bqhgd", weights, value.to(wide))
    return torch.cat([mixed, logs], dim=-1).flatten(2, 3)


def _decodes_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, out: Tensor
) -> None:
    from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel

    assert window is None
    given = (batch.tables[: batch.num_decodes], batch.own_lengths, batch.block_size, None)
    decode_attention_by_kernel(query, keys, values, *given, out=out)


def _prompts_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, out: Tensor
) -> None:
    from weft.serve.attention.prompt_attention_kernel import prompt_attention_by_kernel

    given = (batch.tables, batch.prompt_tiles, batch.block_size, window, out, batch.share)
    prompt_attention_by_kernel(query, keys, values, *given)
