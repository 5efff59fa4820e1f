"""Bodies of HTTP requests, as JSON of OpenAI's API, checked and turned into requests to the engine.

Keys that weft does not know are refused by name. `IGNORED` ones are accepted: they do not change an answer.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from weft.data.messages import read_messages, refuse_constant
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.schema import build_dataclass
from weft.serve.answer_parts import AnswerParts
from weft.serve.scheduling.grammar import StructuredOutputs, schema_of
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.text import ServedModel, StopTable, token_offsets

B = TypeVar("B")
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
    *("truncation", "include"),  # of responses
)
MAX_CHOICES = 128  # answers of one HTTP request
MAX_INPUTS = 2048  # texts that one HTTP request has embedded
MAX_STOP_CHARACTERS, MAX_LOGPROBS = 1000, 20
MAX_KEYS = 64
# The most entries of a list or an object. Others have limits of their own: prompts, and what templates write.
MAX_LENGTHS = {
    "stop": 16,
    "stop_token_ids": 1024,
    "logit_bias": 1024,
    "messages": 8192,
    "tools": 1024,
    "structured_outputs.choice": 1024,
}
MAX_PARTS = 50_000  # lists and objects in a body
_STRINGS = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = _REPR.maxlevel = 8
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 110
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Of what a chat template may write as JSON with indents, where each value has blanks for all levels above it:
MAX_JSON_LEVELS = 32  # lists and objects in each other
MAX_JSON_BYTES = 1 << 20  # of tools; and of the lists and objects in messages, as tool calls
RANGES: dict[str, tuple[int, int]] = {  # smallest and largest values; the engine checks how tokens are sampled
    "seed": (-(1 << 63), (1 << 63) - 1),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "dimensions": (1, 1 << 20),
    "max_tokens": (0, 1 << 30),
    "max_completion_tokens": (1, 1 << 30),
    "max_output_tokens": (1, 1 << 30),
    "logprobs": (0, MAX_LOGPROBS),
    "top_logprobs": (0, MAX_LOGPROBS),
}


class ApiError(WeftError):
    """A refusal with an HTTP status. `code` is for programs, the message for people."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class StreamOptions:
    """Options of a streamed answer."""

    include_usage: bool = False


@dataclass(frozen=True)
class GenerationBody:
    """What completions and chats have in common. Keys that OpenAI does not have are named as in other servers. Of None,
    the model's own default is taken.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    cache_salt: str = ""
    skip_special_tokens: bool = True
    response_format: Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()  # noqa: RUF009 (a frozen value)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


@dataclass(frozen=True)
class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None  # generate this many answers, and give the `n` whose mean token is likeliest
    add_special_tokens: bool | None = None  # without it, as the model was trained


@dataclass(frozen=True)
class EmbeddingsBody:
    """The body of /v1/embeddings. `pool` says of which hidden states an embedding is made; OpenAI has no such key."""

    input: Any = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None  # give the first `dimensions` numbers of each, scaled to length 1
    pool: Literal["mean", "last"] = "mean"
    add_special_tokens: bool | None = None


@dataclass(frozen=True)
class TokenizeBody:
    """The body of /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True)
class DetokenizeBody:
    """The body of /detokenize: a list of tokens."""

    model: str | None = None
    tokens: Any = None


@dataclass(frozen=True)
class Echo:
    """A prompt that answers begin with: its text, how many of its tokens come before and after the text, and whether
    its other special tokens have no text.
    """

    text: str
    num_before: int = 0
    num_after: int = 0
    skip_special_tokens: bool = True

    def offsets(self, tokens: Sequence[int], tokenizer: Tokenizer) -> list[int]:
        """Returns where the text of each of the prompt's tokens begins."""
        text_tokens = tokens[self.num_before : len(tokens) - self.num_after]
        offsets = token_offsets(tokenizer, text_tokens, self.skip_special_tokens)
        return [*[0] * self.num_before, *offsets, *[len(self.text)] * self.num_after]


@dataclass(frozen=True)
class Generation:
    """What is to be generated for one HTTP request: a request to the engine for each answer."""

    requests: tuple[Request, ...]
    num_prompt_tokens: int
    stops: StopTable
    has_logprobs: bool
    stream: bool
    include_usage: bool
    skip_special_tokens: bool = True  # in the text of answers
    echoes: tuple[Echo, ...] = ()  # what each answer begins with; empty: nothing
    answer: AnswerParts = AnswerParts()  # noqa: RUF009 (a frozen value); of chats
    n: int = 1  # answers to each prompt that are generated
    num_given: int = 1  # of these, the likeliest ones, which the client is given

    @property
    def schema(self) -> str | None:
        """What all answers match, as `Grammars` compiles it."""
        return self.requests[0].answer_form

    @property
    def scores_prompts(self) -> bool:
        """Do answers begin with the log-probabilities of their prompts?"""
        return bool(self.echoes) and self.has_logprobs


