"""The work of a model for one sequence, by block: matmuls, attention, and bytes that only pass through memory.

All figures are of the whole, unsplit model. The kind of each product says how the tensor axes split it. Memory traffic
is split by place: `inner` is inside regions (split over x), `outer` is on the residual stream (split over y, and with
`tensor.sequence` also over x).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.errors import PlanError
from weft.inspection.memory_traffic import FusedTraffic, MemoryTraffic
from weft.inspection.tensor_splits import Split
from weft.profiling import Block, Profile

NOTHING = MemoryTraffic()


@dataclass(frozen=True)
class Product:
    """A matmul of a linear layer: [rows, inputs] · [inputs, outputs]. `kind` says which dimensions the tensor axes
    split.
    """

    rows: int
    inputs: int
    outputs: int
    kind: str  # column, row, head, gathered or whole
    enters: bool = True  # among layers with the same input only the first enters the region
    is_last: bool = False  # is it the block's last layer? backward needs nothing after it

    @property
    def flops(self) -> int:
        """FLOPs of forward."""
        return 2 * self.rows * self.inputs * self.outputs

    def local(self, x: int, y: int) -> tuple[int, int, int]:
        """Returns its (rows, inputs, outputs) on one rank of x × y."""
        if self.kind == "row":
            return self.rows, -(-self.inputs // x), -(-self.outputs // y)
        if self.kind == "whole":
            return self.rows, self.inputs, self.outputs
        return self.rows, -(-self.inputs // y), -(-self.outputs // x)


class Filter(NamedTuple):
    """A convolution of one image as an implicit matmul, for each of its groups: [rows, inputs · taps] · [inputs · taps,
    outputs].

    Rows are output pixels and `in_rows` input pixels. They need not be whole numbers if ranks share the pixels.
    """

    rows: float
    in_rows: float
    inputs: int
    outputs: int
    taps: int
    groups: int = 1
    needs_gradient: bool = True  # is the gradient of its input needed?

    @property
    def flops(self) -> float:
        """FLOPs of forward."""
        return 2 * self.rows * self.inputs * self.taps * self.outputs * self.groups

    def shared(self, share: float) -> Filter:
        """Returns the same convolution for a share of its pixels."""
        return self._replace(rows=self.rows * share, in_rows=self.in_rows * share)


Phase = Literal["forward", "backward", "again", "recompute", "reduce"]
Beside = Literal["matmuls", "attention", "input gradients", "nothing"]


class Call(NamedTuple):
    """A collective that an axis makes `times` times.

    `phase`: in a micro-batch's "forward" or "backward"; "again" is in forward, and in backward if the block is
    recomputed; "recompute" is for a recomputed forward, before backward; "reduce" is whenever gradients are reduced,
    which is once a step or after each micro-batch. `beside` is the work that a framework may run at the same time.
    `copies` is how often the device copies the tensor before or after the collective.
    """

    axis: str
    operation: str
    num_bytes: float
    phase: Phase
    times: float = 1
    beside: Beside = "matmuls"
    copies: int = 0


@dataclass(frozen=True)
class BlockWork:
    """The work of one block, or of one end of the model, for one sequence or image.

    `tile_calls` are the collectives between tiles of an image.
    """

    products: tuple[Product, ...] = ()
    attention_flops: int = 0  # of one forward, without a causal mask
    score_numel: int = 0  # number of attention scores
    sequence: int = 0  # tokens that attention sees
    key_numel: int = 0  # elements of K; V has as many
    num_key_heads: int = 1
    num_logits: int = 0  # logits that the loss reads
    other_flops: int = 0  # of one forward: other products, and convolutions of language models
    inner: MemoryTraffic = NOTHING
    outer: MemoryTraffic = NOTHING
    compiled: FusedTraffic | None = None  # memory traffic, inner and outer together, if the block is compiled
    num_parameters: int = 0
    routed_numel: int = 0  # elements of the rows for experts: k rows for a token with k experts, or their capacity
    num_experts: int = 0  # of all its layers of experts
    expert_flops: int = 0  # the part of `other_flops` that experts compute
    expert_numel: int = 0  # parameters of experts
    expert_products: tuple[Product, ...] = ()  # their matmuls, each with the rows of all experts
    is_routed_evenly: bool = False  # whether experts have a capacity: all compute as many rows, whatever the routing
    filters: tuple[Filter, ...] = ()
    tile_calls: tuple[Call, ...] = ()

    @property
    def query_numel(self) -> float:
        """Elements of the queries: each meets every key in two products."""
        return self.attention_flops / (4 * self.sequence) if self.sequence else 0.0

    @property
    def flops(self) -> float:
        """FLOPs of one forward, with attention counted without a causal mask."""
        products = sum(product.flops for product in self.products) + sum(one.flops for one in self.filters)
        return products + self.attention_flops + self.other_flops


@dataclass(frozen=True)
class Workload:
    """A model as a chain: layers before the blocks (embedding), the blocks, layers after them (norm, head, loss)."""

    first: BlockWork
    blocks: tuple[BlockWork, ...]
    last: BlockWork
    stream_numel: int  # elements of the activations between two blocks


def workload(profile: Profile) -> Workload:
    """Returns the work of the model in a profile of one sequence."""
    splits = profile.pairing.splits if _pairs(profile) else {}
    names = [block.name for block in profile.blocks]
    blocks = tuple(_part(profile, block, splits) for block in profile.blocks)
    ends = (lambda layer: layer == "", lambda layer: layer != "")
    first, last = (_end(profile, splits, names, is_here) for is_here in ends)
    return Workload(first, blocks, last, profile.stream_numel)


def _pairs(profile: Profile) -> bool:
    """Can the tensor axes split the model at all?"""
    try:
        return bool(profile.pairing.splits)
    except PlanError:
        return False


def _part(profile: Profile, block: Block, splits: Mapping[str, Split]) -> BlockWork:
    inside = f"{block.name}."
    products = _products(profile, splits, lambda name: name == block.name or name.startswith(inside))
    heads = [heads for name, calls in profile.attentions.items() if name.startswith(inside) for heads in calls]
    inner, outer = _by_place(block.traffic_by_layer, splits)
    scores = sum(one.batch * one.num_heads * one.sequence**2 for one in heads)
    keys = sum(one.batch * one.num_key_heads * one.sequence * one.head_dim for one in heads)
    others = block.flops - block.attention_flops - sum(product.flops for product in products)
    sequence = max((one.sequence for one in heads), default=0)
    batch, tokens, hidden = profile.stream_shape if block.experts and len(profile.stream_shape) == 3 else (0, 0, 0)
    with_capacity = {one.num_experts for one in block.experts if one.capacity is not None}
    of_experts = [item for item in block.matmuls.items() if item[0].groups > 1 or item[0].batch in with_capacity]
    return BlockWork(
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
        routed_numel=sum(one.num_rows(batch, tokens) for one in block.experts) * hidden,
        num_experts=sum(one.num_experts for one in block.experts),
        expert_flops=sum(2 * one.batch * one.rows * one.inner * one.columns * count for one, count in of_experts),
        expert_numel=sum(one.numel * one.num_experts for one in block.experts),
        expert_products=tuple(
            Product(one.batch * one.rows, one.inner, one.columns, "column" if one.inner == hidden else "row")
            for one, count in of_experts
            for _ in range(count)
        ),
        is_routed_evenly=bool(with_capacity),
    )


def _end(profile: Profile, splits: Mapping[str, Split], blocks: list[str], is_here: Callable[[str], bool]) -> BlockWork:
    """The work outside of blocks for which `is_here` accepts the layer.

    Operations before all layers belong to the first end, those after any layer to the last end.
    """
    in_blocks = tuple(f"{name}." for name in blocks)
    products = _products(profile, splits, lambda n: n not in blocks and not n.startswith(in_blocks) and is_here(n))
    moved = {layer: moved for layer, moved in profile.root.traffic_by_layer.items() if is_here(layer)}
    heads = {name for name, split in splits.items() if split.kind == "head" and name in moved}
    num_logits = sum(profile.layers[name].rows * profile.layers[name].out_features for name in heads)
    # The operations after the head are the loss. The software determines how many bytes it moves per logit.
    inner, outer = _by_place({layer: one for layer, one in moved.items() if layer not in heads}, splits)
    return BlockWork(products, num_logits=num_logits, inner=inner, outer=outer)


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
    """Returns the memory traffic (inside regions, on the residual stream). After a column layer or head, features are
    split over x.
    """
    inner, outer = MemoryTraffic(), MemoryTraffic()
    for layer, one in moved.items():
        split = splits.get(layer)
        if split is not None and split.kind in ("column", "head"):
            inner = inner.plus(one)
        else:
            outer = outer.plus(one)
    return inner, outer
