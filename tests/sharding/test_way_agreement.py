"""Ranks of shard stage 3 that call different blocks are found at run time and named, before parameters are mixed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import LocalError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.sharding import way_agreement

PLAN = weft.Plan(shard=weft.Shard(2, 3))


class Dropping(nn.Module):
    """Leaves out the block `left_out`, and calls block 0 again at the end."""

    left_out = -1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            inputs = inputs if index == self.left_out else layer(inputs).relu()
        return self.head(self.layers[0](inputs))


def step(model: Dropping, left_out: int) -> None:
    model.left_out = left_out
    model(torch.ones(2, 6)).sum().backward()


def error_of(model: Dropping, left_out: int) -> str:
    try:
        step(model, left_out)
    except PlanError as error:
        return str(error)
    return ""


def changes(rank: int) -> list[str]:
    """All ranks take the same ways at first; then each leaves out a block of its own."""
    mesh = Mesh(PLAN)
    model = weft.parallelize(Dropping(), PLAN, mesh)
    assert isinstance(model, Dropping)
    for left_out in (-1, -1, 3, 1, 1, -1):
        step(model, left_out)
    return [error_of(model, 1 + rank)]


def one_stays(rank: int) -> list[str]:
    """Rank 1 leaves out a block from the first pass on, and rank 0 does not. Rank 0 waits for it, and is ended."""
    mesh = Mesh(PLAN)
    model = weft.parallelize(Dropping(), PLAN, mesh)
    assert isinstance(model, Dropping)
    step(model, 2 if rank else -1)
    return []


@pytest.mark.processes
def test_ranks_that_change_their_ways_differently_are_named() -> None:
    (first,), (second,) = run_local(changes, 2, 60.0)
    assert "rank 0 comes to block 'layers.2' where rank 1 comes to block 'layers.3'" in first
    assert "rank 1 comes to block 'layers.3' where rank 0 comes to block 'layers.2'" in second


@pytest.mark.processes
def test_a_rank_that_alone_leaves_a_block_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_agreement, "PATIENCE_SECONDS", 2.0)
    words = r"rank 1 comes to block 'layers\.3' where rank 0 did not leave the order of its last pass"
    with pytest.raises(LocalError, match=words):
        run_local(one_stays, 2, 60.0)
