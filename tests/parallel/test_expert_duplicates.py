"""Duplicate token dropping: ranks of x send different rows over `expert`, 1/x of the bytes, with the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from experts_for_tests import CONFIG, batch, counted, make, make_balanced, make_mixtral, make_random
from torch import Tensor

from weft.comm import Axis
from weft.errors import PlanError
from weft.parallel.apply import cost, refuse
from weft.parallel.expert import row_shares
from weft.plan import Memory, Pipe, Plan, Shard, split_batch
from weft.plan import Tensor as TensorAxis
from weft.proof.prove import verify

X = TensorAxis(2, drop_duplicates=True)


@pytest.mark.processes
@pytest.mark.parametrize("model", [make_balanced, make_random], ids=["dropless", "capacity"])
def test_plans_are_proved(model: Any) -> None:
    verify(model, batch, Plan(expert=2, tensor=X, memory=Memory("full")), steps=2).require()


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (make_balanced, Plan(expert=2, tensor=X, shard=Shard(2, 3))),
        (make_balanced, Plan(expert=2, tensor=X, pipe=Pipe(2), micro_batch=1)),
        (make_mixtral, Plan(expert=2, tensor=X)),
    ],
    ids=["shard", "pipe", "mixtral"],
)
def test_more_plans_are_proved(model: Any, plan: Plan) -> None:
    verify(model, batch, plan, steps=2).require()


@pytest.mark.processes
def test_summed_gradients_of_gathered_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather whose backward sums over x, as the transpose of a gather of different values does."""

    def backward(gradient: Tensor, x: Axis) -> Tensor:
        return x.degree * gradient[x.index :: x.degree]

    monkeypatch.setattr(row_shares, "_ALL_ROWS", replace(row_shares._ALL_ROWS, backward=backward))
    report = verify(make, batch, Plan(expert=2, tensor=X), steps=1)
    assert "worst gradient" in {check.what for check in report.checks if not check.passed}


def test_a_rank_sends_a_part_of_the_bytes() -> None:
    found = counted(samples=2)

    def sent(tensor: TensorAxis) -> int:
        plan = Plan(expert=2, tensor=tensor, precision="fp64")
        traffic = cost(found, plan, split_batch(plan, 4, 16)).traffic["expert", "all_to_all"]
        assert traffic.calls == 2 * 5  # of each layer: counts, rows and results, and backward of both
        return traffic.num_bytes - 2 * 8 * CONFIG.num_experts  # without the counts

    assert sent(X) * 2 == sent(TensorAxis(2)) > 0


@pytest.mark.parametrize(
    ("found", "plan", "message"),
    [
        (counted, Plan(expert=2, tensor=TensorAxis(1, drop_duplicates=True)), "given x = 1 and expert = 2, use both"),
        (counted, Plan(tensor=X), "given x = 2 and expert = 1"),
        (
            lambda: counted(replace(CONFIG, num_experts_per_tok=1), 15, 1),
            Plan(expert=2, tensor=X),
            "gives each rank of x = 2 as many of 15 rows",
        ),
    ],
)
def test_plans_that_are_refused(found: Any, plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        refuse(found(), plan)
