"""Tokens and targets of conversations, against transformers, for published templates on tokenizers of their shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from chat_templates_for_tests import PUBLISHED, Published
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import gpt2

from weft.data.chat import Packer
from weft.data.chat_template import ChatTemplate, load_template, training_time
from weft.data.conversations import ChatRenderer, Document
from weft.data.tokenizer import encode_text, load_tokenizer
from weft.errors import DataError
from weft.serve.http.request_body import messages_of
from weft.serve.text import ServedModel

Rows = Sequence[dict[str, Any]]
ENDS = ("</s>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>")
TAGGED = [name for name, published in PUBLISHED.items() if "endgeneration" in published.template]
OF_TRL = ["llama-3 tagged", "qwen2.5 tagged", "qwen3 tagged"]
REWRITING = ["qwen3", "r1-distill"]  # templates that write earlier messages in another way later
APPENDING = [name for name in PUBLISHED if name not in (*TAGGED, *REWRITING)]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    before = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return before + [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]


TWO_TURNS = chat("What is 2+2?", "4", "And 数 é?", "The answer is 42.")


class Setting:
    """A published template with its tokenizer: weft's renderer, and transformers' tokenizer."""

    def __init__(self, published: Published, folder: Path) -> None:
        path = str(published.write(folder))
        template = load_template(None, path, training_time)
        assert template is not None
        self.renderer, self.template = ChatRenderer(load_tokenizer(path), template), template
        self.theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(path)

    def asked(self, messages: Rows, tools: Any = None) -> list[int]:
        """What a server is asked with, by transformers."""
        ids: list[int] = self.theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        return ids

    def whole(self, messages: Rows, tools: Any = None) -> list[int]:
        ids: list[int] = self.theirs.apply_chat_template(messages, tools=tools, return_dict=False)
        return ids

    def generated(self, ids: list[int]) -> list[int]:
        """Returns what of an answer the model generates: up to a token that ends it."""
        ends = {self.theirs.convert_tokens_to_ids(text) for text in ENDS} - {None}
        number = next((number for number, token in enumerate(ids) if token in ends), len(ids) - 1)
        return ids[: number + 1]


@pytest.fixture(autouse=True)
def same_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates of transformers are told the date that weft writes into conversations to learn from."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=training_time))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Setting]:
    return cache(lambda name: Setting(PUBLISHED[name], tmp_path_factory.mktemp("published")))


def answers_of(documents: Sequence[Document]) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens of each answer, and those before it."""
    return [found for document in documents for found in _answers(document)]


def _answers(document: Document) -> Iterator[tuple[list[int], list[int]]]:
    begin = 0
    while True in document.is_target[begin:]:
        begin = document.is_target.index(True, begin)
        end = (*document.is_target, False).index(False, begin)
        yield document.ids[begin:end], document.ids[:begin]
        begin = end


