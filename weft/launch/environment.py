"""Detects the launcher of this process and joins the world group.

The same command runs under torchrun, SLURM's srun and MPI's mpirun, which are recognised by the environment variables
that each of them sets. Without a launcher, `weft` starts the ranks of one machine itself (agent.py). This is the only
file that depends on the launcher.

    detect(environ)                   -> RankInfo, or None when no launcher started this process
    rendezvous(environ, rank_info)    -> the address and port of rank 0's store
    join_job(rank_info, ..)           -> meets the other processes of the job and returns their store
    init_process_group(rank_info, ..) -> joins the world group and returns this rank's device

The store of a job on one host listens on loopback only, because a store obeys every process that can connect.
"""

import itertools
import math
import os
import re
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # as documented

from weft.comm.backends import DeviceType, choose_backend, prepare_cuda
from weft.errors import LaunchError, LostRankError
from weft.launch.fork_server import LISTENER_VARIABLE, LOOPBACK, REJOIN_VARIABLE

Launcher = Literal["none", "weft", "torchrun", "slurm", "mpi"]

_COMMANDS: dict[Launcher, str] = {
    "none": "python", "weft": "weft", "torchrun": "torchrun", "slurm": "srun", "mpi": "mpirun",
}  # fmt: skip
# The prefix of the elastic run id of ranks that weft's own agent started. It distinguishes them from torchrun's.
LOCAL_RUN_ID_PREFIX = "weft-local-"
_START_KEY = "weft/start"
_START_POLL_SECONDS = 0.01
# SLURM gives steps that srun did not start (batch scripts, interactive shells) numbers above this.
_SLURM_MAX_STEP_ID = 0xFFFFFFF0


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process in its job and on its host. The defaults describe a process without a launcher."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1
    num_hosts: int = 1
    launcher: Launcher = "none"

    def __post_init__(self) -> None:
        command = _COMMANDS[self.launcher]
        if not 0 <= self.rank < self.num_ranks:
            raise LaunchError(f"{command} gave rank {self.rank}, which is not below {self.num_ranks} ranks")
        if not 0 <= self.local_rank < self.num_local_ranks:
            raise LaunchError(
                f"{command} gave local rank {self.local_rank}, "
                f"which is not below {self.num_local_ranks} ranks on this host"
            )
        if not (self.num_local_ranks <= self.num_ranks and 1 <= self.num_hosts <= self.num_ranks):
            raise LaunchError(
                f"{command} gave {self.num_local_ranks} ranks on this host and {self.num_hosts} hosts, "
                f"which do not fit {self.num_ranks} ranks in all"
            )


# --- the launcher of this process ---------------------------------------------------------------------------------


