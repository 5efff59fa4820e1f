"""`weft plan --serve` of models with experts: prices of each kernel, and predictions against an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cluster.hardware import load
from weft.models import DecoderConfig
from weft.plan import Plan
from weft.planner.kernels import LAUNCH_SECONDS
from weft.planner.lean_kernels import product_seconds, routing_seconds
from weft.planner.serving import ServingModel
from weft.serve.costs import expert_product, routing
from weft.serve.spec import ServingSpec
from weft.serve.weights.weight_formats import FORMATS, weight_bytes

LEAN = json.loads((Path(__file__).parents[2] / "benchmarks/results/lean-gpu.json").read_text())
EXPERTS = {  # of benchmarks/lean_gpu.py
    "8 experts of 14336, 2 used, 8 layers": {
        "architecture": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "64 experts of 1408, 6 used, 16 layers": {
        "architecture": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
    },
}  # fmt: skip


@pytest.mark.parametrize("number", [1, 16])
@pytest.mark.parametrize("shape", EXPERTS)
def test_decodes_of_experts_are_predicted_as_measured_on_an_h200(shape: str, number: int) -> None:
    sizes = {"vocab_size": 32000, "max_position_embeddings": 8192}
    config = DecoderConfig(**sizes, **EXPERTS[shape])  # type: ignore[arg-type]
    for kind in ("bf16", "int4", "fp8", "int8"):
        measured = LEAN["experts"][shape][kind]
        model = ServingModel(
            config, load("h200:1x1"), Plan(), "bf16", ServingSpec(weights=None if kind == "bf16" else kind)
        )
        found = model.simulate([(16, 256)] * number, model.cache_tokens).tokens_per_second
        assert found == pytest.approx(measured[f"{number} requests"]["tokens_per_second"], rel=0.1), kind


def test_the_router_and_the_order_of_rows_of_few_tokens_have_prices() -> None:
    config = DecoderConfig(vocab_size=32000, **EXPERTS["64 experts of 1408, 6 used, 16 layers"])  # type: ignore[arg-type]
    model = ServingModel(config, load("h200:1x1"), Plan(), "bf16")
    kernels, form, sizes = model.kernels, FORMATS["int4"], model.costs.sizes
    one, few, many, most = (routing_seconds(kernels, routing(form, number, sizes, 2)) for number in (1, 16, 22, 65))
    assert one == pytest.approx(2 * 64 * 2048 / (kernels.bytes_per_second / 132) + 2e-6)
    assert few == pytest.approx(one + 1e-6 + 1.3e-10 * 128 * (128 + 64))
    assert many == pytest.approx(one + 8 * LAUNCH_SECONDS)  # 132 pairs are more than one program orders
    assert most == 14 * LAUNCH_SECONDS
    assert routing_seconds(kernels, routing(None, 1, sizes, 2)) == 15 * LAUNCH_SECONDS


@pytest.mark.parametrize(
    ("kind", "tokens", "inner", "rate", "start"),
    [
        ("int4", 1, 4096, 0.93, 3.3e-6),
        ("int8", 1, 14336, 0.74, 3.3e-6),  # more bytes of a row than the kernel for one token holds
        ("int4", 2, 4096, 0.52, 8e-6),
        ("int4", 16, 4096, 0.55, 8e-6),
        ("int8", 16, 4096, 0.7, 8e-6),
        ("fp8", 1, 4096, 0.94, 8e-6),
        (None, 1, 4096, 0.70, 11.5e-6),
    ],
)
def test_experts_are_priced_by_the_kernel_that_reads_them(
    kind: str | None, tokens: int, inner: int, rate: float, start: float
) -> None:
    kernels, form = (
        ServingModel(DecoderConfig(), load("h200:1x1"), Plan(), "bf16").kernels,
        FORMATS[kind] if kind else None,
    )
    rows = 4.0 if tokens == 16 else 1.0
    found = expert_product(form, 2, tokens, rows, inner, 1024, 3.0)
    seconds, stored = product_seconds(kernels, found), 3 * found.weight_bytes
    assert stored == 3 * (2 * inner * 1024 if form is None else weight_bytes(form, 1024, inner))
    assert seconds == pytest.approx(stored / (rate * kernels.bytes_per_second) + start)
