"""Speculative decoding: cheap drafts of the next tokens are checked by the model, all in one step.

    tokens so far | d1 d2 d3      the model computes the last token and all drafts at once
               t1 | t2 t3 t4      and samples after each of them; t1 is always valid, t2 only if t1 = d1, and so on

A draw is a function of logits, seed and position (`serve/head/sampling.py`), so each valid token is the one that the
engine gives without drafts: drafts change times, never answers. For a draft that is no random draw, as those of
n-grams, this is rejection sampling: a draft of probability p is accepted with probability p, and the token drawn in
place of a rejected one has the model's distribution without it. A draft model, or the model's own first layers, draw
with the same noise, so that drafts often agree.

Without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from weft.errors import ConfigError
from weft.serve.scheduling.blocks import PagedBlocks
from weft.serve.scheduling.request import Sampling
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk

MAX_DRAFTS = 8
MEMORY = 0.95  # of the share of an observation that is left after each later one
LEAST_CHANCE = 0.05  # of a draft to be accepted; less is not worth the memory
LAYERS = "layers="  # how --speculate begins for the model's own first layers
PROBE_EVERY = 16  # steps after which one draft is tried although drafts do not pay


@dataclass(frozen=True)
class EarlyLayers:
    """Draft with the first `number` layers of the model itself, its last norm and its head
    (`serve/drafts/model_drafts.py`).
    """

    number: int


def early_layers(text: str) -> EarlyLayers:
    """Returns what layers=K means. Raises ConfigError if K is no number."""
    number = text.removeprefix(LAYERS)
    if not number.isdecimal():
        raise ConfigError(f"--speculate {text} must be layers=K, where K is how many of the first layers draft")
    return EarlyLayers(int(number))


class Drafter(Protocol):
    """Proposes tokens. The block table of each request has room for its tokens and drafts."""

    context_length: int  # drafts are asked for up to here

    def draft(self, wanted: Sequence[tuple[ActiveRequest, int]]) -> list[list[int]]:
        """Returns for each request at most as many tokens as are asked for, which may follow its own."""


@dataclass
class _Acceptance:
    """Drafts of one request that were checked, recent ones counting more, and steps without any."""

    num_checked: float = 2.0  # as if one of two had been accepted
    num_accepted: float = 1.0
    num_without: int = 0

    @property
    def chance(self) -> float:
        return self.num_accepted / self.num_checked


class StepTimes:
    """A line fitted to the seconds of recent steps over their numbers of tokens, and the rate of valid tokens."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # 1, x, y, x * x, x * y, and valid tokens

    def add(self, num_tokens: int, seconds: float, num_valid: int) -> None:
        new = (1, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds, num_valid)
        self._sums = [MEMORY * old + one for old, one in zip(self._sums, new, strict=True)]

    @property
    def seconds_per_token(self) -> float:
        """By which one more token makes a step longer; 0 while all steps had equally many."""
        one, x, y, xx, xy, _ = self._sums
        spread = one * xx - x * x
        return max(0.0, (one * xy - x * y) / spread) if spread > 1e-9 * (one * xx + 1) else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self._sums[5] / self._sums[2] if self._sums[2] > 0 else 0.0


