"""Random plans and random small models for them, mostly of sizes that the plan divides.

A case follows from the degrees of its axes and a seed, and is a frozen value whose repr builds it again.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import images_for_tests as images
import models_for_tests as models
import pipeline_for_tests as pipelines
import tensor_for_tests as tensors
import torch
from torch import Tensor, nn

from weft.architectures.language import DecoderArchitecture
from weft.models import IGNORE, DecoderConfig, GPT2Config, ModelConfig, build
from weft.plan import Context, Memory, Pipe, Plan, Recompute, Shard
from weft.plan import Tensor as TensorPlan
from weft.sharding.layout import MASTER_DTYPE

CLASSES = 8
NORMS: dict[str, Callable[[int], nn.Module]] = {"none": nn.Identity, "layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": partial(nn.ReLU, inplace=True),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
}


# --- models


@dataclass(frozen=True)
class Decoders:
    """One of weft's own models, over tokens."""

    config: ModelConfig
    sequence: int

    def build(self) -> nn.Module:
        return build(self.config)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, self.config.vocab_size, (size, self.sequence + 1))
        return tokens[:, :-1].contiguous(), masked(tokens[:, 1:].clone())


@dataclass(frozen=True)
class Layer:
    """A layer of an MLP."""

    inner: int
    norm: str
    activation: str
    bias: bool
    is_residual: bool


class MLPBlock(nn.Module):
    """Norm, two linears with an activation between them, and a residual or none."""

    def __init__(self, width: int, layer: Layer) -> None:
        super().__init__()
        self.norm = NORMS[layer.norm](width)
        self.fc1, self.fc2 = nn.Linear(width, layer.inner, layer.bias), nn.Linear(layer.inner, width, layer.bias)
        self.activation, self.is_residual = ACTIVATIONS[layer.activation](), layer.is_residual

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.activation(self.fc1(self.norm(value))))
        return value + out if self.is_residual else out


