"""Training data: sources, tokenizers, the token cache and its failures, and the sequences cut from it."""

import hashlib
import json
import logging
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft.data import sources, tokens
from weft.data.sources import documents
from weft.data.tokenizer import ByteTokenizer, load_tokenizer
from weft.data.tokens import Sequences, is_held_out, token_cache
from weft.errors import DataError
from weft.run_file import load_run

pytestmark = pytest.mark.processes

TEXTS = ["alpha\nbeta\n", "γάμμα 🙂", "delta\r\nepsilon", "zeta" * 20]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_folder(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_bytes(text.encode())
    return folder


# ---- sources


def test_a_text_file_is_one_document_kept_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_bytes(TEXTS[2].encode())
    assert list(documents(path)) == [TEXTS[2]]
    (tmp_path / "unknown_suffix.dat").write_text("plain")
    assert list(documents(str(tmp_path / "unknown_suffix.dat"))) == ["plain"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert list(documents(tmp_path)) == ["hello"]


def test_a_folder_is_read_by_sorted_relative_path(tmp_path: Path) -> None:
    for name in ["b.md", "a/z.txt", "a/b.py", "a-b.txt", ".hidden.txt", ".git/x.txt", "image.png"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    source = documents(tmp_path)
    assert list(source) == ["a-b.txt", "a/b.py", "a/z.txt", "b.md"]
    assert source.description == f"{tmp_path}: 4 text files, 0.0 MB"


def test_documents_without_text_are_left_out(tmp_path: Path) -> None:
    assert list(documents(write_folder(tmp_path / "d", ["one", "", "two"]))) == ["one", "two"]
    assert list(documents(write_jsonl(tmp_path / "d.jsonl", ["one", "", "two"]))) == ["one", "two"]


def test_long_text_is_read_in_pieces_cut_after_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 10)
    text = "αβγ line\n" * 7 + "x" * 55
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("short")
    source = documents(tmp_path)
    pieces = list(source.pieces())
    assert all(len(piece.text) <= 20 for piece in pieces)
    assert all(piece.text.endswith("\n") for piece in pieces[:3])
    assert [piece.ends_document for piece in pieces].count(True) == 2
    assert list(source) == [text, "short"]
    done = [piece.done_bytes for piece in pieces]
    assert done == sorted(done)
    assert done[-1] == source.total_bytes == len(text.encode()) + 5


def test_jsonl(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", TEXTS, field="body")
    with path.open("a") as file:
        file.write("\n")  # a blank line is no document
    source = documents(path, text_field="body")
    assert list(source) == TEXTS
    assert list(source.pieces())[-1].done_bytes == path.stat().st_size - 1
    assert "1 jsonl file, 0.0 MB (text in 'body')" in source.description


@pytest.mark.parametrize("text_type", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary("int32", "string")])
def test_parquet_over_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_type: object) -> None:
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 2)
    table = pyarrow.table({"text": pyarrow.array(TEXTS * 3).cast(text_type), "id": list(range(12))})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet", row_group_size=5)
    pyarrow.parquet.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    source = documents(tmp_path)
    assert list(source) == TEXTS * 3
    done = [piece.done_bytes for piece in source.pieces()]
    assert done == sorted(done)
    assert done[-1] <= source.total_bytes


def test_a_saved_dataset_is_read_over_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 3)
    dataset = datasets.Dataset.from_dict({"text": TEXTS * 3, "id": list(range(12))})
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "both"))
    source = documents(tmp_path / "saved")
    assert list(source) == TEXTS * 3
    assert len(source.names) == 2
    with pytest.raises(DataError, match=r"holds the splits train, test; give the path of one, such as .*both/train"):
        documents(tmp_path / "both")
    assert list(documents(tmp_path / "both" / "train")) == TEXTS * 3
    with pytest.raises(DataError, match=r"arrow has no field 'body', only text, id; set text_field"):
        list(documents(tmp_path / "saved", text_field="body"))
    # A dataset with a selection is saved as that selection.
    dataset.select([5, 0]).save_to_disk(str(tmp_path / "selected"))
    assert list(documents(tmp_path / "selected")) == [TEXTS[1], TEXTS[0]]


