"""Writes the file that a command was asked for, whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from weft.errors import ConfigError


def refuse_place(path: Path) -> None:
    """Raise ConfigError if the file of --out cannot stand where it is to be: said before the work that it is for."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path} lies in a folder that does not exist; create {path.parent}, or give another")


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
