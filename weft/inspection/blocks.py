"""Finds a model's chain of blocks and its other modules with parameters, which the model need not declare; and a
placeholder for those that another pipeline stage holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks by name, in order of registration; a module that occurs twice is returned once.

    A block is a child with parameters of an `nn.ModuleList` or `nn.Sequential`.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        is_chain = isinstance(module, (nn.ModuleList, nn.Sequential))
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if is_chain and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                if id(child) not in seen and any(True for _ in child.parameters()):
                    seen.add(id(child))
                    found[path] = child
            else:
                visit(path, child)

    visit("", model)
    return found


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the blocks, and the outermost other modules that have parameters and contain no blocks.

    A list or dict of modules is none, because a forward calls what it contains.
    In a model without blocks that is one such module (a wrapper), they are the modules inside it.
    """
    blocks = find_blocks(model)
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            holds_blocks = any(block.startswith(f"{path}.") for block in blocks)
            is_called = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if path in blocks or (is_called and not holds_blocks and any(True for _ in child.parameters())):
                found[path] = child
            else:
                visit(path, child)

    visit("", model)
    while not blocks and len(found) == 1:
        ((name, only),) = found.items()
        if any(True for _ in only.parameters(recurse=False)):
            break
        found.clear()
        visit(name, only)
    return found


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
