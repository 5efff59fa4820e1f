"""What the sample after training continues: of conversations and preferences, a held-out prompt of the run's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import TEMPLATE, write_family

from weft.commands.train import _sample_prompt
from weft.run_file import run_from_tables

ASKED = [{"role": "user", "content": "he"}]
MARKED = "[{{ m.role }}]{% if m.content == 'b' %}<|eot_id|>{% endif %}"
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("kind", "row", "words", "suggested"),
    [
        ("chat", {"messages": [*ASKED, ANSWER]}, "[user]he[assistant]", "[user]he[assistant]"),
        ("chat", {"messages": [{**ASKED[0], "content": "b"}, ANSWER]}, "[user]<|eot_id|>b[assistant]", None),
        ("chat", {"prompt": "he ", "completion": "a"}, "he ", "he "),
        ("preference", {"prompt": "he ", "chosen": "a", "rejected": "b"}, "he ", "he "),
    ],
)
def test_the_sample_continues_a_prompt_of_the_data(
    tmp_path: Path, kind: str, row: dict[str, Any], words: str, suggested: str | None
) -> None:
    folder = write_family(tmp_path / "own", "llama3", TEMPLATE.replace("[{{ m.role }}]", MARKED))
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 40)
    model = {"architecture": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    data = {"kind": kind, "source": str(tmp_path / "rows.jsonl"), "sequence": 32, "tokenizer": str(folder)}
    tables = {
        "model": {**model, "intermediate_size": 8},
        "data": {**data, "cache": str(tmp_path / "cache"), "held_out": 0.5},
        "train": {"steps": 1, "batch": 1},
    }
    tokens, text, command = _sample_prompt(run_from_tables(tables, {}, "sample"))
    assert text == f"<|begin_of_text|>{words}"
    assert isinstance(tokens, list)
    shown = ["serve"] if suggested is None else ["generate", "--prompt", suggested]
    assert [word for word in command if word != "runs/sample"] == ["weft", *shown]


@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
@pytest.mark.parametrize(
    ("text", "words"),
    [("roses are red, violets blue\n", "roses are red,"), ("数数数数数数数\n", "数数数数"), ("\x00\n", None)],
)
def test_the_sample_of_texts_continues_held_out_words(
    tmp_path: Path, tokenizer: str, text: str, words: str | None
) -> None:
    """`def ` was continued whatever the texts were; it stays for Python's library, and where there are no words."""
    folder = write_family(tmp_path / "own", "llama3", TEMPLATE)
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(text * 9)
    data = {
        "source": str(tmp_path / "texts"),
        "sequence": 31,
        "tokenizer": str(folder) if tokenizer == "own" else "bytes",
    }
    tables = {
        "model": {"architecture": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {**data, "cache": str(tmp_path / "cache"), "held_out": 0.5},
        "train": {"steps": 1, "batch": 1},
    }
    tables["model"]["intermediate_size"] = 8
    prompt, shown, command = _sample_prompt(run_from_tables(tables, {}, "sample"))
    if words is None:
        assert (prompt, shown, command[-1]) == ("def ", "def ", "import ")
    else:
        assert prompt == shown == command[-1]
        assert words.startswith(prompt[:4])
        assert prompt in text
