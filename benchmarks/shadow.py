"""What shadows (plan.pipe.shadow) cost a step in which nothing fails: kernels that sleep (`sleeping.py`), with and
without shadows by turns in one run, against the simulated timeline. Aim: at most 5 points above what that predicts.

    python benchmarks/shadow.py [--steps 8]
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import harness
import sleeping
import torch
import torch.distributed as dist
from side_by_side import environment

from weft.launch.local_ranks import run_local
from weft.plan import Pipe
from weft.schedule import simulate

ROOT = Path(__file__).parents[1]
AIM_POINTS = 5.0
CONVENTIONS = {
    "overhead_percent": "what a step takes longer with shadows: measured, the median over pairs of steps of the "
    "slowest rank; predicted, of the simulated makespans",
    "waits_percent": "the share of all ranks' time in which they wait without shadows, simulated",
}


def measure(schedule: Literal["gpipe", "1f1b"], num_steps: int) -> dict[str, Any]:
    """A schedule's overhead, measured and predicted."""
    plain = Pipe(sleeping.RANKS, schedule)

    def rank(index: int) -> dict[str, Any]:
        sleepers = [sleeping.Sleeper(plain), sleeping.Sleeper(replace(plain, shadow=True))]
        timelines = [simulate(one.schedule, *vars(one.seconds).values()) for one in sleepers]
        seconds: list[list[float]] = [[], []]
        for number in range(1 + num_steps):
            for side in (0, 1) if number % 2 else (1, 0):
                taken, _ = sleepers[side].step()
                if number:
                    seconds[side].append(taken)
        dist.barrier()
        simulated = [timeline.makespan_seconds for timeline in timelines]
        return {"seconds": seconds, "simulated": simulated, "waits": timelines[0].bubble_share}

    answers = run_local(rank, plain.degree, timeout_seconds=500.0)
    both = [
        [max(step) for step in zip(*(answer["seconds"][side] for answer in answers), strict=True)] for side in (0, 1)
    ]
    ratios = [b / a for a, b in zip(*both, strict=True)]
    before, after = answers[0]["simulated"]
    overhead = {"measured": 100 * (statistics.median(ratios) - 1), "predicted": 100 * (after / before - 1)}
    return {
        "schedule": schedule,
        "overhead_percent": overhead,
        "points_above": overhead["measured"] - overhead["predicted"],
        "waits_percent": 100 * answers[0]["waits"],
        "step_seconds": {
            "plain": {"measured": statistics.median(both[0]), "simulated": before},
            "shadow": {"measured": statistics.median(both[1]), "simulated": after},
        },
    }


def main() -> None:
    parser = harness.options(__doc__, "shadow-cpu.json")
    parser.add_argument("--steps", type=int, default=8, help="pairs of steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for schedule in ("1f1b", "gpipe"):
        one = measure(schedule, options.steps)  # type: ignore[arg-type]
        found.append(one)
        overhead = one["overhead_percent"]
        print(
            f"{schedule:6} {overhead['measured']:5.1f} % longer with shadows, predicted {overhead['predicted']:5.1f} %",
            flush=True,
        )
    result = {
        "aim": f"at most {AIM_POINTS:g} points above the prediction",
        "conventions": CONVENTIONS,
        "num_ranks": sleeping.RANKS,
        "micro_batches": sleeping.MICRO_BATCHES,
        "seconds": vars(sleeping.SECONDS),
        "pairs_of_steps": options.steps,
        **environment(),
        "schedules": found,
    }
    harness.write(options.out, result, device="cpu")


if __name__ == "__main__":
    main()
