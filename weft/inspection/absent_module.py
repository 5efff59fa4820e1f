"""A placeholder module that a pipeline stage's model holds in place of a unit of another stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class AbsentModule(nn.Module):
    """Placeholder for a unit (a block or another module) of another pipeline stage.

    It has no parameters and no submodules. All other attributes are read from the original module, except methods of
    Python's protocols: a parametrized module has its own `__deepcopy__`, which would return the original.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module_name"], self.__dict__["stands_for"] = name, module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(self.__dict__["stands_for"], name)

    def set_result_function(self, result_of: Callable[[str], Any]) -> None:
        """Set the function that a call of this module returns the result of; its argument is the module's name."""
        self.__dict__["result_of"] = result_of

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.__dict__["result_of"](self.__dict__["module_name"])
