"""What 1-bit and 0/1 Adam do to the loss of a run, and how many bytes they send over `data`, beside AdamW.

Each optimizer trains the same run file (the quickstart: data 2 and shard 2 on 4 processes) from the same weights on the
same batches. Losses are those of held-out data at the end; bytes are those that the recorder counted in all steps.
Aim: a loss within 2 % of AdamW's at no more than an eighth of its bytes over `data`.

    python benchmarks/compressed_quality.py [--run-file examples/quickstart.toml] [--steps 400]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

from weft.recording.rank_file import read_recording

AIM_LOSS, AIM_BYTES = 0.02, 1 / 8
ROOT = Path(__file__).parents[1]


def optimizers(steps: int) -> dict[str, list[str]]:
    """Overrides of the run file by the name of the optimizer."""
    one_bit = f'{{kind="1bit", freeze_step={steps // 21}}}'
    zero_one = f'{{kind="0/1", freeze_step={steps // 21}, kappa={steps}, local_scaler={steps // 2}, most_local=2}}'
    return {
        "AdamW": [],
        "1-bit Adam": ["plan.exact=false", f"train.compressed={one_bit}"],
        "0/1 Adam": ["plan.exact=false", f"train.compressed={zero_one}"],
    }


def train(run_file: Path, folder: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train, and return the last loss on held-out data and the bytes of a rank over `data`."""
    given = [f"train.steps={steps}", f"train.profile=0:{steps}", f"train.evaluate_every={steps}", "train.device=cpu"]
    command = [sys.executable, "-m", "weft", "train", str(run_file), f"folder={folder}", *given, *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    calls = read_recording(folder)[0].calls
    return {
        "held_out_loss": next(line["loss"] for line in reversed(lines) if line["kind"] == "evaluation"),
        "data_bytes": sum(call.num_bytes for call in calls if call.axis == "data"),
        "overrides": overrides,
    }


def main() -> None:
    parser = harness.options(__doc__, "compressed-quality-cpu.json")
    parser.add_argument("--run-file", type=Path, default=ROOT / "examples" / "quickstart.toml")
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as text:
        for name, overrides in optimizers(arguments.steps).items():
            rows[name] = train(arguments.run_file, Path(text) / name.replace("/", "-"), arguments.steps, overrides)
            row, exact = rows[name], rows["AdamW"]
            row["loss_above_adamw"] = row["held_out_loss"] / exact["held_out_loss"] - 1
            row["bytes_of_adamw"] = row["data_bytes"] / exact["data_bytes"]
            row["within_aim"] = row["loss_above_adamw"] <= AIM_LOSS and row["bytes_of_adamw"] <= AIM_BYTES
            print(name, row, flush=True)
    result = {
        "aim": {"loss_above_adamw": AIM_LOSS, "bytes_of_adamw": AIM_BYTES},
        "run_file": arguments.run_file.name,
        "steps": arguments.steps,
        "optimizers": rows,
    }
    harness.write(arguments.out, result, device="cpu")


if __name__ == "__main__":
    main()
