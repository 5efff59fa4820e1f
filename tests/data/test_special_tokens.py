"""Special tokens: those that surround texts, and those that end them, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors
from tokenizers_for_tests import BEGINS, ENDS, FAMILIES, TEMPLATE, theirs, write_family

from weft.data.chat_template import load_template
from weft.data.conversations import ChatRenderer
from weft.data.sources import documents
from weft.data.special_tokens import named_tokens, stated_end_tokens
from weft.data.tokenizer import FileTokenizer, encode_text, load_tokenizer, marks_in_words
from weft.data.tokens import token_cache
from weft.errors import DataError

TEXTS = ["", "he a", " a he", "é € 🙂", "he</s>a<|im_end|> <|eot_id|>he", "<s> a", "\n\n he"]


def load(folder: Path, **options: Any) -> FileTokenizer:
    tokenizer = load_tokenizer(folder, **options)
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_have_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family)
    ours, reference = load(folder), theirs(folder)
    assert bool(ours.before) == bool(BEGINS[family]), "the families differ in what they put before a text"
    for text in TEXTS:
        for adds in (True, False):
            assert encode_text(ours, text, adds) == reference(text, add_special_tokens=adds).input_ids, text
        assert encode_text(ours, text) == reference(text).input_ids
        for skips in (True, False):
            ids = reference(text).input_ids
            assert ours.decode(ids, skips) == reference.decode(ids, skip_special_tokens=skips), text
    without = load(folder, adds_special_tokens=False)
    assert encode_text(without, "he") == encode_text(ours, "he", False)
    assert encode_text(without, "he", True) == encode_text(ours, "he"), "a request may ask for them"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_is_the_one_that_the_files_name(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family)
    tokenizer = load(folder)
    assert tokenizer.end == theirs(folder).eos_token_id
    assert tokenizer.end_token == ENDS[family]


def write(folder: Path, name: str, **table: Any) -> None:
    (folder / name).write_text(json.dumps(table))


@pytest.mark.parametrize("lists_added_tokens", [False, True])
@pytest.mark.parametrize("as_table", [False, True])
def test_files_are_read_in_the_order_of_transformers(tmp_path: Path, lists_added_tokens: bool, as_table: bool) -> None:
    folder = write_family(tmp_path, "qwen")

    def token(text: str) -> Any:
        return {"__type": "AddedToken", "content": text, "lstrip": False} if as_table else text

    table = {"eos_token": token("<|im_end|>"), "tokenizer_class": "PreTrainedTokenizerFast"}
    added = {"256": {"content": "<|endoftext|>", "special": True}}
    write(folder, "tokenizer_config.json", **table, **({"added_tokens_decoder": added} if lists_added_tokens else {}))
    other = {"content": "<|im_start|>", "lstrip": False} if as_table else "<|im_start|>"
    write(folder, "special_tokens_map.json", eos_token=other, pad_token="<|endoftext|>")
    reference = theirs(folder)
    assert reference.eos_token == ("<|im_end|>" if lists_added_tokens else "<|im_start|>")
    assert load(folder).end == reference.eos_token_id
    assert named_tokens(folder) == reference.special_tokens_map


def test_a_token_that_only_the_files_name_is_special(tmp_path: Path) -> None:
    """`he` is a word of the vocabulary. As the end it is one token in every text, and has no text of its own."""
    folder = write_family(tmp_path, "llama3")
    write(folder, "tokenizer_config.json", eos_token="he", tokenizer_class="PreTrainedTokenizerFast")
    ours, reference = load(folder), theirs(folder)
    assert (ours.end, ours.vocab_size) == (257, len(reference))
    for text in ("he", "ahe", "he he"):
        assert encode_text(ours, text) == reference(text).input_ids
        for skips in (True, False):
            ids = encode_text(ours, text)
            assert ours.decode(ids, skips) == reference.decode(ids, skip_special_tokens=skips)
    write_family(folder, "llama3")
    assert load(folder).fingerprint != ours.fingerprint


@pytest.mark.parametrize(
    "table",
    [
        {"additional_special_tokens": ["he"]},
        {"extra_special_tokens": ["he"]},
        {"extra_special_tokens": {"image_token": "he"}},
        {"image_token": "he"},
        {"mask_token": {"__type": "AddedToken", "content": "he", "lstrip": True, "normalized": False}},
        {"added_tokens_decoder": {"257": {"content": "he", "special": True, "rstrip": True}}},
        {"added_tokens_decoder": {"257": {"content": "he", "special": False, "single_word": True}}},
        {"added_tokens_decoder": {"257": {"content": "he", "special": False}}, "pad_token": "he"},
    ],
)
def test_all_tokens_that_the_files_list_are_as_in_transformers(tmp_path: Path, table: dict[str, Any]) -> None:
    """`he` is a word of the vocabulary, and after one it is cut as a word. Not only tokens with names are special."""
    folder = write_family(tmp_path, "qwen")
    given = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", **given, **table)
    ours, reference = load(folder), theirs(folder)
    for text in ("a he b", "a  he  a", "she hehe", "he"):
        ids = reference(text).input_ids
        assert encode_text(ours, text) == ids, text
        for skips in (True, False):
            assert ours.decode(ids, skips) == reference.decode(ids, skip_special_tokens=skips), text


def test_a_vocabulary_without_the_letter_a_has_its_tokens_around_texts(tmp_path: Path) -> None:
    """Weft asks what comes before and after a text with a text of its own, which may have no token here."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"C": 0, "G": 1, "[B]": 2, "[E]": 3}, []))
    backend.add_special_tokens(["[B]", "[E]"])
    backend.post_processor = processors.TemplateProcessing(single="[B] $A [E]", special_tokens=[("[B]", 2), ("[E]", 3)])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", eos_token="[E]", tokenizer_class="PreTrainedTokenizerFast")
    assert encode_text(load(tmp_path), "CG") == theirs(tmp_path)("CG").input_ids == [2, 0, 1, 3]


