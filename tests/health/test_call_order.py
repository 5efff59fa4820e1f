"""Ranks that make different collectives are found by the order of their calls, and named with their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.errors import LostRankError, PlanError
from weft.health.call_order import NUM_KEPT, CallOrder, find_difference
from weft.health.rank_status import FOLDER_VARIABLE, record_failure
from weft.launch.agent import _FailedAttempt

pytestmark = pytest.mark.processes


def test_the_first_difference_within_a_group_is_described(tmp_path: Path) -> None:
    ranks = [CallOrder(tmp_path, rank) for rank in range(4)]
    for rank, order in enumerate(ranks):
        pair = [0, 1] if rank < 2 else [2, 3]
        order.add(pair, "shard", "all_gather", 64, "forward of block 1")
        order.add([0, 1, 2, 3], "losses", "all_reduce", 8, f"stage {rank}")  # stages are in different places
    assert find_difference(tmp_path, 4) is None
    ranks[2].add([2, 3], "shard", "all_gather", 64, "forward of block 2")
    assert find_difference(tmp_path, 4) is None  # rank 3 may come to it yet
    ranks[3].add([2, 3], "shard", "all_gather", 64, "forward of block 3")
    found = find_difference(tmp_path, 4)
    assert found is not None
    assert "rank 2 is in the forward of block 2 where rank 3 is in the forward of block 3 (collective 2" in found


def test_a_flight_record_keeps_the_last_calls_and_names_a_difference_on_both_sides(tmp_path: Path) -> None:
    """Also when one rank is so far ahead that the other's last calls are among its first kept ones."""
    one, other = (CallOrder(tmp_path, rank, num_kept=8) for rank in range(2))
    for number in range(1, 31):
        one.add([0, 1], "shard", "all_gather", 8 * number, "forward of block 1")
        if number <= 25:
            block = "forward of block 2" if number == 25 else "forward of block 1"
            other.add([0, 1], "shard", "all_gather", 8 * number, block)
            assert number == 25 or find_difference(tmp_path, 2) is None
    found = find_difference(tmp_path, 2)
    assert found is not None
    assert "rank 0 is in the forward of block 1 where rank 1 is in the forward of block 2 (collective 25 among" in found
    assert (tmp_path / "calls-0").stat().st_size == 8 * 256


def test_the_agent_says_in_which_call_ranks_differ(tmp_path: Path) -> None:
    """After an error that a rank lost another one, and after a hang; an error of the run file explains itself."""
    for rank, operation in enumerate(("all_gather", "reduce_scatter")):
        CallOrder(tmp_path, rank, NUM_KEPT).add([0, 1], "shard", operation, 64, f"backward of block {rank}")
    named = "rank 0 is in the backward of block 0 where rank 1 is in the backward of block 1"
    hung = _FailedAttempt.of(tmp_path, {}, 2, 0, "no sign of life for 9 s", False)
    assert named in hung.final_message(None)
    record_failure({FOLDER_VARIABLE: str(tmp_path)}, 1, LostRankError("lost the connection to rank 0"))
    lost = _FailedAttempt.of(tmp_path, {1: 1}, 2, 0, None, False)
    assert named in lost.final_message(None)
    record_failure({FOLDER_VARIABLE: str(tmp_path)}, 1, PlanError("plan.data = 0"))
    refused = _FailedAttempt.of(tmp_path, {1: 1}, 2, 0, None, False)
    assert named not in refused.final_message(None)


class Choosing(nn.Module):
    """In training, each rank leaves out a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        left_out = 1 + dist.get_rank() if self.training and dist.is_initialized() else -1
        for index, layer in enumerate(self.layers):
            inputs = inputs if index == left_out else layer(inputs).relu()
        out: Tensor = self.head(inputs)
        return out


def vectors(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step)), torch.arange(4) % 3


def test_ranks_that_call_different_blocks_are_named() -> None:
    words = r"rank 0 is in the forward of block layers\.\d where rank 1 is in the forward of block layers\.\d"
    with pytest.raises(PlanError, match=words):
        weft.verify(Choosing, vectors, weft.Plan(shard=weft.Shard(2, 3)), timeout_seconds=60)
