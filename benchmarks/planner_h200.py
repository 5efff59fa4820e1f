"""The planner on one GPU: predicted against measured seconds and peak memory of a step with weft's own trainer.

    python benchmarks/planner_h200.py [--only TEXT] [--out FILE]     measure and predict
    python benchmarks/planner_h200.py --predict                      predict again for the rows that were measured
    python benchmarks/planner_h200.py --tiny                         tries the plumbing on a CPU and writes nothing

Language models of 1 to 8 billion parameters, tied and untied, sequences of 2,048 to 16,384 tokens, every recompute
policy, accumulation; bf16, random tokens. Each case runs in a process of its own. A row also has the seconds of one
step by kind of kernel (torch's profiler), which says where a prediction is wrong. Writes
benchmarks/results/planner-h200.json: `first_errors` are those of the model as it was when the rows were measured.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from one_gpu import weft_model

from weft.cluster.hardware import Cluster, load
from weft.models import DecoderConfig
from weft.optim.saved_state import make_optimizer
from weft.plan import Memory, Plan, Recompute
from weft.planner.model import planned_model
from weft.run_tables import TrainConfig
from weft.step.train_step import train_step

RESULT = harness.RESULTS / "planner-h200.json"
WARM_STEPS, STEPS = 2, 5
TINY_SEQUENCE = 64
TINY = DecoderConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)


def _decoder(
    architecture: Any, hidden: int, layers: int, heads: int, keys: int, inner: int, vocabulary: int, tied: bool = True,
    head_dim: int = 0,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=head_dim,
        max_position_embeddings=16384,
        tie_word_embeddings=tied,
    )


MODELS = {
    "qwen2-1.5b": _decoder("qwen2", 1536, 28, 12, 2, 8960, 151936),
    "llama3.2-1b": _decoder("llama", 2048, 16, 32, 8, 8192, 128256),
    "llama3.2-3b": _decoder("llama", 3072, 28, 24, 8, 8192, 128256),
    "qwen3-4b": _decoder("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128),
    "mistral-7b": _decoder("mistral", 4096, 32, 32, 8, 14336, 32000, tied=False),
    "llama3-8b": _decoder("llama", 4096, 32, 32, 8, 14336, 128256, tied=False),
    "qwen2.5-7b": _decoder("qwen2", 3584, 28, 28, 4, 18944, 152064, tied=False),
    "tinyllama-1.1b": _decoder("llama", 2048, 22, 32, 4, 5632, 32000, tied=False),
    "smollm-1.7b": _decoder("llama", 2048, 24, 32, 32, 8192, 49152),
    "llama-2.8b-head-80": _decoder("llama", 2560, 32, 32, 32, 6912, 50304, tied=False),
}


@dataclass(frozen=True)
class Case:
    """A model, micro-batches of so many sequences, how many of them, recompute, and bits of the optimizer's state."""

    model: str
    micro_batch: int
    sequence: int
    recompute: Recompute = "none"
    num_micro_batches: int = 1
    has_small_state: bool = False

    @property
    def label(self) -> str:
        count = f"{self.num_micro_batches} × " if self.num_micro_batches > 1 else ""
        state = ", bf16 state" if self.has_small_state else ""
        return f"{self.model} {count}{self.micro_batch}×{self.sequence} recompute {self.recompute}{state}"


CASES = (
    Case("qwen2-1.5b", 4, 4096),
    Case("llama3.2-3b", 2, 4096),
    Case("qwen3-4b", 2, 4096, "selective"),
    Case("mistral-7b", 2, 4096, "selective", has_small_state=True),
    Case("qwen2-1.5b", 1, 16384, "full"),
    Case("qwen2-1.5b", 1, 2048, num_micro_batches=8),
    Case("llama3.2-1b", 2, 8192),
    Case("llama3.2-1b", 8, 2048, "selective"),
    Case("llama3.2-3b", 1, 16384, "selective"),
    Case("llama3.2-3b", 1, 4096, num_micro_batches=4),
    Case("qwen3-4b", 4, 4096, "full"),
    Case("mistral-7b", 1, 8192, has_small_state=True),
    Case("llama3-8b", 2, 4096, "full", has_small_state=True),
    Case("llama3-8b", 1, 8192, "selective", 2, has_small_state=True),
    Case("qwen2.5-7b", 1, 4096, has_small_state=True),
    Case("tinyllama-1.1b", 8, 2048),
    Case("smollm-1.7b", 4, 2048, "full"),
    Case("llama-2.8b-head-80", 2, 2048),
)


