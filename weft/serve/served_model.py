"""What the server knows of the model that it serves: its name, tokenizer, chat template and end tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.chat_template import ChatTemplate
from weft.data.messages import Messages
from weft.data.special_tokens import stated_end_tokens
from weft.data.tokenizer import Tokenizer, encode_text
from weft.errors import DataError
from weft.serve.scheduling.grammar import Grammars


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
        if self.template is None:
            raise DataError(
                f"'{self.name}' has no chat template; use /v1/completions, or start the server with --chat-template"
            )
        return self.encode(self.template.render(messages, asks=True, tools=tools), add_special_tokens)


def end_tokens(tokenizer: Tokenizer, folder: Path | None) -> frozenset[int]:
    """The tokens that end an answer: the one that ends a document, and those that the model's folder states."""
    return frozenset([tokenizer.end, *stated_end_tokens(folder)])
