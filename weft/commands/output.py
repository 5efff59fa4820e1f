"""What commands write: the file that was asked for, the text of a model, a progress bar. Imports rich to show one."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def refuse_place(path: Path) -> None:
    """Raise ConfigError if the file of --out cannot be written there. Call it before the work whose result it takes."""
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


def warn(message: str) -> None:
    """Tell the user something on stderr, which leaves stdout to the results."""
    print(f"weft: {message}", file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """Print a text that a model wrote. On a terminal, control characters are replaced: they could change its state."""
    if sys.stdout.isatty():
        text = "".join(
            letter if letter in "\n\t" or unicodedata.category(letter) != "Cc" else "\N{REPLACEMENT CHARACTER}"
            for letter in text
        )
    print(text)


@contextmanager
def byte_progress(console: Console, title: str) -> Iterator[Any]:
    """Show a progress bar inside the context. Yields its callback `(done, total)`, in bytes or items."""
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), console=console
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
        whole = bar.tasks[task].total or 1
        bar.update(task, completed=whole, total=whole)  # also if nothing was to be done


@contextmanager
def progress_on_stderr(title: str) -> Iterator[Any]:
    """Show a progress bar on stderr, which leaves stdout to the results. Yields its callback."""
    from rich.console import Console

    with byte_progress(Console(stderr=True), title) as progress:
        yield progress