class Stack(nn.Module):
    """Blocks between an entry and a head."""

    def __init__(self, enter: nn.Module, blocks: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.enter, self.blocks, self.head = enter, blocks, nn.Linear(width, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        value = self.enter(value)
        for block in self.blocks:
            value = block(value)
        out: Tensor = self.head(value)
        return out


@dataclass(frozen=True)
class MLPs:
    """Vectors, or tokens, to classes: blocks of two linears, or a flat chain of linears, norms and activations."""

    width: int
    layers: tuple[Layer, ...]
    is_flat: bool
    num_tokens: int  # none for vectors

    def build(self) -> nn.Module:
        width = self.width
        enter = nn.Embedding(CLASSES, width) if self.num_tokens else nn.Linear(width, width)
        if not self.is_flat:
            return Stack(enter, nn.ModuleList(MLPBlock(width, layer) for layer in self.layers), width)
        chain: list[nn.Module] = [enter]
        for layer in self.layers:
            chain += [nn.Linear(width, layer.inner, layer.bias), NORMS[layer.norm](layer.inner)]
            chain += [ACTIVATIONS[layer.activation]()]
            width = layer.inner
        return nn.Sequential(*chain, nn.Linear(width, CLASSES))

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        if self.num_tokens:
            return torch.randint(0, CLASSES, (size, self.num_tokens)), classes(size, self.num_tokens)
        return torch.randn(size, self.width), classes(size)


@dataclass(frozen=True)
class Conv:
    """A convolution, its norm and its activation."""

    channels: int
    kernel: int
    stride: int
    groups: int
    norm: str
    bias: bool


@dataclass(frozen=True)
class CNNs:
    """Images to classes: a chain of convolutions, a pool and a linear."""

    convolutions: tuple[Conv, ...]
    is_pooled: bool

    def build(self) -> nn.Module:
        chain: list[nn.Module] = []
        channels, size = 4, 6
        for conv in self.convolutions:
            groups = math.gcd(conv.groups, channels, conv.channels)
            made = nn.Conv2d(channels, conv.channels, conv.kernel, conv.stride, conv.kernel // 2, 1, groups, conv.bias)
            norm = {"none": nn.Identity(), "group": nn.GroupNorm(math.gcd(2, conv.channels), conv.channels)}
            chain += [made, norm.get(conv.norm, nn.BatchNorm2d(conv.channels)), nn.ReLU()]
            channels, size = conv.channels, -(-size // conv.stride)
        chain += [nn.AdaptiveAvgPool2d(1)] if self.is_pooled else []
        return nn.Sequential(*chain, nn.Flatten(), nn.Linear(channels * (1 if self.is_pooled else size**2), CLASSES))

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 4, 6, 6), classes(size)


# Users' own models with ties, shared and frozen parts, edges that skip stages: (maker, a batch of it).
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "frozen parameter": (models.frozen_parameter, models.token_batch),
    "frozen middle": (models.frozen_middle, models.token_batch),
    "frozen first": (models.frozen_first, models.token_batch),
    "frozen root": (models.frozen_root, models.token_batch),
    "adapters": (models.AdapterChain, models.vector_batch),
    "frozen heads": (models.FrozenHeads, models.vector_batch),
    "called twice": (models.CalledTwice, models.vector_batch),
    "frozen called twice": (models.FrozenCalledTwice, models.vector_batch),
    "shared module": (models.SharedModule, models.vector_batch),
    "shared parameter": (models.SharedParameter, models.vector_batch),
    "structured": (models.Structured, models.vector_batch),
    "no chain": (models.MLP, models.vector_batch),
    "unet": (pipelines.UNet, pipelines.vectors()),
    "fan": (pipelines.Fan, pipelines.vectors()),
    "shared": (pipelines.Shared, pipelines.vectors()),
    "queries": (pipelines.Queries, pipelines.vectors()),
    "in place": (pipelines.InPlace, pipelines.vectors()),
    "looking": (pipelines.Looking, pipelines.vectors()),
    "frozen stages": (pipelines.Frozen, pipelines.vectors()),
    "resnet": (images.group_resnet, images.image_batch),
    "batch resnet": (images.batch_resnet, images.image_batch),
    "classic": (images.Classic, images.image_batch),
    "vit": (tensors.ViT, tensors.image_batch),
    "conv vit": (images.ViT, images.image_batch),
    "transformers llama": (tensors.TRANSFORMERS["Llama"], tensors.token_batch),
    "transformers gpt2": (tensors.TRANSFORMERS["GPT2"], tensors.token_batch),
}

SPLIT = ("resnet", "batch resnet", "classic", "vit", "conv vit", "transformers llama", "transformers gpt2")


@dataclass(frozen=True)
class Zoo:
    """One of the models that other tests use."""

    name: str

    def build(self) -> nn.Module:
        return ZOO[self.name][0]()

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        inputs, labels = ZOO[self.name][1](0)
        if inputs.is_floating_point():
            return torch.randn(size, *inputs.shape[1:]), classes(size, number=images.NUM_CLASSES)
        top = min(models.VOCABULARY, tensors.VOCABULARY)
        return torch.randint(0, top, (size, *inputs.shape[1:])), masked(
            torch.randint(0, top, (size, *labels.shape[1:]))
        )


ModelCase = Decoders | MLPs | CNNs | Zoo


def masked(labels: Tensor) -> Tensor:
    """With some that do not count."""
    labels[torch.rand(labels.shape) < 0.2] = IGNORE
    return labels


def classes(*shape: int, number: int = CLASSES) -> Tensor:
    return masked(torch.randint(0, number, shape))


# --- cases


@dataclass(frozen=True)
class Case:
    """A plan, a model, which of its parameters are frozen (by place), and how the ranks lie on nodes."""

    plan: Plan
    model: ModelCase
    frozen: tuple[int, ...]
    batch: int
    ranks_per_node: int | None = None

    def build(self) -> nn.Module:
        """The model, the same on every rank."""
        torch.manual_seed(0)
        model = self.model.build().to(MASTER_DTYPE[self.plan.precision])
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for place in self.frozen:
            if place < len(parameters) - 1:  # one is left
                parameters[place].requires_grad_(False)
        return model

    def inputs(self) -> tuple[Tensor, Tensor]:
        """The batch of a step, the same on every rank."""
        torch.manual_seed(1)
        return self.model.batch(self.batch)


AXES = ("data", "shard", "pipe", "context", "x", "y")
# Every axis over two and over four ranks, and every two axes together.
DEGREES: tuple[dict[str, int], ...] = (
    *({axis: 2} for axis in AXES),
    *({axis: 4} for axis in AXES),
    *(dict.fromkeys(pair, 2) for pair in itertools.combinations(AXES, 2)),
)


class Draw(random.Random):
    """Where choices come from."""

    def flag(self) -> bool:
        return self.random() < 0.5

    def size(self, least: int, most: int, divisor: int = 1) -> int:
        """Mostly a multiple of the divisor."""
        value = self.randint(least, most)
        return value if self.random() < 0.04 else -(-value // divisor) * divisor


def draw_case(degrees: Mapping[str, int], seed: int) -> Case:
    """A case over these axes; most of them fit, some are to be refused."""
    draw = Draw(f"{degrees} {seed}")
    kinds = (
        [decoders, gpt2s] if "context" in degrees else [decoders, decoders, gpt2s, mlps, mlps, cnns, cnns, zoos, zoos]
    )
    kind = draw.choice(kinds)
    plan, accumulation = _plan(draw, degrees, is_sequence=kind in (decoders, gpt2s, mlps))
    model = kind(draw, plan)
    frozen = tuple(draw.randrange(20) for _ in range(draw.choice([0, 0, 1, 4])))
    micro_batch = draw.choice([1, 2, 3])
    if accumulation > 1 or draw.flag():
        plan = replace(plan, micro_batch=micro_batch)
    ranks_per_node = draw.choice([1, 2]) if plan.hierarchical else None
    return Case(plan, model, frozen, plan.num_batch_ranks * micro_batch * accumulation, ranks_per_node)


def _plan(draw: Draw, degrees: Mapping[str, int], is_sequence: bool) -> tuple[Plan, int]:
    """A plan, and how many micro-batches a step has."""
    pipe, accumulation = _pipe(draw, degrees.get("pipe", 1), draw.choice([1, 2, 3, 4]))
    sequence = "x" in degrees and is_sequence and draw.flag()
    recompute: Recompute = draw.choice(["none", "none", "selective", "full"])  # type: ignore[assignment]
    shard = Shard(degrees.get("shard", 1), draw.choice([1, 2, 3, 3]))
    can_slice = shard.degree > 1 and shard.stage > 1 and pipe.degree == 1
    tensor = TensorPlan(
        degrees.get("x", 1),
        degrees.get("y", 1),
        sequence,
        sequence and recompute == "none" and draw.flag(),
        draw.choice([1, 1, 2]) if sequence else 1,
    )
    plan = Plan(
        data=degrees.get("data", 1),
        pipe=pipe,
        shard=shard,
        tensor=tensor,
        context=Context(degrees.get("context", 1), draw.choice(["ring", "all-to-all"])),
        memory=Memory(recompute, "slice" if can_slice and draw.flag() else "whole"),
        precision=draw.choice(["fp32", "fp32", "bf16", "fp64"]),  # type: ignore[arg-type]
        exact=False,
        hierarchical=draw.random() < 0.3,
    )
    return plan, accumulation


def _pipe(draw: Draw, degree: int, accumulation: int) -> tuple[Pipe, int]:
    """A schedule with its options, and a number of micro-batches that it takes."""
    if degree == 1:
        return Pipe(), accumulation
    names = ["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "bidirectional", "message"]
    name, options = draw.choice(names), {}
    if name == "interleaved":
        options["chunks"] = draw.choice([1, 2])
    if name == "gems":
        options["batches"] = draw.choice([1, 2, 4])
        accumulation *= options["batches"]
    if name == "message" and draw.flag():
        options["in_flight"] = draw.randint(1, 3)
    if name == "bidirectional":
        accumulation *= 2
    return Pipe(degree, name, **options, balance=draw.choice(["time", "memory"])), accumulation  # type: ignore[arg-type]


# --- models that fit a plan


def decoders(draw: Draw, plan: Plan) -> ModelCase:
    """Llama, Mistral, Qwen2 or Qwen3."""
    architecture: DecoderArchitecture = draw.choice(["llama", "llama", "mistral", "qwen2", "qwen3"])  # type: ignore[assignment]
    num_heads, head_dim = _heads(draw, plan), draw.choice([2, 4, 6])
    keys = draw.choice([number for number in range(1, num_heads + 1) if num_heads % number == 0])
    width = draw.size(3, 14, plan.tensor.y) if architecture == "qwen3" else num_heads * head_dim
    options: dict[str, Any] = {}
    if architecture == "llama":
        options = {"attention_bias": draw.flag(), "mlp_bias": draw.flag()}
    if architecture == "mistral":
        options = {"sliding_window": draw.choice([None, 1, 3])}
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=draw.randint(4, 33),
        hidden_size=width,
        intermediate_size=draw.size(1, 20, plan.tensor.x),
        num_hidden_layers=_depth(draw, plan),
        num_attention_heads=num_heads,
        num_key_value_heads=keys,
        head_dim=head_dim,
        tie_word_embeddings=draw.flag(),
        **options,
    )
    return Decoders(config, _sequence(draw, plan))


def gpt2s(draw: Draw, plan: Plan) -> ModelCase:
    """GPT-2, tied or not."""
    num_heads = _heads(draw, plan)
    config = GPT2Config(
        vocab_size=draw.randint(4, 33),
        n_positions=33,
        n_embd=draw.size(1, 4, plan.tensor.y) * num_heads,
        n_layer=_depth(draw, plan),
        n_head=num_heads,
        n_inner=draw.size(1, 20, plan.tensor.x),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=draw.flag(),
    )
    return Decoders(config, _sequence(draw, plan))


def _depth(draw: Draw, plan: Plan) -> int:
    least = plan.pipe.num_stages if plan.pipe.degree > 1 else 1
    return draw.randint(least, least + 1)


def _heads(draw: Draw, plan: Plan) -> int:
    context = plan.context.degree if plan.context.kind == "all-to-all" else 1
    return draw.size(1, 6, plan.tensor.x * context)


def _sequence(draw: Draw, plan: Plan) -> int:
    parts = (2 * plan.context.degree if plan.context.degree > 1 else 1) * plan.tensor.chunks
    parts *= plan.tensor.x if plan.tensor.sequence else 1
    return draw.size(2, 8, parts)


def mlps(draw: Draw, plan: Plan) -> ModelCase:
    """Blocks of linears."""
    divisor = plan.tensor.x * plan.tensor.y
    # What selective recompute keeps of a matmul may not be changed in place: torch says so.
    activations = [name for name in ACTIVATIONS if name != "relu in place" or plan.memory.recompute != "selective"]

    def layer() -> Layer:
        norm, activation = draw.choice(list(NORMS)), draw.choice(activations)
        return Layer(draw.size(1, 16, divisor), norm, activation, draw.flag(), draw.flag())

    layers = tuple(layer() for _ in range(_depth(draw, plan) + 1))
    # Over y all linears must be in pairs, which a flat chain has by chance, and an embedding must come first.
    is_over_y = plan.tensor.y > 1
    num_tokens = _sequence(draw, plan) if is_over_y or plan.tensor.sequence or draw.flag() else 0
    return MLPs(draw.size(2, 10, divisor), layers, draw.flag() and not (is_over_y or plan.tensor.sequence), num_tokens)


def cnns(draw: Draw, plan: Plan) -> ModelCase:
    """Convolutions. torch's BatchNorm on a CPU wants weights of the dtype of its statistics, which bf16 has not."""
    norms = ["none", "group", *(["batch"] if plan.precision != "bf16" else [])]

    def conv(stride: int) -> Conv:
        channels, kernel = draw.size(1, 10, plan.tensor.x * plan.tensor.y), draw.choice([1, 3])
        groups = draw.choice([1, 1, 2, 4]) if plan.tensor.x * plan.tensor.y == 1 else 1
        return Conv(channels, kernel, stride, groups, draw.choice(norms), draw.flag())

    others = [conv(1) for _ in range(_depth(draw, plan))]
    return CNNs((conv(draw.choice([1, 2])), *others), draw.flag())


def zoos(draw: Draw, plan: Plan) -> ModelCase:
    """A model of other tests; those of which the tensor axes can split something, where they are asked to."""
    names = SPLIT if plan.tensor.x * plan.tensor.y > 1 else tuple(ZOO)
    return Zoo(draw.choice([name for name in names if name != "batch resnet" or plan.precision != "bf16"]))
