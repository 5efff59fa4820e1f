"""Which kernel is chosen for each operation, format, dtype, device and number of rows, and that linears use it.

The table has what was measured on GPUs (docs/lean_inference.md), so that a CPU holds the choices to it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.models.attention import RMSNorm
from weft.serve.model import fused_kernel, linear
from weft.serve.model.linear import PlainLinear, QuantisedLinear, ShardedLinear, adapted, served_linear
from weft.serve.weights import packed_linear
from weft.serve.weights.fast_path import NOWHERE, Kernel, Operation, Place, fast_path, kernel_of
from weft.serve.weights.packed_linear import PackedLinear
from weft.serve.weights.weight_formats import FORMATS, Grouped

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
H200, A100, L4, HIP = (Place("cuda", BF16, one) for one in ((9, 0), (8, 0), (8, 9), (9, 4)))
HIP = HIP._replace(is_hip=True)
ROWS = (1, 2, 4, 5, 64, 65, 512)
FEW = ["few rows", "few rows", "few rows", "tiles", "tiles"]  # of 1 to 64 rows


def chosen(operation: Operation, place: Place, *given: Any, **more: Any) -> list[Kernel]:
    return [kernel_of(fast_path(operation, place, *given, **more), rows) for rows in ROWS]


@pytest.mark.parametrize(
    ("place", "name", "sizes", "kernels"),
    [
        (H200, "int4", (512, 4096), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (H200._replace(dtype=FP16), "int8", (512, 4096), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (A100, "int4-128", (512, 4096), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (H200, "int8", (512, 8192), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (H200, "int8", (512, 8320), [*FEW, "dequantise", "dequantise"]),  # does not fit registers
        (H200, "int4", (512, 16384), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (H200, "int4", (512, 16448), [*FEW, "dequantise", "dequantise"]),
        (H200, "int8", (512, 80), ["dequantise"] * 7),  # groups of 16
        (H200, "int8", (512, 96), ["token", *FEW[1:], "dequantise", "dequantise"]),  # groups of 32
        (H200, "fp8", (512, 4096), ["token", *FEW[1:], "float8", "float8"]),
        (L4, "fp8", (512, 4096), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (A100, "fp8", (512, 4096), [*FEW, "dequantise", "dequantise"]),  # cannot convert float8
        (HIP, "fp8", (512, 4096), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (H200._replace(dtype=FP16), "fp8", (512, 4096), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (H200, "fp8", (512, 8224), [*FEW, "float8", "float8"]),
        (H200, "fp8", (512, 48), ["float8"] * 7),  # no multiple of 32, but of 16
        (H200, "fp8", (512, 40), ["dequantise"] * 7),
        (H200, "fp8", (500, 4096), ["token", *FEW[1:], "dequantise", "dequantise"]),
        (H200._replace(dtype=FP32), "int4", (512, 4096), ["dequantise"] * 7),
        (Place("cpu", FP32), "int4", (512, 4096), ["dequantise"] * 7),
        (NOWHERE, "int4", (512, 4096), ["dequantise"] * 7),
    ],
)
def test_products_with_quantised_weights(
    place: Place, name: str, sizes: tuple[int, int], kernels: list[Kernel]
) -> None:
    assert chosen("linear", place, FORMATS[name], sizes) == kernels


def test_products_on_a_cpu_follow_what_was_measured() -> None:
    cpu = Place("cpu", FP32)
    for name in ("fp16", "int8-row", "int8"):
        assert chosen("linear", cpu, FORMATS[name], (8, 64), 4) == ["codes"] * 3 + ["dequantise"] * 4
    assert chosen("linear", cpu._replace(dtype=BF16), measured_rows=1) == ["vector"] + ["matmul"] * 6
    assert chosen("linear", cpu) == ["matmul"] * 7


def test_plain_products_norms_gates_and_rotations() -> None:
    for place in (H200, A100, HIP, H200._replace(dtype=FP16)):
        assert chosen("linear", place) == ["row"] + ["matmul"] * 6
        assert chosen("norm", place) == chosen("gate", place) == chosen("rotate", place) == ["kernel"] * 7
    for place in (H200._replace(dtype=FP32), Place("cpu", BF16), NOWHERE):
        assert chosen("linear", place) == ["matmul"] * 7
        assert chosen("norm", place) == ["module"] * 7
        assert chosen("gate", place) == chosen("rotate", place) == ["plain"] * 7
    for dtype in (FP32, FP64):
        assert chosen("norm", Place("cpu", dtype)) == ["few calls"] * 7


def test_routers_and_experts() -> None:
    assert chosen("route", H200, sizes=(256, 256)) == ["kernel"] * 5 + ["plain"] * 2
    assert chosen("route", H200, sizes=(257, 257)) == chosen("route", Place("cpu", BF16), sizes=(8, 8)) == ["plain"] * 7
    cases = [("int4", (64, 96), True), ("int8", (64, 80), False), ("fp8", (64, 96), True), ("fp8", (64, 80), False)]
    for name, inputs, has_kernel in cases:
        assert chosen("experts", A100, FORMATS[name], inputs) == ["kernel" if has_kernel else "plain"] * 7
        assert chosen("experts", Place("cpu", BF16), FORMATS[name], inputs) == ["plain"] * 7
    assert chosen("experts", H200, Grouped(4, 32), (64, 64)) == ["kernel"] * 7


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that linears call, in their order. They compute nothing."""
    made = list[str]()

    def kernel(name: str, *shape: int) -> Any:
        return lambda hidden, *given, **more: made.append(name) or torch.zeros(len(hidden), 16, dtype=hidden.dtype)

    monkeypatch.setattr(fused_kernel, "norm_by_kernel", lambda hidden, *given: made.append("norm") or hidden)
    monkeypatch.setattr(fused_kernel, "gated_by_kernel", lambda out: made.append("gate") or out[:, :8])
    monkeypatch.setattr(fused_kernel, "row_linear_by_kernel", kernel("row"))

    def product(name: str, form: Any, hidden: Tensor, parts: Any, after: Any, norm: Any = None) -> Tensor:
        what = ["with norm"] * (norm is not None) + ["gated"] * after.is_gated
        made.append(" ".join([name, *what, *["added"] * (after.residual is not None)]))
        return torch.zeros(len(hidden), 16, dtype=hidden.dtype)

    monkeypatch.setattr(packed_linear, "quantised_product", product)
    return made


