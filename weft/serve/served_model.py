"""What the server knows of the model that it serves: its name, tokenizer, chat template and end tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.chat_template import ChatTemplate, Messages
from weft.data.tokenizer import Tokenizer, encode_text
from weft.errors import DataError
from weft.models.hf_config import GENERATION_FILE
from weft.serve.scheduling.grammar import Grammars

END_FILES = (GENERATION_FILE, "config.json")  # of a Hugging Face folder, the first that states end tokens


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

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text; for an empty one the token that ends a document, so that a text can begin."""
        return tuple(encode_text(self.tokenizer, text)) or (self.tokenizer.end,)

    def encode_chat(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Returns the tokens of messages and of what comes before an answer, as the chat template writes them."""
        if self.template is None:
            raise DataError(
                f"'{self.name}' has no chat template; use /v1/completions, or start the server with --chat-template"
            )
        return self.encode(self.template.render(messages, asks=True, tools=tools))


def end_tokens(tokenizer: Tokenizer, folder: Path | None) -> frozenset[int]:
    """The tokens that end an answer: the one that ends a document, and those that the model's folder states."""
    return frozenset([tokenizer.end, *stated_end_tokens(folder)])


def stated_end_tokens(folder: Path | None) -> list[int]:
    """The tokens that a model's folder states to end an answer; none if it states none."""
    for path in [] if folder is None else [folder / name for name in END_FILES]:
        try:
            stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path} cannot be read as a JSON object: {error}") from None
        found: list[Any] = stated if isinstance(stated, list) else [stated]
        if all(type(token) is int for token in found):
            return found
    return []
