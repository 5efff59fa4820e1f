"""Text from tokens as they come: equal to the text of all tokens, cut before a stop string."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from serving_for_tests import tiny_model

from weft.data.tokenizer import REPLACEMENT, ByteTokenizer, Tokenizer, encode_text, load_tokenizer
from weft.errors import DataError
from weft.serve.generate import generate
from weft.serve.scheduling.request import GeneratedToken, Request
from weft.serve.text import Detokenizer, StopStrings, StopTable, TextStream, token_offsets

SOME_BYTES = st.lists(
    st.one_of(st.integers(0, 256), st.sampled_from(list("€é😀a ".encode()))), max_size=30
)  # whole and broken characters


@given(SOME_BYTES, SOME_BYTES)
def test_the_texts_of_tokens_are_together_the_text_of_all(prompt: list[int], tokens: list[int]) -> None:
    """After a prompt that ends with a whole character, which any text does."""
    prompt = [*prompt, ord(".")]
    detokenizer = Detokenizer(ByteTokenizer(), prompt)
    parts = [detokenizer.push(token) for token in tokens]
    assert "".join(parts) + detokenizer.flush() == ByteTokenizer().decode(np.array(tokens, dtype=np.int64))


def test_no_part_of_a_character_is_returned() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [ord("a")])
    assert [detokenizer.push(token) for token in "x€😀".encode()] == ["x", "", "", "€", "", "", "", "😀"]


def test_bytes_that_are_no_characters_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [])
    assert "".join(detokenizer.push(0x80) for _ in range(100)) == REPLACEMENT * 99


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer as Llama 2's: spaces are part of words, the first one of a text is left out, bytes for the rest."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "▁"]
    vocab = [(word, 0.0) for word in words]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return load_tokenizer(path)


def test_spaces_between_words_are_kept(word_tokenizer: Tokenizer) -> None:
    prompt, new = word_tokenizer.encode("hello").tolist(), word_tokenizer.encode("world hello").tolist()
    detokenizer = Detokenizer(word_tokenizer, prompt)
    assert "".join(map(detokenizer.push, new)) + detokenizer.flush() == " world hello"


def test_characters_of_byte_tokens_are_whole(word_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(word_tokenizer, word_tokenizer.encode("hello").tolist())
    parts = [detokenizer.push(1 + byte) for byte in "é€😀".encode()]
    assert [part for part in parts if part] == ["é", "€", "😀"]


def test_the_bytes_of_tokens_that_are_parts_of_characters(word_tokenizer: Tokenizer) -> None:
    assert [word_tokenizer.token_bytes(1 + byte) for byte in "€".encode()] == [b"\xe2", b"\x82", b"\xac"]
    bytes_alone = ByteTokenizer()
    assert [bytes_alone.token_bytes(token) for token in (0xE2, 256, 300)] == [b"\xe2", None, None]


def test_the_bytes_of_tokens_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({word: place for place, word in enumerate([*letters, "</s>", REPLACEMENT])}, []))
    backend.add_special_tokens(["</s>", REPLACEMENT])
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    found = [tokenizer.token_bytes(token) for token in range(len(letters))]
    assert sorted(one for one in found if one is not None) == [bytes([byte]) for byte in range(256)]
    for token, one in enumerate(found):
        assert one is not None
        assert tokenizer.decode(np.array([token])) == one.decode(errors="replace")
    assert tokenizer.token_bytes(len(letters) + 1) == REPLACEMENT.encode()
    assert tokenizer.token_bytes(len(letters) + 9) is None


def test_a_prompt_that_has_no_encoding_is_refused() -> None:
    with pytest.raises(DataError, match="half of a surrogate pair"):
        generate(tiny_model("llama"), ByteTokenizer(), "a\udcff", num_tokens=1)


def test_a_text_that_a_tokenizer_file_cannot_encode_is_refused(word_tokenizer: Tokenizer) -> None:
    """The tokenizers library takes it for no text at all."""
    with pytest.raises(DataError, match="half of a surrogate pair"):
        encode_text(word_tokenizer, "hello\ud800")


def tokens_in_words(text: str) -> list[int]:
    """The tokens of a text as `word_tokenizer` has them: words, and bytes for characters that are no word."""
    words = {" hello": 257, " world": 258, " ": 259}
    found = list[int]()
    while text:
        word = next((word for word in words if text.startswith(word)), None)
        found += [1 + byte for byte in text[0].encode()] if word is None else [words[word]]
        text = text[len(word or text[0]) :]
    return found


def check_streamed(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    """Streamed text is the whole text behind that of the prompt, character by character."""
    before, after = tokens_in_words(prompt), tokens_in_words(answer)
    whole = tokenizer.decode(np.array(before + after, dtype=np.int64))
    detokenizer = Detokenizer(tokenizer, before)
    parts = [detokenizer.push(token) for token in after]
    assert "".join(parts) + detokenizer.flush() == whole[len(tokenizer.decode(np.array(before, dtype=np.int64))) :]
    assert REPLACEMENT not in "".join(parts)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("prompt", ["é" * 9, " hello" + "€" * 3, "€" * 20, "😀" * 20, "é😀€" * 5, "€" * 3 + " hello"])
@pytest.mark.parametrize("answer", ["ééé", "€€€ hello€", "😀" * 5, " world é€😀€é"])
def test_a_prompt_may_end_in_characters_of_byte_tokens(word_tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    """Its last tokens may begin within a character, beside which the tokenizer writes no other."""
    check_streamed(word_tokenizer, prompt, answer)


IN_WORDS = st.lists(st.sampled_from([" hello", " world", " ", "é", "€", "😀", "a"]), max_size=20).map("".join)


@given(IN_WORDS, IN_WORDS)
def test_texts_of_words_and_byte_tokens_are_together_the_text_of_all(
    word_tokenizer: Tokenizer, prompt: str, answer: str
) -> None:
    check_streamed(word_tokenizer, f" hello{prompt}", answer)


def test_characters_are_whole_again_behind_bytes_that_are_none(word_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(word_tokenizer, tokens_in_words(" hello"))
    given = [1 + 0x80] * 9 + tokens_in_words("€" * 9)
    text = "".join(detokenizer.push(token) for token in given) + detokenizer.flush()
    assert text.strip(REPLACEMENT) == "€" * len(text.strip(REPLACEMENT))
    assert len(text.strip(REPLACEMENT)) >= 7


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_beginning_of_a_character_does_not_change_those_before_it(word_tokenizer: Tokenizer, cut: int) -> None:
    """An answer ends in the middle of a character if it has as many tokens as it may have."""
    detokenizer = Detokenizer(word_tokenizer, tokens_in_words(" hello"))
    parts = [detokenizer.push(token) for token in tokens_in_words("é😀")[: 2 + cut]]
    assert "".join(parts) == "é"
    assert detokenizer.flush() == REPLACEMENT * cut


def plain_search(text: str, stops: list[str]) -> int | None:
    """Where the stop string begins that is complete first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        sizes = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if sizes:
            return end - max(sizes)
    return None


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=7), max_size=4),
    st.lists(st.integers(0, 5), max_size=15),
)
@example("aab", ["ab", "b"], [])  # of two that end together, before the longer one
def test_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    end = plain_search(text, stops)
    filtered, parts, done = StopStrings(StopTable(stops)), "", 0
    for size in [*sizes, *[1] * (len(text) // 2), len(text)]:
        parts, done = parts + filtered.push(text[done : done + size]), done + size
        longest = max((n for stop in stops for n in range(len(stop)) if text[:done].endswith(stop[:n])), default=0)
        if end is None:
            assert parts == text[: min(done, len(text)) - longest]  # nothing else is held back
    parts += filtered.flush()
    assert (parts, filtered.is_stopped) == (text[:end], end is not None)


class CountedText(str):
    """A text that counts the reads of its characters."""

    num_reads = 0

    def __getitem__(self, place: Any) -> str:
        CountedText.num_reads += 1
        return super().__getitem__(place)


def test_long_stop_strings_that_nearly_match_cost_a_few_reads_for_each_character() -> None:
    """They were compared with the whole text held back, for every token, and no other client was answered."""
    stops = [CountedText("a" * size + "b") for size in range(900, 916)]
    filtered = StopStrings(StopTable(stops))
    CountedText.num_reads = 0
    for _ in range(2000):
        assert filtered.push("a") in ("", "a")
    assert not filtered.is_stopped
    assert 0 < CountedText.num_reads <= 4 * len(stops) * 2000


def test_a_stop_string_ends_a_request_before_its_tokens_do() -> None:
    stream = TextStream(ByteTokenizer(), Request("a", (65,), 9), StopTable(["END"]))
    chunks = [stream.push(GeneratedToken("a", token)) for token in b"xEND"]
    assert [chunk.text for chunk in chunks] == ["x", "", "", ""]
    assert [chunk.finish for chunk in chunks] == [None, None, None, "stop"]


def test_the_end_of_a_request_returns_what_was_held_and_no_stop_token() -> None:
    stream = TextStream(ByteTokenizer(), Request("a", (65,), 9, stop_tokens=frozenset({10})), StopTable(["END"]))
    chunks = [stream.push(GeneratedToken("a", token)) for token in b"xEN"]
    last = stream.push(GeneratedToken("a", 10, finish="stop"))
    assert "".join(chunk.text for chunk in chunks) == "x"
    assert (last.text, last.finish) == ("EN", "stop")


def plain_offsets(data: bytes) -> list[int]:
    """The character that each byte is of, in the text of all bytes, where bytes that are no character are one each."""
    found, begin = list[int](), 0
    for number, character in enumerate(_text(data)):  # each takes the fewest bytes that make a text of this length
        size = next(size for size in range(1, 5) if _is_character(data[begin : begin + size], data[begin:], character))
        found += [number] * size
        begin += size
    assert begin == len(data)
    return found


def _is_character(piece: bytes, rest: bytes, character: str) -> bool:
    return _text(piece) == character and _text(rest)[1:] == _text(rest[len(piece) :])


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


BYTES = st.lists(st.sampled_from([*"aé€😀".encode(), 0xFF, 0xE2, *b"xyz"]), max_size=24).map(bytes)


@given(BYTES)
def test_offsets_of_bytes_are_those_of_the_characters_that_they_are_of(data: bytes) -> None:
    assert token_offsets(ByteTokenizer(), list(data), True) == plain_offsets(data)


@given(IN_WORDS, IN_WORDS)
def test_offsets_of_words_and_byte_tokens(word_tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    """Each token begins where the text of those before it ends; bytes of a character, where it begins."""
    detokenizer, expected = Detokenizer(word_tokenizer, tokens_in_words(f" hello{prompt}")), list[int]()
    found = []
    for token in tokens_in_words(answer):
        detokenizer.push(token)
        found.append(detokenizer.offset)
    text = answer
    while text:
        word = next((word for word in (" hello", " world", " ") if text.startswith(word)), None)
        expected += [len(answer) - len(text)] * (len(text[0].encode()) if word is None else 1)
        text = text[len(word or text[0]) :]
    assert found == expected
