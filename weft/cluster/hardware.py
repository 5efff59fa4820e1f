"""Clusters: nodes x devices with memory, peak rates and links, and the time of a collective on them.

A cluster comes from the catalog `weft/cluster/catalog/*.toml` (`load("h100:32x8")`), where every figure states its
public source, from a file that `weft bench` wrote (`load("machine.toml")`), or from this machine (`load("local")`).
The planner uses two functions:

- `Cluster.axis_link`: the bandwidth and latency that one rank of an axis gets, inside or across nodes;
- `ring_seconds`: the time of a collective on such a link (latency a, bandwidth B, degree p, n bytes):
  all-reduce 2(p-1)a + 2(p-1)/p n/B; all-gather, reduce-scatter and all-to-all half of that; broadcast and reduce
  (p-1)a + n/B; send a + n/B. See Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
  Operations in MPICH" (2005).

All sizes are decimal bytes as datasheets print them (80 GB = 80e9), a few percent below what a driver reports.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.cluster.decode_rates import DecodeRates
from weft.cluster.local_gpus import gpus
from weft.cluster.topology import Topology, host_memory_bytes, num_cpu_cores, refuse_other_topology
from weft.errors import ConfigError, PlanError
from weft.schema import build_dataclass, nearest, nearest_of_all, read_toml

CATALOG = Path(__file__).parent / "catalog"
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send")

# Assumed, to be replaced by measurement: rates of shared memory or loopback between processes of one machine.
LOOPBACK_BYTES_PER_SECOND = 5e9
LOOPBACK_LATENCY_SECONDS = 50e-6


def _check_positive(value: Any) -> None:
    """Raise ConfigError if a figure is zero or negative. Only `latency_seconds` and `start_seconds` may be zero."""
    for item in dataclasses.fields(value):
        figure = getattr(value, item.name)
        if isinstance(figure, bool) or not isinstance(figure, (int, float)) or figure > 0:
            continue
        if item.name not in ("latency_seconds", "start_seconds") or figure < 0:
            raise ConfigError(f"{item.name} = {figure} of '{value.name}' must be greater than 0")


@dataclass(frozen=True)
class Device:
    """One accelerator as a process sees it (an MI250X is two devices). An empty `peak_flops` means unknown."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float | None  # None: unknown
    peak_flops: Mapping[str, float] = field(hash=False)  # dense matmul FLOP/s by dtype; only dtypes that exist
    num_processors: int | None = None  # multiprocessors, compute units; None: unknown
    calibration: float = 0.8  # the share of the peak that the best matmul reaches in training; see planner/kernels.py
    burst: float | None = None  # the share before the power limit lowers the clock; None: power is not the limit
    is_newer: bool = False  # has newer matmul instructions than those that FlashAttention-2 was written for
    reported_as: tuple[str, ...] = ()  # endings of the driver's device name, to recognise a local device

    def __post_init__(self) -> None:
        _check_positive(self)
        for dtype, flops in self.peak_flops.items():
            if dtype not in DTYPES:
                raise ConfigError(f"unknown dtype '{dtype}' in peak_flops{nearest(dtype, DTYPES)}")
            if flops <= 0:
                raise ConfigError(f"peak_flops.{dtype} = {flops} of '{self.name}' must be greater than 0")


@dataclass(frozen=True)
class Link:
    """A link. Its bandwidth is that of one direction: per device inside a node, per node (all NICs) between nodes."""

    name: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    num_nics: int = 1
    share: float | None = None  # the measured share of the bandwidth that collectives reach; None: the usual share
    start_seconds: float = 0.0  # the measured time of any collective in addition to its hops and bytes

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class Node:
    name: str
    device: Device
    num_devices: int
    intra: Link
    inter: Link
    host_memory_bytes: int
    num_cpu_cores: int
    host_link_bytes_per_second: float | None = None  # per device, one direction; None: the device is the host

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class MeasuredCollective:
    """Measured seconds of one collective over all ranks of one or several nodes, by size (`collective_choice.py`).

    A "send" is one message between two of these ranks.
    """

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    algorithm: Literal["flat", "library", "ring", "doubling"]
    num_nodes: int
    num_local: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ConfigError(
                f"collectives: {self.operation} by {self.algorithm} has {len(self.sizes)} sizes and "
                f"{len(self.seconds)} times; give a time for each size, and sizes that grow"
            )
        if min(self.num_nodes, self.num_local, *self.sizes) < 1 or min(self.seconds) <= 0:
            raise ConfigError(f"collectives: {self.operation} by {self.algorithm}: all numbers must be greater than 0")


class AxisLink(NamedTuple):
    """Bandwidth and latency that one rank of an axis gets while every group of that axis communicates."""

    bandwidth_bytes_per_second: float
    latency_seconds: float
    crosses_nodes: bool


