"""Weft and a peer take the same steps on the same CPU ranks, in one run: what `peers.py`, `peers_experts.py` and
`pipeline.py` share.

Losses and gradient norms must agree over the first steps, or nothing is measured. Then steps alternate, and which side
goes first too, so that both meet the same weather on a noisy machine. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch_layouts import Totals

from weft.launch.local_ranks import run_local
from weft.models import Decoder, DecoderConfig, initialise
from weft.step.batch import Batch

CLIP, LEARNING_RATE = 1.0, 1e-3
# Largest relative differences. On a CPU torch sums the squares of a gradient one after another in float32, which is off
# by 2e-4 at four million elements (an embedding, or a flat buffer); weft sums in float64. Losses differ less.
TOLERANCES = {"loss": 1e-4, "gradient norm": 1e-3}
CHECKED_STEPS, WARM_STEPS = 3, 4
AIMS = {"step_ratio": 1.05, "bytes_ratio": 1.0}
CONVENTIONS = {
    "ratios": "weft over peer; step_ratio and cpu_ratio are medians of the ratios of neighbouring steps",
    "step_seconds": "median over steps of the slowest rank",
    "cpu_seconds": "median over steps of the CPU time of all threads of all ranks",
    "step": "count of targets, forward, backward, loss, gradient norm and clipping, fused AdamW; on both sides",
}


class Side(Protocol):
    """A model under training."""

    def step(self, batch: Batch) -> tuple[float, float]:
        """Train on this rank's batch; the loss and the gradient norm before clipping, of the whole batch."""

    def count(self, batch: Batch) -> Totals:
        """Calls and bytes of one step, by operation; made by a step of its own, because counting is slow."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to train one model; `sides` and `batches` are called on every rank."""

    layout: str
    peer: str
    num_ranks: int
    sides: Callable[[], dict[str, Side]]
    batches: Callable[[], Iterator[Batch]]


def measure(comparison: Comparison, num_steps: int) -> dict[str, Any]:
    """What a comparison found, for the result file; bytes are those of rank 0's count."""
    answers = run_local(lambda rank: _run_rank(comparison, num_steps), comparison.num_ranks, timeout_seconds=900.0)
    seconds, busy = {}, {}
    for side in ("weft", "peer"):
        ranks = [answer[side] for answer in answers]
        seconds[side] = [max(steps) for steps in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        busy[side] = [sum(steps) for steps in zip(*(rank["cpu_seconds"] for rank in ranks), strict=True)]
    traffic: dict[str, Totals] = {side: answers[0][side]["traffic"] for side in ("weft", "peer")}
    kinds = [kind for kind in traffic["weft"] if kind != "calls"]
    quartiles = statistics.quantiles(_ratios(seconds), n=4)
    return {
        "layout": comparison.layout,
        "peer": comparison.peer,
        "step_ratio": statistics.median(_ratios(seconds)),
        "step_ratio_quartiles": [quartiles[0], quartiles[2]],
        "cpu_ratio": statistics.median(_ratios(busy)),
        **{
            f"{kind}_ratio": sum(traffic["weft"][kind].values()) / sum(traffic["peer"][kind].values()) for kind in kinds
        },
        "step_seconds": {side: statistics.median(times) for side, times in seconds.items()},
        "cpu_seconds": {side: statistics.median(times) for side, times in busy.items()},
        "traffic": traffic,
        "worst_difference": max(answer["worst_difference"] for answer in answers),
    }


def _ratios(times: Mapping[str, Sequence[float]]) -> list[float]:
    return [weft / peer for weft, peer in zip(times["weft"], times["peer"], strict=True)]


def _run_rank(comparison: Comparison, num_steps: int) -> dict[str, Any]:
    sides, batches = comparison.sides(), comparison.batches()
    worst = _compare(sides, [next(batches) for _ in range(CHECKED_STEPS)])
    batch = next(batches)
    answer: dict[str, Any] = {"worst_difference": worst}
    for name, side in sides.items():
        answer[name] = {"traffic": side.count(batch), "seconds": [], "cpu_seconds": []}
    for number in range(WARM_STEPS + num_steps):
        batch = next(batches)
        for name in list(sides)[:: 1 if number % 2 else -1]:
            dist.barrier()
            wall, busy = time.perf_counter(), time.process_time()
            sides[name].step(batch)
            if number >= WARM_STEPS:
                answer[name]["seconds"].append(time.perf_counter() - wall)
                answer[name]["cpu_seconds"].append(time.process_time() - busy)
    dist.barrier()
    return answer


def _compare(sides: Mapping[str, Side], batches: Sequence[Batch]) -> float:
    """The worst relative difference of losses and norms; the sides must have computed the same thing."""
    worst = 0.0
    for step, batch in enumerate(batches):
        found = {name: side.step(batch) for name, side in sides.items()}
        for what, weft, peer in zip(TOLERANCES, found["weft"], found["peer"], strict=True):
            difference = abs(weft - peer) / abs(peer)
            assert difference <= TOLERANCES[what], f"step {step}: {what} is {weft} with weft, {peer} with its peer"
            worst = max(worst, difference)
    return worst


def make_model(config: DecoderConfig) -> Decoder:
    """The same on every rank and side."""
    model = Decoder(config)
    initialise(model, 0)
    return model


def random_batches(vocab_size: int, shape: tuple[int, int], seed: int) -> Iterator[Batch]:
    """Tokens and labels [sequences, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, vocab_size, (shape[0], shape[1] + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def environment() -> dict[str, Any]:
    """Where and when numbers were taken."""
    return {
        "ranks": "one thread each, over Gloo",
        "load_average_before": os.getloadavg()[0],
    }
