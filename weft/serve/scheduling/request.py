"""What a client asks of the engine, and what the engine answers, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.errors import NumbersError, WeftError

# stuck: no token can follow in the request's schema. nan: the model gave no numbers, and the token is none.
Finish = Literal["stop", "length", "cancelled", "stuck", "nan"]
NAN = (
    "the model gives NaN for this text, and numbers for other texts: values overflow in it; change the text, or serve "
    "in a wider dtype"
)


class RequestError(WeftError):
    """The engine cannot take a request. `reason` says which rule it broke; the message says what to change."""

    def __init__(self, reason: Literal["invalid", "too_long", "queue_full"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits. The defaults sample from the model's own distribution."""

    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # sample among the k likeliest; 0: all
    top_p: float = 1.0  # sample among the likeliest that together have this probability
    min_p: float = 0.0  # leave out tokens with less than this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # as in transformers: divides positive logits of tokens seen, multiplies negative
    presence_penalty: float = 0.0  # subtracted from logits of tokens generated before
    frequency_penalty: float = 0.0  # subtracted for each time that a token was generated
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    seed: int | None = None  # equal seeds give equal tokens, whatever else is in the batch; None: any
    num_logprobs: int | None = None  # report the log-probability of the token and of so many likeliest; None: of none


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    `tenant` and `adapter` separate prefix caches: a prompt's keys and values are never reused for another of either.
    """

    name: str  # unique among the requests that the engine holds
    tokens: tuple[int, ...]  # the prompt, at least one token
    max_tokens: int  # generate at most so many
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()  # ends at one of these, which is reported as generated
    tenant: str = ""
    adapter: str = ""  # the name of a LoRA adapter; "": the model alone
    json_schema: str | None = None  # as JSON; the generated text matches it


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a generated token and of the likeliest ones, by the model before sampling changes them."""

    token: float
    likeliest: tuple[tuple[int, float], ...]  # (token, log-probability), best first


@dataclass(frozen=True)
class GeneratedToken:
    """One token of one request. `finish` is set on the last one of a request."""

    request: str
    token: int
    logprobs: TokenLogprobs | None = None
    finish: Finish | None = None

    def require_number(self) -> None:
        """Raise NumbersError if the request ended because the model gave NaN."""
        if self.finish == "nan":
            raise NumbersError(NAN)


@dataclass(frozen=True)
class EngineState:
    """What the engine holds at a moment, for metrics and admission."""

    num_running: int
    num_waiting: int
    num_blocks: int  # of the key-value cache
    num_free_blocks: int
    block_size: int  # tokens a block
    num_preempted: int  # requests sent back to the queue since the start, for lack of memory
    num_prefix_tokens: int  # prompt tokens that the prefix cache answered since the start
    num_generated: int  # tokens since the start
    num_swapped: int = 0  # of the requests sent back, those whose keys and values went to host memory
    num_drafted: int = 0  # tokens since the start that were drafted (`speculation.py`)
    num_accepted: int = 0  # of these, those that the model agreed with
