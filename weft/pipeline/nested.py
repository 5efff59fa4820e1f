"""Tensors inside nested values: tuples, lists, dicts, whatever else torch's pytrees know, and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif _is_dataclass(leaf):
            found += tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A new nested value with each tensor changed."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not _is_dataclass(leaf):
            return leaf
        made = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(made, field.name, map_tensors(change, getattr(leaf, field.name)))  # it may be frozen
        return made

    return tree_map(one, value)


def same(value: Any) -> Any:
    """A new nested value with the same tensors, so that a change to one (a dict, say) does not show in the other."""
    return map_tensors(lambda tensor: tensor, value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
