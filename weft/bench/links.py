"""Times the operations of `operations.py` over ranks: local processes, or those of a launcher (`bench_links`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.bench.fit import Point, Timing, measure
from weft.bench.operations import OPERATIONS, BenchOperation, Buffers
from weft.cluster.collective_choice import OPERATIONS as LEVEL_OPERATIONS
from weft.cluster.hardware import MeasuredCollective
from weft.cluster.rounds import Algorithm
from weft.comm import Axis, Ledger, all_reduce, barrier
from weft.comm.backends import DeviceType, describe_backend
from weft.comm.mpi_transport import wants_mpi
from weft.comm.recorder import DeviceTimer, HostTimer, Timer
from weft.errors import ConfigError, LaunchError
from weft.launch.environment import RankInfo, detect, init_process_group, shutdown
from weft.launch.local_ranks import run_local
from weft.schema import nearest

WORLD = "world"  # the name of all ranks as one group
_WARM_UP = 3
_BLOCK_SECONDS = 0.02  # how long a block of repeats takes, about


@dataclass(frozen=True)
class LinkOptions:
    """Operations, sizes in bytes, the seconds for each size at most, and whether contents are checked.

    `pinned`: buffers lie in pinned host memory, from which GPUs copy fastest.
    """

    operations: tuple[str, ...] = tuple(OPERATIONS)
    sizes: tuple[int, ...] = tuple(4**power for power in range(1, 12))
    limit_seconds: float = 1.0
    validate: bool = True
    pinned: bool = False

    def __post_init__(self) -> None:
        for name in self.operations:
            if name not in OPERATIONS:
                raise ConfigError(f"unknown operation '{name}'{nearest(name, list(OPERATIONS))}")
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"sizes {list(self.sizes)} must be at least one byte each")


@dataclass(frozen=True)
class LinkRow:
    """One operation of one size. Times are those of the slowest rank; `bus_bytes_per_second` counts the bytes that a
    ring sends over each link, so that operations can be compared. With `num_groups` above 1, as many groups of ranks
    did the same at the same time, as the groups of a mesh's axis do.
    """

    operation: str
    degree: int
    num_bytes: int
    timing: Timing
    bus_bytes_per_second: float
    algorithm: Algorithm = "flat"  # of collectives over several nodes
    axis: str = WORLD
    num_groups: int = 1

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @property
    def point(self) -> Point | None:
        """The measurement for a fit of the link; None if the planner does not time the operation."""
        formula = OPERATIONS[self.operation].formula
        return (
            None
            if formula is None or self.algorithm != "flat"
            else Point(formula, self.degree, self.num_bytes, self.timing.median)
        )


def row_from_json(found: dict[str, Any]) -> LinkRow:
    """The row that `to_json` wrote."""
    return LinkRow(**{**found, "timing": Timing(**found["timing"])})


def bus_factor(operation: str, degree: int) -> float:
    """The bytes that a rank sends over its link in an operation, as a share of the operation's bytes."""
    share = (degree - 1) / degree
    factors = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    return {**factors, "all_to_all_uneven": share, "barrier": 0.0}.get(operation, 1.0)


def bench_rank(
    options: LinkOptions,
    device: torch.device,
    level_axes: Mapping[Algorithm, Axis] | None = None,
    group_axes: Mapping[str, Axis] | None = None,
) -> list[dict[str, Any]]:
    """Measure as one of the ranks of torch.distributed's world group. Every rank returns the same rows.

    `level_axes` are axes over all ranks by the algorithm that their collectives use between nodes. With `group_axes`,
    each of these axes is measured instead of the world group, with all its groups at the same time.
    """
    world = Axis(WORLD, dist.get_world_size(), dist.get_rank(), dist.group.WORLD, Ledger())
    if world.degree < 2:
        raise ConfigError("links are measured between ranks; start at least 2")
    timer: Timer = DeviceTimer() if device.type == "cuda" else HostTimer()
    group_timer = _GroupTimer(world, device, timer, options)
    rows = []
    for name in options.operations:
        operation = OPERATIONS[name]
        for num_bytes in options.sizes if name != "barrier" else options.sizes[:1]:
            for axis in (group_axes or {WORLD: world}).values():
                rows.append(group_timer.measure(operation, num_bytes, axis))
            if name in LEVEL_OPERATIONS:
                for algorithm, own in (level_axes or {}).items():
                    row = group_timer.measure(operation, num_bytes, own)
                    rows.append(replace(row, algorithm=algorithm, axis=WORLD))
    return [row.to_json() for row in rows]


def measured_collectives(rows: Sequence[LinkRow], num_nodes: int) -> tuple[MeasuredCollective, ...]:
    """The times by which the planner prices messages and collectives over all ranks, and by which the fastest algorithm
    is chosen on so many nodes.
    """
    found: dict[tuple[str, Algorithm], list[LinkRow]] = {}
    for row in sorted(rows, key=lambda row: row.num_bytes):
        operation = OPERATIONS[row.operation].formula
        if operation in (*LEVEL_OPERATIONS, "send") and row.axis == WORLD:
            found.setdefault((operation, row.algorithm), []).append(row)
    return tuple(
        MeasuredCollective(
            operation,  # type: ignore[arg-type]
            algorithm,
            num_nodes,
            own[0].degree // num_nodes,
            tuple({row.num_bytes: None for row in own}),
            tuple({row.num_bytes: row.timing.median for row in own}.values()),
        )
        for (operation, algorithm), own in found.items()
    )


