"""Small tokenizer folders as those of well-known models, and transformers' tokenizer of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

FAMILIES = ("llama3", "llama2", "qwen")
BEGINS = {"llama3": "<|begin_of_text|>", "llama2": "<s>", "qwen": ""}
ENDS = {"llama3": "<|eot_id|>", "llama2": "</s>", "qwen": "<|im_end|>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_family(folder: Path, family: str, template: str | None = None) -> Path:
    """A tokenizer of single characters or bytes, and the files beside it, as a family of models has them."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = {"llama3": _llama3, "llama2": _llama2, "qwen": _qwen}[family]()
    backend.save(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {"eos_token": ENDS[family]}
    if BEGINS[family]:
        names["bos_token"] = {"__type": "AddedToken", "content": BEGINS[family], "lstrip": False, "normalized": False}
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def theirs(folder: Path) -> Any:
    """Returns transformers' tokenizer of a folder."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def _bytes(special: list[str]) -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    vocab |= {"Ġa": 256, "he": 257}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "a"), ("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return backend


def gpt2(words: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Bytes as letters, cut by GPT-2's expression: the last blank of several goes with what follows, if anything does.
    `words` are tokens of two bytes.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate((*letters, *words))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [(word[0], word[1]) for word in words]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def _begins_with(token: str, backend: tokenizers.Tokenizer) -> Any:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, backend.token_to_id(token))])


def _llama3() -> tokenizers.Tokenizer:
    begin = BEGINS["llama3"]
    backend = _bytes([begin, "<|end_of_text|>", "<|eot_id|>"])
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _begins_with(begin, backend)]
    )
    return backend


def _llama2() -> tokenizers.Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmno", "▁a", "he"]
    vocab = {word: number for number, word in enumerate(words)}
    merges = [("▁", "a"), ("h", "e")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = _begins_with("<s>", backend)
    return backend


def _qwen() -> tokenizers.Tokenizer:
    backend = _bytes(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend
