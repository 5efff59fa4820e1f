"""One GPU: weft's training step beside a plain PyTorch Llama, transformers and its trainers, on the same shapes.

    python benchmarks/one_gpu.py [--short] [--only weft plain] [--shapes 1.2b 6.7b] [--out FILE]
    python benchmarks/one_gpu.py --only weft-split --shapes 13b
    python benchmarks/one_gpu.py --only weft-weights --shapes 40b
    python benchmarks/one_gpu.py --only weft weft-fp8 --shapes 6.7b --losses 200 --text FILE

Every contender runs in a process of its own; one that is not installed, or does not fit, says so. A step is forward,
backward, clipping and AdamW. MFU counts 6 FLOPs for each parameter and token, the input embedding apart, and causal
attention, over 989 TFLOP/s; `ceiling` is the same over what a bf16 matmul of 8192³ reaches here. `--losses` compares
loss curves on the bytes of a file instead of speed. `tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from harness import run_apart
from plain_llama import PlainLlama, chunk_loss, plain_step
from torch import Tensor, nn

from weft.cluster.hardware import load
from weft.compile.attention_kernel import AttentionShape, fastest_attention
from weft.compile.blocks import compile_blocks
from weft.errors import WeftError
from weft.mesh import Mesh
from weft.models import DecoderConfig, build
from weft.models.hf import parameter_shapes
from weft.parallel.apply import parallelize
from weft.plan import Plan
from weft.planner.model import planned_model
from weft.schema import build_dataclass
from weft.step.train_step import train_step

RESULTS = Path(__file__).parent / "results"
PEAK_FLOPS = 989e12  # dense bf16 of an H200
CEILING_SIDE = 8192
LEARNING_RATE, CLIP = 1e-4, 1.0
CONTENDERS = (
    "weft",
    "weft-bf16",
    "weft-fp8",
    "weft-selective",
    "weft-activations",
    "weft-offload",
    "weft-split",
    "weft-compact",
    "weft-weights",
    "plain",
    "transformers",
    "transformers-eager",
    "accelerate",
    "lightning",
    "deepspeed",
)

SMALLER = ("selective", "activations", "offload", "split", "compact", "weights")
SPEED = tuple(name for name in CONTENDERS if name.partition("-")[2] not in SMALLER)


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    model: DecoderConfig
    batch: int
    sequence: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """Of a training step."""
        model = self.model
        attention, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
        layer = model.hidden_size * (2 * attention + 2 * keys + 3 * model.intermediate_size)
        numel = model.num_hidden_layers * layer + model.hidden_size * model.vocab_size
        causal = 6 * model.num_hidden_layers * attention * self.sequence  # half of the scores, and of their product
        return float(self.num_tokens * (6 * numel + causal))


def _llama(hidden: int, layers: int, heads: int, key_heads: int, inner: int, vocabulary: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=4096,
    )


ONE, SEVEN = _llama(2048, 16, 32, 8, 8192, 128256), _llama(4096, 32, 32, 32, 11008, 32000)
CASES = {
    "1.2b": Case(ONE, 8, 4096),
    "6.7b": Case(SEVEN, 4, 2048),
    "6.7b-large": Case(SEVEN, 8, 2048),
    "6.7b-small": Case(SEVEN, 2, 2048),
    "13b": Case(_llama(5120, 40, 40, 40, 13824, 32000), 4, 2048),
    "32b": Case(_llama(6656, 60, 52, 52, 17920, 32000), 2, 2048),
    "40b": Case(_llama(7168, 64, 56, 56, 19456, 32000), 2, 2048),
    "tiny": Case(_llama(32, 2, 4, 2, 64, 256), 2, 16),
}
PLANS: dict[str, dict[str, Any]] = {
    "weft": {"precision": "bf16"},
    "weft-bf16": {"precision": "bf16", "exact": False, "memory": {"master": False, "state": "bf16"}},
    "weft-fp8": {
        "precision": "bf16",
        "exact": False,
        "matmul": "fp8",
        "memory": {"master": False, "state": "bf16"},
    },
    "weft-selective": {"precision": "bf16", "memory": {"recompute": "selective"}},
    "weft-activations": {"precision": "bf16", "memory": {"activations": 0.25}},
    "weft-offload": {"precision": "bf16", "memory": {"offload": 1.0}},
    "weft-split": {"precision": "bf16", "memory": {"offload": 0.6, "recompute": "full"}},
    "weft-compact": {
        "precision": "bf16",
        "exact": False,
        "memory": {"master": False, "state": "int8", "offload": 1.0, "recompute": "full"},
    },
    "weft-weights": {  # 31 of 64 blocks of 40b: 116 GB in host memory, 127 GB of state on the device
        "precision": "bf16",
        "exact": False,
        "memory": {"master": False, "state": "int8", "weights": 0.48, "recompute": "full"},
    },
}

Step = Callable[[Tensor, Tensor], Tensor]  # tokens and labels [batch, sequence] -> the loss, on the device


# --- contenders


def weft_model(
    config: DecoderConfig, plan: Plan, batch: tuple[int, int], device: torch.device, stack: ExitStack, compiles: bool
) -> tuple[nn.Module, Mesh, str | None]:
    """Return weft's model with random weights as `weft train` has it for batches [sequences, tokens], with its mesh and
    the kernel of attention, which `stack` keeps.
    """
    sizes = config.num_attention_heads, config.num_key_value_heads, batch[1], config.head_dim
    kernel = stack.enter_context(fastest_attention(AttentionShape(batch[0], *sizes), torch.bfloat16, device))
    with torch.device("meta"):
        whole = build(config)
    shapes = parameter_shapes(config)

    def value(name: str) -> Tensor:
        made = torch.empty(shapes[name], device=device)
        return made.normal_(0, 0.02) if made.dim() > 1 else made.fill_(1.0)

    mesh = Mesh(plan, device)
    model = parallelize(whole, plan, mesh, value)
    if compiles:
        compile_blocks(model, lambda message: print(message, file=sys.stderr))
    return model, mesh, kernel


def weft_contender(name: str, case: Case, device: torch.device, stack: ExitStack, compiles: bool) -> Step:
    from weft.optim.saved_state import make_optimizer
    from weft.run_tables import TrainConfig

    plan = build_dataclass(Plan, PLANS[name], "plan")
    model, mesh, _ = weft_model(case.model, plan, (case.batch, case.sequence), device, stack, compiles)
    optimizer = make_optimizer(model, TrainConfig(steps=1, batch=1, learning_rate=LEARNING_RATE))
    return lambda tokens, labels: train_step(model, optimizer, [(tokens, labels)], mesh, clip=CLIP).loss


def plain_contender(case: Case, device: torch.device, compiles: bool) -> Step:
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = PlainLlama(case.model)
        torch.set_default_dtype(torch.float32)
    _initialise(model)
    chunk: Any = chunk_loss
    if compiles:
        for layer in model.layers:
            layer.compile(dynamic=False)
        chunk = torch.compile(chunk_loss, dynamic=False)
    optimizer = _adamw(model)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = plain_step(model, tokens, labels, chunk)
        _update(model, optimizer)
        return loss

    return step


def transformers_contender(name: str, case: Case, device: torch.device, compiles: bool) -> Step:
    """transformers' Llama, by itself or under one of its trainers, which all take the same step."""
    model = _transformers_model(case, device)
    optimizer = _adamw(model)
    if name == "deepspeed":
        return _deepspeed_step(model, case, device)
    backward: Callable[[Tensor], object] = Tensor.backward
    if name == "accelerate":
        from accelerate import Accelerator  # type: ignore[import-not-found]

        accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    elif name == "lightning":
        from lightning.fabric import Fabric  # type: ignore[import-not-found]

        fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-true")
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward
    called: Any = torch.compile(model) if compiles and name != "transformers-eager" else model

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = called(input_ids=tokens, labels=labels, shift_labels=labels).loss
        backward(loss)
        _update(model, optimizer)
        return loss.detach()

    return step