@dataclass(frozen=True)
class _GroupTimer:
    """Times operations of this rank's group of an axis. All ranks of the world do the same, and agree on the times."""

    world: Axis
    device: torch.device
    timer: Timer
    options: LinkOptions

    def measure(self, operation: BenchOperation, num_bytes: int, axis: Axis) -> LinkRow:
        """Repeat the operation until its time is stable, and check contents."""
        buffers = operation.buffers(num_bytes, axis.degree, self.device, self.options.pinned)
        for _ in range(_WARM_UP):
            first = self._repeat(operation, buffers, axis, 1)[0]
        repeats = max(1, min(200, int(_BLOCK_SECONDS / max(first, 1e-7))))
        timing = measure(lambda: self._repeat(operation, buffers, axis, repeats), self.options.limit_seconds)
        if self.options.validate:
            for iteration in range(2):
                operation.check(buffers, axis, iteration)
        degree = 2 if operation.only_pairs else axis.degree
        whole = max(buffers.given.numel(), buffers.taken.numel()) if operation.name != "all_to_all_uneven" else 0
        sent = (whole or buffers.given.numel()) * buffers.given.element_size()
        moved = operation.num_messages * sent * bus_factor(operation.name, degree)
        rate = moved / timing.median if timing.median else 0.0
        groups = self.world.degree // axis.degree
        return LinkRow(operation.name, degree, sent, timing, rate, axis=axis.name, num_groups=groups)

    def _repeat(self, operation: BenchOperation, buffers: Buffers, axis: Axis, repeats: int) -> list[float]:
        """The seconds of each repeat on the slowest rank; equal on all ranks."""
        marks = []
        barrier()
        for _ in range(repeats):
            start = self.timer.mark()
            operation.run(buffers, axis)
            marks.append((start, self.timer.mark()))
        spans = [self.timer.seconds(end) - self.timer.seconds(start) for start, end in marks]
        seconds = torch.tensor(spans, dtype=torch.float64, device=self.device)
        all_reduce(seconds, self.world, "max").wait()
        halves = 2 if operation.is_round_trip else 1
        return [one / halves for one in seconds.tolist()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4:4M` to powers of four from 4 bytes to 4 MiB; K, M and G are powers of 1024."""
    low, colon, high = text.partition(":")
    least, most = _parse_bytes(low, text), _parse_bytes(high if colon else low, text)
    sizes: list[int] = []
    size = least
    while size <= most:
        sizes.append(size)
        size *= 4
    if not sizes:
        raise ConfigError(f"sizes '{text}' are not of the form SMALLEST:LARGEST, e.g. 4:4M")
    return tuple(sizes)


def _parse_bytes(text: str, whole: str) -> int:
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits, unit = text.rstrip("KMG"), text[len(text.rstrip("KMG")) :]
    if not digits.isdigit() or unit not in units or int(digits) < 1:
        raise ConfigError(f"sizes '{whole}' are not of the form SMALLEST:LARGEST, e.g. 4:4M")
    return int(digits) * units[unit]


def points_of(rows: Sequence[LinkRow]) -> list[Point]:
    """The measurements that describe a link."""
    return [row.point for row in rows if row.point is not None]


_TIMEOUT_SECONDS = 1800.0
LevelAxes = Callable[[torch.device], Mapping[Algorithm, Axis]]
GroupAxes = Callable[[torch.device], Mapping[str, Axis]]


def bench_links(
    options: LinkOptions,
    num_ranks: int,
    device: DeviceType,
    environ: Mapping[str, str] = os.environ,
    level_axes: LevelAxes | None = None,
    group_axes: GroupAxes | None = None,
) -> tuple[list[LinkRow], RankInfo, str]:
    """Measure over `num_ranks` local processes; under a launcher, over its ranks, which all call this.

    Returns the rows, this process' rank, and the name of the back-end. Each rank calls `level_axes` for the axes that
    the algorithms between nodes are measured on, and `group_axes` for those whose groups are measured at once.
    """

    def measure(own: torch.device) -> list[dict[str, Any]]:
        levels = None if level_axes is None else level_axes(own)
        return bench_rank(options, own, levels, None if group_axes is None else group_axes(own))

    rank_info = detect(environ)
    if rank_info is None and device == "cpu" and wants_mpi(environ):
        raise LaunchError(f"over MPI, mpirun starts the ranks: mpirun -n {num_ranks} weft bench links --backend mpi")
    if rank_info is None:
        # Pinned memory needs CUDA, which processes of "cpu" do not see; those of "cuda" have Gloo for CPU tensors too.
        runs_on: DeviceType = "cuda" if options.pinned else device

        def rank(index: int) -> list[dict[str, Any]]:
            return measure(torch.device("cpu" if device == "cpu" else f"cuda:{index % torch.cuda.device_count()}"))

        found = run_local(rank, num_ranks, _TIMEOUT_SECONDS, runs_on)
        where = RankInfo(0, num_ranks, 0, num_ranks)
        return [row_from_json(row) for row in found[0]], where, describe_backend(device, num_ranks)
    own = init_process_group(rank_info, device, timedelta(seconds=_TIMEOUT_SECONDS))
    try:
        rows = measure(own)
    finally:
        shutdown()
    return [row_from_json(row) for row in rows], rank_info, describe_backend(device, rank_info.num_local_ranks)
