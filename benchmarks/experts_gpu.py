"""Experts on one GPU: weft's Qwen3-MoE beside transformers' with the same shapes, and fp8 beside bf16.

    python benchmarks/experts_gpu.py                          all parts; about 6 minutes on an H200
    python benchmarks/experts_gpu.py --only weft transformers --shapes 8x2 --profile
    python benchmarks/experts_gpu.py --check                  kernels beside their plain functions; nothing is timed
    python benchmarks/experts_gpu.py --tiny                   tiny sizes on a CPU, writes nothing

The model has hidden size 2048, 16 layers, 32 heads of 64, 8 key heads and 32,000 tokens of vocabulary; `8x2` has 8
experts of 4096 and sends each token to 2, `64x8` has 64 of 1024 and sends each to 8. Batch 4 x 4096 random tokens; the
parameters, gradients and moments of AdamW are bf16. Every part runs in a process of its own. weft's blocks are
compiled and its loss is computed in the head, as `weft train` does on a GPU; transformers runs grouped_mm experts under
torch.compile. A step is forward, backward, clipping and AdamW.

FLOPs of a step, for each token: 6 for each parameter that is active in it, the input embedding apart, and
6 · layers · heads · head_dim · sequence for causal attention. MFU is their rate over 989 TFLOP/s, the rate of dense
bf16 matmuls. `predicted` is the planner's memory of weft's tensors. Writes benchmarks/results/experts-h200.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from harness import run_apart
from one_gpu import (
    PEAK_FLOPS,
    Case,
    Step,
    _adamw,
    _update,
    batches,
    matmul_ceiling,
    predicted_bytes,
    time_steps,
    weft_contender,
)
from torch import Tensor, nn

from weft.errors import WeftError
from weft.models import DecoderConfig
from weft.models.expert_rows import fill_slots, sort_by_expert
from weft.models.row_operations import gated_gradient, spread_rows, sum_rows, take_rows, wide_gradients, wide_product

RESULT = harness.RESULTS / "experts-h200.json"
PARTS = {"weft": "weft-bf16", "weft-fp8": "weft-fp8", "transformers": "", "transformers-eager": ""}
NUM_KERNELS = 25


@dataclass(frozen=True)
class ExpertCase(Case):
    """A model with experts in every layer, and a batch."""

    @property
    def flops(self) -> float:
        """Of a training step: active parameters without the input embedding, and causal attention."""
        model = self.model
        inner = model.num_experts_per_tok * model.moe_intermediate_size
        router = model.num_hidden_layers * model.hidden_size * model.num_experts
        dense = Case(replace(model, intermediate_size=inner), self.batch, self.sequence).flops
        return dense + 6.0 * self.num_tokens * router


def qwen3_moe(num_experts: int, per_token: int, inner: int, **sizes: int) -> DecoderConfig:
    whole = {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    return DecoderConfig(
        architecture="qwen3_moe",
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=inner,
        intermediate_size=inner,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **{**whole, **sizes},  # type: ignore[arg-type]
    )


SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CASES = {
    "8x2": ExpertCase(qwen3_moe(8, 2, 4096), 4, 4096),
    "64x8": ExpertCase(qwen3_moe(64, 8, 1024), 4, 4096),
    "tiny": ExpertCase(qwen3_moe(8, 2, 32, **SMALL), 2, 64),
}


def make_step(part: str, case: Case, device: torch.device, stack: ExitStack, compiles: bool) -> Step:
    torch.manual_seed(0)
    if part.startswith("weft"):
        return weft_contender(PARTS[part], case, device, stack, compiles)
    return transformers_step(case, device, compiles and part == "transformers")


def transformers_step(case: Case, device: torch.device, compiles: bool) -> Step:
    """The same step with transformers' Qwen3-MoE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = case.model
    names = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "num_experts")
    names += ("num_experts_per_tok", "norm_topk_prob", "tie_word_embeddings")
    config = Qwen3MoeConfig(**{name: getattr(model, name) for name in names}, use_cache=False)
    with torch.device(device):
        made: nn.Module = Qwen3MoeForCausalLM._from_config(
            config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
    made.train()
    optimizer = _adamw(made)
    called: Any = torch.compile(made) if compiles else made

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = called(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()  # type: ignore[no-untyped-call]
        _update(made, optimizer)
        return loss.detach()

    return step


def work(part: str, shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a part for some steps. Returns its speed and memory."""
    case = CASES[shape]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    compiles = device.type == "cuda" or arguments.compile
    with ExitStack() as stack:
        step, take = make_step(part, case, device, stack, compiles), batches(case, device, None)
        timed = time_steps(step, take, arguments, device)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        kernels = kernel_seconds(lambda: step(*take(0)), device) if arguments.profile else None
    return {
        **timed,
        "tokens_per_second": case.num_tokens / timed["step_seconds"],
        "mfu": case.flops / timed["step_seconds"] / PEAK_FLOPS,
        "gpu_bytes": memory,
    } | ({"kernels": kernels} if kernels else {})


def kernel_seconds(step: Callable[[], object], device: torch.device) -> list[tuple[str, int, float]]:
    """Names, calls and milliseconds of the kernels of one step, longest first."""
    from torch.profiler import ProfilerActivity, profile

    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        step()
        harness.synchronize(device)
    rows = [
        (event.key, event.count, (event.self_device_time_total if is_gpu else event.self_cpu_time_total) / 1e3)
        for event in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[2])[:NUM_KERNELS]


def check_kernels() -> dict[str, float]:
    """The largest difference between each operation and its plain function, of the largest number."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    experts = torch.rand(4, 100, 16, device=device).topk(4).indices
    found: dict[str, float] = {}
    for order in (sort_by_expert(experts, 16), fill_slots(experts, 16, 20)):
        padded = order.ends is None
        tokens, given = (torch.randn(400, 520, device=device, dtype=torch.bfloat16) for _ in range(2))
        rows, weights = take_rows(given, order.sources, 4, padded), torch.rand(400, 4, device=device)
        router, of_logits = torch.randn(16, 520, device=device).bfloat16(), torch.randn(400, 16, device=device)
        for plain, args in (
            (take_rows, (tokens, order.sources, 4, padded)),
            (sum_rows, (rows, order.places, None, 4, padded)),
            (sum_rows, (rows, order.places, weights, 4, padded)),
            (spread_rows, (tokens, rows, weights, order.sources, order.places, padded)),
            (gated_gradient, (tokens[:, :260], given)),
            (wide_product, (tokens, router)),
            (wide_gradients, (of_logits, tokens, router)),
        ):
            sides = [one(*args) for one in (getattr(torch.ops.weft, plain.__name__), plain)]
            pairs = [sides] if isinstance(sides[0], Tensor) else zip(*sides, strict=True)
            for place, (mine, other) in enumerate(pairs):
                difference = (mine.double() - other.double()).abs().max() / other.double().abs().max()
                name = f"{plain.__name__} {place}"
                found[name] = max(found.get(name, 0.0), float(difference))
    return found


# --- all of them


def with_prediction(part: str, shape: str, one: dict[str, Any]) -> dict[str, Any]:
    """A part's results beside the memory that the planner predicts for weft."""
    if "error" in one:
        return one
    predicted, memory = predicted_bytes(PARTS[part], CASES[shape]), one["gpu_bytes"]
    ratio = predicted / memory if predicted and memory else None
    return one | {"predicted_gpu_bytes": predicted, "predicted_over_measured": ratio}


def show(shape: str, part: str, one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{shape:6}{part:20}{one['error'][:200]}"
    memory, predicted = (one["gpu_bytes"] or 0) / 2**30, (one["predicted_gpu_bytes"] or 0) / 2**30
    line = (
        f"{shape:6}{part:20}{one['tokens_per_second']:10,.0f}{one['mfu']:8.3f}{memory:9.2f}{predicted:11.2f}"
        f"{one['predicted_over_measured'] or 0:8.3f}{one['first_step_seconds']:9.1f}{one['first_loss']:9.4f}"
        f"{one['last_loss']:9.4f}"
    )
    kernels = [f"   {seconds:8.2f} ms {count:4} {name[:80]}" for name, count, seconds in one.get("kernels", ())]
    return "\n".join([line, *kernels])


def write(path: Path, steps: int, ceiling: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    whole = {
        "ceiling": ceiling,
        "peak_flops": PEAK_FLOPS,
        "steps": steps,
        "results": results,
    }
    harness.write(path, whole, ("torch", "transformers", "triton"))


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=["weft", "weft-fp8", "transformers"])
    parser.add_argument("--shapes", nargs="*", choices=CASES, default=["8x2", "64x8"])
    parser.add_argument("--tiny", action="store_true", help="try the benchmark itself, also on a CPU")
    parser.add_argument("--check", action="store_true", help="compare kernels with their plain functions")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU, too")
    parser.add_argument("--profile", action="store_true", help="the kernels of one step, longest first")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each part")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.shapes = ["tiny"]
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.worker:
        try:
            answer = work(*arguments.worker, arguments)
        except (WeftError, torch.OutOfMemoryError) as error:
            answer = {"error": str(error).partition("\n")[0]}
        print(json.dumps(answer))
        return
    if arguments.check:
        for name, difference in check_kernels().items():
            print(f"{name:20}{difference:10.2e}")
        return
    passed = ["--steps", str(arguments.steps), "--warm", str(arguments.warm)]
    passed += [f"--{name}" for name in ("compile", "profile") if getattr(arguments, name)]
    ceiling = {} if arguments.tiny else matmul_ceiling(8192)
    heads = {"tokens/s": 10, "MFU": 8, "GPU GiB": 9, "predicted": 11, "ratio": 8, "first s": 9, "loss": 9, "last": 9}
    print(f"{'shape':6}{'part':20}" + "".join(f"{head:>{width}}" for head, width in heads.items()))
    results: dict[str, dict[str, Any]] = {}
    for shape in arguments.shapes:
        for part in arguments.only:
            one = with_prediction(
                part, shape, run_apart([*passed, "--worker", part, shape], arguments.timeout, __file__)
            )
            results.setdefault(shape, {})[part] = one
            print(show(shape, part, one), flush=True)
            if not arguments.tiny:  # what is known, should the rest be stopped
                write(arguments.out, arguments.steps, ceiling, results)


if __name__ == "__main__":
    main()
