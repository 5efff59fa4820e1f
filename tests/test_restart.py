"""Kill -9 of a rank in the middle of a step: the job goes on by itself and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from restarts_for_tests import (
    NUM_STEPS,
    OVERRIDES,
    RESTARTED_LAYOUTS,
    Kill,
    assert_same_end,
    table,
    train_under_agent,
)
from runs_for_tests import DEEP, losses, make_run, write_run_file

SAMPLE = {"data 2 x shard 2": [(0, 1), (2, 5), (3, 12)], "pipe 4": [(1, 2), (0, 7)]}


def kill_all(layout: str, kills: list[tuple[int, int]], folder: Path, capfd: pytest.CaptureFixture[str]) -> list[float]:
    """One run for each kill, each compared with the run that nobody disturbed; the times to recover."""
    overrides = [*RESTARTED_LAYOUTS[layout], *OVERRIDES]
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
        assert said.count("weft:") == 1
        assert losses(run.folder) == losses(whole.folder)
        assert_same_end(run, whole)
    return seconds


@pytest.mark.parametrize("layout", RESTARTED_LAYOUTS)
def test_a_killed_rank_changes_nothing(layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kill_all(layout, SAMPLE[layout], tmp_path, capfd)


@pytest.mark.soak
@pytest.mark.parametrize("layout", RESTARTED_LAYOUTS)
def test_every_rank_at_every_step(layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kills = [(rank, step) for rank in range(4) for step in range(1, NUM_STEPS + 1)]
    seconds = kill_all(layout, kills, tmp_path, capfd)
    with capfd.disabled():
        print("\n" + table({layout: seconds}))
