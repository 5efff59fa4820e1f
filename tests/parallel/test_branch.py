"""The axis `branch`: branches are found in unedited models, dealt out fairly, and computed exactly on their ranks."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from branches_for_tests import Heads, Inception, TwoTowers, ids, images, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.architectures.vision import AmoebaNetDConfig
from weft.checkpoint import Checkpoint, Saver
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models.vision.amoebanet import AmoebaNetD
from weft.optim import AdamW
from weft.optim.saved_state import load_state, pieces_to_save
from weft.parallel.apply import cost, parallelize, refuse
from weft.parallel.branch import exchange, runner
from weft.parallel.branch.axis import find_schedule
from weft.parallel.branch.owners import ModelBranch, deal, find_branches, makespan
from weft.plan import Branch, Context, Memory, Pipe, Plan, Shard, Tile, split_batch
from weft.profiling import Profile, profile
from weft.proof.prove import verify
from weft.step.objective import CROSS_ENTROPY
from weft.step.train_step import train_step

MODELS: dict[str, tuple[Any, Any]] = {
    "inception": (Inception, images),
    "towers": (TwoTowers, ids),
    **{join: (partial(Heads, join), rows) for join in ("sum", "stack", "concat", "any")},
}


def amoebanet() -> nn.Module:
    return AmoebaNetD(AmoebaNetDConfig(layers=3, filters=16, num_classes=5, norm="batch"))


def large_images(index: int) -> tuple[Tensor, Tensor]:
    """Six: the last cells have one pixel, and the gradient of a batch norm over two values is little but rounding."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, 3, 32, 32, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def counted(name: str) -> Profile:
    make, batch = MODELS[name]
    return profile(make(), lambda: (batch(0)[0],))


# --- branches are found, and dealt out


def names_of(name: str) -> list[str]:
    found = find_schedule(counted(name), Plan(branch=Branch(2))).trace
    return sorted(branch.name for branch in find_branches(found))


def test_arms_towers_and_heads_are_found() -> None:
    arms = ["five", "one", "pooled", "three"]
    assert names_of("inception") == [f"cells.{cell}.{one}" for cell in range(2) for one in arms]
    assert names_of("towers") == ["item", "user"]
    assert names_of("sum") == [f"heads.{index}" for index in range(4)]


def test_arms_are_exchanged_once_a_cell() -> None:
    found = find_schedule(counted("inception"), Plan(branch=Branch(4)))
    assert len(found.exchanges) == 2
    assert [len(one) for one in found.forks.values()] == [1, 1]
    pools = [rank for event, rank in zip(found.trace.events, found.ranks, strict=True) if event.name == "max_pool2d"]
    assert None not in pools  # the rank of the arm behind it runs a pool


def one_wave(*work: float) -> list[ModelBranch]:
    return [ModelBranch(frozenset([str(index)]), {0: one}) for index, one in enumerate(work)]


def best(branches: list[ModelBranch], degree: int) -> float:
    return min(makespan(branches, ranks) for ranks in itertools.product(range(degree), repeat=len(branches)))


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_deal_takes_at_most_four_thirds_of_the_best(degree: int) -> None:
    rng = random.Random(degree)
    assert deal(one_wave(1, 2, 3, 6), 2).imbalance == 1.0
    for _ in range(10):
        branches = one_wave(*(rng.randint(1, 20) for _ in range(rng.randint(degree, 6))))
        found = deal(branches, degree)
        assert makespan(branches, found.ranks) <= (4 / 3 - 1 / (3 * degree)) * best(branches, degree) + 1e-9


def test_each_wave_is_dealt_out() -> None:
    branches = [ModelBranch(frozenset([f"{wave}{i}"]), {wave: 1.0}) for wave in range(3) for i in range(2)]
    found = deal(branches, 2)
    assert makespan(branches, found.ranks) == 3.0
    assert found.imbalance == 1.0


