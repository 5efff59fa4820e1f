"""Answers in the form of OpenAI's API: of completions and of chats, whole or in chunks, and errors."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.data.tokenizer import REPLACEMENT, Tokenizer
from weft.serve.answer_parts import AnswerParts, Part
from weft.serve.scheduling.request import Finish, GeneratedToken, TokenLogprobs
from weft.serve.text import TextChunk

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

LEAST_LOGPROB = -9999.0


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Returns an error as OpenAI writes it. The type tells the client's mistakes from the server's."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class TokenWords:
    """The text of each token alone, decoded when it is first asked for. Several threads may ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._words = tokenizer, dict[int, str]()

    def __getitem__(self, token: int) -> str:
        word = self._words.get(token)
        if word is None:
            word = self._words[token] = self._tokenizer.decode(np.array([token]), skip_special_tokens=False)
        return word

    def bytes_of(self, token: int) -> list[int] | None:
        """Return the bytes of a token, which may be a part of a character; None if they are not known."""
        word = self[token]
        data = self._tokenizer.token_bytes(token) if REPLACEMENT in word else word.encode()
        return None if data is None else list(data)


@dataclass
class GeneratedAnswer:
    """An answer, as far as it was generated. An answer that repeats its prompt begins with it."""

    texts: list[str] = field(default_factory=list)  # its parts
    tokens: list[GeneratedToken] = field(default_factory=list)
    finish: Finish | None = None
    offsets: list[int] = field(default_factory=list)  # where the text of each token begins
    num_echoed: int = 0  # characters of the prompt, which come first

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    def add(self, chunk: TextChunk) -> None:
        """Add what was generated."""
        self.texts.append(chunk.text)
        self.tokens.append(chunk.token)
        self.offsets.append(self.num_echoed + chunk.offset)
        self.finish = chunk.finish


