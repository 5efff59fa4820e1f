"""Conversations to learn from: lines of JSON with `messages`, or with `prompt` and `completion`, packed into sequences.

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2? ", "completion": "4"}           texts as they are; lists of messages are rendered by the template

Only answers are targets (`data/conversations.py`). Conversations follow each other in a sequence, each a document of
its own to attention, or several. A document that does not fit into the rest of a sequence begins the next. An input of
~token, below 0, marks the last token of a document.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from weft.data.cache import build_folder, flush_to_disk, lock
from weft.data.conversations import ChatRenderer, Document
from weft.data.sources import DocumentSource, json_lines
from weft.data.tokenizer import texts_fingerprint
from weft.data.tokens import is_held_out
from weft.errors import DataError
from weft.models.loss import IGNORE

FORMAT_VERSION = 3
RECORD = "chats.json"
SIDES = ("train", "held_out")
Added = Literal["whole", "cut", "left out"]  # what became of a conversation


class Packer:
    """Fills rows of `length` inputs and labels with conversations, one after another."""

    def __init__(self, length: int) -> None:
        self.length, self.used, self.num_documents = length, 0, 0
        self.inputs: list[NDArray[np.int32]] = []
        self.labels: list[NDArray[np.int32]] = []

    def add(self, renderer: ChatRenderer, row: Mapping[str, Any], place: str) -> Added:
        """Add a line of the data."""
        found = [self._add_document(document) for document in renderer.documents(row, place)]
        kinds = set(found) or {"left out"}
        return next(iter(kinds)) if len(kinds) == 1 else "cut"

    def _add_document(self, document: Document) -> Added:
        if not any(document.is_target[1 : self.length + 1]):
            return "left out"
        inputs, labels = self._shifted(document)
        inputs[-1] = ~inputs[-1]
        if not self.inputs or self.used + len(inputs) > self.length:
            self._new_row((self.length,), ~0)  # padding: documents of one token each
            self.used = 0
        self._put(..., self.used, inputs, labels)
        self.used += len(inputs)
        self.num_documents += 1
        return "cut" if len(document.ids) > self.length + 1 else "whole"

    def _shifted(self, document: Document) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the inputs and labels of at most `length` + 1 tokens."""
        tokens = np.array(document.ids[: self.length + 1], dtype=np.int32)
        is_target = document.is_target[: self.length + 1]
        return tokens[:-1].copy(), np.where(is_target, tokens, IGNORE)[1:].astype(np.int32)

    def _new_row(self, shape: tuple[int, ...], padding: int) -> None:
        self.inputs.append(np.full(shape, padding, dtype=np.int32))
        self.labels.append(np.full(shape, IGNORE, dtype=np.int32))

    def _put(self, side: Any, begin: int, inputs: NDArray[np.int32], labels: NDArray[np.int32]) -> None:
        self.inputs[-1][side, begin : begin + len(inputs)] = inputs
        self.labels[-1][side, begin : begin + len(inputs)] = labels


class PairPacker(Packer):
    """Makes a row of two sequences, [2, length], of each `prompt` with its `chosen` and its `rejected` answer."""

    def add(self, renderer: ChatRenderer, row: Mapping[str, Any], place: str) -> Added:
        both = renderer.pair(row, place)
        if not all(found and any(found[0].is_target[1 : self.length + 1]) for found in both):
            return "left out"
        self._new_row((2, self.length), 0)
        for side, (document,) in enumerate(both):
            self._put(side, 0, *self._shifted(document))
        self.num_documents += 1
        return "cut" if any(len(document.ids) > self.length + 1 for (document,) in both) else "whole"