def _transformers_model(case: Case, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = case.model
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device(device):
        made: nn.Module = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return made.train()


def _deepspeed_step(model: nn.Module, case: Case, device: torch.device) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=tokens, labels=labels, shift_labels=labels).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _initialise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.02)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_step(name: str, case: Case, device: torch.device, stack: ExitStack) -> Step:
    torch.manual_seed(0)
    compiles = device.type == "cuda"
    if name.startswith("weft"):
        return weft_contender(name, case, device, stack, compiles)
    if name == "plain":
        return plain_contender(case, device, compiles)
    return transformers_contender(name, case, device, compiles)


# --- in a process of its own


def batches(case: Case, device: torch.device, text: Path | None) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Tokens and labels of each step: one random batch, or the bytes of a text in an order of its own."""
    generator = torch.Generator().manual_seed(0)
    if text is None:
        tokens = torch.randint(0, case.model.vocab_size, (case.batch, case.sequence + 1), generator=generator).to(
            device
        )
        fixed = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return lambda step: fixed
    content = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    offsets = torch.arange(case.sequence + 1)

    def take(step: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(content) - case.sequence - 1, (case.batch,), generator=generator)
        tokens = content[starts[:, None] + offsets].to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return take


def work(name: str, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one contender, and say how fast, or how well."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with ExitStack() as stack:
        step, take = make_step(name, case, device, stack), batches(case, device, arguments.text)
        if arguments.losses:
            found = [step(*take(number)).detach().double() for number in range(arguments.losses)]
            return {"losses": torch.stack(found).tolist()}
        timed = time_steps(step, take, arguments, device)
    return {
        **timed,
        "tokens_per_second": case.num_tokens / timed["step_seconds"],
        "flops_per_second": case.flops / timed["step_seconds"],
        "gpu_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_gpu_bytes": predicted_bytes(name, case),
    }


def time_steps(
    step: Step, take: Callable[[int], tuple[Tensor, Tensor]], arguments: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Take a first step, which compiles, then `arguments.warm` steps, and time `arguments.steps` more."""
    begin = time.perf_counter()
    first = float(step(*take(0)))
    first_seconds = time.perf_counter() - begin
    for number in range(arguments.warm):
        step(*take(number))
    harness.synchronize(device)
    begin = time.perf_counter()
    for number in range(arguments.steps):
        last = step(*take(number))
    harness.synchronize(device)
    seconds = (time.perf_counter() - begin) / arguments.steps
    return {
        "step_seconds": seconds,
        "first_step_seconds": first_seconds,
        "first_loss": first,
        "last_loss": float(last),
    }


