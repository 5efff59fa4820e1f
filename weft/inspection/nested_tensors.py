"""Finds and replaces tensors in nested values: tuples, lists, mappings, other pytrees of torch, and dataclasses.

transformers' outputs are pytrees of torch, and dataclasses and mappings too, which hold each tensor twice.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_is_leaf, tree_leaves, tree_map

_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}  # types that contain no tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of a nested value, in order."""
    kind = type(value)
    if kind in _PLAIN:
        return []
    if isinstance(value, Tensor):
        return [value]
    if kind in (tuple, list, dict):
        return [tensor for item in (value.values() if kind is dict else value) for tensor in tensors_in(item)]
    if not tree_is_leaf(value):
        return tensors_in(tree_leaves(value))
    if _is_dataclass(value):
        return tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    return tensors_in(list(value.values())) if isinstance(value, Mapping) else []


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns a new nested value in which each tensor is replaced by `change(tensor)`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(change, item) for item in value])
    if kind is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    if not tree_is_leaf(value):
        return tree_map(lambda leaf: map_tensors(change, leaf), value)
    if not _is_dataclass(value) and not isinstance(value, MutableMapping):
        return value
    made = copy.copy(value)
    for field in dataclasses.fields(value) if _is_dataclass(value) else ():
        object.__setattr__(made, field.name, map_tensors(change, getattr(value, field.name)))  # it may be frozen
    for key in list(made) if isinstance(made, MutableMapping) else ():
        made[key] = map_tensors(change, value[key])
    return made


def copy_structure(value: Any) -> Any:
    """Returns a new nested value with the same tensors. Changing a container of one does not change the other."""
    return map_tensors(lambda tensor: tensor, value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
