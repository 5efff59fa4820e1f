"""A hook on a parameter that does not keep the object whose method it calls alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor


def weakly(method: Callable[..., None], *numbers: int) -> Callable[[Tensor], None]:
    """Return a parameter hook that does not keep its owner alive. Python cannot collect cycles through tensors."""
    reference = weakref.WeakMethod(method)

    def call(tensor: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner(*numbers, tensor)

    return call
