"""The catalog is strict and sourced; links follow the node boundary; collective times follow their formulas."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.cluster import hardware as clusters
from weft.cluster.hardware import (
    CATALOG,
    Cluster,
    Device,
    Link,
    Node,
    catalog_names,
    describe,
    load,
    local_cluster,
    read_entry,
    ring_seconds,
)
from weft.cluster.local_gpus import Gpu
from weft.errors import ConfigError, PlanError

NODES = ["a100-40", "a100-80", "b200", "b300", "gb200", "gb300", "gh200", "h100", "h100-500w", "h200", "h800"]
NODES += ["mi250x", "mi355x", "v100-16", "v100-32"]
MACHINES = {"alps": 2688, "frontera": 8368, "frontier": 9856, "lassen": 792, "perlmutter": 1536, "selene": 560}
MACHINES["summit"] = 4608

SMALL = """
title = "Small"
max_nodes = 2
[node]
name = "node"
num_devices = 2
host_memory_bytes = 10
num_cpu_cores = 4
host_link_bytes_per_second = 1.0
[node.device]
name = "device"
memory_bytes = 5
memory_bandwidth_bytes_per_second = 7.0
[node.device.peak_flops]
fp32 = 3.0
[node.intra]
name = "wire"
bandwidth_bytes_per_second = 8.0
latency_seconds = 0.0
[node.inter]
name = "net"
bandwidth_bytes_per_second = 4.0
latency_seconds = 1.0
[sources]
"max_nodes" = "s"
"node.num_devices" = "s"
"node.host_memory_bytes" = "s"
"node.num_cpu_cores" = "s"
"node.host_link_bytes_per_second" = "s"
"node.device.memory_bytes" = "s"
"node.device.memory_bandwidth_bytes_per_second" = "s"
"node.device.peak_flops" = "s"
"node.intra.bandwidth_bytes_per_second" = "s"
"node.intra.latency_seconds" = "s"
"node.inter.bandwidth_bytes_per_second" = "s"
"node.inter.latency_seconds" = "s"
"""


def small_cluster(num_nodes: int = 4, num_devices: int = 8, intra: float = 400.0, inter: float = 80.0) -> Cluster:
    node = Node(
        "node",
        Device("device", 1, 1.0, {}),
        num_devices,
        Link("intra", intra, 1e-6),
        Link("inter", inter, 5e-6, num_nics=4),
        host_memory_bytes=1,
        num_cpu_cores=1,
    )
    return Cluster("small", node, num_nodes)


def write(tmp_path: Path, text: str, name: str = "small") -> Path:
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    return path


# ---- the catalog


def test_catalog_holds_exactly_the_promised_names() -> None:
    assert catalog_names() == sorted([*NODES, *MACHINES])


@pytest.mark.parametrize("name", [*NODES, *MACHINES])
def test_every_figure_of_every_file_has_a_public_source(name: str) -> None:
    table = tomllib.loads((CATALOG / f"{name}.toml").read_text())
    sources = table.pop("sources")

    def walk(value: Any, path: str) -> list[str]:
        if isinstance(value, dict):
            return [figure for key, item in value.items() for figure in walk(item, f"{path}.{key}")]
        return [path[1:]] if isinstance(value, (int, float)) else []

    figures = walk(table, "")
    assert figures
    for figure in figures:
        rates = "node.device.peak_flops"
        source = sources[rates] if figure.startswith(rates + ".") else sources[figure]
        marks = ("assumed, to be replaced by measurement", "(not re-checked)", "measured on")
        is_marked = any(mark in source for mark in marks)
        assert "https://" in source or "http://" in source or is_marked, (figure, source)


@pytest.mark.parametrize("name", [*NODES, *MACHINES])
def test_figures_have_plausible_units(name: str) -> None:
    entry = read_entry(CATALOG / f"{name}.toml")
    node, device = entry.node, entry.node.device
    assert entry.max_nodes == MACHINES.get(name)
    assert 16e9 <= device.memory_bytes <= 288e9
    assert device.memory_bandwidth_bytes_per_second is not None
    assert 100e9 <= device.memory_bandwidth_bytes_per_second <= 8e12
    assert all(1e12 <= flops <= 5.1e15 for flops in device.peak_flops.values())
    assert {"fp64", "fp32"} <= set(device.peak_flops)
    assert 50e9 <= node.intra.bandwidth_bytes_per_second <= 900e9
    # A NIC moves between 100 and 800 Gb/s.
    assert 11e9 <= node.inter.bandwidth_bytes_per_second / node.inter.num_nics <= 100e9
    assert 1e-6 <= node.intra.latency_seconds <= node.inter.latency_seconds <= 50e-6
    racks = node.num_devices // 72 or 1 / 9  # in racks of 72 devices, of 9 nodes
    assert 192e9 <= node.host_memory_bytes <= 18e12 * racks
    assert 40 <= node.num_cpu_cores <= 2592 * racks
    assert node.num_devices in (2, 4, 6, 8, 16, 72)


def test_known_figures() -> None:
    h100, h200, a100 = (load(name).node.device for name in ("h100", "h200", "a100-80"))
    assert h100.peak_flops["bf16"] == 989.4e12
    assert h100.peak_flops["fp8"] == 1978.9e12
    assert (h100.memory_bytes, h100.memory_bandwidth_bytes_per_second) == (80_000_000_000, 3.35e12)
    assert h200.memory_bytes == 141_000_000_000
    assert a100.peak_flops["bf16"] == 312e12
    assert "fp8" not in a100.peak_flops
    assert load("a100-40").node.device.memory_bytes == 40_000_000_000
    assert load("mi250x").node.device.peak_flops["bf16"] == 191.5e12
    assert load("mi250x").node.device.memory_bytes == 64_000_000_000
    for name, memory_bytes in (("v100-16", 16_000_000_000), ("v100-32", 32_000_000_000)):
        volta = load(name).node.device
        assert volta.memory_bytes == memory_bytes
        assert volta.peak_flops == {"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12}


def test_machines_share_the_nodes_and_devices_they_name() -> None:
    assert load("frontier").node == load("mi250x").node
    assert load("alps").node == load("gh200").node
    assert load("selene").node == load("a100-80").node
    assert load("perlmutter").node.device == load("a100-40").node.device
    assert load("summit").node.device == load("lassen").node.device == load("v100-16").node.device
    assert load("summit").node.num_devices == 6
    assert load("perlmutter").node.inter.latency_seconds == 9e-6
    assert load("frontier").node.inter.latency_seconds == 39e-6


def test_a_well_formed_file_is_read(tmp_path: Path) -> None:
    entry = read_entry(write(tmp_path, SMALL))
    assert entry.max_nodes == 2
    assert entry.node.inter == Link("net", 4.0, 1.0, num_nics=1)
    assert entry.node.device.peak_flops == {"fp32": 3.0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_cpu_cores = 4\n", "num_cpu_core = 4\n", "figure 'node.num_cpu_core' has no source"),
        (
            "num_cpu_cores = 4\n",
            'num_cpu_cores = 4\nnam = "x"\n',
            "unknown key 'node.nam'; did you mean 'name'",
        ),
        ('title = "Small"\n', "", "missing key 'title'"),
        ('name = "wire"\n', "", "missing key 'node.intra.name'"),
        ('"node.num_devices" = "s"\n', "", "figure 'node.num_devices' has no source"),
        ('"node.num_devices" = "s"', '"node.num_devices" = " "', "figure 'node.num_devices' has no source"),
        (
            '"node.num_devices" = "s"',
            '"node.num_devices" = "s"\n"node.num_device" = "s"',
            "names no figure; did you mean 'node.num_devices'",
        ),
        ("[sources]", "[source]", "missing table [sources]"),
        ("num_devices = 2", "num_devices = 2.5", "'node.num_devices' = 2.5"),
        ("num_devices = 2", "num_devices = 0", "num_devices = 0 of 'node' must be greater than 0"),
        ("latency_seconds = 1.0", "latency_seconds = -1.0", "latency_seconds = -1.0 of 'net'"),
        ("fp32 = 3.0", "fp23 = 3.0", "unknown dtype 'fp23' in peak_flops; did you mean 'fp32'"),
        ("fp32 = 3.0", "fp32 = 0.0", "peak_flops.fp32 = 0.0 of 'device' must be greater than 0"),
        ("max_nodes = 2", "max_nodes = 0", "max_nodes = 0 must be greater than 0"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    path = write(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_entry(path)
    assert str(error.value).startswith("small.toml: ")
    assert message in str(error.value)


def test_a_reference_to_an_unknown_entry_is_refused(tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    path = write(tmp_path, 'title = "Big"\nnode = "smal"\n[sources]\n', "big")
    with pytest.raises(ConfigError, match=r"big.toml: refers to unknown entry 'smal'; did you mean 'small'"):
        read_entry(path)


# ---- specs


@pytest.mark.parametrize(
    ("spec", "num_nodes", "num_devices"),
    [("h100", 1, 8), ("h100:32x8", 32, 256), ("h100:4x2", 4, 8), ("frontier:4096", 4096, 32768)],
)
def test_specs(spec: str, num_nodes: int, num_devices: int) -> None:
    cluster = load(spec)
    assert (cluster.num_nodes, cluster.num_devices) == (num_nodes, num_devices)
    assert cluster.name == spec.partition(":")[0]


def test_part_of_a_node_has_part_of_its_nics() -> None:
    inter = load("h100:4x2").node.inter
    assert (inter.num_nics, inter.bandwidth_bytes_per_second) == (2, 100e9)
    inter = load("summit:2x1").node.inter
    assert (inter.num_nics, inter.bandwidth_bytes_per_second) == (1, 11.5e9)
    assert load("h100:4x8").node == load("h100").node


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h10", "unknown cluster 'h10'; did you mean 'h100'?; known: a100-40, a100-80, alps"),
        ("zzzzzz", "unknown cluster 'zzzzzz'; known: a100-40"),
        ("", "is not of the form"),
        ("h100:", "'h100:' is not of the form name, name:nodes or name:nodesxdevices"),
        ("h100:8x", "is not of the form"),
        ("h100:-1", "is not of the form"),
        ("h100:2x8x1", "is not of the form"),
        ("h100: 2", "is not of the form"),
        ("h100:0", "asks for zero nodes or devices"),
        ("h100:2x0", "asks for zero nodes or devices"),
        ("h100:2x9", "asks for 9 devices per node but DGX H100 has 8; use at most 8"),
        (
            "frontier:9857",
            "asks for 9857 nodes but Frontier (OLCF) has 9856; use at most frontier:9856",
        ),
        ("local:2x4", "asks for 2 nodes; local is one machine"),
        ("../h100", "unknown cluster '../h100'"),
    ],
)
def test_bad_specs_say_what_to_change(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(spec)
    assert message in str(error.value)


def test_a_cluster_is_a_value() -> None:
    assert load("h100:2x8") == load("h100:2x8")
    assert len({load("h100:2x8"), load("h100:2x8"), load("h100:3x8")}) == 2


# ---- links


@pytest.mark.parametrize(
    ("inner", "degree", "bandwidth", "crosses"),
    [
        (1, 8, 400.0, False),
        (4, 2, 400.0, False),
        (1, 1, 400.0, False),
        (32, 1, 400.0, False),
        (1, 16, 80.0, True),  # one group leaves the node and has all its NICs
        (2, 8, 40.0, True),  # two groups share them
        (4, 8, 20.0, True),
        (8, 4, 10.0, True),  # one group per device
        (16, 2, 10.0, True),  # never more groups than devices
        (1, 3, 80.0, True),  # blocks of 3 do not tile a node of 8: the third one straddles
        (3, 2, 80.0 / 3, True),
    ],
)
def test_axis_link_shares_the_nics_of_a_node(inner: int, degree: int, bandwidth: float, crosses: bool) -> None:
    link = small_cluster().axis_link(inner, degree)
    assert link.bandwidth_bytes_per_second == bandwidth
    assert link.crosses_nodes is crosses
    assert link.latency_seconds == (5e-6 if crosses else 1e-6)


def test_a_ring_with_members_in_one_node_is_not_faster_than_the_node() -> None:
    fast_network = small_cluster(intra=50.0, inter=800.0)
    assert fast_network.axis_link(1, 16).bandwidth_bytes_per_second == 50.0
    assert fast_network.axis_link(4, 8).bandwidth_bytes_per_second == 50.0
    assert fast_network.axis_link(8, 4).bandwidth_bytes_per_second == 100.0  # one member per node: NICs only


def test_one_node_never_crosses() -> None:
    assert not small_cluster(num_nodes=1, num_devices=6).axis_link(1, 4).crosses_nodes
    assert small_cluster(num_nodes=2, num_devices=6).axis_link(1, 4).crosses_nodes


@pytest.mark.parametrize(("inner", "degree"), [(0, 2), (2, 0), (8, 5), (33, 1)])
def test_an_axis_that_does_not_fit_is_refused(inner: int, degree: int) -> None:
    with pytest.raises(PlanError, match=f"degree {degree} with {inner} ranks .* but small has 32"):
        small_cluster().axis_link(inner, degree)


@given(st.sampled_from([1, 2, 4, 6, 8]), st.integers(1, 8), st.integers(1, 64), st.integers(1, 64))
def test_axis_link_bounds(num_devices: int, num_nodes: int, inner: int, degree: int) -> None:
    cluster = small_cluster(num_nodes, num_devices)
    if inner * degree > cluster.num_devices:
        return
    link = cluster.axis_link(inner, degree)
    # Some group of the axis holds ranks of two nodes, by brute force over the rank grid.
    groups = [
        [block * inner * degree + offset + step * inner for step in range(degree)]
        for block in range(-(-cluster.num_devices // (inner * degree)))
        for offset in range(inner)
    ]
    inside = [[rank for rank in group if rank < cluster.num_devices] for group in groups]
    if any(len({rank // num_devices for rank in group}) > 1 for group in inside):
        assert link.crosses_nodes
    assert link.bandwidth_bytes_per_second * (min(num_devices, inner) if link.crosses_nodes else 1) <= 400.0


# ---- collectives

sizes = st.integers(0, 10**12)
degrees = st.integers(1, 4096)
bandwidths = st.floats(1e6, 1e13)
latencies = st.floats(0, 1e-3)


@given(sizes, degrees, bandwidths, latencies)
def test_all_reduce_is_reduce_scatter_then_all_gather(
    num_bytes: int, degree: int, bandwidth: float, latency: float
) -> None:
    parts = [ring_seconds(op, num_bytes, degree, bandwidth, latency) for op in ("reduce_scatter", "all_gather")]
    assert ring_seconds("all_reduce", num_bytes, degree, bandwidth, latency) == pytest.approx(sum(parts))


@given(st.sampled_from(clusters.OPS), sizes, bandwidths, latencies)
def test_a_collective_of_one_rank_is_free(op: str, num_bytes: int, bandwidth: float, latency: float) -> None:
    assert ring_seconds(op, num_bytes, 1, bandwidth, latency) == 0.0


@given(st.sampled_from(clusters.OPS), sizes, degrees, bandwidths, latencies)
def test_more_bytes_more_ranks_and_slower_links_never_cost_less(
    op: str, num_bytes: int, degree: int, bandwidth: float, latency: float
) -> None:
    seconds = ring_seconds(op, num_bytes, degree, bandwidth, latency)
    assert ring_seconds(op, 2 * num_bytes, degree, bandwidth, latency) >= seconds
    assert ring_seconds(op, num_bytes, degree + 1, bandwidth, latency) >= seconds
    assert ring_seconds(op, num_bytes, degree, bandwidth / 2, latency) >= seconds
    assert ring_seconds(op, num_bytes, degree, bandwidth, latency + 1e-6) >= seconds


def test_ring_formulas() -> None:
    expected = {
        "all_reduce": 2 * 3 * 0.5 + 2 * 3 / 4 * 100 / 10,
        "all_gather": 3 * 0.5 + 3 / 4 * 100 / 10,
        "reduce_scatter": 3 * 0.5 + 3 / 4 * 100 / 10,
        "all_to_all": 3 * 0.5 + 3 / 4 * 100 / 10,
        "broadcast": 3 * 0.5 + 100 / 10,
        "reduce": 3 * 0.5 + 100 / 10,
        "send": 0.5 + 100 / 10,
    }
    assert {op: ring_seconds(op, 100, 4, 10, 0.5) for op in clusters.OPS} == expected


def test_bad_collectives_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown collective 'allreduce'; did you mean 'all_reduce'"):
        ring_seconds("allreduce", 1, 2, 1.0, 0.0)
    for arguments in ((-1, 2, 1.0, 0.0), (1, 0, 1.0, 0.0), (1, 2, 0.0, 0.0), (1, 2, 1.0, -1.0)):
        with pytest.raises(ConfigError, match="bandwidth > 0"):
            ring_seconds("send", *arguments)


# ---- this machine


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, name: str, count: int = 2) -> None:
    found = (Gpu(name, 150_000_000_000, (9, 0)),) * count
    monkeypatch.setattr("weft.cluster.hardware.gpus", lambda: found)


def test_a_local_cpu_shares_its_memory_and_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one, four = load("local"), load("local:1x4")
    assert (one.num_devices, four.num_devices) == (1, 4)
    assert one.node.device.peak_flops == {}
    assert one.node.device.memory_bytes == one.node.host_memory_bytes > 1e8
    assert four.node.device.memory_bytes == four.node.host_memory_bytes // 4
    assert one.node.num_cpu_cores >= 1
    assert "assumed" in one.node.intra.name
    assert "peak unknown" in describe(one)


def test_a_recognised_local_gpu_has_the_rates_of_the_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, "NVIDIA H200")
    cluster = load("local")
    h200 = load("h200").node
    assert cluster.num_devices == 2
    assert cluster.node.device.peak_flops == h200.device.peak_flops
    assert cluster.node.device.memory_bytes == 150_000_000_000
    assert cluster.node.intra == h200.intra
    assert load("local:1x1").num_devices == 1
    with pytest.raises(
        ConfigError, match=r"3 ranks need as many GPUs, and this machine has 2; .*train.share_gpus=true"
    ):
        load("local:1x3")
    shared = local_cluster(3, share=True)
    assert (shared.num_devices, shared.node.device.memory_bytes) == (3, 75_000_000_000)


def test_an_unknown_local_gpu_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, "NVIDIA H200 NVL")
    device = load("local").node.device
    assert (device.name, device.peak_flops, device.memory_bytes) == ("NVIDIA H200 NVL", {}, 150_000_000_000)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 120GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("AMD Instinct MI250X", "mi250x"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_devices_are_recognised_by_what_the_driver_reports(reported: str, name: str | None) -> None:
    assert clusters.recognise(reported) == (load(name).node if name else None)


def test_a_container_limit_caps_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "1000000\n" if self.name == "memory.max" else "max")
    assert clusters.host_memory_bytes() == 1_000_000
    monkeypatch.setattr(Path, "read_text", lambda self: "max\n")
    assert clusters.host_memory_bytes() > 1_000_000


def test_describe_is_two_lines_with_the_key_figures() -> None:
    lines = describe(load("h100:32x8")).splitlines()
    assert lines[0] == "h100: 32 x 8 H100 SXM 80GB = 256 devices, each 80 GB, 989.4 TFLOP/s bf16"
    assert lines[1] == (
        "  in a node 450 GB/s per device (NVLink 4, 3.4 us); "
        "between nodes 400 GB/s per node (InfiniBand NDR, 9.6 us); host 2000 GB, 112 cores"
    )


def test_the_page_lists_every_entry_with_its_figures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for name in catalog_names():
        entry = read_entry(CATALOG / f"{name}.toml")
        node, device = entry.node, entry.node.device
        dtype = next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in device.peak_flops)
        row = (
            f"| `{name}` | {entry.max_nodes or 'any'} | {node.num_devices} x {device.name} "
            f"| {device.memory_bytes / 1e9:g} | {device.peak_flops[dtype] / 1e12:g} {dtype} "
            f"| {node.intra.bandwidth_bytes_per_second / 1e9:g} | {node.inter.bandwidth_bytes_per_second / 1e9:g} |"
        )
        assert row in page
