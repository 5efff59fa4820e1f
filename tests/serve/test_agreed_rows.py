"""Ranks on CPUs agree up to how many rows they multiply with codes, so that all round alike."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from parallel_serving_for_tests import LIMIT_SECONDS, part_of

from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Context, Pipe, Plan, Tensor
from weft.serve.model.model_part import EngineOptions, ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.weights import packed_experts, packed_linear
from weft.serve.weights.cpu_products import HalfWeight
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear

pytestmark = pytest.mark.processes
MEASURED = ((4, 16), (64, 1), (16, 0))  # rows that ranks 0 and 1 find
PLANS = (Plan(expert=2), Plan(context=Context(2)), Plan(tensor=Tensor(2)), Plan(data=2), Plan(pipe=Pipe(2)))


def rows_on_rank(mesh: Mesh, measured: int) -> list[int]:
    """The most rows of each weight's product with codes, on a rank that measured so many."""
    ranks = ServingRanks(mesh)
    model = part_of("mixtral", ranks.place, "int4").float()
    arranged = HalfWeight(measured, None) if measured else None  # nothing is multiplied
    patches = [patch.object(module, "arranged", lambda *given: arranged) for module in (packed_linear, packed_experts)]
    with patches[0], patches[1]:
        part = ModelPart(model, EngineOptions(block_size=4, num_blocks=8), ranks)
        first = _max_rows(part)
        part.take_weights(model)  # arranges weights again
    assert _max_rows(part) == first
    return first


def _max_rows(part: ModelPart) -> list[int]:
    linears = [linear.layer for block in part.paged.blocks for linear in block.linears]
    stacks = [one for one in part.paged.model.modules() if isinstance(one, PackedStack)]
    assert len(stacks) == 2 * len(part.paged.blocks)
    return [one.max_rows for one in (*linears, *stacks) if isinstance(one, PackedLinear | PackedStack)]


def test_ranks_with_the_same_blocks_use_codes_for_as_many_rows() -> None:
    def rank(index: int) -> list[list[int]]:
        torch.set_num_threads(1)
        return [rows_on_rank(Mesh(plan), rows[index]) for plan in PLANS for rows in MEASURED]

    found = iter(zip(*run_local(rank, 2, LIMIT_SECONDS), strict=True))
    for plan in PLANS:
        for measured in MEASURED:
            used = [set(one) for one in next(found)]
            is_split = plan.pipe.degree > 1  # stages hold other blocks, and need not agree
            assert used == ([{one} for one in measured] if is_split else [{min(measured)}] * 2), plan.describe_axes()