def test_twelve_templates_have_masks_of_transformers() -> None:
    assert len({PUBLISHED[name].template for name in TAGGED}) >= 12


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("system", [None, "You are terse."])
def test_tagged_templates_have_the_masks_of_transformers(
    setting: Callable[[str], Setting], name: str, system: str | None
) -> None:
    own = setting(name)
    if system is not None and ("system" not in PUBLISHED[name].roles or name.startswith("mistral-0.3")):
        return  # Mistral's writes it before the last message only
    plain = PUBLISHED.get(name.removesuffix(" tagged"))
    # Of a text that begins with a blank, transformers marks nothing or what is before it, if the blank is in no token's
    # span or in that of a special token.
    odd = chat("a", " b\n" if name in OF_TRL else "b\n", "12", "345 ", "é", "数", system=system)
    for messages in (chat("2+2?", "4", system=system), TWO_TURNS, odd):
        if plain is not None and name not in OF_TRL:  # tags write nothing
            written = ChatTemplate(plain.template, own.theirs.special_tokens_map, name, training_time)
            assert own.template.render(messages) == written.render(messages)
        expected = own.theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        (found,) = own.renderer.documents({"messages": messages}, "")
        assert found.ids == expected["input_ids"]
        assert found.is_target == [one == 1 for one in expected["assistant_masks"]]
        assert 1 < sum(found.is_target) < len(found.ids)


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("system", [None, "You are terse."])
def test_one_document_has_all_answers_after_what_asks_for_them(
    setting: Callable[[str], Setting], name: str, system: str | None
) -> None:
    """Independently of characters: the tokens of prompts and whole conversations, by transformers."""
    if system is not None and ("system" not in PUBLISHED[name].roles or name == "mistral-0.3"):
        return  # Mistral's has its own test
    own, messages = setting(name), chat("What is 2+2?", "4", "And 数 é?", "The answer is 42.", system=system)
    (document,) = own.renderer.documents({"messages": messages}, "")
    assert document.ids == own.whole(messages)
    first = len(messages) - 4
    expected = []
    for number in (first + 1, first + 3):
        asked, whole = own.asked(messages[:number]), own.whole(messages[: number + 1])
        assert whole[: len(asked)] == asked
        expected.append((own.generated(whole[len(asked) :]), asked))
    found = answers_of([document])
    assert [(own.generated(answer), before) for answer, before in found] == expected
    rests = [own.theirs.decode(answer[len(own.generated(answer)) :]) for answer, _ in found]
    assert {rest.replace(PUBLISHED[name].eos, "").strip() for rest in rests} == {""}


@pytest.mark.parametrize("name", ["llama-2", "mistral-0.1", "zephyr", "tinyllama"])
def test_no_blank_is_doubled_before_a_second_answer(setting: Callable[[str], Setting], name: str) -> None:
    own = setting(name)
    (document,) = own.renderer.documents({"messages": TWO_TURNS}, "")
    words = own.theirs.convert_ids_to_tokens(document.ids)
    assert ("▁", "▁4") not in set(pairwise(words))
    assert ("▁", "▁The") not in set(pairwise(words))


contents = st.text(alphabet=" \nab24é数<.", min_size=1, max_size=6)


@given(data=st.data())
def test_tokens_before_an_answer_are_those_of_serving(setting: Callable[[str], Setting], data: st.DataObject) -> None:
    """Whatever the texts begin and end with, for every template and shape of a tokenizer."""
    name = data.draw(st.sampled_from([name for name in PUBLISHED if name not in TAGGED]))
    turns = data.draw(st.lists(st.tuples(contents, contents), min_size=1, max_size=3))
    own, messages = setting(name), chat(*(text for turn in turns for text in turn))
    served: Any = ServedModel("x", own.renderer.tokenizer, 100, 1000, frozenset(), None, own.template)  # type: ignore[arg-type]
    prompts = [list(served.encode_chat(messages_of(messages[:number]), ())) for number in range(1, len(messages), 2)]
    documents = own.renderer.documents({"messages": messages}, "")
    found = answers_of(documents)
    assert sorted(before for _, before in found) == sorted(prompts)
    if PUBLISHED[name].shape == "bytes":
        for answer, before in found:
            assert turns[prompts.index(before)][1].strip() in own.theirs.decode(answer)


def test_qwen3_learns_each_answer_after_what_serving_writes(setting: Callable[[str], Setting]) -> None:
    own = setting("qwen3")
    first = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    row = {"messages": [*chat("2+2?"), first, *chat("sure?", "<think>\nhm\n</think>\n\nyes")]}
    documents = own.renderer.documents(row, "")
    decode = own.theirs.decode
    ask, start = "<|im_start|>user\n2+2?<|im_end|>\n", "<|im_start|>assistant\n"
    again = f"{ask}{start}4<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n{start}"
    expected = [
        ("<think>\n2 and 2\n</think>\n\n4<|im_end|>\n", ask + start),
        ("<think>\nhm\n</think>\n\nyes<|im_end|>\n", again),
    ]
    assert [(decode(answer), decode(before)) for answer, before in answers_of(documents)] == expected
    for document, end in zip(documents, (2, 4), strict=True):
        assert document.ids == own.whole(row["messages"][:end])


