"""Predicted and measured step times of four plans on this machine's CPU, with measured and with assumed links.

In each round and for each plan, `weft bench machine` measures matmuls, memory and links into a cluster file. Then the
plan trains for some steps by `weft train`, and the median of its step times is compared with two predictions: by the
measured file, and by the cluster `local`, whose links are assumed. A plan's error is the median of its rounds, so that
a machine that others use too is measured at several times. Aim: the measured file within 15 %, and better than the
assumed one. The result has the load of the machine, and whether other processes could interrupt (`is_real_time`).

    python benchmarks/cpu_plans.py [--steps 30] [--rounds 3]
    chrt -f 10 python benchmarks/cpu_plans.py          on a machine that others use (root)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

from weft.planner.predict import predict, run_cluster
from weft.run_file import load_run

AIM = 0.15
BATCH, SEQUENCE = 8, 128
PLANS = {
    "data 2": ["plan.data=2"],
    "shard 2": ["plan.shard=2"],
    "x 2": ["plan.tensor.x=2"],
    "pipe 2": ["plan.pipe=2", "plan.micro_batch=2"],
}
RUN_FILE = """
[model]
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 4
num_attention_heads = 4

[data]
source = "stdlib"
sequence = {sequence}
held_out = 0.0

[train]
steps = {steps}
batch = {batch}
device = "cpu"
schedule = "constant"

[plan]
precision = "fp32"
"""


def weft(*arguments: str) -> None:
    """Run a command of weft; raise with its output if it fails."""
    done = subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"weft {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


def measured_seconds(folder: Path) -> list[float]:
    """The step times of a run, without the first quarter."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step" and line.get("start_seconds") is None]
    times = [BATCH * SEQUENCE / line["tokens_per_second"] for line in steps]
    return times[len(times) // 4 :]


def one_round(folder: Path, steps: int) -> tuple[dict[str, dict[str, float]], str]:
    """By plan: measured and predicted seconds, and errors; and the last cluster file."""
    folder.mkdir()
    machine, run_file = folder / "machine.toml", folder / "run.toml"
    run_file.write_text(RUN_FILE.format(steps=steps, batch=BATCH, sequence=SEQUENCE))
    rows = {}
    for name, overrides in PLANS.items():
        machine.unlink(missing_ok=True)
        weft("bench", "machine", "--ranks", "2", "--write", str(machine))
        given = [f"folder={folder / name.replace(' ', '-')}", *overrides]
        weft("train", str(run_file), *given)
        times = measured_seconds(folder / name.replace(" ", "-"))
        seconds = statistics.median(times)
        found = {}
        for kind, cluster in (("measured_table", str(machine)), ("assumed", "local")):
            run = load_run(run_file, [*given, f"cluster={cluster}"])
            found[kind] = predict(run, run_cluster(run)).step_seconds or 0.0
        errors = {f"{kind}_error": value / seconds - 1 for kind, value in found.items()}
        rows[name] = {"seconds": seconds, "fastest_seconds": min(times), **found, **errors}
        print(name, rows[name], flush=True)
    return rows, machine.read_text()


def main() -> None:
    parser = harness.options(__doc__, "cpu-plans.json")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as text:
        rounds = [one_round(Path(text) / str(number), arguments.steps) for number in range(arguments.rounds)]
    rows: dict[str, dict[str, Any]] = {}
    for name in PLANS:
        of_plan = [found[name] for found, _ in rounds]
        medians = {key: statistics.median(one[key] for one in of_plan) for key in of_plan[0]}
        rows[name] = {**medians, "measured_table_errors": [one["measured_table_error"] for one in of_plan]}
    result = {
        "aim": AIM,
        "rounds": arguments.rounds,
        "plans": rows,
        "within_aim": sum(abs(row["measured_table_error"]) <= AIM for row in rows.values()),
        "better_than_assumed": sum(
            abs(row["measured_table_error"]) < abs(row["assumed_error"]) for row in rows.values()
        ),
        "machine_file": rounds[-1][1],
        "load_average": {"before": before, "after": os.getloadavg()},
        "is_real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
    }
    harness.write(arguments.out, result, device="cpu")
    print(json.dumps({key: value for key, value in result.items() if key != "machine_file"}, indent=2))


if __name__ == "__main__":
    main()
