"""Ranks of a server that fail, stop or hang: all are started again, and clients are answered throughout."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from disks_for_tests import small_disk
from serve_for_tests import wait_for
from served_ranks_for_tests import ServedRanks, save_step, served_ranks

from weft.errors import WeftError

pytestmark = pytest.mark.processes

FAIL_ONCE = """
import os
from weft.errors import NumbersError
from weft.serve.engine import Engine
from weft.serve.model.model_part import ModelPart

def failing(owner, method, rank, error):
    real = getattr(owner, method)
    def call(*arguments, **named):
        if os.path.exists({flag!r}) and os.environ.get("RANK") == rank:
            os.unlink({flag!r})
            raise error
        return real(*arguments, **named)
    setattr(owner, method, call)

"""


def wait_for_restart(served: ServedRanks, before: list[int]) -> None:
    wait_for(lambda: not set(before) & set(served.ranks()) and served.health()[0] == 200)


SLOW_READING = """
import time
from weft.serve.http import run_server
real_load = run_server.load_model
def load(*arguments, **named):
    if os.path.exists({slow!r}) and os.environ["RANK"] == "1":
        time.sleep(8)
    return real_load(*arguments, **named)
run_server.load_model = load
"""


def fail(served: ServedRanks, flag: Path) -> None:
    """Ask until the engine has failed."""
    flag.touch()
    while flag.exists():  # with replicas, the first request may go to the other one
        served.ask_if_it_answers()


def test_ranks_start_again_after_each_fault_up_to_the_limit(tmp_path: Path) -> None:
    """An engine fails, a rank stops, and one is killed twice. To read newer weights slowly is no hang."""
    run, flag, slow = tmp_path / "run", tmp_path / "fail", tmp_path / "slow"
    save_step(run, 1)
    program = FAIL_ONCE.format(flag=str(flag)) + 'failing(Engine, "step", "0", RuntimeError("made to fail"))\n'
    program += SLOW_READING.format(slow=str(slow))
    with served_ranks(run, "plan.tensor.x=2", "--follow", limit=3, hang_seconds=5, program=program) as served:
        before, _ = served.ranks(), many_answers(served)
        slow.touch()
        save_step(run, 2)
        served.wait_for_weights(2)
        assert served.ranks() == before
        slow.unlink()
        right = served.text()
        fail(served, flag)
        wait_for_restart(served, before)
        assert "made to fail. All ranks start again (restart 1 of at most 3" in served.said
        assert many_answers(served) == right
        before = served.ranks()
        served.kill(-1, signal.SIGSTOP)  # without requests
        wait_for_restart(served, before)
        assert "no sign of life for" in served.said
        assert "rank 1 did not" in served.said or "rank 1 has entered" in served.said, served.said
        assert "All ranks start again (restart 2 of at most 3" in served.said
        assert served.text() == right
        before = served.ranks()
        served.kill(-1, signal.SIGKILL)
        wait_for_restart(served, before)
        served.kill(-1, signal.SIGKILL)
        assert served.process.wait(60) == 128 + signal.SIGKILL
        assert "rank 1 was killed by SIGKILL" in served.said
        assert "that was after 3 restarts within 3600 s" in served.said


def test_torchrun_starts_ranks_that_hang_again_with_the_weights_that_were_served(tmp_path: Path) -> None:
    """A newer checkpoint has come meanwhile, which nobody asked to follow."""
    run = tmp_path / "run"
    save_step(run, 1)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])  # ranks that start again listen themselves
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "1", "--monitor-interval", "0.2", "--no-python"]
    with served_ranks(run, "plan.tensor.x=2", "--port", port, hang_seconds=3, launcher=launcher) as served:
        right, before = many_answers(served), served.ranks()
        save_step(run, 2)
        served.kill(-1, signal.SIGSTOP)
        wait_for_restart(served, before)
        assert "no sign of life for" in served.said
        assert "All ranks end with status 124, for the launcher to restart" in served.said
        assert served.health() == (200, "step-00000001")
        assert served.text() == right
        assert "starts no rank again" not in served.said


def many_answers(served: ServedRanks) -> str:
    """Enough steps, so that the limit of a hang is a step's time and the floor. Returns the last answer."""
    return [served.text() for _ in range(4)][-1]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plan", "failing"),
    [
        ("plan.pipe=2", 'failing(ModelPart, "logits", "1", NumbersError("made to fail"))'),
        ("plan.data=2", 'failing(Engine, "step", "1", NumbersError("made to fail"))'),
    ],
)
def test_when_an_engine_fails_all_ranks_start_again(plan: str, failing: str, tmp_path: Path) -> None:
    run, flag = tmp_path / "run", tmp_path / "fail"
    save_step(run, 1)
    program = FAIL_ONCE.format(flag=str(flag)) + failing + "\n"
    with served_ranks(run, plan, program=program) as served:
        right, before = served.text(), served.ranks()
        fail(served, flag)
        wait_for_restart(served, before)
        assert "made to fail. All ranks start again (restart 1 of at most 5" in served.said
        assert served.text() == right


@pytest.mark.soak
@pytest.mark.parametrize(("plan", "rank"), [("plan.pipe=2", 0), ("plan.data=2", -1), ("plan.tensor.x=2", 0)])
def test_a_rank_that_is_stopped_is_found_without_requests(plan: str, rank: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_step(run, 1)
    with served_ranks(run, plan, hang_seconds=5) as served:
        right, before = many_answers(served), served.ranks()
        served.kill(rank, signal.SIGSTOP)
        wait_for_restart(served, before)
        assert "no sign of life for" in served.said
        number = rank % 2
        assert f"rank {number} did not" in served.said or f"rank {number} has entered" in served.said, served.said
        assert "All ranks start again (restart 1 of at most 5" in served.said
        assert served.text() == right


def test_a_full_disk_does_not_disturb_who_serves_and_follows(tmp_path: Path) -> None:
    """A run's next save fails there; the server goes on, and takes the one that succeeds later."""
    with small_disk(tmp_path / "disk", 4 << 20) as _:
        run, ballast = tmp_path / "disk" / "run", tmp_path / "disk" / "ballast"
        save_step(run, 1)
        with served_ranks(run, "plan.tensor.x=2", "--follow") as served:
            right = served.text()
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            with pytest.raises((OSError, WeftError)):
                save_step(run, 2)
            before = served.ranks()
            served.kill(-1, signal.SIGKILL)  # ranks start again without room
            wait_for_restart(served, before)
            assert served.text() == right
            ballast.unlink()
            save_step(run, 3)
            served.wait_for_weights(3)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(60) == 0
