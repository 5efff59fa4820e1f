"""Reads .jsonl files: a JSON object in each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.errors import DataError


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


def refuse_constant(word: str) -> None:
    """Refuse NaN and infinities, which JSON does not have, as `parse_constant` of json.loads."""
    raise ValueError(f"{word} is no JSON number")
