"""Texts that are embedded or scored between two steps of an engine. Nothing is generated.

A text is computed some tokens at a time in blocks of the engine's cache, so it needs no memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from weft.errors import NumbersError
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import RankMessage, ServingRanks
from weft.serve.model.step_inputs import StepInputs, text_steps
from weft.serve.scheduling.request import NAN, Request, TokenLogprobs
from weft.serve.scheduling.scheduler import Scheduler


class TextPasses:
    """Computes texts with a part of a model. The other ranks are told of each step. No step of requests may be under
    way, and the cache must hold the text.
    """

    def __init__(self, part: ModelPart, ranks: ServingRanks | None, scheduler: Scheduler) -> None:
        self._part, self._ranks, self._scheduler = part, ranks, scheduler

    def num_steps(self, num_tokens: int) -> int:
        """Steps by which a text is computed."""
        return -(-num_tokens // self._scheduler.token_budget)

    def embedding(self, request: Request, pool: Literal["mean", "last"]) -> Tensor:
        """The last hidden states [hidden] of a prompt, their mean or the last one (float32, on the host)."""
        total = last = torch.zeros(())
        with self._steps(request, "text") as steps:
            for inputs in steps:
                hidden = self._part.hidden_states(inputs)
                assert hidden is not None
                last = hidden[-1].float()
                total = total.to(hidden.device) + hidden.float().sum(0)
        found = (total / len(request.tokens) if pool == "mean" else last).cpu()
        if not bool(found.isfinite().all()):
            raise NumbersError(NAN)
        return found

    def logprobs(self, request: Request, vocab_size: int, num_likeliest: int) -> list[TokenLogprobs]:
        """The log-probabilities of each token of a prompt but the first, among the first `vocab_size` tokens."""
        tokens, found = request.tokens, list[TokenLogprobs]()
        with self._steps(request, "score") as steps:
            for inputs in steps:
                end = len(found) + inputs.num_tokens
                following = tokens[end] if end < len(tokens) else 0  # behind the last one there is none
                found += self._part.text_logprobs(inputs, vocab_size, num_likeliest, following)
        if any(math.isnan(one.token) for one in found[:-1]):
            raise NumbersError(NAN)
        return found[:-1]

    def gives_numbers(self, token: int, vocab_size: int) -> bool:
        """Does the model give numbers after a text of one token?"""
        with self._steps(Request("numbers", (token,), 1), "score") as steps:
            found = [one for inputs in steps for one in self._part.text_logprobs(inputs, vocab_size, 0, 0)]
        return not any(math.isnan(one.token) for one in found)

    @contextmanager
    def _steps(self, request: Request, kind: Literal["text", "score"]) -> Iterator[Iterator[StepInputs]]:
        """The steps of a prompt, in blocks that are given back at the end."""
        held = self._scheduler.lend(request.tokens)
        try:
            yield self._announced_steps(
                request, kind, text_steps(request, held, self._scheduler.token_budget, self._part.layout)
            )
        except Exception as error:
            if self._ranks is not None:  # the others may still wait for this rank in the step
                self._ranks.failure = error
            raise
        finally:
            self._scheduler.policy.free(held)

    def _announced_steps(
        self, request: Request, kind: Literal["text", "score"], steps: Iterator[StepInputs]
    ) -> Iterator[StepInputs]:
        """The same steps; the other ranks are told of each when it is taken."""
        for inputs in steps:
            self._part.adapters.choose([(request.adapter, inputs.num_tokens)], self._part.device)
            if self._ranks is not None:
                self._ranks.tell(RankMessage(kind, inputs))
            yield inputs
