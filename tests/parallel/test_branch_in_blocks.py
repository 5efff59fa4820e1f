"""Branches inside of blocks: beside pipelines, whose stages run blocks one by one, and beside recompute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from branches_for_tests import Heads, Inception, InceptionCell, TwoTowers, ids, images, rows
from nets_for_tests import chain, net
from torch import Tensor, nn

from weft.errors import PlanError
from weft.parallel.apply import refuse
from weft.parallel.branch import exchange
from weft.parallel.branch.axis import find_schedules, work_share
from weft.parallel.branch.beside import refuse_beside
from weft.plan import Branch, Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorAxes
from weft.profiling import Profile, profile
from weft.proof.prove import verify

PIPE = Plan(branch=Branch(2), pipe=Pipe(2), micro_batch=2)
FULL = Plan(branch=Branch(2), memory=Memory("full"))
GROUPS = partial(Inception, norm=False)
EVEN = partial(Inception, norm=False, thin=4)


class SharedArms(Inception):
    """One convolution is used by both cells."""

    def __init__(self) -> None:
        super().__init__(False)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(1, 16), nn.ReLU())
        self.cells = nn.ModuleList([InceptionCell(16, False, 3), InceptionCell(16, False, 3)])
        one, other = self.cells
        assert isinstance(one, InceptionCell)
        other.one[0].weight = one.one[0].weight


def leans_on_one() -> nn.Module:
    """A block in which one rank of two has no result that needs a gradient, and saves nothing for backward."""
    trained = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 6))
    frozen = nn.Linear(6, 6).requires_grad_(False)
    return net(
        lambda self, rows: rows + self.trained(rows) + self.frozen(rows.detach()), trained=trained, frozen=frozen
    )


def multiplies_two() -> nn.Module:
    """A block whose backward needs the results of both ranks."""
    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    return net(lambda self, rows: rows + self.one(rows) * self.other(rows), one=one, other=other)


def two(block: Any) -> nn.Module:
    """Two blocks with branches, and a head."""
    return chain([block(), block()], head=nn.Linear(6, 5))


def counted(make: Any = GROUPS, batch: Any = images) -> Profile:
    return profile(make(), lambda: (batch(0)[0],))


def failed(make: Any, batch: Any, plan: Plan) -> set[str]:
    return {check.what for check in verify(make, batch, plan, steps=1).checks if not check.passed}


# --- what is found


@pytest.mark.parametrize("plan", [PIPE, FULL], ids=["pipe", "recompute"])
def test_each_block_is_a_region_of_its_own(plan: Plan) -> None:
    found = counted()
    whole, inside = find_schedules(found, Plan(branch=Branch(2))), find_schedules(found, plan)
    assert list(whole) == [""]
    assert list(inside) == ["cells.0", "cells.1"]
    calls = [call for one in inside.values() for call in one.calls(2)]
    assert sorted(calls) == sorted(whole[""].calls(2))
    assert work_share(found, plan) == pytest.approx(work_share(found, Plan(branch=Branch(2))), rel=0.1)


def test_forwards_that_are_repeated_communicate_again() -> None:
    same = find_schedules(counted(), FULL)["cells.0"]
    split = find_schedules(counted(), Plan(branch=Branch(2, "split"), memory=Memory("full")))["cells.0"]
    for one, forward in ((same, ["all_gather"]), (split, ["all_gather", "all_to_all"])):
        kinds, more = ([name for name, _ in one.calls(2, forwards)] for forwards in (1, 2))
        assert sorted(more) == sorted([*kinds, *forward])


def test_parameters_of_several_blocks_are_in_no_branch() -> None:
    shared = find_schedules(counted(SharedArms), PIPE)["cells.0"].trace.parameters["one.0.weight"]
    for one in find_schedules(counted(SharedArms), PIPE).values():
        assert one.makers[shared] is None
        assert set(one.ranks) == {None, 0, 1}


# --- what is refused


@pytest.mark.parametrize(
    ("make", "batch", "plan", "words"),
    [
        (Heads, rows, PIPE, r"pipe = 2, but no block of Heads has independent branches.*must lie in one block"),
        (TwoTowers, ids, FULL, r"memory.recompute = 'full', but no block of TwoTowers has independent"),
        (GROUPS, images, Plan(branch=Branch(2, modules=("cells.0", "stem")), pipe=Pipe(2)), "not inside of a block"),
    ],
)
def test_forks_over_several_blocks_are_refused_in_words(make: Any, batch: Any, plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse(counted(make, batch), plan)


def test_schedules_that_put_weight_gradients_off_are_refused() -> None:
    plan = Plan(branch=Branch(2), pipe=Pipe(2, "zero-bubble"))
    assert "zero-bubble" in (refuse_beside(profile(GROUPS()), plan) or "")


def test_inputs_of_blocks_without_samples_are_refused() -> None:
    def positions() -> nn.Module:
        block = net(
            lambda self, rows, positions: self.one(rows) * self.other(rows + positions),
            one=nn.Linear(6, 5),
            other=nn.Linear(6, 5),
        )
        return net(lambda self, rows: self.blocks[0](rows, torch.arange(6.0)), blocks=nn.ModuleList([block]))

    refuse(counted(positions, rows), FULL)
    with pytest.raises(PlanError, match="whose first dim is not that of samples"):
        refuse(counted(positions, rows), Plan(branch=Branch(2, "split"), memory=Memory("full")))


# --- proofs


@pytest.mark.processes
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (GROUPS, PIPE),
        (Inception, Plan(branch=Branch(3), pipe=Pipe(2), micro_batch=4)),
        (GROUPS, Plan(branch=Branch(2), pipe=Pipe(2, "gpipe"), micro_batch=1, data=2)),
        (GROUPS, Plan(branch=Branch(2), pipe=Pipe(2), micro_batch=2, shard=Shard(2, 1))),
        (GROUPS, Plan(branch=Branch(2, "split"), pipe=Pipe(2), micro_batch=1)),
        (EVEN, Plan(branch=Branch(2), pipe=Pipe(2), micro_batch=2, tensor=TensorAxes(2))),
        (SharedArms, PIPE),
        (GROUPS, Plan(branch=Branch(2, modules=("cells.0.one", "cells.0.five")), pipe=Pipe(2), micro_batch=2)),
    ],
)
def test_branches_are_proved_beside_pipe(make: Any, plan: Plan) -> None:
    report = verify(make, images, plan, steps=2)
    report.require()
    assert {"traffic: branch all_gather", "traffic: pipe send"} <= {check.what for check in report.checks}


@pytest.mark.processes
@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Inception, FULL),
        (Inception, Plan(branch=Branch(4), memory=Memory("selective"))),
        (GROUPS, Plan(branch=Branch(2), memory=Memory("full"), shard=Shard(2, 3))),
        (GROUPS, Plan(branch=Branch(2), memory=Memory("selective"), data=2, micro_batch=1)),
        (GROUPS, Plan(branch=Branch(2, "split"), memory=Memory("full"), micro_batch=1)),
        (GROUPS, Plan(branch=Branch(2, "split"), memory=Memory("selective"))),
        (EVEN, Plan(branch=Branch(2), memory=Memory("full"), tensor=TensorAxes(2))),
        (EVEN, Plan(branch=Branch(2), memory=Memory("full", keep_collectives=True), tensor=TensorAxes(2))),
        (GROUPS, Plan(branch=Branch(2), memory=Memory("full"), pipe=Pipe(2), micro_batch=2)),
        (GROUPS, Plan(branch=Branch(2), memory=Memory("full", recompute_stages=1), pipe=Pipe(2), micro_batch=2)),
    ],
)
def test_branches_are_proved_beside_recompute(make: Any, plan: Plan) -> None:
    verify(make, images, plan, steps=2).require()


@pytest.mark.processes
def test_a_rank_that_saves_nothing_recomputes_with_the_others() -> None:
    verify(partial(two, leans_on_one), rows, FULL, steps=1).require()


# --- wrong runs fail


@pytest.mark.processes
def test_a_result_that_counts_twice_fails_in_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = exchange.Exchanger.receive
    monkeypatch.setattr(exchange.Exchanger, "receive", lambda self, own: [2 * one for one in gather(self, own)])
    assert {"loss", "worst gradient"} <= failed(partial(two, multiplies_two), rows, PIPE)


@pytest.mark.processes
def test_a_recompute_without_its_exchange_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward each rank uses zeros for the results of others."""
    gather = exchange.Exchanger.receive

    def once(self: Any, own: Any) -> list[Tensor]:
        if torch._C._current_graph_task_id() == -1:  # not in backward
            return gather(self, own)
        return [torch.zeros(form.shape, dtype=form.dtype) for form in self.forms]

    monkeypatch.setattr(exchange.Exchanger, "receive", once)
    assert {"worst gradient", "traffic: branch all_gather"} <= failed(partial(two, multiplies_two), rows, FULL)
