"""Other clients are answered while the server parses a large body, or writes an answer with log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serve_for_tests import RepeatingEngine, Served, serving

from weft.data.tokenizer import ByteTokenizer
from weft.serve.http import answers, end_points, running_answer
from weft.serve.http.answers import ChatForm, CompletionForm, TokenWords


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(RepeatingEngine()) as found:
        yield found


def is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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

    def decode(ids: Any) -> str:
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
