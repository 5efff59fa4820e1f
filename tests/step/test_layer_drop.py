"""Blocks skipped at random: the formulas, the mean, and the same ones on every rank."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import experts_for_tests as experts
import pytest
import runs_for_tests as runs
import tensor_for_tests as shared
import torch
from torch import nn

import weft.optim
import weft.step.layer_drop
from weft.errors import ConfigError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import build, initialise
from weft.models.router import take_routed
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.plan import Memory, Pipe, Plan, Shard
from weft.run_tables import LayerDrop
from weft.step.layer_drop import Gates, drop_layers
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes


def test_probabilities_are_the_formulas() -> None:
    config = LayerDrop(0.5, 0.01)
    for step in (0, 10, 1000):
        theta = 0.5 * math.exp(-0.01 * step) + 0.5
        kept = [config.keep_probability(step, layer, 12) for layer in range(12)]
        assert kept == pytest.approx([1 - (layer + 1) / 12 * (1 - theta) for layer in range(12)])
        assert sum(1 - one for one in kept) / 12 == pytest.approx((1 - theta) * 13 / 24)  # FLOPs saved
    assert LayerDrop(1.0).keep_probability(10**6, 11, 12) == 1.0


def test_gates_keep_as_often_as_they_should() -> None:
    gates, count = Gates(LayerDrop(0.5, 1.0), 0, 4), 0
    for step in range(1000, 21000):
        gates.begin(step, step % 3)
        count += gates.gate(2)[0]
    probability = 1 - 3 / 4 * 0.5
    assert abs(count / 20000 - probability) < 4 * (probability * (1 - probability) / 20000) ** 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def dropping(theta: float = 0.5, gamma: float = 10.0) -> tuple[nn.Module, Gates]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, drop_layers(model, LayerDrop(theta, gamma), 0, Plan(exact=False), optimizer)


@torch.no_grad()
def test_what_is_expected_stays_the_same() -> None:
    model, gates = dropping()
    value = torch.randn(3, 4, dtype=torch.float64)
    expected = model[0](model.eval()[1].forward(value) * 0 + value)  # one block, whole
    model.train()
    total, count = torch.zeros_like(value), 4000
    for number in range(count):
        gates.begin(1, number)
        total += model[0](value)
    assert float((total / count - expected).abs().max()) < 4 / count**0.5
    gates.begin(1, next(n for n in range(99) if not (gates.begin(1, n) or gates.gate(0)[0])))
    assert model[0](value) is value


def trained(plan: Plan, theta: float | None, index: int, own: bool = False) -> dict[str, Any]:
    """What training gives by torch's AdamW, or by weft's `own`."""
    torch.manual_seed(0)
    mesh = Mesh(plan)
    model = parallelize(shared.SHIPPED["two key heads"]().double(), plan, mesh)
    optimizer = weft.optim.AdamW(model, lr=1e-2) if own else torch.optim.AdamW(model.parameters(), lr=1e-2)
    gates = None if theta is None else drop_layers(model, LayerDrop(theta, 0.5), 3, plan, optimizer)
    losses = []
    mesh.ledger.clear()
    for step in range(6):
        batch = tuple(t.chunk(mesh["batch"].degree)[mesh["batch"].index] for t in shared.token_batch(step))
        before = (lambda number, step=step: gates.begin(step, number)) if gates else (lambda number: None)
        losses.append(float(train_step(model, optimizer, [batch], mesh, before_micro_batch=before).loss))
    pieces = {part.parameter.name: float(piece.detach().square().sum()) for part, piece in named_pieces(model)}
    calls = {f"{axis} {name}": one.calls for (axis, name), one in mesh.ledger.entries().items()}
    return {"losses": losses, "pieces": pieces, "calls": calls}


EXACT = Plan(precision="fp64", exact=False)
PLANS = {
    "data 2": Plan(data=2, precision="fp64", exact=False),
    "shard 2": Plan(shard=Shard(2, 3), precision="fp64", exact=False),
    "shard 2, full": Plan(shard=Shard(2, 3), memory=Memory("full"), precision="fp64", exact=False),
}


def test_all_kept_is_the_undropped_model() -> None:
    assert trained(EXACT, 1.0, 0)["losses"] == trained(EXACT, None, 0)["losses"]
    assert trained(EXACT, 0.3, 0)["losses"] != trained(EXACT, None, 0)["losses"]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_layout_skips_the_same(plan: Plan) -> None:
    expected = trained(EXACT, 0.3, 0)
    found = run_local(lambda index: trained(plan, 0.3, index), 2, 60)
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    if plan.shard.degree > 1:
        all_kept = run_local(lambda index: trained(plan, 1.0, index), 2, 60)
        assert found[0]["calls"]["shard all_gather"] < all_kept[0]["calls"]["shard all_gather"]


def test_wefts_own_optimizer_updates_skipped_blocks_too() -> None:
    """Their moments decay, as with gradients of zero."""
    expected = trained(EXACT, 0.3, 0)["losses"]
    for one in run_local(lambda index: trained(PLANS["data 2"], 0.3, index, own=True), 2, 60):
        assert one["losses"] == pytest.approx(expected, rel=1e-9)


EXPERTS = replace(experts.CONFIG, router_aux_loss_coef=0.5)


def experts_trained(plan: Plan) -> list[float]:
    torch.manual_seed(0)
    mesh = Mesh(plan)
    model = build(EXPERTS)
    initialise(model, 0)
    model = parallelize(model, plan, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gates = drop_layers(model, LayerDrop(0.3, 5.0), 3, plan, optimizer)
    norms = []
    for step in range(4):
        tokens = torch.randint(0, EXPERTS.vocab_size, (4, 9), generator=torch.Generator().manual_seed(step))
        batches = [(part[:, :-1], part[:, 1:]) for part in tokens.split(2)]
        before = partial(gates.begin, step + 1)
        norms.append(float(train_step(model, optimizer, batches, mesh, before_micro_batch=before).grad_norm))
    return [*norms, *torch.cat(take_routed(model)).tolist()]


def test_routers_of_skipped_blocks_do_not_repeat_what_a_recompute_left() -> None:
    found = experts_trained(replace(EXACT, memory=Memory("full")))
    assert found == pytest.approx(experts_trained(EXACT), rel=1e-9)


def test_gates_of_each_rank_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(EXACT, 0.3, 0)

    def own(index: int) -> dict[str, Any]:
        inside = Gates.begin
        monkeypatch.setattr(Gates, "begin", lambda self, step, number: inside(self, step, number + index))
        return trained(PLANS["data 2"], 0.3, index)

    found = run_local(own, 2, 60)
    assert found[0]["losses"] != pytest.approx(expected["losses"], rel=1e-9)


def test_a_missing_division_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(EXACT, 0.3, 0)["losses"]
    monkeypatch.setattr(weft.step.layer_drop.torch, "lerp", lambda hidden, out, weight: out)
    assert trained(EXACT, 0.3, 0)["losses"] != expected


def test_what_is_refused() -> None:
    model = shared.SHIPPED["tied"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"set plan.exact = false"):
        drop_layers(model, LayerDrop(), 0, Plan(), optimizer)
    with pytest.raises(PlanError, match=r"stages of pipe = 2 run what was traced; use pipe = 1"):
        drop_layers(model, LayerDrop(), 0, Plan(pipe=Pipe(2), exact=False), optimizer)
    with pytest.raises(ConfigError, match=r"layer_drop.theta = 0"):
        LayerDrop(theta=0.0)
    with pytest.raises(ConfigError, match=r"layer_drop.gamma = -1"):
        LayerDrop(gamma=-1.0)


def test_a_run_drops_layers_and_resumes_exactly(tmp_path: Path) -> None:
    file = runs.write_run_file(tmp_path)
    some = ["plan.exact=false", "train.layer_drop.theta=0.3", "train.layer_drop.gamma=0.5", "train.schedule=constant"]
    whole = runs.make_run(file, "whole", *some, "train.steps=6")
    runs.train_on_ranks(whole)
    runs.train_on_ranks(runs.make_run(file, "half", *some, "train.steps=3"))
    half = runs.make_run(file, "half", *some, "train.steps=6")
    runs.train_on_ranks(half)
    assert runs.losses(half.folder) == runs.losses(whole.folder)
    plain = runs.make_run(file, "plain", "train.schedule=constant", "train.steps=6")
    runs.train_on_ranks(plain)
    assert runs.losses(plain.folder) != runs.losses(whole.folder)
