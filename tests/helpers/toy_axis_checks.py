"""What a copy of weft with the axis `toy` does. `test_toy_axis.py` runs this file in the copy, with an empty folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from reshard_for_tests import load_under, save_under
from runs_for_tests import losses, make_run, train_on_ranks, write_run_file
from torch import Tensor

import weft
from weft.cluster.hardware import load
from weft.commands.run_reference import reference
from weft.errors import PlanError
from weft.models import GPT2Config, build
from weft.parallel import toy  # type: ignore[attr-defined]  # it is only in the copy
from weft.parallel.apply import cost, refuse
from weft.plan import Memory, Pipe, Plan, Shard, split_batch
from weft.planner.model import planned_model
from weft.planner.question import Question, parse_constraints
from weft.planner.search import Model, search
from weft.profiling import profile
from weft.profiling.software import Software
from weft.proof.prove import ProofReport, verify
from weft.schema import convert, to_table

SEQUENCE = 32
WIDTH, LAYERS = 16, 2
CONFIG = GPT2Config(vocab_size=64, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=LAYERS, n_head=2)
SPLIT = WIDTH * (3 + 4) * WIDTH  # elements of a block's weights that are split: q|k|v and the MLP's first
LAYOUTS = {
    "1 process": [],
    "2 toy x 2 shard-3": ["plan.toy=2", "plan.shard=2"],
    "2 x": ["plan.tensor.x=2"],
}


def toy_plan(**fields: Any) -> Plan:
    return Plan(**{"toy": 2, **fields})


def planned() -> Model:
    return planned_model(CONFIG, SEQUENCE, load("h100:1x4"), Software())


def check_plan() -> None:
    plan = toy_plan(shard=Shard(2))
    assert (plan.num_ranks, plan.inner("toy"), plan.num_batch_ranks) == (4, 1, 2)
    assert plan.describe_axes() == "shard 2 (stage 3) × toy 2"
    assert convert(to_table(plan), Plan, "plan") == plan


def check_reference() -> None:
    assert "| `toy` | an integer | `1` | ranks that share the rows of some weights |\n" in reference()


def check_refuse_and_cost() -> None:
    found = profile(build(CONFIG), lambda: (torch.zeros(2, SEQUENCE, dtype=torch.long),), dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="toy = 4; use at most 2"):
        refuse(found, toy_plan(toy=4))
    with pytest.raises(PlanError, match="toy = 2 splits rows of weights that the tensor axes split, too"):
        refuse(found, toy_plan(tensor=2))
    plan = toy_plan(micro_batch=2, precision="bf16")
    split = split_batch(plan, 4, 1)
    own = cost(found, plan, split)
    assert own.traffic["toy", "all_gather"].num_bytes == 2 * LAYERS * SPLIT * 2  # micro-batches, blocks, bytes of bf16
    alone = cost(found, replace(plan, toy=1), split).state_bytes  # type: ignore[call-arg]
    assert alone["optimizer"] - own.state_bytes["optimizer"] == 2 * 4 * LAYERS * SPLIT // 2  # two moments in fp32


def check_search() -> None:
    model, question = planned(), Question(4, SEQUENCE, constraints=parse_constraints(["toy=2"]))
    found = search(model, question)
    assert found.best
    assert {one.plan.degree("toy") for one in found.best} == {2}
    assert ("toy 4", "toy = 4; use at most 2") in found.refused
    first = found.best[0]
    assert first.step is not None
    assert first.step.where["toy"] > 0
    alone, without = (toy_plan(toy=degree, micro_batch=2, precision="bf16") for degree in (2, 1))
    calls = [call for part in model.steps.workload.blocks for call in model.steps.calls(part, alone, 2)]
    assert sum(call.num_bytes for call in calls) == LAYERS * SPLIT * 2  # as `cost` counts for a micro-batch
    assert model.held(alone, 1).total_bytes < model.held(without, 1).total_bytes
    free = search(model, Question(4, SEQUENCE), keep=200)
    assert {one.plan.degree("toy") for one in free.best} == {1, 2}
    assert free.best[0].plan.degree("toy") == 1  # it saves bytes that this model does not need, and takes time


def tokens(step: int) -> tuple[Tensor, ...]:
    drawn = torch.randint(0, 64, (4, SEQUENCE), generator=torch.Generator().manual_seed(step))
    return drawn, drawn.roll(-1, 1)


def proof(plan: Plan) -> ProofReport:
    return verify(lambda: build(CONFIG), tokens, plan, steps=1)


def check_proofs() -> None:
    """The split computes what the unsplit model does, and its cost is what the ledger counts."""
    recomputing = Memory(recompute="full")
    for plan in (
        toy_plan(micro_batch=2),
        toy_plan(shard=Shard(2), memory=recomputing),
        toy_plan(pipe=Pipe(2), micro_batch=2),
    ):
        report = proof(plan).require()
        assert any(check.what == "traffic: toy all_gather" for check in report.checks)


def check_mistakes_are_found() -> None:
    """The controls: rows in another order, and gradients of parameters that both ranks hold counted twice."""
    gather, cuts = toy.gather, toy._cuts

    def turned(value: Tensor, *rest: Any) -> Tensor:
        rows: Tensor = gather(value, *rest).roll(1, 0)
        return rows

    def counted_twice(*given: Any) -> Any:
        return {name: replace(cut, replicas=1) for name, cut in cuts(*given).items()}

    for name, mistake in (("gather", turned), ("_cuts", counted_twice)):
        with patch.object(toy, name, mistake):
            report = proof(toy_plan(micro_batch=2))
        assert not report.passed, name
        assert all(check.passed for check in report.checks if check.what.startswith("traffic")), name


def check_checkpoints() -> None:
    """Any layout loads what any other has saved, to the bit, and a run that changes its layout has the same curve."""
    run_file = write_run_file(Path.cwd())
    paths = [save_under(make_run(run_file, f"saved {name}", *layout)) for name, layout in LAYOUTS.items()]
    for layout in LAYOUTS.values():
        load_under(make_run(run_file, "unused", *layout), paths)
    ends = ["train.steps=6", "checkpoint.every=2"]
    curves = []
    for name, layout in LAYOUTS.items():
        run = make_run(run_file, f"whole {name}", *layout, *ends)
        assert train_on_ranks(run)["finished"]
        curves.append(losses(run.folder))
    for curve in curves:
        assert len(curve) == 6
        assert curve == pytest.approx(curves[0], rel=1e-4)


if __name__ == "__main__":
    assert Path(weft.__file__).is_relative_to(Path.cwd().parent), "this is not the copy"
    torch.set_num_threads(1)
    for check in (
        check_plan,
        check_reference,
        check_refuse_and_cost,
        check_search,
        check_proofs,
        check_mistakes_are_found,
        check_checkpoints,
    ):
        print(check.__name__, flush=True)
        check()
    sys.exit(0)
