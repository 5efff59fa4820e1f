"""The official client of OpenAI against the server: completions, chats, streams, embeddings and errors."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serve_for_tests import LIMIT_SECONDS, RepeatingEngine, Served, serving, wait_for

from weft.data.chat_template import ChatTemplate
from weft.serve.answer_parts import AnswerParts
from weft.serve.http import request_body
from weft.serve.http.request_body import MAX_JSON_BYTES, messages_of

if TYPE_CHECKING:
    import openai  # takes a second, which only the process that runs these tests spends


from weft.data.tokenizer import ByteTokenizer
from weft.serve.http.answers import ChatForm, CompletionForm, GeneratedAnswer, TokenWords
from weft.serve.scheduling.request import GeneratedToken, Request, TokenLogprobs


@pytest.fixture(scope="module")
def engine() -> RepeatingEngine:
    return RepeatingEngine()


@pytest.fixture(scope="module")
def served(engine: RepeatingEngine) -> Iterator[Served]:
    with serving(engine) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_SECONDS) as found:
        yield found


def test_models(client: openai.OpenAI) -> None:
    import openai

    (model,) = client.models.list().data
    assert (model.id, model.context_length, model.has_chat_template) == ("tiny", 64, True)  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_a_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="héllo", max_tokens=12)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("héllohéllo", "length")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (6, 12, 18)
    assert found.system_fingerprint == "step-00000001"


def test_a_streamed_completion_has_whole_characters(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(prompt="a€", model="tiny", max_tokens=8, stream=True, stream_options=options)
    )
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["a", "€", "a", "€"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_stop_strings_end_an_answer_and_free_the_engine(client: openai.OpenAI, engine: RepeatingEngine) -> None:
    num_cancelled = len(engine.cancelled)
    found = client.completions.create(model="tiny", prompt="one END two", stop=["END", "never"], max_tokens=1 << 30)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("one ", "stop")
    wait_for(lambda: len(engine.cancelled) == num_cancelled + 1)


def test_end_tokens_end_an_answer(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt=[104, 105, 256], max_tokens=9)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("hi", "stop")
    again = client.completions.create(model="tiny", prompt=[104, 256], max_tokens=4, extra_body={"ignore_eos": True})
    assert (again.choices[0].text, again.choices[0].finish_reason) == ("hh", "length")


def test_echo_n_several_prompts_and_seeds(client: openai.OpenAI, engine: RepeatingEngine) -> None:
    del engine.requests[:]
    found = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, echo=True, max_tokens=2, seed=7)
    assert [choice.text for choice in found.choices] == ["abab", "abab", "cdcd", "cdcd"]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 7, 8]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (4, 8)
    nothing = client.completions.create(model="tiny", prompt="ab", echo=True, max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == ("ab", "length")


def test_usage_says_how_many_tokens_of_prompts_were_cached(
    client: openai.OpenAI, engine: RepeatingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two prompts with three answers each, the prompts count once."""
    asked: Any = {"model": "tiny", "prompt": ["abc", "abcd"], "n": 3, "max_tokens": 2}
    for num_cached in (0, 2):
        monkeypatch.setattr(engine, "num_cached", num_cached)
        whole = client.completions.create(**asked)
        *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for found in (whole.usage, last.usage):
            assert (found.prompt_tokens, found.prompt_tokens_details.cached_tokens) == (7, 2 * num_cached)


