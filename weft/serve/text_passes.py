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

    def embedding(self, request: Request, pool: Literal["mean", "last"]) -> Tensor:
        """Returns the last hidden states [hidden] of a prompt, their mean or the last one (float32, on the host)."""
        total = last = torch.zeros(())
        with self._steps(request, "text") as steps:
            for inputs in steps:
                hidden = self._part.hidden_states(inputs)
                assert hidden is not None
                last = hidden[-1].float()
                total = total.to(hidden.device) + hidden.float().sum(0)
        embedding = (total / len(request.tokens) if pool == "mean" else last).cpu()
        if not bool(embedding.isfinite().all()):
            raise NumbersError(NAN)
        return embedding

    def logprobs(self, request: Request, vocab_size: int, num_likeliest: int) -> list[TokenLogprobs]:
        """Returns the log-probabilities of a prompt's tokens but the first, among the first `vocab_size` tokens."""
        tokens, logprobs = request.tokens, list[TokenLogprobs]()
        with self._steps(request, "score") as steps:
            for inputs in steps:
                end = len(logprobs) + inputs.num_tokens
                following = tokens[end] if end < len(tokens) else 0  # behind the last one there is none
                logprobs += self._part.text_logprobs(inputs, vocab_size, num_likeliest, following)
        if any(math.isnan(one.token) for one in logprobs[:-1]):
            raise NumbersError(NAN)
        return logprobs[:-1]

    def gives_numbers(self, token: int, vocab_size: int) -> bool:
        """Does the model give numbers after a text of one token?"""
        with self._steps(Request("numbers", (token,), 1), "score") as steps:
            logprobs = [one for inputs in steps for one in self._part.text_logprobs(inputs, vocab_size, 0, 0)]
        return not any(math.isnan(one.token) for one in logprobs)

    @contextmanager
    def _steps(self, request: Request, kind: Literal["text", "score"]) -> Iterator[Iterator[StepInputs]]:
        """Yields the steps of a prompt, in blocks that are given back at the end."""
        blocks = self._scheduler.lend(request.tokens)
        try:
            yield self._announced_steps(
                request, kind, text_steps(request, blocks, self._scheduler.token_budget, self._part.layout)
            )
        except Exception as error:
            if self._ranks is not None:  # the others may still wait for this rank in the step
                self._ranks.failure = error
            raise
        finally:
            self._scheduler.policy.free(blocks)

    def _announced_steps(
        self, request: Request, kind: Literal["text", "score"], steps: Iterator[StepInputs]
    ) -> Iterator[StepInputs]:
        """Yields steps, and tells the other ranks of each when it is taken."""
        for inputs in steps:
            self._part.adapters.choose([(request.adapter, inputs.num_tokens)], self._part.device)
            if self._ranks is not None:
                self._ranks.tell(RankMessage(kind, inputs))
            yield inputs
