"""The chain of blocks of a model, found rather than declared."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The chain of blocks by name, in order of registration, each module once."""
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