def parse_body(kind: type[B], data: bytes, model_names: Sequence[str]) -> B:
    """Returns the body of a request to a model of these names. Raises ApiError or ConfigError."""
    try:
        text = data.decode("utf-8-sig")
        _refuse_many_parts(text)
        table = json.loads(text, parse_constant=refuse_constant)
        if _SURROGATE.search(text) is not None:
            json.dumps(table, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, "a text has half of a surrogate pair (\\ud800 to \\udfff), which is no character; send whole ones"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ApiError(400, f"the body is a JSON {type(table).__name__}; it must be an object")
    table = {key: value for key, value in table.items() if value is not None and key not in IGNORED}
    if len(table) > MAX_KEYS:
        raise ApiError(400, f"the body has {len(table)} keys, at most {MAX_KEYS} are taken; leave some out")
    for key, most in MAX_LENGTHS.items():  # before a value is looked at
        value: Any = table
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, (list, dict)) and len(value) > most:
            raise ApiError(400, f"'{key}' has {len(value)} entries; at most {most} are taken")
    body = build_dataclass(kind, table)
    for key, (smallest, largest) in RANGES.items():
        value = getattr(body, key, None)  # not as it was written, which may be 1e9 or "1G"
        if type(value) is int and not smallest <= value <= largest:
            raise ApiError(400, f"'{key}' = {value}; it must be from {smallest} to {largest}")
    refuse_other_model(table.get("model", model_names[0]), model_names)
    return body


def _refuse_many_parts(text: str) -> None:
    """Raise ApiError if JSON has more lists and objects than `MAX_PARTS`, before Python makes them."""
    if text.count("[") + text.count("{") > MAX_PARTS:
        outside = _STRINGS.sub("", text)
        number = outside.count("[") + outside.count("{")
        if number > MAX_PARTS:
            raise ApiError(400, f"the body has {number} lists and objects, at most {MAX_PARTS} are taken; send fewer")


def refuse_other_model(asked: str, model_names: Sequence[str]) -> None:
    """Raise ApiError unless the model that is asked for is one that is served."""
    if asked not in model_names:
        names = ", ".join(f"'{name}'" for name in model_names)
        raise ApiError(404, f"the model '{asked}' is not served here; this server has {names}", "model_not_found")


def completion(body: CompletionBody, model: ServedModel, tenant: str) -> Generation:
    """Returns what a completion asks for. Answers of the first prompt come first."""
    if body.best_of is not None and (body.best_of < body.n or body.stream):
        raise ApiError(400, f"'best_of' = {body.best_of} needs 'n' of at most as many answers, and no 'stream'")
    prompts = prompts_of(body.prompt, model, "prompt", body.add_special_tokens)
    max_tokens = model.defaults.get("max_tokens", 16) if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ApiError(400, "'max_tokens' = 0 generates nothing; it must be at least 1, or 'echo' true")
    made = generation(body, prompts, max_tokens, body.logprobs, model, tenant, body.best_of)
    if not body.echo:
        return made
    pairs = zip(_as_list(body.prompt), prompts, strict=True)
    echoes = [_echo(given, tokens, body, model.tokenizer) for given, tokens in pairs]
    return replace(made, echoes=tuple(echo for echo in echoes for _ in range(made.n)))


def _echo(given: str | list[int], tokens: tuple[int, ...], body: CompletionBody, tokenizer: Tokenizer) -> Echo:
    if isinstance(given, list):
        return Echo(tokenizer.decode(np.array(given), body.skip_special_tokens), 0, 0, body.skip_special_tokens)
    num_own = len(tokenizer.encode(given))  # special tokens in a text that was given have their text
    num_before = len(tokenizer.before) if len(tokens) > num_own else 0
    return Echo(given, num_before, len(tokens) - num_before - num_own, skip_special_tokens=False)


def prompts_of(
    value: Any, model: ServedModel, key: str, add_special_tokens: bool | None = None, most: int = MAX_CHOICES
) -> list[tuple[int, ...]]:
    """Returns the tokens of each prompt: a text, a list of texts, a list of tokens or a list of lists of tokens. Raises
    ApiError for other values, and for more than `most` prompts.
    """
    values = _as_list(value)
    if not 1 <= len(values) <= most:
        raise ApiError(400, f"'{key}' has {len(values)} prompts; it must have from 1 to {most}")
    prompts = []
    for one in values:
        if isinstance(one, str):
            prompts.append(model.encode(one, add_special_tokens))
        elif isinstance(one, list) and set(map(type, one)) == {int}:
            prompts.append(_known_tokens(one, model, key))
        else:
            raise ApiError(
                400,
                f"'{key}' is {shown(value):.100}; it must be a text, a list of texts, or one or more lists of tokens",
            )
    return prompts


