"""Kill -9 of a rank in the middle of a step: the job goes on by itself and ends as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from restarts_for_tests import (
    NUM_STEPS,
    OVERRIDES,
    RESTARTED_LAYOUTS,
    Kill,
    assert_same_end,
    table,
    train_under_agent,
)
from runs_for_tests import DEEP, events, losses, make_run, train_on_ranks, write_run_file
from sampled_for_tests import some_soak

from weft.checkpoint import load, steps
from weft.checkpoint.manifest import MANIFEST, seal
from weft.launch.fork_server import ForkServer
from weft.launch.local_ranks import LocalError

pytestmark = pytest.mark.processes

SAMPLE = {"data 2 x shard 2": [(2, 5)], "pipe 4": [(1, 2), (0, 7)], "data 4, 2 per device": [(3, 5), (0, 4)]}


def kill_all(layout: str, kills: list[tuple[int, int]], folder: Path, capfd: pytest.CaptureFixture[str]) -> list[float]:
    """One run for each kill, each compared with the run that nobody disturbed; the times to recover."""
    overrides = [*RESTARTED_LAYOUTS[layout], *OVERRIDES, "restart.hang_seconds=600"]
    run_file = write_run_file(folder, DEEP)
    whole = make_run(run_file, "whole", *overrides)
    train_under_agent(run_file, whole, overrides, None)
    seconds = []
    for rank, step in kills:
        run = make_run(run_file, f"kill-{rank}-{step}", *overrides)
        recovered = train_under_agent(run_file, run, overrides, Kill.drawn(rank, step))
        assert recovered is not None
        seconds.append(recovered)
        said = capfd.readouterr().err
        assert f"weft: rank {rank} was killed by SIGKILL" in said
        assert f"in step {step}. All ranks start again (restart 1 of at most 1" in said or step == 1, said
        assert said.count("weft: rank") == 1 + said.count("is slow")  # which ranks may be, on a busy machine
        assert losses(run.folder) == losses(whole.folder)
        assert_same_end(run, whole)
    return seconds


@pytest.mark.parametrize("layout", some_soak(RESTARTED_LAYOUTS, "data 2 x shard 2"))
def test_a_killed_rank_changes_nothing(layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kill_all(layout, SAMPLE[layout], tmp_path, capfd)


def test_a_stop_during_a_restart_saves_what_only_memory_holds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = ["plan.data=2", *OVERRIDES, "train.steps=5000", "checkpoint.every=5000"]
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "stopped", *overrides)
    starts, start = [0], ForkServer.start

    def start_and_stop(self: ForkServer, *arguments: Any) -> list[int]:
        starts[0] += 1
        if starts[0] == 2:
            signal.raise_signal(signal.SIGTERM)
        return start(self, *arguments)

    with patch.object(ForkServer, "start", start_and_stop):
        train_under_agent(run_file, run, overrides, Kill(1, 4, 5))
    (saved,) = steps(run.folder / "checkpoints")
    assert 3 < saved < 5000
    assert re.search(r"weft: SIGTERM: step \d is only in memory, so the ranks load it", capfd.readouterr().err)
    assert len(losses(run.folder)) == saved  # each step once


HANGS = {
    # rank 2 never comes to the first collective of its step, in which the others wait
    "loading": (
        "data 2 x shard 2",
        Kill(2, 6, 0, "hang in loading"),
        r"rank 2 did not enter all_reduce over tokens \(#\d+\); last seen in loading data",
    ),
    "collective": (
        "data 2 x shard 2",
        Kill(1, 6, 9, "hang"),
        r"rank 1 did not enter CALL; last seen in backward of block model\.layers\.2",
    ),
    # rank 1 hangs before it sends what rank 2 waits to receive
    "receive": (
        "pipe 4",
        Kill(1, 6, 3, "hang"),
        r"rank 1 \(pipe stage 1\) did not send the (for|back)ward of micro-batch \d to stage [02]; "
        r"last seen in (for|back)ward of block model\.layers\.1",
    ),
}


@pytest.mark.parametrize("where", some_soak(HANGS))
def test_a_rank_that_hangs_is_named_and_changes_nothing(
    where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout, hang, words = HANGS[where]
    overrides = [*RESTARTED_LAYOUTS[layout], *OVERRIDES]
    run_file = write_run_file(tmp_path, DEEP)
    whole, run = (make_run(run_file, name, *overrides) for name in ("whole", "hang"))
    train_on_ranks(whole)
    train_under_agent(run_file, run, overrides, hang)
    if "CALL" in words:
        words = words.replace("CALL", re.escape((tmp_path / "hang.times" / "call").read_text()))
    said = capfd.readouterr().err
    assert re.search(rf"weft: no sign of life for \d+ s: {words} of step 6 .*, in step 6\. All ranks start", said), said
    stacks = next(run.folder.glob("hang-*.txt")).read_text()
    assert stacks.count("_die") == 1
    assert stacks.count("in train\n") >= 4
    assert_same_end(run, whole)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By a day, forward or back, whenever anybody reads it: no deadline passes, and no rank is named."""
    overrides = ["plan.data=2", *OVERRIDES, "restart.hang_seconds=3600"]
    run_file = write_run_file(tmp_path, DEEP)
    whole, run = (make_run(run_file, name, *overrides) for name in ("whole", "jumps"))
    train_on_ranks(whole)
    days = itertools.cycle([86400, -86400])
    with patch.object(time, "time", lambda: time.clock_gettime(time.CLOCK_REALTIME) + next(days)):
        train_under_agent(run_file, run, overrides, None)
    assert "no sign of life" not in capfd.readouterr().err
    written = [event["time"] for event in events(run.folder)]
    assert max(written) - min(written) > 86400  # the ranks did see it jump
    assert losses(run.folder) == losses(whole.folder)
    assert_same_end(run, whole)