def test_distills_of_r1_learn_after_the_reasoning_that_the_template_begins(setting: Callable[[str], Setting]) -> None:
    own = setting("r1-distill")
    texts = ("<think>\n2 and 2\n</think>\n\n4", "no reasoning", "only its end\n</think>\n\nyes")
    beside = {"role": "assistant", "content": "z", "reasoning_content": "w"}
    messages = [*chat("a", texts[0], "b", texts[1], "c", texts[2], "d"), beside]
    documents = own.renderer.documents({"messages": messages}, "")
    begin, end = "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>", "<｜end▁of▁sentence｜>"
    think, second = "<think>\n", f"{begin}\n\n4{end}<｜User｜>b<｜Assistant｜>"
    third = f"{second}no reasoning{end}<｜User｜>c<｜Assistant｜>"
    fourth = f"{third}\n\nyes{end}<｜User｜>d<｜Assistant｜>"
    found = [(own.theirs.decode(answer), own.theirs.decode(before)) for answer, before in answers_of(documents)]
    assert sorted(found) == sorted(
        [
            (f"2 and 2\n</think>\n\n4{end}", begin + think),
            (f"\n</think>\n\nno reasoning{end}", second + think),
            (f"only its end\n</think>\n\nyes{end}", third + think),
            (f"w\n</think>\n\nz{end}", fourth + think),
        ]
    )
    prompts = [own.asked(messages[:number]) for number in (1, 3, 5, 7)]
    assert sorted(before for _, before in answers_of(documents)) == sorted(prompts)


def test_older_distills_keep_the_reasoning_that_their_template_leaves_out(setting: Callable[[str], Setting]) -> None:
    own = setting("r1-distill")
    source = PUBLISHED["r1-distill"].template.replace("<｜Assistant｜><think>\\n", "<｜Assistant｜>")
    renderer = ChatRenderer(own.renderer.tokenizer, ChatTemplate(source, {}, "the test"))
    answer = "<think>\nab\n</think>\n\n4"
    ((found, _),) = answers_of(renderer.documents({"messages": chat("a", answer)}, ""))
    assert own.theirs.decode(found) == f"{answer}<｜end▁of▁sentence｜>"


def test_mistrals_system_message_is_before_the_answer_as_at_serving(setting: Callable[[str], Setting]) -> None:
    own, messages = setting("mistral-0.3"), chat("a", "b", "c", "d", system="be kind")
    found = answers_of(own.renderer.documents({"messages": messages}, ""))
    assert [before for _, before in found] == [own.asked(messages[:2]), own.asked(messages[:4])]
    assert all("be kind" in own.theirs.decode(before) for _, before in found)
    assert [own.theirs.decode(answer).strip() for answer, _ in found] == ["b</s>", "d</s>"]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "tool" in PUBLISHED[name].roles and name not in TAGGED])
