"""Hangs under launchers, where no agent of weft's is: the ranks find and name who hangs, and leave for a restart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from restarts_for_tests import NUM_STEPS, RESTARTED_LAYOUTS, Kill, assert_same_end, rank_main
from runs_for_tests import DEEP, make_run, train_on_ranks, write_run_file
from sampled_for_tests import some_soak

from weft.health.watchdog import Deadline
from weft.launch.fork_server import ForkServer
from weft.resilience import shared_memory
from weft.resilience.peer_watch import HUNG

pytestmark = pytest.mark.processes

DEADLINE_SECONDS = 300
OVERRIDES = [f"train.steps={NUM_STEPS}", "checkpoint.every=5", "restart.hang_seconds=2"]
HANG_SECONDS = 3.0


def start_and_hang(folder: Path, layout: str, kill: Kill) -> tuple[dict[int, int], str]:
    """Four ranks as a launcher starts them, of which one hangs; what they left with, and the call where it hung."""
    run_file = write_run_file(folder, DEEP)
    overrides = [*RESTARTED_LAYOUTS[layout], *OVERRIDES, f"folder={folder / 'run'}"]
    spec = {"run_file": str(run_file), "overrides": overrides, "kill": vars(kill), "folder": str(folder)}
    codes: dict[int, int] = {}
    memory = folder / "memory"
    memory.mkdir()
    # Until the rank hangs nobody is accused: any of them may be slow, on a busy machine.
    patience = property(lambda _: HANG_SECONDS if (folder / "killed").exists() else DEADLINE_SECONDS)
    with (
        patch.object(shared_memory, "SHARED_MEMORY", memory),
        patch.object(Deadline, "seconds", patience),
        ForkServer(rank_main) as fork_server,
    ):
        pids = fork_server.start(4, [json.dumps(spec)], {**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(codes) < 4 and time.monotonic() < deadline:
            rank_exit = fork_server.next_exit(0.1)
            if rank_exit is not None:
                codes[rank_exit.rank] = rank_exit.status
            if set(range(4)) - set(codes) == {kill.rank} and kill.how == "stop":
                os.kill(pids[kill.rank], signal.SIGKILL)  # as a launcher does when others have failed
        for rank in set(range(4)) - set(codes):
            os.kill(pids[rank], signal.SIGKILL)
    assert not list(memory.iterdir())  # pages are gone with their ranks
    path = folder / "call"
    return codes, path.read_text() if path.exists() else ""


HANGS = {
    "loading": (
        "data 2 x shard 2",
        Kill(2, 6, 0, "hang in loading"),
        r"rank 2 did not enter all_reduce over tokens \(#(\d+)\); last seen in loading data of step 6",
    ),
    "asleep in a collective": (
        "data 2 x shard 2",
        Kill(1, 6, 9, "hang"),
        r"rank 1 did not enter (CALL); last seen in backward of block model\.layers\.2 of step 6",
    ),
    "stopped": (
        "data 2 x shard 2",
        Kill(3, 6, 9, "stop"),
        r"rank 3 (did not enter|has entered) \w+ over \w+ \(#\d+, backward of block model\.layers\.[23]\).*?; "
        r"last seen in backward of block model\.layers\.2 of step 6",
    ),
    "rank 0 stopped, and with it the store": (
        "data 2 x shard 2",
        Kill(0, 6, 12, "stop"),
        r"rank 0 (did not enter|has entered) \w+ over \w+ \(#\d+, backward of block model\.layers\.[12]\).*?; "
        r"last seen in backward of block model\.layers\.1 of step 6",
    ),
    "before a receive": (
        "pipe 4",
        Kill(1, 6, 3, "hang"),
        r"rank 1 \(pipe stage 1\) did not send the (for|back)ward of micro-batch \d to stage [02]; last seen in "
        r"(for|back)ward of block model\.layers\.1 of step 6",
    ),
}


@pytest.mark.parametrize("name", some_soak(HANGS, "stopped"))
def test_a_rank_that_hangs_is_named_by_the_others(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layout, kill, words = HANGS[name]
    codes, call = start_and_hang(tmp_path, layout, kill)
    said = capfd.readouterr().err
    ends = -signal.SIGKILL if kill.how == "stop" else HUNG
    assert codes == {rank: ends if rank == kill.rank else HUNG for rank in range(4)}, said
    assert said.count("weft:") == 1
    words = words.replace("CALL", re.escape(call))
    assert re.search(rf"no sign of life for \d+ s: {words} \(after \d+ collectives\), \d+ s ago \(rank", said), said
    (stacks,) = (tmp_path / "run").glob("hang-*")
    dumped = {path.name for path in stacks.glob("rank-*.txt")}
    assert dumped >= {f"rank-{rank:05d}.txt" for rank in range(4) if rank != kill.rank}
    assert "in train_step" in (stacks / f"rank-{(kill.rank + 1) % 4:05d}.txt").read_text()
    assert next(stacks.glob("what-*.txt")).read_text() == said


@pytest.mark.soak
@pytest.mark.parametrize("name", ["loading", "asleep in a collective", "stopped", "before a receive"])
def test_torchrun_starts_again_after_a_hang(name: str, tmp_path: Path) -> None:
    """The whole of it: named, left, started again by torchrun, and the same end as of a run that nobody disturbed."""
    layout, kill, words = HANGS[name]
    run_file, overrides = write_run_file(tmp_path, DEEP), [*RESTARTED_LAYOUTS[layout], *OVERRIDES]
    run, whole = make_run(run_file, "run", *overrides), make_run(run_file, "whole", *overrides)
    overrides.append(f"folder={run.folder}")
    spec = {"run_file": str(run_file), "overrides": overrides, "kill": vars(kill), "folder": str(tmp_path)}
    rank = "import sys; from restarts_for_tests import rank_main; rank_main(sys.argv[1:])"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--max-restarts=1"]
    command = [*torchrun, "--no-python", sys.executable, "-c", rank, json.dumps(spec)]
    root = Path(__file__).parents[2]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{root / 'tests' / 'helpers'}"}
    left = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert left.returncode == 0, left.stderr
    words = words.replace("CALL", re.escape((tmp_path / "call").read_text() if "CALL" in words else ""))
    assert re.search(rf"no sign of life for \d+ s: {words} \(after \d+ collectives\), \d+ s ago", left.stderr)
    assert left.stderr.count("no sign of life") == 1
    train_on_ranks(whole)
    assert_same_end(run, whole)