def test_what_comes_behind_the_tokenizers_own_files(tmp_path: Path) -> None:
    """generation_config.json, config.json, and known tokens, in this order; a name without a token is passed over."""
    folder = write_family(tmp_path, "qwen")
    write(folder, "tokenizer_config.json", eos_token="<|nowhere|>")
    write(folder, "config.json", eos_token_id=260)
    assert (load(folder).end, stated_end_tokens(folder)) == (260, [260])
    write(folder, "generation_config.json", eos_token_id=[259, 258])
    assert (load(folder).end, stated_end_tokens(folder)) == (259, [259, 258])
    write(folder, "generation_config.json", eos_token_id=None)
    write(folder, "config.json")
    assert (load(folder).end_token, stated_end_tokens(folder)) == ("<|endoftext|>", [])
    assert load(folder, end_token="<|im_start|>").end_token == "<|im_start|>"
    (folder / "special_tokens_map.json").write_text("[]")
    with pytest.raises(DataError, match=r"special_tokens_map\.json holds list, not a JSON object"):
        load(folder)


def test_an_end_that_no_list_knows(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|one|>").replace("<|im_end|>", "<|stop|>"))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"to end a document; set data\.end_token"):
        load(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        write(folder, name, eos_token={"content": "<|stop|>"})
        assert load(folder).end_token == "<|stop|>"
        (folder / name).unlink()


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_have_the_variables_of_transformers(tmp_path: Path, family: str) -> None:
    words = "{{ bos_token is defined }} {{ sep_token }} {{ eos_token }} " + TEMPLATE
    folder = write_family(tmp_path, family, words)
    write(folder, "special_tokens_map.json", sep_token="he")
    messages = [{"role": "user", "content": "a"}]
    template = load_template(None, str(folder))
    assert template is not None
    expected = theirs(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages, asks=True) == expected


def tokens_of(folder: Path, texts: list[str], tokenizer: FileTokenizer) -> list[int]:
    """All tokens of documents to learn from."""
    source = folder / "texts"
    source.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (source / f"{number}.txt").write_text(text)
    found = token_cache(documents(str(source)), tokenizer, 0.0, folder / "cache").train
    return [int(token) for token in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_to_learn_from_begin_and_end(tmp_path: Path, family: str) -> None:
    folder, texts = write_family(tmp_path / "model", family), ["he a", "a"]
    reference, tokenizer = theirs(folder), load(folder)
    expected = [token for text in texts for token in (*reference(text).input_ids, reference.eos_token_id)]
    assert tokens_of(tmp_path, texts, tokenizer) == expected
    begin, end = BEGINS[family], ENDS[family]
    words = f"each text is between {begin} and {end}" if begin else f"each text ends with {end}"
    assert marks_in_words(tokenizer) == words
    bare = load(folder, adds_special_tokens=False)
    assert tokens_of(tmp_path, texts, bare) == [token for token in expected if token != reference.bos_token_id]


def test_a_document_that_a_tokenizer_ends_ends_once(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "llama2")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert tokens_of(tmp_path, ["he"], load(folder)) == theirs(folder)("he").input_ids


def test_a_document_in_pieces_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.data.sources.PIECE_CHARACTERS", 8)
    folder = write_family(tmp_path / "model", "llama3")
    tokens = tokens_of(tmp_path, ["he a\n" * 20], load(folder))
    begin, end = load(folder).before[0], load(folder).end
    assert [place for place, token in enumerate(tokens) if token in (begin, end)] == [0, len(tokens) - 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_completions_begin_and_messages_do_as_their_template_says(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family, TEMPLATE)
    renderer, reference = ChatRenderer(load(folder), load_template(None, str(folder))), theirs(folder)
    ((ids, is_target),) = renderer.documents({"prompt": "he ", "completion": "a"}, "")
    assert ids[: len(reference("he ").input_ids)] == reference("he ").input_ids
    assert (ids[-1], is_target[0], is_target[-1]) == (reference.eos_token_id, False, True)
    messages = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "a"}]
    ((ids, _),) = renderer.documents({"messages": messages}, "")
    begin = [reference.bos_token_id] if BEGINS[family] else []
    assert ids[:1] == (begin or ids[:1])
    assert [token for token in ids if token in begin] == begin, "once"


def test_a_tokenizer_keeps_the_special_tokens_that_it_is_told(tmp_path: Path) -> None:
    """As marks of an answer's parts. Others, and the one that ends a document, have no text."""
    tokenizer = load(write_family(tmp_path, next(iter(FAMILIES))))
    special = [one for one in tokenizer._special() if one != tokenizer.end_token]
    kept, other = special[:2]
    tokens = tokenizer.encode(f"{kept}he{other}{tokenizer.end_token}")
    assert kept not in tokenizer.decode(tokens)
    text = tokenizer.keeping([kept]).decode(tokens)
    assert kept in text
    assert other not in text
    assert str(tokenizer.end_token) not in text
    assert other in tokenizer.keeping([kept]).decode(tokens, skip_special_tokens=False)