def test_named_modules_are_the_branches() -> None:
    found = find_schedule(counted("inception"), Plan(branch=Branch(2, modules=("cells.0.one", "cells.0.five")))).trace
    named = find_branches(found, ("cells.0.one", "cells.0.five"))
    assert [branch.name for branch in named] == ["cells.0.one", "cells.0.five"]
    pair = find_branches(found, ("cells.1.three", "cells.1.pooled"))
    assert deal(pair, 2).ranks in ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("name", "modules", "words"),
    [
        ("sum", ("heads.0.0", "heads.0.2", "heads.1"), "one of 'heads.0.0' and 'heads.0.2' needs the other's result"),
        ("inception", ("cells.0", "cells.1"), "no other branch runs at the same time as 'cells.0'"),
        ("inception", ("cells.0.one", "cells.0.nine"), "no other branch runs at the same time as 'cells.0.one'"),
    ],
)
def test_modules_that_are_not_branches_are_refused_in_words(name: str, modules: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse(counted(name), Plan(branch=Branch(2, modules=modules)))


# --- what is refused


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


class Siamese(Chain):
    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows) * self.layers(rows.flip(1))


class LooksAtValues(Heads):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) if rows.sum() > 0 else super().forward(-rows)


class Checkpointed(Heads):
    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.trunk(rows)
        return sum(checkpoint(head, hidden, use_reentrant=False) for head in self.heads)


class ReplacesBuffer(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.trunk(rows)
        first = self.heads[0](hidden)
        self.mean = 0.9 * self.mean + first.detach().mean(0)
        return first + self.heads[1](hidden) + self.heads[2](hidden) + self.heads[3](hidden)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(branch=Branch(5)), "branches for 4 ranks only"),
        (Plan(branch=Branch(2), pipe=Pipe(2)), "pipe"),
        (Plan(branch=Branch(2), context=Context(2)), "context = 2"),
        (Plan(branch=Branch(2), expert=2), "expert"),
        (Plan(branch=Branch(2), tile=Tile(2)), "rows = 2"),
        (Plan(branch=Branch(2), memory=Memory("full")), "memory.recompute = 'full'"),
        (Plan(branch=Branch(2), memory=Memory(activations=0.5)), "memory.activations = 0.5"),
    ],
    ids=lambda value: value.describe_axes() + value.memory.words if isinstance(value, Plan) else "",
)
def test_plans_that_do_not_fit_are_refused_in_words(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse(counted("sum"), plan)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Chain, "no independent branches"),
        (Siamese, "no independent branches"),
        (LooksAtValues, "depends on the values"),
        (Checkpointed, "in a checkpoint of its own"),
    ],
)
def test_models_without_branches_are_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse(profile(make(), lambda: (rows(0)[0],)), Plan(branch=Branch(2)))


@pytest.mark.processes
def test_a_buffer_that_is_replaced_is_refused() -> None:
    with pytest.raises(PlanError, match="replaces its buffer 'mean'"):
        verify(ReplacesBuffer, rows, Plan(branch=Branch(2)), steps=1)


def test_a_degree_below_one_is_refused() -> None:
    with pytest.raises(PlanError, match="branch = 0"):
        Plan(branch=Branch(0))


def test_an_example_is_needed() -> None:
    with pytest.raises(PlanError, match="needs an example"):
        refuse(profile(Heads()), Plan(branch=Branch(2)))


# --- what ranks hold and send


def test_a_branch_is_held_by_one_rank() -> None:
    found, plan = counted("towers"), Plan(branch=Branch(2), precision="fp64")
    split = split_batch(plan, 4, 1)
    both = [cost(found, plan, split, {**dict.fromkeys(plan.degrees, 0), "branch": index}) for index in range(2)]
    held = [one.state_bytes["parameters"] for one in both]
    shared = 8 * sum(
        p.numel() for name, p in TwoTowers().named_parameters() if "user" not in name and "item" not in name
    )
    whole = 8 * sum(p.numel() for p in TwoTowers().parameters())
    assert whole + shared <= sum(held) <= 1.2 * (whole + shared)  # buffers are padded


# --- proofs


@pytest.mark.processes
@pytest.mark.sampled(9)
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_branches_are_proved(name: str, degree: int) -> None:
    if name == "towers" and degree > 2:
        degree = 2
    report = verify(*MODELS[name], Plan(branch=Branch(degree)), steps=2)
    report.require()
    assert any(check.what == "traffic: branch all_gather" for check in report.checks)


