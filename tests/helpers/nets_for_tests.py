"""Small models in one expression: `net(lambda self, value: self.second(self.first(value)), first=..., second=...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

_CLASSES: dict[Any, type[nn.Module]] = {}


def net(forward: Callable[..., Any], name: str = "Net", **parts: Any) -> nn.Module:
    """A module with these modules, parameters and other attributes; `name` is that of its class.

    Modules whose forwards are the same code without variables from outside are of one class, as the blocks of a chain.
    """
    key = (forward if forward.__closure__ else forward.__code__), name
    if key not in _CLASSES:
        _CLASSES[key] = type(name, (nn.Module,), {"forward": forward})
    made = _CLASSES[key]()
    for part, value in parts.items():
        setattr(made, part, value)
    return made


def chain(blocks: list[nn.Module], **ends: nn.Module) -> nn.Module:
    """Blocks one after another, behind `enter` and before `norm` and `head`, as far as these are given."""

    def forward(self: Any, value: Tensor) -> Tensor:
        before, behind = (
            [getattr(self, name) for name in names if name in ends] for names in (("enter",), ("norm", "head"))
        )
        for part in (*before, *self.blocks, *behind):
            value = part(value)
        return value

    return net(forward, "Chain", blocks=nn.ModuleList(blocks), **ends)


def mlp_block(width: int, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    """A norm, two linears and a residual."""
    up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    return net(_mlp, "Block", norm=norm(width), up=up, down=down)


def _mlp(self: Any, hidden: Tensor) -> Tensor:
    return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class _Again(nn.ModuleList):
    """Layers of which the first comes again behind the last."""

    def __iter__(self) -> Iterator[nn.Module]:
        yield from super().__iter__()
        yield self[0]


def repeated(model: Any) -> nn.Module:
    """The decoder, whose first layer is called again behind the last."""
    model.model.layers = _Again(list(model.model.layers))
    return model