@pytest.mark.parametrize("form", ["objects", "texts"])
def test_tools_and_their_calls_reach_the_template(setting: Callable[[str], Setting], name: str, form: str) -> None:
    """Tools as a list or as JSON text, arguments as an object or as the JSON text that OpenAI has."""
    own, tools, call = setting(name), TOOLS, CALL
    messages = [
        *chat("2+2?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    row: dict[str, Any] = {"messages": messages, "tools": tools}
    if form == "texts":
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}  # type: ignore[dict-item]
        row = {
            "messages": [messages[0], {**messages[1], "tool_calls": [{**call, "function": function}]}, *messages[2:]]
        }
        row["tools"] = json.dumps(tools)
    found = answers_of(own.renderer.documents(row, ""))
    assert len(found) == 2
    if name != "r1-distill":  # its template wants arguments as text, and writes no tools
        assert [before for _, before in found] == [own.asked(messages[:1], tools), own.asked(messages[:3], tools)]
        assert '"name": "add"' in own.theirs.decode(found[0][1])
    assert "add" in own.theirs.decode(found[0][0])
    assert "4." in own.theirs.decode(found[1][0])
    assert not any("None" in own.theirs.decode(document.ids) for document in own.renderer.documents(row, ""))


# --- rows


def words(own: Setting, row: dict[str, Any]) -> list[str]:
    return [own.theirs.decode(answer) for answer, _ in answers_of(own.renderer.documents(row, ""))]


@pytest.mark.parametrize("name", ["llama-3", "llama-3 tagged", "qwen3"])
def test_messages_of_weight_0_are_no_targets(setting: Callable[[str], Setting], name: str) -> None:
    own, messages = setting(name), chat("a", "bad", "c", "good")
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    (found,) = words(own, {"messages": messages})
    assert "good" in found
    assert "bad" not in found
    assert own.renderer.documents({"messages": [{**message, "weight": 0} for message in messages]}, "") == []
    with pytest.raises(DataError, match=r"x, line 3: 'weight' of message 2 is 0\.5; 1 trains on it, and 0 does not"):
        own.renderer.documents({"messages": [messages[0], {**messages[1], "weight": 0.5}]}, "x, line 3")


def test_content_may_be_parts_of_text(setting: Callable[[str], Setting]) -> None:
    own = setting("llama-3")
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "answer"}]
    row = {"messages": [*chat("a"), {"role": "assistant", "content": parts}]}
    assert own.renderer.documents(row, "") == own.renderer.documents({"messages": chat("a", "The answer")}, "")
    parts.append({"type": "image_url", "url": "x"})
    with pytest.raises(DataError, match=r"line 2: 'messages\[1\]\.content' has a part that is no text"):
        own.renderer.documents(row, "line 2")