def text_of(tokens: Any, model: ServedModel) -> str:
    """Returns the text of a list of tokens, with that of special ones. Raises ApiError for another value."""
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise ApiError(400, f"'tokens' is {shown(tokens):.100}; it must be a list of tokens")
    known = _known_tokens(tokens, model, "tokens") if tokens else ()
    return model.tokenizer.decode(np.array(known, dtype=np.int64), skip_special_tokens=False)


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Returns the messages of a chat. Parts of a message are joined, and must be text."""
    messages = read_messages(value)
    refuse_large(
        "messages", [[one for one in message.values() if isinstance(one, (list, dict))] for message in messages]
    )
    return messages


def refuse_large(key: str, values: Sequence[Any]) -> None:
    """Raise ApiError if values are too large, or have too many levels, for a template to write them as JSON."""
    level = list(values)
    for _ in range(MAX_JSON_LEVELS - 1):
        level = [inner for one in level for inner in _values_of(one)]
    if any(isinstance(one, (list, dict)) for one in level):
        raise ApiError(
            400,
            f"'{key}' has more than {MAX_JSON_LEVELS} levels of lists and objects in each other; give flatter ones",
        )
    num_bytes = len(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))
    if num_bytes > MAX_JSON_BYTES:
        raise ApiError(
            400,
            f"'{key}' has {num_bytes} bytes of lists and objects, at most {MAX_JSON_BYTES} are taken; give less",
        )


def _values_of(value: Any) -> Iterable[Any]:
    """Returns the values in a list or an object; of another value, none."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def generation(
    body: GenerationBody,
    prompts: list[tuple[int, ...]],
    max_tokens: int,
    num_logprobs: int | None,
    model: ServedModel,
    tenant: str,
    best_of: int | None = None,
    calls: str | None = None,
) -> Generation:
    """Returns what is to be generated for prompts. `calls` is the schema of the tools that answers must call."""
    number = body.n if best_of is None else best_of
    if len(prompts) * number > MAX_CHOICES:
        key = "n" if best_of is None else "best_of"
        raise ApiError(400, f"{len(prompts)} prompts with '{key}' = {number} are more than {MAX_CHOICES} answers")
    _refuse_stops(body.stops)
    ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model.end_tokens)
    asked = body.structured_outputs
    forms = (schema_of(body.response_format) or calls, asked.schema, asked.regex, asked.choice, asked.grammar)
    if calls is not None and forms[0] != calls:
        raise ApiError(400, "an answer that calls a tool has no 'response_format'; give one of the two")
    num_forms = sum(form is not None for form in forms)
    if num_forms > 1:
        raise ApiError(400, "an answer matches one form; give one key of 'structured_outputs', or a 'response_format'")
    if num_forms:
        ends |= {model.tokenizer.end}
    sampling, name = (
        _sampling(body, model, 0 if num_logprobs is None and number > body.n else num_logprobs),
        uuid.uuid4().hex,
    )
    requests = tuple(
        Request(
            name=f"{name}-{prompt}-{choice}",
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=replace(sampling, seed=_seed(body.seed, choice)),
            stop_tokens=ends,
            tenant=f"{tenant}/{body.cache_salt}",
            adapter=body.model if body.model in model.adapters else "",
            json_schema=forms[0] or asked.schema,
            grammar=asked.lark,
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(number)
    )
    num_tokens, stream, usage = sum(map(len, prompts)), body.stream, body.stream_options.include_usage
    stops, skips = StopTable(body.stops), body.skip_special_tokens
    made = Generation(requests, num_tokens, stops, num_logprobs is not None, stream, usage, skips)
    return replace(made, n=number, num_given=body.n)


def _known_tokens(tokens: list[int], model: ServedModel, key: str) -> tuple[int, ...]:
    """Returns tokens of the model's vocabulary. Raises ApiError for others."""
    if min(tokens) < 0 or max(tokens) >= model.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < model.vocab_size)
        raise ApiError(400, f"'{key}' has the token {wrong}; tokens of this model are from 0 to {model.vocab_size - 1}")
    return tuple(tokens)


def _sampling(body: GenerationBody, model: ServedModel, num_logprobs: int | None) -> Sampling:
    bias = body.logit_bias or {}
    if not all(key.isascii() and key.isdigit() and len(key) < 10 and math.isfinite(bias[key]) for key in bias):
        raise ApiError(400, "'logit_bias' must be an object of tokens and finite numbers, such as {\"50256\": -100}")
    asked = {key: getattr(body, key) for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    stated = {key: model.defaults.get(key) if asked[key] is None else asked[key] for key in asked}
    if stated["top_k"] == -1:
        stated["top_k"] = 0  # as other servers write "all"
    return Sampling(
        **{key: value for key, value in stated.items() if value is not None},
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(key): value for key, value in bias.items()},
        num_logprobs=num_logprobs,
    )


def _seed(seed: int | None, choice: int) -> int | None:
    """Returns the seed of one of the answers to a prompt. The first answer has the seed given."""
    return None if seed is None else (seed + choice) % (1 << 63)


def _refuse_stops(stops: tuple[str, ...]) -> None:
    if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ApiError(400, f"each text of 'stop' must have from 1 to {MAX_STOP_CHARACTERS} characters")


def _as_list(value: Any) -> list[Any]:
    """Returns the prompts in a value: the value itself if it is one text or one list of tokens."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    return [value] if is_one else value if isinstance(value, list) else [value]


def shown(value: Any) -> str:
    """Returns the beginning of a value's repr, all of which may have megabytes."""
    return _REPR.repr(value)
