"""Pruned models: equal to masked dense training, and without the bytes of what is pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models_for_tests as models
import pytest
import torch
from torch import Tensor, nn

from weft.checkpoint import Checkpoint, Saver
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.memory.prune import prune
from weft.mesh import Mesh
from weft.models.loss_head import install_loss_head
from weft.optim import AdamW
from weft.optim.saved_state import load_state, pieces_to_save
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces, state_bytes
from weft.plan import Memory, Plan, Shard
from weft.step.objective import CROSS_ENTROPY
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

STEPS = 20


def make() -> nn.Module:
    torch.manual_seed(0)
    return models.tied_decoder().float()


def masks_of(model: nn.Module, pruned: float) -> dict[str, Tensor]:
    """Of the matrices in blocks, and of the embedding, which is tied."""
    torch.manual_seed(1)
    return {n: torch.rand(p.shape) >= pruned for n, p in model.named_parameters() if p.dim() == 2}


def train_pruned(plan: Plan, pruned: float, count: int, steps: int = STEPS) -> dict[str, Tensor]:
    mesh = Mesh(plan)
    model = make()
    masks = masks_of(model, pruned)
    model = parallelize(prune(model, masks), plan, mesh)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2, foreach=False)
    for step in range(steps):
        batches = list(zip(*(tensor.chunk(count) for tensor in models.token_batch(step)), strict=True))
        train_step(model, optimizer, batches, mesh, clip=0.5)
    return {part.parameter.name: piece.detach().flatten() for part, piece in named_pieces(model)}


def train_masked(pruned: float, count: int) -> dict[str, Tensor]:
    """Dense weights, gradients and moments, with zeros where the masks are false; norms over what is kept."""
    model = make()
    masks = masks_of(model, pruned)
    parameters = dict(model.named_parameters())
    kept = {name: masks.get(name, torch.ones_like(parameter).bool()) for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.mul_(kept[name])
    install_loss_head(model)  # as parallelize does: sums in the same order
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(STEPS):
        tokens, labels = models.token_batch(step)
        targets = (labels != -100).sum().double()
        for own, label in zip(tokens.chunk(count), labels.chunk(count), strict=True):
            total = CROSS_ENTROPY.total(model, (own, label))
            (total * (1 / targets).to(total.dtype)).backward()
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        own = [g[kept[n]].double() for n, g in gradients.items() if g is not None]  # summed as weft does on a CPU
        norm = torch.nn.utils.get_total_norm(own)
        for name, gradient in gradients.items():
            assert gradient is not None
            gradient.mul_(kept[name]).mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in parameters.items():
        assert not parameter[~kept[name]].any()
    return {name: parameter.detach()[kept[name]] for name, parameter in parameters.items()}


@pytest.mark.parametrize("pruned", [0.5, 0.8, 0.9, 0.99])
@pytest.mark.parametrize("count", [1, 3])
def test_pruned_training_is_masked_dense_training(pruned: float, count: int) -> None:
    found, expected = train_pruned(Plan(), pruned, count), train_masked(pruned, count)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=Shard(2, 3)), Plan(shard=Shard(2, 2))], ids=str)
def test_pruned_training_over_ranks_is_that_of_one(plan: Plan) -> None:
    alone = train_pruned(Plan(micro_batch=1), 0.8, 1, steps=3)

    def rank(index: int) -> float:
        torch.set_num_threads(1)
        worst = 0.0
        mesh, model = Mesh(plan), make()
        model = parallelize(prune(model, masks_of(model, 0.8)), plan, mesh)
        optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2, foreach=False)
        for step in range(3):
            own = [tuple(tensor.chunk(2)[index] for tensor in models.token_batch(step))]
            train_step(model, optimizer, own, mesh, clip=0.5)
        for part, piece in named_pieces(model):
            expected = alone[part.parameter.name][part.start : part.stop]
            worst = max(worst, float((piece.detach() - expected).abs().max()))
        return worst

    assert max(run_local(rank, 2)) < 1e-4


class Wide(nn.Module):
    """One large matrix, so that alignment counts for little."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256, bias=False)])

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers[0](inputs)
        return out


@pytest.mark.parametrize("pruned", [0.5, 0.9])
def test_bytes_are_those_of_what_is_kept(pruned: float) -> None:
    mask = torch.zeros(256 * 256, dtype=torch.bool)
    mask[: round((1 - pruned) * 256 * 256)] = True
    plan = Plan(precision="bf16", memory=Memory(offload=0.0))
    model = parallelize(prune(Wide(), {"layers.0.weight": mask.view(256, 256)}), plan)
    optimizer, seen = AdamW(model), dict[str, Any]()
    optimizer.register_step_pre_hook(lambda *_: seen.update(state_bytes(model, optimizer)))
    model(torch.randn(4, 256)).float().square().mean().backward()
    optimizer.step()
    share = 1 - pruned
    assert sum(seen.values()) / mask.numel() == pytest.approx(2 + 20 * share, abs=0.01)
    assert sum(seen.values()) / mask.numel() <= 2 + 24 * share


def test_a_checkpoint_brings_its_mask(tmp_path: Path) -> None:
    plan = Plan(precision="bf16")

    def build(seed: int) -> tuple[nn.Module, AdamW]:
        torch.manual_seed(seed)
        order = torch.randperm(256 * 256)
        mask = torch.zeros(256 * 256, dtype=torch.bool).index_fill(0, order[:6000], True)
        model = parallelize(prune(Wide(), {"layers.0.weight": mask.view(256, 256)}), plan)
        return model, AdamW(model)

    inputs = torch.randn(4, 256)
    (saved, optimizer), (loaded, other) = build(0), build(1)
    before = loaded(inputs)
    saver = Saver(tmp_path, 0, 1, "token")
    saver.save(1, pieces_to_save(saved, optimizer, Mesh(plan)), {})
    saver.wait(published=True)
    load_state(Checkpoint(tmp_path / "step-00000001"), loaded, other)
    assert torch.equal(loaded(inputs), saved(inputs))
    assert not torch.equal(loaded(inputs), before)


def test_names_stay_and_the_index_is_beside() -> None:
    model = make()
    names = list(model.state_dict())
    pruned = prune(make(), masks_of(model, 0.9))
    assert [name for name in pruned.state_dict() if not name.endswith("_kept")] == names


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"nothing": torch.ones(1).bool()}, "masks names 'nothing', which is no parameter"),
        ({"layers.0.weight": torch.ones(256, 256)}, r"is torch.float32 \(256, 256\); it must be torch.bool"),
        (
            {"layers.0.weight": torch.ones(256, 256).bool()},
            "keeps 65,536 of 65,536 elements; with less than 25% pruned",
        ),
    ],
)
def test_masks_that_are_refused(masks: dict[str, Tensor], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        prune(Wide(), masks)
