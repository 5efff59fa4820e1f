"""Triton's interpreter, twice as fast: import this before Triton, which looks for TRITON_INTERPRET when it is imported.

The interpreter replaces all functions of triton.language before each call of a jitted function, also of one that a
kernel calls while they are replaced. Here it does so once for each launch of a kernel.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

_replace = interpreter._patch_lang


def _replace_once(function: Any) -> Any:
    used = [one for one in function.__globals__.values() if inspect.ismodule(one) and one in (tl, tl.core)]
    if used and not any(tl.core.is_builtin(one.load) for one in used):
        return interpreter._LangPatchScope()  # which restores nothing
    return _replace(function)


interpreter._patch_lang = _replace_once
