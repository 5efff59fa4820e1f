"""How a model is split over the tensor axes: each of its linears and convolutions, and what follows them.

`pairing.py` finds it; the strategies of x and y lay models out by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import nn

from weft.inspection.chain_ends import Ends, find_ends
from weft.inspection.parameter_cut import Interval, share_units, stack

Kind = Literal["column", "row", "gathered", "head"]
WHOLE_ATTRIBUTE = "_weft_whole"  # of a stage's model, where the whole model's stream is whole over y


@dataclass(frozen=True)
class Part:
    """A fused part of the dim that goes over x: so many units (heads, or features) of so many features each."""

    num_units: int
    unit: int = 1
    is_key: bool = False  # key and value heads may be fewer than x, and are then repeated

    @property
    def width(self) -> int:
        """Features."""
        return self.num_units * self.unit

    def repeats(self, degree: int) -> int:
        """How many neighbours of `degree` hold the same units."""
        return degree // self.num_units if self.is_key and self.num_units < degree else 1

    def share(self, degree: int, index: int) -> Interval:
        """The features of rank `index` of `degree`."""
        repeats = self.repeats(degree)
        return share_units(self.num_units, self.unit, degree // repeats, index // repeats)


@dataclass(frozen=True)
class Split:
    """How one linear or convolution is split.

    `parent` holds several columns with one input, which enter the region together.
    """

    module: str
    kind: Kind
    parts: tuple[Part, ...]
    parent: str | None = None
    turned: bool = False  # weight is [in, out], as in transformers' Conv1D
    num_spatial: int = 0  # dims behind the channels: 1 to 3 for a convolution, none for a linear

    def over_x(self, degree: int, index: int) -> tuple[Interval, ...]:
        """The intervals of the dim that goes over x."""
        return stack_parts(self.parts, degree, index)

    def repeats(self, degree: int) -> int:
        """How many neighbours on x hold the same."""
        return max(part.repeats(degree) for part in self.parts)


@dataclass(frozen=True)
class Scaled:
    """Integer attributes of an attention module that count what a rank of x has: heads, their width, key heads."""

    attributes: tuple[str, ...]
    num_key_heads: int

    def apply(self, module: nn.Module, degree: int) -> None:
        """Leave the module with the counts of one part of `degree`."""
        for name in self.attributes:
            setattr(module, name, max(1, getattr(module, name) // degree))
        groups = getattr(module, "num_key_value_groups", None)
        if isinstance(groups, int) and self.num_key_heads < degree:
            setattr(module, "num_key_value_groups", groups * self.num_key_heads // degree)  # noqa: B010 (for mypy)


@dataclass(frozen=True)
class Pairing:
    """All that the tensor axes touch."""

    splits: dict[str, Split] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    inner: frozenset[str] = frozenset()  # parameters used by each rank for its own features or heads only
    scaled: dict[str, Scaled] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    model: nn.Module | None = field(default=None, compare=False, repr=False)

    @cached_property
    def ends(self) -> Ends:
        """What stands where the chain of blocks begins and ends."""
        assert self.model is not None
        norms = [name for name, module in self.model.named_modules() if is_norm(module) and not self.block_of(name)]
        head = next((split.module for split in self.splits.values() if split.kind == "head"), None)
        return find_ends(self.model, self.blocks, self.embeddings, norms, head)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of y hold whole what lies between layers, and not its features over y.

        So in a model with convolutions: their channels are not the last dim, and pools, norms and flattens on the way
        to a linear would each need to know which dim is split. Also in a stage of one that has none of them.
        """
        is_of_one = self.model is not None and self.model.__dict__.get(WHOLE_ATTRIBUTE, False)
        return is_of_one or any(split.num_spatial for split in self.splits.values())

    def block_of(self, name: str) -> str | None:
        """The block that a module or parameter is in, or is."""
        return next((block for block in self.blocks if name == block or name.startswith(f"{block}.")), None)


def stack_parts(parts: Sequence[Part], degree: int, index: int) -> tuple[Interval, ...]:
    """What rank `index` of `degree` has of parts that lie behind each other."""
    return stack([part.width for part in parts], [part.share(degree, index) for part in parts])


def is_norm(module: nn.Module) -> bool:
    """LayerNorm, or any kind of RMSNorm."""
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or "RMSNorm" in type(module).__name__
