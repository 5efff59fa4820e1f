"""Every place where weft replaces something of torch while code runs. Checked on torch 2.11 and 2.13.

- `replaced`: a public function of torch (`F.relu`, `F.pad`, pools), while a model runs on fake tensors to count what it
  saves. A TorchFunctionMode would not do: recompute calls the functions again in backward, outside of the mode.
- `kernels_at_once`: `AsyncCompile.wait` of Inductor, which is private, so that the pieces of a block are compiled in
  parallel and waited for once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module of torch, and set it back at the end."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def kernels_at_once() -> Iterator[None]:
    """Inside, Inductor starts to compile kernels and does not wait for them; at the end it waits for all."""
    from torch._inductor.async_compile import AsyncCompile  # takes seconds to import

    wait, asked = AsyncCompile.wait, list[tuple[AsyncCompile, dict[str, Any]]]()
    with replaced(AsyncCompile, "wait", lambda self, scope: asked.append((self, scope))):
        yield
    made: dict[int, tuple[Any, Any]] = {}  # by what was asked for: a kernel of two pieces is taken once
    for one, scope in asked:
        scope.update({name: made[id(value)][1] for name, value in scope.items() if id(value) in made})
        before = dict(scope)
        wait(one, scope)
        made |= {id(value): (value, scope[name]) for name, value in before.items() if scope[name] is not value}
