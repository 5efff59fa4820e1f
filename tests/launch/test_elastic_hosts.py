"""Jobs over several hosts: one that is lost and comes back, plans for the ranks that are left, torchrun in each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hosts_for_tests import ADDRESSES, PORT, end_all, hosts, ip
from runs_for_tests import DEEP, events, losses, make_run, train_on_ranks, write_run_file
from waiting_for_tests import DEADLINE_SECONDS, wait_until

from weft.checkpoint import Checkpoint
from weft.commands.run_planning import _nearest, fit_to_ranks
from weft.errors import PlanError
from weft.launch.environment import RankInfo, is_elastic
from weft.plan import Pipe, Plan

pytestmark = pytest.mark.processes

__all__ = ["hosts"]  # a fixture
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
    path = folder / "metrics.jsonl"

    def is_done() -> bool:
        assert pair.processes[0].poll() is None, pair.output()
        return path.exists() and f'"step", "step": {step},' in path.read_text()

    wait_until(is_done, lambda: f"step {step} ({pair.output()})")


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


# --- another plan for another number of ranks: which degrees change, and what is refused


def place(num_ranks: int) -> RankInfo:
    return RankInfo(0, num_ranks, 0, num_ranks, 1, "torchrun")


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "axes", "accumulation"),
    [
        (["plan.data=2", "plan.shard=2"], 4, "data 2 × shard 2 (stage 3)", 1),  # as it was
        (["plan.data=2", "plan.shard=2"], 2, "shard 2 (stage 3)", 2),  # memory stays, so does the micro-batch
        (["plan.data=2", "plan.shard=2"], 8, "data 4 × shard 2 (stage 3)", 1),
        (["plan.data=2", "plan.shard=2"], 1, "1 process", 4),
        (["plan.shard=4"], 2, "shard 2 (stage 3)", 2),
        (["plan.pipe=2", "plan.data=2", "plan.micro_batch=2"], 2, "pipe 2 (1f1b)", 8),
        (["plan.pipe=4", "plan.micro_batch=2"], 2, "pipe 2 (1f1b)", 8),
        (["plan.tensor.x=2", "plan.data=2"], 2, "x 2", 2),
    ],
)
def test_the_nearest_plan(tmp_path: Path, overrides: list[str], num_ranks: int, axes: str, accumulation: int) -> None:
    run = make_run(write_run_file(tmp_path, DEEP), "run", *overrides)
    fitted = fit_to_ranks(run, place(num_ranks))
    assert fitted.plan.describe_axes() == axes
    assert fitted.plan.num_ranks == num_ranks
    assert fitted.split.batch == run.split.batch
    if num_ranks <= run.plan.num_ranks:
        assert (fitted.split.micro_batch, fitted.split.accumulation) == (run.split.micro_batch, accumulation)


def test_ranks_that_no_plan_suits_are_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    with pytest.raises(PlanError, match=r"needs 4 ranks \(data 4\), 3 are there, and no plan near it suits them"):
        fit_to_ranks(make_run(run_file, "run", "plan.data=4"), place(3))
    with pytest.raises(PlanError, match="the degrees of the model do not divide them"):
        fit_to_ranks(make_run(run_file, "run", "plan.tensor.x=2"), place(3))


def test_every_near_plan_has_the_ranks_and_comes_once() -> None:
    plan = Plan(data=2, pipe=Pipe(degree=2), micro_batch=1)
    for num_ranks in range(1, 17):
        plans = [replace(near, micro_batch=None) for near in _nearest(plan, num_ranks)]
        assert len(plans) == len(set(plans))
        assert {near.num_ranks for near in plans} == {num_ranks}
    assert next(_nearest(plan, 8)).degrees == Plan(data=4, pipe=Pipe(degree=2)).degrees


def test_only_a_torchrun_that_may_restart_is_elastic() -> None:
    assert is_elastic({"TORCHELASTIC_MAX_RESTARTS": "3"}, place(2))
    assert not is_elastic({"TORCHELASTIC_MAX_RESTARTS": "0"}, place(2))
    assert not is_elastic({"TORCHELASTIC_MAX_RESTARTS": "3"}, RankInfo(0, 2, 0, 2, 1, "slurm"))


# --- one job over two hosts, with torchrun in each


NUM_LOCAL_RANKS = 2

# Adds up rank + 1 over all ranks, and says what it found where.
SUM_OF_RANKS = """
import os
from datetime import timedelta
import torch
from weft.launch import environment as launch
torch.set_num_threads(1)
place = launch.detect(os.environ)
launch.init_process_group(place, "cpu", timedelta(seconds=60))
number = torch.tensor([place.rank + 1.0])
torch.distributed.all_reduce(number)
launch.shutdown()
print(f"{place.launcher}: rank {place.rank} of {place.num_ranks}, local {place.local_rank} of "
      f"{place.num_local_ranks}, {place.num_hosts} hosts: {number.item()}\\n", end="", flush=True)
