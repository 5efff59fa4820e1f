"""What the tests of the pipeline share: models whose forwards are no plain chain, batches of any size, and runs.

Sizes are primes, so that nothing divides by a number of stages. A batch is (inputs, labels) with some labels masked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from models_for_tests import small_config
from torch import Tensor, nn

from weft.mesh import Mesh
from weft.models import IGNORE, Decoder
from weft.parallel.apply import parallelize
from weft.pipeline.build import Staging, stage
from weft.pipeline.runtime import Pipeline
from weft.plan import Pipe, Plan
from weft.profiling import profile

WIDTH, CLASSES, VOCABULARY, SEQUENCE = 7, 5, 31, 8
Batch = tuple[Tensor, ...]


# --- batches


def vectors(size: int = 4, seed: int = 0) -> Callable[[int], Batch]:
    """Batches of `size` vectors with a class each; every fifth is masked."""

    def make(step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        labels[1::5] = IGNORE
        return torch.randn(size, WIDTH, generator=generator), labels

    return make


def tokens(size: int = 4) -> Callable[[int], Batch]:
    """Batches of `size` sequences; sample i has its first i % 3 labels masked."""

    def make(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator)
        labels = drawn[:, 1:].clone()
        for sample in range(size):
            labels[sample, : sample % 3] = IGNORE
        return drawn[:, :-1].contiguous(), labels

    return make


def images(size: int = 4) -> Callable[[int], Batch]:
    """Batches of `size` small images with a class each."""

    def make(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        return torch.randn(size, 3, 6, 6, generator=generator), labels

    return make


# --- models over vectors


class Block(nn.Module):
    """A layer of WIDTH features, whatever it is given, with a residual where that has as many."""

    def __init__(self, features: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(features, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.linear(value))
        return out + value if value.shape[-1] == WIDTH else out


class Chain(nn.Module):
    """`depth` blocks between an input layer and a head."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def chain(depth: int) -> Callable[[], nn.Module]:
    """A maker of a Chain."""
    return lambda: Chain(depth)


def sequential() -> nn.Module:
    """No root; layers without parameters and one that works in place between the blocks."""
    return nn.Sequential(
        nn.Linear(WIDTH, 11),
        nn.ReLU(inplace=True),
        nn.Linear(11, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, CLASSES),
    )


class UNet(nn.Module):
    """Down, across and up again: each way up takes what the way down left, stages away. Four blocks down, four up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(4))
        self.up = nn.ModuleList(Block(2 * WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, left = inputs, []
        for block in self.down:
            hidden = block(hidden)
            left.append(hidden)
        for block in self.up:
            hidden = block(torch.cat([hidden, left.pop()], dim=-1))
        logits: Tensor = self.head(hidden)
        return logits


class Fan(Chain):
    """What the first block makes is used by every other one, and by the head."""

    def forward(self, inputs: Tensor) -> Tensor:
        first, *others = self.blocks
        seed = first(self.enter(inputs))
        hidden = seed
        for block in others:
            hidden = block(hidden * 0.5 + seed)
        logits: Tensor = self.head(hidden + seed.tanh())
        return logits


class Found(NamedTuple):
    """What a `Mixed` block hands on."""

    hidden: Tensor
    extra: dict[str, Any]


class MixedBlock(Block):
    """Hands on a tensor with a gradient, one without, whole numbers, a mask and None, in a tuple that holds a dict."""

    def forward(self, given: Found) -> Found:  # type: ignore[override]
        extra = given.extra
        hidden = super().forward(given.hidden) * extra["keep"]
        order = hidden.detach().argsort(-1)
        hidden = hidden + 0.1 * extra["order"].to(hidden.dtype) + extra["mean"]
        mean = hidden.detach().mean(-1, keepdim=True)
        return Found(hidden, {"keep": hidden.detach() < 1.5, "order": order, "mean": mean, "nothing": None})


class Mixed(nn.Module):
    """Tensors of all kinds cross from stage to stage; the masks of the first block reach the end."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        hidden = self.enter(inputs)
        keep, order = torch.ones_like(inputs, dtype=torch.bool), torch.zeros_like(inputs, dtype=torch.long)
        given = first = Found(hidden, {"keep": keep, "order": order, "mean": inputs.mean(-1, keepdim=True)})
        for place, block in enumerate(self.blocks):
            given = block(given)
            first = given if place == 0 else first
        hidden = given.hidden.masked_fill(~first.extra["keep"], 0.25)
        return {"logits": self.head(hidden), "note": given.extra["nothing"]}


