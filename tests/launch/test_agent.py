"""The agent's decisions: what is started again, how often, and what it says; on ranks that only pretend to train."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from waiting_for_tests import DEADLINE_SECONDS, publish, wait_for, wait_until

from weft.errors import ConfigError, CorruptionError, LaunchError, LostRankError
from weft.health import watchdog
from weft.health.rank_status import Status
from weft.launch import agent
from weft.launch.agent import Restarts, ResumePoint, memory_kills, start_local
from weft.launch.folder_lock import locked, refuse_if_used
from weft.launch.fork_server import REJOIN_VARIABLE, ForkServer

pytestmark = pytest.mark.processes

LIMIT = Restarts(2, 600)


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def rank() -> int:
    return int(os.environ["RANK"])


def run(main: Callable[[], object], restarts: Restarts = LIMIT, newest: Callable[[], ResumePoint] = ResumePoint) -> int:
    """The status of two ranks of `main`."""
    with ForkServer(lambda arguments: main()) as fork_server:
        return start_local(fork_server, 2, [], {}, restarts, newest)


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


def wait_for_the_end_of(pid: int) -> None:
    wait_until(lambda: not is_running(pid), f"the end of process {pid}")


def is_running(pid: int) -> bool:
    """A killed orphan may stay in the table until somebody looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_rank_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        if attempt() == 0:
            begin_step(7)
            if rank() == 1:
                publish(tmp_path / "dies", os.getpid())
                die()
            wait_for_the_end_of(int(wait_for(tmp_path / "dies")))  # and then this rank loses the other
            raise RuntimeError("Connection closed by peer")

    assert run(main, newest=lambda: ResumePoint(5, "runs/x/checkpoints/step-00000005")) == 0
    assert capfd.readouterr().err == (
        "weft: rank 1 was killed by SIGKILL (by hand, or by the kernel when memory ran out), in step 8. All ranks "
        "start again (restart 1 of at most 2 within 600 s) and go on after step 5, from "
        "runs/x/checkpoints/step-00000005; 2 finished steps to do again.\n"
    )


def test_a_rank_killed_for_memory_before_the_first_step_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("weft.launch.agent.memory_kills", iter(range(10)).__next__)  # one more at each look
    assert run(lambda: die() if rank() == 1 else time.sleep(60)) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == (
        "weft: rank 1 was killed by SIGKILL (by hand, or by the kernel when memory ran out); the kernel did it, for "
        "memory: use a smaller model or batch, or fewer ranks on this machine\n"
    )
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    assert (memory_kills(tmp_path / "vmstat"), memory_kills(tmp_path / "absent")) == (7, 0)


def test_an_error_in_the_middle_is_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: fail_after_step_7(ValueError("a bad day")), newest=lambda: ResumePoint(6, "memory")) == 0
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

    assert run(main, newest=lambda: ResumePoint(5, "a checkpoint")) == 1
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

    assert run(main, newest=lambda: ResumePoint(5, "memory")) == 0
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

    with ForkServer(lambda arguments: main()) as fork_server:
        status = start_local(fork_server, 2, [], {"AGENT": str(os.getpid())}, LIMIT)
    assert status == 128 + signal.SIGTERM
    assert "start again" not in capfd.readouterr().err


