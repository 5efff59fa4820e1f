"""A host is lost and comes back: the job goes on with the ranks that are left, under another plan, and takes it in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_for_tests import ADDRESSES, PORT, end_all, hosts, ip
from runs_for_tests import events, losses, make_run, train_on_ranks, write_run_file

from weft.checkpoint import Checkpoint

pytestmark = pytest.mark.processes

__all__ = ["hosts"]  # a fixture
DEADLINE_SECONDS = 300
NUM_STEPS = 30
LOST_AFTER, BACK_AFTER = 10, 20
# Nothing on disk before the end: what comes back after a loss comes from memory.
OVERRIDES = ["plan.data=2", "plan.shard=2", f"train.steps={NUM_STEPS}", "checkpoint.memory_every=1"]
OVERRIDES += ["checkpoint.every=100", "restart.hang_seconds=6"]

# `weft` that waits: four ranks after LOST_AFTER steps, until the test has killed a host; two after BACK_AFTER, until
# their agent asks them to make place for more.
PACED = f"""
import os, sys, time
from weft.commands.main import main
from weft.train import checkpoints, loop
from weft.train.stop import Stop

folder, steps, asked = sys.argv.pop(1), 0, []
train_step, handle, resume = loop.train_step, Stop._handle, checkpoints.resume

def wait(condition, mesh):
    deadline = time.monotonic() + {DEADLINE_SECONDS}
    while not condition() and time.monotonic() < deadline:
        mesh.ledger.phase("waiting for the test")  # a sign of life
        time.sleep(0.05)

def paced_step(*arguments, **named):
    global steps
    if steps == {LOST_AFTER} and os.environ["WORLD_SIZE"] == "4":
        wait(lambda: os.path.exists(os.path.join(folder, "lost")), arguments[3])
    if steps == {BACK_AFTER} and os.environ["WORLD_SIZE"] == "2":
        wait(lambda: asked, arguments[3])
    steps += 1
    return train_step(*arguments, **named)

def counted_resume(*arguments):
    global steps
    resumed = resume(*arguments)
    steps = resumed.step
    return resumed

def noted_handle(self, number, frame):
    asked.append(number)
    handle(self, number, frame)

