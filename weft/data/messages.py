"""Messages of conversations as chat templates read them. Rows of data and requests to a server are read alike, so that
a model is trained on the text that it is asked with.

A message is `{"role": ..., "content": ...}`. Its content is a text or a list of parts `{"type": "text", "text": ...}`,
which are joined. A message may lack content if it has tool calls or reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.errors import DataError

REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message, the first that is there counts
Messages = Sequence[Mapping[str, Any]]


def read_messages(value: Any, key: str = "messages") -> list[dict[str, Any]]:
    """Returns the messages of a chat. `key` names them in errors."""
    if not isinstance(value, list) or not value:
        raise DataError(f"'{key}' is {value!r:.100}; it must be a list of {{'role': ..., 'content': ...}}")
    return [_message(message, f"{key}[{number}]") for number, message in enumerate(value)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"'{place}' is {message!r:.100}; it must be an object with a 'role'")
    if message.get("function_call") is not None:
        raise DataError(f"'{place}.function_call' is an old form of 'tool_calls', which weft does not read; give those")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise DataError(f"'{place}.content' has a part that is no text; only text is taken")
        content = "".join(part["text"] for part in content)
    is_absent = content is None and (message.get("tool_calls") or reasoning_of(message) is not None)
    if not isinstance(content, str) and not is_absent:
        raise DataError(f"'{place}.content' is {content!r:.100}; it must be a text")
    found = {**message, "content": content}
    if isinstance(message.get("tool_calls"), list):
        found["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return found


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Returns the reasoning that a message has beside its content; None if it has none."""
    return next((message[key] for key in REASONING if isinstance(message.get(key), str)), None)


def read_tools(value: Any) -> list[Mapping[str, Any]]:
    """Returns the tools of a row: a list of JSON schemas, or that list as JSON text; [] for None."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # refused below
            value = json.loads(value, parse_constant=refuse_constant)
    if not isinstance(value, list | None) or not all(isinstance(tool, dict) for tool in value or ()):
        raise DataError(f"'tools' is {value!r:.100}; it must be a list of JSON schemas of functions")
    return value or []


def _with_object(call: Any) -> Any:
    """Returns a tool call with its arguments as an object, which templates write as JSON. OpenAI clients send text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"], parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def refuse_constant(word: str) -> None:
    """Refuse NaN and infinities, which JSON does not have, as `parse_constant` of json.loads."""
    raise ValueError(f"{word} is no JSON number")
