"""What the tests prove on a CPU, once more on a GPU, where other kernels and other streams do it.

    python benchmarks/gpu_checks.py [--only goldfish pools averages weights] [--out FILE]

`goldfish`: masks are those of a CPU. `pools`: results and gradients of the kernels are right, and how fast they are,
and torch's. `averages`: gradients through a model's padded average pools are right, which torch 2.11 alone gets wrong.
`weights`: blocks that stream from host memory (`memory.weights`) change no bit of losses and parameters over four
steps, uncompiled and compiled, with one and two micro-batches, with and without recompute. Ends with 1 if anything
differs. Without a GPU it checks what a CPU can. Writes benchmarks/results/gpu-checks.json, or `--out`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.compile.blocks import compile_blocks
from weft.data.goldfish import Goldfish
from weft.mesh import Mesh
from weft.models import DecoderConfig, build
from weft.models.loss import IGNORE
from weft.optim.saved_state import make_optimizer
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_flats
from weft.plan import Plan
from weft.run_tables import TrainConfig
from weft.schema import build_dataclass
from weft.step.train_step import train_step

ROUNDED = 2**-7  # of bf16
Row = dict[str, Any]


def goldfish(device: torch.device) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 128256, (64, 4096), generator=generator)
    targets[:, 100:140], targets[3, 700:720] = 0, IGNORE
    for k, h in product((3, 4, 128), (1, 4, 13)):
        one = Goldfish(k, h)
        expected, found = one.left_out(targets), one.left_out(targets.to(device)).cpu()
        yield {"k": k, "h": h, "left_out": int(expected.sum()), "is_right": torch.equal(expected, found)}


POOLS: list[tuple[tuple[int, ...], tuple[int, int, int], Any, dict[str, Any]]] = [  # of AmoebaNet-D at 4096²
    ((1, 208, 512, 512), (3, 1, 1), F.max_pool2d, {}),
    ((1, 104, 2048, 2048), (3, 2, 1), F.max_pool2d, {}),
    ((1, 104, 2048, 2048), (2, 2, 0), F.max_pool2d, {}),
    ((1, 832, 128, 128), (3, 1, 1), F.max_pool2d, {}),
    ((1, 208, 512, 512), (3, 1, 1), F.avg_pool2d, {"count_include_pad": False}),
    ((2, 64, 513, 511), (3, 2, 1), F.avg_pool2d, {}),
]


def pools(device: torch.device) -> Iterator[Row]:
    if device.type != "cuda":
        return
    from weft.models.vision.pool_kernel import kernel_pools

    for shape, window, plain, settings in POOLS:
        images = torch.randn(shape, device=device, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        row: Row = {"pool": plain.__name__, "images": shape, "window": window}
        first = images.double().clone(memory_format=torch.contiguous_format).requires_grad_()  # whose gradient is right
        expected = plain(first, *window, **settings)
        (gradient,) = torch.autograd.grad(expected, first, _draws(expected.bfloat16()).double())
        for name, pool in (("torch", plain), ("weft", kernel_pools()[plain])):
            row[name], *found = _pooled(partial(pool, images.requires_grad_(), *window, **settings), images)
            row[name]["result_difference"] = _difference(found[0], expected)
            row[name]["gradient_difference"] = _difference(found[1], gradient)
        is_right = row["weft"]["result_difference"] <= (ROUNDED if plain is F.avg_pool2d else 0.0)
        yield {**row, "is_right": is_right and row["weft"]["gradient_difference"] <= ROUNDED}


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a share of the largest number."""
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


def _draws(like: Tensor) -> Tensor:
    draws = torch.randn(like.shape, device=like.device, generator=torch.Generator(like.device).manual_seed(1))
    return draws.to(like.dtype).to(memory_format=torch.channels_last)


def _pooled(pool: Callable[[], Tensor], images: Tensor) -> tuple[Row, Tensor, Tensor]:
    """Seconds of forward, and of forward and backward, the result and the gradient."""
    result = pool().detach()  # what autograd would keep of it knows no other stream
    draws = _draws(result)

    def both() -> Tensor:
        return torch.autograd.grad(pool(), images, draws)[0]

    return {"forward_seconds": _seconds(pool), "both_seconds": _seconds(both)}, result, both()


