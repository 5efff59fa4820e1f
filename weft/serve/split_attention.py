"""Attention over pages that the ranks of `context` hold together (`page_share.py`).

All ranks have the queries of all tokens. Each attends to its own pages, and gives for each query and head a result and
the logarithm of its softmax denominator. One all-gather brings these to all ranks, which add them up in the order of
the ranks, so that all have the same bits.

On a CPU, in float32, and for decodes with a sliding window, the plain functions below run. GPUs use the kernels for
decodes and for tiles of prompts; flash attention has no mask for pages that lie apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis, all_gather
from weft.serve.paged_attention import PagedBatch, slots_of

_SCORES = 1 << 24  # that plain functions compute at a time


def attend_over_ranks(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, axis: Axis
) -> Tensor:
    """`attend` of `paged_attention.py`, of a batch whose pages the ranks of an axis hold together."""
    return merged(*attend_own_pages(query, keys, values, batch, window), axis).to(query.dtype)


def merged(mixed: Tensor, logs: Tensor, axis: Axis) -> Tensor:
    """The attention [tokens, heads, head_dim] from what each rank gives for its own keys: results, and the logarithms
    [tokens, heads] of their softmax denominators.
    """
    own = torch.cat([mixed, logs[..., None]], dim=-1)
    parts = own.new_empty(axis.degree, *own.shape)
    all_gather(parts.view(-1), own.view(-1), axis).wait()
    logs = parts[..., -1:]
    weights = (logs - logs.amax(0)).exp()  # some rank has the token itself, so the highest is a number
    total, out = torch.zeros_like(weights[0]), torch.zeros_like(mixed)
    for weight, part in zip(weights, parts[..., :-1], strict=True):
        total, out = total + weight, out + weight * part
    return out / total


def merge_bytes(num_tokens: int, num_heads: int, head_dim: int, degree: int, item_bytes: int) -> int:
    """Bytes that `merged` gathers in a layer."""
    return degree * num_tokens * num_heads * (head_dim + 1) * max(4, item_bytes)


def attend_own_pages(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of all tokens to this rank's keys: results [tokens, heads, head_dim], zeros where there is no key, and
    the logarithms [tokens, heads] of their softmax denominators, both in float32 at least.
    """
    number, parts = batch.num_decodes, list[tuple[Tensor, Tensor]]()
    has_kernels = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
    if number:
        decode = _decodes_by_kernel if has_kernels and window is None else _decodes
        parts.append(decode(query[:number], keys, values, batch, window))
    if batch.prompt_queries:
        prompt = _prompts_by_kernel if has_kernels else _prompts
        parts.append(prompt(query[number:], keys, values, batch, window))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([mixed for mixed, _ in parts]), torch.cat([logs for _, logs in parts])


def _decodes(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
) -> tuple[Tensor, Tensor]:
    slots, mask = batch.own_places(window)
    mixed, logs = partial_attention(query[:, None], keys[slots], values[slots], mask[:, None])
    return mixed[:, 0], logs[:, 0]


def _prompts(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
) -> tuple[Tensor, Tensor]:
    share, mixed, logs = batch.share, list[Tensor](), list[Tensor]()
    assert share is not None
    chunks = zip(query.split(list(batch.prompt_queries)), batch.prompt_lengths, strict=True)
    for index, (chunk, length) in enumerate(chunks, batch.num_decodes):
        ends = torch.arange(length - len(chunk) + 1, length + 1, device=query.device)  # of what each query may see
        number = int(share.count(torch.tensor(length)))
        slots = slots_of(batch.tables[index, None], number, batch.block_size)[0]
        key, value, mask = keys[slots][None], values[slots][None], share.sees(ends, number, window)
        at_once = max(1, _SCORES // max(1, number * query.shape[1]))
        for begin in range(0, len(chunk), at_once):
            some = slice(begin, begin + at_once)
            found = partial_attention(chunk[None, some], key, value, mask[None, some])
            mixed.append(found[0][0])
            logs.append(found[1][0])
    return torch.cat(mixed), torch.cat(logs)


def partial_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [batch, tokens, heads, head_dim] to some of the keys, and the logarithms [batch, tokens, heads] of the
    softmax denominators; zeros, and minus infinity, where the mask [batch, tokens, keys] leaves no key.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(2, (key.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bqhgk", grouped, key.to(wide)) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask[:, :, None, None], -torch.inf)
    logs = scores.logsumexp(-1)
    weights = (scores - logs.masked_fill(logs.isinf(), 0.0)[..., None]).exp()
    mixed = torch.einsum("bqhgk,bkhd->bqhgd", weights, value.to(wide))
    return mixed.flatten(2, 3), logs.flatten(2, 3)


def _decodes_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
) -> tuple[Tensor, Tensor]:
    from weft.serve.decode_attention_kernel import decode_attention_by_kernel

    assert window is None
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    logs = out.new_full(query.shape[:2], -torch.inf)
    given = (batch.tables[: batch.num_decodes], batch.own_lengths, batch.block_size, None)
    decode_attention_by_kernel(query, keys, values, *given, out=out, logs=logs)
    return out, logs


def _prompts_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
) -> tuple[Tensor, Tensor]:
    from weft.serve.prompt_attention_kernel import prompt_attention_by_kernel

    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    logs = out.new_empty(query.shape[:2])
    given = (batch.tables, batch.prompt_tiles, batch.block_size, window, out)
    prompt_attention_by_kernel(query, keys, values, *given, batch.share, logs)
    return out, logs