"""


def run_on(hosts: Sequence[str], command: Sequence[str], folder: Path) -> tuple[list[int], list[str]]:
    """Run `command` as two ranks on each host; the exit codes and the outputs of both hosts' torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={NUM_LOCAL_RANKS}"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", "--rdzv-id=test", "--no-python"]
    root = str(Path(__file__).parents[2])
    outputs = [folder / f"{host}.log" for host in hosts]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for host, address, output in zip(hosts, ADDRESSES, outputs, strict=True):
            environ = os.environ | {"GLOO_SOCKET_IFNAME": host, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
            # torchrun would learn its address and role from the machine's name, which means loopback in both.
            own = [f"--local-addr={address}", f"--rdzv-conf=is_host={int(host == hosts[0])}"]
            line = ["ip", "netns", "exec", host, *torchrun, *own, *command]
            with open(output, "wb") as file:
                processes.append(subprocess.Popen(line, env=environ, stdout=file, stderr=file, start_new_session=True))
        codes = [process.wait(DEADLINE_SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("the job did not end:\n" + "\n".join(output.read_text() for output in outputs))
    finally:
        for host in hosts:
            end_all(host)
        for process in processes:
            process.wait()
    return codes, [output.read_text() for output in outputs]


def test_one_job_over_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    codes, outputs = run_on(hosts, [sys.executable, "-c", SUM_OF_RANKS], tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    # Which host's ranks come first is the agents' choice.
    lines = sorted(line for output in outputs for line in output.splitlines() if line.startswith("torchrun:"))
    assert lines == [f"torchrun: rank {rank} of 4, local {rank % 2} of 2, 2 hosts: 10.0" for rank in range(4)]
    assert [output.count("torchrun: rank") for output in outputs] == [2, 2]


@pytest.mark.soak
def test_a_run_over_two_hosts_has_the_curve_of_one_process(hosts: list[str], tmp_path: Path) -> None:
    """The whole command, four ranks that hold half of the state each, against the unsplit run."""
    run_file = write_run_file(tmp_path)
    layout = ["plan.data=2", "plan.shard=2"]
    run, whole = make_run(run_file, "two hosts", *layout), make_run(run_file, "whole")
    command = [sys.executable, "-m", "weft", "train", str(run_file), *layout, f"folder={run.folder}"]
    codes, outputs = run_on(hosts, command, tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    assert sum(output.count("local: 2 x 2 CPU = 4 devices") for output in outputs) == 1  # rank 0 speaks
    train_on_ranks(whole)
    assert len(losses(run.folder)) == 15
    assert losses(run.folder) == pytest.approx(losses(whole.folder), rel=1e-4)
    checkpoint = Checkpoint(run.folder / "checkpoints" / "step-00000015")
    files = {piece.file for entry in checkpoint.entries() for piece in entry.pieces}
    assert len(files) == 4  # every rank wrote its share