@pytest.mark.parametrize(
    ("row", "refusal"),
    [
        ({"messages": [*chat("a"), {"role": "assistant", "content": None}]}, r"'messages\[1\]\.content' is None"),
        (
            {"messages": [*chat("a"), {"role": "assistant", "content": "", "function_call": {}}]},
            r"'messages\[1\]\.function_call' is an old form",
        ),
        ({"messages": chat("a", "b"), "functions": [{}]}, "'functions' is an old form of 'tools'"),
        ({"messages": chat("a", "b"), "tools": "{"}, r"'tools' is '\{'; it must be a list of JSON schemas"),
        ({"messages": chat("a", "b"), "tools": ["add"]}, r"'tools' is \['add'\]; it must be a list"),
        ({"prompt": "a", "completion": chat("b", "c")}, "'prompt' is a text, and 'completion' a list of messages who"),
        ({"prompt": chat("a"), "completion": "b"}, "'prompt' is a list and 'completion' a str; give two texts, or two"),
        ({"prompt": chat("a"), "completion": chat("b", "c")}, "'completion' begins with a message of the user that"),
    ],
)
def test_rows_that_would_be_read_wrongly_are_refused(
    setting: Callable[[str], Setting], row: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(DataError, match=f"line 1: {refusal}"):
        setting("llama-3").renderer.documents(row, "line 1")


def test_conversations_of_odd_forms(setting: Callable[[str], Setting]) -> None:
    """They end with the user, begin with the assistant, or have several messages of one role in a row."""
    own = setting("llama-3")
    (document,) = own.renderer.documents({"messages": chat("a", "b", "c")}, "")
    assert document.ids == own.whole(chat("a", "b", "c"))
    assert words(own, {"messages": chat("a", "b", "c")}) == ["b<|eot_id|>"]
    assert words(own, {"messages": [{"role": "assistant", "content": "hi"}, *chat("a", "b")]}) == ["b<|eot_id|>"]
    answer = {"role": "assistant", "content": "b"}
    assert words(own, {"messages": [*chat("x"), *chat("a"), answer, answer]}) == ["b<|eot_id|>"] * 2
    assert own.renderer.documents({"messages": chat("a")}, "") == []


def test_phi_3_ends_only_the_last_answer_with_its_second_end(setting: Callable[[str], Setting]) -> None:
    assert words(setting("phi-3"), {"messages": TWO_TURNS}) == [" 4<|end|>", " The answer is 42.<|end|><|endoftext|>"]


def test_an_end_that_is_written_only_after_the_last_answer_is_learnt_for_each() -> None:
    """Without an end of its own an answer that is not the last would never end."""
    source = (
        "{% for m in messages %}{{ m.content }}{{ '|' if m.role == 'user' }}{% endfor %}"
        "{{ '' if add_generation_prompt else eos_token }}"
    )
    renderer = ChatRenderer(load_tokenizer("bytes"), ChatTemplate(source, {"eos_token": "~"}, "the test"))
    documents = renderer.documents({"messages": chat("a", "b", "c", "d")}, "")
    assert [bytes(document.ids).decode() for document in documents] == ["a|b~", "a|bc|d~"]
    assert [bytes(answer) for answer, _ in answers_of(documents)] == [b"b~", b"d~"]


def test_texts_have_the_tokens_of_their_prompt(setting: Callable[[str], Setting]) -> None:
    """A token that would hold the prompt's last blank and the completion's first letters is not used."""
    for name, prompt, completion in (
        ("llama-3", "The answer is ", "4"),
        ("llama-3", "12", "345"),
        ("llama-2", "The answer is ", "The"),
        ("tinyllama", "2+2? ", "4"),
        ("phi-3", "a<|end|>", "  b"),
        ("gemma-2", "a\n", "\nb"),
    ):
        own = setting(name)
        ((answer, before),) = answers_of(own.renderer.documents({"prompt": prompt, "completion": completion}, ""))
        assert before == encode_text(own.renderer.tokenizer, prompt), name
        assert own.theirs.decode(answer[:-1]).strip() == completion.strip(), name
        assert answer[-1] == own.renderer.tokenizer.end


@pytest.mark.parametrize("blanks", ["\n\n", "  ", "\n\n\n"])
def test_blanks_before_an_answer_are_the_tokens_of_serving(tmp_path: Path, blanks: str) -> None:
    """GPT-2's expression cuts blanks in another way where a text goes on, so that no token holds both sides."""
    gpt2(["ĊĊ", "ĠĠ"]).save(str(tmp_path / "tokenizer.json"))
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A:"
        + repr(blanks).join(("{{ ", " }}"))
        + "{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    )
    template, tokenizer = ChatTemplate(source, {}, "x"), load_tokenizer(tmp_path)
    renderer = ChatRenderer(tokenizer, template)
    for messages in (chat("a", "b"), chat("a", "b", "c", "d")):
        found = answers_of(renderer.documents({"messages": messages}, ""))
        asked = [template.render(messages[:number], asks=True) for number in range(1, len(messages), 2)]
        assert [before for _, before in found] == [encode_text(tokenizer, text) for text in asked]
        texts = [tokenizer.decode(np.array(answer)) for answer, _ in found]
        assert texts == [message["content"] for message in messages[1::2]]
    row = {"prompt": f"a:{blanks}", "completion": "b"}
    ((_, before),) = answers_of(renderer.documents(row, ""))
    assert before == encode_text(tokenizer, row["prompt"])


# --- preferences


def pair(own: Setting, row: dict[str, Any]) -> list[tuple[str, str]]:
    both = own.renderer.pair(row, "line 1")
    return [
        (own.theirs.decode(before), own.theirs.decode(answer)) for found in both for answer, before in answers_of(found)
    ]


def test_preferences_with_whole_conversations_have_the_prompt_once(setting: Callable[[str], Setting]) -> None:
    own = setting("llama-3")
    chosen, rejected = chat("2+2?", "4"), chat("2+2?", "5")
    expected = pair(own, {"prompt": chat("2+2?"), "chosen": chosen[1:], "rejected": rejected[1:]})
    assert [answer for _, answer in expected] == ["4<|eot_id|>", "5<|eot_id|>"]
    assert expected[0][0].count("2+2?") == 1
    for prompt in ({"prompt": "2+2?"}, {"prompt": chat("2+2?")}, {}):
        assert pair(own, {**prompt, "chosen": chosen, "rejected": rejected}) == expected
    assert pair(own, {"chosen": chosen, "rejected": chosen})[1] == expected[0]
    system = chat("2+2?", "4", system="be kind")
    assert "be kind" in pair(own, {"prompt": "2+2?", "chosen": system, "rejected": system})[0][0]


@pytest.mark.parametrize(
    ("row", "refusal"),
    [
        (
            {"prompt": "a", "chosen": chat("other", "b"), "rejected": chat("a", "c")},
            "'chosen' a list of messages whose",
        ),
        ({"prompt": "a", "rejected": "b"}, "it has no 'chosen'; a preference has"),
        ({"chosen": "b", "rejected": "c"}, "it has no 'prompt'; only lists of messages may"),
        ({"chosen": chat("a", "b"), "rejected": chat("c", "d")}, "have no message in common before their answers"),
        (
            {"prompt": chat("a"), "chosen": "b", "rejected": "c"},
            "'prompt' is a list and 'chosen' a str; give two texts",
        ),
    ],
)
def test_preferences_that_are_not_understood_are_refused(
    setting: Callable[[str], Setting], row: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{refusal}"):
        setting("llama-3").renderer.pair(row, "line 1")


def test_a_side_of_a_preference_is_one_text(setting: Callable[[str], Setting]) -> None:
    turns = chat("a", "b", "c", "d")
    row = {"prompt": chat("a"), "chosen": turns, "rejected": chat("a", "x")}
    assert len(pair(setting("llama-3"), row)) == 3
    with pytest.raises(DataError, match="'chosen' has 2 answers that the template writes after different texts"):
        setting("qwen3").renderer.pair(row, "line 1")


# --- packing


def test_documents_of_a_conversation_are_packed_and_counted(setting: Callable[[str], Setting]) -> None:
    own = setting("qwen3")
    row = {"messages": chat("a", "b", "c", "d")}
    lengths = [len(document.ids) for document in own.renderer.documents(row, "")]
    for length, expected, documents in ((100, "whole", 2), (lengths[0] - 1, "cut", 1), (4, "left out", 0)):
        packer = Packer(length)
        assert packer.add(own.renderer, row, "") == expected
        assert packer.num_documents == documents


def written(source: str, *messages: dict[str, Any]) -> str:
    """The answer that is learnt from a conversation with a template."""
    renderer = ChatRenderer(load_tokenizer("bytes"), ChatTemplate(source, {}, "the test"))
    ((answer, _),) = answers_of(renderer.documents({"messages": [*chat("a"), *messages]}, ""))
    return bytes(answer).decode()


def test_absent_content_is_not_written_as_a_word() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}|{% endfor %}"
    assert written(source, {"role": "assistant", "content": None, "tool_calls": ["add"]}) == "['add']|"


def test_no_reasoning_is_put_where_the_template_asks_without() -> None:
    source = (
        "{% for m in messages %}{{ '>' if m.role == 'user' else '</think>' }}{{ m.content.split('</think>')[-1] }}"
        "{% endfor %}{{ '</think>' if add_generation_prompt }}"
    )
    assert written(source, {"role": "assistant", "content": "<think>x</think>4"}) == "4"
