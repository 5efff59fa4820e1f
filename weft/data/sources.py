"""Training text: files on this machine, read as a fixed list of documents.

`documents` returns a `DocumentSource` for the name "stdlib" (Python's own library, so that a first run needs no
download), a text file, .jsonl, .parquet, a folder of one of these, or a folder that `datasets.save_to_disk` wrote. The
order of documents depends only on names and content, not on the machine. The corpus is streamed: at most a text piece
of `PIECE_CHARACTERS`, a line or a batch of rows is in memory.
"""

import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.errors import DataError

TEXT_SUFFIXES = frozenset(
    {".c", ".cc", ".cpp", ".cu", ".f90", ".go", ".h", ".hpp", ".html", ".java", ".jl", ".js", ".md", ".py", ".rs"}
    | {".rst", ".sh", ".tex", ".text", ".ts", ".txt"}
)
PIECE_CHARACTERS = 1 << 20
ROWS_AT_ONCE = 1024  # rows of a parquet or arrow file that are converted to Python strings at once
HASHED_BYTES = 16 << 20  # files up to this size are identified by their content

# Some test data of the standard library is deliberately not Python; site-packages is not the standard library.
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# These contain the settings of one build of Python, so they differ between machines.
STDLIB_BUILD_PREFIXES = ("config-", "_sysconfigdata")

RowReader = Iterator[tuple[str, bool, int]]  # text, whether its document ends here, bytes of the file read so far


@dataclass(frozen=True)
class TextPiece:
    """A document, or a part of about `PIECE_CHARACTERS` of a longer text file."""

    text: str
    ends_document: bool
    done_bytes: int  # bytes of the whole source that were read, for a progress bar


@dataclass(frozen=True)
class DocumentSource:
    """A fixed list of documents. Iterating yields their texts; `pieces` yields them in bounded memory."""

    description: str
    kind: str
    root: Path
    names: tuple[str, ...]  # POSIX paths below root, in reading order
    text_field: str

    @property
    def total_bytes(self) -> int:
        return sum((self.root / name).stat().st_size for name in self.names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes when the documents may have changed. It does not depend on the folder's location.

        Small files are identified by content, so a copy or a fresh checkout is recognised. Reading a large corpus at
        every start would take minutes, so large files are identified by size and modification time.
        """
        entries: list[list[str | int]] = []
        for name in self.names:
            path = self.root / name
            status = path.stat()
            small = status.st_size <= HASHED_BYTES
            identity = hashlib.sha256(path.read_bytes()).hexdigest() if small else status.st_mtime_ns
            entries.append([name, status.st_size, identity])
        return hashlib.sha256(json.dumps([self.kind, self.text_field, entries]).encode()).hexdigest()

    def pieces(self) -> Iterator[TextPiece]:
        """Yields all text, in order. Documents without text are left out."""
        finished_bytes = 0
        for name in self.names:
            path = self.root / name
            for text, ends_document, read_bytes in READERS[self.kind](path, self.text_field):
                if text:
                    yield TextPiece(text, ends_document, finished_bytes + read_bytes)
            finished_bytes += path.stat().st_size

    def __iter__(self) -> Iterator[str]:
        parts: list[str] = []
        for piece in self.pieces():
            parts.append(piece.text)
            if piece.ends_document:
                yield "".join(parts)
                parts = []


def documents(path_or_name: str | Path, *, text_field: str = "text") -> DocumentSource:
    """Returns the documents at a path, or of "stdlib" (write "./stdlib" for a folder of that name).

    A text file is one document. Each line of a .jsonl file and each row of a table is one, with its text in
    `text_field`. In a folder, hidden files are left out, and text files beside .jsonl or .parquet files (a README, say)
    are not read.
    """
    if path_or_name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        kind, names, note = "text", _stdlib_names(root), f"Python {sysconfig.get_python_version()}"
    else:
        path = Path(path_or_name)
        if not path.exists():
            raise DataError(
                f"there is no data at {path}; give 'stdlib', a text, .jsonl or .parquet file, a folder of them, "
                "or a folder written by datasets.save_to_disk"
            )
        if path.is_dir():
            root = path
            kind, names, note = _folder_names(path)
        else:
            root = path.parent
            kind, names, note = _kind_of(path.name) or "text", (path.name,), ""
    if kind != "text":
        note = ", ".join(filter(None, [f"text in '{text_field}'", note]))
    total_bytes = sum((root / name).stat().st_size for name in names)
    files = f"{len(names):,} {kind} file{'' if len(names) == 1 else 's'}"
    description = f"{path_or_name}: {files}, {total_bytes / 1e6:,.1f} MB" + (f" ({note})" if note else "")
    return DocumentSource(description, kind, root, tuple(names), text_field)


def _kind_of(name: str) -> str | None:
    suffix = Path(name).suffix.lower()
    return "text" if suffix in TEXT_SUFFIXES else {".jsonl": "jsonl", ".parquet": "parquet"}.get(suffix)


def _walk(root: Path, excluded: frozenset[str] = frozenset()) -> Iterator[str]:
    """Relative POSIX names of the files below a folder, except hidden files and those in linked folders."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in excluded]
        for name in files:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _stdlib_names(root: Path) -> tuple[str, ...]:
    def wanted(name: str) -> bool:
        if not name.endswith(".py") or any(part.startswith(STDLIB_BUILD_PREFIXES) for part in name.split("/")):
            return False
        try:
            (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a source file may declare another encoding
            return False
        return True

    names = tuple(sorted(filter(wanted, _walk(root, STDLIB_EXCLUDED))))
    if not names:
        raise DataError(f"the standard library at {root} holds no .py files; give a path to text instead of 'stdlib'")
    return names


def _folder_names(folder: Path) -> tuple[str, tuple[str, ...], str]:
    """Returns the kind of files to read in a folder, their names, and a note about files that are not read."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json_list(folder / "dataset_dict.json", "splits")
        raise DataError(
            f"{folder} holds the splits {', '.join(splits)}; give the path of one, such as {folder / splits[0]}"
        )
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        names = tuple(entry["filename"] for entry in _read_json_list(folder / "state.json", "_data_files"))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise DataError(f"the saved dataset {folder} lacks its file {missing[0]}; save it again with save_to_disk")
        return "arrow", names, ""

    found: dict[str, list[str]] = {}
    for name in sorted(_walk(folder)):
        if kind := _kind_of(name):
            found.setdefault(kind, []).append(name)
    if not found:
        raise DataError(
            f"the folder {folder} holds no data; it needs .jsonl, .parquet or text files "
            f"({' '.join(sorted(TEXT_SUFFIXES))}), here or in folders below"
        )
    if "jsonl" in found and "parquet" in found:
        raise DataError(f"{folder} holds both .jsonl and .parquet files; give a folder with one kind, or one file")
    records = next((kind for kind in ("jsonl", "parquet") if kind in found), None)
    if records is None:
        return "text", tuple(found["text"]), ""
    note = f"{len(found['text'])} text files beside them are not read" if "text" in found else ""
    return records, tuple(found[records]), note


def _read_json_list(path: Path, key: str) -> list[Any]:
    """Read a list that save_to_disk wrote. Raises DataError if it is missing or empty."""
    try:
        entries = json.loads(path.read_bytes())[key]
        if entries and isinstance(entries, list):
            return entries
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(f"{path} has no list '{key}' with entries; save the dataset again with save_to_disk")


def _read_text(path: Path, text_field: str) -> RowReader:
    """Read a text file as one document. Pieces end after a line if possible, so that few words are split."""
    try:
        with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            piece = file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)
            while piece:
                following = file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)
                yield piece, not following, raw.tell()
                piece = following
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; convert it to UTF-8 or move it away") from None


def json_lines(path: Path, wanted: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields each JSON object of a .jsonl file, with its place for messages and the bytes read up to it.

    `wanted` names the keys that it should have.
    """
    read_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            read_bytes += len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is not valid JSON ({error}); correct the line") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is not a JSON object; each line must be one, with {wanted}")
            yield f"{path}, line {number}", row, read_bytes


def _read_jsonl(path: Path, text_field: str) -> RowReader:
    for place, row, read_bytes in json_lines(path, f"'{text_field}'"):
        _check_field(place, text_field, row)
        yield _checked_text(row[text_field], place, text_field), True, read_bytes


def _read_parquet(path: Path, text_field: str) -> RowReader:
    pyarrow = _import_pyarrow(path)
    from pyarrow.parquet import ParquetFile

    size_bytes = path.stat().st_size
    try:
        with ParquetFile(path) as file:
            _check_field(str(path), text_field, file.schema_arrow.names)
            first_row = 0
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[text_field]):
                yield from _column_texts(
                    batch, text_field, path, first_row, size_bytes * first_row // file.metadata.num_rows
                )
                first_row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); write it again") from None