@pytest.mark.parametrize("when", ["it is decided", "ranks start"])
def test_a_step_that_only_memory_holds_is_loaded_and_saved_before_a_stop(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A signal to stop while a restart is decided, or before the new ranks can handle it: SIGTERM would end these."""

    def main() -> None:
        if attempt() == 0:
            begin_step(7)
            if rank() == 1:
                die()
            time.sleep(DEADLINE_SECONDS)
        if rank() == 1:  # the last to begin: until then none may be asked
            wait_for(tmp_path / "began")
        asked = tmp_path / f"asked{rank()}"
        signal.signal(signal.SIGTERM, lambda *_: publish(asked))
        begin_step(7)
        publish(tmp_path / "began")
        wait_for(asked)

    asks = [0]

    def newest() -> ResumePoint:
        asks[0] += 1
        if asks[0] == 2 and when == "it is decided":
            signal.raise_signal(signal.SIGTERM)
        return ResumePoint(7, "memory", saved_step=5) if asks[0] == 2 else ResumePoint()

    def start_and_send(self: ForkServer, *arguments: Any) -> list[int]:
        if asks[0] == 2 and when == "ranks start":
            signal.raise_signal(signal.SIGTERM)
        return start(self, *arguments)

    start = ForkServer.start
    monkeypatch.setattr(ForkServer, "start", start_and_send)
    assert run(main, newest=newest) == 0
    assert {path.name for path in tmp_path.glob("asked*")} == {"asked0", "asked1"}
    said = capfd.readouterr().err
    assert "All ranks start again (restart 1 of at most 2 within 600 s) and go on after step 7, from memory" in said
    assert (
        "weft: SIGTERM: step 7 is only in memory, so the ranks load it, go on, save and stop; Ctrl-C once more kills "
        "them\n" in said
    )
    assert "is saved" not in said


def test_no_restart_is_promised_where_none_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        begin_step(7)
        if rank() == 1:
            die()
        time.sleep(DEADLINE_SECONDS)

    asks = [0]

    def newest() -> ResumePoint:
        asks[0] += 1
        if asks[0] == 2:
            signal.raise_signal(signal.SIGTERM)
        return ResumePoint(7, "memory", saved_step=5) if asks[0] == 2 else ResumePoint()

    assert run(main, Restarts(0, 600), newest) == 128 + signal.SIGKILL
    assert asks[0] == 2
    assert "only in memory" not in capfd.readouterr().err


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
            wait_for(tmp_path / "known")
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(DEADLINE_SECONDS)

    begin = ForkServer.start

    def start(self: ForkServer, *arguments: Any) -> list[int]:
        pids = begin(self, *arguments)
        publish(tmp_path / "known")  # the agent knows its ranks
        return pids

    with (
        patch.object(ForkServer, "start", start),
        pytest.raises(LaunchError, match="the process that starts the ranks was killed"),
    ):
        run(main)
    for index in range(2):
        wait_for_the_end_of(int((tmp_path / f"ready-{index}").read_text()))


def test_a_run_folder_is_for_one_job_and_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = os.fork()
    if holder == 0:
        with locked(folder):
            publish(tmp_path / "held")
            time.sleep(DEADLINE_SECONDS)
        os._exit(0)
    wait_for(tmp_path / "held")
    with pytest.raises(LaunchError, match=rf"is in use by process {holder} on .*; wait until that job ends"):
        locked(folder).__enter__()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with locked(folder):
        pass


def test_a_look_at_the_lock_of_a_folder_does_not_let_go_of_it(tmp_path: Path) -> None:
    """A POSIX lock ends when its process closes any descriptor of the file."""
    folder = tmp_path / "run"
    with locked(folder):
        with pytest.raises(LaunchError, match="is in use by this process"):
            refuse_if_used(folder)
        other = os.fork()
        if other == 0:
            try:
                with locked(folder):
                    os._exit(0)
            except LaunchError:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 3
    with locked(folder):
        pass


# --- the watch over hangs


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks are waited for, however long a busy machine takes to write them."""
    monkeypatch.setattr(watchdog, "_STACK_SECONDS", DEADLINE_SECONDS)


def work_and_hang(hangs: Callable[[Status], object], folder: Path) -> None:
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
            publish(folder / "hangs")
        else:
            wait_until(lambda: (status.enters("forward of block 1"), (folder / "hangs").exists())[1], "the hang")
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
@pytest.mark.usefixtures("_patient")
def test_a_rank_that_hangs_is_named_and_all_start_again(
    hangs: Callable[[Status], object], where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In its own work, and in a receive of something else than the others wait for."""
    with ForkServer(lambda arguments: work_and_hang(hangs, tmp_path)) as fork_server:
        assert start_local(fork_server, 2, [], {}, Restarts(1, 600, hang_seconds=1.2), stacks=tmp_path) == 0
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert re.match(
        rf"weft: no sign of life for \d+ s: rank 1 \(pipe stage 5\) did not enter all_reduce over data "
        rf"\(#2, backward of block 7\); last seen in {re.escape(where)}, \d+ s ago \(rank 0 is waiting in all_reduce "
        rf"over data \(#2, backward of block 7\)\); their stacks are in "
        rf"{tmp_path}/hang-[0-9-]*\.txt, in step 3\. All ranks start again",
        said,
    ), said
    stacks = next(tmp_path.glob("hang-*.txt")).read_text()
    assert stacks.count("in work_and_hang") == 2


def test_stacks_that_cannot_be_written_end_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    hangs = partial(Status.phase, doing="loading data")
    with ForkServer(lambda arguments: work_and_hang(hangs, tmp_path)) as fork_server:
        stacks = tmp_path / "file" / "run"
        assert start_local(fork_server, 2, [], {}, Restarts(1, 600, hang_seconds=1.2), stacks=stacks) == 0
    said = capfd.readouterr().err
    assert f"; their stacks cannot be written to {stacks} (Not a directory), in step 3. All ranks start again" in said


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
        if rank() == 1:
            begin_step(0)
        else:  # its first page is the wait: on a busy machine it may stop for longer than the deadline anywhere
            status = Status(os.environ, 0)
            status.step_begins(0)
            status.wait_begins("all_gather over shard (#1, forward of block 0)", [1])
        time.sleep(DEADLINE_SECONDS)

    assert run(main, Restarts(0, 600, hang_seconds=0.1, step_seconds=0.15)) == 124
    said = capfd.readouterr().err
    assert re.search(r"for \d+ s: rank 1 \(pipe stage 5\) did not enter all_gather over shard \(#1, forward of", said)


def test_a_wait_past_its_deadline_is_a_hang_though_others_are_at_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        status = begin_step(0)
        time.sleep(0.05)
        status.step_begins(1)
        if rank() == 0:
            wait_until(lambda: (status.enters("forward of block 3"), (tmp_path / "works").exists())[1], "rank 1")
            status.wait_begins("all_reduce over data (#1)", [1])
        while True:
            if rank() == 1:
                status.enters("forward of block 3")
                publish(tmp_path / "works")
            time.sleep(0.05)

    assert run(main, Restarts(0, 600, hang_seconds=1)) == 124
    said = capfd.readouterr().err
    assert "rank 1 (pipe stage 5) did not enter all_reduce over data (#1); last seen in forward of block 3 of" in said


def test_who_is_slow_is_told_and_the_job_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def look(self: watchdog.Watchdog) -> tuple[None, str | None]:
        is_told = (tmp_path / "told").exists()
        publish(tmp_path / "told")
        return None, None if is_told else "rank 1 is slow"

    with patch.object(watchdog.Watchdog, "check", look):
        assert run(lambda: wait_for(tmp_path / "told")) == 0
    assert capfd.readouterr().err == "weft: rank 1 is slow\n"


# --- who may be signalled


def parent_of(pid: int) -> int | None:
    """The parent of a process that runs or has not been reaped yet; None where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return None


def test_only_ranks_that_are_not_reaped_are_signalled(tmp_path: Path) -> None:
    """A number that was reaped may be another's process by now: rank 0 has ended when rank 1 fails, or hangs."""
    signalled: list[tuple[int, int | None]] = []

    def noting(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def noted(pid: int, number: int) -> None:
            signalled.append((pid, parent_of(pid)))
            send(pid, number)

        return noted

    def main() -> None:
        if rank() == 1:
            wait_for(tmp_path / "rank 0 is gone")
            raise ConfigError("stop here")

    rank_exit = ForkServer.next_exit

    def told(self: ForkServer, timeout_seconds: float) -> Any:
        found = rank_exit(self, timeout_seconds)
        if found is not None and found.rank == 0:
            publish(tmp_path / "rank 0 is gone")
        return found

    with ForkServer(lambda arguments: main()) as fork_server:
        with (
            patch.object(os, "kill", noting(os.kill)),
            patch.object(os, "killpg", noting(os.killpg)),
            patch.object(ForkServer, "next_exit", told),
        ):
            assert start_local(fork_server, 2, [], {}, LIMIT) == 2
        assert {parent for _, parent in signalled} == {fork_server._pid}, signalled
        assert len({pid for pid, _ in signalled}) == 2


@pytest.mark.parametrize("has_worked", [False, True])
def test_ranks_that_count_no_steps_are_started_again_if_they_have_worked(has_worked: bool) -> None:
    """After an error that is not the user's."""

    def main() -> None:
        if attempt() == 0 and rank() == 1:
            raise RuntimeError("a lost connection")
        if attempt() == 0:
            time.sleep(DEADLINE_SECONDS)  # as in a collective

    with ForkServer(lambda arguments: main()) as fork_server:
        status = start_local(fork_server, 2, [], {}, LIMIT, has_worked=lambda: has_worked)
    assert status == (0 if has_worked else 1)


def test_the_ended_are_reaped_when_others_start_and_when_all_is_over() -> None:
    with ForkServer(lambda arguments: None) as fork_server:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        first = fork_server.start(2, [], environ)
        for _ in first:
            wait_until(lambda: fork_server.next_exit(0.1), "a rank's end")
        assert {parent_of(pid) for pid in first} == {fork_server._pid}
        second = fork_server.start(1, [], environ)
        assert {parent_of(pid) for pid in first} == {None}
        wait_until(lambda: fork_server.next_exit(0.1), "the rank's end")
    assert parent_of(second[0]) is None


# --- ranks that do not train


def run_with_role(main: Callable[[], object], restarts: Restarts = LIMIT) -> int:
    """The status of `main` on a training rank, 0, and a rank of another role, 1."""
    with ForkServer(lambda arguments: main()) as fork_server:
        return start_local(fork_server, 2, [], {}, restarts, num_roles=1)


def test_a_killed_rank_of_another_role_starts_again_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        if rank() == 0:
            begin_step(3)
            publish(tmp_path / "begun")
            wait_for(tmp_path / "back")
        elif REJOIN_VARIABLE in os.environ:
            publish(tmp_path / "back", attempt())
        else:
            wait_for(tmp_path / "begun")
            die()

    assert run_with_role(main) == 0
    assert (tmp_path / "back").read_text() == "0"  # the others were not started again
    assert "rank 1 was killed by SIGKILL" in (said := capfd.readouterr().err)
    assert "It does not train, so it starts again alone; no step is lost" in said


def test_training_goes_on_without_a_rank_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        if rank() == 0:
            begin_step(3)
            publish(tmp_path / "begun")
            wait_for(tmp_path / "failed")
            return
        wait_for(tmp_path / "begun")
        publish(tmp_path / "failed")
        raise ConfigError("this disk is full")

    assert run_with_role(main) == 0
    assert "this disk is full. It does not train, so training goes on without it" in capfd.readouterr().err


def test_a_rank_of_another_role_that_does_not_end_is_killed() -> None:
    def main() -> None:
        if rank() == 0:
            begin_step(3)
        else:
            time.sleep(DEADLINE_SECONDS)

    with patch.object(agent, "_END_SECONDS", 0.2):
        assert run_with_role(main) == 0


def test_before_training_has_begun_any_loss_starts_all_again(tmp_path: Path) -> None:
    def main() -> None:
        if attempt() == 0 and rank() == 1:
            die()
        if attempt() == 0:
            time.sleep(DEADLINE_SECONDS)
        publish(tmp_path / f"again-{rank()}")

    assert run_with_role(main) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"again-0", "again-1"}