def called(calls: list[str], one: linear.Linear, rows: int, has_residual: bool = False) -> list[str]:
    calls.clear()
    one(torch.zeros(rows, 64, dtype=BF16), torch.zeros(rows, 16, dtype=BF16) if has_residual else None)
    return list(calls)


@torch.no_grad()
def test_a_plain_linear_on_a_gpu(calls: list[str]) -> None:
    layer, rms, norm = nn.Linear(64, 16).to(BF16), RMSNorm(64, 1e-6).to(BF16), nn.LayerNorm(64).to(BF16)
    gated = PlainLinear(layer, H200, rms, is_gated=True)
    assert [called(calls, gated, rows) for rows in (1, 2)] == [["row"], ["norm", "gate"]]
    assert [called(calls, PlainLinear(layer, H200, norm), rows) for rows in (1, 2)] == [[], []]
    assert [called(calls, PlainLinear(layer, H200), rows, True) for rows in (1, 2)] == [["row"], []]


@torch.no_grad()
def test_a_quantised_linear_on_a_gpu(calls: list[str]) -> None:
    form, weight = FORMATS["int4"], torch.randn(16, 64)
    layer, rms, norm = PackedLinear(form, form.quantise(weight), 64, None), RMSNorm(64, 1e-6), nn.LayerNorm(64)
    gated = QuantisedLinear(layer, H200, rms.to(BF16), is_gated=True)
    assert [called(calls, gated, rows) for rows in (1, 4, 5, 65)] == [
        ["token with norm gated"],
        ["few rows with norm gated"],
        ["norm", "tiles gated"],
        ["norm", "dequantise gated"],
    ]
    other = QuantisedLinear(layer, H200, norm.to(BF16))
    assert [called(calls, other, rows) for rows in (1, 4, 5)] == [["token"], ["few rows"], ["tiles"]]
    added = QuantisedLinear(layer, H200)
    assert [called(calls, added, rows, True) for rows in (1, 4, 65)] == [
        ["token added"],
        ["few rows added"],
        ["dequantise added"],
    ]


def test_the_kind_of_a_linear_is_chosen_when_it_is_built() -> None:
    layer, form = nn.Linear(64, 16), FORMATS["int8"]
    packed, axis, updates = PackedLinear(form, form.quantise(layer.weight), 64, None), object(), object()
    assert type(served_linear(layer, NOWHERE)) is PlainLinear
    assert type(served_linear(packed, NOWHERE)) is QuantisedLinear
    for one in (layer, packed):
        assert type(served_linear(one, NOWHERE, axis)) is ShardedLinear  # type: ignore[arg-type]
    plain = served_linear(layer, NOWHERE)
    assert type(adapted(plain, {layer: updates})) is linear.AdaptedLinear  # type: ignore[dict-item]
    assert adapted(plain, {packed: updates}) is plain  # type: ignore[dict-item]
