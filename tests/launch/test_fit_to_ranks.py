"""Another plan for another number of ranks: which degrees change, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runs_for_tests import DEEP, make_run, write_run_file

from weft.commands.run_planning import _nearest, fit_to_ranks
from weft.errors import PlanError
from weft.launch.environment import RankInfo, is_elastic
from weft.plan import Pipe, Plan

pytestmark = pytest.mark.processes


def place(num_ranks: int) -> RankInfo:
    return RankInfo(0, num_ranks, 0, num_ranks, 1, "torchrun")


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "axes", "accumulation"),
    [
        (["plan.data=2", "plan.shard=2"], 4, "data 2 × shard 2 (stage 3)", 1),  # as it was
        (["plan.data=2", "plan.shard=2"], 2, "shard 2 (stage 3)", 2),  # memory stays, so does the micro-batch
        (["plan.data=2", "plan.shard=2"], 8, "data 4 × shard 2 (stage 3)", 1),
        (["plan.data=2", "plan.shard=2"], 1, "1 process", 4),
        (["plan.shard=4"], 2, "shard 2 (stage 3)", 2),
        (["plan.pipe=2", "plan.data=2", "plan.micro_batch=2"], 2, "pipe 2 (1f1b)", 8),
        (["plan.pipe=4", "plan.micro_batch=2"], 2, "pipe 2 (1f1b)", 8),
        (["plan.tensor.x=2", "plan.data=2"], 2, "x 2", 2),
    ],
)
def test_the_nearest_plan(tmp_path: Path, overrides: list[str], num_ranks: int, axes: str, accumulation: int) -> None:
    run = make_run(write_run_file(tmp_path, DEEP), "run", *overrides)
    fitted = fit_to_ranks(run, place(num_ranks))
    assert fitted.plan.describe_axes() == axes
    assert fitted.plan.num_ranks == num_ranks
    assert fitted.split.batch == run.split.batch
    if num_ranks <= run.plan.num_ranks:
        assert (fitted.split.micro_batch, fitted.split.accumulation) == (run.split.micro_batch, accumulation)


def test_ranks_that_no_plan_suits_are_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    with pytest.raises(PlanError, match=r"needs 4 ranks \(data 4\), 3 are there, and no plan near it suits them"):
        fit_to_ranks(make_run(run_file, "run", "plan.data=4"), place(3))
    with pytest.raises(PlanError, match="the degrees of the model do not divide them"):
        fit_to_ranks(make_run(run_file, "run", "plan.tensor.x=2"), place(3))


def test_every_near_plan_has_the_ranks_and_comes_once() -> None:
    plan = Plan(data=2, pipe=Pipe(degree=2), micro_batch=1)
    for num_ranks in range(1, 17):
        plans = [replace(near, micro_batch=None) for near in _nearest(plan, num_ranks)]
        assert len(plans) == len(set(plans))
        assert {near.num_ranks for near in plans} == {num_ranks}
    assert next(_nearest(plan, 8)).degrees == Plan(data=4, pipe=Pipe(degree=2)).degrees


def test_only_a_torchrun_that_may_restart_is_elastic() -> None:
    assert is_elastic({"TORCHELASTIC_MAX_RESTARTS": "3"}, place(2))
    assert not is_elastic({"TORCHELASTIC_MAX_RESTARTS": "0"}, place(2))
    assert not is_elastic({"TORCHELASTIC_MAX_RESTARTS": "3"}, RankInfo(0, 2, 0, 2, 1, "slurm"))