class PackedChats:
    """Rows of packed conversations."""

    def __init__(self, inputs: NDArray[np.int32], labels: NDArray[np.int32]) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._inputs)

    def get(self, indices: NDArray[np.integer[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns inputs and labels, int64 [num_indices, sequence]. The last input of a document is ~token."""
        rows = (torch.from_numpy(array[indices].astype(np.int64)) for array in (self._inputs, self._labels))
        inputs, labels = rows
        return inputs, labels


@dataclass(frozen=True)
class Chats:
    """Training and held-out rows. `fingerprint` is a hash of them, and `note` says in words what was left out."""

    train: PackedChats
    held_out: PackedChats
    fingerprint: str
    note: str


def packed_chats(
    source: DocumentSource,
    renderer: ChatRenderer,
    packer: type[Packer],
    length: int,
    held_out: float,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Chats:
    """Returns the conversations of .jsonl files from the cache in `folder`, which is built first if it does not exist.

    A conversation is held out whole, as documents are. One that is longer than a sequence is cut at its end, and one
    without a target is left out.
    """
    if source.kind != "jsonl":
        raise DataError(f"data.kind = 'chat' reads .jsonl files, and the source is {source.description}")
    template = "" if renderer.template is None else renderer.template.fingerprint
    made_of = [source.fingerprint, texts_fingerprint(renderer.tokenizer), template]
    identity = json.dumps([packer.__name__, FORMAT_VERSION, *made_of, length, float(held_out)])
    cache = folder / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if not cache.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / f"{cache.name}.lock", "the packed conversations"):
            if not cache.exists():
                build_folder(cache, partial(_build, source, renderer, packer, length, held_out, progress))
    return _open(cache)


def _build(
    source: DocumentSource,
    renderer: ChatRenderer,
    packer: type[Packer],
    length: int,
    held_out: float,
    progress: Callable[[int, int], None] | None,
    building: Path,
) -> None:
    packers = {side: packer(length) for side in SIDES}
    counts: Counter[Added] = Counter()
    for number, (done_bytes, place, row) in enumerate(_rows(source)):
        side = "held_out" if is_held_out(number, held_out) else "train"
        counts[packers[side].add(renderer, row, place)] += 1
        if progress is not None:
            progress(done_bytes, source.total_bytes)
    if not packers["train"].inputs:
        raise DataError(f"{source.description} has no conversation with an answer in its first {length} tokens")
    if held_out and not packers["held_out"].inputs:  # few conversations: the last row is held out
        if len(packers["train"].inputs) < 2:
            raise DataError(
                f"{source.description} fills one sequence of {length}; give data.held_out = 0, or more data"
            )
        packers["held_out"].inputs.append(packers["train"].inputs.pop())
        packers["held_out"].labels.append(packers["train"].labels.pop())
    digest = hashlib.sha256()
    for side, own in packers.items():
        for kind, rows in (("inputs", own.inputs), ("labels", own.labels)):
            array = np.stack(rows) if rows else np.zeros((0, length), dtype=np.int32)
            digest.update(array.tobytes())
            with (building / f"{side}_{kind}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                flush_to_disk(file)
    num_chats, num_cut, num_left_out = counts.total(), counts["cut"], counts["left out"]
    num_documents = sum(one.num_documents for one in packers.values())
    several = f" in {num_documents:,} documents" if num_documents + num_left_out > num_chats else ""
    cuts = f"{num_cut:,} cut at {length} tokens, {num_left_out:,} without answer left out"
    note = f"{num_chats:,} conversations{several}, {cuts}"
    with (building / RECORD).open("w") as text:
        json.dump({"fingerprint": digest.hexdigest(), "note": note}, text)
        flush_to_disk(text)


def _rows(source: DocumentSource) -> Iterator[tuple[int, str, dict[str, Any]]]:
    before = 0
    for name in source.names:
        path = source.root / name
        for place, row, read_bytes in json_lines(path, "the keys of a conversation"):
            yield before + read_bytes, place, row
        before += path.stat().st_size


def _open(cache: Path) -> Chats:
    try:
        record = json.loads((cache / RECORD).read_bytes())
        arrays = [
            np.load(cache / f"{side}_{kind}.npy", mmap_mode="r", allow_pickle=False)
            for side in SIDES
            for kind in ("inputs", "labels")
        ]
        return Chats(PackedChats(*arrays[:2]), PackedChats(*arrays[2:]), record["fingerprint"], record["note"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the cache {cache} is damaged ({error}); remove it, and it is built again") from None
