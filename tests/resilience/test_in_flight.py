"""What a save in flight needs: time to reserve memory, and to come to its end when a rank fails."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from restarts_for_tests import assert_same_end
from runs_for_tests import Silent, losses, make_run, train_on_ranks, write_run_file
from waiting_for_tests import wait_until

from weft.checkpoint import Saver
from weft.health.rank_status import Status
from weft.health.watchdog import overdue_since
from weft.launch.environment import detect
from weft.launch.fork_server import ForkServer
from weft.resilience import shared_memory
from weft.resilience.memory_copies import MemoryCopies
from weft.run_file import load_run
from weft.train import loop, setup
from weft.train.local_job import start_ranks

pytestmark = pytest.mark.processes

NUM_STEPS = 12


def test_reserving_memory_for_the_first_copy_is_no_hang(tmp_path: Path) -> None:
    """To lock the pages of a large buffer takes longer than any step; later copies may not take for ever."""
    run = make_run(write_run_file(tmp_path), "run", "plan.data=2", "checkpoint.memory_every=1", "train.steps=3")
    pages: list[Status] = []

    class Page(Status):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pages.append(self)

    save = Saver.save

    def watched(self: Saver, step: int, *arguments: Any) -> None:
        seen = pages[0].page()
        assert seen is not None
        if isinstance(self, MemoryCopies):
            with open(tmp_path / "watched.txt", "a") as file:
                file.write(f"{step} {overdue_since([seen]) is not None}\n")
        save(self, step, *arguments)

    with (
        patch.object(loop, "Status", Page),
        patch.object(Saver, "save", watched),
        patch.object(setup, "folder_of", lambda *_: tmp_path / "copies"),
    ):
        train_on_ranks(run)
    found = sorted(set((tmp_path / "watched.txt").read_text().splitlines()))
    assert found == ["1 False", "2 True", "3 True"]


def as_rank(arguments: list[str]) -> None:
    """Train; at the first attempt one rank fails in step 4, while rank 1 is still writing its part of step 3."""
    spec = json.loads(arguments[0])
    place = detect(os.environ)
    assert place is not None
    raised, write_part, train_step = Path(spec["folder"]) / "raised", Saver._write_part, loop.train_step
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def late(self: Saver, *given: Any) -> Any:
        if is_first and place.rank == 1:
            wait_until(raised.exists, "the error")
            time.sleep(1.0)  # for a rank that waits for nothing to be gone
        return write_part(self, *given)

    done = [0]

    def step(*given: Any, **named: Any) -> Any:
        done[0] += 1
        if is_first and done[0] == 4 and place.rank == spec["fails"]:
            raised.touch()
            raise ValueError("a bad day")
        return train_step(*given, **named)

    with patch.object(Saver, "_write_part", late), patch.object(loop, "train_step", step):
        loop.train(load_run(Path(spec["run_file"]), spec["overrides"]), place, Silent())


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_does_not_lose_the_save_in_flight(
    fails: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write_run_file(tmp_path)
    options = ["plan.data=2", f"train.steps={NUM_STEPS}", "checkpoint.every=3", "restart.hang_seconds=600"]
    whole, run = make_run(run_file, "whole", *options), make_run(run_file, "run", *options)
    train_on_ranks(whole)
    memory = tempfile.mkdtemp(prefix="weft-test-", dir=shared_memory.SHARED_MEMORY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = {"run_file": str(run_file), "overrides": [*options, f"folder={run.folder}"], "fails": fails}
    try:
        with patch.object(shared_memory, "SHARED_MEMORY", Path(memory)), ForkServer(as_rank) as fork_server:
            assert start_ranks(fork_server, run, [json.dumps({**spec, "folder": str(tmp_path)})]) == 0
    finally:
        shutil.rmtree(memory)
    said = capfd.readouterr().err
    assert f"rank {fails} failed: ValueError: a bad day, in step 4. All ranks start again" in said, said
    assert "go on after step 3, from " in said, said
    assert losses(run.folder) == losses(whole.folder)
    assert_same_end(run, whole)
