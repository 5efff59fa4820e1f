"""Drafts that a model draws one after the other, for several requests at once: one step of the model for each round.

The draws have the noise of the model that they are drafted for, so both often agree
(`serve/scheduling/speculation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.serve.head.sampling import Sampler
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk

Wanted = Sequence[tuple[ActiveRequest, int]]  # requests, and how many tokens to draft for each
# The logits after chunks that sample, and their positions, given the last tokens of the sampler's rows.
Logits = Callable[[Sequence[ScheduledChunk], Tensor], tuple[Tensor, Tensor] | None]


class DraftRounds:
    """Draws drafts from what `logits` gives after a step's tokens; `num_rows` requests run at once."""

    def __init__(self, logits: Logits, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._logits = logits
        self._sampler = Sampler(num_rows, vocab_size, device)

    def compute(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Tensor] | None:
        """The logits after chunks that sample, and their positions."""
        return self._logits(chunks, self._sampler.last)

    def sample(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """A token after each chunk."""
        found = self.compute(chunks)
        assert found is not None
        logits, positions = found
        return self._sampler.sample(logits, [chunk.active for chunk in chunks], positions).tokens

    def following(self, wanted: Wanted, first: Tensor) -> list[list[int]]:
        """As many drafts for each request as are wanted, given the first of each. A draft of -1 says that logits are
        NaN.
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
    """Tokens after chunks in any order; a step computes chunks of one token first."""
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
    tokens = sample([chunks[index] for index in order])
    return tokens[torch.tensor(order, device=tokens.device).argsort()]


def until_nan(drafts: Sequence[int]) -> list[int]:
    """The drafts before the first that is none."""
    return list(drafts[: drafts.index(-1)] if -1 in drafts else drafts)
