"""Holds answers to a JSON schema or a grammar: which tokens may come next, by llguidance.

    matcher = Grammars(tokenizer, end_tokens).matcher('{"type": "object"}')
    allowed = allowed_tokens([matcher, None], vocab_size)      # before each token is sampled
    matcher.accept(token)                                      # after it is read

A matcher is the state of one answer. Compiled schemas are kept, so that many answers to one schema cost one compile.
A schema is tried in another process first (`schema_trial.py`).
"""

from __future__ import annotations

import json
import re
import reprlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.data.tokenizer import FileTokenizer, Tokenizer
from weft.serve.scheduling.request import RequestError
from weft.serve.scheduling.schema_compile import MAX_SCHEMA_BYTES, VocabularyText, compile_schema, is_panic
from weft.serve.scheduling.schema_trial import SchemaTrial, SchemaTrials

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
MAX_KEPT, MAX_KEPT_BYTES = 64, 256 << 20  # compiled schemas that nobody holds
ANY_OBJECT = '{"type": "object"}'


class CompiledSchema:
    """A schema for the tokens of one tokenizer."""

    def __init__(self, beginning: LLMatcher, num_bytes: int) -> None:
        self._beginning, self.num_bytes = beginning, num_bytes

    def matcher(self) -> AnswerMatcher:
        """The state of an answer before its first token."""
        return AnswerMatcher(self._beginning.deep_copy())


class AnswerMatcher:
    """How far one answer has come in its schema. A panic of llguidance ends the answer, and no other."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._is_broken = False

    def allowed(self) -> bytes:
        """One bit for each token, set where the token may come next: bit i % 8 of byte i // 8."""
        return self._guarded(self._matcher.compute_bitmask, b"")

    def accept(self, token: int) -> bool:
        """Go on by a token. Returns False if the schema does not allow it, and from then on."""
        return self._guarded(partial(self._matcher.consume_token, token), False)

    @property
    def is_complete(self) -> bool:
        """Does the answer match the schema, with nothing that could follow?"""
        return self._guarded(lambda: self._matcher.is_stopped() and not self._matcher.is_error(), False)

    def _guarded(self, function: Callable[[], T], otherwise: T) -> T:
        if self._is_broken:
            return otherwise
        try:
            return function()
        except BaseException as error:
            if not is_panic(error):
                raise
            self._is_broken = True
            return otherwise


class Grammars:
    """Compiles schemas for the tokens of one tokenizer. Several threads may use it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int]) -> None:
        definition = tokenizer.definition if isinstance(tokenizer, FileTokenizer) else None
        self._vocabulary = VocabularyText(definition, tokenizer.end, sorted({tokenizer.end, *end_tokens}))
        self._trials = SchemaTrials(self._vocabulary)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[str, CompiledSchema] = OrderedDict()  # least recently used first
        self._held: weakref.WeakValueDictionary[str, CompiledSchema] = weakref.WeakValueDictionary()

    def matcher(self, schema: str) -> AnswerMatcher:
        """The state of an answer before its first token. Raises RequestError for a schema that cannot be used."""
        return (self.known(schema) or self.compile(schema, SchemaTrial())).matcher()

    def known(self, schema: str) -> CompiledSchema | None:
        """Returns a compiled schema that is kept here or held by an answer; else None."""
        with self._lock:
            compiled = self._held.get(schema)
            if schema in self._kept:
                self._kept.move_to_end(schema)
            return compiled

    def compile(self, schema: str, trial: SchemaTrial) -> CompiledSchema:
        """Returns a schema for answers; `trial` may be cancelled. Raises RequestError for one that cannot be used."""
        if len(schema.encode()) > MAX_SCHEMA_BYTES:
            raise RequestError(
                "invalid",
                f"the schema has {len(schema.encode())} bytes of JSON, at most {MAX_SCHEMA_BYTES} are taken; "
                f"give a smaller one",
            )
        tokens = self._known_tokens()
        # It compiles within limits in another process, so it does in this one, where nothing can end it.
        num_bytes = 0 if schema == ANY_OBJECT else self._trials.run(schema, trial)
        compiled = CompiledSchema(compile_schema(tokens, schema), num_bytes)
        with self._lock:
            self._kept[schema] = self._held[schema] = compiled
            while len(self._kept) > MAX_KEPT or sum(one.num_bytes for one in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return compiled

    def _known_tokens(self) -> LLTokenizer:
        try:
            import llguidance  # noqa: F401
        except ModuleNotFoundError:
            raise RequestError(
                "invalid",
                "answers are held to a schema by llguidance, which is missing; run: pip install 'weft[serve]'",
            ) from None
        with self._lock:
            self._tokens = self._tokens or self._vocabulary.tokens()
            return self._tokens


def allowed_tokens(matchers: Sequence[AnswerMatcher | None], vocab_size: int) -> Tensor:
    """Returns which tokens may come next [answers, vocab] (bool, in host memory); all where there is no matcher."""
    allowed = np.ones((len(matchers), vocab_size), dtype=bool)
    for row, matcher in zip(allowed, matchers, strict=True):
        if matcher is not None:
            bits = np.frombuffer(matcher.allowed(), dtype=np.uint8)
            row[:] = False
            found = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
            row[: len(found)] = found
    return torch.from_numpy(allowed)


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer matches: one of these, or a `response_format`. The keys are vLLM's."""

    json: Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # the answer is one of these
    grammar: str | None = None  # in Lark's form

    @property
    def schema(self) -> str | None:
        """The JSON schema as text."""
        return None if self.json is None else json.dumps(self.json)

    @property
    def lark(self) -> str | None:
        """The grammar that a regular expression, choices or a grammar are. Raises RequestError for no choices."""
        if self.choice == ():
            raise RequestError("invalid", "'choice' of 'structured_outputs' is empty; give at least one text")
        if self.regex is not None:
            escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", self.regex.replace("\n", r"\n"))
            return f"start: /(?:{escaped})/"
        if self.choice is not None:
            return f"start: {' | '.join(json.dumps(one, ensure_ascii=False) for one in self.choice)}"
        return self.grammar


def schema_of(wanted: Mapping[str, Any] | None) -> str | None:
    """Returns the JSON schema of a `response_format` as text; None for plain text. Raises RequestError for others."""
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise RequestError(
            "invalid",
            f"'response_format' of type {reprlib.repr(kind):.50} is not known; give 'text', 'json_object' or "
            f"'json_schema'",
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
