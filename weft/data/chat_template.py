"""Chat templates: how a model's folder writes messages as text. They are Jinja, rendered in Jinja's sandbox.

A template comes with a model, so it is foreign code: the sandbox lets it read its variables and change nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weft.data.messages import Messages, reasoning_of
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
Span = tuple[int, int]  # of characters: the first, and the end
NOTHING: Mapping[str, Any] = MappingProxyType({})


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

    def render(
        self, messages: Messages, *, asks: bool = False, tools: Messages = (), variables: Mapping[str, Any] = NOTHING
    ) -> str:
        """Returns messages as text; with `asks`, followed by what comes before an answer. `tools` are functions that
        the model may call, as JSON schemas; how they are written is up to the template, which reads `variables`, too.
        """
        from jinja2 import TemplateError

        own = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": asks}
        options: dict[str, Any] = {**own, **self._special, **variables}
        refusals = list[Exception]()
        for form in (_as_transformers, _as_openai):
            try:
                return self._write([form(message) for message in messages], options)
            except (TemplateError, *TEMPLATE_ERRORS) as error:
                refusals.append(error)
        raise DataError(f"the chat template of {self._place} refuses the messages: {refusals[0]}")

    def render_begun(self, messages: Messages, *, tools: Messages = (), variables: Mapping[str, Any] = NOTHING) -> str:
        """Returns messages as text that ends with the content of the last one, so that an answer goes on with it."""
        text = self.render(messages, tools=tools, variables=variables)
        content = messages[-1].get("content") or ""
        begin = text.rfind(content.strip()) if content.strip() else -1
        if begin < 0:
            raise DataError("the last message has no content that the chat template writes; give one to go on with")
        whole = content.lstrip()
        return text[: begin + len(whole if text.startswith(whole, begin) else content.strip())]

    def render_with_answers(self, messages: Messages, tools: Messages = ()) -> tuple[str, list[Span]]:
        """Returns messages as text, and the spans of it within `{% generation %}`, which a template puts around what
        the model answers.
        """
        recording = _Recording()
        token = _RECORDING.set(recording)
        try:
            return self.render(messages, tools=tools), recording.spans
        finally:
            _RECORDING.reset(token)

    def _write(self, messages: Messages, options: Mapping[str, Any]) -> str:
        recording = _RECORDING.get() or _Recording()
        recording.begin()
        for text in self._template.generate(messages=messages, **options):
            recording.texts.append(text)
        return "".join(recording.texts)

    @property
    def identity(self) -> str:
        """A hash of the template's text."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def marks_answers(self) -> bool:
        """Does the template have `{% generation %}`?"""
        return "endgeneration" in self.source

    @property
    def eos_token(self) -> str:
        """The template's variable `eos_token`; "" if it has none."""
        return self._special.get("eos_token", "")


class _Recording:
    """What a template has written, and the spans of it that it marks as answers."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.texts: list[str] = []
        self.spans: list[Span] = []

    def mark(self, text: str) -> None:
        """Note that the template writes an answer next."""
        start = sum(map(len, self.texts))
        self.spans.append((start, start + len(text)))


_RECORDING: ContextVar[_Recording | None] = ContextVar("recording", default=None)  # of this thread


def _as_transformers(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as transformers gives it to templates: without what is None, and with its reasoning under the
    names that templates read.
    """
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = reasoning_of(found)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _as_openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as OpenAI's API has it, which some templates expect (DeepSeek's): its content is None if it has
    none, and arguments of tool calls are JSON text.
    """
    found = {"content": None, **_as_transformers(message)}
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_with_text(call) for call in found["tool_calls"]]
    return found


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def training_time() -> datetime:
    """Returns the time that templates write into conversations to learn from, so that these do not depend on the day:
    the date of Llama 3.1's template where it is told none.
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
    """Returns what templates may use beside plain Jinja, as in transformers."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` to `{% endgeneration %}` surround what a model answers. They write nothing."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_mark"), [], [], body, lineno=line)

        def _mark(self, caller: Callable[[], str]) -> str:
            text, recording = caller(), _RECORDING.get()
            if recording is not None:
                recording.mark(text)
            return text

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
