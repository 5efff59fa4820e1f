"""All temporary replacements of torch's functions by weft. Checked on torch 2.11 and 2.13.

- `replaced` replaces a public function of torch (`F.relu`, `F.pad`, pools) while a model runs on fake tensors to count
  its saved activations. A TorchFunctionMode would miss calls: recompute calls the functions again in backward, outside
  of the mode.
- `kernels_at_once` replaces `AsyncCompile.wait` of Inductor, which is private. The pieces of a block then compile in
  parallel, and one wait at the end serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute `name` of `owner` to `value` inside the context, and restore it at the end."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def kernels_at_once() -> Iterator[None]:
    """Inside the context, Inductor starts to compile kernels and does not wait. The end of it waits for all of them."""
    from torch._inductor.async_compile import AsyncCompile  # takes seconds to import

    wait, pending = AsyncCompile.wait, list[tuple[AsyncCompile, dict[str, Any]]]()
    with replaced(AsyncCompile, "wait", lambda self, scope: pending.append((self, scope))):
        yield
    kernels: dict[int, tuple[Any, Any]] = {}  # id of a future -> (future, kernel): two pieces may share a kernel
    for compiler, scope in pending:
        scope.update({name: kernels[id(value)][1] for name, value in scope.items() if id(value) in kernels})
        before = dict(scope)
        wait(compiler, scope)
        kernels |= {id(value): (value, scope[name]) for name, value in before.items() if scope[name] is not value}
