"""The planner against steps of eighteen shapes that were measured on an H200 (`benchmarks/planner_h200.py`)."""

from __future__ import annotations

import json
import math
import statistics
import sys
from functools import cache
from pathlib import Path

import pytest
from sampled_for_tests import one_in

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from planner_h200 import CASES, MODELS, RESULT, Case, predict

from weft.cluster.hardware import load
from weft.models.hf import parameter_shapes
from weft.plan import Plan
from weft.planner.kernels import MEMORY_SHARE
from weft.planner.model import planned_model
from weft.planner.step import FIXED_SECONDS
from weft.profiling.software import ALONE_BYTES, SUM_BYTES

ROWS = {row["case"]: row["measured"] for row in json.loads(RESULT.read_text())["cases"]}
TIME, MEAN_TIME, MEMORY = 0.10, 0.05, 0.03


@cache
def errors(case: Case) -> tuple[float, float]:
    """(seconds, bytes): predicted over measured, less 1."""
    predicted, measured = predict(case, load("h200:1x1"), is_tiny=False), ROWS[case.label]
    return predicted["seconds"] / measured["seconds"] - 1, predicted["bytes"] / measured["bytes"] - 1


@pytest.mark.parametrize("case", one_in(11, {case.label: case for case in CASES}))
def test_a_measured_shape_is_predicted(case: Case) -> None:
    seconds, num_bytes = errors(case)
    assert abs(seconds) < TIME
    assert abs(num_bytes) < MEMORY


@pytest.mark.soak
def test_the_mean_of_all_shapes() -> None:
    assert len(ROWS) == len(CASES) >= 16
    assert statistics.mean(abs(errors(case)[0]) for case in CASES) < MEAN_TIME


def test_a_compiled_block_moves_what_its_kernels_read_and_write() -> None:
    # Of a block of Mistral 7B, in streams of 8,192 × 4,096 and of SwiGLU, 16 bits: norm 2, rotary 2 for queries and
    # keys each, sum and norm 3, SwiGLU 3, the last sum 4; backward SwiGLU 5, norms 6 and 6, rotary.
    case = next(case for case in CASES if case.label.startswith("mistral-7b 1×8192"))
    block = planned_model(MODELS[case.model], case.sequence, load("h200:1x1")).steps.workload.blocks[0]
    stream, wide, keys = (2 * 8192 * columns for columns in (4096, 14336, 1024))
    assert block.compiled is not None
    assert block.compiled.forward_kernels == 6
    assert block.compiled.forward_bytes == pytest.approx(11 * stream + 2 * keys + 3 * wide, rel=0.01)
    assert block.compiled.backward_bytes == pytest.approx(14 * stream + 5 * wide, rel=0.15)
    # Selective recompute: two norms and SwiGLU written once more; queries and keys read and turned again.
    assert block.compiled.again_bytes == pytest.approx(4 * stream + 2 * keys + wide, rel=0.02)


def test_micro_batches_add_gradients_and_tied_tables_are_updated_once() -> None:
    config = MODELS["qwen2-1.5b"]
    steps = planned_model(config, 4096, load("h200:1x1")).steps
    plan = Plan(precision="bf16", micro_batch=1)
    rate = 4.8e12 * MEMORY_SHARE
    numel = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    one, four = (steps.step(plan, count).optimizer_seconds for count in (1, 4))
    assert one - FIXED_SECONDS == pytest.approx(34 * numel / rate, rel=0.01)
    assert four - one == pytest.approx((3 * SUM_BYTES + ALONE_BYTES) * numel / rate, rel=0.01)
