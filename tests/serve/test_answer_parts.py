"""Thoughts and calls of tools in answers, as each family of models writes them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.serve.answer_parts import FORCED, FORMATS, PLAIN, AnswerFormat, Part, format_of

BY_NAME = {form.name: form for form in (*FORMATS, PLAIN, FORCED)}
QWEN, LLAMA, MISTRAL, DEEPSEEK, OSS = "Hermes and Qwen", "Llama 3", "Mistral", "DeepSeek", "gpt-oss"
TOOLS = ("search", "get_time")
CALLS, SEP, BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def read(name: str, text: str, tools: tuple[str, ...] = TOOLS, thinks: bool = False, cuts: tuple[int, ...] = ()) -> Any:
    """The parts of an answer, with pieces of one thought or text joined. Calls and their errors are pairs."""
    reader, parts = BY_NAME[name].reader(tools, thinks), list[Part]()
    places = [0, *sorted(place for place in cuts if place < len(text)), len(text)]
    for first, end in pairwise(places):
        parts += reader.push(text[first:end])
    found: list[Any] = []
    kinds: list[str] = []
    for part in [*parts, *reader.end()]:
        if part.kind == "call":
            found.append((part.name, json.loads(part.text)))
        elif part.reason:
            found.append((part.text, part.reason.split(":")[0]))
        elif kinds and kinds[-1] == part.kind:
            found[-1][part.kind] += part.text
            continue
        else:
            found.append({part.kind: part.text})
        kinds.append("" if part.reason else part.kind)
    return found


def call(name: str = "search", **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


TRANSCRIPTS: dict[tuple[str, str], Any] = {
    # Qwen2.5, Qwen3 and Hermes 2 Pro: JSON between marks, one pair for each call
    (QWEN, "Hello."): [{"text": "Hello."}],
    (QWEN, "  a\n\n b \n"): [{"text": "  a\n\n b \n"}],
    (QWEN, f"<tool_call>\n{call(q='x')}\n</tool_call>"): [("search", {"q": "x"})],
    (QWEN, f"One moment.\n<tool_call>\n{call(q='x')}\n</tool_call>\n<tool_call>\n{call('get_time')}\n</tool_call>"): [
        {"text": "One moment."}, ("search", {"q": "x"}), ("get_time", {}),
    ],
    (QWEN, f"<think>\nLet me look.\n</think>\n\n<tool_call>\n{call(q='é')}\n</tool_call>"): [
        {"thought": "Let me look."}, ("search", {"q": "é"}),
    ],
    (QWEN, "<think>\n\n</think>\n\nHello."): [{"text": "Hello."}],
    (QWEN, f"<tool_call>{call(q='a </tool_call> b')}</tool_call>"): [("search", {"q": "a </tool_call> b"})],
    (QWEN, f"<tool_call>{call(q='a')}"): [("search", {"q": "a"})],
    (QWEN, '<tool_call>{"name": "search", "arguments": "{\\"q\\": 1}"}</tool_call>'): [("search", {"q": 1})],
    (QWEN, f"<tool_call>{call(q='a')[:-3]}</tool_call> Sorry."): [
        (call(q="a")[:-3] + " Sorry.", "it is not valid JSON"),  # a string that does not end
    ],
    (QWEN, f"<tool_call>{call('delete')}</tool_call>"): [
        (call("delete"), "it calls 'delete', which is no tool of the request"),
    ],
    (QWEN, "<tool_call></tool_call>"): [("", "it is empty")],
    (QWEN, '<tool_call>{"arguments": {}}</tool_call>'): [
        ('{"arguments": {}}', "it is no JSON object with a 'name' and 'arguments'"),
    ],
    (QWEN, '<tool_call>{"name": "search", "arguments": [1]}</tool_call>'): [
        ('{"name": "search", "arguments": [1]}', "its arguments are no JSON object"),
    ],
    (QWEN, '<tool_call>{"name": "search", "arguments": {"q": NaN}}</tool_call>'): [
        ('{"name": "search", "arguments": {"q": NaN}}', "it is not valid JSON"),
    ],
    # Llama 3.1 and 3.2: parameters, without marks or behind <|python_tag|>
    (LLAMA, '{"name": "search", "parameters": {"q": "x"}}'): [("search", {"q": "x"})],
    (LLAMA, '<|python_tag|>{"name": "search", "parameters": {"q": "x"}}'): [("search", {"q": "x"})],
    (LLAMA, '\n{"name": "search", "parameters": {}}; {"name": "get_time", "parameters": {}}'): [
        ("search", {}), ("get_time", {}),
    ],
    (LLAMA, '{"temperature": 3}'): [{"text": '{"temperature": 3}'}],
    (LLAMA, "It is {late}."): [{"text": "It is {late}."}],
    (LLAMA, '<|python_tag|>search.call(q="x")'): [('search.call(q="x")', "it is not valid JSON")],
    # Mistral: a list, or the name before its arguments
    (MISTRAL, '[TOOL_CALLS] [{"name": "search", "arguments": {"q": "[ARGS]"}}]'): [("search", {"q": "[ARGS]"})],
    (MISTRAL, 'Yes.[TOOL_CALLS]search[ARGS]{"q": 1}[TOOL_CALLS]get_time[CALL_ID]a1[ARGS]{}'): [
        {"text": "Yes."}, ("search", {"q": 1}), ("get_time", {}),
    ],
    (MISTRAL, "[TOOL_CALLS] []"): [("[]", "it is an empty list")],
    # DeepSeek V3 and R1 write a fence, V3.1 none
    (DEEPSEEK, f'{CALLS}{BEGIN}function{SEP}search\n```json\n{{"q": "x"}}\n```{END}<｜tool▁calls▁end｜>'): [
        ("search", {"q": "x"}),
    ],
    (DEEPSEEK, f"a</think>\n\nb<｜tool▁calls▁begin｜>{BEGIN}search{SEP}{{}}{END}{BEGIN}get_time{SEP}{{}}{END}"): [
        {"text": "a\n\nb"}, ("search", {}), ("get_time", {}),
    ],
    (DEEPSEEK, "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"): [("nothing", "it has no call")],
    # gpt-oss: messages with headers
    (OSS, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"): [
        {"thought": "Hm."}, {"text": "Hi."},
    ],
    (OSS, '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"q": 1}<|call|>'): [
        ("search", {"q": 1}),
    ],
    (OSS, "<|start|>assistant to=functions.get_time<|channel|>commentary<|message|>{}"): [("get_time", {})],
    (OSS, "<|channel|>commentary to=functions.delete<|message|>{}<|call|>"): [
        ("{}", "it calls 'delete', which is no tool of the request"),
    ],
    (OSS, "Hi."): [{"text": "Hi."}],
    # without tools of its own: thoughts alone
    (PLAIN.name, "<think>a</think>b<tool_call>"): [{"thought": "a"}, {"text": "b<tool_call>"}],
    (FORCED.name, f"[{call(q=1)}, {call('get_time')}]"): [("search", {"q": 1}), ("get_time", {})],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), TRANSCRIPTS)
def test_transcripts_are_read(name: str, text: str) -> None:
    every = tuple(range(1, len(text)))
    assert read(name, text) == read(name, text, cuts=every) == TRANSCRIPTS[name, text]


PIECES = [mark for form in BY_NAME.values() for mark in form.marks]
PIECES += [call(q='<tool_call> \\"'), call("delete"), '{"name": "search", "parameters": {}}', "search", "{", '"', "\\"]
PIECES += [
    "analysis",
    "commentary to=functions.search",
    " ",
    "\n\n",
    "<",
    "tool_call>",
    "<|",
    "é",
    "a b",
    "```json",
    "[",
    "]",
]


@given(st.sampled_from(sorted(BY_NAME)), st.lists(st.sampled_from(PIECES), max_size=12), st.booleans(), st.data())
def test_any_cut_of_an_answer_gives_the_same_parts_and_no_marks(
    name: str, pieces: list[str], thinks: bool, data: st.DataObject
) -> None:
    text, tools = "".join(pieces), data.draw(st.sampled_from([TOOLS, ()]))
    cuts = tuple(data.draw(st.lists(st.integers(1, max(1, len(text))), max_size=20)))
    found = read(name, text, tools, thinks)
    assert read(name, text, tools, thinks, cuts) == found
    form = BY_NAME[name]
    marks = form.marks if tools or form.has_channels else form.thoughts
    texts = [value for part in found if isinstance(part, dict) for value in part.values()]
    if not (form.has_channels and "<|message|>" not in text):
        assert not [mark for mark in marks for one in texts if mark in one and mark not in form.inner]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_long_answers_are_read_once(name: str) -> None:
    """20,000 characters that are or nearly are marks, one at a time: a quadratic reader would take minutes."""
    form = BY_NAME[name]
    for piece in ("\n", "<", form.marks[0][:-1], form.marks[0] + '{"', '"'):
        reader = form.reader(TOOLS)
        for character in piece * (20_000 // len(piece)):
            reader.push(character)
        reader.end()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", QWEN),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ("[TOOL_CALLS]", MISTRAL),
        ("<｜tool▁calls▁begin｜> <think>", DEEPSEEK),
        ("<|channel|>analysis", OSS),
        ("{{ messages }}", PLAIN.name),
    ],
)
def test_the_format_is_found_from_the_template(template: str, name: str) -> None:
    form: AnswerFormat = format_of(template)
    assert form.name == name
