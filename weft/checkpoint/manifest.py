"""The manifest: describes the contents of a checkpoint, and is written and read as JSON.

A manifest is untrusted input: its size, version, fields, types, names, shapes, regions and coverage are checked before
any tensor is read. Its first field is the SHA-256 of the rest of the file, so a flipped bit in a step or a learning
rate is detected as well as one in a tensor. A rank's partial manifest has the same format and lists only this rank's
pieces. Rank 0 merges the partial manifests, and checks the result as the loader does.
"""

import hashlib
import json
import re
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.region import Region, covers
from weft.errors import CheckpointError, FormatError

FORMAT = "weft-checkpoint-1"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 512 * 2**20
# Each chunk of a piece has its own hash, so that a rank that needs a part of a large piece does not read all of it.
HASH_CHUNK_BYTES = 4 * 2**20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
_KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_FORMAT = re.compile(r"weft-checkpoint-[0-9]{1,9}")
_SEAL = b'{"sha256":"%s",'
_SEALED = re.compile(rb'\{"sha256":"')
_SEAL_BYTES = len(_SEAL % (b"0" * 64))


@dataclass(frozen=True)
class StoredPiece:
    """A stored part of a tensor: its file, its key in the file, its region, and the SHA-256 of each
    HASH_CHUNK_BYTES.
    """

    file: str
    key: str
    region: Region
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor: its global name, its kind ("parameter", "buffer", or an optimizer state) and its pieces."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. `state` is the caller's JSON, `previous` the hash of the manifest of the checkpoint
    before, `files` maps file names to bytes.
    """

    step: int
    num_ranks: int
    state: dict[str, Any]
    previous: str | None
    files: dict[str, int]
    entries: tuple[TensorEntry, ...]


def chunk_hashes(piece: Tensor, chunks: Sequence[int]) -> list[str]:
    """The SHA-256 of each of some chunks of a contiguous 1-D host tensor, by as many threads as torch may use here.

    Not by an executor: those take no work at the end of a program, when a save may still be in flight.
    """
    found, left = dict[int, str](), deque(chunks)

    def work() -> None:
        with suppress(IndexError):  # none is left
            while True:
                chunk = left.popleft()
                found[chunk] = _chunk_hash(piece, chunk)

    helpers = [threading.Thread(target=work) for _ in range(min(len(chunks), torch.get_num_threads()) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    return [found[chunk] for chunk in chunks]


def _chunk_hash(piece: Tensor, chunk: int) -> str:
    part = piece.view(torch.uint8)[chunk * HASH_CHUNK_BYTES : (chunk + 1) * HASH_CHUNK_BYTES]
    return hashlib.sha256(part.numpy().data).hexdigest()


def manifest_hash(checkpoint: Path) -> str:
    """The SHA-256 of a checkpoint's manifest, which the next checkpoint stores as `previous`."""
    with (checkpoint / MANIFEST).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def num_chunks(num_elements: int, dtype: torch.dtype) -> int:
    """The number of chunks of a piece that are hashed."""
    return -(-num_elements * dtype.itemsize // HASH_CHUNK_BYTES)


def check_name(name: str, kind: str) -> None:
    """Raise CheckpointError for a name or kind that would be ambiguous as a file's key or is not printable."""
    if not _KIND.fullmatch(kind):
        raise CheckpointError(f"kind {kind!r} must be 1 to 64 letters, digits, '_', '.' or '-'")
    if not 0 < len(name) <= 1024 or not name.isprintable():
        raise CheckpointError(f"tensor name {name[:100]!r} must be 1 to 1024 printable characters")


def encode(manifest: Manifest) -> bytes:
    """The bytes of the manifest file: JSON whose first field is the hash of the rest."""
    document = {
        "format": FORMAT,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "state": manifest.state,
        "previous": manifest.previous,
        "files": manifest.files,
        "tensors": [_entry_document(entry) for entry in manifest.entries],
    }
    return seal(json.dumps(document, allow_nan=False, separators=(",", ":")).encode())


def seal(text: bytes) -> bytes:
    """Insert the hash of a JSON object as its first field. Raises CheckpointError if it is too large to be read."""
    if len(text) + _SEAL_BYTES > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"the manifest has {len(text)} bytes, more than {MAX_MANIFEST_BYTES}; save less state")
    return _SEAL % hashlib.sha256(text).hexdigest().encode() + text[1:]


