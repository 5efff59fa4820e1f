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
from weft.serve.blocks import HeldBlocks
from weft.serve.model_part import EngineOptions, ModelPart
from weft.serve.ngram_drafter import NgramDrafter
from weft.serve.sampling import Sampler
from weft.serve.scheduler import ActiveRequest, ScheduledChunk
from weft.serve.speculation import Drafter
from weft.serve.step_inputs import step_inputs


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


def make_drafter(options: EngineOptions, num_blocks: int, num_rows: int, vocab_size: int) -> Drafter:
    """The drafter that `options.speculate` names."""
    if isinstance(options.speculate, nn.Module):
        return ModelDrafter(options.speculate, options, num_blocks, num_rows, vocab_size)
    return NgramDrafter()


class ModelDrafter:
    """Drafts of a model for an engine whose cache has `num_blocks` blocks and whose sampler has `num_rows` rows."""

    def __init__(
        self, model: nn.Module, options: EngineOptions, num_blocks: int, num_rows: int, vocab_size: int
    ) -> None:
        own = replace(
            options, num_blocks=num_blocks, speculate=None, adapters={}, grammars=None, dtype=None, cache=None
        )
        self._part = ModelPart(model, own)
        if self._part.paged.vocab_size < vocab_size:
            raise ConfigError(
                f"the draft model knows {self._part.paged.vocab_size} tokens and the model {vocab_size}; give a draft "
                f"model with the same tokenizer"
            )
        self.context_length = self._part.context_length
        self._sampler = Sampler(num_rows, vocab_size, self._part.device)
        self._budget = options.token_budget
        self._drafted: WeakKeyDictionary[HeldBlocks, _Drafted] = WeakKeyDictionary()

    def draft(self, wanted: Sequence[tuple[ActiveRequest, int]]) -> list[list[int]]:
        if not wanted:
            return []
        rounds = [self._first([active for active, _ in wanted])]
        numbers = [number for _, number in wanted]
        for index in range(1, max(numbers)):
            members = [active for active, number in wanted if number > index]
            places = [len(active.tokens) + index - 1 for active in members]
            chunks = [ScheduledChunk(one, at, at + 1, True) for one, at in zip(members, places, strict=True)]
            rounds.append(self._sample(chunks))
        columns: list[list[int]] = [one.tolist() for one in rounds]
        found: list[list[int]] = []
        for row, (active, number) in enumerate(wanted):
            # Requests with fewer drafts are missing in later rounds.
            rows = [sum(other > index for other in numbers[:row]) for index in range(number)]
            drafts = [columns[index][rows[index]] for index in range(number)]
            assert active.held is not None
            self._drafted[active.held] = _Drafted(len(active.tokens), drafts)
            # A token of -1 says that logits are NaN; nothing is drafted from there on.
            found.append(drafts[: drafts.index(-1)] if -1 in drafts else drafts)
        return found

    def _first(self, members: list[ActiveRequest]) -> Tensor:
        """The first draft of each request, after all that the cache lacks of its tokens, in steps of a bounded size."""
        chunks, results = list[ScheduledChunk](), list[Tensor]()
        for active in members:
            assert active.held is not None
            start, end = self._drafted.get(active.held, _Drafted()).num_valid(active.tokens), len(active.tokens)
            start = min(start, end - 1)
            while end - start > self._budget:
                self._compute([ScheduledChunk(active, start, start + self._budget, False)])
                start += self._budget
            if chunks and sum(chunk.num_tokens for chunk in chunks) + end - start > self._budget:
                results.append(self._in_order(chunks))
                chunks = []
            chunks.append(ScheduledChunk(active, start, end, True))
        return torch.cat([*results, self._in_order(chunks)])

    def _in_order(self, chunks: list[ScheduledChunk]) -> Tensor:
        """Drafts for chunks in any order; a step computes chunks of one token first."""
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
        tokens = self._sample([chunks[index] for index in order])
        return tokens[torch.tensor(order, device=tokens.device).argsort()]

    def _sample(self, chunks: list[ScheduledChunk]) -> Tensor:
        found = self._compute(chunks)
        assert found is not None
        logits, positions = found
        tokens = self._sampler.sample(logits, [chunk.active for chunk in chunks], positions).tokens
        self._sampler.last.clamp_(min=0)  # after NaN, any token
        return tokens

    def _compute(self, chunks: list[ScheduledChunk]) -> tuple[Tensor, Tensor] | None:
        return self._part.logits(step_inputs(chunks, self._part.layout), self._sampler.last)
