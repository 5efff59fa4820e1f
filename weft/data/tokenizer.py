"""Tokenizers: bytes, which need no file, or a `tokenizer.json` of the tokenizers library.

Weft trains no tokenizer. A `Tokenizer` has the number of ids, the id that ends a document, the ids that come before and
after a text, encode, decode, the bytes of tokens that are parts of characters, and a fingerprint, so that cached tokens
are never used with another tokenizer.
"""

import copy
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.special_tokens import exported_end_token, named_tokens, special_tokens, stated_end_tokens
from weft.errors import DataError

# Tokens that end a document in well-known vocabularies, if no file beside the tokenizer names one. They are tried in
# this order, special tokens of the vocabulary first.
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
    def end_token(self) -> str | None:
        """What `data.end_token` of a run with this tokenizer is: the token that ends a document; None for bytes."""

    @property
    def before(self) -> tuple[int, ...]:
        """The ids that the tokenizer's file puts before a text, as one that marks its beginning."""

    @property
    def after(self) -> tuple[int, ...]:
        """The ids that the tokenizer's file puts after a text."""

    @property
    def adds_special_tokens(self) -> bool:
        """Are `before` and `after` put around texts if nothing else is asked for?"""

    @property
    def fingerprint(self) -> str:
        """A text that differs between tokenizers that give different ids."""

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Returns the ids of a text, without `before` and `after`."""

    def encode_with_spans(self, text: str) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """Returns the ids that `encode` gives, and the characters of each: the first and the end, [num_ids, 2]. Ids of
        parts of a character all have that character.
        """

    def decode(self, ids: NDArray[np.integer[Any]], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Invalid bytes become U+FFFD. Special tokens, and the one that ends a document,
        are left out unless `skip_special_tokens` is False.
        """

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes of a token that is a part of a character, whose text is U+FFFD; None if not known."""

    def keeping(self, words: Collection[str]) -> "Tokenizer":
        """Returns this tokenizer, which decodes these of its special tokens always."""


class ByteTokenizer:
    """Encodes text as its UTF-8 bytes, ids 0 to 255. Id 256 ends a document, so there are 257 ids."""

    vocab_size = 257
    end = 256
    end_token: str | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    adds_special_tokens = True
    fingerprint = "bytes, 256 ends a document"

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_with_spans(self, text: str) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        first = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return self.encode(text), np.stack((first, first + 1), 1)

    def decode(self, ids: NDArray[np.integer[Any]], skip_special_tokens: bool = True) -> str:
        ids = np.asarray(ids)  # the id that ends a document has no text
        # A model's vocabulary may be padded beyond 257. 0xFF is never valid UTF-8, so such ids become U+FFFD.
        data: bytes = np.minimum(ids[ids != self.end], 255).astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < self.end else None

    def keeping(self, words: Collection[str]) -> "ByteTokenizer":
        return self


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`. Special tokens in a text are encoded as such, as in transformers: those of
    the file, and those that the files beside it name. `earlier_end_token` ended documents in an earlier weft, which
    read no file beside it, if no other was given.
    """

    def __init__(self, path: Path, end_token: str | None, adds_special_tokens: bool = True) -> None:
        try:
            from tokenizers import Tokenizer as Backend
            from tokenizers.processors import ByteLevel
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
        self.earlier_end_token = self._first_known(END_TOKENS)
        self._named = named_tokens(path.parent)
        new = self._add_special(path.parent)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end = self._find_end(path, end_token)
        self.end_token: str | None = self.token(self.end)
        self.before, self.after = self._surroundings()
        self.adds_special_tokens = adds_special_tokens
        self._left_out: NDArray[np.integer[Any]] | None = None  # special tokens that have no text; None: all of them
        self.definition: str = self._backend.to_str()  # as JSON
        # What the file does to ids changes nothing of `encode`, but may cut blanks off the spans of tokens.
        self._backend.post_processor = ByteLevel(trim_offsets=False)
        also = f", {new} are special" if new else ""
        self.fingerprint = f"{hashlib.sha256(content).hexdigest()}, {self.end} ends a document{also}"

    def token(self, identity: int) -> str:
        """Returns a token as the vocabulary has it."""
        text: str | None = self._backend.id_to_token(identity)
        assert text is not None, "an id of the vocabulary"
        return text

    def _add_special(self, folder: Path) -> list[str]:
        """Makes words of the vocabulary special, or whole tokens, that the files beside the tokenizer say to be so.
        Returns them.
        """
        from tokenizers import AddedToken

        known, changed = self._backend.get_added_tokens_decoder(), []
        for table in special_tokens(folder):
            identity = self._backend.token_to_id(table["content"])
            token = AddedToken(**table) if identity not in known else known[identity]
            if identity is None or (identity in known and token.special >= table["special"]):
                continue
            token.special = table["special"]
            changed.append(token)
        self._backend.add_tokens(changed)
        return [token.content for token in changed]

    def _find_end(self, path: Path, end_token: str | None) -> int:
        """Returns the id of `end_token`; without one, that of the end token that the files beside the tokenizer name
        first, or else that of the first known one, special tokens before others of the vocabulary.
        """
        folder = path.parent
        asked = exported_end_token(folder) if end_token is None else end_token
        candidates = END_TOKENS if asked is None else (asked,)
        if asked is None:
            named: int | None = self._backend.token_to_id(self._named.get("eos_token", ""))
            stated = [one for one in (named, *stated_end_tokens(folder)) if one is not None]
            for identity in stated:
                if 0 <= identity < self.vocab_size:
                    return identity
        found = self._first_known(candidates)
        if found is not None:
            end: int | None = self._backend.token_to_id(found)
            assert end is not None, "it is known"
            return end
        others = ", ".join(self._special()[:MAX_NAMED]) or "those of its vocabulary"
        raise DataError(
            f"{path} has no token {' or '.join(candidates)} to end a document; set data.end_token to one of {others}"
        )

    def _special(self) -> list[str]:
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def _first_known(self, candidates: Sequence[str]) -> str | None:
        """Returns the first of some tokens that the vocabulary has, special ones before others; None if it has none."""
        special = self._special()
        known = [token for token in candidates if self._backend.token_to_id(token) is not None]
        return min(known, key=lambda token: token not in special, default=None)

    def _surroundings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids that the file puts before and after any text."""
        ids: list[int] = []
        for text in ("a", *self._backend.get_vocab()):  # a vocabulary may be without the letter
            whole = self._backend.encode(text, add_special_tokens=True)
            ids = whole.ids
            own = [place for place, is_added in enumerate(whole.special_tokens_mask) if not is_added]
            if own:
                return tuple(ids[: own[0]]), tuple(ids[own[-1] + 1 :])
        return tuple(ids), ()

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_with_spans(self, text: str) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        found = self._backend.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=np.uint32), np.array(found.offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: NDArray[np.integer[Any]], skip_special_tokens: bool = True) -> str:
        ids = np.asarray(ids)
        kept = ids[ids != self.end] if skip_special_tokens else ids
        if skip_special_tokens and self._left_out is not None:
            kept, skip_special_tokens = kept[~np.isin(kept, self._left_out)], False
        text: str = self._backend.decode(kept.tolist(), skip_special_tokens=skip_special_tokens)
        return text

    def keeping(self, words: Collection[str]) -> "FileTokenizer":
        added = self._backend.get_added_tokens_decoder()
        found = copy.copy(self)
        found._left_out = np.array([one for one in added if added[one].special and added[one].content not in words])
        return found

    def without_special_tokens(self) -> str:
        """Returns a tokenizer.json that surrounds texts with nothing."""
        table = json.loads(self.definition)
        table["post_processor"] = None
        return json.dumps(table, ensure_ascii=False)

    def token_bytes(self, token: int) -> bytes | None:
        word: str | None = self._backend.id_to_token(token)
        if word is None:
            return None
        if re.fullmatch("<0x[0-9A-F]{2}>", word):  # of tokenizers with bytes beside words, as Llama 2's
            return bytes.fromhex(word[3:5])
        text = self.decode(np.array([token]), skip_special_tokens=False)
        for found in (_of_byte_letters(word), word.encode()):
            if found is not None and found.decode(errors="replace") == text:
                return found
        return None


def _of_byte_letters(word: str) -> bytes | None:
    """Returns the bytes of a word of a byte-level vocabulary, as GPT-2's; None if it is none."""
    return bytes(_BYTES_BY_LETTER[letter] for letter in word) if _BYTES_BY_LETTER.keys() >= set(word) else None


