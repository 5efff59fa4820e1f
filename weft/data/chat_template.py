"""Chat templates: how a model's folder writes messages as text. They are Jinja, rendered in Jinja's sandbox.

A template comes with a model, so it is foreign code: the sandbox lets it read its variables and change nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import DataError

TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # variables of a template
Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Renders messages to text, as transformers' `apply_chat_template` does."""

    def __init__(self, source: str, special: Mapping[str, str], place: str) -> None:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template of {place} is not valid Jinja: {error}; give data.template") from None
        self._special, self._place, self.source = dict(special), place, source
        self.fingerprint = hashlib.sha256(json.dumps([source, self._special]).encode()).hexdigest()

    def render(self, messages: Messages, *, asks: bool = False, tools: Messages = ()) -> str:
        """Returns messages as text; with `asks`, followed by what comes before an answer. `tools` are functions that
        the model may call, as JSON schemas; how they are written is up to the template.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=asks, **self._special
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template of {self._place} refuses the messages: {error}") from None


def load_template(path: str | None, tokenizer: str) -> ChatTemplate | None:
    """Returns the template in a file or, if `path` is None, the one beside a tokenizer; None if there is none."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config: dict[str, Any] = {}
    if tokenizer != "bytes" and (folder / TOKENIZER_CONFIG).is_file():
        config = _read_config(folder / TOKENIZER_CONFIG)
    special = {key: _token(config[key]) for key in SPECIAL_TOKENS if key in config}
    own = Path(path) if path is not None else folder / TEMPLATE_FILE
    if path is not None or (tokenizer != "bytes" and own.is_file()):
        try:
            return ChatTemplate(own.read_text(encoding="utf-8"), special, str(own))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the chat template {own} ({error}); give data.template") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return ChatTemplate(found, special, str(folder / TOKENIZER_CONFIG)) if isinstance(found, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise DataError(f"{path} holds {type(table).__name__}, not a JSON object")
    return table


def _token(value: Any) -> str:
    """A special token, which tokenizer_config.json states as a text or as a table with its `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
