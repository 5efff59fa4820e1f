"""Special tokens of a served model: around prompts and in answers, as in transformers, and where tokens begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from serve_for_tests import RepeatingEngine, Served, serving
from tokenizers_for_tests import BEGINS, FAMILIES, TEMPLATE, theirs, write_family

from weft.data.special_tokens import named_tokens
from weft.data.tokenizer import REPLACEMENT, Tokenizer, load_tokenizer


class Family(NamedTuple):
    """A server whose model has the tokenizer of a family, its engine, and transformers' tokenizer."""

    served: Served
    engine: RepeatingEngine
    ours: Tokenizer
    reference: Any

    def post(self, path: str, **body: Any) -> Any:
        answer = self.served.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    folder = write_family(tmp_path_factory.mktemp(request.param), request.param, TEMPLATE)
    ours, engine = load_tokenizer(folder), RepeatingEngine()
    engine.vocab_size = ours.vocab_size  # type: ignore[misc]
    with serving(engine, template=TEMPLATE, tokenizer=ours, special=named_tokens(folder)) as served:
        yield Family(served, engine, ours, theirs(folder))


@pytest.mark.parametrize("adds", [None, True, False])
def test_prompts_have_the_tokens_of_transformers(family: Family, adds: bool | None) -> None:
    asked = {} if adds is None else {"add_special_tokens": adds}
    expected = family.reference("he a", add_special_tokens=adds is not False).input_ids
    assert family.post("/tokenize", prompt="he a", **asked)["tokens"] == expected
    found = family.post("/v1/completions", prompt="he a", max_tokens=1, **asked)
    assert family.engine.requests[-1].tokens == tuple(expected)
    assert found["usage"]["prompt_tokens"] == len(expected)
    found = family.post("/v1/embeddings", input=["he a"], **asked)["data"][0]["embedding"]
    assert found == pytest.approx([np.mean(expected), np.sum(expected)])
    assert family.post("/tokenize", prompt="he a", add_special_tokens=None)["tokens"] == (
        family.reference("he a").input_ids
    ), "null asks for nothing"


def test_chats_have_what_their_template_writes(family: Family) -> None:
    messages = [{"role": "user", "content": "he"}]
    expected = family.reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert family.post("/tokenize", messages=messages)["tokens"] == expected
    family.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert family.engine.requests[-1].tokens == tuple(expected)
    begin = [family.reference.bos_token_id] * bool(family.ours.before)
    assert expected[:1] == (begin or expected[:1])
    family.post("/v1/chat/completions", messages=messages, max_tokens=1, add_special_tokens=True)
    assert family.engine.requests[-1].tokens == (*begin, *expected), "asked for, there are two"


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_in_answers(family: Family, skips: bool) -> None:
    """The engine repeats the prompt, special tokens too."""
    first, second = (family.reference(text).input_ids for text in ("he a", "a"))
    tokens = [*first, family.reference.eos_token_id, *second]
    asked: dict[str, Any] = {"prompt": tokens, "max_tokens": len(tokens), "ignore_eos": True}
    found = family.post("/v1/completions", **asked, **({} if skips else {"skip_special_tokens": False}))
    both, once = (family.reference.decode(ids, skip_special_tokens=skips) for ids in (tokens * 2, tokens))
    assert found["choices"][0]["text"] == both[len(once) :]


def streamed(family: Family, **body: Any) -> tuple[str, list[int]]:
    """The text and the offsets of a stream."""
    lines = family.served.post("/v1/completions", {**body, "stream": True}).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    offsets = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    return "".join(part["text"] for part in parts), offsets


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_offsets_are_places_in_the_whole_text(family: Family, echo: bool, as_tokens: bool) -> None:
    """A character may be of several tokens, and a special token has no text."""
    text = "he € a🙂é"
    tokens = family.reference(text).input_ids
    asked = {"prompt": tokens if as_tokens else text, "max_tokens": 2 * len(tokens), "logprobs": 0, "echo": echo}
    (found,) = family.post("/v1/completions", **asked)["choices"]
    offsets = found["logprobs"]["text_offset"]
    given = tokens * (3 if echo else 2)
    behind = [] if echo else tokens
    assert len(offsets) == len(given)
    for number, offset in enumerate(offsets):
        befores = (family.ours.decode([*behind, *given[:end]]) for end in range(number, -1, -1))
        whole = next(text for text in befores if not text.endswith(REPLACEMENT))  # else it ends within a character
        assert offset == len(whole) - len(family.ours.decode(behind)), number
    assert streamed(family, **asked) == (found["text"], offsets)


def test_an_echo_is_the_text_that_was_given(family: Family) -> None:
    end = family.reference.eos_token
    (found,) = family.post("/v1/completions", prompt=f"he{end}a", echo=True, max_tokens=0, logprobs=0)["choices"]
    assert found["text"] == f"he{end}a"
    begins = [0] if BEGINS and family.ours.before else []
    words = found["logprobs"]["tokens"][len(begins) :]
    starts = [0, *np.cumsum([len(word) for word in words])[:-1].tolist()]
    assert found["logprobs"]["text_offset"][-1] == len(f"he{end}")
    if "he" in words:
        assert found["logprobs"]["text_offset"] == [*begins, *starts]
