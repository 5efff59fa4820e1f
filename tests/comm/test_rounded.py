"""Numbers that are rounded for links: errors within bounds, bytes as predicted, equal results on all ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_for_tests import make_run, train_on_ranks, write_run_file
from torch import Tensor

from weft.cluster.communication import Communication
from weft.cluster.wire_formats import BLOCK, error_bound, message_bytes
from weft.comm import Axis, Ledger, Traffic, rounded
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import refuse
from weft.plan import Plan, Shard
from weft.planner.predict import predict, run_cluster
from weft.proof.prove import inexact_options, plan_to_prove
from weft.recording.rank_file import read_recording
from weft.step.examples import micro_batch_profile

WIRES: list[Any] = ["bf16", "int8", "fp8"]


def numbers(size: int, seed: int) -> Tensor:
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10.0 ** torch.randint(-4, 3, (size,), generator=generator)


def bounds_of(values: Tensor, wire: Any) -> Tensor:
    """The bound of the error of each element."""
    largest = torch.cat([block.abs().amax().expand(len(block)) for block in values.split(BLOCK)])
    pairs = zip(values.double().tolist(), largest.double().tolist(), strict=True)
    return torch.tensor([error_bound(value, most, wire) for value, most in pairs], dtype=torch.float64)


@pytest.mark.parametrize("wire", WIRES)
def test_one_rounding_stays_within_its_bound(wire: Any) -> None:
    nearest = 0.0
    for size in (1, 255, 256, 257, 1000):
        values = numbers(size, size)
        sent = rounded.encode(values.view(1, -1), wire)
        assert sent.dtype == torch.uint8
        assert sent.numel() == message_bytes(size, wire)
        errors = (rounded.decode(sent, size, wire).view(-1).double() - values.double()).abs()
        bounds = bounds_of(values, wire)
        assert bool((errors <= bounds).all())
        nearest = max(nearest, float((errors / bounds).max()))
    assert nearest > 0.5  # the bound is not far above what happens: half of it would not hold
    values = torch.tensor([[0.0, -0.0, 3.0, -3.0]])
    found = rounded.decode(rounded.encode(values, wire), 4, wire)
    assert found.signbit().tolist() == [[False, True, False, True]]
    assert found[0, 2] == -found[0, 3] == pytest.approx(3.0, rel=1 / 16)
    for bad in (float("nan"), float("inf")):
        broken = rounded.decode(rounded.encode(torch.tensor([[1.0, bad]]), wire), 2, wire)
        assert not broken.isfinite().all()


@pytest.mark.processes
def test_collectives_stay_within_their_bounds_are_counted_and_equal_on_all_ranks() -> None:
    size, degree = 300, 3
    given = [numbers(size * degree, 7 + rank) for rank in range(degree)]
    parts = [one.view(degree, size) for one in given]

    def rank(index: int) -> list[Any]:
        axis, results = Mesh(Plan(data=degree))["data"], []
        for wire in WIRES:
            axis.ledger.clear()
            whole, part, total = torch.zeros(size * degree), torch.zeros(size), given[index].clone()
            rounded.all_gather(whole, given[index][:size], axis, wire).wait()
            rounded.reduce_scatter(part, given[index].clone(), axis, wire).wait()
            rounded.all_reduce(total, axis, wire).wait()
            message = degree * message_bytes(size, wire)
            counted = {key: (value.calls, value.num_bytes) for key, value in axis.ledger.entries().items()}
            predicted = {("data", "all_gather"): (2, 2 * message), ("data", "all_to_all"): (2, 2 * message)}
            gather_bound = torch.cat([bounds_of(one[:size], wire) for one in given])
            sums = torch.stack([one.double() for one in given]).sum(0)
            scatter_bound = sum(torch.cat([bounds_of(row, wire) for row in one]) for one in parts)
            small = 1e-6 * torch.stack(given).abs().double().sum(0)  # sums in fp32
            own = slice(size * index, size * (index + 1))
            twice = torch.cat([bounds_of(row, wire) for row in (sums.abs() + scatter_bound).view(degree, size)])
            errors = [
                ((whole - torch.cat([one[:size] for one in given])).abs() - gather_bound).max(),
                ((part - sums[own]).abs() - (scatter_bound + small)[own]).max(),
                ((total - sums).abs() - scatter_bound - small - twice).max(),
            ]
            results.append([counted == predicted, [float(one) <= 0 for one in errors], whole.tolist(), total.tolist()])
        return results

    found = run_local(rank, degree, 120.0)
    for number, _ in enumerate(WIRES):
        answers = [one[number] for one in found]
        assert [answer[:2] for answer in answers] == [[True, [True] * 3]] * degree
        assert all(answer[2:] == answers[0][2:] for answer in answers)


@pytest.mark.processes
def test_a_run_sends_what_was_predicted_and_learns(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    given = ["plan.data=2", "plan.shard=2", "plan.exact=false", "train.steps=3", "train.profile=2:3"]
    exact = make_run(run_file, "exact", *given)
    rounding = 'plan.communication={gather="fp8", scatter="int8", reduce="bf16"}'
    run = make_run(run_file, "run", *given, rounding)
    losses = [train_on_ranks(one)["loss"] for one in (exact, run)]
    assert losses[0] != losses[1]  # it is rounded
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    counted = Counter[tuple[str, str]]()
    for call in read_recording(run.folder)[0].calls:
        counted[call.axis, call.operation] += call.num_bytes
    predicted = predict(run, run_cluster(run)).traffic
    for key in (("shard", "all_gather"), ("shard", "all_to_all"), ("data", "all_to_all"), ("data", "all_gather")):
        assert counted[key] == predicted[key].num_bytes > 0
    assert ("shard", "reduce_scatter") not in counted
    before = predict(exact, run_cluster(exact)).traffic
    assert 3.5 < before["shard", "reduce_scatter"].num_bytes / predicted["shard", "all_to_all"].num_bytes < 4


def test_refusals_and_proofs(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"rounds numbers for the link, and plan.exact = true; set plan.exact = false"):
        Plan(data=2, communication=Communication(reduce="bf16"))
    profile = micro_batch_profile(make_run(write_run_file(tmp_path), "run"))
    for plan, words in (
        (Plan(shard=Shard(2, 2), exact=False, communication=Communication(gather="int8")), "degree 2 and stage 2"),
        (Plan(data=2, exact=False, communication=Communication(scatter="int8")), "plan.shard = 1; leave it out"),
        (
            Plan(shard=Shard(2), exact=False, communication=Communication(reduce="fp8")),
            "plan.data = 1; leave it out",
        ),
    ):
        with pytest.raises(PlanError, match=words):
            refuse(profile, plan)
    plan = Plan(data=2, exact=False, communication=Communication(reduce="fp8"))
    assert plan_to_prove(plan, "fp64").communication.rounded == {}
    assert inexact_options(plan) == ("plan.communication.reduce = 'fp8': the proof is of exact updates in float64",)


def test_an_axis_of_one_rank_rounds_nothing() -> None:
    axis, values = Axis("data", 1, 0, None, Ledger()), numbers(10, 0)
    total = values.clone()
    rounded.all_reduce(total, axis, "int8").wait()
    assert torch.equal(total, values)
    assert axis.ledger.entries() == dict[Any, Traffic]()