@dataclass(frozen=True)
class Cluster:
    name: str
    node: Node
    num_nodes: int
    collectives: tuple[MeasuredCollective, ...] = ()
    decode: DecodeRates | None = None  # of a CPU; None: not measured

    def __post_init__(self) -> None:
        _check_positive(self)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.node.num_devices

    def measured(self, operation: str, inner: int, degree: int) -> MeasuredCollective | None:
        """What was measured of the library's call over `degree` ranks that are `inner` apart, on one node; None if
        nothing was. Collectives are measured over all ranks of a node, so they count for axes of that degree only.
        """
        for one in self.collectives:
            if (one.operation, one.algorithm, one.num_nodes) != (operation, "flat", 1) or self.num_nodes > 1:
                continue
            if operation == "send" or (inner == 1 and one.num_local == degree):
                return one
        return None

    def axis_link(self, inner: int, degree: int, is_send: bool = False) -> AxisLink:
        """The link of an axis of `degree` ranks, which are `inner` apart.

        `inner` is the product of the degrees of the axes inside this one, whose index varies faster. The axis stays
        in a node, on the intra link, if blocks of inner x degree ranks tile the node. Otherwise some group crosses
        nodes. A collective is as slow as its slowest group, so all groups are assumed to cross: `inner` groups leave
        a node together (at most one per device) and share its NICs, so a rank gets inter / min(num_devices, inner).
        A ring with several members in a node also uses the intra link and is never faster than that link. The rings of
        a collective together use all NICs of the members' node; a single send uses only the NICs next to its device.
        """
        if inner < 1 or degree < 1 or inner * degree > self.num_devices:
            raise PlanError(
                f"an axis of degree {degree} with {inner} ranks inside it needs {inner * degree} devices, "
                f"but {self.name} has {self.num_devices}; both must be at least 1 and their product must fit"
            )
        node = self.node
        if degree == 1 or self.num_nodes == 1 or node.num_devices % (inner * degree) == 0:
            return AxisLink(node.intra.bandwidth_bytes_per_second, node.intra.latency_seconds, False)
        bandwidth = node.inter.bandwidth_bytes_per_second / min(node.num_devices, inner)
        if inner < node.num_devices:
            bandwidth = min(bandwidth, node.intra.bandwidth_bytes_per_second)
        if is_send:
            num_own = max(1, node.inter.num_nics // node.num_devices)
            bandwidth = min(bandwidth, node.inter.bandwidth_bytes_per_second * num_own / node.inter.num_nics)
        return AxisLink(bandwidth, node.inter.latency_seconds, True)


def ring_seconds(
    op: str, num_bytes: float, degree: int, bandwidth_bytes_per_second: float, latency_seconds: float
) -> float:
    """The time of one collective over `degree` ranks. `num_bytes` is the size of the whole tensor; for all_to_all, of
    one rank's tensor.
    """
    if op not in OPS:
        raise ConfigError(f"unknown collective '{op}'{nearest(op, OPS)}")
    if num_bytes < 0 or degree < 1 or bandwidth_bytes_per_second <= 0 or latency_seconds < 0:
        raise ConfigError(
            f"{op} of {num_bytes} bytes over degree {degree} at {bandwidth_bytes_per_second} bytes/s and "
            f"{latency_seconds} s latency: bytes and latency must be >= 0, degree >= 1, bandwidth > 0"
        )
    if degree == 1:
        return 0.0
    whole = num_bytes / bandwidth_bytes_per_second
    hops = (degree - 1) * latency_seconds
    if op == "send":
        return latency_seconds + whole
    if op in ("broadcast", "reduce"):
        return hops + whole
    one_pass = hops + whole * (degree - 1) / degree
    return 2 * one_pass if op == "all_reduce" else one_pass


# ---- the catalog -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CatalogEntry:
    """One catalog file: a node, the number of nodes of a specific machine (None: no limit), and the sources.

    A file that `weft bench` wrote has the topology of the machine that was measured.
    """

    title: str
    node: Node
    sources: Mapping[str, str] = field(hash=False)
    max_nodes: int | None = None
    topology: Topology | None = None
    collectives: tuple[MeasuredCollective, ...] = ()
    decode: DecodeRates | None = None


def catalog_names() -> list[str]:
    """The names of the clusters in the catalog, sorted."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))


def read_entry(path: Path) -> CatalogEntry:
    """Read a catalog file. Raises ConfigError for an unknown or missing key, a figure without source, a source without
    figure.

    `node = "mi250x"` and `node.device = "a100-40"` take the node or the device of another file of the same folder,
    so that each figure and its source are written once.
    """
    table = read_toml(path)
    try:
        _check_sources(table)
        node = table.get("node")
        if isinstance(node, str):
            table["node"] = read_entry(_sibling(path, node)).node
        elif isinstance(node, dict) and isinstance(node.get("device"), str):
            node["device"] = read_entry(_sibling(path, node["device"])).node.device
        entry = build_dataclass(CatalogEntry, table)
        if entry.max_nodes is not None and entry.max_nodes < 1:
            raise ConfigError(f"max_nodes = {entry.max_nodes} must be greater than 0")
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    return entry


@lru_cache(maxsize=64)
def _catalog_entry(path: Path) -> CatalogEntry:
    """Read a file of weft's own catalog, once: it does not change."""
    return read_entry(path)


def load(spec: str) -> Cluster:
    """Load a cluster: `h100` (one node), `h100:32x8` (nodes x devices per node), `frontier:4096` (nodes), `local`,
    `local:1x4` (this machine), or a file like those of the catalog (`machine.toml`, `machine.toml:1x4`).
    """
    match = re.fullmatch(r"([^:\s]+)(?::([0-9]{1,9})(?:x([0-9]{1,9}))?)?", spec)
    if match is None:
        raise ConfigError(
            f"cluster '{spec}' is not of the form name, name:nodes or name:nodesxdevices; write e.g. h100:32x8"
        )
    name, num_nodes = match[1], int(match[2] or 1)
    num_devices = int(match[3]) if match[3] else None
    if num_nodes < 1 or num_devices == 0:
        raise ConfigError(f"cluster '{spec}' asks for zero nodes or devices; write at least {name}:1x1")
    if name == "local":
        if num_nodes > 1:
            raise ConfigError(f"cluster '{spec}' asks for {num_nodes} nodes; local is one machine, write local:1xN")
        return local_cluster(num_devices)
    if name.endswith(".toml"):
        entry = read_entry(Path(name))
        if entry.topology is not None:
            refuse_other_topology(Path(name), entry.topology)
    elif name in catalog_names():
        entry = _catalog_entry(CATALOG / f"{name}.toml")
    else:
        raise ConfigError(f"unknown cluster '{name}'{nearest_of_all(name, [*catalog_names(), 'local'])}")
    if entry.max_nodes is not None and num_nodes > entry.max_nodes:
        raise ConfigError(
            f"cluster '{spec}' asks for {num_nodes} nodes but {entry.title} has {entry.max_nodes}; "
            f"use at most {name}:{entry.max_nodes}"
        )
    return Cluster(name, _use_devices(entry.node, num_devices, spec), num_nodes, entry.collectives, entry.decode)


def _use_devices(node: Node, num_devices: int | None, spec: str) -> Node:
    """The node with only `num_devices` in use. A device uses the NICs next to it, so NICs are reduced in proportion."""
    if num_devices is None or num_devices == node.num_devices:
        return node
    if num_devices > node.num_devices:
        raise ConfigError(
            f"cluster '{spec}' asks for {num_devices} devices per node but {node.name} has {node.num_devices}; "
            f"use at most {node.num_devices} and more nodes"
        )
    num_nics = math.ceil(node.inter.num_nics * num_devices / node.num_devices)
    bandwidth = node.inter.bandwidth_bytes_per_second * num_nics / node.inter.num_nics
    inter = replace(node.inter, bandwidth_bytes_per_second=bandwidth, num_nics=num_nics)
    return replace(node, num_devices=num_devices, inter=inter)


def _sibling(path: Path, name: str) -> Path:
    known = [other.stem for other in path.parent.glob("*.toml") if other.stem != path.stem]
    if name not in known:
        raise ConfigError(f"refers to unknown entry '{name}'{nearest(name, known)}")
    return path.with_name(f"{name}.toml")


def _figures(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The dotted paths of all numbers in a table."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{path}{key}.")
        elif isinstance(value, (int, float)):
            yield f"{path}{key}"


def _check_sources(table: Mapping[str, Any]) -> None:
    """Raise ConfigError unless [sources] names each figure, by its own path or by that of its table (for rates from one
    row of a datasheet).
    """
    sources = table.get("sources")
    if not isinstance(sources, Mapping):
        raise ConfigError("missing table [sources]: name the public source of every figure")
    figures = list(_figures({key: value for key, value in table.items() if key != "sources"}))
    tables = {figure.rpartition(".")[0] for figure in figures}
    for figure in figures:
        text = sources.get(figure, sources.get(figure.rpartition(".")[0]))
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f'figure \'{figure}\' has no source; add "{figure}" = "title, URL" to [sources]')
    for key in sources:
        if key not in figures and key not in tables:
            raise ConfigError(f"source '{key}' names no figure{nearest(key, figures)}")


