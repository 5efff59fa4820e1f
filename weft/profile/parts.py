"""What a profile is: plain values, block by block. Nothing here runs a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.inspection.memory_traffic import FusedTraffic, MemoryTraffic
from weft.inspection.pairing import pair
from weft.inspection.parameter_cut import Cut
from weft.inspection.tensor_splits import Pairing


@dataclass(frozen=True)
class Parameter:
    """A parameter's name, the shape that this rank holds, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    cut: Cut | None = None  # where the tensor axes leave each rank a part, of which `shape` is the shape
    stages: tuple[int, ...] = ()  # of a pipeline, where several hold it (tied parameters)
    copy: int = 0  # which of several holders along `pipe` this is

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


class Matmul(NamedTuple):
    """[rows, inner] · [inner, columns], `batch` of them at once.

    With `groups` the rows are dealt among so many right sides (experts), how many to each depends on the data.
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
    """Alike parts of a block of which each token takes `per_token` (None where no config says); `numel` is of one."""

    name: str
    num_experts: int
    per_token: int | None
    numel: int


Paths = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Block:
    """A unit of the model's chain. Counts are for one forward of the example batch, and its backward.

    `flops` and `backward_flops` count attention in full, as torch's counter does; `attention_flops` is that part of the
    forward, which a causal mask halves. `read_bytes` and `written_bytes` are those of the forward where each operation
    is a kernel. `saved_bytes` are those that backward needs, by `memory.recompute`, and `saved_behind` the part of them
    that comes behind each linear or convolution and before the next; `moved_behind` are the bytes that pass through
    memory there beside matmuls (see `moved.py`). `boundary_bytes` is what the block hands on. `in_backward` is false
    for a block whose output needs no gradient: nothing of it is needed again.

    Of a compiled block `saved_bytes["none"]` is what torch.compile keeps, and `backward_bytes` the most that its
    backward holds over it (`compile/torch_partition.py`). `sendable` are, by `memory.recompute`, the storages that
    backward needs and that no other block is given, with their bytes, whichever block is the first to save them.
    `compiled_moves` are the bytes that its fused kernels move (`FusedTraffic` there); None where it is not compiled.

    `matmuls` says how often each shape occurs (attention apart), `convolutions` are in the order of computation.
    `branches` are the places where data forks into paths that need nothing of each other (see `flow.py`).
    """

    name: str
    parameters: tuple[Parameter, ...]
    calls: int = 1
    in_backward: bool = True
    flops: int = 0
    attention_flops: int = 0
    backward_flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    boundary_bytes: int = 0
    saved_bytes: Mapping[str, int] | None = None
    saved_behind: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moved_behind: Mapping[str, MemoryTraffic] = field(default_factory=dict)
    matmuls: Mapping[Matmul, int] = field(default_factory=dict)
    convolutions: tuple[Convolution, ...] = ()
    experts: tuple[Experts, ...] = ()
    branches: tuple[Paths, ...] = ()
    backward_bytes: int | None = None
    sendable: Mapping[str, Mapping[Any, int]] = field(default_factory=dict)
    compiled_moves: FusedTraffic | None = None

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Layer:
    """A linear, convolution, embedding or norm in one forward of the example batch: features in and out (channels).

    `rows` are the tokens (or pixels) of its output and `in_rows` of its input; `needs_gradient` says whether its input
    has a gradient; `saved_bytes` are what it is the first to save (its input, or nothing); `is_last` is true where its
    block saves nothing for backward behind it.
    """

    rows: int
    in_rows: int
    in_features: int
    out_features: int
    needs_gradient: bool
    saved_bytes: int = 0
    is_last: bool = False
    is_linear: bool = False


@dataclass(frozen=True)
class Heads:
    """One attention in one forward of the example batch."""

    batch: int
    num_heads: int
    num_key_heads: int
    sequence: int
    head_dim: int


class Flops(NamedTuple):
    """Of one forward, the part of it that is attention, and of the backward."""

    all: int = 0
    attention: int = 0
    backward: int = 0

    def plus(self, other: Flops) -> Flops:
        """The sum, figure by figure."""
        return Flops(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Shares(NamedTuple):
    """A rank's share of what only backward holds: inside of regions, on the residual stream, behind the head, and at
    the loss (whose own form it may be, if classes are split).
    """

    inner: float = 1.0
    stream: float = 1.0
    head: float = 1.0
    loss: float = 1.0


WHOLE = Shares()


@dataclass(frozen=True)
class Given:
    """A tensor that a block was given, by its form; which of them share a storage says `storage`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    storage_bytes: int


@dataclass(frozen=True)
class Source:
    """What a profile was taken of, kept by the profiles of its stages too; `found` is for what is measured later.

    `given` are the arguments (args, kwargs) of each block, with `Given` for tensors. Where `blocks` are compiled ones,
    `eager` is the source with those that are not.
    """

    model: nn.Module
    example: Callable[[], Any]
    finish: Callable[[Any], Any]
    dtype: torch.dtype | None  # that it computes in, if not the model's own
    blocks: Mapping[str, Block]  # of the whole model, the root under ''
    given: Mapping[str, Any] = field(default_factory=dict)
    eager: Source | None = None
    in_pieces: bool = False  # keeps what blocks keep that are compiled in pieces
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """A model's root and blocks. `batch_mixers` names layers whose result depends on other samples of the batch.

    `layers` are the linears, convolutions, embeddings and norms by name; `stream_numel` is the size of what blocks hand
    on, and `stream_shape` the shape of what the first is given. `units` has FLOPs finer, for blocks and for the parts
    of the root (embedding, norm, head); the code that follows a unit counts for it.
    """

    root: Block
    blocks: tuple[Block, ...]
    buffer_bytes: int = 0
    batch_mixers: tuple[str, ...] = ()
    counted: bool = False
    layers: Mapping[str, Layer] = field(default_factory=dict)
    attentions: Mapping[str, Heads] = field(default_factory=dict)
    stream_numel: int = 0
    stream_shape: tuple[int, ...] = ()
    units: Mapping[str, Flops] = field(default_factory=dict)
    model: nn.Module | None = field(default=None, compare=False, repr=False)
    example: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    source: Source | None = field(default=None, compare=False, repr=False)
    has_loss: bool = False  # whether `finish` was given, and for a stage whether it is the last
    shares: Shares = WHOLE
    dtype: torch.dtype | None = None  # that it computes in, if not the model's own
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # what was found out about it
    _proofs: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # of its pairs; stages share them

    @property
    def pairing(self) -> Pairing:
        """How the model's linears can be split; raises PlanError where they cannot."""
        if "pairing" not in self.kept:
            assert self.model is not None
            self.kept["pairing"] = pair(self.model, self._proofs)
        found: Pairing = self.kept["pairing"]
        return found

    @property
    def all(self) -> tuple[Block, ...]:
        """Every block, the root first."""
        return (self.root, *self.blocks)

    @property
    def numel(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(block.numel for block in self.all)

    @property
    def num_trained(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel for block in self.all for parameter in block.parameters if parameter.trainable)

    @property
    def flops(self) -> int:
        """FLOPs of one forward of the example batch."""
        return sum(block.flops for block in self.all)

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward behind it."""
        return sum(block.backward_flops for block in self.all)