class Shared(Chain):
    """A parameter of the root that every stage uses, and one that the middle uses; the head uses the entry's weight."""

    def __init__(self) -> None:
        super().__init__(4)
        self.unused = nn.Linear(2, 2).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.inner = nn.ParameterDict({"shift": nn.Parameter(torch.randn(WIDTH)), "idle": nn.Parameter(torch.ones(2))})
        self.inner["idle"].requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, scale = self.enter(inputs), self.scale.exp()
        for place, block in enumerate(self.blocks):
            hidden = block(hidden * scale)
            if place == 1:
                hidden = hidden + self.inner["shift"]
        logits: Tensor = self.head(nn.functional.linear(hidden, self.enter.weight))
        return logits


class Queries(Chain):
    """Learned queries enter in the middle of the chain, as in DETR: a unit whose argument is a parameter."""

    def __init__(self) -> None:
        super().__init__(4)
        self.queries = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](self.enter(inputs)))
        asked = self.blocks[2](self.queries)
        logits: Tensor = self.head(self.blocks[3](asked + hidden))
        return logits


class InPlace(Chain):
    """Changes results in place: whole or in part, between the blocks and inside one, its own and an earlier stage's."""

    def __init__(self) -> None:
        super().__init__(4)
        self.token = nn.Parameter(torch.randn(2))
        self.blocks[2] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.blocks[0](self.enter(inputs))
        first[:, :2] = self.token
        hidden = self.blocks[1](first)
        hidden *= 2
        both = hidden.new_zeros(2, *hidden.shape)
        both[0] = hidden
        both[1] = first
        hidden = both.sum(0)
        hidden.add_(first)
        hidden = self.blocks[2](hidden)
        hidden.mul_(0.5)
        logits: Tensor = self.head(self.blocks[3](hidden))
        return logits


class Changing(Chain):
    """A block that changes its own input, which its residual sees (in its stage) and a later block does too."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[1] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.blocks[0](self.enter(inputs))
        hidden = self.blocks[2](self.blocks[1](first) + first)
        logits: Tensor = self.head(self.blocks[3](hidden + first))
        return logits


class Looking(Chain):
    """Operations of the root that take of results no more than dtype and shape, and views that cross stages."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        mask, wide = (inputs > 0).type_as(hidden), inputs[:, :1].expand_as(hidden)
        one, _ = torch.broadcast_tensors(inputs[:, :1], hidden)
        turned = self.blocks[0](hidden).t()
        for block in self.blocks[1:]:
            hidden = block(turned.t() * mask + hidden + wide + one)
        logits: Tensor = self.head(hidden + inputs.to(hidden) * mask)
        return logits


@dataclass
class Carried:
    """What a `Records` block hands on."""

    hidden: Tensor
    note: str = ""


class RecordBlock(Block):
    """Takes and gives dataclasses."""

    def forward(self, given: Carried) -> Carried:  # type: ignore[override]
        return Carried(super().forward(given.hidden), "kept")


