"""What a model asks of a device for one sequence: matmuls, attention and bytes that pass through memory; by block.

All figures are of the whole, unsplit model. Where the tensor axes split them is said by each product's kind, and for
moved bytes by `inner` (the inside of regions, over x) and `outer` (the residual stream: over y, and with
`tensor.sequence` over x).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft.errors import PlanError
from weft.inspection.memory_traffic import FusedTraffic, MemoryTraffic
from weft.inspection.tensor_splits import Split
from weft.profile import Block, Profile

NOTHING = MemoryTraffic()


@dataclass(frozen=True)
class Product:
    """A matmul of a linear: [rows, inputs] · [inputs, outputs]. `kind` says what the tensor axes split."""

    rows: int
    inputs: int
    outputs: int
    kind: str  # column, row, head, gathered or whole
    enters: bool = True  # of several with one input, the first: it enters their region once
    is_last: bool = False  # of its block: backward needs nothing behind it

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


class Filter(NamedTuple):
    """A convolution of one image as the matmul that computes it, for each of its groups: [rows, inputs · taps] ·
    [inputs · taps, outputs]. Rows are output pixels, `in_rows` those of its input; not whole where ranks share them.
    """

    rows: float
    in_rows: float
    inputs: int
    outputs: int
    taps: int
    groups: int = 1
    needs_gradient: bool = True  # of its input

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.inputs * self.taps * self.outputs * self.groups

    def shared(self, share: float) -> Filter:
        """A share of its pixels."""
        return self._replace(rows=self.rows * share, in_rows=self.in_rows * share)


class Call(NamedTuple):
    """A collective, or `times` of it, of one micro-batch in one block: `phase` is forward or backward; of tiles also
    "again": forward, and with recompute once more in backward.
    """

    axis: str
    operation: str
    num_bytes: float
    phase: str
    times: float = 1


@dataclass(frozen=True)
class Part:
    """What one block, or an end of the model, computes for one sequence (or image), and what its tiles say for it."""

    products: tuple[Product, ...] = ()
    attention_flops: int = 0  # of one forward, counted whole
    score_numel: int = 0  # of plain attention
    sequence: int = 0  # of attention
    key_numel: int = 0  # of K, and as many of V
    num_key_heads: int = 1
    num_logits: int = 0  # that the loss reads
    other_flops: int = 0  # of one forward: products of the block's own, and convolutions beside text
    inner: MemoryTraffic = NOTHING
    outer: MemoryTraffic = NOTHING
    compiled: FusedTraffic | None = None  # what both move where the block is compiled
    num_parameters: int = 0
    filters: tuple[Filter, ...] = ()
    told: tuple[Call, ...] = ()

    @property
    def query_numel(self) -> float:
        """Of the queries: each meets every key in two products."""
        return self.attention_flops / (4 * self.sequence) if self.sequence else 0.0

    @property
    def flops(self) -> float:
        """Of one forward, attention counted whole."""
        products = sum(product.flops for product in self.products) + sum(one.flops for one in self.filters)
        return products + self.attention_flops + self.other_flops


@dataclass(frozen=True)
class Workload:
    """A model as a chain: what comes before the blocks (embedding), the blocks, and what follows (norm, head, loss)."""

    first: Part
    blocks: tuple[Part, ...]
    last: Part
    stream_numel: int  # of what one block hands to the next


def workload(profile: Profile) -> Workload:
    """What a profile of one sequence asks of a device."""
    splits = profile.pairing.splits if _pairs(profile) else {}
    names = [block.name for block in profile.blocks]
    blocks = tuple(_part(profile, block, splits) for block in profile.blocks)
    ends = (lambda layer: layer == "", lambda layer: layer != "")
    first, last = (_end(profile, splits, names, is_here) for is_here in ends)
    return Workload(first, blocks, last, profile.stream_numel)


def _pairs(profile: Profile) -> bool:
    """Whether the tensor axes can split the model at all."""
    try:
        return bool(profile.pairing.splits)
    except PlanError:
        return False


def _part(profile: Profile, block: Block, splits: Mapping[str, Split]) -> Part:
    inside = f"{block.name}."
    products = _products(profile, splits, lambda name: name == block.name or name.startswith(inside))
    heads = [heads for name, heads in profile.attentions.items() if name.startswith(inside)]
    inner, outer = _by_place(block.traffic_by_layer, splits)
    scores = sum(one.batch * one.num_heads * one.sequence**2 for one in heads)
    keys = sum(one.batch * one.num_key_heads * one.sequence * one.head_dim for one in heads)
    others = block.flops - block.attention_flops - sum(product.flops for product in products)
    sequence = max((one.sequence for one in heads), default=0)
    return Part(
        products,
        block.attention_flops,
        scores,
        sequence,
        keys,
        min((one.num_key_heads for one in heads), default=1),
        other_flops=max(0, others),
        inner=inner,
        outer=outer,
        compiled=block.compiled_traffic,
        num_parameters=len(block.parameters),
    )


def _end(profile: Profile, splits: Mapping[str, Split], blocks: list[str], is_here: Callable[[str], bool]) -> Part:
    """What lies outside of blocks: before all layers it belongs to the first end, behind any to the last."""
    in_blocks = tuple(f"{name}." for name in blocks)
    products = _products(profile, splits, lambda n: n not in blocks and not n.startswith(in_blocks) and is_here(n))
    moved = {layer: moved for layer, moved in profile.root.traffic_by_layer.items() if is_here(layer)}
    heads = {name for name, split in splits.items() if split.kind == "head" and name in moved}
    num_logits = sum(profile.layers[name].rows * profile.layers[name].out_features for name in heads)
    # What lies behind the head is the loss: how often it passes over the logits is the software's.
    inner, outer = _by_place({layer: one for layer, one in moved.items() if layer not in heads}, splits)
    return Part(products, num_logits=num_logits, inner=inner, outer=outer)


def _products(profile: Profile, splits: Mapping[str, Split], is_here: Callable[[str], bool]) -> tuple[Product, ...]:
    found, entered = [], set()
    for name, layer in profile.layers.items():
        if not (layer.is_linear and is_here(name)):
            continue
        split = splits.get(name)
        region = (split.parent if split is not None else None) or name
        kind = split.kind if split is not None else "whole"
        enters = region not in entered
        found.append(Product(layer.rows, layer.in_features, layer.out_features, kind, enters, layer.is_last))
        entered.add(region)
    return tuple(found)


def _by_place(moved: Mapping[str, MemoryTraffic], splits: Mapping[str, Split]) -> tuple[MemoryTraffic, MemoryTraffic]:
    """(inside of regions, on the residual stream): behind a column, or a head, features are split over x."""
    inner, outer = MemoryTraffic(), MemoryTraffic()
    for layer, one in moved.items():
        split = splits.get(layer)
        if split is not None and split.kind in ("column", "head"):
            inner = inner.plus(one)
        else:
            outer = outer.plus(one)
    return inner, outer
