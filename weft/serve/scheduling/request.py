"""What a client asks of the engine, and what the engine answers, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from weft.errors import NumbersError, WeftError

# stuck: no token can follow in the request's schema. nan: the model gave no numbers, and the token is none.
Finish = Literal["stop", "length", "cancelled", "stuck", "nan"]
LARK = "%lark\n"  # begins the form of an answer that is a grammar
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
    num_logprobs: int | None = (
        None  # report log-probabilities of the token and of this many likeliest ones; None: of none
    )


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    `tenant` and `adapter` separate prefix caches: a prompt's keys and values are never reused for another of either.
    """

    name: str  # unique among the requests that the engine holds
    tokens: tuple[int, ...]  # the prompt, at least one token
    max_tokens: int  # generate at most this many
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()  # ends at one of these, which is reported as generated
    tenant: str = ""
    adapter: str = ""  # the name of a LoRA adapter; "": the model alone
    json_schema: str | None = None  # as JSON; the generated text matches it
    grammar: str | None = None  # in Lark's form, as llguidance reads it; the generated text matches it

    @property
    def answer_form(self) -> str | None:
        """What the generated text matches, as `Grammars` compiles it: a JSON schema, or a grammar after `LARK`."""
        return self.json_schema if self.grammar is None else LARK + self.grammar


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
    num_cached: int = 0  # tokens of the request's prompt that the prefix cache had

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


MAX_BIAS = 1e9  # divided by the smallest temperature, it is still a float32


def check_request(request: Request, context_length: int, num_tokens: int) -> None:
    """Raise RequestError unless a model of `num_tokens` token ids and `context_length` positions can take a request."""
    _check_kinds(request)
    if not request.tokens:
        raise RequestError("invalid", f"the prompt of request {request.name!r} is empty; give at least one token")
    if request.max_tokens < 1:
        raise RequestError("invalid", f"max_tokens = {request.max_tokens} generates nothing; give 1 or more")
    if len(request.tokens) > context_length:
        raise RequestError(
            "too_long",
            f"a prompt of {len(request.tokens)} tokens exceeds the context of {context_length}; shorten it",
        )
    kinds = set(map(type, request.tokens))
    is_right = bool not in kinds and all(issubclass(kind, Integral) for kind in kinds)
    if not is_right or min(request.tokens) < 0 or max(request.tokens) >= num_tokens:
        wrong = [one for one in request.tokens if not _is_integer(one) or not 0 <= one < num_tokens]
        raise RequestError("invalid", f"token {wrong[0]!r:.100} does not exist; the model has 0 to {num_tokens - 1}")
    check_sampling(request.sampling, num_tokens)


def _check_kinds(request: Request) -> None:
    """Raise RequestError for a value of another kind, which would fail in the step of all requests."""
    rules: list[tuple[str, Any, bool, str]] = [
        (key, value, _is_text(value), "a text")
        for key, value in (("name", request.name), ("tenant", request.tenant), ("adapter", request.adapter))
    ]
    schema, grammar = request.json_schema, request.grammar
    seed, sampling = getattr(request.sampling, "seed", None), request.sampling
    rules += [
        ("tokens", request.tokens, isinstance(request.tokens, tuple), "a tuple of token ids"),
        ("max_tokens", request.max_tokens, _is_integer(request.max_tokens), "a whole number"),
        ("stop_tokens", request.stop_tokens, _are_integers(request.stop_tokens), "a frozenset of token ids"),
        ("json_schema", schema, schema is None or isinstance(schema, str), "JSON as a text, or None"),
        ("grammar", grammar, grammar is None or isinstance(grammar, str), "a grammar as a text, or None"),
        ("grammar", grammar, grammar is None or schema is None, "it without json_schema"),
        ("sampling", sampling, isinstance(sampling, Sampling), "a Sampling"),
        ("seed", seed, seed is None or _is_integer(seed), "a whole number, or None"),
    ]
    for key, value, is_right, wanted in rules:
        if not is_right:
            raise RequestError("invalid", f"{key} = {value!r:.100} is no value for a request; give {wanted}")


def check_sampling(sampling: Sampling, num_tokens: int) -> None:
    """Raise RequestError unless tokens of `num_tokens` ids can be sampled so."""
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
        if value is None and name == "num_logprobs":
            continue
        is_right = _is_integer(value) if isinstance(low, int) else _is_number(value)
        if not is_right or not low <= value <= high:  # NaN fails, too
            kind = "whole number" if isinstance(low, int) else "number"
            raise RequestError(
                "invalid", f"{name} = {value!r:.100} is not a {kind} between {low} and {high}; give one that is"
            )
    bias = sampling.logit_bias
    if not isinstance(bias, Mapping):
        raise RequestError("invalid", f"logit_bias = {bias!r:.100} is no mapping; give numbers by tokens, or {{}}")
    for token, value in bias.items():
        is_token = _is_integer(token) and 0 <= token < num_tokens
        if not is_token or not _is_number(value) or not (-MAX_BIAS <= value <= MAX_BIAS or value == -math.inf):
            raise RequestError(
                "invalid",
                f"logit_bias of token {token!r:.100} is {value!r:.100}; give numbers from {-MAX_BIAS:g} to "
                f"{MAX_BIAS:g}, or minus infinity, for tokens 0 to {num_tokens - 1}",
            )


def _is_text(value: Any) -> bool:
    """Is a value a text that has bytes, without half of a surrogate pair? A tenant's are hashed."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def _are_integers(values: Any) -> bool:
    return isinstance(values, frozenset) and all(map(_is_integer, values))


def _is_integer(value: Any) -> bool:
    """Is it a whole number? numpy's are; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
