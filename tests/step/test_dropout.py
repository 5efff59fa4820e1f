"""Dropout beside every axis and every recompute policy: the gradients of one forward, whatever is computed again; and
masks that differ exactly where ranks hold different elements.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from sampled_for_tests import some_soak
from torch import Tensor, nn

from weft.inspection.rng import seed_rng
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import GPT2Config, build, initialise
from weft.parallel.apply import parallelize
from weft.parallel.context.axis import own_tokens
from weft.parallel.model_state import named_pieces
from weft.parallel.tile import own_tiles
from weft.plan import Context, Memory, Pipe, Plan, Recompute, Shard, Tile
from weft.plan import Tensor as TensorPlan
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

SEQUENCE, VOCABULARY, NUM_BATCHES = 8, 61, 4
KINDS: tuple[Recompute, ...] = ("none", "selective", "full")


def plan_of(**axes: Any) -> Plan:
    return Plan(precision="fp64", **axes)


PLANS = {
    "shard": plan_of(shard=Shard(2, 3)),
    "x": plan_of(tensor=TensorPlan(2)),
    "x, sequence": plan_of(tensor=TensorPlan(2, sequence=True)),
    "x, sequence, chunks": plan_of(tensor=TensorPlan(2, sequence=True, chunks=2)),
    "y": plan_of(tensor=TensorPlan(1, 2)),
    "x y, sequence": plan_of(tensor=TensorPlan(2, 2, sequence=True)),
    "context": plan_of(context=Context(2)),
    "context x, sequence": plan_of(context=Context(2), tensor=TensorPlan(2, sequence=True)),
    "pipe": plan_of(pipe=Pipe(2)),
    "pipe x, sequence": plan_of(pipe=Pipe(2), tensor=TensorPlan(2, sequence=True)),
    "pipe y": plan_of(pipe=Pipe(2, "gpipe"), tensor=TensorPlan(1, 2)),
    "pipe context": plan_of(pipe=Pipe(2, "interleaved"), context=Context(2)),
}


def gpt2(plan: Plan, **others: Any) -> nn.Module:
    """With dropout in every place that has one; attention over `context` has none."""
    drop = {"attn_pdrop": 0.0 if plan.context.degree > 1 else 0.2, "resid_pdrop": 0.3, "embd_pdrop": 0.4}
    model = build(
        GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=16, n_layer=4, n_head=4, **{**drop, **others})
    )
    initialise(model, 0)
    return model.double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, VOCABULARY, (NUM_BATCHES, 2, SEQUENCE + 1), generator=generator)
    return [(one[:, :-1].contiguous(), one[:, 1:].clone()) for one in drawn]


def parallel(plan: Plan, mesh: Mesh, **others: Any) -> nn.Module:
    example = torch.zeros(2, SEQUENCE, dtype=torch.long)
    return parallelize(gpt2(plan, **others), plan, mesh, example=lambda: (example,))


def step(plan: Plan, seed: int) -> dict[str, Tensor]:
    """The loss and all pieces behind a step of plain gradient descent, on this rank."""
    mesh = Mesh(plan)
    model = parallel(plan, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = [tuple(one.chunk(mesh["batch"].degree)[mesh["batch"].index] for one in batch) for batch in batches()]

    def before(micro_batch: int) -> None:
        seed_rng(100 * seed + 10 * micro_batch + mesh["batch"].index, mesh.device)

    result = train_step(model, optimizer, given, mesh, clip=None, before_micro_batch=before)
    return {part.parameter.name: piece.detach() for part, piece in named_pieces(model)} | {"loss": result.loss}


@pytest.mark.parametrize(
    "name", some_soak(PLANS, "x, sequence, chunks", "x y, sequence", "context", "pipe x, sequence", "pipe context")
)
@pytest.mark.sampled(2)
def test_gradients_are_those_of_the_masks_of_forward(name: str) -> None:
    """A block that is computed again drops what it dropped: equal to the bit, beside any axis."""
    plan = PLANS[name]

    def rank(_: int) -> list[list[str]]:
        first, again, other = step(plan, 1), step(plan, 1), step(plan, 2)
        assert not torch.equal(first["loss"], other["loss"])  # or nothing was dropped
        found = [again, *(step(replace(plan, memory=Memory(kind)), 1) for kind in KINDS[1:])]
        return [[name for name, piece in first.items() if not torch.equal(piece, one[name])] for one in found]

    for different in run_local(rank, plan.num_ranks, 300):
        assert different == [[], [], []]  # names, of the same again, and of two policies


# --- masks


def watch(model: nn.Module) -> dict[str, list[bool]]:
    """What each dropout of a model drops in its first call, by its name."""
    masks: dict[str, list[bool]] = {}

    def note(name: str, _: nn.Module, __: Any, out: Tensor) -> None:
        masks.setdefault(name, (out == 0).flatten().tolist())

    for name, module in model.named_modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.register_forward_hook(partial(note, name))
    return masks


def masks_of(plan: Plan) -> list[tuple[dict[str, int], dict[str, list[bool]], float]]:
    """The coordinates and the masks of each rank, and what it draws behind the forward."""

    def rank(_: int) -> Any:
        mesh = Mesh(plan)
        model = parallel(plan, mesh)
        masks = watch(model)
        torch.manual_seed(7)
        model(own_tokens(batches()[0], mesh["context"])[0])
        return dict(mesh.coordinates), masks, torch.rand(()).item()

    found: list[Any] = run_local(rank, plan.num_ranks)
    return found


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        ("x", {}),
        ("x, sequence", {"h": ["x"]}),
        ("y", {"drop": ["y"], "h": ["y"]}),
        ("x y, sequence", {"drop": ["y"], "h": ["x", "y"]}),
        ("context", {"drop": ["context"], "h": ["context"]}),
        ("context x, sequence", {"drop": ["context"], "h": ["context", "x"]}),
    ],
)
def test_masks_of_the_stream_differ_where_its_elements_do(name: str, apart: dict[str, list[str]]) -> None:
    """Behind the embedding (`drop`) and in blocks (`h`), over the axes that split the residual stream there."""
    ranks = masks_of(PLANS[name])
    assert len({after for _, _, after in ranks}) == 1
    for place, masks, _ in ranks:
        for other_place, other_masks, _ in ranks:
            for dropout, mask in masks.items():
                axes = apart.get(dropout.split(".")[1], [])
                is_same = all(place[axis] == other_place[axis] for axis in axes)
                assert (mask == other_masks[dropout]) == is_same, (dropout, place, other_place)
    of_first = list(ranks[0][1].values())
    assert len({tuple(mask) for mask in of_first}) == len(of_first) == 9  # and none is that of another layer


class Inside(nn.Module):
    """An MLP that drops between its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.mlp(self.norm(hidden))
        return out


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Inside() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_masks_inside_regions_differ_over_x_alone(sequence: bool) -> None:
    plan = plan_of(tensor=TensorPlan(2, 2, sequence=sequence))

    def rank(_: int) -> Any:
        torch.manual_seed(0)
        mesh = Mesh(plan)
        model = parallelize(Chain().double(), plan, mesh)
        masks = watch(model)
        torch.manual_seed(7)
        model(batches()[0][0])
        return mesh.coordinates["x"], masks

    ranks: list[Any] = run_local(rank, 4)
    for x, masks in ranks:
        for other_x, other_masks in ranks:
            assert len(masks) == 2
            assert all((mask == other_masks[name]) == (x == other_x) for name, mask in masks.items())


