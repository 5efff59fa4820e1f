"""What a measured cluster file is bound to: the devices, cores and memory of the machine that was measured."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.cluster.local_gpus import gpus
from weft.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """A node as far as measurements depend on it. `num_gpus` is 0 on a machine without GPUs."""

    device: str
    num_gpus: int
    num_cpu_cores: int
    host_memory_gib: int


def local_topology() -> Topology:
    """The topology of this machine."""
    found = gpus()
    return Topology(
        found[0].name if found else cpu_model(), len(found), num_cpu_cores(), round(host_memory_bytes() / 2**30)
    )


def refuse_other_topology(path: Path, measured: Topology) -> None:
    """Raise ConfigError if this machine is not the one that a file was measured on."""
    here = asdict(local_topology())
    other = [
        f"{name} = {value!r} (here {here[name]!r})" for name, value in asdict(measured).items() if value != here[name]
    ]
    if other:
        raise ConfigError(
            f"{path} was measured on another machine: {', '.join(other)}; measure this one with weft bench machine "
            f"--write {path.name}, or remove the table [topology] to plan for that machine from here"
        )


def cpu_model() -> str:
    """The CPU's name, or its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or an architecture that does not say
        return platform.processor() or platform.machine()


def host_memory_bytes() -> int:
    """Physical memory, or the limit of the control group (a container, a batch job) if that is smaller."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:  # this version of control groups is not there
            continue
        if text.isdigit() and int(text) > 0:
            total = min(total, int(text))
    return total


def num_cpu_cores() -> int:
    """The number of cores that this process may use. On macOS, which has no affinity, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
