"""The cluster file that a measurement writes: an entry like those of the catalog, bound to the machine it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.bench.fit import LinkFit
from weft.cluster.decode_rates import DecodeRates
from weft.cluster.hardware import MeasuredCollective
from weft.cluster.topology import Topology, local_topology
from weft.version import VERSION


@dataclass(frozen=True)
class MeasuredMachine:
    """What was measured of a machine: rates of one device, and links. `inter` is None on one node."""

    num_nodes: int
    num_devices: int  # of a node: GPUs, or processes on the CPU
    memory_bytes: int  # of a device
    host_memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_second: float
    host_link_bytes_per_second: float | None
    intra: LinkFit
    backend: str
    date: str
    inter: LinkFit | None = None
    collectives: tuple[MeasuredCollective, ...] = ()
    decode: DecodeRates | None = None  # of a CPU


def cluster_text(found: MeasuredMachine, topology: Topology | None = None) -> str:
    """The TOML text of a cluster file, which `weft plan --cluster FILE` reads on the machine of `topology`."""
    where = topology or local_topology()
    text = json.dumps  # JSON strings are TOML strings
    lines = [
        f"title = {text(f'{where.device}, measured by weft bench')}",
        f"max_nodes = {found.num_nodes}",
        "",
        "[topology]  # this file is refused on a machine with another one; without this table, it is used anywhere",
        *(f"{name} = {text(value)}" for name, value in asdict(where).items()),
        "",
        "[node]",
        f"name = {text(where.device)}",
        f"num_devices = {found.num_devices}",
        f"host_memory_bytes = {found.host_memory_bytes}",
        f"num_cpu_cores = {where.num_cpu_cores}",
    ]
    if found.host_link_bytes_per_second is not None:
        lines.append(f"host_link_bytes_per_second = {found.host_link_bytes_per_second:.4g}")
    lines += [
        "",
        "[node.device]",
        f"name = {text(where.device)}",
        f"memory_bytes = {found.memory_bytes}",
        f"memory_bandwidth_bytes_per_second = {found.memory_bytes_per_second:.4g}",
        "calibration = 1.0  # the rates below are those of matmuls, not of a datasheet",
        "",
        "[node.device.peak_flops]",
        *(f"{dtype} = {flops:.4g}" for dtype, flops in found.peak_flops.items()),
        *_link("intra", found.intra, found.backend),
        *_link("inter", found.inter or found.intra, found.backend),
        "",
        "[sources]",
    ]
    measured = f"measured by weft {VERSION} bench over {found.backend}, {found.date}"
    not_measured = "" if found.inter is not None else "; one node: the link inside it"
    sources = {
        "max_nodes": measured,
        "topology": measured,
        "node": measured,
        "node.device": measured,
        "node.device.peak_flops": measured,
        "node.intra": f"{measured}, errors up to {found.intra.error:.0%}",
        "node.inter": f"{measured}{not_measured}",
    }
    if found.decode is not None:
        sources |= dict.fromkeys(("decode", "decode.search"), f"measured by weft {VERSION} bench, {found.date}")
    lines += [f"{text(name)} = {text(source)}" for name, source in sources.items()]
    for one in found.collectives:
        seconds = ", ".join(f"{value:.4g}" for value in one.seconds)
        lines += [
            *("", "[[collectives]]", f'operation = "{one.operation}"', f'algorithm = "{one.algorithm}"'),
            *(f"num_nodes = {one.num_nodes}", f"num_local = {one.num_local}"),
            *(f"sizes = {list(one.sizes)}", f"seconds = [{seconds}]"),
        ]
    if found.decode is not None:
        lines += decode_lines(found.decode)
    return "\n".join(lines) + "\n"


def decode_lines(found: DecodeRates) -> list[str]:
    """The tables of what a decode takes on a CPU."""
    lines = ["", "[decode]  # of one request, by one process; what each figure means: docs/cluster_files.md"]
    lines += [
        f"threads = {found.threads}",
        f"vocabulary_seconds = {found.vocabulary_seconds:.4g}",
        f"memory_spread = {found.memory_spread:.4g}",
        "",
        "[decode.search]",
    ]
    lines += _pairs(found.search)
    for name in ("products", "layers", "attention"):
        for one in getattr(found, name):
            lines += ["", f"[[decode.{name}]]", *_pairs(one)]
    return lines


def _pairs(table: Any) -> list[str]:
    return [f"{key} = {_figure(value)}" for key, value in asdict(table).items()]


def _figure(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_figure, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _link(name: str, link: LinkFit, backend: str) -> list[str]:
    return [
        "",
        f"[node.{name}]",
        f'name = "{backend} (measured)"',
        f"bandwidth_bytes_per_second = {link.bandwidth_bytes_per_second:.4g}",
        f"latency_seconds = {link.latency_seconds:.4g}",
        "share = 1.0",
    ]
