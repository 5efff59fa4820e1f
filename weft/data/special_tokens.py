"""The special tokens that the files beside a tokenizer.json name, read in the order of transformers.

named_tokens(folder)["eos_token"]      "<|im_end|>": the text of the token
stated_end_tokens(folder)              [151645, 151643]: the tokens that end an answer
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.errors import DataError
from weft.models.hf_config import CONFIG_FILE, DOCUMENT_END, END_TOKENS, GENERATION_FILE

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def named_tokens(folder: Path) -> dict[str, str]:
    """Returns the texts of the special tokens that a tokenizer's folder names.

    special_tokens_map.json comes before tokenizer_config.json, unless the latter lists the added tokens: it is whole
    then, and transformers does not read the other.
    """
    found = read_object(folder / TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in found:
        found |= read_object(folder / SPECIAL_TOKENS_MAP)
    texts = {name: _text(found.get(name)) for name in NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def stated_end_tokens(folder: Path | None) -> list[int]:
    """Returns the tokens that a model's folder states to end an answer; none if it states none."""
    for name in () if folder is None else (GENERATION_FILE, CONFIG_FILE):
        assert folder is not None
        stated = read_object(folder / name).get(END_TOKENS)
        found: list[Any] = stated if isinstance(stated, list) else [stated]
        if all(type(token) is int for token in found):
            return found
    return []


def exported_end_token(folder: Path) -> str | None:
    """Returns data.end_token of the run that was exported to a folder; None if the folder states none."""
    return _text(read_object(folder / GENERATION_FILE).get(DOCUMENT_END))


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, {} if there is no file. Raises DataError for anything else."""
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise DataError(f"{path} holds {type(table).__name__}, not a JSON object")
    return table


def _text(value: Any) -> str | None:
    """Returns the text of a token, which files state as a text or as a table with its `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None