def test_the_likeliest_of_several_answers_are_given(
    client: openai.OpenAI, engine: RepeatingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed of 7 more is a token of as much lower log-probability, but for that of the second answer."""

    def logprobs(request: Request, token: int) -> TokenLogprobs:
        seed = request.sampling.seed or 0
        return TokenLogprobs(-0.125 if seed == 8 else float(-seed), ())

    monkeypatch.setattr(engine, "_logprobs", logprobs)
    asked: Any = {"model": "tiny", "prompt": ["ab", "cd"], "best_of": 4, "n": 2, "seed": 7, "max_tokens": 3}
    found = client.completions.create(**asked, logprobs=0, echo=True)
    assert [choice.text for choice in found.choices] == ["ababa", "ababa", "cdcdc", "cdcdc"]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.logprobs.token_logprobs[-1] for choice in found.choices] == [-0.125, -7.0] * 2
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (4, 24)  # of all that were generated
    plain = client.completions.create(**{**asked, "prompt": "ab"})
    assert [(choice.text, choice.logprobs) for choice in plain.choices] == [("aba", None)] * 2


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="ab", max_tokens=3, logprobs=2).choices[0].logprobs
    assert found is not None
    assert (found.tokens, found.token_logprobs) == (["a", "b", "a"], [-0.5] * 3)
    assert (found.top_logprobs, found.text_offset) == (
        [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"a": -0.5, "b": -1.5}],
        [0, 1, 2],
    )


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    import openai

    asked = {"model": "tiny", "prompt": ["abc", "abc", "x"], "echo": True, "logprobs": 1}
    found = client.completions.create(**asked, max_tokens=2).choices  # type: ignore[call-overload]
    for choice, text in zip(found, ["abcab", "abcab", "xxx"], strict=True):
        assert (choice.text, choice.logprobs.tokens) == (text, list(text))
        assert choice.logprobs.token_logprobs == [None, *[-0.5] * (len(text) - 1)]  # nothing is before the first
        assert choice.logprobs.top_logprobs == [None, *({letter: -0.5} for letter in text[1:])]
        assert choice.logprobs.text_offset == list(range(len(text)))
    (whole,) = client.completions.create(**{**asked, "prompt": "abc"}, max_tokens=0).choices  # type: ignore[call-overload]
    assert (whole.text, whole.logprobs.tokens, whole.finish_reason) == ("abc", ["a", "b", "c"], "length")
    stream = client.completions.create(**{**asked, "prompt": "abc"}, max_tokens=2, stream=True)  # type: ignore[call-overload]
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for part in parts for token in part.tokens] == list("abcab")
    assert [offset for part in parts for offset in part.text_offset] == list(range(5))
    with pytest.raises(openai.BadRequestError, match="longer than 64"):
        client.completions.create(**{**asked, "prompt": "a" * 65}, max_tokens=0)  # type: ignore[call-overload]


def test_a_stream_of_an_echo_alone_ends_in_a_reason(client: openai.OpenAI) -> None:
    for prompt, logprobs in (("ab", None), ("ab", 1), ("", 1), ("", None)):
        asked = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": 0}
        (chunk,) = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        (whole,) = client.completions.create(**asked).choices  # type: ignore[call-overload]
        assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == (prompt, "length")
        assert chunk.choices[0].logprobs == whole.logprobs


def test_a_stream_has_the_tokens_of_a_prompt_without_text(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "", "echo": True, "logprobs": 1, "max_tokens": 2}
    stop = {"extra_body": {"ignore_eos": True}}
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, **stop, stream=True)]  # type: ignore[call-overload]
    (whole,) = client.completions.create(**asked, **stop).choices  # type: ignore[call-overload]
    assert [value for part in parts for value in part.token_logprobs] == whole.logprobs.token_logprobs
    assert whole.logprobs.token_logprobs == [None, -0.5, -0.5]


def test_all_chunks_of_a_stream_state_one_time(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(time, "time", lambda: next(seconds))
    chunks = list(client.completions.create(model="tiny", prompt="ab", max_tokens=4, stream=True))
    assert len(chunks) == 4
    assert len({chunk.created for chunk in chunks}) == 1


def test_a_token_that_cannot_come_has_a_logprob_that_json_can_write(
    client: openai.OpenAI, engine: RepeatingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "logprob", -math.inf)
    found = client.completions.create(model="tiny", prompt="ab", max_tokens=1, logprobs=1).choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == [-9999.0]
    assert found.top_logprobs == [{"a": -9999.0}]


def test_a_chat(client: openai.OpenAI, engine: RepeatingEngine) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
    ]
    found = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=13, logprobs=True, top_logprobs=1, user="someone"
    )  # type: ignore[call-overload]
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "<system>S<use")
    assert [entry.token for entry in choice.logprobs.content[:2]] == ["<", "s"]
    assert choice.logprobs.content[0].top_logprobs[0].bytes == [ord("<")]
    assert bytes(engine.requests[-1].tokens) == b"<system>S<user>U<assistant>"


def test_a_streamed_chat_with_tools(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    messages = [{"role": "user", "content": "x"}]
    chunks = list(
        client.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=9, stream=True)  # type: ignore[call-overload]
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "[weather]"
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"city": "Zürich", "days": [1]}', '{"city": "Zürich", "days": [1]}'),
        ({"city": "Bern"}, '{"city": "Bern"}'),
        ("[1]", '"[1]"'),  # what is no JSON object stays as it is
        ('{"a": NaN}', '"{\\"a\\": NaN}"'),
        ("{" * 100_000, json.dumps("{" * 100_000)),
        ("", '""'),
        (None, "null"),
    ],
)
def test_arguments_of_a_tool_call_are_an_object_to_the_template(given: Any, expected: str) -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {}, "the test")
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": given}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert template.render(messages_of([message])) == expected
    assert calls[0]["function"] == {"name": "weather", "arguments": given}


def nested(levels: int, inner: Any = 0) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


def test_what_templates_write_as_json_has_limits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may write it with indents: a value in a thousand lists has thousands of blanks before it."""
    monkeypatch.setattr(request_body, "MAX_JSON_BYTES", 1000)

    def asked(arguments: Any = None, tools: Any = ()) -> httpx.Response:
        calls = [{"function": {"name": "x", "arguments": arguments}}]
        message = {"role": "assistant", "content": "y" * 2000, "reasoning": "z" * 2000, "tool_calls": calls}
        body = {"messages": [message], "tools": tools, "max_tokens": 1}
        return served.post("/v1/chat/completions", body)

    levels = "has more than 32 levels of lists and objects in each other"
    fewer = "bytes of lists and objects, at most 1000 are taken"
    tool = {"type": "function", "function": {"name": "x"}}
    for refused, words in (
        (asked({"a": nested(27)}), f"'messages' {levels}"),
        (asked(json.dumps({"a": nested(27)})), f"'messages' {levels}"),
        (asked(json.dumps({"a": nested(500)})), f"'messages' {levels}"),
        (asked(tools=[{**tool, "parameters": nested(31)}]), f"'tools' {levels}"),
        (asked({"a": [0] * 500}), fewer),
        (asked(json.dumps({"a": [0] * 500})), fewer),
        (asked(tools=[{**tool, "parameters": [0] * 500}]), fewer),
        (asked(json.dumps({"a": "\ud800" * 400})), fewer),
    ):
        assert refused.status_code == 400, words
        assert words in refused.json()["error"]["message"]
    for taken in (asked({"a": nested(26)}), asked(tools=[{**tool, "parameters": nested(30)}])):
        assert (taken.status_code, taken.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert MAX_JSON_BYTES == 1 << 20


def test_tool_calls_of_another_form_are_left_to_the_template() -> None:
    for calls in (["x"], [{"function": "x"}], [{}], {"0": 1}):
        message = {"role": "assistant", "content": "x", "tool_calls": calls}
        assert messages_of([message]) == [message]


def test_a_chat_without_a_limit_fills_the_context(client: openai.OpenAI, engine: RepeatingEngine) -> None:
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    request = engine.requests[-1]
    assert len(request.tokens) + request.max_tokens == engine.context_length


def test_sampling_reaches_the_engine(client: openai.OpenAI, engine: RepeatingEngine) -> None:
    client.completions.create(
        model="tiny",
        prompt="x",
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"65": -100},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "cache_salt": "me", "stop_token_ids": [3]},
    )
    request = engine.requests[-1]
    one = request.sampling
    assert (one.temperature, one.top_p, one.top_k, one.min_p) == (0.5, 0.9, 5, 0.1)
    assert (one.presence_penalty, one.frequency_penalty, one.repetition_penalty) == (1.0, -1.0, 1.2)
    assert one.logit_bias == {65: -100.0}
    assert request.stop_tokens == {3, 256}
    assert request.tenant == "0/me"
    client.completions.create(model="tiny", prompt="x", extra_body={"top_k": -1})  # all, as other servers write it
    assert engine.requests[-1].sampling.top_k == 0


