"""The agent's decisions: what is started again, how often, and what it says; on ranks that only pretend to train."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.agent import Restarts, Source, start_local
from weft.errors import ConfigError, CorruptionError, LaunchError, LostRankError
from weft.lock import locked
from weft.nursery import Nursery
from weft.status import Status

DEADLINE_SECONDS = 60
LIMIT = Restarts(2, 600)


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def rank() -> int:
    return int(os.environ["RANK"])


def run(main: Callable[[], object], restarts: Restarts = LIMIT, newest: Callable[[], Source] = Source) -> int:
    """The status of two ranks of `main`."""
    with Nursery(lambda arguments: main()) as nursery:
        return start_local(nursery, 2, [], {}, restarts, newest)


def begin_step(step: int) -> Status:
    status = Status(os.environ, rank())
    status.place = f"pipe stage {5 * rank()}"
    status.step_begins(step)
    status.phase("forward and backward")
    return status


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_after_step_7(error: Exception) -> None:
    """Rank 1 fails once, after step 7; the other waits, as in a collective."""
    if attempt() == 0:
        begin_step(7)
        if rank() == 1:
            raise error
        time.sleep(DEADLINE_SECONDS)


def test_a_killed_rank_is_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        if attempt() == 0:
            begin_step(7)
            if rank() == 1:
                die()
            time.sleep(0.2)  # and then this rank loses the other
            raise RuntimeError("Connection closed by peer")

    assert run(main, newest=lambda: Source(5, "runs/x/checkpoints/step-00000005")) == 0
    assert capfd.readouterr().err == (
        "weft: rank 1 was killed by SIGKILL (by hand, or by the kernel when memory ran out), in step 8. All ranks "
        "start again (restart 1 of at most 2 within 600 s) and go on after step 5, from "
        "runs/x/checkpoints/step-00000005; 2 finished steps to do again.\n"
    )


def test_an_error_in_the_middle_is_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: fail_after_step_7(ValueError("a bad day")), newest=lambda: Source(6, "memory")) == 0
    said = capfd.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert "weft: rank 1 failed: ValueError: a bad day, in step 8. All ranks start again (restart 1 of" in said
    assert said.endswith("go on after step 6, from memory; 1 finished step to do again.\n")


def test_a_lost_message_is_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: fail_after_step_7(LostRankError("no message from rank 0"))) == 0
    assert "weft: rank 1 failed: no message from rank 0, in step 8. All ranks start" in capfd.readouterr().err


def test_an_error_before_a_step_was_done_would_come_again(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        begin_step(5)
        raise ValueError("wrong from the start")

    assert run(main, newest=lambda: Source(5, "a checkpoint")) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1
    assert "failed: ValueError: wrong from the start\n" in said
    assert "start again" not in said


def test_a_flipped_bit_is_tried_again_though_no_step_was_done(capfd: pytest.CaptureFixture[str]) -> None:
    """It may come in the first step after a restart as well as in any other."""

    def main() -> None:
        begin_step(5)
        if attempt() == 0:
            raise CorruptionError("silent corruption in step 6")

    assert run(main, newest=lambda: Source(5, "memory")) == 0
    assert "failed: silent corruption in step 6, in step 6. All ranks start again" in capfd.readouterr().err


def test_what_the_user_must_change_is_one_line_and_no_restart(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: fail_after_step_7(ConfigError("train.steps = 0; use 1"))) == 2
    assert capfd.readouterr().err == "weft: train.steps = 0; use 1\n"


def test_too_many_restarts_end_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(die) == 128 + signal.SIGKILL
    lines = capfd.readouterr().err.splitlines()
    assert ["All ranks start again" in line for line in lines] == [True, True, False]
    assert "that was after 2 restarts within 600 s, the most that [restart] allows" in lines[2]


def test_restarts_of_long_ago_do_not_count(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: die() if attempt() < 3 else None, Restarts(1, 0)) == 0
    assert capfd.readouterr().err.count("(restart 1 of at most 1 within 0 s)") == 3


def test_no_restart_after_a_signal_to_stop(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        os.kill(os.getppid(), 0)
        if rank() == 0:
            os.kill(int(os.environ["AGENT"]), signal.SIGTERM)
        time.sleep(DEADLINE_SECONDS)

    with Nursery(lambda arguments: main()) as nursery:
        status = start_local(nursery, 2, [], {"AGENT": str(os.getpid())}, LIMIT)
    assert status == 128 + signal.SIGTERM
    assert "start again" not in capfd.readouterr().err


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text()


def publish(path: Path, text: object = "") -> None:
    path.with_suffix(".part").write_text(str(text))
    path.with_suffix(".part").rename(path)


def test_ranks_whose_agent_is_killed_save_and_stop(tmp_path: Path) -> None:
    def main() -> None:
        def save(*_: object) -> None:
            publish(tmp_path / f"saved-{rank()}")
            os._exit(0)

        signal.signal(signal.SIGTERM, save)
        publish(tmp_path / f"ready-{rank()}")
        time.sleep(DEADLINE_SECONDS)

    agent = os.fork()
    if agent == 0:
        run(main)
        os._exit(0)
    for index in range(2):
        wait_for(tmp_path / f"ready-{index}")
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    for index in range(2):
        wait_for(tmp_path / f"saved-{index}")


def test_ranks_whose_nursery_is_killed_are_ended(tmp_path: Path) -> None:
    def main() -> None:
        publish(tmp_path / f"ready-{rank()}", os.getpid())
        if rank() == 0:
            wait_for(tmp_path / "ready-1")
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(DEADLINE_SECONDS)

    with pytest.raises(LaunchError, match="the process that starts the ranks was killed"):
        run(main)
    for index in range(2):
        pid = int((tmp_path / f"ready-{index}").read_text())
        deadline = time.monotonic() + DEADLINE_SECONDS
        while is_running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    """A killed orphan may stay in the table until somebody looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_folder_is_for_one_job_and_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = "import sys, time; from pathlib import Path; from weft.lock import locked\n"
    script += "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match=rf"is in use by process {holder.pid} on .*; wait until that job ends"):
            locked(folder).__enter__()
        holder.kill()
    with locked(folder):
        pass