def detect(environ: Mapping[str, str]) -> RankInfo | None:
    """Read this process's `RankInfo` from the launcher's variables; None if no launcher started it.

    The innermost launcher wins: torchrun may run under srun, and mpirun's and hydra's daemons are often started by
    srun, so SLURM's variables come last. `srun --mpi=pmi2` sets PMI_RANK, but only hydra sets MPI_LOCALRANKID.
    """
    if any(name in environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _from_torchrun(environ)
    if any(name in environ for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        prefix = "OMPI_COMM_WORLD_"
        return _from_mpi(environ, [prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")])
    in_step = _in_slurm_step(environ)
    if "MPI_LOCALRANKID" in environ or ("PMI_RANK" in environ and not in_step):
        return _from_mpi(environ, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"])
    return _from_slurm(environ) if in_step else None


def _from_torchrun(environ: Mapping[str, str]) -> RankInfo:
    rank, num_ranks = _integers(environ, ["RANK", "WORLD_SIZE"], "torchrun")
    _require(environ, ["MASTER_ADDR", "MASTER_PORT"], "torchrun")
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    local_names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    if run_id is None and not any(name in environ for name in local_names):
        # Set by hand. A rank's device depends on which ranks share its host, which only a loopback address tells.
        if environ["MASTER_ADDR"] in ("localhost", LOOPBACK, "::1"):
            return RankInfo(rank, num_ranks, rank, num_ranks, 1, "torchrun")
        raise LaunchError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not; "
            "export LOCAL_RANK and LOCAL_WORLD_SIZE too, or start the ranks with torchrun"
        )
    local_rank, num_local_ranks = _integers(environ, local_names, "torchrun")
    if "GROUP_WORLD_SIZE" in environ:
        (num_hosts,) = _integers(environ, ["GROUP_WORLD_SIZE"], "torchrun")
    else:
        num_hosts = math.ceil(num_ranks / max(1, num_local_ranks))
    launcher: Launcher = "weft" if (run_id or "").startswith(LOCAL_RUN_ID_PREFIX) else "torchrun"
    return RankInfo(rank, num_ranks, local_rank, num_local_ranks, num_hosts, launcher)


def _from_mpi(environ: Mapping[str, str], names: list[str]) -> RankInfo:
    rank, num_ranks, local_rank, num_local_ranks = _integers(environ, names, "mpirun")
    # MPI does not give the number of hosts. This is exact if every host runs the same number of ranks.
    num_hosts = math.ceil(num_ranks / max(1, num_local_ranks))
    return RankInfo(rank, num_ranks, local_rank, num_local_ranks, num_hosts, "mpi")


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks.

    A batch script has SLURM_PROCID and the job's SLURM_NTASKS but no step. An interactive shell has a reserved step
    number. A step of one task is a shell (`srun --pty bash`) or a script; in it weft starts its own ranks.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    (step,) = _integers(environ, ["SLURM_STEP_ID"], "srun")
    return step <= _SLURM_MAX_STEP_ID and _slurm_num_tasks(environ) > 1


def _slurm_num_tasks(environ: Mapping[str, str]) -> int:
    return _integers(environ, [_step_or_job(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")], "srun")[0]


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    rank, local_rank, host_index = _integers(environ, ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"], "srun")
    hosts_name = _step_or_job(environ, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
    (num_hosts,) = _integers(environ, [hosts_name], "srun")
    # Not SLURM_NTASKS_PER_NODE: it repeats an option of the batch script even if the step was given another value.
    tasks_name = _step_or_job(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    _require(environ, [tasks_name], "srun")
    tasks = _tasks_per_host(tasks_name, environ[tasks_name])
    if not 0 <= host_index < len(tasks):
        raise LaunchError(f"SLURM_NODEID = {host_index} is outside {tasks_name} = {environ[tasks_name]!r}")
    return RankInfo(rank, _slurm_num_tasks(environ), local_rank, tasks[host_index], num_hosts, "slurm")


def _step_or_job(environ: Mapping[str, str], step_name: str, job_name: str) -> str:
    """The name of the step's variable if SLURM sets it, else the job's, which may describe a larger allocation."""
    return step_name if step_name in environ else job_name


def _tasks_per_host(name: str, text: str) -> list[int]:
    """Expand SLURM's short form: "4(x2),3" is [4, 4, 3]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"{name} = {text!r} does not read like 4(x2),3")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _require(environ: Mapping[str, str], names: Sequence[str], command: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"{command}'s variables are half set: {', '.join(missing)} missing; "
            f"start with {command}, or unset its other variables"
        )


def _integers(environ: Mapping[str, str], names: Sequence[str], command: str) -> list[int]:
    _require(environ, names, command)
    for name in names:
        if not re.fullmatch(r"[0-9]+", environ[name]):
            raise LaunchError(f"{name} = {environ[name]!r} is not a whole number; {command} sets it")
    return [int(environ[name]) for name in names]


def is_elastic(environ: Mapping[str, str], rank_info: RankInfo) -> bool:
    """Whether torchrun may restart the ranks, possibly with another number of them: --max-restarts is above 0."""
    return rank_info.launcher == "torchrun" and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def starts_again(environ: Mapping[str, str]) -> bool:
    """Whether the launcher, or weft's own agent, has started the ranks of this job before."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def check_world(rank_info: RankInfo, num_ranks: int, degrees: Mapping[str, int]) -> None:
    """Raise LaunchError if the launcher started another number of processes than the plan's degrees need."""
    if rank_info.num_ranks == num_ranks:
        return
    product = " × ".join(f"{axis} = {degree}" for axis, degree in degrees.items() if degree > 1)
    needs = f"{num_ranks} process{'es' if num_ranks > 1 else ''}" + (f" ({product})" if product else "")
    raise LaunchError(
        f"the plan needs {needs} but {_COMMANDS[rank_info.launcher]} started {rank_info.num_ranks}; "
        f"start {num_ranks} or change the plan"
    )


# --- where the ranks meet -----------------------------------------------------------------------------------------


def rendezvous(environ: Mapping[str, str], rank_info: RankInfo) -> tuple[str, int]:
    """Returns the address and port of rank 0's store. Every rank computes the same result without communication."""
    if "MASTER_ADDR" in environ or "MASTER_PORT" in environ:
        _require(environ, ["MASTER_ADDR", "MASTER_PORT"], _COMMANDS[rank_info.launcher])
        (port,) = _integers(environ, ["MASTER_PORT"], _COMMANDS[rank_info.launcher])
        if not 1 <= port <= 65535:
            raise LaunchError(f"MASTER_PORT = {port} is not a port; use 1 to 65535")
        return environ["MASTER_ADDR"], port
    if rank_info.num_ranks == 1:
        return LOOPBACK, 0  # no other rank connects, so any free port will do
    if rank_info.launcher == "slurm":
        _require(environ, ["SLURM_JOB_ID", "SLURM_STEP_ID"], "srun")
        port = _port(f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}")
        if rank_info.num_hosts == 1:
            return LOOPBACK, port
        # Task 0 runs on the first host of the step in every distribution but `arbitrary`.
        name = _step_or_job(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        _require(environ, [name], "srun")
        return expand_hosts(environ[name])[0], port
    if rank_info.num_hosts > 1:
        raise LaunchError(
            f"{_COMMANDS[rank_info.launcher]} runs {rank_info.num_ranks} ranks on {rank_info.num_hosts} hosts "
            "but does not tell where rank 0 is; export MASTER_ADDR and MASTER_PORT, "
            "e.g. mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=29500"
        )
    # Hydra sets no job name. Two such jobs on one host need a MASTER_PORT each; the error about the used port says so.
    return LOOPBACK, _port(environ.get("PMIX_NAMESPACE", "mpi"))


def _port(job: str) -> int:
    return 20000 + zlib.crc32(job.encode()) % 40000


def expand_hosts(nodelist: str) -> list[str]:
    """Expand SLURM's short form of host names: "gpu[003-004,9],login1" is gpu003, gpu004, gpu9, login1."""
    element = r"(?:[^\s,\[\]]|\[[0-9,-]+\])+"
    if not re.fullmatch(rf"{element}(?:,{element})*", nodelist):
        raise LaunchError(f"node list {nodelist!r} does not read like gpu[003-005,9],login1")
    hosts: list[str] = []
    for name in re.findall(element, nodelist):
        # re.split with one group returns text and bracket contents alternately.
        parts = re.split(r"\[([0-9,-]+)\]", name)
        choices = [_numbers(part, nodelist) if index % 2 else [part] for index, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """Expand "003-005,9", keeping leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(f"node list {nodelist!r} has a range {part!r} that does not read like 003-005")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def take_device(
    rank_info: RankInfo, device: DeviceType, share_gpus: bool = False, ranks_per_device: int = 1
) -> torch.device:
    """Returns this rank's device and makes it torch's current device. Call it before anything initialises CUDA:
    otherwise every rank of a host would hold memory on the host's first GPU.

    `ranks_per_device` consecutive ranks share a GPU.
    """
    if device == "cpu":
        return torch.device("cpu")
    prepare_cuda(_num_sharing(rank_info))
    own = torch.device("cuda", _cuda_index(rank_info, share_gpus, ranks_per_device))
    torch.cuda.set_device(own)
    return own


def init_process_group(
    rank_info: RankInfo,
    device: DeviceType,
    timeout: timedelta,
    share_gpus: bool = False,
    store: Store | None = None,
    ranks_per_device: int = 1,
) -> torch.device:
    """Join the world group and return this rank's device. `timeout` limits the rendezvous and every collective.

    `store` is that of `join_job`, if the job has more processes than the world.
    """
    rank_device = take_device(rank_info, device, share_gpus, ranks_per_device)
    store = join_job(rank_info, timeout) if store is None else PrefixStore("world", store)
    backend = choose_backend(device, _num_sharing(rank_info) if device == "cuda" else 1, ranks_per_device)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.num_ranks,
        timeout=timeout,
        device_id=rank_device if "nccl" in backend else None,
    )
    return rank_device


def join_launched(degrees: Mapping[str, int], device: torch.device, ranks_per_device: int) -> torch.device:
    """Join the world group, with torch's timeout, if a launcher started this process, and return this rank's device.

    Raises LaunchError if the launcher started another number of processes than the product of `degrees`.
    """
    rank_info = detect(os.environ)
    if rank_info is None:
        return device
    check_world(rank_info, math.prod(degrees.values()), degrees)
    kind: DeviceType = "cuda" if device.type == "cuda" else "cpu"
    return init_process_group(rank_info, kind, dist.constants.default_pg_timeout, ranks_per_device=ranks_per_device)


def join_job(rank_info: RankInfo, timeout: timedelta) -> Store:
    """Meet the other processes of the job, and return their store, under a prefix that is new at each start."""
    if rank_info.num_hosts == 1 and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address, port = rendezvous(os.environ, rank_info)
    try:
        store = _open_store(address, port, rank_info, timeout)
        if REJOIN_VARIABLE in os.environ:  # the others have agreed on it before
            start_id = store.get(_START_KEY).decode()
        else:
            start_id = _agree_on_start_id(store, rank_info, timeout)
    except (OSError, dist.DistError) as error:
        raise LaunchError(
            f"rank {rank_info.rank} of {rank_info.num_ranks} did not meet the others at {address}:{port} ({error}); "
            "start every rank, or export another MASTER_ADDR and MASTER_PORT"
        ) from error
    if rank_info.rank == 0:
        store.set(_START_KEY, start_id)
    return PrefixStore(f"weft/{start_id}", store)


def world_store() -> Store:
    """Returns a new connection to the world's store. A wait on it does not block users of other connections."""
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore("weft/lookout", store.clone())  # type: ignore[attr-defined]


def _agree_on_start_id(store: Store, rank_info: RankInfo, timeout: timedelta) -> str:
    """Agree on a random id of this start of the ranks, which prefixes their keys in the store.

    After a restart torchrun's store still holds the addresses of dead ranks, which must not be read. torchrun's count
    of restarts cannot serve as the id: it differs between agents if one joined later. So each rank writes a random
    word and waits for rank 0's answer to that word. Rank 0 keeps answering until all other ranks have confirmed.
    """
    own = os.urandom(8).hex()
    if rank_info.rank > 0:
        store.set(f"weft/word/{rank_info.rank}", own)
        store.wait([f"weft/answer/{own}"], timeout)
        start_id = store.get(f"weft/answer/{own}").decode()
        store.add(f"weft/{start_id}/heard", 1)
        return start_id
    answered = dict.fromkeys(range(1, rank_info.num_ranks), "")
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"weft/{own}/heard", 0) < len(answered):
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks are missing after {timeout.total_seconds():.0f} s")
        for rank, word in answered.items():
            if store.check([f"weft/word/{rank}"]) and (new_word := store.get(f"weft/word/{rank}").decode()) != word:
                answered[rank] = new_word
                store.set(f"weft/answer/{new_word}", own)
        time.sleep(_START_POLL_SECONDS)
    return own


def current_store() -> Store:
    """Returns the store of the world group."""
    return dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]  # torch has no public name for it


def rejoin_world(store: Store, name: str, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """Form a new world group of these ranks, on CPUs, after `shutdown`. `name` prefixes its keys in the store and must
    not have been used before. Returns the store under that prefix.
    """
    named = PrefixStore(name, store)
    try:
        dist.init_process_group("gloo", store=named, rank=rank, world_size=num_ranks, timeout=timeout)
    except (RuntimeError, dist.DistError) as error:
        raise LostRankError(f"{num_ranks} ranks did not meet again: {str(error).splitlines()[0]}") from error
    return named


def shutdown() -> None:
    """Leave the world group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _num_sharing(rank_info: RankInfo) -> int:
    """The number of ranks on this host that use the GPUs which this rank sees."""
    return 1 if _sees_own_gpu_only(rank_info) else rank_info.num_local_ranks


def _sees_own_gpu_only(rank_info: RankInfo) -> bool:
    """Whether each rank sees only its own GPU, as with srun --gpus-per-task=1."""
    return rank_info.launcher in ("slurm", "mpi") and torch.cuda.device_count() == 1


def _cuda_index(rank_info: RankInfo, share_gpus: bool = False, ranks_per_device: int = 1) -> int:
    num_devices, index = torch.cuda.device_count(), rank_info.local_rank // ranks_per_device
    if _sees_own_gpu_only(rank_info) and rank_info.num_local_ranks > ranks_per_device > 1:
        raise LaunchError(
            f"plan.ranks_per_device = {ranks_per_device}, but each of the {rank_info.num_local_ranks} ranks of this "
            f"host sees a GPU of its own; let all of them see all GPUs of the host (no --gpus-per-task)"
        )
    if _sees_own_gpu_only(rank_info):
        return 0
    if index >= num_devices and ranks_per_device > 1 and not share_gpus:
        raise LaunchError(
            f"local rank {rank_info.local_rank} has no GPU: this host shows {num_devices}, for {ranks_per_device} "
            f"ranks each (plan.ranks_per_device); start no more than {num_devices * ranks_per_device} ranks per host"
        )
    if index >= num_devices and not share_gpus:
        raise LaunchError(
            f"local rank {rank_info.local_rank} has no GPU: this host shows {num_devices}; start no more ranks per "
            f"host than it has, train on the CPU, or let ranks share GPUs, for tests only (train.share_gpus=true, "
            f"weft serve --share-gpus)"
        )
    return index % num_devices


def _open_store(address: str, port: int, rank_info: RankInfo, timeout: timedelta) -> Store:
    """Connect to the elastic agent's store, or, if there is none, to the store that rank 0 serves."""
    serves = rank_info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves and address == LOOPBACK:
        return _serve_loopback(port, rank_info.num_ranks, timeout)
    return TCPStore(address, port, rank_info.num_ranks, serves, timeout)


def _serve_loopback(port: int, num_ranks: int | None, timeout: timedelta) -> TCPStore:
    """Serve a store that only this host can reach. By default TCPStore listens on every interface."""
    given = os.environ.pop(LISTENER_VARIABLE, None)  # a socket that was bound before the ranks were forked
    listener = socket.socket(fileno=int(given)) if given is not None else socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, num_ranks, True, timeout, master_listen_fd=listener.detach())