def test_embeddings(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="tiny", input=["ab", "c"])  # the client asks for base64
    assert [row.embedding for row in found.data] == [[97.5, 195.0], [99.0, 99.0]]
    assert found.usage.prompt_tokens == 3
    last = client.embeddings.create(model="tiny", input="ab", encoding_format="float", extra_body={"pool": "last"})
    assert math.isclose(last.data[0].embedding[0], 98.0)


def test_many_texts_are_embedded_at_once(client: openai.OpenAI) -> None:
    import openai

    found = client.embeddings.create(model="tiny", input=["ab", "c"] * 150)
    assert [row.embedding for row in found.data] == [[97.5, 195.0], [99.0, 99.0]] * 150
    with pytest.raises(openai.BadRequestError, match="'input' has 2049 prompts; it must have from 1 to 2048"):
        client.embeddings.create(model="tiny", input=["x"] * 2049)


def test_embeddings_of_fewer_dimensions_have_length_1(client: openai.OpenAI) -> None:
    import openai

    for number in (1, 2):  # of 97.5 and 195
        (row,) = client.embeddings.create(model="tiny", input="ab", dimensions=number).data
        assert row.embedding == pytest.approx([1.0] if number == 1 else [0.2**0.5, 2 * 0.2**0.5])
    for number, words in ((3, "embeddings of this model have 2, give fewer"), (0, "it must be from 1 to")):
        with pytest.raises(openai.BadRequestError, match=words):
            client.embeddings.create(model="tiny", input="ab", dimensions=number)


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; this server has 'tiny'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="a prompt of 65 tokens") as caught:
        client.completions.create(model="tiny", prompt="x" * 65)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature is above 100"):
        client.completions.create(model="tiny", prompt="x", temperature=200)