def _read_arrow(path: Path, text_field: str) -> RowReader:
    """Read a data file of save_to_disk, an Arrow stream, without the datasets library and so without pickle."""
    pyarrow = _import_pyarrow(path)
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            _check_field(str(path), text_field, stream.schema.names)
            first_row = 0
            for batch in stream:
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    rows = batch.slice(start, ROWS_AT_ONCE)
                    yield from _column_texts(rows, text_field, path, first_row + start, file.tell())
                first_row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Arrow file ({error}); save the dataset again") from None


READERS: dict[str, Callable[[Path, str], RowReader]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}


def _column_texts(batch: Any, text_field: str, path: Path, first_row: int, read_bytes: int) -> RowReader:
    for row, value in enumerate(batch.column(text_field), start=first_row):
        where = f"{path}, row {row}"
        try:
            text = value.as_py()
        except UnicodeDecodeError:  # these files do not check their text when they are read
            raise DataError(f"{where}: '{text_field}' is not UTF-8 text; convert it to UTF-8") from None
        yield _checked_text(text, where, text_field), True, read_bytes


def _check_field(where: str, text_field: str, fields: Any) -> None:
    if text_field not in fields:
        raise DataError(
            f"{where} has no field '{text_field}', only {', '.join(fields) or 'none'}; set text_field to one"
        )


def _checked_text(text: object, where: str, text_field: str) -> str:
    if not isinstance(text, str):
        raise DataError(
            f"{where}: the field '{text_field}' is {type(text).__name__}, not text; set text_field to another"
        )
    if not is_unicode(text):
        raise DataError(f"{where}: '{text_field}' holds half a surrogate pair, which is not Unicode text; correct it")
    return text


def is_unicode(text: str) -> bool:
    """Returns whether a text is free of halves of surrogate pairs, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow; run: pip install weft[data]") from None
    return pyarrow
