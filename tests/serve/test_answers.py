"""Answers in OpenAI's form, where tokens are parts of characters or have equal texts."""

from __future__ import annotations

from weft.data.tokenizer import ByteTokenizer
from weft.serve.http.answers import ChatForm, CompletionForm, GeneratedAnswer, TokenWords
from weft.serve.scheduling.request import GeneratedToken, TokenLogprobs

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
    form = ChatForm(TokenWords(ByteTokenizer()), True)
    content = form.whole(0, answer_in_bytes())["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == EURO
    assert [entry["token"] for entry in content] == ["\ufffd"] * 3
    bytes_of_others = [entry["bytes"] for entry in content[0]["top_logprobs"]]
    assert bytes_of_others == [[EURO[0]], [0x80], [ord("a")], [0x81], [], None]  # 300 is no token of the tokenizer
