"""Text from tokens as they are generated: only whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.data.tokenizer import REPLACEMENT, Tokenizer
from weft.serve.scheduling.request import Finish, GeneratedToken, Request

MAX_CHARACTER_BYTES = 4  # of UTF-8; a token has at least one byte
CONTEXT_TOKENS = 8  # decoded before new tokens


class Detokenizer:
    """Turns tokens into text, one at a time. The texts together equal the text of all tokens.

    The bytes of a character may be in several tokens, so a text that ends with an unfinished character is held back.
    Some tokenizers write the first token of a text in another way, so tokens are decoded together with those before.
    Others write none of the characters beside a byte that is in none (ByteFallback, as Llama 2's), so those before
    begin with a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = self._from_whole(list(prompt[-CONTEXT_TOKENS:]))  # tokens before the pending ones
        self._pending: list[int] = []  # tokens whose text is not wholly returned yet
        self._num_returned = self._num_certain(self._context)  # characters of the text of both

    def push(self, token: int) -> str:
        """Returns the text that is certain now and was not before."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        is_unfinished = text.endswith(REPLACEMENT)
        if is_unfinished and len(self._pending) < MAX_CHARACTER_BYTES:
            return ""
        new = text[self._num_returned : len(text) - is_unfinished]
        if is_unfinished:  # bytes that are no character: all but the last are certain
            last = self._from_whole((self._context + self._pending)[-CONTEXT_TOKENS:])
            is_whole = not self._decode(last).endswith(REPLACEMENT)  # by itself
            self._context, self._pending = (last, []) if is_whole else ([], last)
            self._num_returned = self._num_certain(last)
        elif new or len(self._pending) >= CONTEXT_TOKENS:
            self._context, self._pending = self._pending, []
            self._num_returned = self._num_certain(self._context)
        return new

    def flush(self) -> str:
        """Returns what was held back. Call it after the last token."""
        text, before = self._decode(self._context + self._pending), self._decode(self._context)
        if self._context and text[: self._num_returned] != before[: self._num_returned]:  # which was returned
            return self._decode(self._pending)
        return text[self._num_returned :]

    def _from_whole(self, tokens: list[int]) -> list[int]:
        """Returns tokens without those at the beginning that hold the rest of a character."""
        for first in range(MAX_CHARACTER_BYTES):
            text = self._decode(tokens[first:])
            if text and not text.startswith(REPLACEMENT):
                return tokens[first:]
        return tokens

    def _num_certain(self, tokens: list[int]) -> int:
        text = self._decode(tokens)
        return len(text) - text.endswith(REPLACEMENT)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(np.array(tokens, dtype=np.int64))


class StopStrings:
    """Ends a text before the first of some strings. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Returns the text that is certain now to come before every stop string."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Returns what was held back. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that a stop string begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True)
class TextChunk:
    """A part of an answer: its text, the token that it came with, and `finish` at the end of the answer."""

    text: str
    token: GeneratedToken
    finish: Finish | None


class TextStream:
    """The text of one request, from its tokens. A stop token has no text."""

    def __init__(self, tokenizer: Tokenizer, request: Request, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.tokens)
        self._stops = StopStrings(stops)
        self._stop_tokens = request.stop_tokens

    def push(self, token: GeneratedToken) -> TextChunk:
        """Returns the text that is certain now. Its `finish` may be set earlier than the token's: by a stop string."""
        new = "" if token.token in self._stop_tokens else self._detokenizer.push(token.token)
        if token.finish is not None:
            new += self._detokenizer.flush()
        text = self._stops.push(new)
        if self._stops.is_stopped:
            return TextChunk(text, token, "stop")
        if token.finish is not None:
            text += self._stops.flush()
        return TextChunk(text, token, token.finish)