loop.train_step, checkpoints.resume, Stop._handle = paced_step, counted_resume, noted_handle
main()
"""


class Hosts:
    """Elastic torchruns on two hosts."""

    def __init__(self, names: list[str], command: list[str], folder: Path) -> None:
        self._names, self._command, self._folder = names, command, folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        host, conf = self._names[index], "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=8"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
        torchrun += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}"]
        torchrun += [f"--local-addr={ADDRESSES[index]}", f"--rdzv-conf=is_host={int(index == 0)},{conf}"]
        # A name and memory of its own, as a host has.
        mounted = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"', host]
        line = ["ip", "netns", "exec", host, *mounted, *torchrun, "--rdzv-id=test", "--no-python", *self._command]
        root = str(Path(__file__).parents[2])
        environ = os.environ | {"GLOO_SOCKET_IFNAME": host, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torchrun takes in no host that comes later
        with open(self._folder / f"{host}.log", "ab") as file:
            process = subprocess.Popen(line, env=environ, stdout=file, stderr=file, start_new_session=True)
        self.processes[index] = process

    def cut(self) -> None:
        """Pull the cable: nobody is told."""
        ip("-n", self._names[1], "link", "set", self._names[1], "down")

    def mend(self) -> None:
        ip("-n", self._names[1], "link", "set", self._names[1], "up")

    def log(self, index: int) -> str:
        return (self._folder / f"{self._names[index]}.log").read_text()

    def kill(self, index: int) -> None:
        """A power cut: everything on the host at once."""
        end_all(self._names[index])
        self.processes.pop(index).wait()

    def wait(self) -> list[int]:
        try:
            return [process.wait(DEADLINE_SECONDS) for process in self.processes.values()]
        except subprocess.TimeoutExpired:
            pytest.fail("the job did not end:\n" + self.output())

    def output(self) -> str:
        return "\n".join(map(self.log, range(2)))


@pytest.fixture
def elastic(hosts: list[str], tmp_path: Path) -> Iterator[Hosts]:
    run_file = write_run_file(tmp_path)
    (tmp_path / "paced.py").write_text(PACED)
    command = [sys.executable, str(tmp_path / "paced.py"), str(tmp_path), "train", str(run_file), *OVERRIDES]
    pair = Hosts(hosts, [*command, f"folder={tmp_path / 'elastic'}"], tmp_path)
    yield pair
    for host in hosts:
        end_all(host)
    for process in pair.processes.values():
        process.wait()


def wait_for_step(folder: Path, step: int, pair: Hosts) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    path = folder / "metrics.jsonl"
    while not path.exists() or f'"step", "step": {step},' not in path.read_text():
        assert time.monotonic() < deadline, f"no step {step}:\n{pair.output()}"
        assert pair.processes[0].poll() is None, pair.output()
        time.sleep(0.05)


@pytest.mark.soak
def test_a_host_is_lost_and_comes_back(elastic: Hosts, tmp_path: Path) -> None:
    run_file = tmp_path / "tiny.toml"
    run, whole = make_run(run_file, "elastic", *OVERRIDES), make_run(run_file, "whole", *OVERRIDES)
    elastic.start(0)
    elastic.start(1)
    wait_for_step(run.folder, LOST_AFTER, elastic)
    elastic.kill(1)
    (tmp_path / "lost").touch()
    wait_for_step(run.folder, BACK_AFTER, elastic)
    elastic.start(1)
    codes = elastic.wait()
    said = elastic.output()
    assert codes == [0, 0], said
    assert "the plan needs 4 ranks (data 2 × shard 2 (stage 3)) and 2 are there: it goes on as shard 2" in said
    assert (
        f"resumed at step {LOST_AFTER} from memory" in said or f"resumed at step {LOST_AFTER - 1} from memory" in said
    )
    assert f"stopped at step {BACK_AFTER + 2} and saved" in said  # all agree a step after they are asked
    assert f"resumed at step {BACK_AFTER + 2} from" in said
    train_on_ranks(whole)
    assert [event["step"] for event in events(run.folder)] == list(range(1, NUM_STEPS + 1))
    assert losses(run.folder) == pytest.approx(losses(whole.folder), rel=1e-4)
    last = Checkpoint(run.folder / "checkpoints" / f"step-{NUM_STEPS:08d}")
    assert last.state["data"]["samples"] == NUM_STEPS * 16
    assert len({piece.file for entry in last.entries() for piece in entry.pieces}) == 4  # four ranks wrote the end


@pytest.mark.soak
def test_a_link_is_cut_and_comes_back(elastic: Hosts, hosts: list[str], tmp_path: Path) -> None:
    """Nothing breaks the connections: each side must find out by itself, and say whom it does not hear."""
    run_file = tmp_path / "tiny.toml"
    run, whole = make_run(run_file, "elastic", *OVERRIDES), make_run(run_file, "whole", *OVERRIDES)
    elastic.start(0)
    elastic.start(1)
    wait_for_step(run.folder, LOST_AFTER, elastic)
    elastic.cut()
    (tmp_path / "lost").touch()
    cut_at = time.monotonic()
    while any("no sign of life" not in elastic.log(index) for index in range(2)):
        assert time.monotonic() < cut_at + 45, elastic.output()
        time.sleep(0.05)
    seconds = time.monotonic() - cut_at
    wait_for_step(run.folder, BACK_AFTER, elastic)  # the host of the meeting point goes on alone
    elastic.kill(1)
    elastic.mend()
    elastic.start(1)
    codes = elastic.wait()
    said = elastic.output()
    assert codes == [0, 0], said
    paragraphs = [[line for line in elastic.log(index).splitlines() if "no sign of life" in line] for index in range(2)]
    assert [len(lines) for lines in paragraphs] == [1, 1], said
    for index, (paragraph,) in enumerate(paragraphs):
        other = hosts[1 - index]
        assert f"host {other}) do not answer" in paragraph or f"store of rank 0 (host {other})" in paragraph, paragraph
        assert re.search(r"waiting in \w+ over \w+ \(#\d+", paragraph), paragraph
    train_on_ranks(whole)
    assert [event["step"] for event in events(run.folder)] == list(range(1, NUM_STEPS + 1))
    assert losses(run.folder) == pytest.approx(losses(whole.folder), rel=1e-4)
    print(f"both sides said so within {seconds:.1f} s of the cut:\n" + "\n".join(lines[0] for lines in paragraphs))
