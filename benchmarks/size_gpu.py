"""The largest models on one GPU: a Llama under a memory plan, a few steps on one fixed batch.

    python benchmarks/size_gpu.py --size 6.7b --offload 1.0
    python benchmarks/size_gpu.py --size 13b --offload 0.6 --recompute full
    python benchmarks/size_gpu.py --size 30b --offload 1.0 --state int8 --no-master --recompute full --batch 1

Prints one line of JSON: seconds and tokens/s of a step, loss of each, measured and predicted bytes on the device, and
bytes of host memory for each parameter.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
from torch import Tensor

from weft.config import TrainConfig
from weft.mesh import Mesh
from weft.models import DecoderConfig, build, token_loss
from weft.parallel import cost, host_bytes, parallelize
from weft.plan import Memory, Plan, split_batch
from weft.profile import profile
from weft.train.state import make_optimizer
from weft.train.step import train_step

SIZES = {  # hidden, intermediate, layers, heads
    "tiny": (64, 128, 2, 4),
    "1.2b": (2048, 8192, 16, 32),
    "6.7b": (4096, 11008, 32, 32),
    "13b": (5120, 13824, 40, 40),
    "30b": (6656, 17920, 60, 52),
}
VOCABULARY = 32000


def config_of(size: str) -> DecoderConfig:
    hidden, intermediate, layers, heads = SIZES[size]
    return DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="6.7b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--offload", type=float, default=0.0)
    parser.add_argument("--state", default="master")
    parser.add_argument("--no-master", action="store_true")
    parser.add_argument("--delay", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile block by block")
    args = parser.parse_args()
    memory = Memory(
        recompute=args.recompute, master=not args.no_master, state=args.state, offload=args.offload, delay=args.delay
    )
    exact = memory.master and memory.state == "master" and not memory.delay
    plan = Plan(memory=memory, precision="bf16", exact=exact)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(json.dumps(measure(config_of(args.size), plan, device, args)))


def measure(config: DecoderConfig, plan: Plan, device: torch.device, args: argparse.Namespace) -> dict[str, object]:
    tokens = torch.randint(0, VOCABULARY, (args.batch, args.sequence + 1), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with torch.device("meta"):
        whole = build(config)
        counted = profile(build(config), lambda: (inputs,), lambda out: token_loss(out, labels), torch.bfloat16)
    predicted = cost(counted, plan, split_batch(plan, args.batch, args.sequence))
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    started = time.perf_counter()
    mesh = Mesh(plan, device)
    model = parallelize(whole, plan, mesh, lambda name: _first_value(shapes[name], device))
    if args.compile:
        for block in model.get_submodule("model.layers").children():
            block.compile()
    optimizer = make_optimizer(model, TrainConfig(steps=args.steps, batch=args.batch, learning_rate=1e-4))
    build_seconds = time.perf_counter() - started
    losses, seconds = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        losses.append(train_step(model, optimizer, [(inputs.to(device), labels.to(device))], mesh).loss)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    step = min(seconds[1:] or seconds)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        **vars(args),
        "parameters": counted.numel,
        "build_seconds": round(build_seconds, 1),
        "step_seconds": [round(one, 3) for one in seconds],
        "tokens_per_second": round(args.batch * args.sequence / step, 1),
        "losses": [round(float(loss), 4) for loss in losses],
        "device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "predicted_device_bytes": predicted.memory_bytes,
        "host_state_bytes": sum(host_bytes(model, optimizer).values()),
        "predicted_host_bytes": sum(predicted.host_bytes.values()),
        "resident_bytes_per_parameter": round(resident / counted.numel, 2),
        "torch": torch.__version__,
    }


def _first_value(shape: torch.Size, device: torch.device) -> Tensor:
    """Drawn on the device: a CPU takes minutes for billions."""
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    return torch.empty(shape, device=device).normal_(0, 0.02)


if __name__ == "__main__":
    main()
