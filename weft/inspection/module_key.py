"""A hashable key of everything that a module's result depends on, except the values of its parameters.

Modules with equal keys and equal parameter values compute equal results. Two layers have equal keys if their classes,
submodules, shapes, settings, buffers and functions are equal. Objects that cannot be compared by value (a function, an
object of an unknown class) are compared by identity. So modules that compute the same may have different keys, but
modules that compute something different never have equal keys.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, enum.Enum, type)


class ByIdentity:
    """Compares an object by identity. It keeps a reference, so that no other object gets the same address."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def module_key(module: nn.Module) -> Hashable:
    """Returns the key of a module and its submodules, parameter shapes, buffers and attributes."""
    return _KeyBuilder().module(module)


class _KeyBuilder:
    def __init__(self) -> None:
        self.seen: dict[int, int] = {}  # id of an object -> its number; an object that occurs again is its number

    def module(self, module: nn.Module) -> Hashable:
        if (number := self.seen.get(id(module))) is not None:
            return "again", number
        self.seen[id(module)] = len(self.seen)
        settings: list[Hashable] = []
        for name, value in vars(module).items():
            if name == "_parameters":
                settings.append((name, tuple((leaf, self._shape(one)) for leaf, one in value.items())))
            elif name.startswith("_") and "_hooks" in name:  # a hook's key is a counter of the process: leave it out
                settings.append((name, tuple(self.value(one) for one in value.values())))
            else:
                settings.append((name, self.value(value)))
        return type(module), tuple(settings)

    def value(self, value: Any) -> Hashable:
        if type(value) is float:
            return float, value.hex()  # 0.0 and -0.0 differ
        if isinstance(value, _VALUES):
            return type(value), value  # 1, True and 1.0 differ
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (tuple, list, torch.Size, set, frozenset, dict) or isinstance(value, dict):
            return self._container(value)
        if type(value) is functools.partial:
            return "partial", self.value(value.func), self.value(value.args), self.value(value.keywords)
        return ByIdentity(value)

    def _container(self, value: Any) -> Hashable:
        if (number := self.seen.get(id(value))) is not None and value:
            return "again", number
        self.seen[id(value)] = len(self.seen)
        if isinstance(value, dict):
            return type(value), tuple((self.value(key), self.value(one)) for key, one in value.items())
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(self.value(one) for one in value)
        return type(value), tuple(self.value(one) for one in value)

    def _shape(self, parameter: Tensor | None) -> Hashable:
        if parameter is None:
            return None
        first = self.seen.setdefault(id(parameter), len(self.seen))  # a tied weight gets the same number in both layers
        return tuple(parameter.shape), parameter.dtype, first

    def _tensor(self, tensor: Tensor) -> Hashable:
        if tensor.is_meta or tensor.layout is not torch.strided:
            return ByIdentity(tensor) if not tensor.is_meta else (tuple(tensor.shape), tensor.dtype, "meta")
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(tensor.shape), tensor.dtype, hashlib.sha256(plain.numpy().tobytes()).digest()