def decode(raw: bytes, complete: bool = True) -> Manifest:
    """Read a manifest. Anything unexpected raises CheckpointError. With `complete`, the pieces must cover every tensor
    exactly once.
    """
    text = b"{" + raw[_SEAL_BYTES:]
    if raw[:_SEAL_BYTES] != _SEAL % hashlib.sha256(text).hexdigest().encode():
        _refuse_other_seal(raw)
        raise CheckpointError("its bytes do not match its own SHA-256: it is damaged or was edited")
    parsed = parse_json(text)
    _refuse_other_format(parsed)
    document = _fields(
        parsed,
        "the manifest",
        format=str,
        step=int,
        num_ranks=int,
        state=dict,
        previous=(str, type(None)),
        files=dict,
        tensors=list,
    )
    if not 0 <= document["step"] < 2**63 or not 0 < document["num_ranks"] <= 10**9:
        raise CheckpointError(f"step {document['step']} or num_ranks {document['num_ranks']} is out of range")
    if document["previous"] is not None and not _HASH.fullmatch(document["previous"]):
        raise CheckpointError("'previous' is not a SHA-256")
    for name, size_bytes in document["files"].items():
        if not _FILE.fullmatch(name) or type(size_bytes) is not int or not 0 < size_bytes < 2**63:
            raise CheckpointError(f"file {name[:100]!r} needs a name like rank-00000.safetensors and a size in bytes")
    manifest = Manifest(
        step=document["step"],
        num_ranks=document["num_ranks"],
        state=document["state"],
        previous=document["previous"],
        files=document["files"],
        entries=tuple(_entry(tensor, document["files"]) for tensor in document["tensors"]),
    )
    _check_entries(manifest, complete)
    return manifest


def _refuse_other_format(document: object) -> None:
    """Raise FormatError for another format version. Called before the fields are checked, which may differ there."""
    stated = document.get("format") if isinstance(document, dict) else None
    if isinstance(stated, str) and stated != FORMAT:
        raise FormatError(
            f"format {stated[:100]!r} is unknown; this version of weft reads {FORMAT!r}. Use the version that saved "
            f"it, or start anew in another folder"
        )


def _refuse_other_seal(raw: bytes) -> None:
    """Raise FormatError if the manifest has no hash in front, as in another format version. A manifest with a hash that
    does not match is damaged, whatever version it states.
    """
    if _SEALED.match(raw):
        return
    try:
        document = parse_json(raw)
    except CheckpointError:
        return
    if isinstance(document, dict) and _FORMAT.fullmatch(str(document.get("format"))):
        _refuse_other_format(document)


def merge(partials: Sequence[Manifest]) -> Manifest:
    """Merge the partial manifests of all ranks. `state` and `previous` are those of rank 0."""
    first: dict[tuple[str, str], TensorEntry] = {}
    pieces: dict[tuple[str, str], list[StoredPiece]] = defaultdict(list)
    files: dict[str, int] = {}
    for rank, partial in enumerate(partials):
        files.update(partial.files)
        for entry in partial.entries:
            known = first.setdefault((entry.kind, entry.name), entry)
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{entry.kind} {entry.name!r} is {entry.dtype} {entry.shape} on rank {rank}, "
                    f"but {known.dtype} {known.shape} on a rank before it; save it alike on all ranks"
                )
            pieces[entry.kind, entry.name] += entry.pieces
    entries = tuple(replace(first[key], pieces=tuple(pieces[key])) for key in sorted(first))
    return replace(partials[0], files=files, entries=entries)


