"""Drafts by a small model with the same tokens: it draws with the noise of the model that it drafts for.

Its keys and values lie in a cache of its own, in the same blocks: the block table of a request serves both models. What
it lacks of a request's tokens it computes when it is asked for drafts. It runs on the scheduling rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.serve.drafts.draft_rounds import DraftRounds, Wanted, in_order, until_nan
from weft.serve.model.model_part import ModelPart
from weft.serve.model.step_inputs import PageLayout, step_inputs
from weft.serve.scheduling.blocks import HeldBlocks
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk
from weft.serve.spec import EngineOptions


@dataclass
class _Drafted:
    """What the draft model's cache holds of a request: tokens up to `length`, and drafts but for the last one."""

    length: int = 0
    drafts: list[int] = field(default_factory=list)

    def num_valid(self, tokens: Sequence[int]) -> int:
        """How many of the request's tokens are in the cache."""
        number = self.length
        for token, draft in zip(tokens[self.length :], self.drafts[:-1], strict=False):
            if token != draft:
                break
            number += 1
        return number


class ModelDrafter:
    """Drafts of a model for an engine whose cache has the blocks of `layout` and whose sampler has `num_rows` rows. Its
    own blocks are whole where ranks hold those of the engine together.
    """

    def __init__(
        self, model: nn.Module, options: EngineOptions, layout: PageLayout, num_rows: int, vocab_size: int
    ) -> None:
        plain = replace(options, speculate=None, adapters={}, grammars=None, dtype=None, cache=None, head=None)
        here = replace(plain, stream_weights=0, resident_blocks=0, swap_blocks=0)  # a draft model stays on the device
        own = replace(here, num_blocks=layout.num_blocks, block_size=layout.block_size)
        most = getattr(getattr(model, "config", None), "context_length", None)
        if own.context_length is not None and most is not None:  # it drafts up to where it knows positions
            own = replace(own, context_length=min(own.context_length, most))
        self._part = ModelPart(model, own)
        if self._part.paged.vocab_size < vocab_size:
            raise ConfigError(
                f"the draft model knows {self._part.paged.vocab_size} tokens and the model {vocab_size}; give a draft "
                f"model with the same tokenizer"
            )
        self.context_length = self._part.context_length
        self._rounds = DraftRounds(self._logits, num_rows, vocab_size, self._part.device)
        self._budget = options.token_budget
        self._drafted: WeakKeyDictionary[HeldBlocks, _Drafted] = WeakKeyDictionary()

    def draft(self, wanted: Wanted) -> list[list[int]]:
        if not wanted:
            return []
        found = self._rounds.following(wanted, self._first([active for active, _ in wanted]))
        for (active, _), drafts in zip(wanted, found, strict=True):
            assert active.held is not None
            self._drafted[active.held] = _Drafted(len(active.tokens), drafts)
        return [until_nan(drafts) for drafts in found]

    def _first(self, members: list[ActiveRequest]) -> Tensor:
        """The first draft of each request, after all that the cache lacks of its tokens, in steps of a bounded size."""
        chunks, results = list[ScheduledChunk](), list[Tensor]()
        for active in members:
            assert active.held is not None
            start, end = self._drafted.get(active.held, _Drafted()).num_valid(active.tokens), len(active.tokens)
            start = min(start, end - 1)
            while end - start > self._budget:
                self._rounds.compute([ScheduledChunk(active, start, start + self._budget, False)])
                start += self._budget
            if chunks and sum(chunk.num_tokens for chunk in chunks) + end - start > self._budget:
                results.append(in_order(self._rounds.sample, chunks))
                chunks = []
            chunks.append(ScheduledChunk(active, start, end, True))
        return torch.cat([*results, in_order(self._rounds.sample, chunks)])

    def _logits(self, chunks: Sequence[ScheduledChunk], last: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._part.logits(step_inputs(chunks, self._part.layout), last)
