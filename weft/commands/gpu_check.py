"""Checks in about a minute that this machine's GPUs, and the collectives between them, compute correct results.

A tiny decoder is trained on the GPUs under a few plans in float64, and once compiled in bf16. The results are compared
with the sequential model on the same GPU. Ranks share a GPU if there are fewer GPUs than ranks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.backends import describe_backend
from weft.models import DecoderConfig, build, initialise
from weft.plan import Context, Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.proof.prove import Trial, plan_to_prove, prove_plan
from weft.step.batch import Batch
from weft.step.objective import CROSS_ENTROPY

NUM_RANKS = 2
SEQUENCE, NUM_SAMPLES = 16, 4
SECONDS = 120.0
CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
PLANS = {
    "data": Plan(data=NUM_RANKS, micro_batch=1),
    "shard": Plan(shard=Shard(NUM_RANKS, 3), micro_batch=1),
    "x": Plan(tensor=TensorPlan(x=NUM_RANKS), micro_batch=2),
    "context": Plan(context=Context(NUM_RANKS), micro_batch=2),
    "pipe": Plan(pipe=Pipe(NUM_RANKS), micro_batch=1),
}


def _model() -> nn.Module:
    model = build(CONFIG)
    initialise(model, 0)
    return model


def _batch(step: int) -> Batch:
    tokens: Tensor = torch.randint(64, (NUM_SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def check_gpu() -> list[dict[str, Any]]:
    """Returns a row for each check: its name, whether its results are right, its seconds, and what was found."""
    rows = []
    for axis, plan in PLANS.items():
        trial = Trial(plan_to_prove(plan, "fp64"), device="cuda")
        rows.append(_row(f"{axis} = {NUM_RANKS}, float64", trial))
    compiled = Plan(memory=Memory(recompute="selective"), micro_batch=2)
    rows.append(_row("one rank, bf16, compiled", Trial(plan_to_prove(compiled, "bf16"), device="cuda", compiles=True)))
    return rows


def describe() -> str:
    """Returns a description of the backend of the check's collectives. Initialises CUDA."""
    return describe_backend("cuda", NUM_RANKS)


def _row(what: str, trial: Trial) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        report = prove_plan(_model, _batch, CROSS_ENTROPY, trial, SECONDS)
        failure = report.first_failure
        worst = next(check for check in report.checks if check.what == "worst gradient")
        found = f"gradients differ by {worst.found}"
        if failure is not None:
            found = f"{failure.what}: expected {failure.expected}, found {failure.found} ({failure.where})"
        is_right = report.passed
    except Exception as error:  # any error of a driver or a library is a finding
        is_right, found = False, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return {"what": what, "is_right": is_right, "seconds": time.perf_counter() - begin, "found": found}
