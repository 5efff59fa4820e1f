"""Local ranks: answers in order, failures that name their rank, no hang and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from weft.launch import local_ranks as local
from weft.launch.local_ranks import LocalError, run_local

pytestmark = pytest.mark.processes


def children_of_this_process() -> set[str]:
    """Process ids of living and dead children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def _no_process_is_left() -> object:  # type: ignore[misc]
    before = children_of_this_process()
    yield  # type: ignore[misc]
    assert children_of_this_process() == before


def total(rank: int) -> int:
    """The sum of all ranks' numbers, through a real collective."""
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor)
    return int(tensor.item())


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_talk_to_each_other(num_ranks: int) -> None:
    assert run_local(total, num_ranks) == [num_ranks * (num_ranks + 1) // 2] * num_ranks


def test_answers_come_in_the_order_of_ranks_whoever_is_first() -> None:
    def slow_first(rank: int) -> list[int]:
        time.sleep(0.2 * (2 - rank))
        return [rank, rank * rank]

    assert run_local(slow_first, 3) == [[0, 0], [1, 1], [2, 4]]


def test_one_rank_needs_no_process_group() -> None:
    assert run_local(lambda rank: dist.is_initialized(), 1) == [False]


def test_ranks_see_what_the_parent_had_and_change_only_their_own() -> None:
    seen = {"value": 3}

    def change(rank: int) -> int:
        seen["value"] += rank
        return seen["value"]

    assert run_local(change, 3) == [3, 4, 5]
    assert seen == {"value": 3}


def test_large_answers_come_back_whole() -> None:
    assert run_local(lambda rank: "x" * 3_000_000, 2) == ["x" * 3_000_000] * 2


def test_a_failing_rank_is_named_with_its_trace_though_others_wait() -> None:
    def fail(rank: int) -> int:
        if rank == 1:
            raise ValueError("seven is not prime enough")
        return total(rank)

    with pytest.raises(LocalError, match=r"rank 1 failed: ValueError: seven is not prime enough") as caught:
        run_local(fail, 3)
    assert "in fail" in str(caught.value)


def test_a_killed_rank_is_named() -> None:
    def die(rank: int) -> int:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0

    with pytest.raises(LocalError, match="rank 2 died with status -9 and left no answer"):
        run_local(die, 3)


@contextmanager
def time_is_up_when(condition: Callable[[list[Any]], bool]) -> Iterator[None]:
    """Ranks have as long as they need to come to a state, and no longer."""
    collect = local._collect

    def wait_and_collect(children: list[Any], deadline: float, folder: Path) -> None:
        while not condition(children):
            assert time.monotonic() < deadline, "the ranks did not come to where they hang"
            time.sleep(0.01)
        collect(children, time.monotonic(), folder)

    with patch.object(local, "_collect", wait_and_collect):
        yield


def has_left(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_hang_ends_in_time_and_says_who_waited_where(tmp_path: Path) -> None:
    def hang(rank: int) -> int:
        return (wait_for_others, idle)[rank]()

    def wait_for_others() -> int:
        (tmp_path / "waits").touch()
        dist.barrier()
        return 1

    def idle() -> int:
        (tmp_path / "idle").touch()
        time.sleep(60)
        return 1

    with (
        time_is_up_when(lambda children: (tmp_path / "idle").exists() and (tmp_path / "waits").exists()),
        pytest.raises(LocalError, match=r"no answer from rank\(s\) 0, 1 of 2 after 300 s") as caught,
    ):
        run_local(hang, 2)
    first, second = str(caught.value).split("rank 1:")
    assert "in wait_for_others" in first
    assert "in idle" in second
    with (
        time_is_up_when(lambda children: all(has_left(children[rank].pid) for rank in (0, 2))),
        pytest.raises(LocalError, match=r"no answer from rank\(s\) 1 of 3 after 300 s"),
    ):
        run_local(lambda rank: idle() if rank == 1 else 0, 3)


def test_an_answer_that_is_not_json_is_named() -> None:
    with pytest.raises(LocalError, match=r"rank 0 failed: TypeError: Object of type Tensor is not JSON serializable"):
        run_local(lambda rank: torch.zeros(2), 1)


def test_exit_inside_a_rank_is_a_failure() -> None:
    def leave(rank: int) -> int:
        raise SystemExit(0)

    with pytest.raises(LocalError, match="rank 0 failed: SystemExit"):
        run_local(leave, 1)


def test_the_first_to_fail_is_named_and_not_those_that_lost_it() -> None:
    def fail(rank: int) -> int:
        if rank == 2:
            raise ValueError("the cause")
        try:
            return total(rank)
        except RuntimeError as error:
            raise KeyError("the consequence") from error

    for _ in range(10):
        with pytest.raises(LocalError, match="rank 2 failed: ValueError: the cause"):
            run_local(fail, 3)


def test_runs_follow_each_other_without_disturbing() -> None:
    for _ in range(3):
        assert run_local(total, 2) == [3, 3]


def test_a_rank_that_ends_at_once_does_not_break_those_still_connecting() -> None:
    for _ in range(5):
        assert run_local(lambda rank: rank, 8) == list(range(8))


COMPUTES = """
import torch
from weft.launch.local_ranks import run_local

linear, inputs = torch.nn.Linear(256, 256), torch.randn(64, 256)

def compute(_):
    loss = linear(inputs).sum()
    loss.backward()
    return float(loss)

assert compute(0) == compute(0)
print(len(run_local(compute, 2, timeout_seconds=30)), "ranks")
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_compute_where_this_process_has_computed(threads: int) -> None:
    """Threads that libraries of matmuls have started here are not there in a forked rank."""
    script = f"import torch\ntorch.set_num_threads({threads})\n{COMPUTES}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "2 ranks\n", done.stderr


def test_what_a_killed_rank_had_written_so_far_is_no_answer() -> None:
    child = local._Child(1, 0, 0, b'{"result": [1, ', done=True, status=-signal.SIGKILL)
    with pytest.raises(LocalError, match="rank 1 died with status -9 and left no answer"):
        local._result(child)