# --- the watch over hangs


def work_and_hang(hangs: Callable[[Status], object]) -> None:
    """Rank 1 hangs in its third step; rank 0 waits for it in an all-reduce that was its second call."""
    status = begin_step(0)
    for step in range(3):
        status.step_begins(step)
        status.phase("forward and backward")
        time.sleep(0.1)
    status.num_calls += 1
    if attempt() == 0:
        if rank() == 1:
            hangs(status)
        else:
            status.num_calls += 1
            status.wait_begins("all_reduce over data (#2, backward of block 7)", [1])
        time.sleep(DEADLINE_SECONDS)


@pytest.mark.parametrize(
    ("hangs", "where"),
    [
        (lambda status: status.phase("loading data"), "loading data of step 3 (after 1 collectives)"),
        (
            lambda status: status.wait_begins("recv_forward of micro-batch 2 over pipe"),
            "recv_forward of micro-batch 2 over pipe of step 3 (after 1 collectives)",
        ),
        (lambda status: status.enters("forward of block 3"), "forward of block 3 of step 3 (after 1 collectives)"),
    ],
)
def test_a_rank_that_hangs_is_named_and_all_start_again(
    hangs: Callable[[Status], object], where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In its own work, and in a receive of something else than the others wait for."""
    with Nursery(lambda arguments: work_and_hang(hangs)) as nursery:
        assert start_local(nursery, 2, [], {}, Restarts(1, 600, hang_seconds=1.2), stacks=tmp_path) == 0
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert re.match(
        rf"weft: no sign of life for [1-9] s: rank 1 \(pipe stage 5\) did not enter all_reduce over data "
        rf"\(#2, backward of block 7\); last seen in {re.escape(where)}, [1-9] s ago \(rank 0 is waiting in all_reduce "
        rf"over data \(#2, backward of block 7\)\); their stacks are in "
        rf"{tmp_path}/hang-[0-9-]*\.txt, in step 3\. All ranks start again",
        said,
    ), said
    stacks = next(tmp_path.glob("hang-*.txt")).read_text()
    assert stacks.count("in work_and_hang") == 2


def test_a_hang_that_comes_again_ends_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        status = begin_step(0)
        time.sleep(0.1)
        status.step_begins(1)
        status.phase("loading data")
        time.sleep(DEADLINE_SECONDS)

    assert run(main, Restarts(1, 600, hang_seconds=1.0)) == 124
    assert "rank 0 (pipe stage 0) does not get on; last seen in loading data of step 2" in capfd.readouterr().err


def test_a_hang_in_the_first_step_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured yet: five times the floor is the deadline, or ten predicted steps."""

    def main() -> None:
        status = begin_step(0)
        if rank() == 0:
            status.wait_begins("all_gather over shard (#1, forward of block 0)", [1])
        time.sleep(DEADLINE_SECONDS)

    assert run(main, Restarts(0, 600, hang_seconds=0.1, step_seconds=0.15)) == 124
    said = capfd.readouterr().err
    assert "no sign of life for 2 s: rank 1 (pipe stage 5) did not enter all_gather over shard (#1, forward of" in said


def test_a_wait_past_its_deadline_is_a_hang_though_others_are_at_work(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        status = begin_step(0)
        time.sleep(0.05)
        status.step_begins(1)
        if rank() == 0:
            status.wait_begins("all_reduce over data (#1)", [1])
        while True:
            if rank() == 1:
                status.enters("forward of block 3")
            time.sleep(0.05)

    assert run(main, Restarts(0, 600, hang_seconds=1)) == 124
    said = capfd.readouterr().err
    assert "rank 1 (pipe stage 5) did not enter all_reduce over data (#1); last seen in forward of block 3 of" in said


def test_work_that_takes_its_time_is_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    """Ten steps' time may pass, a slow save may take as long as it likes, and so may the first step."""

    def main() -> None:
        status = begin_step(0)
        time.sleep(0.5)
        for step in range(1, 4):
            status.step_begins(step)
            status.phase("forward and backward")
            time.sleep(0.3)
        time.sleep(1)
        status.phase("saving")
        time.sleep(4)

    assert run(main, Restarts(1, 600, hang_seconds=0.5)) == 0
    assert capfd.readouterr().err == ""


def test_a_straggler_is_named_once_within_ten_steps(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        status = begin_step(0)
        for step in range(1, 15):
            time.sleep(0.3 if rank() == 1 else 0.05)
            status.wait_begins("all_reduce over data (#1)")
            time.sleep(0.0 if rank() == 1 else 0.25)
            status.wait_ends()
            status.step_ends()
            status.step_begins(step)
            status.phase("forward and backward")
            if rank() == 1 and step == 11:
                time.sleep(0.3)  # until the agent has looked

    assert run(main) == 0
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "weft: rank 1 is slow: it computes 0." in said
