"""Commands that plan and exit: Python's collector of cyclic garbage is paused.

They import torch's compiler and trace a model, which makes millions of objects that live until the command ends. The
collector would walk through all of them again and again: a seventh of the time of the imports.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Inside the context, cyclic garbage is not collected. Afterwards the collector is as it was before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
