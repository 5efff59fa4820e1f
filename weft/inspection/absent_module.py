"""What hangs in a stage's model in place of a unit that another stage holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Elsewhere(nn.Module):
    """Stands for a unit of another stage; what it has beside parameters and modules can still be asked."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module_name"], self.__dict__["stands_for"] = name, module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def answer_by(self, pass_by: Callable[[str], Any]) -> None:
        """What to say for its result when it is called, by its name."""
        self.__dict__["pass_by"] = pass_by

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.__dict__["pass_by"](self.__dict__["module_name"])