EURO = "€".encode()


def answer_in_bytes() -> GeneratedAnswer:
    """A character whose three tokens have one text, beside the likeliest ones: parts of other characters."""
    likeliest = ((EURO[0], -0.25), (0x80, -1.5), (ord("a"), -2.0), (0x81, -3.0), (256, -4.0), (300, -5.0))
    tokens = [GeneratedToken("x", byte, TokenLogprobs(-0.25, likeliest)) for byte in EURO]
    return GeneratedAnswer(["€"], tokens, "stop")


def test_of_tokens_with_one_text_the_likeliest_is_reported() -> None:
    form = CompletionForm(TokenWords(ByteTokenizer()), True)
    found = form.whole(0, answer_in_bytes())["logprobs"]["top_logprobs"]
    assert found == [{"\ufffd": -0.25, "a": -2.0, "": -4.0}] * 3


def test_a_part_of_a_character_has_its_own_bytes() -> None:
    form = ChatForm(TokenWords(ByteTokenizer()), True, AnswerParts())
    content = form.whole(0, answer_in_bytes())["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == EURO
    assert [entry["token"] for entry in content] == ["\ufffd"] * 3
    bytes_of_others = [entry["bytes"] for entry in content[0]["top_logprobs"]]
    assert bytes_of_others == [[EURO[0]], [0x80], [ord("a")], [0x81], [], None]  # 300 is no token of the tokenizer
