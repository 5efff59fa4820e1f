"""One job over two hosts, with torchrun in each."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosts_for_tests import ADDRESSES, PORT, end_all, hosts
from runs_for_tests import losses, make_run, train_on_ranks, write_run_file

from weft.checkpoint import Checkpoint

pytestmark = pytest.mark.processes

__all__ = ["hosts"]  # a fixture
DEADLINE_SECONDS = 300
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
