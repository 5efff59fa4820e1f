"""The axis `branch` beside `x`: layers inside of branches are split, and only the ranks of a branch communicate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from branches_for_tests import SPLIT_MODELS, Heads, Inception, images
from torch import nn

from weft.errors import PlanError
from weft.inspection.parameter_cut import Cut
from weft.parallel.apply import cost, localise
from weft.parallel.branch import axis, regions, runner
from weft.parallel.branch.axis import find_schedule
from weft.parallel.branch.beside import refuse_beside
from weft.plan import Branch, Plan, Shard, split_batch
from weft.plan import Tensor as TensorAxes
from weft.profiling import Profile, profile
from weft.proof.prove import verify

X = Plan(branch=Branch(2), tensor=TensorAxes(2))


def counted(name: str) -> Profile:
    make, batch = SPLIT_MODELS[name]
    return profile(make(), lambda: (batch(0)[0],))


def failed(plan: Plan, name: str = "heads") -> set[str]:
    return {check.what for check in verify(*SPLIT_MODELS[name], plan, steps=1).checks if not check.passed}


# --- what is found, held and sent


def test_a_split_layer_is_one_operation() -> None:
    """Attention, whose layers share one collective, is one operation too."""
    names = [event.name for event in find_schedule(counted("towers"), X).trace.events if "split" in event.name]
    assert names == ["split Embedding", "split Attention", *["split Linear"] * 3] * 2 + ["split Linear"]


def test_layers_of_other_branches_are_not_called() -> None:
    found = counted("towers")
    here = [localise(found, X, {**dict.fromkeys(X.degrees, 0), "branch": index}).layer_calls for index in range(2)]
    towers = [{name.split(".")[0] for name in calls} for calls in here]
    assert {frozenset(one) for one in towers} == {frozenset(["user", "head"]), frozenset(["item", "head"])}


def test_ranks_of_other_branches_send_other_bytes_over_x() -> None:
    found, at = counted("towers"), dict.fromkeys(X.degrees, 0)
    sent = [
        cost(found, X, split_batch(X, 4, 1), {**at, "branch": index}).traffic["x", "all_reduce"] for index in (0, 1)
    ]
    assert sent[0].calls == sent[1].calls
    assert sent[0].num_bytes != sent[1].num_bytes


def test_nothing_of_a_parameter_is_nothing_beside_any_cut() -> None:
    half = Cut((4, 2), (((0, 2),), ((0, 2),)))
    for one in (Cut.nothing((4, 2)).beside(half), half.beside(Cut.nothing((4, 2)))):
        assert one.local_shape == (0, 2)


# --- what is refused


class Dropping(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (Heads, Plan(branch=Branch(2), tensor=TensorAxes(1, 2)), "beside y = 2"),
        (Heads, Plan(branch=Branch(2), tensor=TensorAxes(2, sequence=True)), "tensor.sequence = true"),
        (Dropping, X, "the model has dropout"),
    ],
)
def test_plans_that_do_not_fit_are_refused_in_words(make: Any, plan: Plan, words: str) -> None:
    assert words in (refuse_beside(profile(make()), plan) or "")


# --- proofs


@pytest.mark.processes
@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", SPLIT_MODELS)
@pytest.mark.parametrize(
    "plan",
    [
        X,
        Plan(branch=Branch(2, "split"), tensor=TensorAxes(2), micro_batch=1),
        Plan(branch=Branch(2), tensor=TensorAxes(2), data=2),
        Plan(branch=Branch(2), tensor=TensorAxes(2), shard=Shard(2, 3)),
        Plan(branch=Branch(2, "split"), tensor=TensorAxes(2), shard=Shard(2, 3)),
    ],
    ids=lambda plan: plan.describe_axes(),
)
def test_branches_are_proved_beside_x(plan: Plan, name: str) -> None:
    report = verify(*SPLIT_MODELS[name], plan, steps=2)
    report.require()
    kinds = {check.what for check in report.checks}
    assert {"traffic: x all_reduce", "traffic: branch all_gather"} <= kinds


@pytest.mark.soak
@pytest.mark.processes
def test_four_branches_with_batch_norms_are_proved_beside_x() -> None:
    verify(partial(Inception, thin=4), images, Plan(branch=Branch(4), tensor=TensorAxes(2)), steps=2).require()


# --- wrong runs fail


@pytest.mark.processes
def test_a_fork_without_its_sum_fails_beside_x(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "fork", lambda tensors, axis, enter: tuple(tensors))
    assert {"worst gradient", "traffic: branch all_reduce"} <= failed(X)


@pytest.mark.soak
@pytest.mark.processes
def test_a_prediction_that_counts_all_layers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axis, "_local_calls", lambda profile, *_: profile.layer_calls)
    assert "traffic: x all_reduce" in failed(X, "towers")


@pytest.mark.processes
def test_layers_that_are_not_one_operation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their collectives would run on ranks that skip them."""
    monkeypatch.setattr(regions, "has_torch_function", lambda given: False)
    with pytest.raises(PlanError, match=r"a torch\.autograd.Function"):
        verify(*SPLIT_MODELS["heads"], X, steps=1)
