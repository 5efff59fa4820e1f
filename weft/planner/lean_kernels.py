"""The rates of a served model's kernels on a GPU: products, routing to experts, and attention over the cache.

Which kernels there are, and the bytes that they read, is said by `weft/serve/costs.py`.
"""

from __future__ import annotations

import math

from weft.errors import ConfigError
from weft.planner.kernels import LAUNCH_SECONDS, Kernels
from weft.serve.attention.reads import CacheReads, PromptPart
from weft.serve.costs import Routing, ServedCosts, WeightProduct

# By codes, the share of the memory rate of other kernels at which those for codes read (measured on an H200, for
# products). Those for one token multiply bytes as fast as memory gives them, and start while the kernel before them
# ends.
GROUPED_RATE, TOKEN_RATE = {"int4": 0.88, "int8": 0.74, "fp8": 1.0}, {"int4": 0.88, "int8": 1.0, "fp8": 1.0}
TOKEN_LAUNCH_SECONDS = 2.2e-6
# Experts in fewer bits, each kernel alone on an H200, with 8 experts (2 used) and 64 (6 used), for 1, 2, 4 and 16
# tokens: the same share by kernel and codes; and seconds until an expert's rows are known, of a token alone and of
# several. "row": one token whose codes do not fit registers.
EXPERT_RATE = {
    "token": {"int4": 0.93, "int8": 1.0},
    "row": {"int4": 0.88, "int8": 0.74},
    "few rows": {"int4": 0.52, "int8": 0.63},
    "tiles": {"int4": 0.55, "int8": 0.7, "fp8": 0.94},
}
EXPERT_TOKEN_SECONDS, EXPERT_ROWS_SECONDS = 3.3e-6, 8e-6
MOST_MEMORY_BOUND_ROWS = 64  # of an expert, up to which FLOPs run at the printed peak beside its reads
# A small kernel that starts while the one before it ends; and, where one program puts rows in order, each comparison.
EARLY_SECONDS, COMPARISON_SECONDS = 1e-6, 1.3e-10
# Experts in 16 bits: the share and the start of torch's grouped matmul alone, for twelve shapes of up to 64 experts
# (`benchmarks/expert_kernels.py`), and the operations of a layer beside its products (router, order of rows, rows and
# sums), which were counted. With codes and many tokens, kernels without rows.
GROUPED_MATMUL_RATE, GROUPED_MATMUL_SECONDS, EXPERT_KERNELS, MANY_PACKED_KERNELS = 0.70, 11.5e-6, 15, 14
ORDER_KERNELS = 8  # of torch's functions that put rows in order
PAGE_RATE = {32: 0.72, 64: 0.88, 128: 0.75}  # the same share of attention over pages of 4 bits, by their tokens
# The share of FlashAttention-2's rate at which prompts attend to such pages (one layer on an H200, 2,048 tokens that
# attend to 32,768 and 131,072).
PROMPT_RATE = {32: 0.38, 64: 0.59, 128: 0.71}
# Bytes that plain functions move for each weight that is dequantised, of codes and of so many numbers; and for each
# input that is rounded to float8.
DECODED_CODE_BYTES, DECODED_NUMBERS, ROUNDING_BYTES = 4, 5, 16


def product_seconds(kernels: Kernels, one: WeightProduct) -> float:
    """Return the seconds of a product, by its kernel."""
    if one.are_experts:
        return _expert_seconds(kernels, one)
    rows, inner, columns = max(1, round(one.rows)), one.inner, one.columns
    if one.kernel in ("token", "few rows", "tiles"):
        assert one.codes is not None
        is_token = one.kernel == "token"
        rate = kernels.bytes_per_second * (TOKEN_RATE if is_token else GROUPED_RATE)[one.codes]
        num_bytes = one.weight_bytes + kernels.item_bytes * rows * (inner + columns)
        launch = TOKEN_LAUNCH_SECONDS if is_token else LAUNCH_SECONDS
        return max(2 * rows * inner * columns / kernels.peak, num_bytes / rate) + launch
    seconds = kernels.product(rows, inner, columns)
    if one.kernel == "float8":  # it has twice the rate; inputs are rounded for it
        return seconds / 2 + ROUNDING_BYTES * rows * inner / kernels.bytes_per_second
    if one.kernel == "row":  # on newer GPUs it starts while the kernel before it ends
        return seconds - LAUNCH_SECONDS * kernels.device.is_newer
    if one.codes is None:
        return seconds
    moved = kernels.item_bytes  # float8 is widened alone: its scale is applied to results
    if one.codes != "fp8":
        moved = DECODED_CODE_BYTES + DECODED_NUMBERS * kernels.item_bytes
    return seconds + (one.weight_bytes + moved * inner * columns) / kernels.bytes_per_second


