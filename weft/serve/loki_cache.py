"""Loki, as a format of the cache (`layer_cache.py`): a decode attends to tokens that a part of their keys chooses.

Keys of a head lie near a subspace of few dims. Calibration finds its axes, most important first
(`loki_calibration.py`). Keys are kept along these axes instead of their own, which changes no product with a query
along the same axes. Their first dims are kept a second time, end to end, so that a GPU reads them alone. A decode

    1. scores all tokens by the first dims of their keys alone; where several queries share a key head, each score is
       taken relative to its query's best, and the highest counts, so that each key and value is read once for all,
    2. takes for each key head the tokens with the highest scores, the newest ones and the first,
    3. attends to these exactly.

Prompts attend to everything, and so do decodes of few tokens. No token is ever lost. GPUs run the kernels of
`loki_kernel.py`; the plain functions below run on a CPU and in other dtypes than fp16 and bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.serve.layer_cache import CacheSizes, LayerCache, staging
from weft.serve.model_identity import model_identity
from weft.serve.paged_attention import PagedBatch, attend_prompts, slots_of


@dataclass(frozen=True)
class LokiChoice:
    """How a decode chooses tokens."""

    dims: float = 0.25  # share of a key's dims by which tokens are scored
    tokens: float = 0.25  # share of the tokens that are attended to
    newest: int = 64  # of these, so many are the newest
    dense_below: int = 1024  # a decode of fewer tokens attends to all

    def __post_init__(self) -> None:
        for name in ("dims", "tokens"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)} of Loki must be above 0 and at most 1")

    def num_dims(self, head_dim: int) -> int:
        return max(1, math.ceil(self.dims * head_dim))

    def num_tokens(self, lengths: Tensor) -> Tensor:
        """How many of so many tokens are attended to."""
        chosen = (self.tokens * lengths).ceil().long().clamp(min=self.newest + 1)
        return torch.where(lengths < self.dense_below, lengths, torch.minimum(chosen, lengths))

    def most_tokens(self, length: int) -> int:
        """The most of `num_tokens` for up to `length` tokens."""
        return min(length, max(math.ceil(self.tokens * length), self.newest + 1, self.dense_below))


class LokiFormat:
    """Keys along calibrated axes [layers, key heads, head_dim, head_dim]: key @ axes[layer, head]."""

    name = "loki"
    block_size: int | None = None
    keeps_whole_blocks = False
    is_chunked_alike = False  # prompts are not approximated
    needs_one_rank = True  # axes are those of all layers and heads
    has_kernel = True

    def __init__(self, axes: Tensor, choice: LokiChoice = LokiChoice(), identity: str = "") -> None:
        self.axes, self.choice, self.identity = axes, choice, identity

    def refuse(self, model: nn.Module) -> None:
        if self.identity and self.identity != model_identity(model):
            raise ConfigError(
                "the file of --cache loki is of another model; run weft calibrate on the model that is served"
            )

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        return LokiLayer(self.axes[index], self.choice, sizes)

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        return num_key_heads * (2 * head_dim + self.choice.num_dims(head_dim)) * item_bytes

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 0


class LokiLayer:
    """The cache of one block of the model."""

    counts: Tensor | None = None

    def __init__(self, axes: Tensor, choice: LokiChoice, sizes: CacheSizes) -> None:
        if axes.shape != (sizes.num_key_heads, sizes.head_dim, sizes.head_dim):
            raise ConfigError(
                f"Loki's axes are of {axes.shape[0]} key heads of {axes.shape[-1]}, and the model has "
                f"{sizes.num_key_heads} of {sizes.head_dim}; run weft calibrate on the model that is served"
            )
        self._sizes, self._choice = sizes, choice
        self._axes = axes.to(sizes.device, torch.promote_types(sizes.dtype, torch.float32)).contiguous()
        shape = (2, sizes.num_blocks, sizes.block_size, sizes.num_key_heads, sizes.head_dim)
        keys, values = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        num_dims = choice.num_dims(sizes.head_dim)
        first = keys.new_zeros(sizes.num_blocks, sizes.num_key_heads, sizes.block_size, num_dims)
        self.pages: Sequence[Tensor] = (keys, values, first)
        self._keys, self._values = keys.flatten(0, 1), values.flatten(0, 1)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        return staging(batch, self._sizes)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        number, size, parts = batch.num_decodes, batch.block_size, []
        has_kernels = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
        query = self._turn_and_store(query, keys, values, batch.slots, has_kernels and not batch.prompt_queries)
        if number:
            given = (query[:number], self._keys, self._values, batch.tables[:number], batch.lengths[:number])
            if has_kernels:
                parts.append(chosen_attention_by_kernel(*given, self.pages[2], window, self._choice))
            else:
                parts.append(chosen_attention(*given, size, window, self._choice))
        if batch.prompt_queries:
            parts.append(attend_prompts(query[number:], self._keys, self._values, batch, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _turn_and_store(self, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, by_kernel: bool) -> Tensor:
        """Queries along the axes. Keys along the axes, and values, go to the pages."""
        if by_kernel:
            from weft.serve.loki_axes_kernel import turn_and_store_by_kernel

            return turn_and_store_by_kernel(query, keys, values, self._axes, slots, self.pages)
        keys, first = self._along_axes(keys), self.pages[2]
        self._keys[slots], self._values[slots] = keys, values
        size = first.shape[2]
        first[slots // size, :, slots % size] = keys[..., : first.shape[-1]]
        return self._along_axes(query)

    def _along_axes(self, heads: Tensor) -> Tensor:
        """Queries or keys [tokens, heads, head_dim] along the axes of their key heads."""
        grouped = heads.to(self._axes.dtype).unflatten(1, (len(self._axes), -1))  # [tokens, key heads, group, head_dim]
        return torch.einsum("thgd,hde->thge", grouped, self._axes).flatten(1, 2).to(heads.dtype)


def chosen_tokens(
    query: Tensor, keys: Tensor, slots: Tensor, lengths: Tensor, window: int | None, choice: LokiChoice
) -> tuple[Tensor, Tensor]:
    """The places [requests, key heads, chosen] of the tokens that queries attend to, and which of them count.

    Scores are those of the first dims, relative to the best of a query, the highest by the queries of a key head. Of
    equal scores, the first token is taken.
    """
    num_dims, group = choice.num_dims(keys.shape[-1]), query.shape[1] // keys.shape[1]
    first = keys[..., :num_dims][slots]  # [requests, tokens, key heads, dims]
    heads = query[..., :num_dims].unflatten(1, (-1, group))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("bhgd,bthd->bhgt", heads.to(wide), first.to(wide))
    places, ends = torch.arange(slots.shape[1], device=slots.device), lengths[:, None].long()
    begin = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    always = (places >= ends - choice.newest) | (places == begin)
    outside = (places < begin) | (places >= ends)
    best = scores.masked_fill(outside[:, None, None], -torch.inf).amax(-1, keepdim=True)
    scores = (scores - best).amax(2)
    scores = scores.masked_fill(always[:, None], torch.inf).masked_fill(outside[:, None], -torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : choice.most_tokens(slots.shape[1])]
    number = choice.num_tokens((ends - begin)[:, 0])
    counts = torch.arange(order.shape[-1], device=slots.device) < number[:, None]
    return order, counts[:, None].expand_as(order)


def chosen_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    window: int | None,
    choice: LokiChoice,
) -> Tensor:
    """`decode_attention` of `paged_attention.py` over chosen tokens; query and keys are along the same axes."""
    slots = slots_of(tables, tables.shape[1] * block_size, block_size).long()
    order, counts = chosen_tokens(query, keys, slots, lengths, window, choice)
    num_key_heads = keys.shape[1]
    rows = slots[:, None].expand(-1, num_key_heads, -1).gather(2, order)
    key_heads = torch.arange(num_key_heads, device=query.device)[None, :, None]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = keys[rows, key_heads].to(wide), values[rows, key_heads].to(wide)  # [requests, heads, chosen, head_dim]
    grouped = query.to(wide).unflatten(1, (num_key_heads, -1))
    scores = torch.einsum("bhgd,bhkd->bhgk", grouped, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~counts[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("bhgk,bhkd->bhgd", weights, value).flatten(1, 2).to(query.dtype)


def first_dims(keys: Tensor, block_size: int, num_dims: int) -> Tensor:
    """The first dims of keys [slots, key heads, head_dim] as pages keep them: [blocks, key heads, block_size, dims]."""
    pages: Tensor = keys[..., :num_dims].unflatten(0, (-1, block_size))
    return pages.transpose(1, 2).contiguous()


def chosen_attention_by_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    first: Tensor,
    window: int | None,
    choice: LokiChoice,
) -> Tensor:
    """Equals `chosen_attention`. `first` are the first dims of keys: [blocks, key heads, block_size, dims]."""
    from weft.serve.decode_attention_kernel import decode_attention_by_kernel
    from weft.serve.loki_kernel import chosen_slots_by_kernel

    block_size = first.shape[2]
    numbers = (choice.tokens, choice.newest, choice.dense_below, choice.most_tokens(tables.shape[1] * block_size))
    chosen, counts = chosen_slots_by_kernel(query, first, tables, lengths, window, numbers)
    return decode_attention_by_kernel(query, keys, values, tables, counts, block_size, None, chosen)