def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool | None = None) -> list[int]:
    """Returns the ids of a text that somebody gave, between `before` and `after` if that is asked for or, without
    `add_special_tokens`, if the tokenizer does so. Raises DataError for a text that has no encoding.
    """
    try:
        text.encode()  # the tokenizers library would say TypeError
    except UnicodeEncodeError:
        raise DataError(
            "a text has half of a surrogate pair (\\ud800 to \\udfff), which is no character; give whole ones, in UTF-8"
        ) from None
    ids: list[int] = tokenizer.encode(text).tolist()
    adds = tokenizer.adds_special_tokens if add_special_tokens is None else add_special_tokens
    return [*tokenizer.before, *ids, *tokenizer.after] if adds else ids


def document_marks(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids before and after each document to learn from. The last one is that which ends a document."""
    before, after = (tokenizer.before, tokenizer.after) if tokenizer.adds_special_tokens else ((), ())
    return before, after if after[-1:] == (tokenizer.end,) else (*after, tokenizer.end)


def texts_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a text that differs if documents to learn from get different ids."""
    before, after = document_marks(tokenizer)
    is_plain = not before and after == (tokenizer.end,)
    return tokenizer.fingerprint if is_plain else f"{tokenizer.fingerprint}, {before} and {after} surround texts"


def marks_in_words(tokenizer: Tokenizer) -> str:
    """Returns which tokens of a tokenizer's file surround each document to learn from; "" for bytes."""
    if not isinstance(tokenizer, FileTokenizer):
        return ""
    before, after = ("".join(map(tokenizer.token, ids)) for ids in document_marks(tokenizer))
    return f"each text is between {before} and {after}" if before else f"each text ends with {after}"


def identity_of(tokenizer: Tokenizer) -> str:
    """Returns a text that differs if the tokenizer's file does, or the token that ends a document."""
    return tokenizer.fingerprint.partition(" ends a document")[0]


def load_tokenizer(
    spec: str | Path, *, end_token: str | None = None, adds_special_tokens: bool = True
) -> ByteTokenizer | FileTokenizer:
    """Load a tokenizer: "bytes", a `tokenizer.json`, or a model folder that contains one. `adds_special_tokens`: are
    texts surrounded as the file says?
    """
    if spec == "bytes":
        if end_token is not None:
            raise DataError(
                f"data.end_token = {end_token!r} was given for 'bytes', whose end is always id 256; leave it out"
            )
        return ByteTokenizer()
    path = Path(spec)
    return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path, end_token, adds_special_tokens)
