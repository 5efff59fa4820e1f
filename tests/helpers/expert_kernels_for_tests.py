"""Kernels of experts in fewer bits beside the plain functions, as `kernels_for_tests.py` does it."""

from __future__ import annotations

from typing import Any

import interpreter_for_tests  # noqa: F401  # before Triton
import torch
from torch import Tensor

from weft.models import DecoderConfig
from weft.models.attention import RMSNorm
from weft.models.expert_rows import sort_by_expert
from weft.models.experts import StackedExperts
from weft.models.router import Router
from weft.serve.weights import expert_kernel
from weft.serve.weights.expert_kernel import order_by_kernel, route_by_kernel, sorted_rows_by_kernel, tokens_by_kernel
from weft.serve.weights.packed_experts import PackedExperts
from weft.serve.weights.weight_formats import weight_format


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, of the largest number."""
    return float(((one.double() - other.double()).abs().max() / other.double().abs().max()).detach())


def experts_of(kind: str, num_experts: int, hidden: int, inner: int) -> PackedExperts:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = DecoderConfig("mixtral", **sizes, num_experts=num_experts, num_experts_per_tok=1)  # type: ignore[arg-type]
    stacked = StackedExperts(config, num_experts)
    packed = PackedExperts(weight_format(kind), stacked, "cpu")
    for name, stack in packed.stacks.items():
        stack.take(name, torch.randn(stack.shape) * 0.2 + 0.05, torch.float32)
    return packed


FEW = (
    ("tiles", torch.float32, "int4", (2, 64, 32), 18, 1),  # more rows of an expert than a program has
    ("tiles", torch.float32, "int8", (4, 32, 32), 3, 2),
    ("few rows", torch.float32, "int4", (3, 64, 32), 3, 1),
    ("few rows", torch.float16, "fp8", (3, 32, 32), 1, 2),
    ("token", torch.float16, "int8", (2, 32, 32), 1, 1),
)
MORE = (
    ("tiles", torch.float32, "int4", (4, 128, 64), 1, 2),
    ("tiles", torch.float32, "int8", (4, 32, 32), 2, 2),
    ("tiles", torch.float16, "int4-128", (3, 128, 1024), 1, 1),
    ("tiles", torch.float16, "fp8", (4, 32, 64), 2, 2),
    ("few rows", torch.float32, "int4", (4, 128, 64), 1, 2),
    ("few rows", torch.float32, "int8", (3, 64, 32), 6, 2),
    ("few rows", torch.float16, "fp8", (4, 32, 64), 2, 2),
    ("token", torch.float16, "int4", (4, 128, 64), 1, 2),
    ("token", torch.float16, "int4-128", (3, 32, 64), 1, 2),
    ("token", torch.float16, "fp8", (3, 32, 32), 1, 2),
)


def experts(cases: tuple[Any, ...] = FEW) -> dict[str, dict[str, float]]:
    """Of tokens through experts: one and many, experts without rows and with more than a program has; of rows that are
    sorted. Controls: the codes of other experts, and the weights of other choices.
    """
    found = {}
    expert_kernel._OUTPUTS, expert_kernel._PROGRAMS, expert_kernel._MAX_ROWS = 64, 4, 16
    for kernel, dtype, kind, sizes, num_tokens, k in cases:
        expert_kernel.kernel_for = lambda *_, kernel=kernel: kernel  # type: ignore[assignment]
        packed = experts_of(kind, *sizes)
        tokens, weights = torch.randn(num_tokens, sizes[1]).to(dtype), torch.rand(num_tokens, k)
        chosen = torch.stack([torch.randperm(sizes[0] - 1)[:k] for _ in range(num_tokens)])  # nobody chooses the last
        plain = packed.of_tokens(tokens.double(), weights.double(), chosen)
        order = sort_by_expert(chosen, sizes[0])
        assert order.ends is not None
        rows = tokens[order.sources // k]
        name = f"{kernel} {dtype} {kind} {sizes} {num_tokens} {k}"
        found[name] = {"tokens": difference(tokens_by_kernel(tokens, weights, chosen, packed), plain)}
        if dtype == torch.float32 and kind == "int8":
            own = sorted_rows_by_kernel(rows, order.ends, packed)
            found[name]["rows"] = difference(own, packed(rows.double(), order.ends))
            residual = torch.randn(num_tokens, sizes[1])
            added = tokens_by_kernel(tokens, weights, chosen, packed, residual)
            found[name]["added"] = difference(added, plain + residual)
            wrong = tokens_by_kernel(tokens, weights.flip(-1) + 1, chosen, packed)
            found[name]["other weights"] = difference(wrong, plain)
        packed.down_proj.part_0.copy_(packed.down_proj.part_0.roll(1, 0))  # type: ignore[operator]
        found[name]["codes of other experts"] = difference(tokens_by_kernel(tokens, weights, chosen, packed), plain)
    return found


def routes() -> dict[str, dict[str, float]]:
    """Of routers: the norm, weights and experts, and the order of rows. Controls: no norm, and the order of other
    choices.
    """
    found = {}
    expert_kernel._LOADED = 512
    for dtype, num_experts, size, num_tokens, k, is_normalised in (
        (torch.float32, 8, 100, 3, 2, True),
        (torch.float32, 60, 64, 1, 6, False),
        (torch.float16, 5, 40, 9, 3, True),
    ):
        sizes = {"hidden_size": size, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": num_experts}
        config = DecoderConfig("qwen3_moe", **sizes, num_experts_per_tok=k, norm_topk_prob=is_normalised)  # type: ignore[arg-type]
        router, norm = Router(config, num_experts).eval().to(dtype), RMSNorm(size, 1e-6).to(dtype)
        for parameter in (router.weight, norm.weight):
            parameter.data.normal_()
        hidden = torch.randn(num_tokens, size + 3).to(dtype)[:, :size]  # rows may lie apart
        normed, weights, experts = route_by_kernel(hidden, norm, router)
        given = norm(hidden)
        plain = (given, *router(given[None]))
        order, expected = order_by_kernel(experts, num_experts), sort_by_expert(experts, num_experts)
        other = sort_by_expert((experts + 1) % num_experts, num_experts)
        pairs = [(order.sources, expected.sources), (order.places, expected.places), (order.ends, expected.ends)]
        found[f"{dtype} {num_experts} {k}"] = {
            "normed": difference(normed, plain[0]),
            "weights": difference(weights, plain[1]),
            "experts": float((experts != plain[2]).sum()),
            "order": float(sum((mine != own).sum() for mine, own in pairs)),
            "not normed": difference(hidden, plain[0]),
            "order of others": float((order.ends != other.ends).sum()),
        }
    return found


CASES = {"experts": experts, "more_experts": lambda: experts(MORE), "routes": routes}
