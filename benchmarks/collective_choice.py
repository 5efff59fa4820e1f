"""Is the algorithm that a measured table chooses for a collective the fastest one? On links with injected latency.

Local ranks stand for nodes: each wait for an operation that crosses nodes first sleeps as long as its messages would
take on a link with the latency and bandwidth given. `bench_rank` measures all algorithms into a table, as `weft bench
machine --nodes` does; the table chooses for each operation and size, also for sizes between the measured ones; and all
algorithms are measured again. Aim: the chosen one takes at most 10 % longer than the best.

    python benchmarks/collective_choice.py [--latency 0.005] [--bandwidth 5e7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from weft.bench.links import LinkOptions, bench_rank, measured_collectives, row_from_json
from weft.cluster.collective_choice import ALGORITHMS, OPERATIONS, Levels
from weft.cluster.hardware import AxisLink, ring_seconds
from weft.comm.collectives import Pending
from weft.launch.local_ranks import run_local
from weft.mesh import level_axes

AIM = 0.10
SHAPES = [(4, 1), (2, 2)]  # (nodes, ranks in each)
MEASURED, BETWEEN = (1 << 12, 1 << 18), (1 << 15,)
SECONDS = 0.0  # five blocks of repeats for each size


def rank(num_nodes: int, num_local: int, latency: float, bandwidth: float) -> list[list[dict[str, Any]]]:
    """Measure twice on a slow link between nodes: the sizes of the table, and all sizes."""
    plain = Pending.wait

    def slow(pending: Pending) -> None:
        name, operation, degree = pending._axis.name, pending._operation, pending._axis.degree
        if pending._works and not name.endswith("/local"):
            formula = "send" if operation == "exchange" else operation
            time.sleep(ring_seconds(formula, _bytes[0], degree, bandwidth, latency))
        plain(pending)

    _bytes = [0]
    record = "weft.comm.collectives._record"
    original = __import__("weft.comm.collectives", fromlist=["_record"])._record

    def noted(axis: Any, operation: str, whole: torch.Tensor, *rest: Any, **more: Any) -> None:
        _bytes[0] = whole.numel() * whole.element_size()
        original(axis, operation, whole, *rest, **more)

    axes = level_axes(num_nodes, torch.device("cpu"))
    found = []
    with patch.object(Pending, "wait", slow), patch(record, noted):
        for sizes in (MEASURED, MEASURED + BETWEEN):
            options = LinkOptions(OPERATIONS, sizes, SECONDS, validate=False)
            found.append(bench_rank(options, torch.device("cpu"), axes))
    return found


def judge(num_nodes: int, num_local: int, first: list[Any], second: list[Any]) -> list[dict[str, Any]]:
    """The chosen and the best algorithm of each operation and size, by the second measurement."""
    table = measured_collectives([row_from_json(row) for row in first], num_nodes)
    nothing = dict.fromkeys(("", "node", "local"), AxisLink(1.0, 1.0, False))  # not used where times were measured
    levels = Levels(num_nodes, num_local, "fastest", links=nothing, measured=table)
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in map(row_from_json, second):
        times.setdefault((row.operation, row.num_bytes), {})[row.algorithm] = row.timing.median
    rows = []
    for (operation, num_bytes), by_algorithm in times.items():
        if set(by_algorithm) != set(ALGORITHMS):
            continue
        chosen, best = levels.algorithm(operation, num_bytes), min(by_algorithm, key=by_algorithm.__getitem__)
        above = by_algorithm[chosen] / by_algorithm[best] - 1
        shape = {"nodes": num_nodes, "local": num_local, "operation": operation, "bytes": num_bytes}
        rows.append({**shape, "chosen": chosen, "best": best, "above_best": above, "seconds": by_algorithm})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latency", type=float, default=0.005, help="seconds of a hop between nodes")
    parser.add_argument("--bandwidth", type=float, default=5e7, help="bytes per second between nodes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    rows = []
    for shape in SHAPES:
        found = run_local(
            lambda _, shape=shape: rank(*shape, given.latency, given.bandwidth), shape[0] * shape[1], 900.0
        )
        rows += judge(*shape, *found[0])
    worst = max(rows, key=lambda row: row["above_best"])
    result = {
        "benchmark": "collective_choice",
        "aim": AIM,
        "within_aim": sum(row["above_best"] <= AIM for row in rows),
        "of": len(rows),
        "worst": worst,
        "latency_seconds": given.latency,
        "bandwidth_bytes_per_second": given.bandwidth,
        "rows": rows,
        "load_average": os.getloadavg(),
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores; latency between nodes is slept",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "collective-choice-cpu.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=2))
    for row in rows:
        print(
            f"{row['nodes']}x{row['local']} {row['operation']:15} {row['bytes']:>9} {row['chosen']:9} "
            f"best {row['best']:9} {row['above_best']:+.1%}"
        )


if __name__ == "__main__":
    main()
