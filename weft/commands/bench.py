"""`weft bench`: measures links, matmuls, memory and storage of this machine, and writes a cluster file for the planner.

Each command imports the code that measures when it runs, so that help is answered without torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.commands.arguments import Json
from weft.commands.output import warn, write_result
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.bench.links import LinkRow

bench_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure this machine, or a server under load.",
    epilog="Example: weft bench links --ranks 4; weft bench machine --write machine.toml",
)

Ranks = Annotated[int, typer.Option(help="local processes; under a launcher, its ranks count", min=2, max=1024)]
DeviceOption = Annotated[str, typer.Option(help="cpu (Gloo) or cuda (NCCL)")]
Seconds = Annotated[float, typer.Option(help="at most, for each measurement", min=0.0)]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="time two-level collectives too, as if ranks were on so many nodes; under a launcher, its hosts", min=2
    ),
]
ServeOption = Annotated[bool, typer.Option("--serve", help="time decodes on the CPU too, for weft plan --serve")]


@bench_app.command(
    "links", epilog="Example: weft bench links --ranks 4 --operations all_reduce,all_gather --sizes 4:4M"
)
def links_command(
    ranks: Ranks = 2,
    operations: Annotated[str | None, typer.Option(help="a list with commas; all if not given")] = None,
    sizes: Annotated[str, typer.Option(help="bytes from SMALLEST:LARGEST, each four times the one before")] = "4:4M",
    device: DeviceOption = "cpu",
    backend: Annotated[
        str | None, typer.Option(help="of CPU tensors: gloo, mpi (under mpirun), or gloo,mpi to compare them")
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="CPU buffers in pinned memory; needs a GPU")] = False,
    axes: Annotated[
        str | None, typer.Option(help="e.g. data=2,shard=4: each axis with all its groups at once, as in training")
    ] = None,
    seconds: Seconds = 1.0,
    nodes: Nodes = None,
    validate: Annotated[bool, typer.Option(help="check what ranks received")] = True,
    svg: Annotated[Path | None, typer.Option(help="draw microseconds over bytes to this file")] = None,
    as_json: Json = False,
) -> None:
    """Time messages and collectives between ranks. Checks their contents, and fits latency and bandwidth."""
    from weft.bench.links import LinkOptions, bench_links, parse_sizes
    from weft.bench.operations import OPERATIONS
    from weft.bench.report import series_of, svg_plot
    from weft.launch.environment import detect

    names = tuple(OPERATIONS) if operations is None else tuple(operations.split(","))
    if pinned:
        _refuse_pinned(device)
    options = LinkOptions(names, parse_sizes(sizes), seconds, validate, pinned)
    num_ranks, groups = (ranks, None) if axes is None else _group_axes(axes)
    started = detect(os.environ)
    levels = None if nodes is None else _level_axes(nodes, num_ranks if started is None else started.num_ranks)
    rows_by_backend: dict[str, list[LinkRow]] = {}
    for transport in _transports(backend, device):
        with transport:
            rows, where, name = bench_links(options, num_ranks, _device(device), level_axes=levels, group_axes=groups)
        rows_by_backend[name] = rows
    if where.rank != 0:
        return
    if svg is not None and series_of(rows):
        write_result(svg, svg_plot(series_of(rows), f"{where.num_ranks} ranks, {name}"))
    if as_json:
        backends = {name: [row.to_json() for row in rows] for name, rows in rows_by_backend.items()}
        several = {"backends": backends} if len(backends) > 1 else {}
        print(json.dumps({"backend": name, "rows": backends[name], **several}, indent=2))
        return
    for name, own in rows_by_backend.items():
        print(f"{where.num_ranks} ranks, {name}; contents {'checked' if validate else 'not checked'}")
        _print_links(own, nodes)
    if len(rows_by_backend) > 1:
        from weft.bench.report import backends_table

        print(backends_table(rows_by_backend))


def _print_links(rows: Sequence[LinkRow], nodes: int | None) -> None:
    from weft.bench.links import measured_collectives
    from weft.bench.report import choices_table, describe_links, link_table, series_of, terminal_plot

    print(link_table(rows))
    print(describe_links(rows))
    if nodes is not None:
        print(choices_table(measured_collectives(rows, nodes)))
    print(terminal_plot(series_of(rows)))


@bench_app.command("matmul", epilog="Example: weft bench matmul --device cuda")
def matmul_command(device: DeviceOption = "cpu", seconds: Seconds = 1.0, as_json: Json = False) -> None:
    """Time square matmuls in fp32 and bf16."""
    import torch

    from weft.bench.machine import matmul_flops

    place = torch.device(_device(device))
    found = {dtype: matmul_flops(place, dtype, seconds) for dtype in ("fp32", "bf16")}
    texts = {
        dtype: {f"side {side}": f"{rate / 1e9:,.1f} GFLOP/s" for side, rate in rates.items()}
        for dtype, rates in found.items()
    }
    _show(texts, found, as_json)


@bench_app.command("memory", epilog="Example: weft bench memory")
def memory_command(device: DeviceOption = "cpu", seconds: Seconds = 1.0, as_json: Json = False) -> None:
    """Time copies within the memory of a device."""
    import torch

    from weft.bench.machine import memory_bytes_per_second

    rates = {"memory": memory_bytes_per_second(torch.device(_device(device)), seconds)}
    _show({"copies": {name: _gigabytes(rate) for name, rate in rates.items()}}, rates, as_json)


@bench_app.command("host-link", epilog="Example: weft bench host-link")
def host_link_command(seconds: Seconds = 1.0, as_json: Json = False) -> None:
    """Time copies between host memory and a GPU. Both ways, from pinned and from ordinary memory."""
    from weft.bench.machine import host_link_rates

    rates = host_link_rates(seconds)
    _show({"host link": {name: _gigabytes(rate) for name, rate in rates.items()}}, rates, as_json)


@bench_app.command("storage", epilog="Example: weft bench storage --folder /scratch")
def storage_command(
    folder: Annotated[Path, typer.Option(help="where a file is written and read")] = Path(),
    as_json: Json = False,
) -> None:
    """Time writing a file to disk and reading it back."""
    from weft.bench.machine import storage_bytes_per_second

    rates = storage_bytes_per_second(folder)
    _show({str(folder): {name: _gigabytes(rate) for name, rate in rates.items()}}, rates, as_json)


@bench_app.command(
    "machine", epilog="Example: weft bench machine --write machine.toml; weft plan run.toml --cluster machine.toml"
)
def machine_command(
    write: Annotated[Path, typer.Option(help="the cluster file to write; must not exist")] = Path("machine.toml"),
    ranks: Annotated[int | None, typer.Option(help="devices of a node: GPUs, or processes on the CPU", min=2)] = None,
    device: DeviceOption = "cpu",
    seconds: Seconds = 0.5,
    nodes: Nodes = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="measure decodes on the CPU too, for weft plan --serve")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine for the planner, and write a cluster file."""
    if write.exists():
        raise ConfigError(f"{write} exists; remove it or name another file with --write")
    if serve and device != "cpu":
        raise ConfigError(f"--serve measures decodes on a CPU, not with --device {device}; leave out one of them")
    from weft.bench.cluster_file import cluster_text
    from weft.bench.machine import measure_machine, num_devices
    from weft.bench.report import describe_link
    from weft.launch.environment import detect

    started = detect(os.environ)
    if (started is None or started.rank == 0) and not write.parent.is_dir():  # other ranks write nothing
        raise ConfigError(f"--write {write}: the folder {write.parent} does not exist; make it, or name another")
    axes = None
    if nodes is not None:
        num_ranks = started.num_ranks if started is not None else ranks or num_devices(_device(device))
        axes = (nodes, _level_axes(nodes, num_ranks))
    if started is None or started.rank == 0:
        warn("measuring links, matmuls, memory and storage: one to two minutes")
    machine, where = measure_machine(ranks, _device(device), seconds, time.strftime("%Y-%m-%d"), axes)
    if where.rank != 0:
        return
    if serve:
        decode = _measured_decodes()
        machine = replace(machine, decode=decode)
        if decode.doubt is not None:
            warn(decode.doubt)
    write_result(write, cluster_text(machine))
    if as_json:
        print(json.dumps({"file": str(write)}))
    else:
        print(describe_link(machine.intra))
        print(f"wrote {write}; plan with it: weft plan {'--serve ' * serve}RUN_FILE --cluster {write}")


