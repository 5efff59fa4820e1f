"""What a copy of weft with the axis `toy` does: plan, refuse, cost, search, run. `test_toy_axis.py` runs this file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import weft
from weft.cluster.hardware import load
from weft.errors import PlanError
from weft.models import GPT2Config, build
from weft.parallel.apply import cost, refuse
from weft.plan import Plan, Shard, split_batch
from weft.planner.model import planned_model
from weft.planner.question import Question, parse_constraints
from weft.planner.search import Model, search
from weft.profiling import profile
from weft.profiling.software import Software
from weft.proof.prove import verify
from weft.schema import convert, to_table

SEQUENCE = 32
CONFIG = GPT2Config(vocab_size=64, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=2)


def toy_plan(**fields: object) -> Plan:
    return Plan(**{"toy": 2, **fields})  # type: ignore[arg-type]


def planned() -> Model:
    return planned_model(CONFIG, SEQUENCE, load("h100:1x4"), Software())


def check_plan() -> None:
    plan = toy_plan(shard=Shard(2))
    assert (plan.num_ranks, plan.inner("toy"), plan.num_batch_ranks) == (4, 1, 2)
    assert plan.describe_axes() == "shard 2 (stage 3) × toy 2"
    assert convert(to_table(plan), Plan, "plan") == plan


def check_refuse_and_cost() -> None:
    found = profile(build(CONFIG), lambda: (torch.zeros(2, SEQUENCE, dtype=torch.long),), dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="toy = 4; use at most 2"):
        refuse(found, toy_plan(toy=4))
    plan = toy_plan(micro_batch=2, precision="bf16")
    traffic = cost(found, plan, split_batch(plan, 4, 1)).traffic
    blocks = 2 * 2 * (2 * SEQUENCE * 16 * 2)  # micro-batches, blocks, bytes of a result
    gradients = 4 * found.numel  # no padding: all sizes are multiples of 8
    assert traffic["toy", "all_reduce"].num_bytes == blocks + gradients


def check_search() -> None:
    model, question = planned(), Question(4, SEQUENCE, constraints=parse_constraints(["toy=2"]))
    found = search(model, question)
    assert found.best
    assert {one.plan.degree("toy") for one in found.best} == {2}
    assert ("toy 4", "toy = 4; use at most 2") in found.refused
    first = found.best[0]
    assert first.step is not None
    assert first.step.where["toy"] > 0  # the calls in blocks
    alone = toy_plan(micro_batch=2, precision="bf16")
    without = Plan(micro_batch=2, precision="bf16")
    assert model.steps.step(alone, 1).where["data"] > model.steps.step(without, 1).where["data"] == 0  # gradients
    calls = [call for part in model.steps.workload.blocks for call in model.steps.calls(part, alone, 2)]
    assert sum(call.num_bytes for call in calls) == 2 * (2 * SEQUENCE * 16 * 2)
    free = search(model, Question(4, SEQUENCE), keep=200)
    assert {one.plan.degree("toy") for one in free.best} == {1, 2}
    assert free.best[0].plan.degree("toy") == 1  # it only costs time


def tokens(step: int) -> tuple[Tensor, ...]:
    drawn = torch.randint(0, 64, (4, SEQUENCE), generator=torch.Generator().manual_seed(step))
    return drawn, drawn.roll(-1, 1)


def check_run() -> None:
    """The split computes what the unsplit model does, and its cost is what the ledger counts."""
    report = verify(lambda: build(CONFIG), tokens, toy_plan(micro_batch=2), steps=1)
    report.require()
    assert any(check.what == "traffic: toy all_reduce" for check in report.checks)


if __name__ == "__main__":
    assert Path(weft.__file__).is_relative_to(Path.cwd()), "this is not the copy"
    torch.set_num_threads(1)
    for check in (check_plan, check_refuse_and_cost, check_search, check_run):
        print(check.__name__, flush=True)
        check()
    sys.exit(0)
