"""Experts in fp8 beside bf16 on one GPU, part by part: where the time of a layer goes.

    python benchmarks/expert_fp8.py                 all parts of both shapes; about 40 s on an H200
    python benchmarks/expert_fp8.py --tiny          tiny sizes, also on a CPU; only errors are of use there

The shapes are those of `experts_gpu.py`: hidden size 2048, 16,384 tokens, `8x2` with 8 experts of 4096 and 2 for each
token, `64x8` with 64 of 1024 and 8. Tokens choose experts at random. Times are means over calls after a few others;
`TB/s` counts each operand and result once, and gathered tokens as if each row were read. Errors are norms of
differences over norms, against the plain functions, and for a whole layer against the same layer in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

from weft.models.expert_rows import RowOrder, align_groups, sort_by_expert, through_experts
from weft.models.experts import StackedExperts, stacked_experts
from weft.parallel.fp8 import operations as plain_operations
from weft.parallel.fp8.experts import fp8_stacked_experts, fp8_through_experts
from weft.parallel.fp8.operations import ROWS_MULTIPLE

operations = torch.ops.weft
CALLS = 10


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer of experts."""

    num_experts: int
    k: int
    inner: int
    hidden: int = 2048
    num_tokens: int = 16384


SHAPES = {"8x2": Shape(8, 2, 4096), "64x8": Shape(64, 8, 1024), "tiny": Shape(4, 2, 32, 64, 64)}


@dataclass
class Layer:
    """A layer of experts with its tokens, and which rows they have."""

    shape: Shape
    experts: StackedExperts
    tokens: Tensor
    weights: Tensor
    gradient: Tensor
    order: RowOrder
    aligned: RowOrder

    @staticmethod
    def make(shape: Shape, device: torch.device) -> Layer:
        torch.manual_seed(0)

        @dataclass
        class Sizes:
            hidden_size = shape.hidden
            moe_intermediate_size = shape.inner

        with torch.device(device):
            experts = StackedExperts(Sizes(), shape.num_experts).bfloat16()  # type: ignore[arg-type]
            for parameter in experts.parameters():
                nn.init.normal_(parameter, 0, 0.02)
            tokens, gradient = (torch.randn(shape.num_tokens, shape.hidden).bfloat16() for _ in range(2))
            chances = torch.randn(shape.num_tokens, shape.num_experts).softmax(-1)
        weights, chosen = chances.topk(shape.k)
        order = sort_by_expert(chosen, shape.num_experts)
        gradient *= 1e-4 * torch.randn(shape.num_tokens, 1, device=device).exp()  # some tokens matter more than others
        return Layer(
            shape,
            experts,
            tokens.requires_grad_(),
            weights.requires_grad_(),
            gradient,
            order,
            align_groups(order, ROWS_MULTIPLE),
        )


def milliseconds(call: Callable[[], object]) -> float:
    """Mean device time of a call."""
    return 1e3 * harness.gpu_seconds(call, CALLS, warm=3)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@dataclass(frozen=True)
class Operands:
    """The operands of a layer's products: rows and gradients of their results, in bf16 and in fp8."""

    weight: Tensor
    rows: Tensor
    given: Tensor
    ends: Tensor

    def bf16(self) -> dict[str, Callable[[], Tensor]]:
        """The three products in bf16."""
        return {
            "forward": lambda: torch._grouped_mm(self.rows, self.weight.transpose(1, 2), offs=self.ends),
            "of rows": lambda: torch._grouped_mm(self.given, self.weight, offs=self.ends),
            "of weights": lambda: torch._grouped_mm(self.given.t(), self.rows, offs=self.ends),
        }

    def fp8(self) -> dict[str, tuple[Tensor, ...]]:
        """The operands of the three products in fp8."""
        num_experts, outputs, inputs = self.weight.shape
        (a, sa), (g, sg) = operations.quantise_rows(self.rows), operations.quantise_rows(self.given)
        b, sb = operations.quantise_rows(self.weight.flatten(0, 1))
        ones = sb.new_full((num_experts * outputs,), 256.0)
        turned = operations.turn_rows(self.weight.flatten(0, 1), None, 1, ones, num_experts)
        left, right = (operations.turn_rows(one, None, 1, None, 1)[0] for one in (g, a))
        return {
            "forward": (a, sa, b.view(self.weight.shape), sb.view(num_experts, outputs), self.ends),
            "of rows": (g, sg, turned, sb.new_full((num_experts, inputs), 1 / 256), self.ends),
            "of weights": (left, right, ones[:num_experts], self.ends),
        }


