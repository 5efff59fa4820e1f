"""Goodput: the share of time spent on training that is not lost to failures. Closed formulas after Young and Daly.

Failures are random, with a mean time M = `mtbf_seconds` between failures anywhere in the cluster. The state is saved
after every interval t of training, and each save stalls training for d. A save is usable w later, when it is written. A
failure costs the restart time r and the work since the last usable save. With failures also during saves and restarts,
an interval takes (Daly, 2006; here w is added to r)

    T = M exp((r + w) / M) (exp((t + d) / M) - 1),    goodput = t / T

Daly's interval, which is close to the best one, is

    t = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 2M / 9) - d,    M where d >= 2M;    Young's is its first term.

The ASSUMED_ constants below replace properties of a cluster that are not known.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from weft.cluster.hardware import Cluster
from weft.errors import ConfigError

ASSUMED_STORAGE_BYTES_PER_SECOND = 1e9  # for each node, while all nodes read or write
ASSUMED_RESTART_SECONDS = 60.0  # from a failure to the first step, without the time to read the state
ASSUMED_HOST_LINK_BYTES_PER_SECOND = 10e9  # from a device to its host, if the catalog has no figure
DISK, MEMORY = "checkpoints on disk", "copies in memory, one node lost at a time"  # save methods
STATE_BYTES = {"fp64": 24, "fp32": 12, "bf16": 12}  # per parameter: master weight and two moments
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "y": 365 * 86400.0}


@dataclass(frozen=True)
class SaveMethod:
    """One method to save the state, with its best interval and goodput.

    A save stalls training for `stall_seconds` and is usable `write_seconds` later.
    """

    name: str
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    interval_seconds: float
    goodput: float


@dataclass(frozen=True)
class Failures:
    """The cost of failures under each save method."""

    mtbf_seconds: float  # of the whole cluster
    state_bytes: int
    ways: tuple[SaveMethod, ...]

    @property
    def best(self) -> SaveMethod:
        """The save method with the highest goodput."""
        return max(self.ways, key=lambda way: way.goodput)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, with the assumptions."""
        assumed = {
            "storage_bytes_per_second_of_a_node": ASSUMED_STORAGE_BYTES_PER_SECOND,
            "restart_seconds": ASSUMED_RESTART_SECONDS,
        }
        return {**asdict(self), "assumed": assumed}

    def lines(self) -> list[str]:
        """Returns a description as lines of text."""
        found = [
            f"one failure in {duration(self.mtbf_seconds)}; the state has {self.state_bytes / 1e9:,.4g} GB; assumed: "
            f"{ASSUMED_STORAGE_BYTES_PER_SECOND / 1e9:g} GB/s of storage a node, {ASSUMED_RESTART_SECONDS:g} s for a "
            f"restart before the state is read"
        ]
        return found + [
            f"{way.name}: a save every {duration(way.interval_seconds)} (stalls {duration(way.stall_seconds)}, counts "
            f"{duration(way.write_seconds)} later), restart {duration(way.restart_seconds)}: goodput {way.goodput:.2%}"
            for way in self.ways
        ]


def young_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Young's interval between saves, in seconds."""
    return math.sqrt(2 * stall_seconds * mtbf_seconds)


def daly_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Daly's interval between saves, in seconds: a higher-order version of Young's."""
    ratio = stall_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    return young_interval(stall_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


def goodput(
    interval_seconds: float,
    stall_seconds: float,
    restart_seconds: float,
    mtbf_seconds: float,
    write_seconds: float = 0.0,
) -> float:
    """The share of time that ends as training; 0 if failures are so frequent that no interval completes."""
    lost, interval = (restart_seconds + write_seconds) / mtbf_seconds, (interval_seconds + stall_seconds) / mtbf_seconds
    if lost + interval > 500:
        return 0.0
    return interval_seconds / (mtbf_seconds * math.exp(lost) * math.expm1(interval))


def failures(
    num_parameters: int, precision: str, cluster: Cluster, mtbf_seconds: float, offload: float = 0.0
) -> Failures:
    """Returns the cost of failures on a cluster: with checkpoints on disk, and with copies in other hosts' memory.

    `offload` is the share of the plan's state in host memory. If it is above 0, training waits until a checkpoint is
    written (see `train/checkpoints.py`).
    """
    state_bytes = num_parameters * STATE_BYTES[precision]
    of_node = state_bytes / cluster.num_nodes
    link = cluster.node.host_link_bytes_per_second or ASSUMED_HOST_LINK_BYTES_PER_SECOND
    stall = state_bytes / cluster.num_devices / link
    disk = of_node / ASSUMED_STORAGE_BYTES_PER_SECOND
    waits, counts_later = (disk, 0.0) if offload else (stall, disk)
    ways = [_way(DISK, waits, counts_later, ASSUMED_RESTART_SECONDS + disk, mtbf_seconds)]
    if cluster.num_nodes > 1:  # on one node, a copy in memory is lost with the node
        wire = of_node / cluster.node.inter.bandwidth_bytes_per_second
        restart = ASSUMED_RESTART_SECONDS + wire
        ways.append(_way(MEMORY, stall, wire, restart, mtbf_seconds))
    return Failures(mtbf_seconds, state_bytes, tuple(ways))


def _way(name: str, stall: float, write: float, restart: float, mtbf: float) -> SaveMethod:
    interval = max(daly_interval(stall, mtbf), write)  # a save starts after the one before is written
    return SaveMethod(name, stall, write, restart, interval, goodput(interval, stall, restart, mtbf, write))


def cluster_mtbf(of_device: str | None, of_cluster: str | None, num_devices: int) -> float | None:
    """The mean seconds between failures of the whole cluster, from --mtbf (of one device) or --mtbf-cluster.

    Returns None if neither is given.
    """
    if of_device is not None and of_cluster is not None:
        raise ConfigError(f"--mtbf {of_device} (of a device) and --mtbf-cluster {of_cluster} say the same; give one")
    if of_device is not None:
        return parse_duration(of_device, "--mtbf") / num_devices
    return None if of_cluster is None else parse_duration(of_cluster, "--mtbf-cluster")


def parse_duration(text: str, what: str) -> float:
    """Parses a duration such as "20s", "3h", "1.5d" or "5y" into seconds. `what` names the option in errors."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdy])", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{what} {text} is no time; give a number above 0 and s, m, h, d or y, e.g. 3h")
    return float(match[1]) * UNITS[match[2]]


def duration(seconds: float) -> str:
    """Formats seconds with a fitting unit, e.g. `3.5 h`."""
    for unit in ("y", "d", "h", "m"):
        if seconds >= UNITS[unit]:
            return f"{seconds / UNITS[unit]:.3g} {'min' if unit == 'm' else unit}"
    return f"{seconds:.3g} s"
