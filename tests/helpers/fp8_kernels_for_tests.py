"""Triton's kernels for operands in fp8 beside the plain functions that they stand for, by Triton's interpreter.

The interpreter's casts to fp8 are not those of a GPU: a number that is rounded up to a power of two becomes half of it,
and the smallest ones are cut off. So results in fp8 are compared as codes: `steps` is the largest difference of two
codes, apart from these. `benchmarks/expert_fp8.py` compares them on a GPU.
"""

from __future__ import annotations

from typing import Any

import interpreter_for_tests  # noqa: F401  # before Triton
import torch
from torch import Tensor

from weft.models.expert_rows import align_groups, sort_by_expert
from weft.parallel.fp8 import operations, product_kernel, row_kernel

K, NUM_EXPERTS, NUM_TOKENS, WIDTH = 3, 5, 23, 40


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of each operation; rows behind the last expert are no numbers, as uninitialised memory may be."""
    experts = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(K).indices
    experts = torch.where(experts == 2, 4, experts)  # one expert has no rows
    order = align_groups(sort_by_expert(experts, NUM_EXPERTS), 16)
    num_rows, used = len(order.sources), int(order.ends[-1])
    assert used < num_rows
    magnitudes = torch.logspace(-12, 6, NUM_TOKENS)[:, None]
    tokens = (torch.randn(NUM_TOKENS, WIDTH) * magnitudes).bfloat16()
    tokens[3] = 0
    gate_up, given = torch.randn(num_rows, 2 * WIDTH).bfloat16(), torch.randn(num_rows, WIDTH).bfloat16()
    weights, left, right = torch.rand(num_rows), torch.rand(num_rows), torch.rand(num_rows)
    small, _ = operations.quantise_rows(given)
    factors, _ = operations.row_factors(left, right, order.ends)
    left[used:] = given[used:] = float("nan")
    stacked = torch.randn(3 * 20, WIDTH).bfloat16()
    return {
        "quantise_rows": (tokens,),
        "quantise_gated": (gate_up,),
        "quantise_gated_gradient": (given[:used], gate_up[:used], weights[:used]),
        "row_factors": (left, right, order.ends),
        "turn_rows of weights": (stacked, None, 1, torch.rand(3 * 20), 3),
        "turn_rows in place": (small, None, 1, None, 1),
        "turn_rows by factors": (given, None, 1, factors, 1),
        "turn_rows gathered": (operations.quantise_rows(tokens)[0], order.sources, K, None, 1),
        "turn_rows gathered by factors": (tokens.clamp(-400, 400), order.sources, K, factors, 1),
    }


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number; of fp8, see above."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.dtype == operations.DTYPE:
        return steps(found, expected)
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def steps(found: Tensor, expected: Tensor) -> float:
    """The largest difference of codes."""
    mine, other = (one.view(torch.uint8).int() for one in (found, expected))
    is_power = (other & 7 == 0) & (mine == other - 8)  # 8 codes are between a number and its half
    assert float(is_power.float().mean()) < 0.15
    is_small = (other & 0x7F <= 8) & (mine & 0x7F <= 8)  # below the smallest normal number
    return float(torch.where(is_power | is_small, 0, (mine - other).abs()).max())


def products() -> dict[str, list[float]]:
    """Of the products, for three groups of which one has no rows, with rows behind the last."""
    ends, num_rows, width, outputs = torch.tensor([128, 128, 384], dtype=torch.int32), 512, 128, 256
    (left, scale), (right, scales) = (operations.quantise_rows(torch.randn(n, width)) for n in (num_rows, 3 * outputs))
    by_rows = (left, scale, right.view(3, outputs, width), scales.view(3, outputs), ends)
    turned, others = (operations.quantise_rows(torch.randn(256, num_rows))[0] for _ in range(2))
    by_weights = (turned, others, torch.rand(3), ends)
    found = {}
    for name, args, used in (("fp8_rows_mm", by_rows, 384), ("fp8_weights_mm", by_weights, 3)):
        mine, other = (getattr(module, name)(*args)[:used] for module in (product_kernel, operations))
        found[name] = [difference(mine, other), difference(mine.roll(1, 0), other)]
    return found


def operands() -> dict[str, list[float]]:
    """Of the functions that prepare operands."""
    row_kernel._TILE, row_kernel._GROUP_BLOCK = 16, 32
    found = {}
    for name, args in calls().items():
        sides = [getattr(module, name.split()[0])(*args) for module in (row_kernel, operations)]
        pairs = [sides] if isinstance(sides[0], Tensor) else zip(*sides, strict=True)
        found[name] = [difference(*pair) for pair in pairs]
    turned = operations.turn_rows(torch.randn(32, 8), None, 1, torch.ones(32), 2)
    found["other order"] = [difference(turned.float().flip(2).to(operations.DTYPE), turned)]
    return found


CASES = {"operands": operands, "products": products}