def test_text_beside_records_is_not_read_and_said(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("about the data")
    source = documents(tmp_path)
    assert list(source) == TEXTS
    assert "1 text files beside them are not read" in source.description


def test_stdlib_lists_the_library_and_not_its_tests() -> None:
    source = documents("stdlib")
    assert source.names == tuple(sorted(source.names))
    assert {"argparse.py", "asyncio/tasks.py", "json/decoder.py", "idlelib/editor.py"} <= set(source.names)
    assert 300 < len(source.names) < 3000
    for name in source.names:
        assert name.endswith(".py")
        assert not {"site-packages", "__pycache__", "test", "tests", "idle_test"} & set(name.split("/"))
        assert "_sysconfigdata" not in name
    assert source == documents("stdlib")
    first = next(name for name in source.names if (source.root / name).stat().st_size)
    assert next(iter(source)).encode() == (source.root / first).read_bytes()


def test_fingerprint_follows_content_and_names_and_not_the_place(tmp_path: Path) -> None:
    first, second = write_folder(tmp_path / "one", TEXTS), write_folder(tmp_path / "two", TEXTS)
    fingerprint = documents(first).fingerprint
    assert documents(second).fingerprint == fingerprint
    os.utime(second / "000.txt", ns=(1, 1))
    assert documents(second).fingerprint == fingerprint
    (second / "000.txt").write_text(TEXTS[0].upper())
    assert documents(second).fingerprint != fingerprint
    (first / "000.txt").rename(first / "renamed.txt")
    assert documents(first).fingerprint != fingerprint
    jsonl = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    assert documents(jsonl).fingerprint != documents(jsonl, text_field="id").fingerprint


def test_fingerprint_of_a_large_file_follows_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HASHED_BYTES", 3)
    path = tmp_path / "large.txt"
    path.write_text("four")
    os.utime(path, ns=(1, 1))
    fingerprint = documents(path).fingerprint
    path.write_text("FOUR")
    os.utime(path, ns=(1, 1))
    assert documents(path).fingerprint == fingerprint
    os.utime(path, ns=(1, 2))
    assert documents(path).fingerprint != fingerprint


# ---- sources: bad input


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no data at .*nowhere; give 'stdlib', a text, .jsonl or .parquet"):
        documents(tmp_path / "nowhere")
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"the folder .* holds no data; it needs .jsonl, .parquet or text files \(.c "):
        documents(tmp_path)


def test_an_empty_standard_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for name in ["site-packages/a.py", "test/b.py", "config-3/c.py", "_sysconfigdata_x.py", "d.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9")
    with pytest.raises(DataError, match=r"holds no .py files; give a path to text instead of 'stdlib'"):
        documents("stdlib")
    (tmp_path / "good.py").write_text("print()")
    assert documents("stdlib").names == ("good.py",)


