"""The corpus as token ids on disk, built once and memory-mapped by every process, and its sequences.

A cache is a folder named by its key, with train.npy, held_out.npy and cache.json. It is complete or absent, and the
processes of one machine wait for each other: the first builds it, the others find it complete (`cache.py`).

A hash of a document's number in the source decides whether it is held out, so every machine holds out the same ones. A
document is held out whole; parts of several documents are never joined. If this leaves one side empty (a single file,
few documents, a small fraction), the last `held_out` part of all tokens is held out instead; in a long text file it
starts at the beginning of a line.
"""

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.data.cache import build_folder, flush_to_disk, lock
from weft.data.sources import DocumentSource
from weft.data.tokenizer import Tokenizer, document_marks, texts_fingerprint
from weft.errors import DataError

FORMAT_VERSION = 2
SIDES = ("train", "held_out")
COPY_TOKENS = 1 << 20
MUCH_HELD_OUT = 1 << 20  # tokens: no warning about too many held-out tokens if they are fewer than this
PROGRESS_BYTES = 1 << 20  # progress is reported once per this many bytes, since documents may be a few bytes each

TokenArray = NDArray[np.unsignedinteger[Any]]
Progress = Callable[[int, int], None]

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Tokens:
    """The token ids of a corpus, split into training and held-out tokens."""

    train: TokenArray  # [num_tokens], memory-mapped, each document between its marks (`document_marks`)
    held_out: TokenArray
    fingerprint: str  # a hash of the tokens: equal on machines that train on the same tokens


def token_cache(
    source: DocumentSource, tokenizer: Tokenizer, held_out: float, folder: Path, progress: Progress | None = None
) -> Tokens:
    """Returns the tokens of a source from the cache in `folder`, which is built first if it does not exist.

    `progress(done_bytes, total_bytes)` is called only while the cache is built.
    """
    if not 0 <= held_out < 1:
        raise DataError(f"held_out = {held_out} is not a fraction; use 0 for none, or for example 0.01")
    identity = [source.fingerprint, texts_fingerprint(tokenizer), float(held_out), FORMAT_VERSION]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    cache = folder / key
    if cache.exists():
        # Without the lock: a complete cache may be in a folder that cannot be written.
        with contextlib.suppress(_DamagedCacheError):
            return _open(cache)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / f"{key}.lock", "the token cache"):
        if cache.exists():
            try:
                return _open(cache)
            except _DamagedCacheError as damage:
                logger.warning("the token cache %s is damaged (%s); building it again", cache, damage)
                shutil.rmtree(cache)
        _build(source, tokenizer, held_out, cache, progress or (lambda done_bytes, total_bytes: None))
        return _open(cache)


class _DamagedCacheError(Exception):
    """A cache whose files do not match its record. The message says what does not match."""


