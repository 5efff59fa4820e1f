"""Goodput under random faults beside Daly's formula: `weft chaos` on a tiny Llama, four processes, at three rates.

Each rate has runs with seeds 0, 1, .. until so many faults have struck; every run must end with the bits of the
undisturbed one. The undisturbed run is done once. Where other work makes the machine slower later on, goodput shows
that too; `training_share`, the time that was not spent on recoveries, does not.

    python benchmarks/chaos.py [--steps 1000]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

from weft.chaos.report import by_kind
from weft.chaos.storm import FaultRecord

ROOT = Path(__file__).parents[1]
RATES = {"4s": 100, "8s": 65, "16s": 40}  # mean time between faults: how many are to be survived
TINY = ["model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2", "data.sequence=64"]
TINY += ["model.num_attention_heads=4", "train.batch=16", "train.evaluate_every=1000000", "checkpoint.every=250"]


def storm(mtbf: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One call of the tool; its report."""
    quickstart = ROOT / "examples" / "quickstart.toml"
    command = [sys.executable, "-m", "weft", "chaos", str(quickstart), *overrides]
    command += ["--mtbf", mtbf, "--seed", str(seed), "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, (found["status"], found["differ"], found["log"])
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs of a rate: goodput over all of their time, and of the prediction the same."""
    seconds = sum(one["seconds"] for one in runs)
    faults = [FaultRecord(**fault) for one in runs for fault in one["faults"]]
    predicted = len(runs) / sum(1 / one["predicted"]["goodput"] for one in runs)  # equal work in each run
    restart = sum(one["predicted"]["restart_seconds"] for one in runs) / len(runs)
    return {
        "runs": len(runs),
        "seconds": seconds,
        "faults": len(faults),
        "restarts": sum(one["restarts"] for one in runs),
        "goodput": sum(one["undisturbed"]["seconds"] for one in runs) / seconds,
        "training_share": 1 - sum(one["recovering_seconds"] for one in runs) / seconds,
        "predicted_goodput": predicted,
        "restart_seconds": restart,
        "step_seconds": [one["step_seconds"] for one in runs],
        "wrong_results": sum(not one["equal"] for one in runs),
        "by_kind": by_kind(faults),
    }


def main() -> None:
    parser = harness.options(__doc__, "chaos-cpu.json")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    rates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*TINY, f"train.steps={options.steps}", f"folder={folder}/tiny"]
        for mtbf, wanted in RATES.items():
            runs: list[dict[str, Any]] = []
            while sum(len(one["faults"]) for one in runs) < wanted:
                runs.append(storm(mtbf, len(runs), overrides))
            rates[mtbf] = summary(runs)
            undisturbed = runs[0]["undisturbed"]
    result = {
        "run": "examples/quickstart.toml shrunk, 4 processes (data 2 × shard 2), a copy in memory every step",
        "overrides": [one for one in overrides if not one.startswith("folder=")],
        "undisturbed_seconds": undisturbed["seconds"],
        "undisturbed_step_seconds": undisturbed["step_seconds"],
        "faults": sum(one["faults"] for one in rates.values()),
        "wrong_results": sum(one["wrong_results"] for one in rates.values()),
        "rates": rates,
    }
    harness.write(options.out, result, device="cpu")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