@pytest.mark.soak
@pytest.mark.parametrize("layout", RESTARTED_LAYOUTS)
def test_every_rank_at_every_step(layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kills = [(rank, step) for rank in range(4) for step in range(1, NUM_STEPS + 1)]
    seconds = kill_all(layout, kills, tmp_path, capfd)
    with capfd.disabled():
        print("\n" + table({layout: seconds}))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
def test_a_damaged_checkpoint_is_passed_over(file: str, tmp_path: Path) -> None:
    """Rank 1's pieces are read by rank 1 alone: both ranks must go back."""
    run_file = write_run_file(tmp_path)
    run, whole = make_run(run_file, "damaged", "plan.shard=2"), make_run(run_file, "whole", "plan.shard=2")
    train_on_ranks(make_run(run_file, "damaged", "plan.shard=2", "train.steps=9", "train.schedule=constant"))
    flip_a_bit(run.folder / "checkpoints" / "step-00000009" / file)
    again = make_run(run_file, "damaged", "plan.shard=2", "train.schedule=constant")
    train_on_ranks(again)
    train_on_ranks(make_run(run_file, "whole", "plan.shard=2", "train.schedule=constant"))
    assert losses(run.folder) == losses(whole.folder)
    assert (run.folder / "checkpoints" / "damaged-step-00000009").is_dir()
    assert steps(run.folder / "checkpoints") == [3, 6, 9, 12, 15]  # and a whole one in its place


def test_a_run_of_damaged_checkpoints_does_not_start_anew(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "damaged", "train.steps=3")
    train_on_ranks(run)
    flip_a_bit(run.folder / "checkpoints" / "step-00000003" / "rank-00000.safetensors")
    metrics = (run.folder / "metrics.jsonl").read_bytes()
    for _ in range(2):  # the second start finds what the first has found
        with pytest.raises(LocalError, match=r"no checkpoint in .* is whole; the last that was tried: .*SHA-256"):
            train_on_ranks(run)
    assert [path.name for path in (run.folder / "checkpoints").glob("*step-*")] == ["step-00000003"]
    assert (run.folder / "metrics.jsonl").read_bytes() == metrics


def test_a_checkpoint_of_a_newer_format_is_refused_and_stays_where_it_is(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "newer", "train.steps=6")
    train_on_ranks(run)
    path = run.folder / "checkpoints" / "step-00000006" / MANIFEST
    content = json.loads(path.read_bytes())
    del content["sha256"]
    path.write_bytes(seal(json.dumps({**content, "format": "weft-checkpoint-2", "more": 1}).encode()))
    with pytest.raises(LocalError, match=r"format 'weft-checkpoint-2' is unknown.*reads 'weft-checkpoint-1'"):
        train_on_ranks(make_run(tmp_path / "tiny.toml", "newer", "train.steps=9"))
    assert sorted(path.name for path in path.parent.parent.glob("*step-*")) == ["step-00000003", "step-00000006"]


def test_a_rank_short_of_memory_puts_no_checkpoint_aside(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "short", "plan.shard=2", "train.steps=3")
    train_on_ranks(run)
    load_file = load.safe_open

    def short(path: Path, framework: str) -> Any:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError(f"unable to mmap 320 bytes from file <{path}>: Cannot allocate memory (12)")
        return load_file(path, framework=framework)

    with (
        patch.object(load, "safe_open", short),
        pytest.raises(LocalError, match=r"cannot be read on this host now: .*Cannot allocate memory"),
    ):
        train_on_ranks(run)
    assert [path.name for path in (run.folder / "checkpoints").glob("*step-*")] == ["step-00000003"]


def test_a_checkpoint_of_something_else_is_not_passed_over(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    train_on_ranks(make_run(run_file, "other", "train.steps=3"))
    with pytest.raises(LocalError, match=r"was trained with 16 sequences a step and seed 0, now 16 and 1"):
        train_on_ranks(make_run(run_file, "other", "train.seed=1"))
    assert steps(tmp_path / "other" / "checkpoints") == [3]