def _open(cache: Path) -> Tokens:
    """Map a cache into memory after checking sizes and headers. The content is not checked, as it may be terabytes."""
    try:
        record = json.loads((cache / "cache.json").read_bytes())
        arrays: list[TokenArray] = []
        for side in SIDES:
            path, expected = cache / f"{side}.npy", record[side]
            size_bytes = path.stat().st_size
            if size_bytes != expected["size_bytes"]:
                raise _DamagedCacheError(f"{path.name} has {size_bytes} bytes instead of {expected['size_bytes']}")
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.shape != (expected["num_tokens"],) or array.dtype.str != record["dtype"]:
                raise _DamagedCacheError(f"{path.name} holds {array.dtype.str} {array.shape}, which cache.json denies")
            arrays.append(array)
        fingerprint = hashlib.sha256("".join(record[side]["sha256"] for side in SIDES).encode()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedCacheError(f"{type(error).__name__}: {error}") from None
    return Tokens(arrays[0], arrays[1], fingerprint)


def _build(source: DocumentSource, tokenizer: Tokenizer, held_out: float, cache: Path, progress: Progress) -> None:
    def write(building: Path) -> None:
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        with _TokenFile(building / "train.npy", dtype) as train, _TokenFile(building / "held_out.npy", dtype) as held:
            _write_tokens(source, tokenizer, held_out, train, held, progress)
            if held_out > 0:
                _ensure_both_sides(train, held, held_out, source)
            record: dict[str, Any] = {"train": train.finish(), "held_out": held.finish()}
        record |= {"format_version": FORMAT_VERSION, "dtype": dtype.str, "source": source.description}
        with (building / "cache.json").open("w") as file:
            json.dump(record, file, indent=2)
            flush_to_disk(file)

    build_folder(cache, write)


def _write_tokens(
    source: DocumentSource,
    tokenizer: Tokenizer,
    held_out: float,
    train: "_TokenFile",
    held: "_TokenFile",
    progress: Progress,
) -> None:
    """Tokenize each document and write it to the training or the held-out file."""
    total_bytes = source.total_bytes
    reported_bytes = number = 0
    before, after = map(np.array, document_marks(tokenizer))
    begins = True
    progress(0, total_bytes)
    for piece in source.pieces():
        side = held if is_held_out(number, held_out) else train
        if begins:
            side.append(before)
        ids = tokenizer.encode(piece.text)
        assert ids.size == 0 or int(ids.max()) < tokenizer.vocab_size, "the tokenizer gave an id beyond its vocab_size"
        side.append(ids)
        if piece.ends_document:
            side.append(after)
            number += 1
        else:
            side.cuts.append(side.num_tokens)
        begins = piece.ends_document
        if piece.done_bytes - reported_bytes >= PROGRESS_BYTES:
            reported_bytes = piece.done_bytes
            progress(reported_bytes, total_bytes)
    if train.num_tokens + held.num_tokens == 0:
        raise DataError(f"{source.description} holds no text; give data with at least one document")
    progress(total_bytes, total_bytes)


def is_held_out(index: int, held_out: float) -> bool:
    """Returns whether document or image number `index` is held out: true for about the fraction `held_out` of them."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < held_out * 2**64


def _ensure_both_sides(train: "_TokenFile", held: "_TokenFile", held_out: float, source: DocumentSource) -> None:
    num_tokens = train.num_tokens + held.num_tokens
    if num_tokens < 2:
        raise DataError(f"{source.description} gives {num_tokens} token, too few to hold some out; use held_out = 0")
    if train.num_tokens == 0:
        train.cuts = held.cuts
        held.move_tail(train, num_tokens)
    if held.num_tokens == 0:
        wanted = min(max(round(num_tokens * held_out), 1), num_tokens - 1)
        tails = [num_tokens - cut for cut in train.cuts]
        nearest = min(tails, key=lambda tail: abs(tail - wanted), default=wanted)
        train.move_tail(held, nearest if wanted <= 2 * nearest <= 4 * wanted else wanted)
    elif held.num_tokens > max(MUCH_HELD_OUT, 2 * held_out * num_tokens):
        logger.warning(
            "%s of the tokens of %s are held out where data.held_out = %s: a long document is held out whole",
            f"{held.num_tokens / num_tokens:.2f}",
            source.description,
            held_out,
        )


class _TokenFile:
    """A one-dimensional .npy file to which tokens are appended. Its header is written last, when the count is known."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = path.open("w+b")
        self.num_tokens = 0
        self.cuts: list[int] = []  # numbers of tokens after which a new line of a long document begins
        self._write_header()
        self._header_bytes = self._file.tell()

    def __enter__(self) -> "_TokenFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.num_tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, ids: NDArray[np.integer[Any]]) -> None:
        self._file.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += ids.size

    def move_tail(self, target: "_TokenFile", num_tokens: int) -> None:
        """Move the last `num_tokens` tokens to the end of another file."""
        kept = self.num_tokens - num_tokens
        self._file.seek(self._header_bytes + kept * self._dtype.itemsize)
        while data := self._file.read(COPY_TOKENS * self._dtype.itemsize):
            target.append(np.frombuffer(data, dtype=self._dtype))
        self._file.seek(self._header_bytes + kept * self._dtype.itemsize)
        self._file.truncate()
        self.num_tokens = kept

    def finish(self) -> dict[str, int | str]:
        """Write the header and flush. Returns the file's record for cache.json."""
        size_bytes = self._file.tell()
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._header_bytes, "numpy leaves room in the header for the count to grow"
        flush_to_disk(self._file)
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        return {"num_tokens": self.num_tokens, "size_bytes": size_bytes, "sha256": sha256}


class Sequences:
    """Splits tokens into sequences. Sequence i has the inputs tokens[i * length : (i + 1) * length]; its labels are the
    tokens that follow each of them.
    """

    def __init__(self, tokens: TokenArray, sequence_length: int, *, name: str = "training data") -> None:
        if sequence_length < 1:
            raise DataError(f"a sequence of {sequence_length} tokens is empty; use at least 1")
        if len(tokens) == 0:
            raise DataError(f"the {name} holds no tokens; give more data or change held_out")
        if len(tokens) < sequence_length + 1:
            raise DataError(
                f"data.sequence = {sequence_length} needs at least {sequence_length + 1} tokens, but the {name} "
                f"holds {len(tokens)}; use a sequence of at most {max(len(tokens) - 1, 1)}, or more data"
            )
        self._tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.sequence_length

    def get(self, indices: NDArray[np.integer[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the inputs and labels of some sequences, int64 [num_indices, sequence_length] each."""
        indices = np.asarray(indices, dtype=np.int64)
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < len(self)), "no such sequence"
        positions = indices[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        rows = torch.from_numpy(self._tokens[positions].astype(np.int64))  # [num_indices, sequence_length + 1]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