@dataclass(frozen=True)
class CompletionForm:
    """Writes answers of /v1/completions, as choices of a body or of a chunk. `prefix` begins the answer's id."""

    words: TokenWords
    has_logprobs: bool
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole(self, index: int, answer: GeneratedAnswer) -> dict[str, Any]:
        """Return the choice with a whole answer."""
        return self._choice(index, answer.text, answer.tokens, answer.finish, answer.offsets)

    def first(self, index: int, echo: GeneratedAnswer) -> dict[str, Any] | None:
        """Return the choice before the first token, which repeats the prompt; None if there is nothing to repeat."""
        is_empty = not (echo.text or echo.tokens or echo.finish)
        return None if is_empty else self._choice(index, echo.text, echo.tokens, echo.finish, echo.offsets)

    def chunk(self, index: int, chunk: TextChunk, num_echoed: int) -> dict[str, Any] | None:
        """Return a choice with a part of an answer, which begins with `num_echoed` characters of its prompt; None if
        there is nothing to tell.
        """
        if not (chunk.text or chunk.finish is not None or self.has_logprobs):
            return None
        return self._choice(index, chunk.text, [chunk.token], chunk.finish, [num_echoed + chunk.offset])

    def _choice(
        self, index: int, text: str, tokens: Sequence[GeneratedToken], finish: Finish | None, offsets: list[int]
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens, offsets) if self.has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[GeneratedToken], offsets: list[int]) -> dict[str, Any]:
        words = [self.words[token.token] for token in tokens]
        logprobs = [token.logprobs for token in tokens]
        return {
            "tokens": words,
            "token_logprobs": [None if one is None else _finite(one.token) for one in logprobs],
            "top_logprobs": [None if one is None else self._likeliest(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _likeliest(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities by the texts of tokens. Of tokens with one text, as parts of characters, the best
        counts.
        """
        by_text: dict[str, float] = {}
        for token, value in logprobs.likeliest:  # best first
            by_text.setdefault(self.words[token], _finite(value))
        return by_text


class ChatStream:
    """The parts of one answer of a chat, as messages and their chunks have them."""

    def __init__(self, answer: AnswerParts) -> None:
        self._reader = answer.reader()
        self._num_calls = 0

    def push(self, text: str, is_last: bool) -> dict[str, Any]:
        """Return what more of the answer's text adds to its message."""
        parts = self._reader.push(text)
        if is_last:
            parts += self._reader.end()
        told: dict[str, Any] = {}
        for part in parts:
            if part.kind == "call":
                told.setdefault("tool_calls", []).append(self._call(part))
            else:
                key = "content" if part.kind == "text" else "reasoning_content"
                told[key] = told.get(key, "") + part.text
            if part.reason:
                told["tool_call_error"] = part.reason
        return told

    def finish(self, finish: Finish | None) -> str | None:
        """Return why an answer ended: for calls, if nothing cut it off."""
        return "tool_calls" if finish == "stop" and self._num_calls else finish

    def _call(self, part: Part) -> dict[str, Any]:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        function = {"name": part.name, "arguments": part.text}
        # Nine letters and digits, which templates of Mistral ask for.
        return {"index": index, "id": uuid.uuid4().hex[:9], "type": "function", "function": function}


@dataclass(frozen=True)
class ChatForm:
    """Writes answers of /v1/chat/completions, by the methods of `CompletionForm`."""

    words: TokenWords
    has_logprobs: bool
    answer: AnswerParts
    _streams: dict[int, ChatStream] = field(default_factory=dict)
    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def whole(self, index: int, answer: GeneratedAnswer) -> dict[str, Any]:
        stream = ChatStream(self.answer)
        told = stream.push(answer.text, is_last=True)
        message = {"role": "assistant", "content": None if told.get("tool_calls") else "", **told}
        for call in message.get("tool_calls", ()):
            del call["index"]  # which chunks alone have
        return {"index": index, "message": message, **self._rest(answer.tokens, stream.finish(answer.finish))}

    def first(self, index: int, echo: GeneratedAnswer) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, **self._rest([], None)}

    def chunk(self, index: int, chunk: TextChunk, num_echoed: int) -> dict[str, Any] | None:
        stream = self._streams.setdefault(index, ChatStream(self.answer))
        delta = stream.push(chunk.text, chunk.finish is not None)
        if not (delta or chunk.finish is not None or self.has_logprobs):
            return None
        return {"index": index, "delta": delta, **self._rest([chunk.token], stream.finish(chunk.finish))}

    def _rest(self, tokens: Sequence[GeneratedToken], finish: str | None) -> dict[str, Any]:
        logprobs = {"content": [self._logprob(token) for token in tokens]} if self.has_logprobs else None
        return {"logprobs": logprobs, "finish_reason": finish}

    def _logprob(self, token: GeneratedToken) -> dict[str, Any]:
        assert token.logprobs is not None
        likeliest = [self._entry(*pair) for pair in token.logprobs.likeliest]
        return {**self._entry(token.token, token.logprobs.token), "top_logprobs": likeliest}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.words[token], "logprob": _finite(logprob), "bytes": self.words.bytes_of(token)}


AnswerForm = CompletionForm | ChatForm


def usage(num_prompt_tokens: int, num_answer_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Returns the tokens that answers cost; the prefix cache had `num_cached_tokens` of those of their prompts."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def envelope(name: str, kind: str, created: int, model: str, fingerprint: str) -> dict[str, Any]:
    """Return what is beside choices, in whole answers and in chunks. `created` is a Unix time; `fingerprint` names the
    weights in use.
    """
    return {"id": name, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}


def json_text(value: Any) -> str:
    """Return a value as JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_body(about: dict[str, Any], key: str, parts: list[str]) -> bytes:
    """Return an object with `about`, and under `key` a list of parts that are JSON already: while Python encodes one
    large value, no other thread runs.
    """
    return f'{json_text(about)[:-1]},"{key}":[{",".join(parts)}]}}'.encode()


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can write: it has no infinity, which a token that cannot come has."""
    return max(logprob, LEAST_LOGPROB)