# ---- this machine ----------------------------------------------------------------------------------------------


def local_cluster(num_devices: int | None = None, on_cpu: bool = False, share: bool = False) -> Cluster:
    """This machine as a cluster of one node: its CUDA devices, or `num_devices` (default 1) processes on its CPU.

    Peak rates are known only for a CUDA device that the catalog recognises. They are unknown for a CPU, so no MFU is
    printed. Processes on a CPU each get an equal part of its memory. If ranks `share` GPUs, there may be more ranks
    than GPUs, each with an equal part of a GPU's memory.
    """
    loopback = Link("loopback (assumed)", LOOPBACK_BYTES_PER_SECOND, LOOPBACK_LATENCY_SECONDS)
    memory_bytes, num_cores = host_memory_bytes(), num_cpu_cores()
    found = () if on_cpu else gpus()
    if not found:
        num_devices = num_devices or 1
        device = Device("CPU", memory_bytes // num_devices, None, {})
        node = Node("local", device, num_devices, loopback, loopback, memory_bytes, num_cores)
        return Cluster("local", node, 1)
    num_sharing = math.ceil((num_devices or 1) / len(found))
    if num_sharing > 1 and not share:
        raise ConfigError(
            f"{num_devices} ranks need as many GPUs, and this machine has {len(found)}; use a plan for {len(found)}, "
            f"train on the CPU (train.device=cpu), or let ranks share GPUs, for tests only (train.share_gpus=true)"
        )
    known = recognise(found[0].name)
    device = Device(found[0].name, found[0].memory_bytes // num_sharing, None, {})
    intra, host_link = loopback, LOOPBACK_BYTES_PER_SECOND
    if known is not None:
        # The memory is what the driver reports; rates and links come from the datasheet.
        device = replace(known.device, memory_bytes=device.memory_bytes)
        intra, host_link = known.intra, known.host_link_bytes_per_second or LOOPBACK_BYTES_PER_SECOND
    node = Node("local", device, num_devices or len(found), intra, loopback, memory_bytes, num_cores, host_link)
    return Cluster("local", node, 1)


def usual_precision(spec: str, on_cpu: bool) -> tuple[Literal["bf16", "fp32"], str]:
    """The default precision of a run on the cluster `spec`, and the reason: bf16 on GPUs that support it, else fp32."""
    if spec.partition(":")[0] != "local":
        device = load(spec).node.device
        has_bf16, name = "bf16" in device.peak_flops, device.name
    else:
        found = () if on_cpu else gpus()
        without = [one for one in found if not one.has_bf16]
        has_bf16, name = bool(found) and not without, (without or found)[0].name if found else "a CPU"
    if has_bf16 or name == "a CPU":
        return "bf16" if has_bf16 else "fp32", f"usual on {name}"
    return "fp32", f"{name} has no bf16"


def recognise(reported: str) -> Node | None:
    """The catalog node whose device a driver reports under this name; None when it is not in the catalog.

    The end of the name must match, since a longer name is another board of the same chip with other rates
    ("NVIDIA H200" is in the catalog, "NVIDIA H200 NVL" is not).
    """
    for name in catalog_names():
        entry = _catalog_entry(CATALOG / f"{name}.toml")
        # A specific machine (max_nodes) may connect the device by other links, so only the vendor's own node counts.
        if entry.max_nodes is None and reported.endswith(entry.node.device.reported_as):
            return entry.node
    return None


def describe(cluster: Cluster, precision: str = "bf16") -> str:
    """Two lines of text that describe the cluster: its devices, with their peak rate in a precision, and its links."""
    node, device = cluster.node, cluster.node.device
    dtype = next((name for name in (precision, "bf16", "fp16", "fp32") if name in device.peak_flops), None)
    peak = f"{device.peak_flops[dtype] / 1e12:g} TFLOP/s {dtype}" if dtype else "peak unknown"
    return (
        f"{cluster.name}: {cluster.num_nodes} x {node.num_devices} {device.name} = {cluster.num_devices} device"
        f"{'s' * (cluster.num_devices > 1)}, each {device.memory_bytes / 1e9:.4g} GB, {peak}\n"
        f"  in a node {_describe_link(node.intra, 'device')}; between nodes {_describe_link(node.inter, 'node')}; "
        f"host {node.host_memory_bytes / 1e9:.4g} GB, {node.num_cpu_cores} cores"
    )


def _describe_link(link: Link, per: str) -> str:
    gigabytes = link.bandwidth_bytes_per_second / 1e9
    return f"{gigabytes:g} GB/s per {per} ({link.name}, {link.latency_seconds * 1e6:g} us)"
