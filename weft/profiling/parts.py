"""The classes of a profile: plain values, block by block. Nothing in this file runs a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from weft.architectures import Capacity
from weft.inspection.callers import CheckpointKind
from weft.inspection.memory_traffic import FusedTraffic, MemoryTraffic
from weft.inspection.pairing import pair
from weft.inspection.parameter_cut import Cut
from weft.inspection.tensor_splits import Pairing

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Parameter:
    """A parameter's name, the shape that this rank holds, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    cut: Cut | None = None  # this rank's part under the tensor axes, if they split it; `shape` is the part's shape
    stages: tuple[int, ...] = ()  # the pipeline stages that hold it, if there are several (tied parameters)
    copy: int = 0  # the index of this copy among those along `pipe`

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Matmul(NamedTuple):
    """The shape of a matmul [rows, inner] · [inner, columns], `batch` of them at once.

    With `groups` > 1 the rows are divided among that many right operands (experts), depending on the data.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    groups: int = 1


class Convolution(NamedTuple):
    """The geometry of a convolution; a tuple has one number for each spatial dim."""

    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    is_transposed: bool


@dataclass(frozen=True)
class Experts:
    """The experts of a block. `numel` is the number of parameters of one expert.

    Each token is sent to `per_token` of them; None if no config states it. With a `capacity`, each takes a fixed number
    of rows of every sequence.
    """

    name: str
    num_experts: int
    per_token: int | None
    numel: int
    capacity: Capacity | None = None

    def num_rows(self, batch: int, sequence: int) -> int:
        """Returns the rows that all experts together compute for so many sequences."""
        per_token = self.per_token or 0
        if self.capacity is None:
            return per_token * batch * sequence
        return self.num_experts * batch * self.capacity.tokens(sequence, self.num_experts, per_token)


Paths = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Block:
    """A block of the model, or its root. Counts are for one forward of the example batch, and its backward.

    FLOPs: `flops` and `backward_flops` count attention in full, as torch's counter does. `attention_flops` is the part
    of the forward that is attention, which a causal mask halves.

    Memory traffic: `read_bytes` and `written_bytes` are those of an eager forward, in which each operation is a kernel.
    `traffic_by_layer` has the traffic of operations other than matmuls, by the linear or convolution that they follow
    (see `inspection/memory_traffic.py`). `compiled_traffic` is the traffic of the fused kernels of a compiled block;
    None if it is not compiled.

    Saved activations: `saved_bytes` has the bytes that backward needs for each value of `memory.recompute`, and
    `saved_by_layer` splits them by the linear or convolution after which they are saved. For a compiled block,
    `saved_bytes["none"]` is what torch.compile saves, and `backward_bytes` the peak of its backward above that
    (`compile/torch_partition.py`). `sendable` has, for each value of `memory.recompute`, the bytes of the storages that
    backward needs and that no other block is given; a storage is listed for every block that saves it.

    `boundary_bytes` are the bytes of the block's output. `in_backward` is false if the output requires no gradient, or
    no result of the model depends on it, so that backward skips the block; `needs_gradient` is false if the stream
    before the block needs no gradient. `matmuls` counts each shape (without attention); `convolutions` are in the order
    of computation. `branches` are the places where data forks into independent paths (see `branches.py`).
    """

    name: str
    parameters: tuple[Parameter, ...]
    calls: int = 1
    in_backward: bool = True
    needs_gradient: bool = True
    flops: int = 0
    attention_flops: int = 0
    backward_flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    boundary_bytes: int = 0
    saved_bytes: Mapping[str, int] | None = None
    saved_by_layer: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    traffic_by_layer: Mapping[str, MemoryTraffic] = field(default_factory=dict)
    matmuls: Mapping[Matmul, int] = field(default_factory=dict)
    convolutions: tuple[Convolution, ...] = ()
    experts: tuple[Experts, ...] = ()
    branches: tuple[Paths, ...] = ()
    backward_bytes: int | None = None
    sendable: Mapping[str, Mapping[Any, int]] = field(default_factory=dict)
    compiled_traffic: FusedTraffic | None = None

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class LayerShape:
    """A linear, convolution, embedding or norm in one forward of the example batch.

    `in_features` and `out_features` are channels for a convolution. `rows` is the number of tokens (or pixels) of the
    output and `in_rows` that of the input. `needs_gradient`: the input requires a gradient. `saved_bytes`: bytes that
    no earlier layer saved (those of the input, or 0). `is_last`: its block saves nothing for backward after this layer.
    `in_backward` is false under torch.no_grad(), and if no result of the model depends on that of the layer.
    """

    rows: int
    in_rows: int
    in_features: int
    out_features: int
    needs_gradient: bool
    saved_bytes: int = 0
    is_last: bool = False
    is_linear: bool = False
    in_backward: bool = True


@dataclass(frozen=True)
class Heads:
    """Shape of one attention in one forward of the example batch. `needs_gradient`: its result requires a gradient.
    `is_last`: from the attention on, its block saves nothing for backward.
    """

    batch: int
    num_heads: int
    num_key_heads: int
    sequence: int
    head_dim: int
    needs_gradient: bool = True
    is_last: bool = False


@dataclass(frozen=True)
class ExpertCall:
    """A call of a layer of experts in one forward of the example batch, which gives it `num_rows` rows.

    `needs_gradient`: these rows require a gradient. `in_backward`: backward may pass the call (see `LayerShape`).
    `is_last`: from the call on, its block saves nothing for backward.
    """

    num_rows: int
    needs_gradient: bool
    in_backward: bool = True
    is_last: bool = False


class Flops(NamedTuple):
    """FLOPs of one forward, of the part of it that is attention, and of the backward."""

    all: int = 0
    attention: int = 0
    backward: int = 0

    def plus(self, other: Flops) -> Flops:
        """The sum, field by field."""
        return Flops(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class BackwardShares(NamedTuple):
    """A rank's share, from 0 to 1, of the memory that exists only during backward.

    `inner`: between a column linear and its row linear. `stream`: the residual stream. `head`: after the head. `loss`:
    the loss, which has a formula of its own if classes are split.
    """

    inner: float = 1.0
    stream: float = 1.0
    head: float = 1.0
    loss: float = 1.0


FULL_SHARES = BackwardShares()


@dataclass(frozen=True)
class TensorMetadata:
    """Shape, stride and dtype of a tensor argument of a block. Tensors with equal `storage` share a storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    storage_bytes: int


