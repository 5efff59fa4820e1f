"""OpenAI's API of responses over that of chats: what is asked for, and answers as items, whole or as events.

A response is not kept, so `previous_response_id` is refused: a client sends the whole conversation.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.serve.answer_parts import Part
from weft.serve.http.answers import GeneratedAnswer, json_body, json_text
from weft.serve.http.chat_body import ChatBody
from weft.serve.http.request_body import MAX_LENGTHS, ApiError, shown
from weft.serve.http.running_answer import RunningAnswer
from weft.serve.scheduling.request import Finish

_KINDS = {"thought": "reasoning", "text": "message", "call": "function_call"}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(frozen=True)
class ResponsesBody:
    """The body of /v1/responses."""

    input: Any = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Any = "auto"
    text: Mapping[str, Any] | None = None  # the form of the answer
    reasoning: Mapping[str, Any] | None = None
    stream: bool = False

    def as_chat(self) -> ChatBody:
        """Returns the chat that answers this. Raises ApiError for what it cannot have."""
        effort = (self.reasoning or {}).get("effort")
        if not isinstance(effort, str | None):
            raise ApiError(400, f"'reasoning.effort' is {shown(effort):.100}; it must be a text")
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice = self.tool_choice
        if isinstance(choice, dict) and "function" not in choice:
            choice = {"type": "function", "function": choice}
        return ChatBody(
            model=self.model,
            messages=[*first, *_messages(self.input)],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tools=tuple(map(_tool, self.tools)),
            tool_choice=choice,
            response_format=_response_format(self.text),
            reasoning_effort=effort,
            stream=self.stream,
        )


def _response_format(text: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    form = (text or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    if not isinstance(form, Mapping | None):
        raise ApiError(400, f"'text.format' is {shown(form):.100}; it must be an object with a 'type'")
    return form


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(400, f"a tool of type {shown(tool.get('type')):.50} is not known; give functions")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in names if tool.get(key) is not None}}


def _messages(value: Any) -> list[dict[str, Any]]:
    """Returns the input of a response as messages of a chat."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"'input' is {shown(value):.100}; it must be a text or a list of items")
    if len(value) > MAX_LENGTHS["messages"]:
        raise ApiError(400, f"'input' has {len(value)} items; at most {MAX_LENGTHS['messages']} are taken")
    messages = list[dict[str, Any]]()
    answer: dict[str, Any] | None = None  # of the model, whose items follow each other
    for number, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _plain(output)})
            answer = None
        elif kind == "message" and item.get("role") != "assistant":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _plain(item.get("content"))})
            answer = None
        elif kind in ("message", "function_call", "reasoning"):
            if answer is None:
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            if kind == "message":
                answer["content"] += _plain(item.get("content"))
            elif kind == "reasoning":
                answer["reasoning_content"] = answer.get("reasoning_content", "") + _plain(item.get("content") or [])
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
        else:
            raise ApiError(400, f"'input[{number}]' is {shown(item):.100}; it must be a message, a call or its output")
    return messages


def _plain(content: Any) -> str:
    """Returns the text of content: a text, or a list of parts."""
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        content = "".join(one["text"] for one in content)
    if not isinstance(content, str):
        raise ApiError(400, f"the content {shown(content):.100} is not taken; it must be a text, or a list of texts")
    return content


class _Items:
    """The items of one answer, and the events that tell of them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        """Add a part of the answer. Yields events."""
        kind = _KINDS[part.kind]
        if self._open is not None and (self._open["type"] != kind or kind == "function_call"):
            yield from self.close()
        if self._open is None:
            yield from self._begin(kind, part.name)
        assert self._open is not None
        if kind == "function_call":
            self._open["arguments"] += part.text
            yield self._event("response.function_call_arguments.delta", delta=part.text)
        elif part.text:
            self._open["content"][0]["text"] += part.text
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"response.{_text_kind(kind)}.delta", content_index=0, delta=part.text, **more)

    def close(self) -> Iterator[dict[str, Any]]:
        """End the last item. Yields events."""
        item, self._open = self._open, None
        if item is None:
            return
        item["status"], place = "completed", {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **told}
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            place["content_index"] = 0
            yield {"type": f"response.{_text_kind(item['type'])}.done", **place, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _begin(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {"type": kind, "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "function_call":
            item |= {"call_id": uuid.uuid4().hex[:9], "name": name, "arguments": ""}
        elif kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["role"] = "assistant"
        else:
            item["summary"] = []
        begun = item if kind == "function_call" else {**item, "content": []}
        index = len(self.items)
        yield {"type": "response.output_item.added", "output_index": index, "item": begun.copy()}
        if kind != "function_call":
            item["content"] = [part]
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": part.copy()}
        self.items.append(item)
        self._open = item

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items) - 1, **more}


def _text_kind(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


class RunningResponse(RunningAnswer):
    """The answer to a request for a response."""

    prefix = "resp"

    def _body(self, answers: Sequence[GeneratedAnswer]) -> bytes:
        items, reader = _Items(), self._asked.answer.reader()
        for part in [*reader.push(answers[0].text), *reader.end()]:
            for _ in items.add(part):
                pass
        for _ in items.close():
            pass
        about = self._about(answers[0].finish, items)
        return json_body(
            {key: about[key] for key in about if key != "output"}, "output", list(map(json_text, items.items))
        )

    async def events(self) -> AsyncIterator[str]:
        items, reader, number = _Items(), self._asked.answer.reader(), 0
        finish: Finish | None = None

        def numbered(events: Iterator[dict[str, Any]]) -> Iterator[str]:
            nonlocal number
            for event in events:
                yield json.dumps({**event, "sequence_number": number})
                number += 1

        first = self._about(None, items)
        for kind in ("created", "in_progress"):
            for text in numbered(iter([{"type": f"response.{kind}", "response": first}])):
                yield text
        async for _, chunk in self._chunks():
            finish = chunk.finish
            parts = reader.push(chunk.text) + (reader.end() if finish is not None else [])
            for part in parts:
                for text in numbered(items.add(part)):
                    yield text
        for text in numbered(items.close()):
            yield text
        last = self._about(finish, items)
        for text in numbered(iter([{"type": f"response.{last['status']}", "response": last}])):
            yield text

    def _about(self, finish: Finish | None, items: _Items) -> dict[str, Any]:
        """Returns the response, as far as it was generated."""
        asked, told = self._asked, self._usage()
        is_cut = finish == "length"
        sampling, encode = asked.requests[0].sampling, self._model.tokenizer.encode
        thoughts = [item["content"][0]["text"] for item in items.items if item["type"] == "reasoning"]
        used = {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": sum(len(encode(one)) for one in thoughts)},
            "total_tokens": told["total_tokens"],
        }
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if finish is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": asked.requests[0].adapter or self._model.name,
            "output": items.items if finish is not None else [],
            "parallel_tool_calls": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": asked.requests[0].max_tokens,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
            "usage": None if finish is None else used,
        }
