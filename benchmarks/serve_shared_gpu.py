"""Ranks that share one GPU by MPS: times of small sums by each strategy, decodes over x with each, and weights in host
memory on one rank and on two replicas that read them together.

    LD_PRELOAD=libnccl.so.2 python benchmarks/serve_shared_gpu.py --out results.json

NCCL must let ranks share a GPU (2.30 or later); Gloo carries collectives otherwise. Weights are constants.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import harness
import torch

from weft.comm.small_measure import measured_seconds
from weft.comm.small_sums import with_symmetric_memory
from weft.launch.local_ranks import run_local
from weft.launch.mps import shared_gpu_service
from weft.mesh import Mesh
from weft.models import DecoderConfig
from weft.plan import Plan, Tensor
from weft.serve.engine import Engine
from weft.serve.follow_steps import follow_steps
from weft.serve.model.model_part import EngineOptions, ModelPart
from weft.serve.model.ranks import ServingRanks, Sums
from weft.serve.parallel.rank_part import build_part
from weft.serve.replicas import ReplicaFront, serve_replica
from weft.serve.scheduling.request import Request, Sampling

SIZES = (8 << 10, 64 << 10, 256 << 10, 1 << 20)
SECONDS = 120.0
NUM_WARM, NUM_STEPS = 8, 40


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    given = parser.parse_args()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    found: dict[str, Any] = {"layers": given.layers, "hidden": given.hidden}
    with shared_gpu_service(os.environ, print) as variables:
        os.environ.update(variables)
        found["MPS"] = bool(variables)
        for number in (2, 4):
            found[f"sums of {number} ranks, us"] = on_ranks(given, number, lambda index, n=number: sums(given, n))
            show(found)
        for name in ("library", "one_shot", "symmetric_one_shot", "symmetric_two_shot", "measured"):
            plan = Plan(tensor=Tensor(2))
            decoded = on_ranks(given, 2, lambda index, plan=plan, name=name: decodes(given, plan, name, 0, 1))
            found[f"x = 2, --sums {name}, 1 request"] = decoded
            show(found)
        for plan in (Plan(), Plan(data=2), Plan(tensor=Tensor(2))):
            for number in (1, 16):
                decoded = on_ranks(
                    given, plan.num_ranks, lambda index, plan=plan, n=number: decodes(given, plan, "library", 2, n)
                )
                found[f"--stream-weights 2, {plan.describe_axes() or 'one rank'}, {number} requests a replica"] = (
                    decoded
                )
                show(found)
    if given.out is not None:  # the GPU is named last, as ranks are forked from a process that has not used it
        harness.write(given.out, found)


def show(found: dict[str, Any]) -> None:
    name = list(found)[-1]
    print(f"{name}: {json.dumps(found[name])}", flush=True)


def on_ranks(given: Any, num_ranks: int, job: Any) -> Any:
    """What rank 0 gives, or why there is nothing."""
    try:
        return run_local(job, num_ranks, SECONDS, given.device)[0]
    except Exception as error:  # one that fails must not lose the others
        return f"{type(error).__name__}: {str(error)[-300:]}"


def device_of(given: Any) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")


def sums(given: Any, num_ranks: int) -> Any:
    """Microseconds of a sum alone, by bytes and strategy."""
    device = device_of(given)
    mesh = Mesh(Plan(tensor=Tensor(num_ranks)), device)
    axis, reason = with_symmetric_memory(mesh["x"], device)
    rows = measured_seconds(axis, device, SIZES)
    times = {
        size: {name: round(1e6 * one, 1) for name, one in row.items()} for size, row in zip(SIZES, rows, strict=True)
    }
    return {**times, "without symmetric memory": reason}


def decodes(given: Any, plan: Plan, sums: Sums, ahead: int, num_requests: int) -> Any:
    """Tokens per second of decodes, and milliseconds of a step."""
    device = device_of(given)
    mesh = Mesh(plan, device)
    ranks = ServingRanks(mesh, sums, ahead > 0, print)
    replicas = mesh.with_own_group("data", "requests") if plan.data > 1 else mesh["data"]
    sizes = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "num_hidden_layers": given.layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512}
    model, _ = build_part(DecoderConfig("llama", vocab_size=32000, **sizes, **heads), ranks.place)  # type: ignore[arg-type]
    model.to(torch.bfloat16).to_empty(device="cpu" if ahead else device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    options = EngineOptions(num_blocks=1024, max_running=64, device=device, stream_weights=ahead)
    if not ranks.is_lead:
        return follow_steps(ModelPart(model, options, ranks))
    own = Engine(model, options, ranks)
    if replicas.index > 0:
        return serve_replica(own, replicas)
    engine = ReplicaFront(own, replicas, 64) if plan.data > 1 else own
    for index in range(num_requests * plan.data):
        engine.add(Request(str(index), (1, 2, 3), NUM_WARM + NUM_STEPS + 8, Sampling(temperature=0)))
    for _ in range(NUM_WARM):
        engine.step()
    begin, num_tokens = time.perf_counter(), 0
    for _ in range(NUM_STEPS):
        num_tokens += len(engine.step())
    seconds = time.perf_counter() - begin
    engine.close()
    return {"tokens_per_second": round(num_tokens / seconds, 1), "step_ms": round(1e3 * seconds / NUM_STEPS, 2)}


if __name__ == "__main__":
    main()