def _expert_seconds(kernels: Kernels, one: WeightProduct) -> float:
    """Return the seconds of a product with several experts, which are one kernel."""
    if one.codes is None:
        rate, start = GROUPED_MATMUL_RATE, GROUPED_MATMUL_SECONDS
    else:
        rate = EXPERT_RATE[one.kernel][one.codes]
        start = EXPERT_TOKEN_SECONDS if one.kernel in ("token", "row") else EXPERT_ROWS_SECONDS
    seconds = 2 * one.rows * one.inner * one.columns / kernels.peak
    if one.rows > MOST_MEMORY_BOUND_ROWS:
        seconds = kernels.product(round(one.rows), one.inner, one.columns) - LAUNCH_SECONDS
    return one.number * max(seconds, one.weight_bytes / (kernels.bytes_per_second * rate)) + start


def refuse_precision(kernels: Kernels, costs: ServedCosts) -> None:
    """Raise ConfigError for what has no kernels on a GPU that computes in 32 bits: experts in fewer bits, and caches
    other than the plain one.
    """
    if kernels.item_bytes == 2:
        return
    if costs.rounds_experts:
        raise ConfigError(
            f"--weights in fewer bits is not priced for models with experts in {kernels.precision}, in which a "
            f"{kernels.device.name} serves: its experts are decoded one after the other; leave out --weights, or plan "
            f"for a GPU with bf16"
        )
    if costs.cache.name != "plain":
        raise ConfigError(
            f"--cache {costs.cache.name} is not priced in {kernels.precision}, in which a {kernels.device.name} "
            f"serves: plain functions decode and attend, which is slow; leave out --cache, or plan for a GPU with bf16"
        )


def routing_seconds(kernels: Kernels, one: Routing) -> float:
    """Return the seconds of a layer of experts beside those of any layer and its products."""
    if one.kind in ("plain", "many"):
        return (EXPERT_KERNELS if one.kind == "plain" else MANY_PACKED_KERNELS) * LAUNCH_SECONDS
    # One program reads the router for a token, and has one processor's share of the memory rate. It and the kernel that
    # sums up start early.
    rate = kernels.bytes_per_second / (kernels.device.num_processors or 1)
    seconds = one.router_bytes / rate + 2 * EARLY_SECONDS
    if one.kind == "ordered":
        return seconds + ORDER_KERNELS * LAUNCH_SECONDS
    return seconds + (EARLY_SECONDS + COMPARISON_SECONDS * one.num_comparisons if one.kind == "few" else 0.0)


def cache_seconds(kernels: Kernels, reads: CacheReads) -> float:
    """Return the seconds of the attention of decodes in one layer without starts of kernels."""
    rate, num_processors = kernels.bytes_per_second, kernels.device.num_processors or 1
    if reads.page_tokens is not None:
        return reads.page_bytes / (rate * PAGE_RATE[reads.page_tokens])
    # Each program has one processor's share of the memory rate.
    in_turn = math.ceil(reads.num_programs / num_processors) * num_processors * reads.program_bytes
    return (reads.page_bytes + reads.other_bytes + in_turn) / rate


def prompt_seconds(kernels: Kernels, one: PromptPart) -> float:
    """Return the seconds of a prompt's attention in one layer."""
    seconds = kernels.attention(8 * one.head_dim * one.num_scores, 2 * one.num_scores, one.most_keys)[0]
    return seconds / (1.0 if one.page_tokens is None else PROMPT_RATE[one.page_tokens])