@pytest.mark.processes
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["towers", "any", "inception"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(branch=Branch(2), data=2),
        Plan(branch=Branch(2), shard=Shard(2, 3), micro_batch=1),
        Plan(branch=Branch(2), shard=Shard(2, 2)),
        Plan(branch=Branch(2), micro_batch=2),
    ],
    ids=lambda plan: plan.describe_axes(),
)
def test_branches_are_proved_beside_other_axes(plan: Plan, name: str) -> None:
    make, batch = MODELS[name]
    if name == "inception":
        make = partial(Inception, norm=False)
    verify(make, batch, plan, steps=2).require()


@pytest.mark.processes
def test_named_branches_are_proved() -> None:
    """The two other heads run on both ranks."""
    verify(*MODELS["any"], Plan(branch=Branch(2, modules=("heads.1", "heads.3"))), steps=1).require()


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("degree", [2, 3])
def test_amoebanet_is_proved(degree: int) -> None:
    verify(amoebanet, large_images, Plan(branch=Branch(degree)), steps=2).require()


# --- wrong runs fail


def failed(make: Any, batch: Any) -> set[str]:
    return {check.what for check in verify(make, batch, Plan(branch=Branch(2)), steps=1).checks if not check.passed}


@pytest.mark.processes
def test_a_fork_without_its_sum_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "fork", lambda tensors, axis, enter: tuple(tensors))
    assert {"worst gradient", "traffic: branch all_reduce"} <= failed(*MODELS["sum"])


@pytest.mark.processes
def test_a_result_that_counts_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = exchange.Exchanger.receive
    monkeypatch.setattr(exchange.Exchanger, "receive", lambda self, own: [2 * one for one in gather(self, own)])
    assert {"loss", "worst gradient"} <= failed(*MODELS["sum"])


# --- checkpoints


def trained(plan: Plan, steps: range, folder: Path, loads: int | None) -> dict[str, list[float]]:
    """Trains a few steps from a checkpoint of any plan, saves one, and returns the losses and the buffers."""
    torch.manual_seed(0)
    mesh, example = Mesh(plan), partial(images, 0)
    model = parallelize(Inception().double(), plan, mesh, example=lambda: (example()[0].double(),))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if plan.num_ranks > 1:
        optimizer = AdamW(model, lr=1e-2)
    if loads is not None:
        load_state(Checkpoint(folder / f"step-{loads:08d}"), model, optimizer)
    losses = []
    for step in steps:
        batch = images(step)[0].double(), images(step)[1]
        losses.append(train_step(model, optimizer, [batch], mesh, CROSS_ENTROPY, 1.0).loss.item())
    saver = Saver(folder, mesh.rank, plan.num_ranks, f"token{steps.stop}")
    saver.save(steps.stop, pieces_to_save(model, optimizer, mesh), {})
    saver.wait(published=True)
    return {"losses": losses, **{name: one.flatten().tolist() for name, one in model.named_buffers()}}


@pytest.mark.soak
@pytest.mark.processes
def test_a_checkpoint_of_any_plan_goes_on_under_any_other(tmp_path: Path) -> None:
    plans = [Plan(branch=Branch(2), precision="fp64"), Plan(branch=Branch(3), precision="fp64"), Plan(precision="fp64")]
    losses = []
    for index, plan in enumerate(plans):
        loads = index or None
        found = run_local(lambda _, p=plan, i=index, n=loads: trained(p, range(i, i + 1), tmp_path, n), plan.num_ranks)
        assert all(one == found[0] for one in found)  # all ranks have the same losses and buffers
        losses += found[0]["losses"]
    (alone,) = run_local(lambda _: trained(plans[-1], range(3), tmp_path / "alone", None), 1)
    assert losses == pytest.approx(alone["losses"], rel=1e-9)
    for name, values in alone.items():
        assert name == "losses" or found[0][name] == pytest.approx(values, rel=1e-9, abs=1e-9), name
