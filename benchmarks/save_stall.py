"""What an asynchronous save costs the quickstart's steps: blocks of steps with a save at their start and without one,
in alternation in one run, so that both meet the same weather on a noisy machine.

A save stalls the step in which the state is copied, and slows the steps behind which it is hashed and written (on CPUs
by the same cores). Both are in the block's time. Aim: at most 2 % of the steps between two saves (every 50).

    python benchmarks/save_stall.py [--blocks 24] [--length 4]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import harness
import torch

from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.run_file import Run, load_run
from weft.step.examples import micro_batch_profile
from weft.train import checkpoints, loop
from weft.train.checkpoints import save_or_tell
from weft.train.metrics import StepMetrics

ROOT = Path(__file__).parents[1]
MAX_SHARE = 0.02


class Silent:
    """A reporter that says nothing."""

    def step(self, metrics: StepMetrics) -> None: ...

    def say(self, message: str) -> None: ...


def measure(run: Run) -> list[dict[str, list[float]]]:
    """On each rank, the seconds of every block: of those with a save, of those without, and inside the save's call."""

    def rank(index: int) -> dict[str, list[float]]:
        began: list[float] = []
        inside: list[float] = []

        def every_second(*arguments: object) -> None:
            began.append(time.perf_counter())
            if len(began) % 2:
                save_or_tell(*arguments)  # type: ignore[arg-type]
                inside.append(time.perf_counter() - began[-1])

        place = RankInfo(index, run.plan.num_ranks, index, run.plan.num_ranks)
        with (
            patch.object(loop, "world", lambda run, place: nullcontext(Mesh(run.plan))),
            patch.object(checkpoints, "save_or_tell", every_second),
        ):
            loop.train(run, place, Silent())
        blocks = [end - start for start, end in pairwise(began)][2:]  # the first pays for memory
        return {"with": blocks[::2], "without": blocks[1::2], "inside": inside[1:]}

    return run_local(rank, run.plan.num_ranks, timeout_seconds=1800)


def main() -> None:
    parser = harness.options(__doc__, "save-stall-cpu.json")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--length", type=int, default=4, help="steps in a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quickstart = ROOT / "examples" / "quickstart.toml"
    every = load_run(quickstart, []).checkpoint.every
    assert every is not None
    with tempfile.TemporaryDirectory() as folder:
        steps = (options.blocks // 2 * 2 + 3) * options.length
        own = [f"folder={folder}/run", f"train.steps={steps}", "train.evaluate_every=1000000"]
        run = load_run(quickstart, [*own, f"checkpoint.every={options.length}"])
        micro_batch_profile(run)
        found = measure(run)[0]
    pairs = [a - b for a, b in zip(found["with"], found["without"], strict=False)]
    step = statistics.median(found["without"]) / options.length
    extra = statistics.median(pairs)
    spread = statistics.quantiles(pairs, n=4)
    result = {
        "run": "examples/quickstart.toml, 4 processes",
        "num_pairs_of_blocks": len(pairs),
        "steps_per_block": options.length,
        "step_seconds": step,
        "save_call_seconds": statistics.median(found["inside"]),
        "extra_seconds_per_save": extra,
        "extra_seconds_quartiles": [spread[0], spread[2]],
        "save_call_share_of_its_step": statistics.median(found["inside"]) / step,
        "share_of_steps_between_saves": extra / (every * step),
        "steps_between_saves": every,
        "aim": MAX_SHARE,
    }
    harness.write(options.out, result, device="cpu")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