def config_of(case: Case, is_tiny: bool) -> DecoderConfig:
    return TINY if is_tiny else MODELS[case.model]


def plan_of(case: Case) -> Plan:
    if case.has_small_state:
        memory = Memory(case.recompute, master=False, state="bf16")
        return Plan(precision="bf16", exact=False, micro_batch=case.micro_batch, memory=memory)
    return Plan(precision="bf16", micro_batch=case.micro_batch, memory=Memory(case.recompute))


# --- in a process of its own


def measure(case: Case, is_tiny: bool) -> dict[str, Any]:
    """Median seconds of a step, the peak of what tensors take, and the seconds of kernels by kind."""
    device = torch.device("cpu" if is_tiny else "cuda")
    plan, config = plan_of(case), config_of(case, is_tiny)
    with ExitStack() as stack:
        batch = (case.micro_batch, case.sequence)
        model, mesh, kernel = weft_model(config, plan, batch, device, stack, compiles=not is_tiny)
        optimizer = make_optimizer(model, TrainConfig(steps=1, batch=1))
        tokens = torch.randint(config.vocab_size, (case.micro_batch, case.sequence + 1), device=device)
        batches = [(tokens[:, :-1], tokens[:, 1:])] * case.num_micro_batches

        def step() -> float:
            start = time.perf_counter()
            float(train_step(model, optimizer, batches, mesh).loss)
            return time.perf_counter() - start

        first, *seconds = [step() for _ in range(1 + WARM_STEPS + STEPS)]
        found: dict[str, Any] = {"seconds": statistics.median(seconds[WARM_STEPS:]), "first_seconds": first}
        if device.type == "cuda":
            found |= {"bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
            found |= {"attention": kernel, "kernels": kernel_seconds(step)}
    return found


def kernel_seconds(step: Any) -> dict[str, Any]:
    """The seconds of one step's kernels by kind, the longest ones by name, and the longest operations by shapes."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
    kinds: dict[str, float] = {}
    longest, operations = [], []
    for one in profiler.key_averages(group_by_input_shape=True):
        seconds = one.self_device_time_total / 1e6
        if one.device_type == torch.autograd.DeviceType.CPU:
            operations.append([round(seconds, 6), one.count, one.key[:60], str(one.input_shapes)[:160]])
        elif not getattr(one, "is_user_annotation", False):
            kind = _kind(one.key.lower())
            kinds[kind] = kinds.get(kind, 0.0) + seconds
            longest.append([round(seconds, 6), one.count, one.key[:90]])
    found = (sorted(each, reverse=True)[:count] for each, count in ((longest, 24), (operations, 32)))
    return {"kinds": kinds, **dict(zip(("longest", "operations"), found, strict=True))}


def _kind(name: str) -> str:
    """Of a kernel's name, in small letters."""
    if "triton" in name:
        return "triton"
    if any(part in name for part in ("flash", "fmha", "sdpa", "cudnn")):
        backward = ("bwd", "backward", "bprop", "dot_do_o", "convert_dq", "reduce_head")
        return "attention backward" if any(part in name for part in backward) else "attention forward"
    if any(part in name for part in ("gemm", "nvjet", "cutlass", "cublas", "splitk")):
        return "matmul"
    if name in ("_update", "_take"):
        return "optimizer"
    return "loss" if name == "_rows" else "memcpy" if name.startswith("mem") else "other"


# --- all of them


def predict(case: Case, cluster: Cluster, is_tiny: bool) -> dict[str, float]:
    """What the planner says: seconds, and bytes with and without what the allocator and libraries take."""
    model, plan = planned_model(config_of(case, is_tiny), case.sequence, cluster), plan_of(case)
    held = model.held(plan, case.num_micro_batches)
    timed = model.steps.step(plan, case.num_micro_batches)
    return {"seconds": timed.seconds, "bytes": held.tensor_bytes, "total_bytes": held.total_bytes}


def compared(case: Case, measured: dict[str, Any], is_tiny: bool) -> dict[str, Any]:
    """A row: what was measured, what is predicted, and by how much that is off."""
    predicted = predict(case, load("h200:1x1"), is_tiny)
    errors = {f"{key}_error": predicted[key] / measured[key] - 1 for key in ("seconds", "bytes") if key in measured}
    return {"case": case.label, "measured": measured, "predicted": predicted, **errors}


def start(case: Case, is_tiny: bool, gate: Path) -> subprocess.Popen[str]:
    """A case in a process of its own, which imports at once and computes when it holds the gate."""
    options = ["--case", str(CASES.index(case)), "--gate", str(gate), *(["--tiny"] if is_tiny else [])]
    command = [sys.executable, __file__, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(case: Case, process: subprocess.Popen[str], is_tiny: bool) -> dict[str, Any]:
    out, errors = process.communicate(timeout=400)
    if process.returncode:
        return {"case": case.label, "error": errors.strip().splitlines()[-1][:300]}
    return compared(case, json.loads(out.splitlines()[-1]), is_tiny)


def show(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']:60}{row['error']}"
    measured = row["measured"]
    return (
        f"{row['case']:60}{measured['seconds'] * 1e3:9.1f} ms {row['seconds_error']:+7.1%}   "
        f"{measured.get('bytes', 0) / 2**30:7.2f} GiB {row.get('bytes_error', 0):+7.2%}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for key in ("seconds_error", "bytes_error"):
        errors = [abs(row[key]) for row in rows if key in row]
        if errors:
            found |= {f"mean_{key}": statistics.mean(errors), f"worst_{key}": max(errors)}
    return found


def write(path: Path, rows: list[dict[str, Any]], first: list[dict[str, Any]] | None, hardware: dict[str, Any]) -> None:
    """`first`: the errors as they came out when the rows were measured."""
    found = {**hardware, "summary": summary(rows), "cases": rows}
    found |= {"first_errors": first} if first is not None else {}
    path.parent.mkdir(exist_ok=True, parents=True)
    text = re.sub(r"\[[^][{}]*\]", lambda one: " ".join(one.group().split()), json.dumps(found, indent=1))
    path.write_text(text + "\n")  # a list of plain values in one line


def errors_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("case", "seconds_error", "bytes_error") if key in row} for row in rows]


def main() -> None:
    parser = harness.options(__doc__, "planner-h200.json", "a tiny model on the CPU")
    parser.add_argument("--predict", action="store_true", help="only predict, for the rows in the result file")
    parser.add_argument("--only", default="", help="cases whose label has this text")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case = CASES[options.case]
        with open(options.gate, "w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            print(json.dumps(measure(replace(case, sequence=TINY_SEQUENCE) if options.tiny else case, options.tiny)))
        return
    rows = []
    if options.predict:
        known = json.loads(options.out.read_text())
        for case in CASES:
            row = next((row for row in known["cases"] if row["case"] == case.label and "measured" in row), None)
            if row is not None:
                rows.append(compared(case, row["measured"], False))
                print(show(rows[-1]), flush=True)
        print(summary(rows))
        head = ("benchmark", "date", "command", "device", "cpu", "cpu_cores", "torch", "versions", "note")
        write(options.out, rows, known.get("first_errors"), {key: known[key] for key in head if key in known})
        return
    cases = [case for case in CASES if options.only in case.label]
    hardware = harness.facts(device="cpu" if options.tiny else "cuda")
    with tempfile.TemporaryDirectory() as folder:
        running = [start(case, options.tiny, Path(folder) / "gate") for case in cases[:1]]
        for index, case in enumerate(cases):
            if index + 1 < len(cases):
                time.sleep(0 if index else 1)  # the first holds the gate before the second asks for it
                running.append(start(cases[index + 1], options.tiny, Path(folder) / "gate"))
            rows.append(finish(replace(case, sequence=TINY_SEQUENCE) if options.tiny else case, running[index],
                               options.tiny))  # fmt: skip
            print(show(rows[-1]), flush=True)
            if not options.tiny:  # what is known, should the rest be stopped
                write(options.out, rows, errors_of(rows), hardware)
    print(summary(rows))


if __name__ == "__main__":
    main()
