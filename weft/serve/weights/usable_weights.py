"""Which weights a server takes: those that all its ranks can read, and whose numbers are finite.

The start, newer weights (`--follow`) and ranks that start again read weights through the same check. Ranks that start
again take the weights that were served last, if they still exist.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from weft.errors import NumbersError
from weft.saved_run import checkpoint_paths

Read = Callable[[str], Tensor]
Say = Callable[[str], None]


def finite(read: Read, where: Path) -> Read:
    """Return `read`, a function that reads a parameter of the folder `where`, with a check: NumbersError is raised if a
    value is NaN or infinite, because every request would fail with it.
    """

    def checked(name: str) -> Tensor:
        value = read(name)
        known = value.float() if value.itemsize == 1 else value  # torch compares no floats of 8 bits
        if value.numel() and not all(bool(one.isfinite()) for one in known.aminmax()):
            raise NumbersError(f"{name} of {where} has NaN or infinite values; use an older checkpoint")
        return value

    return checked


class ServedRecord:
    """The name of the weights that are served, in a file that outlives ranks; None: nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def write(self, name: str) -> None:
        """Record the weights that are served from now on. A full disk does not end the server."""
        if self._path is not None:
            temporary = self._path.with_suffix(".tmp")
            with suppress(OSError):
                temporary.write_text(name)
                temporary.rename(self._path)

    def read(self) -> str | None:
        """Return the weights that were served last; None if none were."""
        if self._path is not None:
            with suppress(OSError):
                return self._path.read_text()
        return None

    def remove(self) -> None:
        """Delete the file, as nobody starts again."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


def paths_to_try(source: Path, last: str | None, say: Say) -> list[Path]:
    """Return the folders of weights at `source`, in the order in which they are tried: `last`, the name of those that
    were served before, and then the newest ones first. `say` is told if those no longer exist.
    """
    found = [source] if (source / "config.json").is_file() else checkpoint_paths(source)
    before = [path for path in found if path.name == last]
    if last is not None and not before and found != [source]:
        say(f"{last}, which was served, is no longer in {source}; the newest checkpoint is taken")
    return before + [path for path in found if path.name != last]
