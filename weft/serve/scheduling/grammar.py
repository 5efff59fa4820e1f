"""Holds answers to a JSON schema: which tokens may come next, by llguidance.

    matcher = Grammars(tokenizer, end_tokens).matcher('{"type": "object"}')
    allowed = allowed_tokens([matcher, None], vocab_size)      # before each token is sampled
    matcher.accept(token)                                      # after it is read

A matcher is the state of one answer. Compiled schemas are kept, so that many answers to one schema cost one compile.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from weft.serve.scheduling.request import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_BYTES = 16 << 10  # of a schema as JSON; one of so many bytes compiles in about a second
MAX_KEPT = 64  # compiled schemas
ANY_OBJECT = '{"type": "object"}'
WHITESPACE = r"[ \n\t]{0,20}"  # between the parts of an answer; bounded, so that no answer is endless blanks


class AnswerMatcher:
    """How far one answer has come in its schema."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """One bit for each token, set where the token may come next: bit i % 8 of byte i // 8."""
        return self._matcher.compute_bitmask()

    def accept(self, token: int) -> bool:
        """Go on by a token. Returns False if the schema does not allow it, and from then on."""
        return self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Does the answer match the schema, with nothing that could follow?"""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammars:
    """Compiles schemas for the tokens of one tokenizer. Several threads may use it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int]) -> None:
        self._tokenizer, self._end_tokens = tokenizer, sorted({tokenizer.end, *end_tokens})
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()  # matchers at the beginning, least recently used first

    def matcher(self, schema: str) -> AnswerMatcher:
        """The state of an answer before its first token. Raises RequestError for a schema that cannot be used."""
        with self._lock:
            known = self._kept.get(schema)
            if known is not None:
                self._kept.move_to_end(schema)
                return AnswerMatcher(known.deep_copy())
        compiled = self._compile(schema)
        with self._lock:
            self._kept[schema] = compiled
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return AnswerMatcher(compiled.deep_copy())

    def _compile(self, schema: str) -> LLMatcher:
        if len(schema.encode()) > MAX_SCHEMA_BYTES:
            raise RequestError(
                "invalid",
                f"the schema has {len(schema.encode())} bytes of JSON, at most {MAX_SCHEMA_BYTES} are taken; "
                f"give a smaller one",
            )
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError:
            raise RequestError(
                "invalid",
                "answers are held to a schema by llguidance, which is missing; run: pip install 'weft[serve]'",
            ) from None
        options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
        except ValueError as error:  # of what Python reads as JSON: endless numbers, and lists in lists in lists ..
            raise _unusable(str(error)) from None
        matcher = LLMatcher(self._known_tokens(), grammar, log_level=0)
        if matcher.is_error():
            raise _unusable(matcher.get_error())
        return matcher

    def _known_tokens(self) -> LLTokenizer:
        with self._lock:
            self._tokens = self._tokens or _tokens_of(self._tokenizer, self._end_tokens)
            return self._tokens


def _unusable(words: str) -> RequestError:
    """The refusal of a schema, for a reason in llguidance's words."""
    reason = " ".join(words.split())
    return RequestError("invalid", f"the schema cannot be used: {reason:.300}; give a JSON schema without it")


def _tokens_of(tokenizer: Tokenizer, end_tokens: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if isinstance(tokenizer, FileTokenizer):
        try:
            return LLTokenizer(tokenizer.definition, eos_token=end_tokens)
        except ValueError as error:
            raise RequestError(
                "invalid",
                f"answers of this model cannot be held to a schema: llguidance says of its tokenizer: {error}",
            ) from None
    assert isinstance(tokenizer, ByteTokenizer)

    class Bytes(SimpleNamespace):
        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    # llguidance marks tokens that are no text by the byte 0xFF.
    tokens = [*(bytes([value]) for value in range(256)), b"\xff<end>"]
    described = Bytes(eos_token_id=tokenizer.end, bos_token_id=None, tokens=tokens, special_token_ids=[tokenizer.end])
    return LLTokenizer(TokenizerWrapper(described), eos_token=end_tokens)


def allowed_tokens(matchers: Sequence[AnswerMatcher | None], vocab_size: int) -> Tensor:
    """Which tokens may come next [answers, vocab] (bool, in host memory); all where there is no matcher."""
    allowed = np.ones((len(matchers), vocab_size), dtype=bool)
    for row, matcher in zip(allowed, matchers, strict=True):
        if matcher is not None:
            bits = np.frombuffer(matcher.allowed(), dtype=np.uint8)
            row[:] = False
            found = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
            row[: len(found)] = found
    return torch.from_numpy(allowed)


def schema_of(wanted: Mapping[str, Any] | None) -> str | None:
    """The JSON schema, as text, of a `response_format`; None for plain text. Raises RequestError for others."""
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise RequestError(
            "invalid",
            f"'response_format' of type {kind!r:.50} is not known; give 'text', 'json_object' or 'json_schema'",
        )
    about = wanted.get("json_schema")
    schema = about.get("schema") if isinstance(about, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            "invalid",
            "'response_format' of type 'json_schema' needs {'json_schema': {'name': ..., 'schema': {...}}}, where "
            "'schema' is a JSON schema",
        )
    return json.dumps(schema)