@dataclass
class RecordedCall:
    """A collective or message of a rank's tile: (axis, operation, bytes), and the block that makes it.

    It is of forward or (`is_backward`) of backward. `recomputed`: recompute repeats it. `event` is the index of the
    trace event that makes it, None if every stage makes it; `events_before` is the number of events before it.
    """

    block: str
    call: tuple[str, str, int]
    is_backward: bool = False
    recomputed: bool = False
    event: int | None = None
    events_before: int = 0


class ProfileCache(Generic[Key, Value]):
    """One kind of result about profiles, each made once for a profile and a key.

    The results are kept in the profile; one that `dataclasses.replace` makes of it has them, too.
    """

    def get(self, profile: Profile | ProfileSource, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the profile's result for a key. The first time, `make` makes it."""
        results = profile.results.setdefault(self, {})
        if key not in results:
            results[key] = make()
        found: Value = results[key]
        return found


Results = dict[ProfileCache[Any, Any], dict[Any, Any]]


@dataclass(frozen=True)
class ProfileSource:
    """The model and the example that a profile was taken of. Profiles of its pipeline stages share it.

    `given` are the arguments (args, kwargs) of each block, with `TensorMetadata` for tensors. If `blocks` are compiled
    ones, `eager` is the source with the uncompiled ones. `results` are those of a `ProfileCache`.
    """

    model: nn.Module
    example: Callable[[], Any]
    finish: Callable[[Any], Any]
    dtype: torch.dtype | None  # of the computation, if not the model's own
    blocks: Mapping[str, Block]  # blocks of the whole model; the root is ''
    given: Mapping[str, Any] = field(default_factory=dict)
    eager: ProfileSource | None = None
    in_pieces: bool = False  # saved activations are those of blocks that are compiled in pieces
    results: Results = field(default_factory=dict)


_PAIRINGS = ProfileCache[None, Pairing]()


@dataclass(frozen=True)
class Profile:
    """A model's root and blocks.

    `batch_mixers` names layers whose result depends on other samples of the batch. `layers` are the linears,
    convolutions, embeddings and norms by name, as they were called last, and `layer_calls` has every call.
    `attentions` has every call of each attention, and `expert_calls` that of each layer of experts.
    `read_outside` names parameters of layers that other code uses, too. `stream_shape` is the shape of the first
    block's input and `stream_numel` its number of elements. `units` has the FLOPs of each block and of each part of the
    root (embedding, norm, head); operations between units count for the unit before them. `in_stream` names the trained
    parameters on which the last block's result depends other than through the first block's input, and `out_of_stream`
    those on which that input, or a result of the model not through a block, depends.

    Other profiles of the same model: `whole` is that of the whole model, where this one is of a pipeline's stage.
    `eager` is that with uncompiled blocks, where these are compiled; `assumptions` has sentences about blocks that
    count as uncompiled all the same. For the planner, `in_head` is that with the loss computed in the head, and
    `of_two` that of two sequences, where backward has bytes that do not grow with the batch. `tile_calls` are the
    collectives of a stage's tile. `results` are those of a `ProfileCache`.
    """

    root: Block
    blocks: tuple[Block, ...]
    buffer_bytes: int = 0
    batch_mixers: tuple[str, ...] = ()
    counted: bool = False
    layers: Mapping[str, LayerShape] = field(default_factory=dict)
    layer_calls: Mapping[str, tuple[LayerShape, ...]] = field(default_factory=dict)
    read_outside: frozenset[str] = frozenset()
    in_stream: frozenset[str] = frozenset()
    out_of_stream: frozenset[str] = frozenset()
    attentions: Mapping[str, tuple[Heads, ...]] = field(default_factory=dict)
    expert_calls: Mapping[str, tuple[ExpertCall, ...]] = field(default_factory=dict)
    stream_numel: int = 0
    stream_shape: tuple[int, ...] = ()
    units: Mapping[str, Flops] = field(default_factory=dict)
    checkpoints: Mapping[str, CheckpointKind] = field(default_factory=dict)  # the model's own, around blocks
    model: nn.Module | None = field(default=None, compare=False, repr=False)
    example: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # as in `ProfileSource`
    source: ProfileSource | None = field(default=None, compare=False, repr=False)
    gathers_logits: bool = False  # the loss takes whole logits, also if x splits them
    has_loss: bool = False  # `finish` was given, and a stage's profile is that of the last stage
    shares: BackwardShares = FULL_SHARES
    dtype: torch.dtype | None = None  # of the computation, if not the model's own
    whole: Profile | None = field(default=None, compare=False, repr=False)
    eager: Profile | None = field(default=None, compare=False, repr=False)
    in_head: Profile | None = field(default=None, compare=False, repr=False)
    of_two: Profile | None = field(default=None, compare=False, repr=False)
    assumptions: tuple[str, ...] = field(default=(), compare=False)
    tile_calls: tuple[RecordedCall, ...] = field(default=(), compare=False, repr=False)
    results: Results = field(default_factory=dict, compare=False, repr=False)
    _proofs: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # for `pair`; stages share them

    @property
    def pairing(self) -> Pairing:
        """How the model's linears can be split over the tensor axes; raises PlanError if they cannot."""
        assert self.model is not None
        return _PAIRINGS.get(self, None, partial(pair, self.model, self._proofs))

    @property
    def all(self) -> tuple[Block, ...]:
        """Every block, the root first."""
        return (self.root, *self.blocks)

    @property
    def numel(self) -> int:
        """The number of parameters of the model; tied ones count once."""
        return sum(block.numel for block in self.all)

    @property
    def num_trained(self) -> int:
        """The number of trainable parameters."""
        return sum(parameter.numel for block in self.all for parameter in block.parameters if parameter.trainable)

    @property
    def flops(self) -> int:
        """FLOPs of one forward of the example batch."""
        return sum(block.flops for block in self.all)

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward of that batch."""
        return sum(block.backward_flops for block in self.all)
