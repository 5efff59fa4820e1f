"""Experts split over context, x and y too, and beside y and split sequences: exact, and to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_for_tests import CONFIG, batch, counted, make, make_balanced, make_mixtral, make_random
from torch import Tensor

from weft.architectures import Capacity
from weft.comm import Axis
from weft.errors import PlanError
from weft.mesh import joint_axes, ranks_of
from weft.models import build
from weft.models.loss import ExampleLoss
from weft.parallel.apply import cost, refuse
from weft.parallel.expert import routing, row_shares
from weft.plan import Context, Memory, Pipe, Plan, Shard, split_batch
from weft.plan import Tensor as TensorAxis
from weft.profiling import profile
from weft.proof.prove import verify

CONTEXT, SEQUENCE = Context(2), TensorAxis(2, sequence=True)


@pytest.mark.processes
@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (make, Plan(expert=2, context=CONTEXT, expert_over=("context",), memory=Memory("full"))),
        (make, Plan(context=CONTEXT, expert_over=("context",))),
        (make, Plan(context=CONTEXT, shard=Shard(2, 3), expert_over=("context",))),
        (make_balanced, Plan(tensor=TensorAxis(2, 2), expert_over=("x", "y"), memory=Memory("full"))),
        (make_balanced, Plan(expert=2, tensor=TensorAxis(2), expert_over=("x",), memory=Memory("full"))),
        (make_random, Plan(expert=2, tensor=TensorAxis(2), expert_over=("x",))),
        (make_balanced, Plan(expert=2, tensor=TensorAxis(1, 2))),
        (make_balanced, Plan(tensor=TensorAxis(1, 2), expert_over=("y",), memory=Memory("selective"))),
        (make_balanced, Plan(tensor=TensorAxis(1, 2), pipe=Pipe(2), micro_batch=1, expert_over=("y",))),
        (make, Plan(tensor=SEQUENCE, expert_over=("x",))),
        (make, Plan(expert=2, tensor=SEQUENCE, memory=Memory("full"))),
        (make, Plan(tensor=TensorAxis(2, 2, True), expert_over=("y",))),
        (make, Plan(tensor=TensorAxis(2), context=CONTEXT, expert_over=("context", "x"))),
        (make_mixtral, Plan(tensor=TensorAxis(2), expert_over=("x",))),
    ],
    ids=lambda value: value.describe_axes() + value.memory.words if isinstance(value, Plan) else "",
)
def test_plans_are_proved(model: Any, plan: Plan) -> None:
    verify(model, batch, plan, steps=2).require()


@pytest.mark.processes
def test_weights_whose_gradients_are_not_summed_over_y_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "enter", lambda value, axis: value)
    report = verify(make, batch, Plan(tensor=TensorAxis(1, 2)), steps=1)
    assert "worst gradient" in {check.what for check in report.checks if not check.passed}


@pytest.mark.soak
@pytest.mark.processes
def test_features_in_a_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    to_features = row_shares._TO_FEATURES

    def swapped(rows: Tensor, y: Any) -> Tensor:
        return to_features.forward(rows.roll(rows.shape[1] // 2, 1), y)

    monkeypatch.setattr(row_shares, "_TO_FEATURES", replace(to_features, forward=swapped))
    report = verify(make, batch, Plan(tensor=TensorAxis(1, 2)), steps=1)
    assert "loss" in {check.what for check in report.checks if not check.passed}


def test_ranks_of_the_experts_are_those_of_all_axes() -> None:
    plan = Plan(data=2, expert=2, context=CONTEXT, tensor=TensorAxis(2), expert_over=("x",))
    assert joint_axes(plan)["experts"] == ("expert", "x")
    assert ranks_of(plan, "experts").tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert plan.describe_axes() == "data 2 × expert 2 × context 2 (ring) × x 2 (experts over expert × x)"
    assert "experts" not in joint_axes(replace(plan, expert_over=()))


def test_bytes_over_y_are_a_closed_form() -> None:
    """Each layer exchanges features for rows and back, each way, and sums logits and gradients of weights."""
    plan, found = Plan(tensor=TensorAxis(1, 2), expert_over=("y",), precision="fp64"), counted()
    traffic = cost(found, plan, split_batch(plan, 4, 16)).traffic
    layers, rows, row_bytes = 2, 4 * 16 * CONFIG.num_experts_per_tok // 2, CONFIG.hidden_size * 8
    sent = traffic["y", "all_to_all"]
    assert (sent.calls, sent.num_bytes) == (layers * 4, layers * 4 * rows * row_bytes)
    sent = traffic["experts", "all_to_all"]
    assert (sent.calls, sent.num_bytes) == (layers * 5, layers * (4 * rows * row_bytes + 8 * CONFIG.num_experts))


def test_experts_over_context_have_no_sum_over_it() -> None:
    found, split = counted(), split_batch(Plan(context=CONTEXT), 4, 16)

    def summed(*over: Any) -> int:
        plan = Plan(context=CONTEXT, expert_over=over, precision="fp64")
        return cost(found, plan, split).traffic["context", "all_reduce"].num_bytes

    experts = 2 * 8 * (2 * 8 * 16 + 16 * 8) * 8
    assert summed() - summed("context") == experts


@pytest.mark.parametrize(
    ("config", "plan", "message"),
    [
        (
            CONFIG,
            Plan(expert=8, tensor=TensorAxis(2), expert_over=("x",)),
            "expert = 8 × x = 2 does not divide the 8 exp",
        ),
        (
            replace(CONFIG, router_aux_loss_coef=0.1),
            Plan(tensor=SEQUENCE),
            "tensor.sequence = true splits sequences, ov",
        ),
        (CONFIG, Plan(tensor=TensorAxis(1, 16)), "as many of 128 rows|does not divide"),
        (
            replace(CONFIG, residual_experts=True),
            Plan(tensor=TensorAxis(1, 2)),
            "'model.layers.0.mlp.coefficient' has no partner to be paired with, and y needs pairs",
        ),
        (
            replace(CONFIG, num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, architecture="qwen3"),
            Plan(tensor=TensorAxis(2), expert_over=("x",)),
            r"plan.expert_over = \['x'\] splits experts, but Decoder has no layer of experts",
        ),
    ],
)
def test_plans_that_are_refused(config: Any, plan: Plan, message: str) -> None:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    with pytest.raises(PlanError, match=message):
        refuse(profile(build(config), lambda: (tokens,), ExampleLoss(lambda: tokens)), plan)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor": TensorAxis(2, drop_duplicates=True), "expert_over": ("x",)}, "use drop_duplicates = false"),
        ({"tensor": TensorAxis(2, sequence=True, drop_duplicates=True)}, "so there are no duplicates"),
        ({"expert_over": ("x", "x")}, "names an axis twice"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**fields)


def make_pyramid() -> Any:
    """Layers with 2 and with 8 experts, residual, with random tokens dropped in excess of a capacity."""
    return make(
        replace(
            CONFIG,
            num_experts=0,
            num_experts_per_layer=(2, 8),
            num_experts_per_tok=1,
            residual_experts=True,
            capacity=Capacity(0.75, 1, "random"),
            router_aux_loss_coef=0.5,
        )
    )


def make_dropless_pyramid() -> Any:
    return make(replace(CONFIG, num_experts=0, num_experts_per_layer=(2, 4)))


@pytest.mark.processes
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (make_dropless_pyramid, Plan(expert=4, memory=Memory("full"))),
        (make_pyramid, Plan(expert=4)),
        (make_pyramid, Plan(expert=4, shard=Shard(2, 3))),
        (make_dropless_pyramid, Plan(expert=4, tensor=TensorAxis(2, drop_duplicates=True))),
    ],
    ids=["dropless", "capacity", "shard", "duplicates"],
)
def test_layers_have_experts_on_different_numbers_of_ranks(model: Any, plan: Plan) -> None:
    more = plan.num_batch_ranks // 4
    report = verify(model, lambda index: tuple(one.repeat(more, 1) for one in batch(index)), plan, steps=2)
    report.require()
    assert {"traffic: expert:2 all_to_all", "traffic: expert%2 all_reduce"} <= {check.what for check in report.checks}


@pytest.mark.soak
@pytest.mark.processes
def test_experts_that_are_not_summed_over_their_copies_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.mesh.Mesh.equal_remainders", lambda mesh, *_: Axis("expert%2", 1, 0, None, mesh.ledger))
    report = verify(make_dropless_pyramid, batch, Plan(expert=4), steps=1)
    assert "worst gradient" in {check.what for check in report.checks if not check.passed}


def test_stages_do_not_form_different_groups_of_experts() -> None:
    with pytest.raises(PlanError, match="expert = 4 is more than the 2 experts of a layer"):
        refuse(profile(make_dropless_pyramid()), Plan(expert=4, pipe=Pipe(2)))