def _seconds(run: Callable[[], object], times: int = 10) -> float:
    """Of the GPU alone: a host would take longer to ask for some pools than the GPU to do them."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()  # kernels are made
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(times):
                run()
        graph.replay()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def averages(device: torch.device) -> Iterator[Row]:
    """Of a model, uncompiled: by kernel, and with channels for which there is none."""
    for channels, size in ((16, 3), (12, 3), (16, 7)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, channels, 1), nn.AvgPool2d(size, 1, size // 2), nn.Conv2d(channels, 2, 1))
        images = torch.randn(2, 3, 12, 13).to(memory_format=torch.channels_last)
        plain = images.double().requires_grad_()
        deepcopy(model).double()(plain).square().sum().backward()
        plan = Plan()
        model = parallelize(model.to(device), plan, Mesh(plan, device))
        mine = images.to(device).requires_grad_()
        model(mine).square().sum().backward()
        assert mine.grad is not None
        assert plain.grad is not None
        difference = _difference(mine.grad.cpu().double(), plain.grad)
        yield {"channels": channels, "window": size, "gradient_difference": difference, "is_right": difference < 1e-3}


STATES: dict[str, dict[str, Any]] = {
    "fp32 master and moments": {},
    "no master, 8-bit moments": {"master": False, "state": "int8"},
}


def weights(device: torch.device) -> Iterator[Row]:
    on_gpu = device.type == "cuda"
    for (name, state), recompute, micro_batches, compiles in product(
        STATES.items(), ("none", "full"), (1, 2), (False, True) if on_gpu else (False,)
    ):
        sides = []
        for share in (0.0, 0.5, 1.0):
            memory = {**state, "recompute": recompute, **({"weights": share} if share else {})}
            plan = {"precision": "bf16", "exact": not state, "memory": memory}
            sides.append(_trained(plan, device, micro_batches, compiles))
        losses, parameters = sides[0]
        same = all(torch.equal(losses, one) and _same(parameters, other) for one, other in sides[1:])
        row = {"state": name, "recompute": recompute, "micro_batches": micro_batches, "compiled": compiles}
        yield {**row, "losses": losses.tolist(), "is_right": same}


def _trained(
    plan: dict[str, Any], device: torch.device, micro_batches: int, compiles: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of four steps, and the parameters after them."""
    on_gpu = device.type == "cuda"
    width, length, classes = (1024, 512, 8192) if on_gpu else (32, 8, 64)
    config = DecoderConfig(
        vocab_size=classes,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    made = build_dataclass(Plan, plan, "plan")
    mesh = Mesh(made, device)
    model = parallelize(build(config).to(device), made, mesh)
    if compiles:
        compile_blocks(model, print)
    optimizer = make_optimizer(model, TrainConfig(steps=1, batch=1, learning_rate=1e-3))
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(4):
        tokens = [torch.randint(0, classes, (4, length + 1), generator=generator) for _ in range(micro_batches)]
        batch = [(one[:, :-1].contiguous().to(device), one[:, 1:].contiguous().to(device)) for one in tokens]
        losses.append(train_step(model, optimizer, batch, mesh, clip=1.0).loss.double().cpu())
    optimizer.synchronize()
    held = {
        part.name: piece.detach().cpu().clone()
        for flat in all_flats(model)
        for piece, part in zip(flat.pieces, flat.layout.parameters, strict=True)
    }
    return torch.stack(losses), held


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


CHECKS = {"goldfish": goldfish, "pools": pools, "averages": averages, "weights": weights}


def main() -> None:
    parser = harness.options(__doc__, "gpu-checks.json")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found: Row = {}
    for check in options.only:
        found[check] = []
        for row in CHECKS[check](device):
            found[check].append(row)
            print(check, json.dumps(row), flush=True)
            harness.write(options.out, found, device=device)
    wrong = sum(not row["is_right"] for check in options.only for row in found[check])
    print(f"{wrong} wrong of {sum(len(found[check]) for check in options.only)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