def predicted_bytes(name: str, case: Case) -> float | None:
    """What the planner says that weft's tensors take at their peak on the device."""
    if name not in PLANS:
        return None
    plan = build_dataclass(Plan, PLANS[name], "plan")
    cluster = load("h200:1x1")
    return planned_model(case.model, case.sequence, cluster).held(replace(plan, micro_batch=case.batch), 1).tensor_bytes


def matmul_ceiling(side: int) -> dict[str, Any]:
    """FLOP/s of a bf16 matmul of side³."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = harness.call_seconds(lambda: left @ right, torch.device(device), calls=5, repeats=10, of=min)
    return {"flops_per_second": 2 * side**3 / seconds}


# --- all of them


def is_installed(name: str) -> bool:
    package = {"transformers-eager": "transformers"}.get(name, name)
    return name.startswith(("weft", "plain")) or importlib.util.find_spec(package) is not None


def show(shape: str, name: str, one: dict[str, Any], ceiling: float) -> str:
    if "error" in one:
        return f"{shape:12}{name:20}{one['error'][:90]}"
    rate, memory = one["flops_per_second"], (one["gpu_bytes"] or 0) / 2**30
    return (
        f"{shape:12}{name:20}{one['tokens_per_second']:12,.0f}{rate / PEAK_FLOPS:8.3f}{rate / ceiling:9.3f}"
        f"{memory:10.1f}{(one['predicted_gpu_bytes'] or 0) / 2**30:11.1f}{one['host_bytes'] / 2**30:10.1f}"
        f"{one['first_step_seconds']:9.1f}{one['first_loss']:9.3f}{one['last_loss']:9.3f}"
    )


def compare_losses(names: Sequence[str], found: dict[str, Any]) -> None:
    """How far each curve ends from the first contender's, over the last tenth of the steps."""
    ends = {}
    for name in names:
        losses = found[name].get("losses")
        if losses is None:
            print(f"{name:20}{found[name]['error'][:90]}")
            continue
        last = losses[-max(1, len(losses) // 10) :]
        ends[name] = sum(last) / len(last)
        first = next(iter(ends.values()))
        print(f"{name:20}loss {losses[0]:.4f} → {ends[name]:.4f}  {ends[name] / first - 1:+.3%}")


def write(path: Path, steps: int, ceiling: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    packages = ("torch", "transformers", "accelerate", "lightning", "deepspeed", "triton")
    whole = {
        "ceiling": ceiling,
        "peak_flops": PEAK_FLOPS,
        "steps": steps,
        "results": results,
    }
    harness.write(path, whole, packages)


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS)
    parser.add_argument("--shapes", nargs="*", choices=CASES)
    parser.add_argument("--short", action="store_true", help="what takes no more than four minutes on an H200")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--losses", type=int, default=0, help="compare loss curves of so many steps")
    parser.add_argument("--text", type=Path, help="a file whose bytes are the tokens")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each contender")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (5 if arguments.short else 20)
    on_gpu = torch.cuda.is_available()
    arguments.shapes = arguments.shapes or ([*CASES][:3] if on_gpu else ["tiny"])
    if arguments.short and on_gpu and arguments.shapes == [*CASES][:3]:
        arguments.shapes = ["1.2b", "6.7b"]
    # Compiling transformers' 32 layers as a whole takes longest of all.
    arguments.skip = {("6.7b", "transformers")} if arguments.short and not arguments.only else set()
    few = ("weft", "plain", "transformers") if arguments.short else SPEED
    arguments.only = arguments.only or [name for name in few if is_installed(name)]
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.worker:
        name, shape = arguments.worker
        try:
            answer = matmul_ceiling(int(shape)) if name == "ceiling" else work(name, CASES[shape], arguments)
        except (WeftError, torch.OutOfMemoryError) as error:
            answer = {"error": str(error).partition("\n")[0]}
        print(json.dumps(answer))
        return
    passed = ["--steps", str(arguments.steps), "--warm", str(arguments.warm), "--losses", str(arguments.losses)]
    passed += ["--text", str(arguments.text.resolve())] if arguments.text else []
    results: dict[str, dict[str, Any]] = {}
    side = CEILING_SIDE if torch.cuda.is_available() else 256
    ceiling = run_apart([*passed, "--worker", "ceiling", str(side)], arguments.timeout, __file__)
    if not arguments.losses:
        print(f"matmul {side}³: {ceiling.get('flops_per_second', 0) / 1e12:.1f} TFLOP/s")
        widths = {"tokens/s": 12, "MFU": 8, "ceiling": 9, "GPU GiB": 10, "predicted": 11, "host GiB": 10, "first s": 9}
        widths |= {"loss": 9, "last": 9}
        print(f"{'shape':12}{'contender':20}" + "".join(f"{head:>{width}}" for head, width in widths.items()))
    for shape in arguments.shapes:
        results[shape] = {}
        for name in (name for name in arguments.only if (shape, name) not in arguments.skip):
            one = run_apart([*passed, "--worker", name, shape], arguments.timeout, __file__)
            results[shape][name] = one
            if arguments.out:  # what is known, should the rest be stopped
                write(arguments.out, arguments.steps, ceiling, results)
            if not arguments.losses:
                print(show(shape, name, one, ceiling.get("flops_per_second") or float("nan")), flush=True)
        if arguments.losses:
            print(shape)
            compare_losses(arguments.only, results[shape])


if __name__ == "__main__":
    main()