class DraftLengths:
    """How many tokens are drafted: one more pays if it makes valid tokens come faster.

    A draft number i is accepted with probability a^i, where a is the share accepted of the request's recent drafts. It
    takes the time by which one more token makes a step longer. While a^i tokens in that time are a higher rate than the
    present one, it pays.
    """

    def __init__(self, most: int = MAX_DRAFTS) -> None:
        self.most = most
        self.times = StepTimes()
        self._requests: WeakKeyDictionary[ActiveRequest, _Acceptance] = WeakKeyDictionary()

    def wanted(self, active: ActiveRequest) -> int:
        """Returns how many tokens to draft for a request in its next step."""
        acceptance = self._requests.setdefault(active, _Acceptance())
        least = max(LEAST_CHANCE, self.times.seconds_per_token * self.times.tokens_per_second)
        number, chance = 0, acceptance.chance
        while number < self.most and chance >= least:
            number, chance = number + 1, chance * acceptance.chance
        acceptance.num_without = 0 if number else acceptance.num_without + 1
        if acceptance.num_without >= PROBE_EVERY:
            number, acceptance.num_without = 1, 0
        return number

    def record(self, active: ActiveRequest, num_drafts: int, num_accepted: int) -> None:
        """Say how many drafts of a request were accepted. Those behind the first rejected one tell nothing."""
        acceptance = self._requests.setdefault(active, _Acceptance())
        num_checked = min(num_drafts, num_accepted + 1)
        share_left = MEMORY**num_checked
        acceptance.num_checked = share_left * acceptance.num_checked + num_checked
        acceptance.num_accepted = share_left * acceptance.num_accepted + num_accepted


class Speculation:
    """Adds drafts to the decodes of a step, and counts how many of them are accepted."""

    def __init__(self, drafter: Drafter, policy: PagedBlocks, token_budget: int, lengths: DraftLengths) -> None:
        self.lengths = lengths
        self.num_drafted = 0
        self.num_accepted = 0
        self._drafter, self._policy, self._token_budget = drafter, policy, token_budget

    def reset(self) -> None:
        """Forget how long steps took, and counts."""
        self.lengths = DraftLengths(self.lengths.most)
        self.num_drafted = self.num_accepted = 0

    def extend(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Returns the chunks of a step with drafts, as far as the token budget, the cache and the request's length
        allow.
        """
        budget = self._token_budget - sum(chunk.num_tokens for chunk in chunks)
        wanted: dict[int, int] = {}
        for index, chunk in enumerate(chunks):
            number = min(budget, self._room(chunk, len(chunks)))
            if number > 0:
                wanted[index] = number
                budget -= number
        drafts = self._drafter.draft([(chunks[index].active, number) for index, number in wanted.items()])
        extended = list(chunks)
        for index, tokens in zip(wanted, drafts, strict=True):
            extended[index] = chunks[index]._replace(drafts=tuple(tokens))
        return extended

    def record(self, chunk: ScheduledChunk, num_accepted: int) -> None:
        """Say how many drafts of a chunk were accepted."""
        if chunk.drafts:
            self.lengths.record(chunk.active, len(chunk.drafts), num_accepted)
            self.num_drafted += len(chunk.drafts)
            self.num_accepted += num_accepted

    def record_step(self, chunks: Sequence[ScheduledChunk], seconds: float, num_valid: int) -> None:
        """Say how long a step took, and how many tokens it gave. Steps with prompts tell nothing of decodes."""
        if all(chunk.samples and chunk.end - chunk.start == 1 for chunk in chunks):
            self.lengths.times.add(sum(chunk.num_tokens for chunk in chunks), seconds, num_valid)

    def _room(self, chunk: ScheduledChunk, num_others: int) -> int:
        """Returns how many tokens to draft after a chunk, and takes blocks for them."""
        active, length = chunk.active, len(chunk.active.tokens)
        # Drafts follow generated tokens alone.
        is_decode = chunk.samples and chunk.start + 1 == chunk.end > len(active.request.tokens)
        if not is_decode or not may_draft(active) or active.held is None:
            return 0
        number = min(active.max_length, self._drafter.context_length) - length - 1
        if self._policy.num_free <= num_others:  # the next decodes need these blocks
            number = min(number, len(active.held.blocks) * self._policy.block_size - length)
        if number <= 0:
            return 0
        number = min(number, self.lengths.wanted(active))
        return number if self._policy.append(active.held, length + number) else 0


def may_draft(active: ActiveRequest) -> bool:
    """May tokens be drafted for a request? Penalties and schemas depend on all tokens before, so drafts would change
    them.
    """
    sampling, plain = active.request.sampling, Sampling()
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return active.matcher is None and all(getattr(sampling, name) == getattr(plain, name) for name in names)
