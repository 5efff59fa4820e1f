"""Which embeddings can be split by rows: those that use their table only to look rows up.

An embedding may do more than look up: Gemma's scales the rows, OPT's shifts the indices. Its own forward is kept, and
only `F.embedding` of its table is replaced by another lookup (`replaced_lookup`). That the forward uses its table in no
other way is tried: all else sees a table of NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WIDTH = 3  # of the table that is tried
OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")  # each needs the whole table


class _ReplacedLookup(TorchFunctionMode):
    """Calls `lookup(indices)` instead of F.embedding(indices, table)."""

    def __init__(self, table: Tensor, lookup: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.lookup, self.results = table, lookup, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and (args[1] if len(args) > 1 else kwargs["weight"]) is self.table:
            self.results.append(self.lookup(args[0] if args else kwargs["input"]))
            return self.results[-1]
        return func(*args, **kwargs)


def replaced_lookup(module: nn.Embedding, lookup: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Returns the module's forward, in which `lookup(indices)` takes the place of the lookup in its table."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with _ReplacedLookup(module.weight, lookup):
            return forward(*args, **kwargs)

    return run


def is_plain_lookup(module: nn.Module) -> bool:
    """Has the embedding the forward of nn.Embedding?"""
    return type(module).forward is nn.Embedding.forward


def reason_lookup_not_split(module: nn.Embedding) -> str | None:
    """Returns why an embedding cannot be split by rows; None if it can."""
    option = next((option for option in OPTIONS if getattr(module, option)), None)
    if option is not None:
        return f"an embedding with {option}, which needs the whole table"
    if is_plain_lookup(module) or _uses_table_for_lookup_only(module):
        return None
    return f"the forward of {type(module).__name__} uses the embedding's table for more than a lookup"


def _uses_table_for_lookup_only(module: nn.Embedding) -> bool:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(module.num_embeddings, WIDTH, dtype=torch.float64, generator=generator)
    indices = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    try:
        expected = _with_table(module, table)(indices)
        poisoned = _with_table(module, torch.full_like(table, float("nan")))
        with torch.no_grad(), _ReplacedLookup(poisoned.weight, lambda found: table[found]) as lookups:
            found = poisoned(indices)
        return len(lookups.results) == 1 and lookups.results[0].shape == found.shape and torch.equal(found, expected)
    except Exception:  # anything that the user's code may raise: the table is left whole, which `kept` says
        return False


def _with_table(module: nn.Embedding, table: Tensor) -> nn.Embedding:
    """Returns a copy on the CPU with another table. Buffers without a value (on meta) become ones."""
    buffers: dict[int, Any] = {id(one): torch.ones(one.shape) for one in module.buffers() if one.is_meta}
    made = copy.deepcopy(module, {id(module.weight): nn.Parameter(table), **buffers})
    return made.cpu().double().eval()
