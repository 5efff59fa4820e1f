"""Values that weft stores on a user's module or tensor, typed, in the object's one attribute `_weft`.

They are stored on the object, not in a table beside it, so a deep copy of a model has copies of them.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
ATTRIBUTE = "_weft"
_FOR_STAGES: list[Annotation[Any]] = []


class Annotation(Generic[T]):
    """One kind of value that an object may have, such as a tile's layout. Each is made once, where its type is defined.

    `name` is its key among the object's annotations, and differs from that of every other annotation. `for_stages`: the
    model of a pipeline's stage gets the value of the whole model.
    """

    def __init__(self, name: str, for_stages: bool = False) -> None:
        self.name = name
        if for_stages:
            _FOR_STAGES.append(self)

    def get(self, owner: nn.Module | Tensor) -> T | None:
        """Return the value of an object; None if it has none."""
        values = owner.__dict__.get(ATTRIBUTE)
        return None if values is None else values.get(self.name)

    def set(self, owner: nn.Module | Tensor, value: T) -> None:
        """Set the value of an object. A shallow copy of the object, made before, keeps its own value."""
        owner.__dict__[ATTRIBUTE] = {**owner.__dict__.get(ATTRIBUTE, {}), self.name: value}

    def setdefault(self, owner: nn.Module | Tensor, value: T) -> T:
        """Return the value of an object, which becomes `value` if it has none."""
        found = self.get(owner)
        if found is None:
            self.set(owner, value)
            return value
        return found

    def pop(self, owner: nn.Module | Tensor) -> T | None:
        """Remove the value of an object and return it; None if it has none."""
        found = self.get(owner)
        if found is not None:
            rest = {name: value for name, value in owner.__dict__[ATTRIBUTE].items() if name != self.name}
            owner.__dict__[ATTRIBUTE] = rest
        return found


def give_to_stage(whole: nn.Module, stage: nn.Module) -> None:
    """Set the annotations of the whole model that are `for_stages` on the model of a pipeline's stage."""
    for annotation in _FOR_STAGES:
        value = annotation.get(whole)
        if value is not None:
            annotation.set(stage, value)
