"""Chat templates: how a model's folder writes messages as text. They are Jinja, rendered in Jinja's sandbox.

A template comes with a model, so it is foreign code: the sandbox lets it read its variables and change nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.special_tokens import TOKENIZER_CONFIG, named_tokens, read_object
from weft.errors import DataError

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
REMEDY = "correct it, or name another one (data.template in a run file, --chat-template of weft serve)"
TEMPLATE_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)  # that a wrong template raises
Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Renders messages to text, as transformers' `apply_chat_template` does."""

    def __init__(
        self, source: str, special: Mapping[str, str], place: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`now` is what the template's `strftime_now` tells."""
        from jinja2 import TemplateSyntaxError

        try:
            self._template = _environment(now).from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template of {place} is not valid Jinja: {error}; {REMEDY}") from None
        self._special, self._place, self.source = dict(special), place, source
        made_of: list[Any] = [source, self._special]
        if now is training_time and "strftime_now" in source:  # what was rendered before had the day's date
            made_of.append(str(now()))
        self.fingerprint = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()

    def render(self, messages: Messages, *, asks: bool = False, tools: Messages = ()) -> str:
        """Returns messages as text; with `asks`, followed by what comes before an answer. `tools` are functions that
        the model may call, as JSON schemas; how they are written is up to the template.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=asks, **self._special
            )
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise DataError(f"the chat template of {self._place} refuses the messages: {error}") from None


def training_time() -> datetime:
    """The time that templates write into conversations to learn from, so that these do not depend on the day: the date
    of Llama 3.1's template where it is told none.
    """
    return datetime(2024, 7, 26)


def load_template(path: str | None, tokenizer: str, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
    """Returns the template in a file or, if `path` is None, the one beside a tokenizer; None if there is none."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config: dict[str, Any] = {}
    special: dict[str, str] = {}  # variables of the template
    if tokenizer != "bytes":
        config, special = read_object(folder / TOKENIZER_CONFIG), named_tokens(folder)
    own = Path(path) if path is not None else folder / TEMPLATE_FILE
    if path is not None or (tokenizer != "bytes" and own.is_file()):
        try:
            return ChatTemplate(own.read_text(encoding="utf-8"), special, str(own), now)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the chat template {own} ({error}); {REMEDY}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = (one for one in found if isinstance(one, dict))
        found = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return ChatTemplate(found, special, str(folder / TOKENIZER_CONFIG), now) if isinstance(found, str) else None


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """What templates may use beside plain Jinja, as in transformers."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` to `{% endgeneration %}` surround what a model answers. They write nothing."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    extensions = [GenerationTag, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