def parse_json(text: bytes) -> Any:
    """Parse strict JSON, without duplicate keys or NaN. Any error is a CheckpointError."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _fields(value: object, where: str, **types: type | tuple[type, ...]) -> dict[str, Any]:
    """Check that a JSON object has exactly these fields with these types (a bool is not an int), and return it."""
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise CheckpointError(f"{where} needs exactly the fields {', '.join(types)}")
    for name, kind in types.items():
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise CheckpointError(f"field {name!r} of {where} has the wrong type")
    return value


def _list_of(kind: type, values: list[Any], where: str) -> tuple[Any, ...]:
    if any(type(value) is not kind for value in values):
        raise CheckpointError(f"{where} must be a list of {kind.__name__}")
    return tuple(values)


def _entry_document(entry: TensorEntry) -> dict[str, Any]:
    pieces = [
        {
            "file": piece.file,
            "key": piece.key,
            "intervals": [[edge for pair in dim for edge in pair] for dim in piece.region.intervals],
            "start": piece.region.start,
            "stop": piece.region.stop,
            "sha256": piece.sha256,
        }
        for piece in entry.pieces
    ]
    dtype = DTYPE_NAMES[entry.dtype]
    return {"name": entry.name, "kind": entry.kind, "dtype": dtype, "shape": entry.shape, "pieces": pieces}


def _entry(value: object, files: Iterable[str]) -> TensorEntry:
    fields = _fields(value, "a tensor", name=str, kind=str, dtype=str, shape=list, pieces=list)
    check_name(fields["name"], fields["kind"])
    where = f"{fields['kind']} {fields['name']!r}"
    if fields["dtype"] not in DTYPES:
        raise CheckpointError(f"{where} has the unknown dtype {fields['dtype'][:20]!r}")
    shape = _list_of(int, fields["shape"], f"the shape of {where}")
    Region.flat(shape, 0, 0)  # checks the shape even if there is no piece
    dtype = DTYPES[fields["dtype"]]
    pieces = []
    for raw in fields["pieces"]:
        piece = _fields(raw, f"a piece of {where}", file=str, key=str, intervals=list, start=int, stop=int, sha256=list)
        region = _region(shape, piece, where)
        hashes = _list_of(str, piece["sha256"], f"the hashes of {where}")
        if len(hashes) != num_chunks(region.size, dtype) or not all(_HASH.fullmatch(text) for text in hashes):
            raise CheckpointError(f"a piece of {where} needs one SHA-256 for each {HASH_CHUNK_BYTES} bytes")
        if piece["file"] not in files:
            raise CheckpointError(f"a piece of {where} is in file {piece['file'][:100]!r}, which is not listed")
        pieces.append(StoredPiece(piece["file"], piece["key"], region, hashes))
    return TensorEntry(fields["name"], fields["kind"], dtype, shape, tuple(pieces))


def _region(shape: tuple[int, ...], piece: dict[str, Any], where: str) -> Region:
    """The region of a piece. The manifest stores the intervals of a dim in one list: begin, end, begin, end, ..."""
    intervals = []
    for edges in _list_of(list, piece["intervals"], f"the intervals of {where}"):
        edges = _list_of(int, edges, f"the intervals of a dim of {where}")
        if len(edges) % 2:
            raise CheckpointError(f"the intervals of a dim of {where} need a begin and an end each")
        intervals.append(tuple(zip(edges[::2], edges[1::2], strict=True)))
    region = Region(shape, tuple(intervals), piece["start"], piece["stop"])
    if region.intervals != tuple(intervals):
        raise CheckpointError(f"the intervals of {where} must not be empty, and be one where they touch")
    return region


def _check_entries(manifest: Manifest, complete: bool) -> None:
    names: set[tuple[str, str]] = set()
    keys: set[tuple[str, str]] = set()
    for entry in manifest.entries:
        if (entry.kind, entry.name) in names:
            raise CheckpointError(f"{entry.kind} {entry.name!r} is listed twice")
        names.add((entry.kind, entry.name))
        for piece in entry.pieces:
            if (piece.file, piece.key) in keys:
                raise CheckpointError(f"key {piece.key[:100]!r} of {piece.file} is used twice")
            keys.add((piece.file, piece.key))
        if complete and not covers(entry.shape, (piece.region for piece in entry.pieces)):
            whole = f"{entry.kind} {entry.name!r} of shape {entry.shape}"
            raise CheckpointError(f"the pieces of {whole} do not hold each element exactly once")
    if {file for file, _ in keys} != manifest.files.keys():
        raise CheckpointError("a file is listed that holds no piece")
