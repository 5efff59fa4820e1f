"""Which tokens a decode attends to by Loki (`loki_cache.py`), as plain functions.

    scores = first_scores(queries, first dims of keys)          by each query
    scores = joint_scores(scores, highest by each query, ...)   by each key head; tokens that are always chosen: inf
    places, counts = highest(scores, number)                    of equal scores the first token

Scores of several queries that share a key head are taken relative to each query's best, and the highest counts, so that
each key and value is read once for all of them. Tokens may lie in several parts, as on ranks that have parts of a
sequence: the highest of each query is then that of all parts, and the chosen tokens have the highest of all joint
scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import ConfigError


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
        for name in ("newest", "dense_below"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} of Loki must be at least 0")

    def num_dims(self, head_dim: int) -> int:
        return max(1, math.ceil(self.dims * head_dim))

    def num_tokens(self, lengths: Tensor) -> Tensor:
        """How many of so many tokens are attended to."""
        chosen = (self.tokens * lengths).ceil().long().clamp(min=self.newest + 1)
        return torch.where(lengths < self.dense_below, lengths, torch.minimum(chosen, lengths))

    def most_tokens(self, length: int) -> int:
        """At least the most of `num_tokens` for up to `length` tokens; by float32 of kernels it may be one more."""
        return min(length, max(math.ceil(self.tokens * length) + 1, self.newest + 1, self.dense_below))


def first_scores(query: Tensor, first: Tensor) -> Tensor:
    """Scores [requests, key heads, queries, tokens] of queries [requests, heads, head_dim] by the first dims of keys
    [requests, tokens, key heads, dims] along the same axes.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = query[..., : first.shape[-1]].unflatten(1, (first.shape[2], -1))
    return torch.einsum("bhgd,bthd->bhgt", heads.to(wide), first.to(wide))


def attended_since(lengths: Tensor, window: int | None) -> Tensor:
    """The first token [requests] that a decode may attend to."""
    ends = lengths.long()
    return torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)


def highest_by_query(scores: Tensor, places: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """The highest score [requests, key heads, queries, 1] of each query, of tokens at `places` [tokens] in their
    requests; -inf where a query may attend to none of them.
    """
    begin, ends = attended_since(lengths, window)[:, None], lengths[:, None]
    outside = (places < begin) | (places >= ends)
    return scores.masked_fill(outside[:, None, None], -torch.inf).amax(-1, keepdim=True)


def joint_scores(
    scores: Tensor, best: Tensor, places: Tensor, lengths: Tensor, window: int | None, newest: int
) -> Tensor:
    """Scores [requests, key heads, tokens] by which tokens are chosen: `first_scores` relative to the best of each
    query, the highest by the queries of a key head. The newest tokens and the first one have inf, tokens outside -inf.
    """
    begin, ends = attended_since(lengths, window)[:, None], lengths[:, None].long()
    always = (places >= ends - newest) | (places == begin)
    outside = (places < begin) | (places >= ends)
    joint = (scores - best).amax(2)
    return joint.masked_fill(always[:, None], torch.inf).masked_fill(outside[:, None], -torch.inf)


def chosen_tokens(
    query: Tensor, first: Tensor, lengths: Tensor, window: int | None, choice: LokiChoice
) -> tuple[Tensor, Tensor]:
    """The places [requests, key heads, chosen] of the tokens that queries attend to, and which of them count.

    `first` are the first dims [requests, tokens, key heads, dims] of the keys of all tokens. Of equal scores, the first
    token is taken.
    """
    places = torch.arange(first.shape[1], device=first.device)
    scores = first_scores(query, first)
    best = highest_by_query(scores, places, lengths, window)
    joint = joint_scores(scores, best, places, lengths, window, choice.newest)
    order = joint.argsort(dim=-1, descending=True, stable=True)[..., : choice.most_tokens(first.shape[1])]
    number = choice.num_tokens(lengths.long() - attended_since(lengths, window))
    counts = (torch.arange(order.shape[-1], device=first.device) < number[:, None])[:, None].expand_as(order)
    return torch.where(counts, order, order[..., :1]), counts  # elsewhere, other requests may have left NaN


def attention_to_chosen(query: Tensor, key: Tensor, value: Tensor, counts: Tensor) -> Tensor:
    """Attention of queries [requests, heads, head_dim] to chosen keys and values [requests, key heads, chosen,
    head_dim], of which those that count [requests, key heads, chosen] are attended to.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bhgd,bhkd->bhgk", grouped, key.to(wide)) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~counts[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("bhgk,bhkd->bhgd", weights, value.to(wide)).flatten(1, 2).to(query.dtype)
