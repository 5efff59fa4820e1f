"""A rank under mpirun: compares the collectives of MPI with what they must give, and proves plans over MPI.

mpiexec -n 2 python tests/helpers/mpi_for_tests.py
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import models_for_tests as models
import torch
from torch import nn

from weft.bench.operations import OPERATIONS
from weft.comm import all_reduce
from weft.launch.environment import detect, init_process_group, shutdown
from weft.mesh import Mesh
from weft.models import Decoder
from weft.plan import Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.proof.prove import _case, _report, plan_to_prove
from weft.proof.rank import Trial, answer_of_rank
from weft.train.agreement import texts_of_ranks

PLANS = {
    2: {"data": Plan(data=2), "shard": Plan(shard=Shard(2, 3)), "x": Plan(tensor=TensorPlan(x=2))},
    4: {"data and shard": Plan(data=2, shard=Shard(2, 3))},
}


def make_model() -> nn.Module:
    return Decoder(models.small_config(width=8, inner=12, layers=2, heads=2, keys=2))


def prove(plan: Plan) -> dict[str, Any]:
    trial = Trial(plan_to_prove(plan, "fp64"), 2, 1.0, None, "cpu", False)
    case = _case(make_model, models.token_batch, None, trial.plan)
    answer = json.dumps(answer_of_rank(case, trial))
    answers = [json.loads(text) for text in texts_of_ranks(answer, Mesh(Plan(data=plan.num_ranks))["world"])]
    report = _report(answers, trial)
    wrong = [str(check) for check in report.checks if not check.passed]
    return {"passed": report.passed, "checks": len(report.checks), "wrong": wrong}


def main() -> None:
    rank_info = detect(os.environ)
    init_process_group(rank_info, "cpu", timedelta(seconds=60))
    torch.set_num_threads(1)
    axis = Mesh(Plan(data=rank_info.num_ranks))["data"]
    for operation in OPERATIONS.values():
        operation.check(operation.buffers(4096, axis.degree, torch.device("cpu")), axis, iteration=1)
    narrow = torch.full((3,), 1.5, dtype=torch.bfloat16)
    all_reduce(narrow, axis).wait()
    proofs = {name: prove(plan) for name, plan in PLANS[rank_info.num_ranks].items()}
    backend = torch.distributed.get_backend()
    shutdown()
    if rank_info.rank == 0:
        from mpi4py import MPI

        found = {
            "backend": backend,
            "library": MPI.Get_library_version(),
            "proofs": proofs,
        }
        json.dump({**found, "narrow": narrow.tolist()}, sys.stdout)


if __name__ == "__main__":
    main()
