"""How a model's linears and convolutions are split over the tensor axes, and which other parameters this concerns.

`pairing.py` finds the splits of a model; the strategies of x and y apply them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import nn

from weft.inspection.annotations import Annotation
from weft.inspection.chain_ends import ChainEnds, find_chain_ends
from weft.inspection.embedding_lookup import is_plain_lookup
from weft.inspection.parameter_cut import Interval, share_units, stack_intervals

Kind = Literal["column", "row", "gathered", "head"]
# On a pipeline stage's model: does every rank of y hold the whole model's residual stream, instead of a part of it?
IS_WHOLE = Annotation[bool]("is_whole")


@dataclass(frozen=True)
class SplitPart:
    """One sub-parameter (such as q of q|k|v) along the dim that is split over x: units of `unit` features each.

    A unit (a head, or a single feature) is never divided.
    """

    num_units: int
    unit: int = 1
    is_key: bool = False  # if there are fewer key and value heads than ranks of x, several ranks hold the same one

    @property
    def width(self) -> int:
        """The number of features."""
        return self.num_units * self.unit

    def repeats(self, degree: int) -> int:
        """Returns how many neighbours among `degree` ranks hold the same units."""
        return degree // self.num_units if self.is_key and self.num_units < degree else 1

    def share(self, degree: int, index: int) -> Interval:
        """Returns the features of rank `index` of `degree`, [begin, end)."""
        repeats = self.repeats(degree)
        return share_units(self.num_units, self.unit, degree // repeats, index // repeats)


@dataclass(frozen=True)
class Split:
    """How one linear or convolution is split.

    `kind` is "column" (split by outputs), "row" (split by inputs), "gathered" (split by outputs, which are gathered
    again) or "head" (split over the vocabulary). `parts` are the sub-parameters along the split dim. `parent` is the
    module that holds several columns with the same input, if their collective is shared.
    """

    module: str
    kind: Kind
    parts: tuple[SplitPart, ...]
    parent: str | None = None
    transposed: bool = False  # weight is [in, out], as in transformers' Conv1D
    num_spatial: int = 0  # dims after the channels: 1 to 3 for a convolution, 0 for a linear

    def over_x(self, degree: int, index: int) -> tuple[Interval, ...]:
        """Returns the intervals of the dim that is split over x, for rank `index` of `degree`."""
        return stacked_intervals(self.parts, degree, index)

    def repeats(self, degree: int) -> int:
        """Returns how many neighbours on x hold the same part."""
        return max(part.repeats(degree) for part in self.parts)


@dataclass(frozen=True)
class ScaledAttributes:
    """Names of an attention module's integer attributes that are divided by x: heads, their total width, key heads.

    `of_config` are attributes of its config. The module gets a config of its own, as others use the same one.
    """

    attributes: tuple[str, ...]
    num_key_heads: int
    of_config: tuple[str, ...] = ()

    def apply(self, module: nn.Module, degree: int) -> None:
        """Divide the module's attributes by `degree`."""
        for name in self.attributes:
            setattr(module, name, max(1, getattr(module, name) // degree))
        if self.of_config:
            config = copy.copy(module.config)
            for name in self.of_config:
                setattr(config, name, max(1, getattr(config, name) // degree))
            module.config = config
        groups = getattr(module, "num_key_value_groups", None)
        if isinstance(groups, int) and self.num_key_heads < degree:
            setattr(module, "num_key_value_groups", groups * self.num_key_heads // degree)  # noqa: B010 (for mypy)


@dataclass(frozen=True)
class Pairing:
    """Everything in a model that the tensor axes split or change.

    `splits` has the split of each linear and convolution by name, `embeddings` the names of embeddings, `scaled` the
    attributes to divide by module name, and `blocks` the names of the blocks. `kept` has the modules and parameters
    that every rank of x holds whole, with the reason. `mixers` has modules that mix tokens outside of regions, so that
    they need whole sequences, with the reason. `tied` has, for a parameter that a layer shares under another name
    (`head.bias = self.bias`), the name that says how it is split. `tables` are parameters inside attention with a
    column for each head, which are split as the heads are. `assumption` says what is assumed of the model's logits,
    because the model could not be run to find out.
    """

    splits: dict[str, Split] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    inner: frozenset[str] = frozenset()  # whole parameters that each rank applies to its own features or heads only
    scaled: dict[str, ScaledAttributes] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    mixers: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()
    assumption: str | None = None
    model: nn.Module | None = field(default=None, compare=False, repr=False)

    @cached_property
    def ends(self) -> ChainEnds:
        """The embedding, norm and head that join the chain of blocks directly."""
        assert self.model is not None
        norms = [name for name, module in self.model.named_modules() if is_norm(module) and not self.block_of(name)]
        head = next((split.module for split in self.splits.values() if split.kind == "head"), None)
        plain = [name for name in self.embeddings if is_plain_lookup(self.model.get_submodule(name))]
        return find_chain_ends(self.model, self.blocks, plain, norms, head)

    @property
    def is_whole(self) -> bool:
        """Do all ranks of y hold the values between layers whole, instead of split by features over y?

        True for a model with convolutions: their channels are not the last dim, and pools, norms and flattens before a
        linear would each need to know which dim is split. True also for a pipeline stage of such a model, even if the
        stage has no convolutions.
        """
        is_of_one = self.model is not None and IS_WHOLE.get(self.model)
        return bool(is_of_one) or any(split.num_spatial for split in self.splits.values())

    def block_of(self, name: str) -> str | None:
        """Returns the block that is, or contains, a module or parameter; None if there is none."""
        return next((block for block in self.blocks if name == block or name.startswith(f"{block}.")), None)


def stacked_intervals(parts: Sequence[SplitPart], degree: int, index: int) -> tuple[Interval, ...]:
    """Returns the intervals of rank `index` of `degree` in a dim made of these consecutive parts."""
    return stack_intervals([part.width for part in parts], [part.share(degree, index) for part in parts])


def is_norm(module: nn.Module) -> bool:
    """Is the module a LayerNorm, or any class whose name contains RMSNorm?"""
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or "RMSNorm" in type(module).__name__
