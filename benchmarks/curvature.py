"""Do curvature ranks pay? Steps of K-FAC on two cores: both train, or one trains and the other inverts factors.

    OMP_NUM_THREADS=1 chrt -f 5 python benchmarks/curvature.py [--tiny] [--rows NAME ..] [--out FILE]

All rows have the same model, global batch and intervals. A reading is the mean step over an interval of
`inverse_every` steps, which has one renewal; the first interval is left out. Stated is the fastest reading, because
other programs may run on the machine; readings that the file has from an earlier call count, too. Printed last is what
`weft plan --roles` would say, from the measured step with AdamW in place of a predicted one. `sub-grid-async` uses
inverses late, so it is another optimizer; all other rows with K-FAC take the same steps. Writes
benchmarks/results/curvature-cpu.json.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness

from weft.commands.app import app
from weft.commands.jobs import command_fork_server
from weft.launch.fork_server import ForkServer
from weft.run_file import load_run
from weft.train.local_job import start_ranks
from weft.train.role_advice import forecast_curvature

INTERVAL, NUM_INTERVALS = 5, 5
RUN = """
name = "{name}"
folder = "{folder}/{name}"
[model]
architecture = "llama"
hidden_size = {width}
intermediate_size = {wide}
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
[data]
source = "{folder}/texts"
tokenizer = "bytes"
sequence = 32
cache = "{folder}/cache"
[train]
steps = {steps}
batch = 8
learning_rate = 1e-3
log_every = {interval}
device = "cpu"
[plan]
exact = false
"""
ROWS: dict[str, list[str]] = {
    "AdamW, 1 rank": ["plan.data=1"],
    "inline, 1 rank": ["plan.data=1", "train.kfac.mode=inline"],
    "owner-sharded, 2 ranks": ["plan.data=2", "train.kfac.mode=owner-sharded"],
    "owner-sharded, shard 2": ["plan.data=1", "plan.shard={degree=2, stage=1}", "train.kfac.mode=owner-sharded"],
    "sub-grid, 1 + 1": ["plan.data=1", "roles.curvature=1", "train.kfac.mode=sub-grid"],
    "sub-grid-async, 1 + 1": ["plan.data=1", "roles.curvature=1", "train.kfac.mode=sub-grid-async"],
}


def measure(fork_server: ForkServer, run_file: Path, overrides: list[str], number: int) -> dict[str, Any]:
    """Train the run; returns seconds of a step in each interval, the last loss, and renewals that were left out."""
    given = [*overrides, f"folder={run_file.parent}/row-{number}"]
    if any("kfac" in one for one in overrides):
        given += [f"train.kfac.inverse_every={INTERVAL}", "train.kfac.damping=0.1", "train.kfac.learning_rate=0.03"]
    run = load_run(run_file, given)
    status = start_ranks(fork_server, run, lambda file: ["train", str(file), "--json"])
    if status:
        raise SystemExit(f"training ended with status {status}")
    events = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"][1:]
    seconds = [run.split.tokens / event["tokens_per_second"] for event in steps]
    renewals = [event for event in events if event["kind"] == "kfac"]
    lags = [event["used_at_update"] - event["of_update"] for event in renewals]
    return {
        "step_seconds": min(seconds),
        "readings": seconds,
        "loss": steps[-1]["loss"],
        "lags": lags,
        "skipped": renewals[-1]["skipped"] if renewals else 0,
    }


def main() -> None:
    parser = harness.options(__doc__, "curvature-cpu.json", harness.NOT_WRITTEN)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()
    width = 32 if options.tiny else options.width
    found: dict[str, Any] = {"width": width, "inverse_every": INTERVAL, "rows": {}}
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() and not options.tiny else {}
    began = time.monotonic()
    start = command_fork_server(lambda arguments: app(arguments, standalone_mode=False))
    with tempfile.TemporaryDirectory() as folder, start as fork_server:
        texts, run_file = Path(folder) / "texts", Path(folder) / "run.toml"
        texts.mkdir()
        (texts / "all.txt").write_text(" ".join(str(number * number) for number in range(40_000)))
        steps = INTERVAL * (NUM_INTERVALS + 1)
        sizes = {"width": width, "wide": 2 * width, "steps": steps, "interval": INTERVAL, "name": "curvature"}
        run_file.write_text(RUN.format(folder=folder, **sizes))
        for number, (name, overrides) in enumerate(ROWS.items()):
            if name not in options.rows:
                found["rows"][name] = known[name]
                continue
            row = measure(fork_server, run_file, overrides, number)
            row["readings"] += known.get(name, {}).get("readings", [])
            row["step_seconds"] = min(row["readings"])
            found["rows"][name] = row
            step = row["step_seconds"] * 1e3
            words = f"step {step:.1f} ms, loss {row['loss']:.4f}, lags {row['lags']}, skipped {row['skipped']}"
            print(f"{time.monotonic() - began:6.1f} s  {name}: {words}", flush=True)
            if not options.tiny:
                harness.write(options.out, found, device="cpu")
        given = ["plan.data=1", "train.kfac.mode=inline", f"train.kfac.inverse_every={INTERVAL}"]
        forecast = forecast_curvature(run := load_run(run_file, given), found["rows"]["AdamW, 1 rank"]["step_seconds"])
        assert forecast is not None
        found["forecast"] = asdict(forecast)
        print(forecast.line(run, False))
        if not options.tiny:
            harness.write(options.out, found, device="cpu")


if __name__ == "__main__":
    main()