def torchs(args: tuple[Tensor, ...], is_fast: bool) -> Tensor:
    """torch's product of the operands of `fp8_rows_mm` or `fp8_weights_mm`."""
    *_, ends = args
    if len(args) == 5:
        left, scale, right, scales = args[0], args[1], args[2].transpose(1, 2), args[3]
    else:
        left, right = args[0], args[1].t()
        scale = args[2][:, None].expand(-1, len(left)).flatten()
        scales = args[2].new_ones(len(ends) * right.shape[1])
    return torch._scaled_grouped_mm(
        left, right, scale, scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


def accuracy(found: Tensor, args: tuple[Tensor, ...]) -> str:
    """The error and the bias of the first group's product, against float64 of the same numbers."""
    end = int(args[-1][0])
    if len(args) == 5:
        a, sa, b, sb, _ = args
        exact = (a[:end].double() * sa[:end, None]) @ (b[0].double() * sb[0][:, None]).t()
        found = found[:end]
    else:
        exact = args[0][:, :end].double() @ args[1][:, :end].double().t() * args[2][0]
        found = found[0]
    bias = float((found.double() * exact).sum() / exact.square().sum() - 1)
    return f"error {error(found, exact):.5f} bias {bias:+.5f}"


def products(layer: Layer) -> Iterator[tuple[str, float]]:
    """(name, milliseconds) of the six grouped products: in bf16, in fp8 by torch, and by weft's kernel."""
    shape, ends = layer.shape, layer.aligned.ends
    assert ends is not None
    num_rows, used = len(layer.aligned.sources), int(ends[-1])
    for name, weight in ((name, one.detach()) for name, one in layer.experts.named_parameters()):
        rows, given = (torch.randn(num_rows, n, device=weight.device).bfloat16() for n in weight.shape[:0:-1])
        operands = Operands(weight, rows, given, ends)
        flops = 2.0 * shape.num_tokens * shape.k * weight[0].numel()

        def told(kind: str, call: Callable[[], Tensor], more: str, name: str = name, flops: float = flops) -> Any:
            took = milliseconds(call)
            return f"{name} {kind} {flops / took / 1e9:.0f} TFLOP/s {more}", took

        for kind, call in operands.bf16().items():
            yield told(f"{kind} bf16", call, "")
        for kind, args in operands.fp8().items():
            for fast in (True, False) if weight.is_cuda else ():
                more = accuracy(torchs(args, fast), args)
                yield told(f"{kind} torch {'fast' if fast else ''}", lambda a=args, f=fast: torchs(a, f), more)
            product = operations.fp8_rows_mm if len(args) == 5 else operations.fp8_weights_mm
            yield told(f"{kind} weft", lambda p=product, a=args: p(*a), accuracy(product(*args), args))
        del operands, rows, given
    print(f"rows used: {used} of {num_rows}")


def row_calls(layer: Layer) -> dict[str, tuple[str, tuple[Any, ...], float]]:
    """The operation, its arguments and the bytes that it moves, by name."""
    shape, order = layer.shape, layer.aligned
    gate_up = layer.experts.gate_up_proj.detach()
    tokens, k = layer.tokens.detach(), shape.k
    gradient = layer.gradient / layer.gradient.abs().max() * plain_operations.LARGEST
    num_rows, inner, device = len(order.sources), shape.inner, tokens.device
    widened = torch.randn(num_rows, 2 * inner, device=device).bfloat16()
    of_gated = torch.randn(num_rows, inner, device=device).bfloat16()
    small, _ = operations.quantise_rows(tokens)
    gated, scale = operations.quantise_gated(widened)
    of_widened, _, _ = operations.quantise_gated_gradient(of_gated, widened, scale)
    results = torch.randn(num_rows, shape.hidden, device=device).bfloat16()
    factors, _ = operations.row_factors(scale, scale, order.ends)
    ones = torch.ones(gate_up.shape[0] * gate_up.shape[1], device=device)
    rows, r, weights = num_rows * shape.hidden, num_rows * inner, layer.weights.detach()
    old = layer.order
    plain_rows = results[: len(old.sources)]
    return {
        "quantise weights": ("quantise_rows", (gate_up.flatten(0, 1),), 3.0 * gate_up.numel()),
        "turn weights": (
            "turn_rows",
            (gate_up.flatten(0, 1), None, 1, ones, shape.num_experts),
            3.0 * gate_up.numel(),
        ),
        "quantise tokens": ("quantise_rows", (tokens,), 3.0 * tokens.numel()),
        "take bytes": ("take_rows", (small.view(torch.uint8), order.sources, k, True), 2.0 * rows),
        "take bf16": ("take_rows", (tokens, old.sources, k, False), 4.0 * rows),
        "quantise_gated": ("quantise_gated", (widened,), 5.0 * r),
        "quantise_gated_gradient": ("quantise_gated_gradient", (of_gated, widened, scale), 8.0 * r),
        "gated_gradient bf16": ("gated_gradient", (of_gated, widened), 10.0 * r),
        "row_factors": ("row_factors", (scale, scale, order.ends), 12.0 * num_rows),
        "turn gathered tokens": ("turn_rows", (small, order.sources, k, None, 1), 2.0 * rows),
        "turn gathered gradients": ("turn_rows", (gradient, order.sources, k, factors, 1), 3.0 * rows),
        "turn gated": ("turn_rows", (gated, None, 1, None, 1), 2.0 * r),
        "turn of_widened": ("turn_rows", (of_widened, None, 1, factors, 1), 4.0 * r),
        "sum_rows": ("sum_rows", (results, order.places, weights, k, False), 2.0 * rows),
        "spread_rows bf16": (
            "spread_rows",
            (gradient, plain_rows, weights, old.sources, old.places, False),
            6.0 * rows,
        ),
    }


def row_operations(layer: Layer) -> Iterator[tuple[str, float]]:
    """(name, milliseconds) of the operations that prepare operands, and their errors."""
    for name, (operation, args, num_bytes) in row_calls(layer).items():
        call = getattr(operations, operation)
        took = milliseconds(lambda call=call, args=args: call(*args))
        told = f"{name} {num_bytes / took / 1e9:.2f} TB/s"
        if hasattr(plain_operations, operation) and operation != "row_factors":
            used = int(layer.aligned.ends[-1])  # type: ignore[index]
            found, expected = call(*args), getattr(plain_operations, operation)(*args)
            first, second = (one if isinstance(one, Tensor) else one[0] for one in (found, expected))
            cut = (..., slice(0, used)) if name.startswith(("turn g", "turn o")) else (slice(0, None),)
            told += f" error {error(first[cut].float(), second[cut].float()):.1e}"
            del found, expected, first, second
        yield told, took


def layers(layer: Layer, compiles: bool) -> Iterator[tuple[str, float]]:
    """(name, milliseconds) of forward and backward of the whole layer, and the error of its results and gradients."""
    expected: list[Tensor] = []
    inputs = (layer.tokens, layer.weights, *layer.experts.parameters())
    for name, through, compute in (
        ("bf16", through_experts, stacked_experts),
        ("fp8 of rows as they are sent", through_experts, fp8_stacked_experts),
        ("fp8", fp8_through_experts, fp8_stacked_experts),
    ):
        layer.experts.compute = compute
        called = torch.compile(through, dynamic=False) if compiles else through

        def both(called: Any = called) -> list[Tensor]:
            out = called(layer.tokens, layer.weights, layer.order, layer.experts)
            return [out.detach(), *torch.autograd.grad(out, inputs, layer.gradient)]

        took = milliseconds(both)
        found = both()
        expected = expected or found
        errors = " ".join(f"{error(one, other):.4f}" for one, other in zip(found, expected, strict=True))
        yield f"layer {name} errors {errors}", took
        del found


def main() -> None:
    """The command."""
    parser = harness.options(__doc__)
    parser.add_argument("--tiny", action="store_true", help="try the benchmark itself, also on a CPU")
    parser.add_argument("--only", nargs="*", default=["products", "rows", "layers"])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["8x2", "64x8"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, dict[str, float]] = {}
    for name in ["tiny"] if arguments.tiny else arguments.shapes:
        layer = Layer.make(SHAPES[name], device)
        parts: dict[str, Callable[[], Iterator[tuple[str, float]]]] = {
            "products": lambda layer=layer: products(layer),
            "rows": lambda layer=layer: row_operations(layer),
            "layers": lambda layer=layer: layers(layer, device.type == "cuda"),
        }
        for part in arguments.only:
            try:
                for told, took in parts[part]():
                    print(f"{name:5}{took:9.3f} ms  {told}", flush=True)
                    found.setdefault(name, {})[told] = took
            except RuntimeError as problem:
                print(f"{name} {part}: {str(problem).strip().splitlines()[0][:300]}", flush=True)
    if arguments.out:
        harness.write(arguments.out, {"milliseconds": found}, ("torch", "triton"), device)


if __name__ == "__main__":
    main()
