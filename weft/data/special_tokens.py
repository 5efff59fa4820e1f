"""The special tokens that the files beside a tokenizer.json name, read in the order of transformers.

named_tokens(folder)["eos_token"]      "<|im_end|>": the text of the token
special_tokens(folder)                 all tokens that the files call special, or add, as tables
stated_end_tokens(folder)              [151645, 151643]: the tokens that end an answer
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.errors import CheckpointError, DataError
from weft.models.hf_config import CONFIG_FILE, DOCUMENT_END, END_TOKENS, GENERATION_FILE, read_json

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def named_tokens(folder: Path) -> dict[str, str]:
    """Returns the texts of the special tokens that a tokenizer's folder names.

    special_tokens_map.json comes before tokenizer_config.json, unless the latter lists the added tokens: it is whole
    then, and transformers does not read the other.
    """
    found = _settings(folder)
    texts = {name: _text(found.get(name)) for name in NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def _settings(folder: Path) -> dict[str, Any]:
    found = read_object(folder / TOKENIZER_CONFIG)
    return found if ADDED_TOKENS in found else found | read_object(folder / SPECIAL_TOKENS_MAP)


def special_tokens(folder: Path) -> list[dict[str, Any]]:
    """Returns the tokens that a tokenizer's folder calls special, or adds to its vocabulary, as arguments of
    tokenizers' AddedToken: those with names, those of models for images or sound, those without names.
    """
    found = _settings(folder)
    given: list[Any] = [found.get(name) for name in NAMES]
    extra = found.get("extra_special_tokens") or found.get("additional_special_tokens") or []
    given += list(extra.values()) if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    given += [value for key, value in found.items() if key.endswith("_token") and key not in NAMES]
    listed = found.get(ADDED_TOKENS)
    tokens = {text: {**_flags(one), "content": text, "special": True} for one in given if (text := _text(one))}
    for one in listed.values() if isinstance(listed, dict) else ():
        if text := _text(one):
            flags = _flags(one)
            tokens[text] = {**flags, "content": text, "special": text in tokens or flags.get("special", False)}
    return list(tokens.values())


def _flags(token: Any) -> dict[str, bool]:
    return {key: token[key] for key in FLAGS if isinstance(token.get(key), bool)} if isinstance(token, dict) else {}


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
        return read_json(path)
    except CheckpointError as error:
        raise DataError(str(error)) from None


def _text(value: Any) -> str | None:
    """Returns the text of a token, which files state as a text or as a table with its `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None
