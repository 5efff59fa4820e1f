"""Writes the file that a command was asked for, whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from weft.errors import ConfigError


def write_result(path: Path, text: str) -> None:
    """Write a text to a file. Raises ConfigError if that fails, as on a full disk; no new file remains then."""
    existed = path.exists()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if not existed:
            with suppress(OSError):
                path.unlink()
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}; check the path, its permissions and the space left"
        ) from error
