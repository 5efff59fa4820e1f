"""A progress bar on the terminal. Rich is imported when one is shown: other parts of a command start without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def byte_progress(console: Console, title: str) -> Iterator[Any]:
    """Show a progress bar inside the context; yields its callback `(done, total)`, in bytes or items."""
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
    """The same on stderr, which leaves stdout to the results."""
    from rich.console import Console

    with byte_progress(Console(stderr=True), title) as progress:
        yield progress
