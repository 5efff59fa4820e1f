"""What recording communication costs: steps of a sharded decoder on two CPU ranks, every third one recorded.

Each three steps are one recorded and two unrecorded ones, "off" and "again", in an order that rotates, so that all meet
the same load of the machine. Results are ratios of medians: recorded to "off", and "again" to "off", which is the noise
of the comparison. Both are given for the time of a step and for the CPU time of a rank, which other programs disturb
less. A third result is the CPU time of the recorder alone for one call, in a loop. Aim: below 1 % of a step of at least
20 ms.

    python benchmarks/recorder_overhead.py [--steps 300]
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

import harness
import torch
import torch.nn.functional as F

from weft.comm.recorder import Recorder
from weft.health.rank_status import Status
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import Decoder, DecoderConfig
from weft.parallel.apply import parallelize
from weft.plan import Plan, Shard

MODEL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SEQUENCES, TOKENS, VOCABULARY = 4, 64, 512
AIM, LEAST_STEP_SECONDS = 0.01, 0.02
KINDS = ("off", "recorded", "again")


def rank(index: int, steps: int) -> dict[str, Any]:
    """Train, with every third step recorded. Returns this rank's times of the three kinds of steps."""
    plan = Plan(shard=Shard(2, 3))
    mesh = Mesh(plan)
    torch.manual_seed(0)
    heads = {"num_key_value_heads": MODEL["num_attention_heads"], "vocab_size": VOCABULARY}
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS + 1))
    model = parallelize(Decoder(DecoderConfig(**MODEL, **heads)), plan, mesh, example=tokens[:, :-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh.ledger.status = Status({}, index)
    recorder = Recorder(mesh.ledger.status)
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in range(steps):
        kind = KINDS[(step + step // 3) % 3]
        mesh.ledger.recorder = recorder if kind == "recorded" else None
        began, worked = time.perf_counter(), time.process_time()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cpu[kind].append(time.process_time() - worked)
        wall[kind].append(time.perf_counter() - began)
    mesh.ledger.recorder = None
    recorder.finish()
    return {
        "wall": wall,
        "cpu": cpu,
        "calls_per_step": len(recorder.calls) / len(wall["recorded"]),
    }


def seconds_of_a_call(calls: int = 20_000) -> float:
    """CPU seconds of the recorder for one call, the least of several repeats."""
    repeats = []
    for _ in range(7):
        recorder = Recorder(Status({}, 0))
        site = recorder.site("shard", "all_gather", [0, 1])
        began = time.process_time()
        for _ in range(calls):
            recorder.begin(site, 1024)
            started = recorder.take_started()
            recorder.wait_begins(started)
            recorder.wait_ends(started)
        repeats.append((time.process_time() - began) / calls)
    return min(repeats)


def main() -> None:
    parser = harness.options(__doc__, "recorder-overhead-cpu.json")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    call_seconds = seconds_of_a_call()
    found = run_local(lambda index: rank(index, arguments.steps), 2, 1800.0)
    warm = min(10, arguments.steps // 8)

    def median(clock: str, kind: str) -> float:
        return statistics.median([one for each in found for one in each[clock][kind][warm:]])

    def over(clock: str, kind: str) -> float:
        return median(clock, kind) / median(clock, "off") - 1

    off, calls = median("wall", "off"), found[0]["calls_per_step"]
    result = {
        "aim": AIM,
        "wall_ratio": over("wall", "recorded"),
        "wall_noise": over("wall", "again"),
        "cpu_ratio": over("cpu", "recorded"),
        "cpu_noise": over("cpu", "again"),
        "calls_ratio": calls * call_seconds / off,
        "step_seconds": off,
        "step_is_long_enough": off >= LEAST_STEP_SECONDS,
        "calls_per_step": calls,
        "recorder_seconds_per_call": call_seconds,
        "steps_measured": arguments.steps - 3 * warm,
        "load_average": os.getloadavg(),
        "ranks": "2, with one thread",
    }
    harness.write(arguments.out, result, device="cpu")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
