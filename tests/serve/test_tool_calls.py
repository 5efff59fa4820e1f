"""Calls of tools and thoughts through the API of chats, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serve_for_tests import RepeatingEngine, serving

from weft.data.chat_template import ChatTemplate
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError
from weft.serve.answer_parts import calls_schema
from weft.serve.scheduling.grammar import Grammars
from weft.serve.scheduling.request import GeneratedToken, Request

if TYPE_CHECKING:
    import openai

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"name": {"type": "string", "maxLength": 9}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "time"}}
ASKED: Any = [{"role": "user", "content": "How is it?"}]
QWEN = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# <tool_call> #}"
ASKS = "{% if add_generation_prompt %}assistant: {% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
THINKS = "{{ '<think>' if enable_thinking is not defined or enable_thinking else '' }}{{ reasoning_effort }}"


class SayingEngine(RepeatingEngine):
    """Gives every request the same answer."""

    context_length = 4096

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.answer = [*answer.encode(), ByteTokenizer.end]

    def _next(self, request: Request, number: int) -> GeneratedToken:
        return super()._next(replace(request, tokens=tuple(self.answer)), number)


@contextmanager
def saying(answer: str, template: str = QWEN + ASKS) -> Iterator[tuple[SayingEngine, openai.OpenAI]]:
    import openai

    engine = SayingEngine(answer)
    with (
        serving(engine, template=template) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield engine, client


def test_a_call_is_told_whole_and_in_a_stream() -> None:
    with saying(f"<think>\nBonn?\n</think>\n\nOne moment. {CALL}\n{CALL}") as (_, client):
        choice = client.chat.completions.create(model="tiny", messages=ASKED, tools=[WEATHER]).choices[0]  # type: ignore[list-item]
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.message.reasoning_content) == ("One moment.", "Bonn?")  # type: ignore[attr-defined]
        calls = choice.message.tool_calls
        assert calls is not None
        assert [(one.type, one.function.name, json.loads(one.function.arguments)) for one in calls] == [  # type: ignore[union-attr]
            ("function", "weather", {"place": "Bonn"})
        ] * 2
        assert len({one.id for one in calls}) == 2
        with client.chat.completions.stream(model="tiny", messages=ASKED, tools=[WEATHER]) as stream:  # type: ignore[list-item]
            streamed = stream.get_final_completion().choices[0]
        assert streamed.message.content == "One moment."
        assert streamed.finish_reason == "tool_calls"
        told = streamed.message.tool_calls
        assert told is not None
        assert [(one.function.name, one.function.arguments) for one in told] == [
            (one.function.name, one.function.arguments)  # type: ignore[union-attr]
            for one in calls
        ]


def test_without_tools_an_answer_is_its_text_without_thoughts() -> None:
    with saying(f"<think>a</think>{CALL}") as (_, client):
        for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            choice = client.chat.completions.create(model="tiny", messages=ASKED, **options).choices[0]
            assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
            assert choice.message.tool_calls is None


def test_a_call_that_cannot_be_read_is_text_with_a_reason() -> None:
    with saying(CALL.replace("weather", "delete_all")) as (_, client):
        choice = client.chat.completions.create(model="tiny", messages=ASKED, tools=[WEATHER]).choices[0]  # type: ignore[list-item]
        assert choice.finish_reason == "stop"
        assert choice.message.content == '{"name": "delete_all", "arguments": {"place": "Bonn"}}'
        assert choice.message.tool_call_error == "it calls 'delete_all', which is no tool of the request"  # type: ignore[attr-defined]


def test_an_answer_that_must_call_is_held_to_the_tools_schema() -> None:
    with saying('[{"name": "time", "arguments": {}}]') as (engine, client):
        for choice in ("required", NAMED):
            found = client.chat.completions.create(
                model="tiny",
                messages=ASKED,
                tools=[WEATHER, TIME],  # type: ignore[list-item]
                tool_choice=choice,  # type: ignore[arg-type]
            ).choices[0]
            (call,) = found.message.tool_calls or ()
            assert (call.function.name, call.function.arguments, found.finish_reason) == ("time", "{}", "tool_calls")  # type: ignore[union-attr]
            called = ["weather", "time"] if choice == "required" else ["time"]
            assert engine.requests[-1].json_schema == calls_schema([WEATHER, TIME], called)


@pytest.mark.parametrize(
    ("called", "answer", "is_allowed"),
    [
        (("weather", "time"), '[{"name": "weather", "arguments": {"place": "Bonn", "days": 3}}]', True),
        (("weather", "time"), '[{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]', True),
        (("weather", "time"), '[{"name": "weather", "arguments": {}}]', False),
        (("weather", "time"), '[{"name": "weather", "arguments": {"place": "a longer name"}}]', False),
        (("weather", "time"), '[{"name": "other", "arguments": {}}]', False),
        (("weather", "time"), "[]", False),
        (("time",), '[{"name": "time", "arguments": {}}]', True),
        (("time",), '[{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]', False),
        (("time",), '[{"name": "weather", "arguments": {"place": "Bonn"}}]', False),
    ],
)
def test_the_schema_of_calls_allows_what_tools_take(called: tuple[str, ...], answer: str, is_allowed: bool) -> None:
    tokenizer = ByteTokenizer()
    matcher = Grammars(tokenizer, [tokenizer.end]).matcher(calls_schema([WEATHER, TIME], called))
    tokens = [*answer.encode(), tokenizer.end]
    assert all(matcher.accept(token) for token in tokens) is is_allowed


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": "required"}, "'tool_choice' = 'required'; it must be"),
        ({"tool_choice": "any", "tools": [TIME]}, "'tool_choice' = 'any'; it must be"),
        ({"tool_choice": {"function": {"name": "weather"}}, "tools": [TIME]}, "of a tool in 'tools'"),
        ({"tool_choice": [], "tools": [TIME]}, "'tool_choice' = []"),
        ({"tool_choice": "required", "tools": [TIME], "response_format": {"type": "json_object"}}, "one of the two"),
        ({"chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs' has 'messages'"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "content": " "}], "continue_final_message": True}, "no content"),
    ],
)
def test_bad_keys_are_refused_in_words(body: dict[str, Any], words: str) -> None:
    with serving(SayingEngine("a"), template=QWEN) as served:
        answer: httpx.Response = served.post("/v1/chat/completions", {"messages": ASKED, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_templates_read_a_clients_variables_and_thoughts_go_on_from_the_prompt() -> None:
    with saying("Hm.\n</think>\n\nFine.", "q " + ASKS + THINKS) as (engine, client):

        def ask(**more: Any) -> tuple[Any, str]:
            found = client.chat.completions.create(model="tiny", messages=ASKED, extra_body=more).choices[0].message
            return found, bytes(engine.requests[-1].tokens).decode()

        found, prompt = ask(reasoning_effort="")
        assert (found.reasoning_content, found.content, prompt) == ("Hm.", "Fine.", "q assistant: <think>")
        found, prompt = ask(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
        assert (found.content, prompt) == ("Hm.\n\n\nFine.", "q assistant: low")
        _, prompt = ask(add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False})
        assert prompt == "q "


def test_an_answer_goes_on_with_the_last_message() -> None:
    template = ChatTemplate(QWEN + ASKS, {}, "the test")
    messages = [*ASKED, {"role": "assistant", "content": " It is "}]
    assert template.render_begun(messages).endswith("assistant:  It is ")
    with pytest.raises(DataError, match="no content"):
        ChatTemplate("x", {}, "the test").render_begun(messages)
    with saying(" fine.") as (engine, client):
        more = {"continue_final_message": True}
        found = client.chat.completions.create(model="tiny", messages=messages, extra_body=more)  # type: ignore[arg-type]
        assert found.choices[0].message.content == " fine."
        assert bytes(engine.requests[-1].tokens).endswith(b"assistant:  It is ")


RESPONSE_TOOL: Any = {"type": "function", **WEATHER["function"]}


def test_a_response_has_thoughts_text_and_calls_as_items() -> None:
    with saying(f"<think>\nBonn?\n</think>\n\nOne moment. {CALL}") as (_, client):
        found = client.responses.create(
            model="tiny", input="How is it?", instructions="Be kind.", tools=[RESPONSE_TOOL]
        )
        assert (found.status, found.output_text, found.error) == ("completed", "One moment.", None)
        assert found.id.startswith("resp-")
        assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
        call: Any = found.output[2]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"place": "Bonn"})
        assert found.usage is not None
        assert found.usage.output_tokens_details.reasoning_tokens == len("Bonn?")
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
        events = list(client.responses.create(model="tiny", input="How is it?", tools=[RESPONSE_TOOL], stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "One moment."
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Bonn?"
        last = events[-1]
        assert last.type == "response.completed"
        told = [(item.type, getattr(item, "arguments", None)) for item in last.response.output]
        assert told == [(item.type, getattr(item, "arguments", None)) for item in found.output]
        with client.responses.stream(model="tiny", input="How is it?", tools=[RESPONSE_TOOL]) as stream:
            assert stream.get_final_response().output_text == "One moment."


def test_a_response_reads_what_came_before() -> None:
    items: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Bonn?"}]},
        {"type": "function_call", "call_id": "a1", "name": "weather", "arguments": '{"place": "Bonn"}'},
        {"type": "function_call_output", "call_id": "a1", "output": "rain"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.place }}{% endif %}|"
        "{{ m.tool_call_id }}\n{% endfor %}"
    )
    with saying("a", template) as (engine, client):
        found = client.responses.create(model="tiny", input=items, max_output_tokens=1)
        prompt = bytes(engine.requests[-1].tokens).decode()
        assert prompt == "system|Be kind.|||\nuser|How is it?|||\nassistant||Bonn?|Bonn|\ntool|rain|||a1\n"
        assert (found.status, found.output_text) == ("incomplete", "a")
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "'input' is None"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'input[0]' is {'id': 'x', 'type': 'item_reference'}"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "is not taken; it must be a text"),
        ({"input": "x", "previous_response_id": "a"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not known"),
        ({"input": "x", "text": {"format": {"type": "nope"}}}, "'nope' is not known"),
        ({"input": "x", "reasoning": {"effort": 3}}, "'reasoning.effort' is 3"),
        ({"input": "x", "max_output_tokens": 0}, "'max_output_tokens' = 0"),
    ],
)
def test_bad_responses_are_refused_in_words(body: dict[str, Any], words: str) -> None:
    with serving(SayingEngine("a"), template=QWEN) as served:
        answer = served.post("/v1/responses", body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