def test_two_kinds_of_records_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", TEXTS)
    (tmp_path / "data.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"holds both .jsonl and .parquet files; give a folder with one kind"):
        documents(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"data.jsonl, line 2 is not valid JSON \(Expecting.*\); correct the line"),
        (b'{"text": "\xff"}', r"data.jsonl, line 2 is not valid JSON \('utf-8' codec"),
        (b"[" * 100_000, r"data.jsonl, line 2 is not valid JSON \(maximum recursion depth"),
        (b'["text"]', r"line 2 is not a JSON object; each line must be one, with 'text'"),
        (b'{"id": 1, "body": "x"}', r"line 2 has no field 'text', only id, body; set text_field to one"),
        (b"{}", r"line 2 has no field 'text', only none; set text_field to one"),
        (b'{"text": 5}', r"line 2: the field 'text' is int, not text; set text_field to another"),
        (b'{"text": null}', r"line 2: the field 'text' is NoneType, not text"),
        (rb'{"text": "a\ud800"}', r"line 2: 'text' holds half a surrogate pair"),
    ],
)
def test_bad_jsonl_lines(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    stream = iter(documents(path))
    assert next(stream) == "good"
    with pytest.raises(DataError, match=message):
        next(stream)


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(DataError, match=r"data.parquet has no field 'text', only id, body; set text_field to one"):
        list(documents(path))
    with pytest.raises(DataError, match=r"data.parquet, row 0: the field 'id' is int, not text"):
        list(documents(path, text_field="id"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"data.parquet is not a readable parquet file \(.*\); write it again"):
        list(documents(path))


def test_tables_with_text_that_is_not_utf_8(tmp_path: Path) -> None:
    bad = pyarrow.array([b"good", b"\xff"]).cast("string", safe=False)
    table = pyarrow.table({"text": bad})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with pyarrow.OSFile(str(saved / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    for path, name in ((tmp_path / "data.parquet", "data.parquet"), (saved, "data.arrow")):
        texts = iter(documents(path))
        assert next(texts) == "good"
        with pytest.raises(DataError, match=rf"{name}, row 1: 'text' is not UTF-8 text; convert it to UTF-8"):
            next(texts)


def test_bad_saved_datasets(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    for content in ("{", "[" * 100_000, "[]", "{}", '{"_data_files": []}'):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(DataError, match=r"state.json has no list '_data_files' with entries; save the dataset"):
            documents(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with pytest.raises(DataError, match=r"the saved dataset .* lacks its file data.arrow; save it again"):
        documents(tmp_path)
    (tmp_path / "data.arrow").write_bytes(b"nonsense, and not an Arrow stream")
    with pytest.raises(DataError, match=r"data.arrow is not a readable Arrow file \(.*\); save the dataset again"):
        list(documents(tmp_path))


def test_undecodable_text_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "d", TEXTS)
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text; convert it to UTF-8 or move it away"):
        list(documents(folder))


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"data.parquet needs pyarrow; run: pip install weft\[data\]"):
        list(documents(tmp_path / "data.parquet"))
    with pytest.raises(DataError, match=r"tokenizer.json needs tokenizers; run: pip install weft\[data\]"):
        load_tokenizer(tmp_path / "tokenizer.json")


# ---- tokenizers


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_decode_anything() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end) == (257, 256)
    assert tokenizer.decode(np.array([104, 105, 256, 33])) == "hi!"
    assert tokenizer.decode(np.array([104, 0xCE, 300])) == "h\ufffd\ufffd"
    assert tokenizer.decode(np.array([], dtype=np.int64)) == ""
    with pytest.raises(DataError, match=r"end_token = '</s>' was given for 'bytes', whose end is always id 256"):
        load_tokenizer("bytes", end_token="</s>")


def write_tokenizer(folder: Path, special: list[str]) -> Path:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    # What must not reach the tokens: marks around a text, a length limit and padding.
    mark = special[0]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A {mark}", special_tokens=[(mark, backend.token_to_id(mark))]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_file(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, ["<other>", "<|endoftext|>"])
    tokenizer = load_tokenizer(path)
    assert tokenizer.end == 1
    assert 256 < tokenizer.vocab_size <= 300
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not {0, 1} & set(ids.tolist())
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(np.append(ids, tokenizer.end)) == text
    assert len(tokenizer.encode(TEXTS[3])) < len(TEXTS[3])  # merges are in use
    assert tokenizer.encode("").tolist() == []
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    other = load_tokenizer(path, end_token="<other>")
    assert other.end == 0
    assert other.fingerprint != tokenizer.fingerprint


def test_a_special_token_ends_documents_before_an_ordinary_one(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, ["<other>", "<|endoftext|>"])
    table = json.loads(path.read_text())
    ordinary = max(table["model"]["vocab"].values()) + 1
    table["model"]["vocab"]["</s>"] = ordinary  # a word of HTML, say, that was merged
    path.write_text(json.dumps(table))
    assert load_tokenizer(path).end == 1
    assert load_tokenizer(path, end_token="</s>").end == ordinary
    for token in table["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(table))
    assert load_tokenizer(path).end == ordinary  # none is special: the first that is known


def test_a_run_file_names_the_end_of_documents(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, ["<other>", "<|endoftext|>"])
    text = f'[data]\nsource = "stdlib"\nsequence = 8\ntokenizer = "{path}"\n'
    model = "[model]\nhidden_size = 8\nnum_hidden_layers = 1\nnum_attention_heads = 2\nintermediate_size = 8\n"
    (tmp_path / "run.toml").write_text(f"{model}{text}[train]\nsteps = 1\nbatch = 1\n")
    assert load_run(tmp_path / "run.toml").tokenizer.end == 1
    run = load_run(tmp_path / "run.toml", ["data.end_token=<other>"])
    assert run.tokenizer.end == 0
    (tmp_path / "again.toml").write_text(run.to_toml())
    assert load_run(tmp_path / "again.toml").tokenizer.end == 0
    with pytest.raises(DataError, match=r"has no token <stop> to end a document"):
        load_run(tmp_path / "run.toml", ["data.end_token=<stop>"])
    with pytest.raises(DataError, match=r"data\.end_token = '<stop>' was given for 'bytes'"):
        load_run(tmp_path / "run.toml", ["data.tokenizer=bytes", "data.end_token=<stop>"])


def test_bad_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*none.json \(No such file.*\); give 'bytes'"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json is not a tokenizer.json \(.*\); give one that tokenizers wrote"):
        load_tokenizer(tmp_path / "bad.json")
    (tmp_path / "empty.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(DataError, match=r"empty.json has no token </s> or .* to end a document"):
        load_tokenizer(tmp_path / "empty.json")
    path = write_tokenizer(tmp_path, ["<other>"])
    with pytest.raises(
        DataError, match=r"has no token </s> or <\|endoftext\|> or .* to end a document; set data.end_token"
    ):
        load_tokenizer(path)
    with pytest.raises(
        DataError, match=r"has no token <stop> to end a document; set data.end_token to one of .*<other>"
    ):
        load_tokenizer(path, end_token="<stop>")


# ---- the token cache


def expected_tokens(texts: list[str]) -> list[int]:
    return [identity for text in texts for identity in [*text.encode(), 256]]


def test_cache_without_held_out_joins_documents_with_the_end(tmp_path: Path) -> None:
    source = documents(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    calls: list[tuple[int, int]] = []
    result = token_cache(source, ByteTokenizer(), 0, tmp_path / "cache", lambda *call: calls.append(call))
    assert result.train.tolist() == expected_tokens(TEXTS)
    assert result.train.dtype == np.uint16
    assert len(result.held_out) == 0
    assert calls == [(0, source.total_bytes), (source.total_bytes, source.total_bytes)]

    again = token_cache(source, ByteTokenizer(), 0, tmp_path / "cache", lambda *call: pytest.fail("built twice"))
    assert isinstance(again.train, np.memmap)
    assert np.array_equal(again.train, result.train)
    assert again.fingerprint == result.fingerprint


def test_progress_moves_forward_inside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "PROGRESS_BYTES", 1000)
    source = documents(write_jsonl(tmp_path / "data.jsonl", ["x" * 200] * 100))
    done: list[int] = []
    token_cache(source, ByteTokenizer(), 0, tmp_path / "cache", lambda now, total: done.append(now))
    assert done == sorted(done)
    assert len(set(done)) > 15
    assert done[-1] == source.total_bytes


def test_each_question_has_its_own_cache(tmp_path: Path) -> None:
    class Shifted(ByteTokenizer):
        fingerprint = "another"

    source = documents(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    token_cache(source, ByteTokenizer(), 0, tmp_path / "cache")
    token_cache(source, ByteTokenizer(), 0.5, tmp_path / "cache")
    token_cache(source, Shifted(), 0, tmp_path / "cache")
    write_jsonl(tmp_path / "data.jsonl", TEXTS[:2])
    token_cache(documents(tmp_path / "data.jsonl"), ByteTokenizer(), 0, tmp_path / "cache")
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 4


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 65_537
        end = 65_536

    class Full(ByteTokenizer):
        vocab_size = 65_536
        end = 65_535
        fingerprint = "full"

    source = documents(write_jsonl(tmp_path / "data.jsonl", ["ab"]))
    wide = token_cache(source, Wide(), 0, tmp_path / "cache").train
    assert (wide.dtype.str, wide.tolist()) == ("<u4", [97, 98, 65_536])
    full = token_cache(source, Full(), 0, tmp_path / "cache").train
    assert (full.dtype.str, full.tolist()) == ("<u2", [97, 98, 65_535])


def test_the_cache_record_tells_the_truth(tmp_path: Path) -> None:
    source = documents(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    result = token_cache(source, ByteTokenizer(), 0.3, tmp_path / "cache")
    (cache,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    record = json.loads((cache / "cache.json").read_text())
    assert record["format_version"] == 2
    for side, array in (("train", result.train), ("held_out", result.held_out)):
        content = (cache / f"{side}.npy").read_bytes()
        assert record[side]["num_tokens"] == len(array)
        assert record[side]["size_bytes"] == len(content)
        assert record[side]["sha256"] == hashlib.sha256(content).hexdigest()
        assert np.array_equal(np.load(cache / f"{side}.npy", allow_pickle=False), array)


def test_the_split_is_by_document_and_near_the_fraction(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(2000)]
    source = documents(write_jsonl(tmp_path / "data.jsonl", texts))
    result = token_cache(source, ByteTokenizer(), 0.1, tmp_path / "cache")
    held = [text for number, text in enumerate(texts) if is_held_out(number, 0.1)]
    train = [text for number, text in enumerate(texts) if not is_held_out(number, 0.1)]
    assert 150 < len(held) < 250
    assert result.held_out.tolist() == expected_tokens(held)
    assert result.train.tolist() == expected_tokens(train)


def test_the_split_is_the_same_everywhere_and_grows_with_the_fraction() -> None:
    assert [number for number in range(100) if is_held_out(number, 0.05)] == [19, 46, 61, 83, 90]
    for number in range(1000):
        assert not is_held_out(number, 0.0)
        assert is_held_out(number, 0.2) >= is_held_out(number, 0.1)


@given(size=st.integers(1, 200), held_out=st.floats(0.001, 0.999), number=st.integers(1, 3))
@settings(max_examples=40)
def test_few_documents_still_fill_both_sides(
    tmp_path_factory: pytest.TempPathFactory, size: int, held_out: float, number: int
) -> None:
    folder = tmp_path_factory.mktemp("few")
    texts = [chr(97 + i) * size for i in range(number)]
    result = token_cache(documents(write_jsonl(folder / "d.jsonl", texts)), ByteTokenizer(), held_out, folder / "cache")
    chosen = [is_held_out(i, held_out) for i in range(number)]
    everything = expected_tokens(texts)
    if any(chosen) and not all(chosen):
        assert result.held_out.tolist() == expected_tokens([t for t, out in zip(texts, chosen, strict=True) if out])
        return
    num_held = min(max(round(len(everything) * held_out), 1), len(everything) - 1)
    assert result.train.tolist() == everything[:-num_held]
    assert result.held_out.tolist() == everything[-num_held:]


def test_a_big_text_file_is_split_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 50)
    lines = [f"{number:09}\n" for number in range(2000)]
    (tmp_path / "big.txt").write_text("".join(lines))
    result = token_cache(documents(tmp_path / "big.txt"), ByteTokenizer(), 0.1, tmp_path / "cache")
    train, held = (ByteTokenizer().decode(side).splitlines(keepends=True) for side in (result.train, result.held_out))
    assert sorted(train + held) == lines
    assert train == sorted(train)
    assert held == sorted(held)
    assert 100 < len(held) < 300
    assert result.train.tolist().count(256) + result.held_out.tolist().count(256) == 1


@pytest.mark.parametrize(("held_out", "num_held"), [(0.05, 51), (0.03, 51), (0.005, 5)])
@pytest.mark.sampled(1)
def test_a_text_is_held_out_from_a_line_on_if_that_is_about_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: float, num_held: int
) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 45)  # and to the end of the line: 50
    (tmp_path / "one.txt").write_text("".join(f"{number:09}\n" for number in range(100)))
    result = token_cache(documents(tmp_path / "one.txt"), ByteTokenizer(), held_out, tmp_path / "cache")
    assert (len(result.train), len(result.held_out)) == (1001 - num_held, num_held)  # with the end of the document


def documents_of(side: NDArray[Any]) -> list[str]:
    """What lies between the ends of documents."""
    ends = np.flatnonzero(side == 256)
    return [ByteTokenizer().decode(part) for part in np.split(side, ends + 1) if len(part)]


def test_documents_longer_than_a_piece_are_held_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 30)
    texts = ["".join(f"{number:02} {line:06}\n" for line in range(9)) for number in range(40)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    result = token_cache(documents(tmp_path), ByteTokenizer(), 0.2, tmp_path / "cache")
    chosen = [is_held_out(number, 0.2) for number in range(40)]
    assert 1 < sum(chosen) < 40
    assert documents_of(result.held_out) == [text for text, held in zip(texts, chosen, strict=True) if held]
    assert documents_of(result.train) == [text for text, held in zip(texts, chosen, strict=True) if not held]


def test_a_long_document_that_is_held_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokens, "MUCH_HELD_OUT", 100)
    texts = ["short" if not is_held_out(number, 0.05) else "long " * 60 for number in range(20)]
    token_cache(documents(write_jsonl(tmp_path / "d.jsonl", texts)), ByteTokenizer(), 0.05, tmp_path / "cache")
    assert "0.73 of the tokens" in caplog.text
    assert "data.held_out = 0.05: a long document is held out whole" in caplog.text


def test_moving_a_tail_is_the_same_in_many_small_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "COPY_TOKENS", 3)
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    result = token_cache(documents(tmp_path / "a.txt"), ByteTokenizer(), 0.2, tmp_path / "cache")
    everything = expected_tokens(["0123456789" * 5])
    assert result.train.tolist() == everything[:41]
    assert result.held_out.tolist() == everything[41:]


def test_cache_errors(tmp_path: Path) -> None:
    source = documents(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(DataError, match=rf"held_out = {fraction} is not a fraction; use 0 for none, or for"):
            token_cache(source, ByteTokenizer(), fraction, tmp_path / "cache")
    empty = documents(write_jsonl(tmp_path / "empty.jsonl", [""]))
    with pytest.raises(DataError, match=r"empty.jsonl: 1 jsonl file.* holds no text; give data with at least one"):
        token_cache(empty, ByteTokenizer(), 0, tmp_path / "cache")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text"')
    with pytest.raises(DataError, match=r"bad.jsonl, line 2 is not valid JSON"):
        token_cache(documents(tmp_path / "bad.jsonl"), ByteTokenizer(), 0, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []  # nothing half-built is left


def test_too_few_tokens_to_split(tmp_path: Path) -> None:
    class Silent(ByteTokenizer):
        def encode(self, text: str) -> NDArray[Any]:
            return np.array([], dtype=np.uint8)

    source = documents(write_jsonl(tmp_path / "data.jsonl", ["x"]))
    with pytest.raises(DataError, match=r"gives 1 token, too few to hold some out; use held_out = 0"):
        token_cache(source, Silent(), 0.5, tmp_path / "cache")


def test_an_id_beyond_the_vocabulary_never_reaches_the_disk(tmp_path: Path) -> None:
    class Lying(ByteTokenizer):
        def encode(self, text: str) -> NDArray[Any]:
            return np.array([65_536 + 5])

    source = documents(write_jsonl(tmp_path / "data.jsonl", ["x"]))
    with pytest.raises(AssertionError, match="beyond its vocab_size"):
        token_cache(source, Lying(), 0, tmp_path / "cache")


def truncate(cache: Path) -> None:
    os.truncate(cache / "train.npy", (cache / "train.npy").stat().st_size - 2)


def lie_in_header(cache: Path) -> None:
    content = (cache / "train.npy").read_bytes()
    (cache / "train.npy").write_bytes(content.replace(b"'<u2'", b"'<i2'"))


def break_header(cache: Path) -> None:
    content = (cache / "train.npy").read_bytes()
    (cache / "train.npy").write_bytes(b"\0" * 16 + content[16:])


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (truncate, "train.npy has .* bytes instead of"),
    (lie_in_header, "train.npy holds <i2 .* which cache.json denies"),
    (break_header, "ValueError"),
    (lambda cache: (cache / "held_out.npy").unlink(), "FileNotFoundError"),
    (lambda cache: (cache / "cache.json").unlink(), "FileNotFoundError"),
    (lambda cache: (cache / "cache.json").write_text("{"), "JSONDecodeError"),
    (lambda cache: (cache / "cache.json").write_text("[]"), "TypeError"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_cache_is_built_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], message: str
) -> None:
    source = documents(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    first = token_cache(source, ByteTokenizer(), 0.3, tmp_path / "cache")
    train = first.train.tolist()
    (cache,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    damage(cache)
    with caplog.at_level(logging.WARNING, logger="weft"):
        again = token_cache(source, ByteTokenizer(), 0.3, tmp_path / "cache")
    (record,) = caplog.records
    assert record.name == "weft"
    assert "is damaged" in record.getMessage()
    assert re.search(message, record.getMessage())
    assert again.train.tolist() == train
    assert again.fingerprint == first.fingerprint


# ---- several processes


class SlowTokenizer(ByteTokenizer):
    """Leaves a mark for each text that it encodes, and then waits a little so that builds would overlap."""

    def __init__(self, marks: Path, wait_seconds: float) -> None:
        self.marks = marks
        self.wait_seconds = wait_seconds

    def encode(self, text: str) -> NDArray[Any]:
        with self.marks.open("a") as file:
            file.write("x")
        time.sleep(self.wait_seconds)
        return super().encode(text)


def fork(work: Callable[[], bool]) -> int:
    """Runs work in a child, which exits with 0 if it returned True."""
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return child


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    source = documents(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    marks, expected = tmp_path / "marks", expected_tokens(TEXTS)
    read_end, write_end = os.pipe()

    def work() -> bool:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent closes its end: all start together
        tokenizer = SlowTokenizer(marks, wait_seconds=0.1)
        return bool(token_cache(source, tokenizer, 0, tmp_path / "cache").train.tolist() == expected)

    children = [fork(work) for _ in range(3)]
    os.close(write_end)
    os.close(read_end)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert marks.read_text() == "x" * len(TEXTS)


def test_kill_in_the_middle_of_a_build_leaves_nothing_visible(tmp_path: Path) -> None:
    texts = ["y" * 100_000, *TEXTS]
    source = documents(write_jsonl(tmp_path / "data.jsonl", texts))
    marks = tmp_path / "marks"
    child = fork(lambda: bool(token_cache(source, SlowTokenizer(marks, 20), 0, tmp_path / "cache")))
    while not marks.exists() and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert ".building-" in left.name

    result = token_cache(source, SlowTokenizer(marks, 0), 0, tmp_path / "cache")
    assert result.train.tolist() == expected_tokens(texts)
    (cache,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert cache.name == left.name.split(".")[0]


def test_another_machine_that_published_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = documents(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    token_cache(source, ByteTokenizer(), 0, tmp_path / "cache")
    (cache,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    inode = cache.stat().st_ino
    tokens._build(source, ByteTokenizer(), 0, cache, lambda done, total: None)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [cache]
    assert cache.stat().st_ino == inode


# ---- sequences


def test_sequences_overlap_by_one_token() -> None:
    sequences = Sequences(np.arange(11, dtype=np.uint16), 3)
    assert len(sequences) == 3
    inputs, labels = sequences.get(np.array([2, 0, 2]))
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.tolist() == [[6, 7, 8], [0, 1, 2], [6, 7, 8]]
    assert labels.tolist() == [[7, 8, 9], [1, 2, 3], [7, 8, 9]]
    assert inputs.is_contiguous()
    assert labels.is_contiguous()


@given(num_tokens=st.integers(2, 200), length=st.integers(1, 199))
def test_sequences_cover_all_whole_ones(num_tokens: int, length: int) -> None:
    if num_tokens < length + 1:
        with pytest.raises(DataError, match=rf"use a sequence of at most {num_tokens - 1}, or more data"):
            Sequences(np.arange(num_tokens, dtype=np.uint32), length)
        return
    sequences = Sequences(np.arange(num_tokens, dtype=np.uint32), length)
    inputs, labels = sequences.get(np.arange(len(sequences)))
    assert inputs.flatten().tolist() == list(range(len(sequences) * length))
    assert labels.flatten().tolist() == list(range(1, len(sequences) * length + 1))
    assert num_tokens - 1 - len(sequences) * length < length


def test_sequences_read_the_top_of_uint16_and_a_mapped_file(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([65_535, 0, 65_534], dtype=np.uint16))
    inputs, labels = Sequences(np.load(tmp_path / "t.npy", mmap_mode="r"), 2).get(np.array([0]))
    assert (inputs.tolist(), labels.tolist()) == ([[65_535, 0]], [[0, 65_534]])


def test_sequence_errors() -> None:
    with pytest.raises(DataError, match=r"the held-out data holds no tokens; give more data or change held_out"):
        Sequences(np.array([], dtype=np.uint16), 4, name="held-out data")
    with pytest.raises(
        DataError, match=r"= 4 needs at least 5 tokens, but the training data holds 4; use .* at most 3"
    ):
        Sequences(np.arange(4, dtype=np.uint16), 4)
    with pytest.raises(DataError, match=r"a sequence of 0 tokens is empty; use at least 1"):
        Sequences(np.arange(4, dtype=np.uint16), 0)
    for bad in (-1, 3):
        with pytest.raises(AssertionError, match="no such sequence"):
            Sequences(np.arange(11, dtype=np.uint16), 3).get(np.array([bad]))
