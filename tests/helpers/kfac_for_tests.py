"""A small model, and K-FAC over it on one process or several ranks, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import saving_for_tests
import torch
from torch import Tensor, nn

from weft.comm import Traffic
from weft.mesh import Mesh
from weft.optim.kfac import KFAC
from weft.optim.kfac_placement import kfac_state_bytes, kfac_traffic
from weft.optim.kfac_ranks import BatchRanks, gathered_layouts
from weft.optim.stepper import stepper
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_flats
from weft.plan import Plan
from weft.run_tables import Kfac

OPTIONS = Kfac(learning_rate=0.05, damping=1e-2, decay=0.8, factor_every=2, inverse_every=4, kl_clip=0.05)
STEPS, SAVED, SAMPLES = 10, 5, 8


def make_model() -> nn.Module:
    """A convolution with groups, a norm and a frozen layer between linears, and one that `max_size` leaves out."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.Tanh(),
        nn.Linear(6, 6).requires_grad_(False),
        nn.Linear(6, 3, bias=False),
    )
    return model.double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 2, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (SAMPLES,), generator=generator)


def make_kfac(model: nn.Module, mesh: Mesh | None = None, options: Kfac = OPTIONS, decay: float = 0.1) -> KFAC:
    trained = [one for one in model.parameters() if one.requires_grad and one.numel()]
    ranks = BatchRanks() if mesh is None else BatchRanks.of(mesh)
    return KFAC(model, ranks, options, [{"params": trained, "weight_decay": decay}], 0.01)


def train(model: nn.Module, optimizer: Any, mesh: Mesh, steps: range) -> None:
    ranks = BatchRanks.of(mesh)
    for step in steps:
        images, labels = (whole.chunk(ranks.degree)[ranks.index] for whole in batch(step))
        stepper(optimizer).begin(torch.tensor(float(SAMPLES)))
        nn.functional.cross_entropy(model(images), labels).backward()
        stepper(optimizer).update(model, mesh, 1.0, None, None)
        optimizer.zero_grad()


def reference() -> list[Tensor]:
    """The parameters after all steps on one process."""
    model = make_model()
    train(model, make_kfac(model), Mesh(Plan()), range(STEPS))
    return [one.detach().flatten() for one in model.parameters()]


def build(mesh: Mesh, mode: Any, options: Kfac = OPTIONS) -> tuple[nn.Module, KFAC]:
    model = parallelize(make_model(), mesh.plan, mesh)
    return model, make_kfac(model, mesh, replace(options, mode=mode))


def values(model: nn.Module) -> list[Tensor]:
    return [one.detach().flatten().clone() for one in model.parameters()]


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def traffic_of(mesh: Mesh) -> dict[Any, Traffic]:
    found = {key: value for key, value in mesh.ledger if key[0] in ("data", "shard")}
    mesh.ledger.clear()
    return found


def save(folder: Path, mesh: Mesh, model: nn.Module, optimizer: KFAC) -> None:
    saving_for_tests.save(folder, model, optimizer, mesh, SAVED)


def predicted(mesh: Mesh, model: nn.Module, optimizer: KFAC) -> tuple[dict[Any, Traffic], int]:
    """The traffic of a step that samples and renews, beyond that with AdamW, and the state of the rank with most."""
    layouts = [flat.layout for flat in all_flats(model) if flat.trainable]
    layers = [one.layer for one in optimizer.states]
    gathered = gathered_layouts(layouts, {name for layer in layers for name in layer.parameter_names})
    traffic = kfac_traffic(layers, optimizer.options, mesh.plan.degrees, 8, [one.numel for one in gathered])
    slices = []
    for index in range(mesh.plan.shard.degree):
        parts = [part for layout in layouts for part in layout.parts(index)]
        slices.append({part.parameter.name: part.stop - part.start for part in parts if part.stop > part.start})
    return traffic, kfac_state_bytes(layers, slices, optimizer.options, mesh.plan.data, 8)
