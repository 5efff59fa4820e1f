"""The inputs of a step as tensors on the device: tokens, positions, slots and block tables of its chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.serve.attention.batch import PagedBatch, PageShare, to_device
from weft.serve.scheduling.blocks import HeldBlocks
from weft.serve.scheduling.request import Request
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk


@dataclass(frozen=True)
class PageLayout:
    """Blocks of the cache. Block number `num_blocks`, behind those that requests use, is written by padding."""

    block_size: int
    num_blocks: int
    num_rows: int  # requests that run at once; row number `num_rows` is that of padding
    device: torch.device
    answers_are_decodes: bool = False  # each generated token is a decode of its own, whatever it is computed with
    share: PageShare | None = None  # of the pages of each block; None: this rank has whole blocks

    @property
    def page_size(self) -> int:
        """Tokens of a block on this rank."""
        return self.block_size if self.share is None else self.share.page_size


TABLE = 2  # where the block table begins, in the arrays below


def padding_table(layout: PageLayout) -> tuple[int, int, int]:
    """Return the length, row and only block of padding."""
    return 1, layout.num_rows, layout.num_blocks


def is_decode(chunk: ScheduledChunk, layout: PageLayout) -> bool:
    """Return whether a chunk is one token, after which the next is sampled, that may be computed as a decode."""
    is_of_prompt = chunk.start < len(chunk.active.request.tokens)
    return chunk.samples and chunk.num_tokens == 1 and not (layout.answers_are_decodes and is_of_prompt)


def runs_of(chunks: Sequence[ScheduledChunk], layout: PageLayout) -> list[ScheduledChunk]:
    """Return the runs of tokens that a step computes, in the order of its tokens: decodes first.

    These are the chunks, which come in this order. If each generated token must be a decode (`answers_are_decodes`),
    each generated token and draft is a run of its own; the parts of chunks that lie in prompts follow.
    """
    if not layout.answers_are_decodes:
        return list(chunks)
    decodes, prompts = list[ScheduledChunk](), list[ScheduledChunk]()
    for active, start, end, _, drafts in chunks:
        of_prompt = len(active.request.tokens)
        if start < of_prompt:
            prompts.append(ScheduledChunk(active, start, min(end, of_prompt), False))
        decodes += [ScheduledChunk(active, at, at + 1, False) for at in range(max(start, of_prompt), end)]
        decodes += [ScheduledChunk(active, at, at, False, (draft,)) for at, draft in enumerate(drafts, end)]
    return decodes + prompts


def packed(chunks: Sequence[ScheduledChunk], layout: PageLayout, num_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Return two arrays of int32 in host memory.

    The first is [4, tokens]: the token; the sampler's row whose last token it is, where the host does not know it yet,
    else -1; its position; its slot. The second is [requests, 2 + blocks]: tokens in the cache after this step, row,
    block table. Both are padded to `num_rows` with tokens whose keys and values go to the block for padding.
    """
    size = layout.block_size
    tokens, sources, positions, slots = list[int](), list[int](), list[int](), list[int]()
    width = max((chunk.start + chunk.num_tokens - 1) // size + 1 for chunk in chunks)
    tables = np.zeros((max(len(chunks), num_rows), TABLE + width), dtype=np.int32)
    for index, chunk in enumerate(chunks):
        active, start, end = chunk.active, chunk.start, chunk.start + chunk.num_tokens
        assert active.held is not None
        blocks = active.held.blocks
        num_blocks = (end - 1) // size + 1
        tables[index, :TABLE] = end, active.row
        tables[index, TABLE : TABLE + num_blocks] = blocks[:num_blocks]
        known = [*active.tokens[start : chunk.end], *chunk.drafts]
        if known:
            tokens += known
            sources += [-1] * (end - start)
        else:
            tokens.append(0)
            sources.append(active.row)
        if end - start == 1:
            positions.append(start)
            slots.append(blocks[start // size] * size + start % size)
        else:
            positions += range(start, end)
            slots += [blocks[position // size] * size + position % size for position in range(start, end)]
    num_padded = max(0, num_rows - len(chunks))
    if num_padded:
        tables[len(chunks) :, : TABLE + 1] = padding_table(layout)
    padding = ([0] * num_padded, [-1] * num_padded, [0] * num_padded, [layout.num_blocks * size] * num_padded)
    parts = [one + more for one, more in zip((tokens, sources, positions, slots), padding, strict=True)]
    return torch.from_numpy(np.array(parts, dtype=np.int32)), torch.from_numpy(tables)


def input_tokens(flat: Tensor, last: Tensor) -> Tensor:
    """Return the tokens [tokens] of a packed array: those it has, or the last ones of the sampler's rows."""
    return torch.where(flat[1] >= 0, last[flat[1].clamp(min=0).long()], flat[0])


@dataclass(frozen=True)
class StepInputs:
    """What a step computes, in host memory: the arrays of `packed`, and how many tokens each request has in the step.

    The first `num_decodes` requests have one token each. After the tokens at the places `sampled`, the next is sampled.
    """

    flat: Tensor  # [4, tokens] int32
    tables: Tensor  # [requests, 2 + blocks] int32
    queries: list[int]
    num_decodes: int
    sampled: list[int]

    @property
    def num_tokens(self) -> int:
        return self.flat.shape[1]

    def batch(self, layout: PageLayout, last: Tensor | None = None) -> PagedBatch:
        """Return the batch on the device. `last` are the last tokens of the sampler's rows, if the host may not know
        them.
        """
        flat, tables = to_device(self.flat, layout.device), to_device(self.tables, layout.device)
        slots, size = flat[3].long(), layout.page_size
        if layout.share is not None:
            slots = layout.share.own_slots(slots, layout.num_blocks * size)
        return PagedBatch(
            flat[0] if last is None else input_tokens(flat, last),
            flat[2],
            slots,
            tables[:, TABLE:],
            tables[:, 0],
            tables[:, 1],
            size,
            self.num_decodes,
            self.queries[self.num_decodes :],
            self.tables[self.num_decodes :, 0].tolist(),
            share=layout.share,
        )

    def sampled_tokens(self, device: torch.device) -> Tensor:
        """Return the places of the tokens after which the next is sampled."""
        return to_device(torch.tensor(self.sampled, dtype=torch.int64), device)


def step_inputs(chunks: Sequence[ScheduledChunk], layout: PageLayout) -> StepInputs:
    """Return the inputs of chunks: decodes first, then prompts whose last token is computed, then the others."""
    runs = runs_of(chunks, layout)
    flat, tables = packed(runs, layout)
    queries = [run.num_tokens for run in runs]
    ends = np.cumsum(queries).tolist()
    if not layout.answers_are_decodes:
        sampled = [place for chunk, end in zip(chunks, ends, strict=True) for place in range(end - chunk.num_rows, end)]
        return StepInputs(flat, tables, queries, sum(is_decode(chunk, layout) for chunk in chunks), sampled)
    last = {(run.active, run.start + run.num_tokens): end - 1 for run, end in zip(runs, ends, strict=True)}
    lengths = [(chunk, chunk.start + chunk.num_tokens) for chunk in chunks]
    sampled = [last[chunk.active, at] for chunk, end in lengths for at in range(end + 1 - chunk.num_rows, end + 1)]
    num_decodes = sum(run.start >= len(run.active.request.tokens) for run in runs)
    return StepInputs(flat, tables, queries, num_decodes, sampled)


def text_steps(request: Request, held: HeldBlocks, token_budget: int, layout: PageLayout) -> Iterator[StepInputs]:
    """The inputs by which the prompt of a request is computed in blocks of the cache, some tokens at a time. Nothing is
    sampled. It has the row of padding, so nothing else may be computed meanwhile.
    """
    number = len(request.tokens)
    active = ActiveRequest(request, 0, number, 0, list(request.tokens), held=held, row=layout.num_rows)
    for start in range(0, number, token_budget):
        yield step_inputs([ScheduledChunk(active, start, min(number, start + token_budget), False)], layout)


def text_inputs(tokens: Sequence[int], block_size: int) -> StepInputs:
    """Return the inputs of one text in the first blocks of a cache that nothing else uses; nothing is sampled."""
    number = len(tokens)
    places = torch.arange(number, dtype=torch.int32)
    given = torch.tensor(list(tokens), dtype=torch.int32)
    table = torch.arange(-TABLE, -(-number // block_size), dtype=torch.int32)[None]
    table[0, :TABLE] = torch.tensor([number, 0])
    return StepInputs(torch.stack([given, torch.full_like(given, -1), places, places]), table, [number], 0, [])