def _measured_decodes() -> Any:
    """Returns what a decode takes on this CPU, with the threads that a server would use. A bar on stderr shows
    progress.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from weft.serve.measurement.cpu_threads import fastest_threads
    from weft.serve.measurement.measure_decode import measure_decode

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(fastest_threads(torch.get_num_threads()))
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring decodes", total=None)
        return measure_decode(lambda done, total: bar.update(task, completed=done, total=total))


def _device(name: str) -> Any:
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is not one of cpu, cuda")
    return name


def _refuse_pinned(device: str) -> None:
    from weft.cluster.local_gpus import sees_gpu

    if device != "cpu" or not sees_gpu():  # asked without CUDA, as ranks are forked from this process
        given = f"--device {device}" if device != "cpu" else "no GPU was found"
        raise ConfigError(f"--pinned is for CPU buffers on a machine with a GPU; {given}; leave it out")


def _transports(backend: str | None, device: str) -> list[AbstractContextManager[None]]:
    """Returns the transports of CPU tensors to measure, in order: what the environment says if none is given."""
    from weft.comm.mpi_transport import transport

    if backend is None:
        return [nullcontext()]
    names = backend.split(",")
    if device != "cpu" or not set(names) <= {"gloo", "mpi"}:
        raise ConfigError(f"--backend {backend} with --device {device}: CPU tensors have gloo, mpi, or gloo,mpi")
    return [transport(name) for name in names]


def _group_axes(text: str) -> tuple[int, Any]:
    """Returns the number of ranks of a mesh such as data=2,shard=4, and the function that makes its axes on a rank."""
    from weft.mesh import group_axes
    from weft.plan import plan_of_degrees

    degrees = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not number.isdecimal():
            raise ConfigError(f"--axes {text}: '{part}' is not NAME=DEGREE, e.g. data=2,shard=4")
        degrees[name.strip()] = int(number)
    plan = plan_of_degrees(degrees)
    if plan.num_ranks < 2:
        raise ConfigError(f"--axes {text} has one rank; links are measured between at least 2")
    return plan.num_ranks, partial(group_axes, plan)


def _level_axes(num_nodes: int, num_ranks: int) -> Any:
    """Returns the function by which each rank makes the axes over which two-level collectives are timed."""
    from weft.mesh import level_axes

    if num_ranks % num_nodes:
        raise ConfigError(f"--nodes {num_nodes} does not divide {num_ranks} ranks; nodes have equally many ranks")
    return partial(level_axes, num_nodes)


def _gigabytes(rate: float | None) -> str:
    return "none" if rate is None else f"{rate / 1e9:.2f} GB/s"


def _show(texts: dict[str, dict[str, str]], found: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for title, lines in texts.items():
        print(title)
        for name, text in lines.items():
            print(f"  {name:<12}{text:>18}")
