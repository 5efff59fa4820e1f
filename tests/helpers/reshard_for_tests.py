"""Saves a run's state under one layout and loads it under another, and compares each rank's values with the disk's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint import Checkpoint, Saver
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import build, initial_value
from weft.optim.saved_state import load_state, make_optimizer, pieces_to_save
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.run_file import Run
from weft.sharding.layout import ParameterPart
from weft.step.examples import example_inputs
from weft.step.train_step import train_step
from weft.train.batches import prepare_data

KINDS = ("exp_avg", "exp_avg_sq", "parameter", "step")


def build_on(run: Run, mesh: Mesh, seed: int) -> tuple[nn.Module, Optimizer]:
    with torch.device("meta"):
        model = build(run.model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    values = partial(_first_value, run, shapes, seed)
    split = parallelize(model, run.plan, mesh, values, partial(example_inputs, run))
    return split, make_optimizer(split, run.train)


def _first_value(run: Run, shapes: dict[str, torch.Size], seed: int, name: str) -> Tensor:
    return initial_value(run.model, name, shapes[name], seed)


def own_values(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[ParameterPart, str, Tensor]]:
    """Everything that this rank holds: which part, kind, value."""
    for part, piece in named_pieces(model):
        held = {"parameter": piece.detach(), **optimizer.state[piece]}
        assert tuple(sorted(held)) == KINDS
        for kind, value in held.items():
            yield part, kind, value.flatten()


def differences(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> tuple[list[str], int]:
    """Which of this rank's values are not the checkpoint's, bit for bit, and how many parameter elements it has."""
    wrong, num_elements = [], 0
    for part, kind, value in own_values(model, optimizer):
        name, cut = part.parameter.name, part.parameter.cut
        stored = checkpoint.read(name, kind)
        if kind != "step":
            stored = (stored if cut is None else cut.take(stored)).flatten()[part.start : part.stop]
        is_first = not part.parameter.copy and (cut is None or cut.is_first)
        num_elements += value.numel() if kind == "parameter" and is_first else 0
        if not torch.equal(stored.flatten(), value) or stored.dtype != value.dtype:
            wrong.append(f"{kind} {name}[{part.start}:]")
    return wrong, num_elements


def save_under(run: Run) -> Path:
    """Three real steps, a save, and a comparison of what lies on disk with what each rank holds; the checkpoint."""
    path = run.folder / "checkpoints" / "step-00000003"
    data = prepare_data(run)

    def rank(index: int) -> tuple[list[str], int]:
        mesh = Mesh(run.plan)
        model, optimizer = build_on(run, mesh, seed=1)
        for step in range(3):
            train_step(model, optimizer, data.batches(run, step, mesh["batch"], mesh.device), mesh)
        saver = Saver(run.folder / "checkpoints", mesh.rank, run.plan.num_ranks, "token")
        saver.save(3, pieces_to_save(model, optimizer, mesh), {})
        saver.wait(published=True)
        return differences(Checkpoint(path), model, optimizer)

    check(run, run_local(rank, run.plan.num_ranks))
    return path


def load_under(run: Run, paths: Sequence[Path]) -> None:
    """Load each of these checkpoints, and compare what each rank then holds with what lies on disk."""

    def rank(index: int) -> list[tuple[list[str], int]]:
        model, _ = build_on(run, Mesh(run.plan), seed=2)
        found = []
        for path in paths:
            for _, piece in named_pieces(model):
                piece.detach().fill_(torch.nan)  # so that what is not loaded differs
            optimizer, checkpoint = make_optimizer(model, run.train), Checkpoint(path)
            load_state(checkpoint, model, optimizer)
            found.append(differences(checkpoint, model, optimizer))
        return found

    for answers in zip(*run_local(rank, run.plan.num_ranks), strict=True):
        check(run, list(answers))


def check(run: Run, answers: list[tuple[list[str], int]]) -> None:
    """No rank found a difference, and ranks hold all of the model, on every replica."""
    assert [wrong for wrong, _ in answers] == [[]] * run.plan.num_ranks
    whole = sum(parameter.numel() for parameter in build(run.model).parameters())
    replicas = run.plan.data * run.plan.context.degree
    assert sum(count for _, count in answers) == whole * replicas  # all of it, on every replica
