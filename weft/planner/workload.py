"""What a model asks of a device for one sequence: matmuls, attention and bytes that pass through memory; by block.

All figures are of the whole, unsplit model. Where the tensor axes split them is said by each product's kind, and for
moved bytes by `inner` (the inside of regions, over x) and `outer` (the residual stream: over y, and with
`tensor.sequence` over x).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.errors import PlanError
from weft.moved import Moved
from weft.profile import Block, Profile


@dataclass(frozen=True)
class Product:
    """A matmul of a linear: [rows, inputs] · [inputs, outputs]. `kind` says what the tensor axes split."""

    rows: int
    inputs: int
    outputs: int
    kind: str  # column, row, head, gathered or whole

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs

    def local(self, x: int, y: int) -> tuple[int, int, int]:
        """Its shape on one rank of x × y."""
        if self.kind == "row":
            return self.rows, -(-self.inputs // x), -(-self.outputs // y)
        if self.kind == "whole":
            return self.rows, self.inputs, self.outputs
        return self.rows, -(-self.inputs // y), -(-self.outputs // x)


@dataclass(frozen=True)
class Part:
    """What one block, or an end of the model, computes for one sequence."""

    products: tuple[Product, ...] = ()
    attention_flops: int = 0  # of one forward, counted whole
    score_numel: int = 0  # of plain attention
    other_flops: int = 0  # of one forward: convolutions, and products of the block's own
    inner: Moved = Moved()
    outer: Moved = Moved()

    @property
    def flops(self) -> int:
        """Of one forward, attention counted whole."""
        return sum(product.flops for product in self.products) + self.attention_flops + self.other_flops


@dataclass(frozen=True)
class Workload:
    """A model as a chain: what comes before the blocks (embedding), the blocks, and what follows (norm, head, loss)."""

    first: Part
    blocks: tuple[Part, ...]
    last: Part


def workload(profile: Profile) -> Workload:
    """What a profile of one sequence asks of a device."""
    kinds = {split.module: split.kind for split in profile.pairing.splits.values()} if _pairs(profile) else {}
    names = [block.name for block in profile.blocks]
    blocks = tuple(_part(profile, block, kinds) for block in profile.blocks)
    ends = (lambda layer: layer == "", lambda layer: layer != "")
    first, last = (_end(profile, kinds, names, is_here) for is_here in ends)
    return Workload(first, blocks, last)


def _pairs(profile: Profile) -> bool:
    """Whether the tensor axes can split the model at all."""
    try:
        return bool(profile.pairing.splits)
    except PlanError:
        return False


def _part(profile: Profile, block: Block, kinds: Mapping[str, str]) -> Part:
    inside = f"{block.name}."
    products = tuple(
        Product(layer.rows, layer.in_features, layer.out_features, kinds.get(name, "whole"))
        for name, layer in profile.layers.items()
        if (name == block.name or name.startswith(inside)) and layer.is_linear
    )
    heads = [heads for name, heads in profile.attentions.items() if name.startswith(inside)]
    inner, outer = _by_place(block.moved_behind, kinds)
    scores = sum(one.batch * one.num_heads * one.sequence**2 for one in heads)
    others = block.flops - block.attention_flops - sum(product.flops for product in products)
    return Part(products, block.attention_flops, scores, max(0, others), inner, outer)


def _end(profile: Profile, kinds: Mapping[str, str], blocks: list[str], is_here: Callable[[str], bool]) -> Part:
    """What lies outside of blocks: before all layers it belongs to the first end, behind any to the last."""
    in_blocks = tuple(f"{name}." for name in blocks)
    outside = {n: layer for n, layer in profile.layers.items() if n not in blocks and not n.startswith(in_blocks)}
    products = tuple(
        Product(layer.rows, layer.in_features, layer.out_features, kinds.get(name, "whole"))
        for name, layer in outside.items()
        if layer.is_linear and is_here(name)
    )
    moved = {layer: moved for layer, moved in profile.root.moved_behind.items() if is_here(layer)}
    inner, outer = _by_place(moved, kinds)
    return Part(products, inner=inner, outer=outer)


def _by_place(moved: Mapping[str, Moved], kinds: Mapping[str, str]) -> tuple[Moved, Moved]:
    """(inside of regions, on the residual stream): behind a column, or a head, features are split over x."""
    inner, outer = Moved(), Moved()
    for layer, one in moved.items():
        if kinds.get(layer) in ("column", "head"):
            inner = inner.plus(one)
        else:
            outer = outer.plus(one)
    return inner, outer
