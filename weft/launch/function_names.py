"""Names under which another process can import a function: 'module:function' or 'file.py:function'."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.errors import LaunchError

SCRIPT = "__weft_script__"  # __name__ while a script is run again for its functions


def importable_name(function: Callable[..., Any], what: str) -> str:
    """Returns the name with which `import_by_name` finds the function in another process.

    `what` names the argument in an error. Raises LaunchError if another process cannot import the function.
    """
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


def import_by_name(name: str) -> Any:
    """Import the function or other value that `importable_name` named."""
    place, _, attribute = name.rpartition(":")
    if Path(place).is_file():
        return _script(place)[attribute]
    return getattr(importlib.import_module(place), attribute)


@lru_cache
def _script(path: str) -> dict[str, Any]:
    """Run a script and return its globals. Code under `if __name__ == "__main__"` does not run."""
    return runpy.run_path(path, run_name=SCRIPT)
