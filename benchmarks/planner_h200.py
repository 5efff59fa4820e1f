"""The planner on one GPU: predicted against measured seconds and peak memory of a step with weft's own trainer.

    python benchmarks/planner_h200.py [--tiny]

Two Llamas (1.2 and 6.7 billion parameters) at three batch shapes each, bf16 over fp32 state, random tokens; each case
in a process of its own. Writes benchmarks/results/planner-h200.json. `--tiny` tries the plumbing on a CPU and writes
nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.cluster import Cluster, load
from weft.config import TrainConfig
from weft.live import LiveTensors
from weft.mesh import Mesh
from weft.models import DecoderConfig, build, initialise
from weft.models.catalog import load_model
from weft.parallel import parallelize, state_tensors
from weft.plan import Memory, Plan, Recompute
from weft.planner.model import planned_model
from weft.train.compiling import compile_blocks
from weft.train.state import make_optimizer
from weft.train.step import train_step

RESULT = Path(__file__).parent / "results" / "planner-h200.json"
WARM_STEPS, STEPS = 3, 8
TINY_SEQUENCE = 64
TINY = DecoderConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)


@dataclass(frozen=True)
class Case:
    """A model of the catalog, micro-batches of so many sequences, how many of them, and recompute."""

    model: str
    micro_batch: int
    num_micro_batches: int
    sequence: int
    recompute: Recompute = "none"

    @property
    def label(self) -> str:
        count = f"{self.num_micro_batches} × " if self.num_micro_batches > 1 else ""
        return f"{self.model} {count}{self.micro_batch}×{self.sequence} recompute {self.recompute}"


CASES = (
    Case("llama-1.2b", 1, 1, 2048),
    Case("llama-1.2b", 4, 1, 4096),
    Case("llama-1.2b", 4, 2, 4096, "full"),
    Case("llama-6.7b", 1, 1, 1024),
    Case("llama-6.7b", 2, 2, 2048, "full"),
    Case("llama-6.7b", 4, 1, 2048, "full"),
)


def config_of(case: Case, is_tiny: bool) -> DecoderConfig:
    config = TINY if is_tiny else load_model(case.model)
    assert isinstance(config, DecoderConfig)
    return config


def plan_of(case: Case) -> Plan:
    return Plan(precision="bf16", micro_batch=case.micro_batch, memory=Memory(case.recompute))


def measure(case: Case, is_tiny: bool) -> dict[str, float]:
    """Median seconds of a step and the peak of what tensors take, and of what the allocator takes."""
    device = torch.device("cpu" if is_tiny else "cuda")
    plan, config = plan_of(case), config_of(case, is_tiny)
    with torch.device(device):
        model = build(config)
    initialise(model, 0)
    mesh = Mesh(plan, device)
    model = parallelize(model, plan, mesh)
    if device.type == "cuda":
        compile_blocks(model, print)
    optimizer = make_optimizer(model, TrainConfig(steps=1, batch=1))
    tokens = torch.randint(config.vocab_size, (case.micro_batch, case.sequence + 1), device=device)
    batches = [(tokens[:, :-1], tokens[:, 1:])] * case.num_micro_batches
    seconds = []
    for _ in range(WARM_STEPS + STEPS):
        start = time.perf_counter()
        result = train_step(model, optimizer, batches, mesh)
        float(result.loss)  # as the loop does
        seconds.append(time.perf_counter() - start)
    found: dict[str, float] = {"seconds": statistics.median(seconds[WARM_STEPS:])}
    if device.type == "cuda":
        found |= {"bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    else:
        with LiveTensors(tensor for held in state_tensors(model, optimizer).values() for tensor in held) as live:
            train_step(model, optimizer, batches, mesh)
        found["bytes"] = live.peak_bytes
    return found


def predict(case: Case, cluster: Cluster, is_tiny: bool) -> dict[str, float]:
    """What the planner says: seconds, and bytes with and without what the allocator and libraries take."""
    model, plan = planned_model(config_of(case, is_tiny), case.sequence, cluster), plan_of(case)
    held = model.held(plan, case.num_micro_batches)
    return {
        "seconds": model.steps.step(plan, case.num_micro_batches).seconds,
        "bytes": held.tensor_bytes,
        "total_bytes": held.total_bytes,
    }


def run(case: Case, is_tiny: bool) -> dict[str, object]:
    """A case in a process of its own."""
    options = ["--case", str(CASES.index(case)), *(["--tiny"] if is_tiny else [])]
    left = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, timeout=400)
    if left.returncode:
        return {"case": case.label, "error": left.stderr.strip().splitlines()[-1][:300]}
    measured = json.loads(left.stdout.splitlines()[-1])
    predicted = predict(replace(case, sequence=TINY_SEQUENCE) if is_tiny else case, load("h200:1x1"), is_tiny)
    errors = {f"{key}_error": predicted[key] / measured[key] - 1 for key in ("seconds", "bytes") if key in measured}
    return {"case": case.label, "measured": measured, "predicted": predicted, **errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.case is not None:
        case = CASES[options.case]
        print(json.dumps(measure(replace(case, sequence=TINY_SEQUENCE) if options.tiny else case, options.tiny)))
        return
    rows = []
    for case in CASES:
        rows.append(run(case, options.tiny))
        print(json.dumps(rows[-1]), flush=True)
    if options.tiny:
        return
    hardware = {"device": torch.cuda.get_device_name(), "cpu": platform.processor() or platform.machine()}
    found = {"benchmark": "planner_h200", "hardware": hardware, "torch": torch.__version__, "cases": rows}
    options.out.parent.mkdir(exist_ok=True, parents=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
