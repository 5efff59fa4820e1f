"""Branches whose ranks have different samples (`branch.batch = "split"`): gathered at forks, sent back at joins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from branches_for_tests import MODELS, Heads, Inception, images, rows
from nets_for_tests import chain, net
from torch import Tensor, nn

from weft.errors import PlanError
from weft.parallel.apply import refuse
from weft.parallel.branch import axis, exchange, runner
from weft.parallel.branch.axis import find_schedule, work_share
from weft.parallel.branch.batch_dims import with_sizes
from weft.pipeline.trace_watch import RecordedTensor
from weft.plan import Branch, Memory, Pipe, Plan, Shard, split_batch
from weft.profiling import Profile, profile
from weft.proof.prove import verify

SPLIT = Plan(branch=Branch(2, "split"))


class Sizes(Heads):
    """Branches, and what follows them, reshape by the number of samples of other tensors."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.trunk(rows)
        first = self.heads[0](hidden).view(len(rows), -1, 5).sum(1)
        second = self.heads[1](hidden)
        joined = torch.stack([first, second], 1).view(len(first), 2, 5)[: len(rows)]
        return joined.sum(1) + self.heads[2](hidden).expand(len(hidden), 5) + self.heads[3](hidden)


class Mask(Heads):
    """A branch uses a tensor that was made for the samples of the trunk."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden, mask = self.trunk(rows), torch.ones(len(rows), 5, dtype=rows.dtype)
        return self.heads[0](hidden) * mask + self.heads[1](hidden) + self.heads[2](hidden) + self.heads[3](hidden)


class NoSamples(Heads):
    """A branch returns a mean over its samples."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.trunk(rows)
        return self.heads[2](hidden).mean(0) + self.heads[0](hidden) + self.heads[1](hidden) + self.heads[3](hidden)


class MixedSamples(Heads):
    """Branches begin with a tensor of which a dim has features times samples."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.trunk(rows).view(len(rows), 2, 16 // 2).transpose(0, 1).reshape(-1, 8)
        found = sum(head(torch.cat([hidden, hidden], 1)) for head in self.heads)
        assert isinstance(found, Tensor)
        return found.view(2, len(rows), 5).sum(0)


def gated_cell() -> nn.Module:
    """A rank of two is done with its branches before the gradient of `gate` is sent, and the other one after that."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        gate = hidden.sigmoid()
        return self.mix(self.first(hidden) + self.second(gate) + self.third(gate))

    second = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))
    return net(forward, second=second, **{name: nn.Linear(16, 16) for name in ("first", "third", "mix")})


def gated_cells() -> nn.Module:
    """Blocks with branches, and with layers that all ranks train."""
    return chain([gated_cell() for _ in range(2)], enter=nn.Linear(6, 16), head=nn.Linear(16, 5))


def counted(make: Any, batch: Any) -> Profile:
    return profile(make(), lambda: (batch(0)[0],))


# --- what is predicted


def test_traffic_follows_the_formulas() -> None:
    """Four samples a rank of 16 features enter branches, and results of 5 leave; a rank has three of four branches."""
    same, split = (find_schedule(counted(*MODELS["stack"]), Plan(branch=Branch(2, how))) for how in ("same", "split"))
    hidden, results = 4 * 16 * 4, 3 * 4 * 5 * 4
    assert same.calls(2) == [("all_gather", 2 * results), ("all_reduce", hidden)]
    assert split.calls(2) == [
        ("all_gather", 2 * hidden),
        ("reduce_scatter", 2 * hidden),
        ("all_to_all", 2 * results),
        ("all_to_all", 2 * results),
    ]


def test_the_batch_is_split_over_the_axis() -> None:
    found = split_batch(Plan(branch=Branch(2, "split"), data=2), 8, 1)
    assert (found.num_batch_ranks, found.micro_batch) == (4, 2)
    assert split_batch(Plan(branch=Branch(2), data=2), 8, 1).micro_batch == 4
    with pytest.raises(PlanError, match="branch 2"):
        split_batch(SPLIT, 3, 1)


def test_time_is_that_of_data_parallelism_and_the_imbalance() -> None:
    found = counted(*MODELS["sum"])
    assert work_share(found, Plan(branch=Branch(2))) < 1.0 <= work_share(found, SPLIT) < 2.0


def test_numbers_of_samples_are_those_of_the_operation() -> None:
    tensor, here, there = torch.zeros(2, 3), RecordedTensor((4, 3)), RecordedTensor((2, 3))
    seen: list[Any] = []
    found = with_sizes(
        ((tensor, (slice(None, 2), 7), torch.Size([2, 3])), {"size": [2, -1], "scale": 0.5}),
        ((here, (slice(None, 4), 7), torch.Size([4, 3])), {"size": [4, -1], "scale": 0.1}),
        ((there, (slice(None, 2), 7), torch.Size([2, 3])), {"size": [2, -1], "scale": 0.1}),
        lambda *pair: seen.append(pair),
    )
    assert found == ((tensor, (slice(None, 4), 7), torch.Size([4, 3])), {"size": [4, -1], "scale": 0.5})
    assert seen == [(tensor, here)]


