"""Functions by the names under which another process can import them: 'module:function', or 'file.py:function'."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.errors import LaunchError

SCRIPT = "__weft_script__"  # __name__ in a program that is read again for its functions


def name_of(function: Callable[..., Any], what: str) -> str:
    """The name of a function for `find` in another process; `what` says in an error which one it is."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    program = sys.modules.get("__main__")
    file, spec = getattr(program, "__file__", None), getattr(program, "__spec__", None)
    if module == "__main__" and spec is not None:  # started as `python -m module`
        module = spec.name
    if module is None or not name or "<" in name or "." in name or (module == "__main__" and file is None):
        raise LaunchError(
            f"{what} = {function!r} cannot be imported by another process, which this one needs: it has used CUDA, or "
            f"a backward on a machine with GPUs, and cannot fork ranks; define {what} with `def` at the top level of a "
            f"file, or call weft.verify in a program of its own before anything else"
        )
    return f"{file if module == '__main__' else module}:{name}"


def find(name: str) -> Any:
    """The function, or other value, of that name."""
    place, _, attribute = name.rpartition(":")
    if Path(place).is_file():
        return _script(place)[attribute]
    return getattr(importlib.import_module(place), attribute)


@lru_cache
def _script(path: str) -> dict[str, Any]:
    """What a program defines; what it does under `if __name__ == "__main__"` is not done."""
    return runpy.run_path(path, run_name=SCRIPT)
