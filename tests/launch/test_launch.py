"""Launchers by table, meeting in forked ranks, and real local ranks that end in every way they can."""

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from waiting_for_tests import DEADLINE_SECONDS, wait_until

from weft.errors import LaunchError
from weft.launch import environment as launch
from weft.launch import stop_signal
from weft.launch.agent import describe_failures, start_local
from weft.launch.environment import RankInfo, check_world, detect, expand_hosts, rendezvous
from weft.launch.fork_server import ForkServer

pytestmark = pytest.mark.processes

FORK = multiprocessing.get_context("fork")

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu7",
    "MASTER_PORT": "29500",
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
SRUN = {
    "SLURM_JOB_ID": "200505",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[003-005]",
}
SBATCH = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1836187649",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}


# --- who started this process -------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        ({"PATH": "/bin", "MASTER_ADDR": "gpu7"}, None),
        (TORCHRUN, RankInfo(5, 8, 1, 4, 2, "torchrun")),
        (TORCHRUN | SRUN, RankInfo(5, 8, 1, 4, 2, "torchrun")),  # torchrun started by srun
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "weft-local-1"}, RankInfo(5, 8, 1, 4, 2, "weft")),
        (PLAIN, RankInfo(1, 2, 1, 2, 1, "torchrun")),
        (PLAIN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, RankInfo(1, 2, 0, 1, 2, "torchrun")),
        (SRUN, RankInfo(9, 11, 1, 3, 3, "slurm")),
        (SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}, RankInfo(4, 11, 0, 4, 3, "slurm")),
        # A step smaller than its allocation, and the variables that SLURM's PMI adds.
        (
            SRUN
            | {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "PMI_RANK": "1", "PMI_SIZE": "2"}
            | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"},
            RankInfo(1, 2, 1, 2, 1, "slurm"),
        ),
        (SBATCH, None),  # a batch script
        (SRUN | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, None),  # salloc's interactive step
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # srun --pty bash
        (OPEN_MPI, RankInfo(3, 4, 1, 2, 2, "mpi")),
        (OPEN_MPI | SRUN, RankInfo(3, 4, 1, 2, 2, "mpi")),  # mpirun's daemons were started by srun
        (HYDRA, RankInfo(2, 4, 2, 4, 1, "mpi")),
        (HYDRA | SRUN, RankInfo(2, 4, 2, 4, 1, "mpi")),
    ],
)
def test_detect(environ: dict[str, str], place: RankInfo | None) -> None:
    assert detect(environ) == place


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        *((without(TORCHRUN, name), [name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        *((without(TORCHRUN, name), [name]) for name in ("MASTER_ADDR", "MASTER_PORT")),
        ({"WORLD_SIZE": "4"}, ["RANK"]),
        (PLAIN | {"MASTER_ADDR": "gpu7"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        (PLAIN | {"LOCAL_RANK": "1"}, ["LOCAL_WORLD_SIZE", "missing"]),
        *((without(SRUN, name), [name]) for name in ("SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")),
        *((without(SRUN, name), [name]) for name in ("SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE")),
        (SRUN | {"SLURM_TASKS_PER_NODE": "4(2),3"}, ["SLURM_TASKS_PER_NODE", "4(2),3", "4(x2),3"]),
        (SRUN | {"SLURM_NODEID": "3"}, ["SLURM_NODEID = 3", "4(x2),3"]),
        *((without(OPEN_MPI, name), [name]) for name in OPEN_MPI if name != "PMIX_NAMESPACE"),
        *((without(HYDRA, name), [name]) for name in HYDRA),
        (TORCHRUN | {"RANK": "-1"}, ["RANK = '-1'", "whole number"]),
        (TORCHRUN | {"RANK": "8"}, ["torchrun", "rank 8", "8 ranks"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ["mpirun", "local rank 2", "2 ranks on this host"]),
        (HYDRA | {"MPI_LOCALNRANKS": "5"}, ["mpirun", "5 ranks on this host", "4 ranks in all"]),
    ],
)
def test_detect_refuses(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert [word for word in words if word not in str(caught.value)] == []


def test_check_world() -> None:
    place = RankInfo(0, 6, 0, 6, 1, "torchrun")
    check_world(place, 6, {"data": 6})
    with pytest.raises(LaunchError) as caught:
        check_world(place, 8, {"data": 2, "pipe": 1, "shard": 4})
    assert str(caught.value) == (
        "the plan needs 8 processes (data = 2 × shard = 4) but torchrun started 6; start 8 or change the plan"
    )
    with pytest.raises(LaunchError, match="needs 1 process but srun started 6; start 1 or"):
        check_world(RankInfo(0, 6, 0, 6, 1, "slurm"), 1, {"data": 1})


# --- where the ranks meet -----------------------------------------------------------------------------------------


def place_of(environ: Mapping[str, str]) -> RankInfo:
    place = detect(environ)
    assert place is not None
    return place


def test_rendezvous_as_told() -> None:
    assert rendezvous(TORCHRUN, place_of(TORCHRUN)) == ("gpu7", 29500)
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    for environ in (SRUN, OPEN_MPI, HYDRA):
        assert rendezvous(environ | told, place_of(environ)) == ("10.0.0.1", 1)
    assert rendezvous({}, RankInfo()) == ("127.0.0.1", 0)


def test_rendezvous_of_slurm() -> None:
    place = place_of(SRUN)
    address, port = rendezvous(SRUN, place)
    assert address == "gpu003"
    ports = {rendezvous(SRUN | {"SLURM_STEP_ID": str(step)}, place)[1] for step in range(50)}
    assert port in ports
    assert all(20000 <= port < 60000 for port in ports)
    assert len(ports) > 45  # steps of one job seldom share a port
    assert rendezvous(SRUN | {"SLURM_STEP_NODELIST": "gpu[004-005]"}, place) == ("gpu004", port)
    assert rendezvous(SRUN, RankInfo(0, 2, 0, 2, 1, "slurm")) == ("127.0.0.1", port)


def test_rendezvous_of_mpi_on_one_host() -> None:
    place = RankInfo(0, 2, 0, 2, 1, "mpi")
    address, port = rendezvous(OPEN_MPI, place)
    assert address == "127.0.0.1"
    assert 20000 <= port < 60000
    assert rendezvous(OPEN_MPI | {"PMIX_NAMESPACE": "2"}, place)[1] != port
    assert rendezvous(HYDRA, place) == rendezvous({}, place)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("environ", "place", "words"),
    [
        (OPEN_MPI, place_of(OPEN_MPI), ["2 hosts", "mpirun -x MASTER_ADDR=", "-x MASTER_PORT="]),
        (SRUN | {"MASTER_ADDR": "gpu1"}, place_of(SRUN), ["MASTER_PORT missing"]),
        (SRUN | {"MASTER_PORT": "1"}, place_of(SRUN), ["MASTER_ADDR missing"]),
        (TORCHRUN | {"MASTER_PORT": "65536"}, place_of(TORCHRUN), ["MASTER_PORT = 65536", "65535"]),
        (TORCHRUN | {"MASTER_PORT": "http"}, place_of(TORCHRUN), ["MASTER_PORT = 'http'"]),
        (without(SRUN, "SLURM_JOB_ID"), place_of(SRUN), ["SLURM_JOB_ID missing"]),
        (without(SRUN, "SLURM_JOB_NODELIST"), place_of(SRUN), ["SLURM_JOB_NODELIST missing"]),
    ],
)
def test_rendezvous_refuses(environ: dict[str, str], place: RankInfo, words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        rendezvous(environ, place)
    assert [word for word in words if word not in str(caught.value)] == []


def test_expand_hosts() -> None:
    assert expand_hosts("gpu[003-005,9],login1") == ["gpu003", "gpu004", "gpu005", "gpu9", "login1"]
    assert expand_hosts("rack[1-2]-n[09-10].ib") == [f"rack{r}-n{n}.ib" for r in "12" for n in ("09", "10")]
    for bad in ("", "a,,b", "gpu[", "gpu[1-", "gpu[5-3]", "gpu[]", "gpu[1-2-3]", "a b", "gpu[a]"):
        with pytest.raises(LaunchError, match="node list"):
            expand_hosts(bad)


host_ranges = st.tuples(st.integers(0, 200), st.integers(1, 5), st.integers(1, 4))  # first, count, width
host_groups = st.tuples(
    st.text("abz059.-", max_size=4).map(lambda middle: f"a{middle}z"),
    st.lists(host_ranges, max_size=3),
    st.text("abz059", max_size=3).map(lambda end: end and f"-{end}"),
)


@given(st.lists(host_groups, min_size=1, max_size=4))
def test_expand_hosts_undoes_the_short_form(groups: list[tuple[str, list[tuple[int, int, int]], str]]) -> None:
    short: list[str] = []
    hosts: list[str] = []
    for prefix, ranges, suffix in groups:
        texts = []
        for first, count, width in ranges:
            last = first + count - 1
            texts.append(f"{first:0{width}}" if count == 1 else f"{first:0{width}}-{last:0{width}}")
            hosts += [f"{prefix}{number:0{width}}{suffix}" for number in range(first, last + 1)]
        if not ranges:
            hosts.append(prefix + suffix)
        short.append(prefix + (f"[{','.join(texts)}]" if texts else "") + suffix)
    assert expand_hosts(",".join(short)) == hosts


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_per_host_undoes_the_short_form(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{times})" if times > 1 else str(tasks) for tasks, times in runs)
    assert launch._tasks_per_host("X", text) == [tasks for tasks, times in runs for _ in range(times)]


# --- the world group, in forked ranks: importing torch anew would cost seconds each --------------------------------


def fork(target: Callable[[], None]) -> BaseProcess:
    process = FORK.Process(target=target, daemon=True)
    process.start()
    return process


def end(process: BaseProcess) -> int:
    """Wait for a process and return its exit code; one that hangs is killed, which no test expects."""
    process.join(DEADLINE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail("the process did not end")
    assert process.exitcode is not None
    return process.exitcode


def sum_of_ranks(environ: Mapping[str, str]) -> None:
    """What a rank does: find its place, join, add up rank + 1 over all ranks; exit code 0 when the sum is right."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    place = detect(os.environ) or RankInfo()
    device = launch.init_process_group(place, "cpu", timedelta(seconds=DEADLINE_SECONDS))
    number = torch.tensor([place.rank + 1.0], device=device)
    dist.all_reduce(number)
    assert number.item() == place.num_ranks * (place.num_ranks + 1) / 2
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    launch.shutdown()
    assert not dist.is_initialized()
    launch.shutdown()  # leaving twice is no error: it is called on the way out of an error too


def is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def free_port() -> int:
    """One that no program is given that asks for any port (on Linux those are above)."""
    return next(port for port in (random.randrange(20000, 32000) for _ in range(1000)) if is_free(port))


def namespace_of_a_free_port() -> str:
    names = (uuid.uuid4().hex for _ in range(1000))
    return next(name for name in names if launch._port(name) < 32000 and is_free(launch._port(name)))


def test_join_under_mpi_plain_variables_and_alone() -> None:
    namespace = namespace_of_a_free_port()
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    mpi = [dict(zip(names, (r, "2", r, "2"), strict=True)) | {"PMIX_NAMESPACE": namespace} for r in "01"]
    plain = [PLAIN | {"RANK": rank, "MASTER_PORT": str(free_port())} for rank in "0"]
    plain += [plain[0] | {"RANK": "1"}]
    ranks = [fork(lambda environ=environ: sum_of_ranks(environ)) for environ in [*mpi, *plain, {}]]  # type: ignore[misc]
    assert [end(rank) for rank in ranks] == [0] * 5


def test_ranks_join_again_after_a_restart() -> None:
    """The agent's store outlives its ranks: the second generation must not look for the first one's addresses."""
    receiver, sender = FORK.Pipe(duplex=False)

    def serve() -> None:
        store = launch._serve_loopback(0, None, timedelta(seconds=DEADLINE_SECONDS))
        sender.send_bytes(str(store.port).encode())
        time.sleep(DEADLINE_SECONDS)

    agent = fork(serve)
    environ = TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": receiver.recv_bytes().decode()}
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}

    def die_after_joining(rank: str) -> None:
        os.environ.update(environ | {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": "0"})
        launch.init_process_group(place_of(os.environ), "cpu", timedelta(seconds=DEADLINE_SECONDS))
        dist.barrier()
        os._exit(9)

    def come_back(rank: str) -> None:
        sum_of_ranks(environ | {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": "1"})

    first = [fork(lambda rank=rank: die_after_joining(rank)) for rank in "01"]  # type: ignore[misc]
    assert [end(rank) for rank in first] == [9, 9]
    late = fork(lambda: come_back("1"))
    time.sleep(1)  # rank 1 looks for rank 0 while the store holds only the dead one's address
    assert [end(rank) for rank in (fork(lambda: come_back("0")), late)] == [0, 0]
    agent.kill()
    agent.join()


def test_join_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = RankInfo(0, 2, 0, 2, 1, "torchrun")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=rf"rank 0 of 2 .* at 127.0.0.1:{port} .*in use.*MASTER_PORT"):
            launch.init_process_group(place, "cpu", timedelta(seconds=5))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(LaunchError, match=r"rank 0 of 2 did not meet the others.*start every rank"):
        launch.init_process_group(place, "cpu", timedelta(seconds=1))


def test_cuda_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert launch._cuda_index(RankInfo(7, 8, 3, 4, 2, "slurm")) == 3
    with pytest.raises(LaunchError, match="local rank 4 has no GPU: this host shows 4; start no more"):
        launch._cuda_index(RankInfo(4, 8, 4, 8, 1, "torchrun"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch._cuda_index(RankInfo(3, 4, 3, 4, 1, "slurm")) == 0  # srun --gpus-per-task=1
    with pytest.raises(LaunchError, match="local rank 1 has no GPU"):
        launch._cuda_index(RankInfo(1, 2, 1, 2, 1, "weft"))


# --- starting local ranks -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("exit_codes", "line", "status"),
    [
        ({1: 3}, "rank 1 left with status 3", 3),
        ({1: 3, 0: -15, 2: -15}, "rank 1 left with status 3", 3),
        ({2: 1, 0: 1}, "ranks 0, 2 left with status 1", 1),
        ({0: 1, 2: -11}, "rank 2 was killed by SIGSEGV; rank 0 left with status 1", 139),
        ({0: -15, 1: -15}, "ranks 0, 1 were killed by SIGTERM", 143),
        ({3: -9}, "rank 3 was killed by SIGKILL (by hand, or by the kernel when memory ran out)", 137),
    ],
)
def test_describe_failures(exit_codes: dict[int, int], line: str, status: int) -> None:
    assert describe_failures(exit_codes) == (line, status)


def become(command: list[str]) -> None:
    """The rank's program: another one."""
    os.execvp(command[0], command)


class Parent:
    """A process that runs `start_local`, as `weft train` would, with its ranks' files and its stderr in a folder."""

    def __init__(self, folder: Path, num_ranks: int, command: list[str], before: Callable[[], object]) -> None:
        self.folder = folder
        self._process = fork(lambda: self._run(num_ranks, command, before))
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _run(self, num_ranks: int, command: list[str], before: Callable[[], object]) -> None:
        with open(self.folder / "stderr", "w") as file:
            os.dup2(file.fileno(), 2)
            sys.stderr = file  # pytest's own would not lead there
            before()
            with ForkServer(become) as fork_server:
                status = start_local(fork_server, num_ranks, command, {"FOLDER": str(self.folder)})
        os._exit(status)

    def read(self, name: str) -> str:
        """The content of a file that a rank writes, as soon as it is there."""
        wait_until((self.folder / name).exists, lambda: f"{name} (stderr: {self.stderr})")
        return (self.folder / name).read_text()

    def end(self) -> int:
        return end(self._process)

    def clean_up(self) -> None:
        """After a test that failed half way: two interrupts end the ranks too."""
        for _ in range(2):
            if self._process.is_alive():
                os.kill(self.pid, signal.SIGINT)
                self._process.join(1)

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()


# Each rank's script starts with this; `write` publishes a file whole.
PROLOGUE = """
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
def write(name, text=""):
    path = os.path.join(os.environ["FOLDER"], name + rank)
    with open(path + ".part", "w") as file:
        file.write(str(text))
    os.rename(path + ".part", path)
"""
WAIT_AND_SAVE = """
worker = subprocess.Popen(["sleep", "600"])
def save(number, frame):
    if os.path.exists(os.path.join(os.environ["FOLDER"], "asked" + rank)):
        return
    write("asked")
    while not os.path.exists(os.path.join(os.environ["FOLDER"], "go")):
        time.sleep(0.01)
    write("saved", worker.poll())
    worker.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
write("ready", os.getpid())
while True:
    time.sleep(0.05)
"""
WAIT_WHATEVER_HAPPENS = """
signal.signal(signal.SIGTERM, lambda number, frame: write("asked"))
write("ready", os.getpid())
while True:
    time.sleep(0.05)
"""


class Start:
    """Starts parents in a test's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.parents: list[Parent] = []

    def command(self, num_ranks: int, command: list[str], before: Callable[[], object] = lambda: None) -> Parent:
        self.parents.append(Parent(self._folder, num_ranks, command, before))
        return self.parents[-1]

    def script(
        self, num_ranks: int, script: str, *arguments: str, before: Callable[[], object] = lambda: None
    ) -> Parent:
        # -S -E: ranks without torch start in a few milliseconds
        return self.command(num_ranks, [sys.executable, "-S", "-E", "-c", PROLOGUE + script, *arguments], before)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    for parent in start.parents:
        parent.clean_up()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_that_succeed(start: Start) -> None:
    script = """
write("environ", "\\n".join(f"{name}={value}" for name, value in os.environ.items()))
write("argument", sys.argv[1])
port = format(int(os.environ["MASTER_PORT"]), "04X")
lines = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/self/net/" + name)]
listening = [line[1].split(":") for line in lines if line[3] == "0A"]
write("listening", " ".join(address for address, its_port in listening if its_port == port))
while rank == "0" and not os.path.exists(os.path.join(os.environ["FOLDER"], "listening1")):
    time.sleep(0.01)  # rank 0 holds the socket
"""
    parent = start.script(2, script, "$$ ${local_rank}", before=lambda: os.environ.pop("OMP_NUM_THREADS", None))
    assert parent.end() == 0
    assert parent.stderr == ""
    for rank in "01":
        environ = dict(line.split("=", 1) for line in parent.read("environ" + rank).splitlines() if "=" in line)
        assert detect(environ) == RankInfo(int(rank), 2, int(rank), 2, 1, "weft")
        assert environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert parent.read("argument" + rank) == "$$ ${local_rank}"  # as given
        assert parent.read("listening" + rank) == "0100007F"  # 127.0.0.1 and nothing else


def test_omp_num_threads_of_the_user_stays(start: Start) -> None:
    script = 'write("threads", os.environ["OMP_NUM_THREADS"])'
    parent = start.script(1, script, before=lambda: os.environ.update(OMP_NUM_THREADS="17"))
    assert parent.end() == 0
    assert parent.read("threads0") == "17"


def test_local_ranks_join(start: Start) -> None:
    """The whole way once: started, placed, joined through the agent's store, summed."""
    script = """
import os, sys
from datetime import timedelta
sys.path.insert(0, sys.argv[1])
import torch
from weft.launch import environment as launch
place = launch.detect(os.environ)
launch.init_process_group(place, "cpu", timedelta(seconds=120))
number = torch.tensor([place.rank + 1.0])
torch.distributed.all_reduce(number)
launch.shutdown()
open(f"{os.environ['FOLDER']}/sum{place.rank}", "w").write(str(number.item()))
"""
    parent = start.command(2, [sys.executable, "-c", script, str(Path(launch.__file__).parents[1])])
    assert (parent.end(), parent.stderr) == (0, "")
    assert [parent.read(f"sum{rank}") for rank in range(2)] == ["3.0", "3.0"]


def test_a_rank_that_fails(start: Start) -> None:
    parent = start.script(3, 'write("pid", os.getpid()); rank == "1" and sys.exit(3); time.sleep(60)')
    assert parent.end() == 3
    assert parent.stderr == "weft: rank 1 left with status 3\n"
    assert not is_alive(int(parent.read("pid1")))


def test_a_rank_that_is_killed(start: Start) -> None:
    parent = start.script(2, 'write("pid", os.getpid()); time.sleep(60)')
    pids = [int(parent.read(f"pid{rank}")) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    assert parent.end() == 128 + signal.SIGKILL
    assert parent.stderr == "weft: rank 1 was killed by SIGKILL (by hand, or by the kernel when memory ran out)\n"
    assert [is_alive(pid) for pid in pids] == [False, False]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save(start: Start, number: signal.Signals) -> None:
    def before() -> None:
        signal.signal(number, signal.SIG_DFL)
        stop_signal.SAME_PRESS_SECONDS, stop_signal.ENDS_SECONDS = DEADLINE_SECONDS, 0

    parent = start.script(2, WAIT_AND_SAVE, before=before)
    for rank in range(2):
        parent.read(f"ready{rank}")
    os.kill(parent.pid, number)
    for rank in range(2):
        parent.read(f"asked{rank}")
    os.kill(parent.pid, number)  # wrappers pass on what the terminal sends too: that is not a second request
    (parent.folder / "go").touch()
    assert parent.end() == 0
    assert [parent.read(f"saved{rank}") for rank in range(2)] == ["None", "None"]  # its data worker still ran
    assert parent.stderr == f"weft: {number.name}: the ranks save and stop; Ctrl-C once more kills them\n"


def test_ignored_signals_stay_ignored(start: Start) -> None:
    parent = start.script(1, WAIT_AND_SAVE, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    parent.read("ready0")
    os.kill(parent.pid, signal.SIGHUP)
    (parent.folder / "go").touch()
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.end() == 0
    assert "SIGHUP" not in parent.stderr


def test_a_second_interrupt_kills(start: Start) -> None:
    parent = start.script(2, WAIT_WHATEVER_HAPPENS, before=lambda: setattr(stop_signal, "SAME_PRESS_SECONDS", 0))
    pids = [int(parent.read(f"ready{rank}")) for rank in range(2)]
    os.kill(parent.pid, signal.SIGINT)
    for rank in range(2):
        parent.read(f"asked{rank}")
    os.kill(parent.pid, signal.SIGINT)
    assert parent.end() == 128 + signal.SIGKILL
    assert "weft: killing the ranks" in parent.stderr
    assert [is_alive(pid) for pid in pids] == [False, False]


def test_ranks_that_never_save_are_killed(start: Start) -> None:
    parent = start.script(1, WAIT_WHATEVER_HAPPENS, before=lambda: setattr(stop_signal, "SAVE_SECONDS", 0.3))
    pid = int(parent.read("ready0"))
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.end() == 128 + signal.SIGKILL
    assert "not saved within 0 s; killing the ranks" in parent.stderr
    assert not is_alive(pid)


def test_a_signal_before_the_ranks_have_started(start: Start) -> None:
    def send_early() -> None:
        begin = ForkServer.start

        def send_and_begin(self: ForkServer, *arguments: Any) -> list[int]:
            signal.raise_signal(signal.SIGTERM)
            return begin(self, *arguments)

        ForkServer.start = send_and_begin  # type: ignore[method-assign]
        stop_signal.ENDS_SECONDS = DEADLINE_SECONDS

    parent = start.command(2, ["sleep", "60"], send_early)
    assert parent.end() == 128 + signal.SIGTERM
    assert parent.stderr == "weft: stopped by SIGTERM; there was nothing to save\n"


def test_the_parent_is_left_as_it_was() -> None:
    """In this very process: handlers and environment are restored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    environ = dict(os.environ)
    with ForkServer(become) as fork_server:
        assert start_local(fork_server, 1, ["true"], {"EXTRA": "1"}) == 0
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert dict(os.environ) == environ
