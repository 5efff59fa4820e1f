"""Other clients are answered while the server parses a large body, or writes an answer with log-probabilities."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serve_for_tests import RepeatingEngine, Served, is_in_event_loop, serving

from weft.data.tokenizer import ByteTokenizer
from weft.serve.http import answers, end_points, request_body, running_answer
from weft.serve.http.answers import ChatForm, CompletionForm, TokenWords
from weft.serve.http.chat_body import ChatBody
from weft.serve.http.request_body import ApiError, CompletionBody, EmbeddingsBody
from weft.serve.text import ServedModel


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(RepeatingEngine()) as found:
        yield found


class Places:
    """Where functions were called: whether in the event loop, by their names."""

    def __init__(self) -> None:
        self.seen: dict[str, set[bool]] = {}

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.seen.setdefault(function.__name__, set()).add(is_in_event_loop())
            return function(*arguments, **options)

        return watched


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"prompt": "ab", "logprobs": 2, "n": 2}, {"parse_body", "whole", "json_text"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True}, {"parse_body", "whole", "json_text"}),
        ("/v1/completions", {"prompt": "ab", "logprobs": 2, "echo": True, "stream": True}, {"parse_body", "first"}),
        ("/v1/embeddings", {"input": "ab"}, {"parse_body"}),
        ("/tokenize", {"prompt": "ab"}, {"parse_body"}),
        ("/tokenize", {"messages": MESSAGES}, {"parse_body", "messages_of"}),
    ],
)
def test_large_bodies_and_answers_are_read_and_written_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], names: set[str]
) -> None:
    places = Places()
    for owner, name in (
        (end_points, "parse_body"),
        (end_points, "messages_of"),
        (running_answer, "json_text"),
        (CompletionForm, "whole"),
        (CompletionForm, "first"),
        (ChatForm, "whole"),
    ):
        monkeypatch.setattr(owner, name, places.watch(getattr(owner, name)))
    assert served.post(path, body).status_code == 200
    assert places.seen == {name: {False} for name in names}


def test_a_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[list[int]]()

    def decode(ids: Any, skip_special_tokens: bool) -> str:
        asked.append(np.asarray(ids).tolist())
        return ByteTokenizer().decode(ids)

    words = TokenWords(SimpleNamespace(decode=decode))  # type: ignore[arg-type]
    assert [words[token] for token in b"abab"] == ["a", "b", "a", "b"]
    assert asked == [[97], [98]]


def test_a_server_decodes_a_token_once_for_all_its_answers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[TokenWords]()

    def watched(words: TokenWords, *rest: Any) -> CompletionForm:
        made.append(words)
        return CompletionForm(words, *rest)

    monkeypatch.setattr(end_points, "CompletionForm", watched)
    for _ in range(2):
        found = served.post("/v1/completions", {"prompt": "ab", "logprobs": 1}).json()["choices"][0]["logprobs"]
        assert found["tokens"][:2] == ["a", "b"]
    assert made[0] is made[1]


def test_a_body_of_parts_is_json() -> None:
    assert answers.json_body({"a": "é"}, "parts", ['{"b":1}', "2"]) == '{"a":"é","parts":[{"b":1},2]}'.encode()


LARGE_BODIES: list[tuple[type[Any], str, str]] = [
    (CompletionBody, '{"prompt": [%s]}', "[]"),
    (CompletionBody, '{"prompt": [%s]}', '{"a": [1]}'),
    (CompletionBody, '{"prompt": "x", "metadata": [%s]}', "[]"),
    (CompletionBody, '{"stop": [%s]}', '"a"'),
    (CompletionBody, '{"stop_token_ids": [%s]}', "1"),
    (ChatBody, '{"messages": [%s]}', '{"role": "user", "content": ""}'),
    (ChatBody, '{"tools": [%s]}', "{}"),
    (EmbeddingsBody, '{"input": [%s]}', "[1]"),
]


@pytest.mark.parametrize(("kind", "form", "entry"), LARGE_BODIES)
def test_too_many_values_are_refused_before_any_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], form: str, entry: str
) -> None:
    def not_yet(*_: object) -> None:
        raise AssertionError("values are looked at")

    monkeypatch.setattr(request_body, "build_dataclass", not_yet)
    with pytest.raises(ApiError, match="at most"):
        request_body.parse_body(kind, (form % ",".join([entry] * 100_000)).encode(), ("tiny",))


def test_brackets_in_texts_are_no_lists(served: Served) -> None:
    text = '\\"[{' * 30_000
    assert served.post("/tokenize", {"prompt": text, "messages": None}).json()["count"] == len(text)


def test_a_prompt_of_too_many_lists_is_refused_before_any_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> None:
        raise AssertionError("a text is encoded")

    monkeypatch.setattr(ServedModel, "encode", encode)
    refused = served.post("/v1/completions", {"prompt": ["a"] * 129})
    assert (refused.status_code, refused.json()["error"]["message"][:24]) == (400, "'prompt' has 129 prompts")


def test_large_bodies_wait_for_each_other_and_leave_other_threads_free(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, names = request_body.parse_body, list[str]()

    def watched(*given: Any) -> Any:
        names.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(end_points, "parse_body", watched)
    for size in (1, end_points.LARGE_BYTES):
        assert served.post("/tokenize", {"prompt": "x" * size}).status_code == 200
    assert [name.startswith("large bodies") for name in names] == [False, True]
