"""Tokenizers: bytes, which need no file, or a `tokenizer.json` of the tokenizers library.

Weft trains no tokenizer. A `Tokenizer` has the number of ids, the id that ends a document, encode, decode, the bytes of
tokens that are parts of characters, and a fingerprint, so that cached tokens are never used with another tokenizer.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError

# Tokens that end a document in well-known vocabularies, tried in this order, special tokens of the vocabulary first.
END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]")
MAX_NAMED = 20
_PLAIN_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # letters of their own in GPT-2's words
_OTHER_BYTES = [byte for byte in range(0x100) if byte not in _PLAIN_BYTES]  # whose letters are those from U+0100 on
_BYTES_BY_LETTER = {chr(byte): byte for byte in _PLAIN_BYTES} | {
    chr(0x100 + place): byte for place, byte in enumerate(_OTHER_BYTES)
}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what tokenizers write for bytes that are no character


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """The number of ids: every id is below it."""

    @property
    def end(self) -> int:
        """The id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """A text that differs between tokenizers that give different ids."""

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """The ids of a text, without ids that mark its beginning or end."""

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        """Returns the text of token ids. Invalid bytes become U+FFFD; the id that ends a document is left out."""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token whose text alone has U+FFFD, as that of a part of a character; None if not known."""


class ByteTokenizer:
    """Encodes text as its UTF-8 bytes, ids 0 to 255. Id 256 ends a document, so there are 257 ids."""

    vocab_size = 257
    end = 256
    fingerprint = "bytes, 256 ends a document"

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        ids = np.asarray(ids)
        # A model's vocabulary may be padded beyond 257. 0xFF is never valid UTF-8, so such ids become U+FFFD.
        data: bytes = np.minimum(ids[ids != self.end], 255).astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < self.end else None


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`. Special tokens in a text are encoded as such, as in transformers."""

    def __init__(self, path: Path, end_token: str | None, stated: Sequence[int] = ()) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise DataError(f"reading {path} needs tokenizers; run: pip install weft[data]") from None
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {path} ({error.strerror}); give 'bytes' or a path") from None
        try:
            self._backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path} is not a tokenizer.json ({error}); give one that tokenizers wrote") from None
        # A file may contain settings of its model that would truncate or pad documents.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end = self._find_end(path, end_token, stated)
        self.definition: str = self._backend.to_str()  # as JSON
        self.fingerprint = f"{hashlib.sha256(content).hexdigest()}, {self.end} ends a document"

    def _find_end(self, path: Path, end_token: str | None, stated: Sequence[int]) -> int:
        """The id of `end_token`, or of the first known end token, special tokens before others of the vocabulary; or
        else the first that is `stated`.
        """
        special = [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]
        candidates = END_TOKENS if end_token is None else (end_token,)
        for token in sorted(candidates, key=lambda token: token not in special):
            identity: int | None = self._backend.token_to_id(token)
            if identity is not None:
                return identity
        for identity in stated if end_token is None else ():
            if 0 <= identity < self.vocab_size:
                return identity
        found = ", ".join(special[:MAX_NAMED]) or "those of its vocabulary"
        raise DataError(
            f"{path} has no token {' or '.join(candidates)} to end a document; set data.end_token to one of {found}"
        )

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        ids = np.asarray(ids)
        text: str = self._backend.decode(ids[ids != self.end].tolist(), skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes | None:
        word: str | None = self._backend.id_to_token(token)
        if word is None:
            return None
        if re.fullmatch("<0x[0-9A-F]{2}>", word):  # of tokenizers with bytes beside words, as Llama 2's
            return bytes.fromhex(word[3:5])
        text = self.decode(np.array([token]))
        for found in (_of_byte_letters(word), word.encode()):
            if found is not None and found.decode(errors="replace") == text:
                return found
        return None


def _of_byte_letters(word: str) -> bytes | None:
    """The bytes of a word of a byte-level vocabulary, as GPT-2's; None if it is none."""
    return bytes(_BYTES_BY_LETTER[letter] for letter in word) if _BYTES_BY_LETTER.keys() >= set(word) else None


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that somebody gave. Raises DataError for one that has no encoding."""
    try:
        text.encode()  # the tokenizers library would say TypeError
    except UnicodeEncodeError:
        raise DataError(
            "a text has half of a surrogate pair (\\ud800 to \\udfff), which is no character; give whole ones, in UTF-8"
        ) from None
    ids: list[int] = tokenizer.encode(text).tolist()
    return ids


def load_tokenizer(spec: str | Path, *, end_token: str | None = None, stated: Sequence[int] = ()) -> Tokenizer:
    """Load a tokenizer: "bytes", a `tokenizer.json`, or a model folder that contains one. Of the `stated` ids the first
    ends a document if the file has no known end token.
    """
    if spec == "bytes":
        if end_token is not None:
            raise DataError(
                f"data.end_token = {end_token!r} was given for 'bytes', whose end is always id 256; leave it out"
            )
        return ByteTokenizer()
    path = Path(spec)
    return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path, end_token, stated)
