"""Log-likelihoods of texts under a model: sums of the log-probabilities of their last tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.errors import NumbersError


class ScoredText(NamedTuple):
    """Tokens, of which the last `num_scored` are scored, each given all tokens before it."""

    tokens: tuple[int, ...]
    num_scored: int


class Score(NamedTuple):
    """The sum of log-probabilities, and whether greedy decoding would give the same tokens."""

    log_likelihood: float
    is_greedy: bool


@torch.inference_mode()
def score(model: nn.Module, texts: Sequence[ScoredText], batch: int) -> list[Score]:
    """Returns the score of each text, `batch` texts at a time. A text has one token more than the model is given."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number].tokens))  # texts of like length together
    found: dict[int, Score] = {}
    for begin in range(0, len(order), batch):
        members = order[begin : begin + batch]
        logits = model(_padded([texts[number].tokens[:-1] for number in members], model))
        for row, number in enumerate(members):
            found[number] = _score(logits[row], texts[number])
    return [found[number] for number in range(len(texts))]


def windows(tokens: Sequence[int], begin: Sequence[int], context_length: int) -> list[ScoredText]:
    """Returns texts that together score each token of a document once, after the tokens `begin`.

    Each window has as many tokens of context as fit.
    """
    everything = (*begin, *tokens)
    found: list[ScoredText] = []
    start = len(begin)
    while start < len(everything):
        end = min(context_length + (start if found else 1), len(everything))
        found.append(ScoredText(everything[max(0, end - context_length - 1) : end], end - start))
        start = end
    return found


def _padded(rows: Sequence[Sequence[int]], model: nn.Module) -> Tensor:
    """Rows of tokens as one tensor. Padding follows the tokens, so causal attention does not see it."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row)
    return padded.to(next(model.parameters()).device)


def _score(logits: Tensor, text: ScoredText) -> Score:
    end = len(text.tokens) - 1
    own = logits[end - text.num_scored : end]
    targets = torch.tensor(text.tokens[-text.num_scored :], device=own.device)
    wide = own.to(torch.promote_types(own.dtype, torch.float32)).log_softmax(-1)
    total = wide.gather(1, targets[:, None]).sum().item()
    if math.isnan(total):
        raise NumbersError("the model gives NaN for a text; its weights may be NaN; take an older checkpoint")
    return Score(total, bool((own.argmax(-1) == targets).all()))
