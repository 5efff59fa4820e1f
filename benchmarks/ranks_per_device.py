"""Ranks that share a GPU (AccDP): throughput of 1 to 4 of them at a fixed global batch, and what the tuner chooses.

    python benchmarks/ranks_per_device.py [--tiny] [--brief] [--models cnn transformer] [--out FILE]

For a small CNN (ResNet-18 of narrow layers on small images) and a small transformer. `weft tune ranks-per-device`
chooses a number; then all numbers are measured again, independently. Stated are the gain over one rank, and how far the
tuner's choice is from the best of the second measurement. One rank of the CNN replays its step as a CUDA graph, as
`weft train` does by default; it is also measured without, and both models without MPS (not with --brief). --tiny runs
on any machine and proves the script. Writes benchmarks/results/ranks-per-device-h200.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "ranks-per-device-h200.json"
ROOT = Path(__file__).parents[1]
MODELS = {
    "cnn": """
[model]
architecture = "resnet"
depth = 18
width = {width}
[data]
kind = "slides"
images = 768
size = {size}
held_out = 0.25
[train]
steps = 100
batch = 48
learning_rate = 1e-3
compile = false
[plan]
exact = false
data = 1
""",
    "transformer": """
[model]
architecture = "llama"
hidden_size = {width}
intermediate_size = {wide}
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 4
[data]
source = "stdlib"
tokenizer = "bytes"
sequence = {size}
cache = "{folder}/cache"
[train]
steps = 100
batch = 48
learning_rate = 1e-3
compile = false
[plan]
data = 1
""",
}
SIZES = {"cnn": {"width": 32, "size": 64}, "transformer": {"width": 256, "wide": 1024, "layers": 6, "size": 128}}
TINY = {"cnn": {"width": 4, "size": 32}, "transformer": {"width": 32, "wide": 64, "layers": 1, "size": 16}}


def tune(run_file: Path, *arguments: str, **environ: str) -> dict[str, Any]:
    """What `weft tune ranks-per-device` finds."""
    command = [sys.executable, "-m", "weft", "tune", "ranks-per-device", str(run_file), *arguments, "--json"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **environ}, capture_output=True, text=True, timeout=400
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("weft:")]
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "seconds": round(time.monotonic() - began, 1), "warnings": warnings}


def rates(found: dict[str, Any]) -> dict[int, float]:
    return {row["ranks_per_device"]: row["units_per_second"] for row in found["measured"] if not row["refused"]}


def compare(name: str, folder: Path, tiny: bool, brief: bool, steps: list[str]) -> dict[str, Any]:
    """The tuner's choice against a second measurement, and the rates of variants."""
    run_file = folder / f"{name}.toml"
    sizes = (TINY if tiny else SIZES)[name]
    text = f'name = "{name}"\nfolder = "{folder}/{name}"\n' + MODELS[name].format(folder=folder, **sizes)
    run_file.write_text(text)
    device = ["train.device=cpu"] if tiny else []
    tuned, again = tune(run_file, *device, *steps), tune(run_file, *device, *steps)
    second = rates(again)
    best = max(second, key=lambda number: second[number])
    row: dict[str, Any] = {
        "model": name,
        "sizes": sizes,
        "global_batch": 48,
        "tuned": tuned,
        "again": again,
        "gain": {number: round(rate / second[1], 3) for number, rate in second.items()},
        "best": best,
        "chosen": tuned["chosen"],
        "chosen_below_best": round(1 - second[tuned["chosen"]] / second[best], 4),
    }
    if name == "cnn" and not (tiny or brief):
        row["without_graph"] = tune(run_file, "train.graph=false", "--most", "1", *steps[2:])
    if not (tiny or brief):  # a folder without a service: ranks take turns on the GPU
        nowhere = str(folder / "no-service")
        row["time_slicing"] = tune(run_file, "--most", "2", *steps[2:], CUDA_MPS_PIPE_DIRECTORY=nowhere)
    return row


def machine() -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "cpu_cores": os.cpu_count(), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    steps = ["--most", "2" if options.tiny else "4", "--steps", "5" if options.tiny else "50"]
    steps += ["--warm-up", "1" if options.tiny else "20"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            row = compare(name, Path(folder), options.tiny, options.brief, steps)
            rows.append(row)
            brief = {key: row[key] for key in ("model", "gain", "best", "chosen", "chosen_below_best")}
            print(json.dumps(brief), flush=True)
            if not options.tiny:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                whole = {"benchmark": "ranks_per_device", **machine(), "rows": rows}
                options.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