class Images(nn.Module):
    """Dropout of pixels, of whole channels, and behind the images."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5), nn.Dropout2d(0.5), nn.Conv2d(4, 4, 3, padding=1))
        self.blocks = nn.ModuleList([nn.Sequential(*layers), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1))])
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = images
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.drop(hidden.mean((2, 3))))
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_drop_apart_and_what_all_hold_alike(kind: Recompute) -> None:
    plan = plan_of(tile=Tile(2, 2))
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch = images, torch.tensor([0, 1, 2, 3])

    def trained(plan: Plan) -> Any:
        torch.manual_seed(0)
        mesh = Mesh(plan)
        model = parallelize(Images().double(), plan, mesh, example=lambda: (images,))
        masks = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        torch.manual_seed(7)
        train_step(model, optimizer, [own_tiles(batch, model, mesh)], mesh, clip=None)
        return [piece.tolist() for _, piece in named_pieces(model)], masks

    def rank(_: int) -> Any:
        (pieces, masks), (again, _) = trained(plan), trained(replace(plan, memory=Memory(kind)))
        assert pieces == again
        return masks

    ranks: list[Any] = run_local(rank, 4)
    assert all(one == ranks[0] for one in ranks)  # hooks see whole images: of pixels that all ranks gather
    pixels, channels = (torch.tensor(ranks[0][f"blocks.0.{index}"]).view(4, 4, 16, 16) for index in (1, 2))
    tiles = [pixels[:, :, top : top + 8, left : left + 8] for top in (0, 8) for left in (0, 8)]
    for index, tile in enumerate(tiles):
        assert not any(torch.equal(tile, other) for other in tiles[:index])
    assert 0 < int(channels.all(3).all(2).sum()) < 16  # whole channels are dropped, on all tiles
