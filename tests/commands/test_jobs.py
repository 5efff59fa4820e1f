"""Jobs of the fork server: results and errors come back from a child, and ranks see the GPUs that the command hides."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import make_run, write_run_file
from waiting_for_tests import wait_until

from weft.cluster.local_gpus import VISIBLE_VARIABLE, Gpu, hide_gpus
from weft.commands.jobs import command_fork_server, prove
from weft.errors import LocalError, PlanError
from weft.launch.fork_server import ForkServer

pytestmark = pytest.mark.processes

SECONDS = 60.0


def work(what: str, path: str = "") -> Any:
    """A job: does as it is told."""
    if what == "plan error":
        raise PlanError("x = 3 does not divide 4 heads")
    if what == "defect":
        raise ZeroDivisionError("on purpose")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stay":
        Path(path).write_text(str(os.getpid()))
        time.sleep(SECONDS)
    return {"what": what, "pid": os.getpid()}


def tell_environment(arguments: list[str]) -> None:
    """A rank: writes what it sees of GPUs."""
    Path(arguments[0]).write_text(os.environ.get(VISIBLE_VARIABLE, "not set"))


def make() -> ForkServer:
    return ForkServer(tell_environment, jobs={"work": work})


def test_jobs_answer_from_a_process_of_their_own() -> None:
    with make() as fork_server:
        found = [fork_server.call("work", what=word) for word in ("a", "b")]
    assert [one["what"] for one in found] == ["a", "b"]
    assert len({os.getpid(), *(one["pid"] for one in found)}) == 3


def test_errors_of_weft_are_raised_again_and_others_are_told_with_their_trace() -> None:
    with make() as fork_server:
        with pytest.raises(PlanError, match=r"^x = 3 does not divide 4 heads$"):
            fork_server.call("work", what="plan error")
        with pytest.raises(LocalError, match=r"'work' failed: ZeroDivisionError: on purpose\n(.|\n)*in work"):
            fork_server.call("work", what="defect")
        with pytest.raises(LocalError, match="the process of 'work' died with status -9 and left no answer"):
            fork_server.call("work", what="die")
        assert fork_server.call("work", what="again")["what"] == "again"


def test_a_job_ends_with_the_command_that_asked_for_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    fork_server = make()
    fork_server._lines.write({"job": "work", "arguments": {"what": "stay", "path": str(started)}, "path": "unused"})
    wait_until(lambda: started.exists() and started.read_text(), "the start of the job")
    fork_server.__exit__()  # waits for the fork server, which ends its job first
    pid = int(started.read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the job")


@pytest.mark.parametrize("visible", [None, "0,3"])
def test_ranks_see_the_gpus_that_the_command_hides_from_itself(
    visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_VARIABLE, visible)
    seen = tmp_path / "seen"
    with make() as fork_server, hide_gpus([Gpu("NVIDIA H200", 1, (9, 0))]):
        fork_server.start(1, [str(seen)], {**os.environ, "OMP_NUM_THREADS": "1"})
        rank_exit = fork_server.next_exit(SECONDS)
    assert rank_exit is not None
    assert rank_exit.status == 0
    assert seen.read_text() == (visible or "not set")


def test_a_run_is_refused_before_a_child_proves_it(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    with command_fork_server(tell_environment) as fork_server:
        with pytest.raises(PlanError):
            prove(fork_server, make_run(run_file, "run", "plan.tensor.x=3", "plan.micro_batch=2"))
        assert prove(fork_server, make_run(run_file, "run", "plan.shard=2", "plan.micro_batch=2")).passed
