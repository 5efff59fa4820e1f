"""Does K-FAC need fewer steps, or less time, than AdamW to a given loss? A small decoder learns a random Markov chain.

Both are tuned over a grid on one seed, and the best of each is compared on others. The loss to reach is that of the
chain itself plus `--above`. Time is that of the one thread that computes: other work on the machine does not
count.

    OMP_NUM_THREADS=1 python benchmarks/kfac.py [--steps 60] [--seeds 2] [--out benchmarks/results/kfac-cpu.json]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import harness
import torch
from moments import BATCH, SEQUENCE, VOCABULARY, batch, chain
from torch import Tensor

from weft.mesh import Mesh
from weft.models import DecoderConfig, build, initialise
from weft.optim.saved_state import make_optimizer
from weft.parallel.apply import parallelize
from weft.plan import Plan
from weft.run_tables import Kfac, TrainConfig
from weft.step.train_step import train_step

WINDOW = 10  # the loss is a mean over so many steps
ADAMW = [
    TrainConfig(steps=1, batch=BATCH, weight_decay=0.0, learning_rate=rate) for rate in (2e-3, 5e-3, 1e-2, 2e-2, 4e-2)
]
KFAC = [
    Kfac(learning_rate=rate, damping=damping, factor_every=5, inverse_every=10)
    for rate, damping in product((0.03, 0.1, 0.3), (1e-2, 1e-1))
]


@dataclass(frozen=True)
class Curve:
    """The losses of a run, and the steps and seconds to the loss that was asked for; None if it was not reached."""

    losses: list[float]
    seconds_per_step: float
    steps: int | None
    seconds: float | None


def entropy(probabilities: Tensor) -> float:
    """The least loss that any model has: tokens are nearly stationary after a few steps of the chain."""
    state = torch.full((VOCABULARY,), 1 / VOCABULARY)
    weights = torch.zeros(VOCABULARY)
    for _ in range(SEQUENCE):
        weights += state / SEQUENCE
        state = state @ probabilities
    return float(-(weights[:, None] * probabilities * probabilities.log()).sum())


def run(config: TrainConfig, steps: int, seed: int, above: float) -> Curve:
    probabilities, generator = chain(seed), torch.Generator().manual_seed(seed + 1)
    model = build(
        DecoderConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    initialise(model, seed)
    mesh = Mesh(Plan(exact=config.kfac is None))
    model = parallelize(model, mesh.plan, mesh)
    optimizer = make_optimizer(model, config, mesh)
    target, losses, ends = entropy(probabilities) + above, list[float](), list[float]()
    used = 0.0
    for _ in range(steps):
        given = batch(probabilities, generator)
        before = time.process_time()
        losses.append(float(train_step(model, optimizer, [given], mesh).loss))
        used += time.process_time() - before
        ends.append(used)
    means = [sum(losses[end - WINDOW : end]) / WINDOW for end in range(WINDOW, steps + 1)]
    reached = next((WINDOW + index for index, mean in enumerate(means) if mean <= target), None)
    seconds = None if reached is None else round(ends[reached - 1], 2)
    return Curve([round(loss, 4) for loss in losses], round(used / steps, 5), reached, seconds)


def best(configs: Sequence[TrainConfig], steps: int, above: float) -> TrainConfig:
    """The configuration that reaches the loss first; if none does, the one with the least last losses."""

    def rank(config: TrainConfig) -> tuple[int, float]:
        curve = run(config, steps, 0, above)
        last = sum(curve.losses[-WINDOW:]) / WINDOW
        name = f"AdamW {config.learning_rate:g}" if config.kfac is None else f"K-FAC {config.kfac}"
        print(f"{name}: {curve.steps} steps, {curve.seconds} s, last {last:.4f}", flush=True)
        return (curve.steps or steps + 1), last if last == last else float("inf")

    return min(configs, key=rank)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--above", type=float, default=0.3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    adamw = best(ADAMW, args.steps, args.above)
    kfac = best([replace(adamw, kfac=one) for one in KFAC], args.steps, args.above)
    found = {
        "above": args.above,
        "adamw": {"learning_rate": adamw.learning_rate},
        "kfac": None if kfac.kfac is None else asdict(kfac.kfac),
        "runs": {
            name: [asdict(run(config, args.steps, 1 + seed, args.above)) for seed in range(args.seeds)]
            for name, config in (("adamw", adamw), ("kfac", kfac))
        },
    }
    for name, curves in found["runs"].items():  # type: ignore[attr-defined]
        print(name, [(one["steps"], one["seconds"], one["seconds_per_step"]) for one in curves])
    if args.out is not None:
        harness.write(args.out, found, device="cpu")


if __name__ == "__main__":
    main()
