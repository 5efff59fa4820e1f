"""Drafts that a model draws one after the other, for several requests at once: one step of the model for each round.

The draws have the noise of the model that they are drafted for, so both often agree
(`serve/scheduling/speculation.py`). Two models draw so:

A small model with the same tokens (`ModelDrafter`): its keys and values lie in a cache of its own, in the same blocks:
the block table of a request serves both models. What it lacks of a request's tokens it computes when it is asked for
drafts. It runs on the scheduling rank alone.

The model's own first layers (`EarlyLayersDrafter`): what they give goes through the last norm and the head. No weight
and no page is held twice. The first layers' keys and values of a draft go to the place in the model's own cache where
the step that checks the drafts writes them again, with the same values, so rejected drafts are overwritten as those of
any drafter. A draft reads the weights of the first layers and of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.serve.head.sampling import Sampler
from weft.serve.model.model_part import ModelPart
from weft.serve.model.step_inputs import PageLayout, runs_of, step_inputs
from weft.serve.scheduling.blocks import HeldBlocks
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk
from weft.serve.spec import EngineOptions

Wanted = Sequence[tuple[ActiveRequest, int]]  # requests, and how many tokens to draft for each
# The logits after chunks that sample, and their positions, given the last tokens of the sampler's rows.
Logits = Callable[[Sequence[ScheduledChunk], Tensor], tuple[Tensor, Tensor] | None]


class DraftRounds:
    """Draws drafts from what `logits` gives after a step's tokens; `num_rows` requests run at once."""

    def __init__(self, logits: Logits, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._logits = logits
        self._sampler = Sampler(num_rows, vocab_size, device)

    def compute(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Tensor] | None:
        """Return the logits after chunks that sample, and their positions."""
        return self._logits(chunks, self._sampler.last)

    def sample(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Return a token after each chunk."""
        found = self.compute(chunks)
        assert found is not None
        logits, positions = found
        return self._sampler.sample(logits, [chunk.active for chunk in chunks], positions).tokens

    def following(self, wanted: Wanted, first: Tensor) -> list[list[int]]:
        """Return as many drafts for each request as are wanted, given the first of each. A draft of -1 stands for
        logits that are NaN.
        """
        rounds = [first]
        numbers = [number for _, number in wanted]
        for index in range(1, max(numbers)):
            members = [active for active, number in wanted if number > index]
            places = [len(active.tokens) + index - 1 for active in members]
            chunks = [ScheduledChunk(one, at, at + 1, True) for one, at in zip(members, places, strict=True)]
            rounds.append(self.sample(chunks))
        columns: list[list[int]] = [one.tolist() for one in rounds]
        found: list[list[int]] = []
        for row, number in enumerate(numbers):
            # Requests with fewer drafts are missing in later rounds.
            rows = [sum(other > index for other in numbers[:row]) for index in range(number)]
            found.append([columns[index][rows[index]] for index in range(number)])
        return found


def in_order(sample: Callable[[list[ScheduledChunk]], Tensor], chunks: list[ScheduledChunk]) -> Tensor:
    """Return a token after each chunk, in the order of the chunks. `sample` is given chunks of one token first, because
    a step computes them first.
    """
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
    tokens = sample([chunks[index] for index in order])
    return tokens[torch.tensor(order, device=tokens.device).argsort()]


def until_nan(drafts: Sequence[int]) -> list[int]:
    """Return the drafts before the first -1, which stands for logits that are NaN."""
    return list(drafts[: drafts.index(-1)] if -1 in drafts else drafts)


@dataclass
class _Drafted:
    """What the draft model's cache holds of a request: tokens up to `length`, and drafts but for the last one."""

    length: int = 0
    drafts: list[int] = field(default_factory=list)

    def num_valid(self, tokens: Sequence[int]) -> int:
        """Return how many of the request's tokens are in the cache."""
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
        """Return the first draft of each request. Computes before it what the cache lacks of the request's tokens, in
        steps of a bounded size.
        """
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


class EarlyLayersDrafter:
    """Drafts of the first `num_layers` layers of an engine's model."""

    def __init__(self, part: ModelPart, num_layers: int, num_rows: int, vocab_size: int) -> None:
        num_whole = len(part.paged.blocks)
        if not 1 <= num_layers < num_whole:
            raise ConfigError(
                f"--speculate layers={num_layers} of a model with {num_whole} layers; drafts need at least 1 layer "
                f"and fewer than all"
            )
        self.context_length = part.context_length
        self._part, self._num_layers = part, num_layers
        self._rounds = DraftRounds(self._logits, num_rows, vocab_size, part.device)

    def draft(self, wanted: Wanted) -> list[list[int]]:
        if not wanted:
            return []
        places = [(active, len(active.tokens) - 1) for active, _ in wanted]  # all before is in the model's cache
        first = self._rounds.sample([ScheduledChunk(active, at, at + 1, True) for active, at in places])
        return [until_nan(drafts) for drafts in self._rounds.following(wanted, first)]

    def _logits(self, chunks: Sequence[ScheduledChunk], last: Tensor) -> tuple[Tensor, Tensor] | None:
        part = self._part
        runs = runs_of(chunks, part.layout)
        part.adapters.choose(((run.active.request.adapter, run.num_tokens) for run in runs), part.device)
        return part.logits(step_inputs(chunks, part.layout), last, self._num_layers)
