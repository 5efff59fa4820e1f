"""Text from tokens as they are generated: only whole characters, and nothing from a stop string on."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.chat_template import ChatTemplate
from weft.data.messages import Messages
from weft.data.special_tokens import read_object, stated_end_tokens
from weft.data.tokenizer import REPLACEMENT, Tokenizer, encode_text
from weft.errors import DataError
from weft.models.hf_config import GENERATION_FILE
from weft.serve.scheduling.grammar import Grammars
from weft.serve.scheduling.request import Finish, GeneratedToken, Request, RequestError, Sampling, check_sampling

MAX_CHARACTER_BYTES = 4  # of UTF-8; a token has at least one byte
CONTEXT_TOKENS = 8  # decoded before new tokens


class Detokenizer:
    """Turns tokens into text, one at a time. The texts together equal the text of all tokens.

    The bytes of a character may be in several tokens, so a text that ends with an unfinished character is held back.
    Some tokenizers write the first token of a text in another way, so tokens are decoded together with those before.
    Others write none of the characters beside a byte that is in none (ByteFallback, as Llama 2's), so those before
    begin with a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._context = self._from_whole(list(prompt[-CONTEXT_TOKENS:]))  # tokens before the pending ones
        self._pending: list[int] = []  # tokens whose text is not wholly returned yet
        self._text = self._decode(self._context)  # of both
        self._num_returned = _num_certain(self._text)  # characters of it
        self.num_characters = 0  # that were returned in all
        self.offset = 0  # of the last token: the characters before the one that it begins or continues
        self._part, self._part_offset = b"", 0  # the bytes of an unfinished character at the end, and where it begins
        for token in self._context[-MAX_CHARACTER_BYTES:]:
            self._part = _unfinished(self._part + (tokenizer.token_bytes(token) or b""))

    def push(self, token: int) -> str:
        """Returns the text that is certain now and was not before."""
        before = self._text
        self._pending.append(token)
        text = self._text = self._decode(self._context + self._pending)
        self.offset = self._offset(token, before, text)
        is_unfinished = text.endswith(REPLACEMENT)
        if is_unfinished and len(self._pending) < MAX_CHARACTER_BYTES:
            return ""
        new = text[self._num_returned : len(text) - is_unfinished]
        if is_unfinished:  # bytes that are no character: all but the last are certain
            last = self._from_whole((self._context + self._pending)[-CONTEXT_TOKENS:])
            is_whole = not self._decode(last).endswith(REPLACEMENT)  # by itself
            self._begin_with(*((last, []) if is_whole else ([], last)))
        elif new or len(self._pending) >= CONTEXT_TOKENS:
            self._begin_with(self._pending, [])
        self.num_characters += len(new)
        return new

    def flush(self) -> str:
        """Returns what was held back. Call it after the last token."""
        text, before = self._text, self._decode(self._context)
        if self._context and text[: self._num_returned] != before[: self._num_returned]:  # which was returned
            new = self._decode(self._pending)
        else:
            new = text[self._num_returned :]
        self.num_characters += len(new)
        return new

    def _begin_with(self, context: list[int], pending: list[int]) -> None:
        """Go on after these tokens, whose certain text was returned."""
        self._context, self._pending = context, pending
        self._text = self._decode(context + pending)
        self._num_returned = _num_certain(self._text)

    def _offset(self, token: int, before: str, text: str) -> int:
        """Returns the offset of a token, of the text before it and with it."""
        known = self.num_characters - self._num_returned
        own = self._tokenizer.token_bytes(token) or b""
        if self._part and _continues(self._part, own):
            offset = self._part_offset
            self._part = _unfinished(self._part + own)
            if len(self._part) <= len(own):  # of another character, which this token begins
                self._part_offset = known + len(text) - 1
            return offset
        if text != before:  # else the token has no text
            self._part = _unfinished(own)
            self._part_offset = known + len(text) - 1 if len(self._part) < len(own) else known + len(before)
        return known + len(before)

    def _from_whole(self, tokens: list[int]) -> list[int]:
        """Returns tokens without those at the beginning that hold the rest of a character."""
        for first in range(MAX_CHARACTER_BYTES):
            text = self._decode(tokens[first:])
            if text and not text.startswith(REPLACEMENT):
                return tokens[first:]
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(np.array(tokens, dtype=np.int64), self._skips)


def _num_certain(text: str) -> int:
    """Returns the number of characters of a text, without an unfinished one at its end."""
    return len(text) - text.endswith(REPLACEMENT)


def _unfinished(data: bytes) -> bytes:
    """Returns the bytes at the end of some that may begin a character."""
    tails = (data[-size:] for size in range(min(MAX_CHARACTER_BYTES - 1, len(data)), 0, -1))
    return next((tail for tail in tails if _characters(tail) == 0), b"")


def _continues(part: bytes, data: bytes) -> bool:
    """Do bytes go on with the character that `part` begins?"""
    return bool(data) and _characters(part + data[:1]) is not None


def _characters(data: bytes) -> int | None:
    """Returns how many characters these bytes end, the last of which may be unfinished; None if they are not UTF-8."""
    try:
        return len(codecs.getincrementaldecoder("utf-8")().decode(data))
    except UnicodeDecodeError:
        return None


def token_offsets(tokenizer: Tokenizer, tokens: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Returns where the text of each token begins in the text of all."""
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens)
    offsets = []
    for token in tokens:
        detokenizer.push(token)
        offsets.append(detokenizer.offset)
    return offsets


class StopTable:
    """Stop strings, prepared for a search that reads each character once. Answers share a table."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple((stop, _borders(stop)) for stop in stops)


def _borders(stop: str) -> array[int]:
    """Returns, for the first `length` characters of a string, how long the longest shorter beginning is that they end
    with (the failure function of Knuth, Morris and Pratt).
    """
    borders, length = array("I", [0, 0]), 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders


class StopStrings:
    """Ends a text before the stop string that is complete first; of several that end together, before the longest.
    Text that may be the beginning of one is held back. How the text is cut into parts changes nothing.
    """

    def __init__(self, table: StopTable) -> None:
        self._stops = table.stops
        self._lengths = [0] * len(self._stops)  # of each string, how many characters the text ends with
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Returns the text that is certain now to come before every stop string."""
        if self.is_stopped:
            return ""
        whole = self._held + text
        for end, character in enumerate(text if self._stops else "", len(self._held) + 1):
            num_matched = self._read(character)
            if num_matched:
                self.is_stopped, self._held = True, ""
                return whole[: end - num_matched]
        num_certain = len(whole) - max(self._lengths, default=0)
        self._held = whole[num_certain:]
        return whole[:num_certain]

    def _read(self, character: str) -> int:
        """Go on by a character. Returns the length of the longest string that is complete now, or 0."""
        longest = 0
        for index, (stop, borders) in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != character:
                length = borders[length]
            length += stop[length] == character
            self._lengths[index] = length
            if length == len(stop):
                longest = max(longest, length)
        return longest

    def flush(self) -> str:
        """Returns what was held back. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class TextChunk:
    """A part of an answer: its text, the token that it came with and where the token's text begins in that of the
    answer, and `finish` at the end of the answer.
    """

    text: str
    token: GeneratedToken
    offset: int
    finish: Finish | None


class TextStream:
    """The text of one request, from its tokens. A stop token has no text."""

    def __init__(
        self, tokenizer: Tokenizer, request: Request, stops: StopTable, skip_special_tokens: bool = True
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.tokens, skip_special_tokens)
        self._stops = StopStrings(stops)
        self._stop_tokens = request.stop_tokens

    def push(self, token: GeneratedToken) -> TextChunk:
        """Returns the text that is certain now. Its `finish` may be set earlier than the token's: by a stop string."""
        is_stop = token.token in self._stop_tokens
        new = "" if is_stop else self._detokenizer.push(token.token)
        if token.finish is not None:
            new += self._detokenizer.flush()
        offset = self._detokenizer.num_characters if is_stop else self._detokenizer.offset
        text = self._stops.push(new)
        if self._stops.is_stopped:
            return TextChunk(text, token, offset, "stop")
        if token.finish is not None:
            text += self._stops.flush()
        return TextChunk(text, token, offset, token.finish)


@dataclass(frozen=True)
class ServedModel:
    """A model as clients see it. `end_tokens` end an answer; `grammars` compiles the schemas that answers match."""

    name: str
    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    end_tokens: frozenset[int]
    grammars: Grammars
    template: ChatTemplate | None = None
    adapters: tuple[str, ...] = ()  # names that a request may give as its model, beside `name`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the keys of a request that the model's folder states

    def encode(self, text: str, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Returns the tokens of a text, with those that the tokenizer puts around it unless `add_special_tokens` is
        False; if there are none, the token that ends a document, so that a text can begin.
        """
        return tuple(encode_text(self.tokenizer, text, add_special_tokens)) or (self.tokenizer.end,)

    def encode_chat(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Returns the tokens of messages and of what comes before an answer, as the chat template writes them: it also
        writes the special tokens, unless more are asked for.
        """
        return self.encode(self.chat_template.render(messages, asks=True, tools=tools), add_special_tokens)

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template. Raises DataError if the model has none."""
        if self.template is None:
            raise DataError(
                f"'{self.name}' has no chat template; use /v1/completions, or start the server with --chat-template"
            )
        return self.template


# Keys of a request by those of generation_config.json.
STATED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def stated_defaults(folder: Path | None) -> dict[str, Any]:
    """Returns the defaults of a request's keys that a model's folder states in generation_config.json. Raises DataError
    for values that no request may have.
    """
    path = None if folder is None else folder / GENERATION_FILE
    table = {} if path is None else read_object(path)
    found = {STATED[key]: table[key] for key in STATED if table.get(key) is not None}
    if table.get("do_sample") is False:
        found["temperature"] = 0.0  # the likeliest token
    max_tokens = found.get("max_tokens", 1)
    try:
        check_sampling(Sampling(**{key: found[key] for key in found if key != "max_tokens"}), num_tokens=1)
        if type(max_tokens) is not int or max_tokens < 1:
            raise RequestError(
                "invalid", f"max_new_tokens = {max_tokens!r:.100} is no number of tokens; give 1 or more"
            )
    except RequestError as error:
        raise DataError(f"{path}: {error}; correct it, or serve with --no-generation-config") from None
    return found


def end_tokens(tokenizer: Tokenizer, folder: Path | None) -> frozenset[int]:
    """Returns the tokens that end an answer: the one that ends a document, and those that the model's folder states."""
    return frozenset([tokenizer.end, *stated_end_tokens(folder)])
