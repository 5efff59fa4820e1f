"""Runs `weft bench links` on local processes, or as one rank of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from weft.bench.links import LinkOptions, LinkRow, bench_rank, row_from_json
from weft.cluster.rounds import Algorithm
from weft.comm import Axis
from weft.comm.backends import DeviceType, describe_backend
from weft.comm.mpi_transport import wants_mpi
from weft.errors import LaunchError
from weft.launch.environment import RankInfo, detect, init_process_group, shutdown
from weft.launch.local_ranks import run_local

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
        found = run_local(lambda rank: measure(_device(device, rank)), num_ranks, _TIMEOUT_SECONDS, runs_on)
        where = RankInfo(0, num_ranks, 0, num_ranks)
        return [row_from_json(row) for row in found[0]], where, describe_backend(device, num_ranks)
    own = init_process_group(rank_info, device, timedelta(seconds=_TIMEOUT_SECONDS))
    try:
        rows = measure(own)
    finally:
        shutdown()
    return [row_from_json(row) for row in rows], rank_info, describe_backend(device, rank_info.num_local_ranks)


def _device(kind: DeviceType, rank: int) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank % torch.cuda.device_count())