# --- what is refused


@pytest.mark.parametrize(
    ("make", "batch", "words"),
    [
        (NoSamples, rows, "has no samples"),
        (MixedSamples, rows, "are not a dim of it"),
        (Inception, images, "takes statistics over the batch, which branch = 2 splits"),
    ],
)
def test_models_that_mix_samples_are_refused_in_words(make: Any, batch: Any, words: str) -> None:
    found = counted(make, batch)
    refuse(found, Plan(branch=Branch(2)))
    with pytest.raises(PlanError, match=words):
        refuse(found, SPLIT)


@pytest.mark.processes
def test_a_tensor_made_for_other_samples_is_refused() -> None:
    with pytest.raises(PlanError, match=r"made for the samples of another part of the model"):
        verify(Mask, rows, SPLIT, steps=1)


# --- proofs


@pytest.mark.processes
@pytest.mark.sampled(18)
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_splitting_the_batch_is_proved(name: str, degree: int) -> None:
    make, batch = MODELS[name]
    degree = 2 if name == "towers" else degree
    whole = partial(_twelve, batch)
    report = verify(make, whole, Plan(branch=Branch(degree, "split")), steps=2)
    report.require()
    assert any(check.what == "traffic: branch all_to_all" for check in report.checks)


def _twelve(batch: Any, index: int) -> tuple[Tensor, ...]:
    """A batch that every degree divides."""
    parts = [batch(3 * index + part) for part in range(3)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


@pytest.mark.processes
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["towers", "any", "inception"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(branch=Branch(2, "split"), data=2),
        Plan(branch=Branch(2, "split"), shard=Shard(2, 3), micro_batch=1),
        Plan(branch=Branch(2, "split"), shard=Shard(2, 2)),
        Plan(branch=Branch(2, "split"), micro_batch=1),
    ],
    ids=lambda plan: plan.describe_axes(),
)
def test_splitting_the_batch_is_proved_beside_other_axes(plan: Plan, name: str) -> None:
    verify(*MODELS[name], plan, steps=2).require()


@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "plan",
    [
        SPLIT,
        Plan(branch=Branch(2, "split"), data=2, micro_batch=1),
        Plan(branch=Branch(2, "split"), shard=Shard(2, 3)),
        Plan(branch=Branch(2, "split"), shard=Shard(2, 2), micro_batch=1),
        Plan(branch=Branch(2, "split"), memory=Memory(recompute="full")),
        Plan(branch=Branch(2, "split"), pipe=Pipe(2), micro_batch=1),
    ],
    ids=lambda plan: f"{plan.describe_axes()} {plan.memory.recompute}",
)
def test_ranks_that_leave_a_block_at_different_times_are_proved(plan: Plan) -> None:
    verify(gated_cells, rows, plan, steps=2).require()


@pytest.mark.processes
def test_sizes_of_other_tensors_are_followed() -> None:
    verify(Sizes, rows, SPLIT, steps=1).require()


# --- wrong runs fail


def failed() -> set[str]:
    return {check.what for check in verify(*MODELS["any"], SPLIT, steps=1).checks if not check.passed}


@pytest.mark.processes
def test_a_fork_that_keeps_the_gradient_of_its_own_branch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(tensor: Tensor, dim: int, axis: Any, enter: Any) -> Tensor:
        whole = exchange.gather_samples(tensor, dim, axis).chunk(axis.degree, dim)
        return torch.cat([tensor if index == axis.index else one for index, one in enumerate(whole)], dim)

    monkeypatch.setattr(runner, "gather_fork", gathered)
    assert {"worst gradient", "traffic: branch reduce_scatter"} <= failed()


@pytest.mark.soak
@pytest.mark.processes
def test_samples_of_another_rank_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    send = exchange.ShareExchanger.receive

    def reversed_shares(self: Any, own: Sequence[Tensor]) -> list[Tensor]:
        return send(self, [torch.cat(one.chunk(2, 0)[::-1]) for one in own])

    monkeypatch.setattr(exchange.ShareExchanger, "receive", reversed_shares)
    assert {"loss", "worst gradient"} <= failed()


@pytest.mark.processes
def test_a_trunk_whose_gradient_is_not_summed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = axis.branch_cuts
    monkeypatch.setattr(axis, "branch_cuts", lambda shapes, found, index, _: cuts(shapes, found, index, False))
    assert "worst gradient" in failed()