class Records(Chain):
    """Dataclasses cross stages, dicts are changed by the root that was given them."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks = nn.ModuleList([RecordBlock(), RecordBlock(), Named(), Block()])

    def forward(self, inputs: Tensor) -> Tensor:
        carried = Carried(self.enter(inputs))
        for block in self.blocks[:2]:
            carried = block(carried)
        named = self.blocks[2](carried.hidden)
        named["sum"] = named.pop("hidden") + carried.hidden
        logits: Tensor = self.head(self.blocks[3](named["sum"]))
        return logits


class Named(Block):
    """Gives a dict."""

    def forward(self, value: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(value)}


class Frozen(Chain):
    """The entry and the first blocks are frozen, and one in the middle: nothing goes back to the first stage."""

    def __init__(self) -> None:
        super().__init__(5)
        for module in (self.enter, self.blocks[0], self.blocks[1], self.blocks[3]):
            module.requires_grad_(False)


class Dropped(Chain):
    """Dropout in every block and between them; noise that the root draws once and uses in the first and last stage."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(4))
        self.between = nn.ModuleList(nn.Dropout(0.2) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.randn_like(inputs)
        hidden = self.enter(inputs + noise)
        for block, dropout in zip(self.blocks, self.between, strict=True):
            hidden = dropout(block(hidden))
        logits: Tensor = self.head(hidden - noise)
        return logits


class Graph(nn.Module):
    """A random graph: every block takes the mean of some earlier results, and what it returns has one of many forms."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.count = draw.randint(10, 30)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(self.count))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.inputs = [
            sorted({place, *draw.choices(range(place + 1), k=draw.randint(0, 3))}) for place in range(self.count)
        ]
        for chosen in self.inputs:  # some branch off, and leave the last result to others
            if len(chosen) > 1 and draw.random() < 0.3:
                chosen.pop()
        used = {place for chosen in self.inputs for place in chosen}
        self.last = sorted({*range(self.count + 1)} - used | {*draw.choices(range(self.count + 1), k=3)})
        self.forms = [draw.choice(["plain", "detached", "doubled", "in place"]) for _ in range(self.count)]

    def forward(self, inputs: Tensor) -> Tensor:
        made = [self.enter(inputs)]
        for block, chosen, form in zip(self.blocks, self.inputs, self.forms, strict=True):
            out = block(torch.stack([made[place] for place in chosen]).mean(0))
            if form == "detached":
                out = out + 0.1 * made[chosen[0]].detach()
            elif form == "doubled":
                out, again = torch.cat([out, out * 2], dim=0).chunk(2)
                out = out - again.relu()
            elif form == "in place":
                out *= 0.9
            made.append(out)
        logits: Tensor = self.head(torch.stack([made[place] for place in self.last]).mean(0))
        return logits


def random_split(seed: int, num_stages: int) -> tuple[str, ...]:
    """Where the stages of a Graph begin: anywhere behind the entry."""
    names = [*(f"blocks.{index}" for index in range(Graph(seed).count)), "head"]
    chosen = sorted(random.Random(seed).sample(range(len(names)), num_stages - 1))
    return tuple(names[place] for place in chosen)


# --- models over images and tokens


class ResNet(nn.Module):
    """Convolutions with BatchNorm: a stem, basic blocks of which one halves the image, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layers = nn.ModuleList([Basic(4, 4, 1), Basic(4, 6, 2), Basic(6, 6, 1)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class Basic(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outside)
        self.around = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        inner = torch.relu(self.norm(self.first(value)))
        return torch.relu(self.norm2(self.second(inner)) + self.around(value))


class ViT(nn.Module):
    """Class token and positions are the root's own parameters; the patch embedding is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 10, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        patches = self.patches(inputs).flatten(2).transpose(1, 2)  # [batch, 9, 8]
        hidden = torch.cat([self.cls_token.expand(len(inputs), -1, -1), patches], dim=1) + self.pos_embed
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden)[:, 0])
        return logits


def decoder() -> nn.Module:
    """A tied Llama of four layers whose sizes two ranks of x, y and context divide."""
    return Decoder(
        small_config(width=8, inner=12, layers=4, heads=4, keys=2, vocab_size=VOCABULARY, tie_word_embeddings=True)
    )


# --- runs


def double(batch: Batch) -> Batch:
    """With floating-point tensors in float64."""
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)


def make(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """The same model in float64 on every rank."""
    torch.manual_seed(0)
    return model_fn().double()


def on_stages(model_fn: Callable[[], nn.Module], plan: Plan, mesh: Mesh, batch: Batch) -> Pipeline:
    """This rank's stages of the model, for micro-batches like `batch`."""
    model = parallelize(make(model_fn), replace(plan, precision="fp64"), mesh, example=lambda: double(batch)[:1])
    assert isinstance(model, Pipeline)
    return model


ModelFn = Callable[[], nn.Module]


def staged(model_fn: ModelFn, pipe: Pipe, batch: Batch | None = None) -> Staging:
    """A model in stages, as every rank cuts it."""
    inputs = double(batch or vectors()(0))[0]
    return stage(profile(make(model_fn), lambda: (inputs,)), Plan(pipe=pipe, precision="fp64"))
