"""The parts of a chat's answer: thoughts, text and calls of tools, by the marks between which a model writes them.

    reader = format_of(template_source).reader(tools=["search"])
    for text in stream: parts += reader.push(text)       # however it is cut, the parts together are the same
    parts += reader.end()

An `AnswerFormat` is a row of `FORMATS`, which is found by what a chat template writes. Marks are no part of any text. A
call that cannot be read is given as text, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from weft.data.messages import refuse_constant

Kind = Literal["thought", "text", "call"]
_BLANKS = " \t\r\n"
_NAME = r"[\w.\-]+"


class Part(NamedTuple):
    """A piece of a thought or of text, or a call of the tool `name` with its arguments, as JSON, for a text. Text that
    could not be read as a call has the `reason`.
    """

    kind: Kind
    text: str
    name: str = ""
    reason: str = ""


class CallError(ValueError):
    """The reason why a text is no call of a tool."""


Calls = list[tuple[str, str]]  # names of tools, and arguments as JSON


@dataclass(frozen=True)
class AnswerFormat:
    """How a family of models writes thoughts and calls. Where nothing closes a call, the end of the answer does.

    `read` returns the calls in a text between marks. If it `may_be_bare`, an answer that begins with a brace may be a
    call without marks; if it `is_bare`, the whole answer is calls.
    """

    name: str
    signs: tuple[str, ...]  # one of them is in its chat templates
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # marks within calls
    read: Callable[[str], Calls] | None = None  # None: models call no tools
    thoughts: tuple[str, str] = ("<think>", "</think>")
    may_be_bare: bool = False
    is_bare: bool = False
    has_channels: bool = False  # thoughts and calls are told by headers, as gpt-oss writes them

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.thoughts, *self.opens, *self.closes, *self.inner)

    def marks_for(self, tools: Sequence[str]) -> tuple[str, ...]:
        """Returns the marks that matter in an answer to a request with these tools."""
        return self.marks if tools or self.has_channels else self.thoughts

    def thinks_after(self, prompt: str) -> bool:
        """Does a prompt end within a thought, which the answer goes on with?"""
        return not self.has_channels and prompt.rstrip(_BLANKS).endswith(self.thoughts[0])

    def reader(self, tools: Sequence[str] = (), thinks: bool = False) -> AnswerReader:
        """Returns a reader of one answer to a request with these tools; without tools, no text is a call. `thinks`: the
        prompt ends within a thought.
        """
        kind = ChannelReader if self.has_channels else AnswerReader
        return kind(self, tools if self.read is not None else (), thinks)


class _Strings:
    """Whether a text that is read piece by piece has ended within a string of JSON."""

    def __init__(self) -> None:
        self.is_inside = self._is_escaped = False
        self._is_json: bool | None = None  # not known yet

    def read(self, text: str) -> None:
        """Go on by a piece."""
        if self._is_json is None:
            first = text.lstrip(_BLANKS)[:1]
            self._is_json = None if not first else first in "{["
        for character in text if self._is_json else "":
            if self._is_escaped:
                self._is_escaped = False
            elif character == '"':
                self.is_inside = not self.is_inside
            elif self.is_inside:
                self._is_escaped = character == "\\"


class AnswerReader:
    """Reads one answer."""

    def __init__(self, form: AnswerFormat, tools: Sequence[str], thinks: bool) -> None:
        self._form, self._tools = form, tools
        marks = sorted(form.marks_for(tools), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._longest = max(map(len, marks)) - 1  # of the beginnings
        self._tail = ""  # the end of the text so far, which may begin a mark
        self._blanks: list[str] = []  # at the end of a thought or text; models write some between parts
        self._kind: Kind | None = "thought" if thinks else "call" if form.is_bare else None  # None: not known yet
        self._has_parts, self._is_empty = thinks, True  # are there other parts before this one? has it any text?
        self._call, self._strings = list[str](), _Strings()
        self._is_bare = form.is_bare

    def push(self, text: str) -> list[Part]:
        """Returns the parts that are certain now."""
        parts, text, place = list[Part](), self._tail + text, 0
        for found in self._pattern.finditer(text):
            self._add(text[place : found.start()], parts)
            self._add_mark(found[0], parts)
            place = found.end()
        sizes = range(min(self._longest, len(text) - place), 0, -1)
        size = next((size for size in sizes if text[-size:] in self._beginnings), 0)
        self._tail = text[len(text) - size :]
        self._add(text[place : len(text) - size], parts)
        return parts

    def end(self) -> list[Part]:
        """Returns what was held back. Call it at the end of the answer."""
        parts, tail, self._tail = list[Part](), self._tail, ""
        self._add(tail, parts)
        if self._kind == "call":
            self._close(parts)
        elif self._blanks and not (self._is_empty and self._has_parts):
            parts.append(Part(self._kind or "text", "".join(self._blanks)))
        return parts

    def _add(self, text: str, parts: list[Part]) -> None:
        """Add a text without marks to the part that it belongs to."""
        if self._kind is None and text.strip(_BLANKS):
            may_call = self._form.may_be_bare and bool(self._tools)
            self._is_bare = may_call and text.lstrip(_BLANKS)[0] in "{["
            self._kind = "call" if self._is_bare else "text"
            if self._is_bare:
                text, self._blanks = "".join([*self._blanks, text]), []
        if self._kind == "call":
            self._call.append(text)
            self._strings.read(text)
            return
        if self._is_empty and self._has_parts:
            text = text.lstrip(_BLANKS)
        body = text.rstrip(_BLANKS)
        if body:
            parts.append(Part(self._kind or "text", "".join([*self._blanks, body])))
            self._blanks, self._is_empty = [], False
        self._blanks.append(text[len(body) :])

    def _add_mark(self, mark: str, parts: list[Part]) -> None:
        """Go on to the part that a mark begins. One that makes no sense here is left out."""
        if self._kind == "call" and (self._strings.is_inside or mark in self._form.inner):
            self._call.append(mark)
        elif self._kind == "call" and mark in (*self._form.opens, *self._form.closes):
            self._close(parts)
            self._begin("call" if mark in self._form.opens else "text")
        elif self._kind != "call" and mark in self._form.opens:
            self._begin("call")
        elif self._kind == "thought" and mark == self._form.thoughts[1]:
            self._begin("text")
        elif self._kind in (None, "text") and mark == self._form.thoughts[0]:
            self._begin("thought")

    def _begin(self, kind: Kind) -> None:
        self._kind, self._blanks, self._has_parts, self._is_empty = kind, [], True, True
        self._call, self._strings, self._is_bare = [], _Strings(), False

    def _close(self, parts: list[Part]) -> None:
        """Add the calls in the text of a call."""
        text = "".join(self._call)
        try:
            parts.extend(self._calls(text))
        except CallError as error:
            is_plain = self._is_bare and not self._form.is_bare  # an answer that only looked like a call
            clean = text if is_plain else self._pattern.sub("", text).strip(_BLANKS)
            parts.append(Part("text", clean, reason="" if is_plain else str(error)))

    def _calls(self, text: str) -> Iterator[Part]:
        assert self._form.read is not None
        calls = self._form.read(text)
        unknown = next((name for name, _ in calls if name not in self._tools), None)
        if unknown is not None:
            raise CallError(f"it calls '{unknown:.100}', which is no tool of the request")
        return (Part("call", arguments, name) for name, arguments in calls)


class ChannelReader(AnswerReader):
    """Reads messages with headers: `<|channel|>analysis<|message|>`, or `to=functions.NAME` for a call."""

    def __init__(self, form: AnswerFormat, tools: Sequence[str], thinks: bool) -> None:
        super().__init__(form, tools, thinks)
        self._header: list[str] | None = [""]  # None: within a message
        self._tool = ""

    def _add(self, text: str, parts: list[Part]) -> None:
        if self._header is None:
            super()._add(text, parts)
        else:
            self._header.append(text)

    def _add_mark(self, mark: str, parts: list[Part]) -> None:
        if self._header is None:
            if self._kind == "call":
                self._close(parts)
            self._begin("text")
            self._header = []
        elif mark == "<|message|>":
            header, self._header = "".join(self._header), None
            called = re.search(rf"to=(?:functions\.)?({_NAME})", header)
            self._tool = called[1] if called is not None else ""
            self._begin("call" if self._tool else "thought" if "analysis" in header else "text")
        else:
            self._header.append(" ")

    def end(self) -> list[Part]:
        if self._header is None:
            return super().end()
        text = "".join([*self._header, self._tail])
        return [] if self._has_parts or not text else [Part("text", text)]

    def _calls(self, text: str) -> Iterator[Part]:
        if self._tool not in self._tools:
            raise CallError(f"it calls '{self._tool:.100}', which is no tool of the request")
        return iter([Part("call", _arguments(_values(text)[0]), self._tool)])


def _values(text: str) -> list[object]:
    """Returns the values of JSON in a text, between which there may be blanks and semicolons. Raises CallError."""
    decoder, values, place = json.JSONDecoder(parse_constant=refuse_constant), list[object](), 0
    try:
        while (found := re.compile(r"[\s;]*").match(text, place)) is not None and found.end() < len(text):
            value, place = decoder.raw_decode(text, found.end())
            values.append(value)
    except (ValueError, RecursionError) as error:
        raise CallError(f"it is not valid JSON: {str(error) or 'too many levels'}") from None
    if not values:
        raise CallError("it is empty")
    return values


def _arguments(value: object) -> str:
    """Returns the arguments of a call as JSON. Some models write them as a text of JSON. Raises CallError."""
    if isinstance(value, str):
        value = _values(value)[0]
    if not isinstance(value, dict):
        raise CallError("its arguments are no JSON object")
    return json.dumps(value, ensure_ascii=False)


def _json_calls(text: str) -> Calls:
    """Reads `{"name": ..., "arguments": {...}}`, several of them, or lists of them."""
    calls = Calls()
    for value in _values(text):
        for call in value if isinstance(value, list) else [value]:
            call = call.get("function", call) if isinstance(call, dict) else call
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise CallError("it is no JSON object with a 'name' and 'arguments'")
            given: object = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), {})
            calls.append((call["name"], _arguments(given)))
    if not calls:
        raise CallError("it is an empty list")
    return calls


def _mistral_calls(text: str) -> Calls:
    """Reads a list of calls, or `NAME[ARGS]{...}` of newer models."""
    named = re.match(rf"\s*({_NAME})(?:\[CALL_ID\]\w*)?\[ARGS\]", text)
    return _json_calls(text) if named is None else [(named[1], _arguments(_values(text[named.end() :])[0]))]


_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek_calls(text: str) -> Calls:
    """Reads calls of DeepSeek V3 and R1, whose arguments are in a fence, and of V3.1, which writes them plainly."""
    calls = Calls()
    for call in text.replace(_END, "").split(_BEGIN)[1:]:
        name, separator, rest = call.partition(_SEP)
        fenced = re.match(rf"\s*({_NAME})\s*```(?:json)?(.*)```\s*$", rest, re.DOTALL)
        name, rest = (name, rest) if fenced is None else (fenced[1], fenced[2])
        if not separator:
            raise CallError(f"it has no {_SEP.strip('<｜>')}")
        calls.append((name.strip(), _arguments(_values(rest)[0])))
    if not calls:
        raise CallError("it has no call")
    return calls


FORMATS = (
    AnswerFormat(
        "gpt-oss",
        ("<|channel|>",),
        opens=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        inner=("<|constrain|>",),
        read=_json_calls,
        thoughts=("<|channel|>", "<|message|>"),
        has_channels=True,
    ),
    AnswerFormat(
        "DeepSeek",
        ("<｜tool▁calls▁begin｜>",),
        opens=("<｜tool▁calls▁begin｜>",),
        closes=("<｜tool▁calls▁end｜>",),
        inner=(_BEGIN, _SEP, _END),
        read=_deepseek_calls,
    ),
    AnswerFormat("Mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), (), ("[ARGS]", "[CALL_ID]"), _mistral_calls),
    AnswerFormat("Hermes and Qwen", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",), (), _json_calls),
    AnswerFormat(
        "Llama 3", ("<|python_tag|>", '"parameters":'), ("<|python_tag|>",), (), (), _json_calls, may_be_bare=True
    ),
)
PLAIN = AnswerFormat("thoughts alone", ())
FORCED = AnswerFormat("a list of calls", (), read=_json_calls, is_bare=True)  # where a grammar made the answer so


def format_of(template: str) -> AnswerFormat:
    """Returns how answers are written by a model with this chat template."""
    return next((form for form in FORMATS if any(sign in template for sign in form.signs)), PLAIN)


@dataclass(frozen=True)
class AnswerParts:
    """How the answers to one request are read: in a format, with the tools of the request."""

    form: AnswerFormat | None = None  # None: all is text
    tools: tuple[str, ...] = ()
    thinks: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that the text of answers has."""
        return () if self.form is None else self.form.marks_for(self.tools)

    def reader(self) -> AnswerReader:
        """Returns a reader of one answer."""
        return (self.form or PLAIN).reader(self.tools, self.thinks)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the names of the tools of a request; those without one are for the chat template alone."""
    functions = [tool.get("function", tool) for tool in tools]
    names = [one.get("name") for one in functions if isinstance(one, Mapping)]
    return tuple(name for name in names if isinstance(name, str))


def calls_schema(tools: Sequence[Mapping[str, Any]], called: Sequence[str]) -> str:
    """Returns the JSON schema of a list of calls of these tools; of one call, if it is of one tool."""
    kinds, definitions = list[Any](), dict[str, Any]()
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in called:
            continue
        place = f"#/$defs/{len(definitions)}"
        definitions[str(len(definitions))] = _moved(function.get("parameters") or {"type": "object"}, place)
        properties = {"name": {"const": name}, "arguments": {"$ref": place}}
        kinds.append({"type": "object", "properties": properties, "required": [*properties]} | CLOSED)
    most = {"maxItems": 1} if len(called) == 1 else {}
    return json.dumps({"type": "array", "minItems": 1, **most, "items": {"anyOf": kinds}, "$defs": definitions})


CLOSED = {"additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """Returns a schema whose references to its own parts hold where it stands at a place of another schema."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
