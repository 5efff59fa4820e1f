"""Predicted peak memory of LSTM and GRU models against tensors that were really alive, and the search's memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from memory_for_tests import peak_bytes, random_batch, under_plan

from weft.cluster.hardware import local_cluster
from weft.plan import Memory, Pipe, Plan, Shard
from weft.planner.closed_form_memory import RESERVE_BYTES, SLACK
from weft.planner.model import planned_model
from weft.planner.predict import predict
from weft.run_file import Run, load_run

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "lstm.toml"
SEQUENCE, LAW = 32, 0.05
PLANS = {
    "data 2": Plan(data=2, micro_batch=8),
    "data 2, full": Plan(data=2, micro_batch=8, memory=Memory("full")),
    "shard 2 stage 3": Plan(shard=Shard(2, 3), micro_batch=4),
    "shard 2 stage 2": Plan(shard=Shard(2, 2), micro_batch=8),
    "pipe 2": Plan(pipe=Pipe(2), micro_batch=4),
    "shard 2 stage 3, full": Plan(shard=Shard(2, 3), micro_batch=8, memory=Memory("full")),
    "one process, bf16": Plan(micro_batch=8, precision="bf16"),
}
CASES = [(kind, name) for name in PLANS for kind in ("lstm", "gru")]


def make_run(kind: str, name: str) -> Run:
    sizes = [f"model.architecture={kind}", "model.hidden_size=48", "model.num_hidden_layers=3"]
    run, plan = load_run(EXAMPLE, [*sizes, f"data.sequence={SEQUENCE}"]), PLANS[name]
    return under_plan(run, plan)


@cache
def measured_bytes(kind: str, name: str) -> int:
    return peak_bytes(make_run(kind, name), random_batch)


def predicted_bytes(kind: str, name: str) -> int:
    run = make_run(kind, name)
    return predict(run, local_cluster(run.plan.num_ranks, on_cpu=True)).cost.memory_bytes


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.sampled(9)
def test_predicted_peak_is_what_tensors_take(kind: str, name: str) -> None:
    assert predicted_bytes(kind, name) == pytest.approx(measured_bytes(kind, name), rel=LAW)


def test_recompute_saves_what_is_predicted() -> None:
    """The control: the law can tell two plans apart."""
    names = ("data 2", "data 2, full")
    (before, after), (held, less) = ([of("lstm", name) for name in names] for of in (predicted_bytes, measured_bytes))
    assert before - after == pytest.approx(held - less, rel=LAW)
    assert before != pytest.approx(less, rel=4 * LAW)


@pytest.mark.parametrize("name", ["data 2", "data 2, full", "shard 2 stage 3"])
def test_the_search_has_the_memory_of_the_prediction(name: str) -> None:
    run = make_run("lstm", name)
    model = planned_model(run.model, SEQUENCE, local_cluster(2, on_cpu=True), precision="fp32")  # type: ignore[arg-type]
    found = model.held(run.plan, run.split.accumulation).total_bytes
    assert (found - RESERVE_BYTES) / SLACK == pytest.approx(predicted_bytes("lstm", name), rel=LAW)
