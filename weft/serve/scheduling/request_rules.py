"""What a request must be, whatever the engine holds."""

from __future__ import annotations

import math

from weft.serve.scheduling.request import Request, RequestError, Sampling


def check_request(request: Request, context_length: int, num_tokens: int) -> None:
    """Raise RequestError unless a model of `num_tokens` token ids and `context_length` positions can take a request."""
    if not request.tokens:
        raise RequestError("invalid", f"the prompt of request {request.name!r} is empty; give at least one token")
    if request.max_tokens < 1:
        raise RequestError("invalid", f"max_tokens = {request.max_tokens} generates nothing; give 1 or more")
    wrong = next((one for one in request.tokens if not 0 <= one < num_tokens), None)
    if wrong is not None:
        raise RequestError("invalid", f"token {wrong} does not exist; the model has 0 to {num_tokens - 1}")
    if len(request.tokens) > context_length:
        raise RequestError(
            "too_long",
            f"a prompt of {len(request.tokens)} tokens exceeds the context of {context_length}; shorten it",
        )
    _check_sampling(request.sampling, num_tokens)


def _check_sampling(sampling: Sampling, num_tokens: int) -> None:
    limits = {
        "temperature": (0.0, 100.0),
        "top_k": (0, 1 << 30),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-3, 1e3),
        "presence_penalty": (-100.0, 100.0),
        "frequency_penalty": (-100.0, 100.0),
        "num_logprobs": (0, num_tokens),
    }
    for name, (low, high) in limits.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # NaN fails, too
            raise RequestError("invalid", f"{name} = {value} is not between {low} and {high}; give one that is")
    for token, value in sampling.logit_bias.items():
        if not 0 <= token < num_tokens or math.isnan(value):
            raise RequestError(
                "invalid", f"logit_bias of token {token} is {value}; give numbers for tokens 0 to {num_tokens - 1}"
            )
