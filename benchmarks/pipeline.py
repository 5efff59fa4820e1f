"""Weft's pipeline beside torch.distributed.pipelining, beside its own simulation, and beside itself.

- `peers`: one Llama, cut at the same layers, the same micro-batches, loss normalisation, clipping and AdamW, in one run
  on the same CPU ranks; `side_by_side.py` says how they are held against each other. Aims, weft over peer: step time at
  most 1.05, bytes of messages at most 1.0.
- `simulation` and `slowed` (`sleeping.py`): kernels that sleep. Aims: a step within 5 % of the simulated one; a
  message-driven order faster than 1f1b when a stage is late at random.
- `memory` (`pipeline_memory.py`): what each schedule holds for backward.

    python benchmarks/pipeline.py [--steps 40] [--peers "pipe 2 (1f1b)"]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import harness
import pipeline_memory
import sleeping
import torch
from side_by_side import (
    AIMS,
    CLIP,
    CONVENTIONS,
    LEARNING_RATE,
    Comparison,
    Side,
    environment,
    make_model,
    measure,
    random_batches,
)
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.optim import AdamW
from torch_layouts import CountCalls, Totals
from torch_pipelines import MakeSchedule, TorchPipeline, of_all_ranks

from weft.mesh import Mesh
from weft.models import DecoderConfig
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.plan import Pipe, Plan
from weft.schema import to_table
from weft.step.batch import Batch
from weft.step.train_step import train_step

CONFIG = DecoderConfig(
    vocab_size=2048, hidden_size=256, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4
)
MICRO_BATCHES, MICRO_BATCH, SEQUENCE = 8, 1, 128
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
COUNTED = {"bytes": "all ranks, one step: messages between stages"}


@dataclass(frozen=True)
class Case:
    """A schedule of weft and torch's of the same order."""

    num_ranks: int
    schedule: ScheduleName
    peer: MakeSchedule
    chunks: int = 1

    @property
    def plan(self) -> Plan:
        num_stages = self.num_ranks * self.chunks
        each = CONFIG.num_hidden_layers // num_stages
        split = tuple(f"model.layers.{stage * each}" for stage in range(1, num_stages))
        chunks = self.chunks if self.schedule == "interleaved" else None
        return Plan(pipe=Pipe(self.num_ranks, self.schedule, chunks, split=split), micro_batch=MICRO_BATCH)

    @property
    def name(self) -> str:
        return self.plan.describe_axes()

    @property
    def comparison(self) -> Comparison:
        batches = partial(random_batches, CONFIG.vocab_size, (MICRO_BATCHES * MICRO_BATCH, SEQUENCE), 0)
        return Comparison(self.name, self.peer.__name__, self.num_ranks, self._sides, batches)

    def _sides(self) -> dict[str, Side]:
        peer = TorchPipeline(make_model(CONFIG), self.peer, self.chunks, MICRO_BATCHES)
        return {"weft": Weft(self.plan), "peer": peer}


def cases() -> Iterator[Case]:
    """Every comparison, at 2 and 4 ranks."""
    for ranks in (2, 4):
        yield Case(ranks, "gpipe", ScheduleGPipe)
        yield Case(ranks, "1f1b", Schedule1F1B)
        yield Case(ranks, "interleaved", ScheduleInterleaved1F1B, chunks=2)
        yield Case(ranks, "zero-bubble", ScheduleInterleavedZeroBubble)


class Weft:
    """Weft's side."""

    def __init__(self, plan: Plan) -> None:
        self.mesh = Mesh(plan)
        tokens = torch.zeros(MICRO_BATCH, SEQUENCE, dtype=torch.int64)
        self.model = parallelize(make_model(CONFIG), plan, self.mesh, example=lambda: (tokens,))
        self.optimizer = AdamW([piece for _, piece in named_pieces(self.model)], lr=LEARNING_RATE, fused=True)

    def step(self, batch: Batch) -> tuple[float, float]:
        micro_batches = list(zip(*(tensor.split(MICRO_BATCH) for tensor in batch), strict=True))
        result = train_step(self.model, self.optimizer, micro_batches, self.mesh, clip=CLIP)
        return result.loss.item(), result.grad_norm.item()

    def count(self, batch: Batch) -> Totals:
        self.mesh.ledger.clear()
        with CountCalls() as calls:
            self.step(batch)
        sent = self.mesh.ledger.entries()["pipe", "send"]
        counted = {kind: calls.tally.totals[kind]["send"] for kind in ("calls", "bytes")}
        assert counted == {"calls": sent.calls, "bytes": sent.num_bytes}, f"the ledger has {sent}, torch {counted}"
        return of_all_ranks(calls)


def peers(starts: tuple[str, ...], num_steps: int) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each comparison whose layout starts so, with its section and a line for people."""
    for case in cases():
        if case.name.startswith(starts):
            one = measure(case.comparison, num_steps)
            yield "peers", one, show(one)


def show(one: Mapping[str, Any]) -> str:
    """A line of the table."""
    low, high = one["step_ratio_quartiles"]
    return (
        f"{one['layout']:24}{one['peer']:32}{one['step_ratio']:6.3f}{f'{low:.2f}-{high:.2f}':>11}"
        f"{one['cpu_ratio']:7.3f}{one['bytes_ratio']:7.4f}"
    )


def main() -> None:
    parser = harness.options(__doc__, "pipeline-cpu.json")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peers", nargs="*", help="only peers whose layouts start so; printed, not written")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "aims": AIMS,
        "conventions": {
            "peers": CONVENTIONS | COUNTED,
            "sleeping": sleeping.CONVENTIONS,
            "memory": pipeline_memory.CONVENTIONS,
        },
        "model": to_table(CONFIG),
        "batch": {"micro_batches": MICRO_BATCHES, "sequences_of_each": MICRO_BATCH, "tokens": SEQUENCE},
        "steps_measured": arguments.steps,
        **environment(),
    }
    print(f"{'layout':24}{'peer':32}{'step':>6}{'quartiles':>11}{'cpu':>7}{'bytes':>7}")
    found = peers(tuple(arguments.peers or ("",)), arguments.steps)
    if arguments.peers is None:
        found = chain(found, sleeping.results(), pipeline_memory.results(CONFIG, SEQUENCE))
    sections: dict[str, list[Mapping[str, Any]]] = {}
    for section, one, line in found:
        sections.setdefault(section, []).append(one)
        print(line, flush=True)
    if arguments.peers is None:
        result |= {"load_average_after": os.getloadavg()[0], **sections}
        harness.write(arguments.out, result, device="cpu")


if __name__ == "__main__":
    main()
