"""Times of the kernels of lean inference on one device: products with weights in fewer bits, and the attention of
decodes over each format of the cache.
"""

from __future__ import annotations

import math

from weft.architectures import DecoderConfig, TransformerConfig
from weft.errors import ConfigError
from weft.planner.kernels import LAUNCH_SECONDS, Kernels
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.attention.plain import MAX_WHOLE_DECODES
from weft.serve.parallel.traffic import ServedSizes
from weft.serve.weights.fast_path import (
    FEW_ROWS,
    MAX_KERNEL_ROWS,
    MAX_PAIRS,
    MAX_ROUTED_TOKENS,
    fits_registers,
    has_kernel,
)
from weft.serve.weights.weight_formats import Grouped, RowFp8, WeightFormat, weight_bytes

# By bits, the share of the memory rate of other kernels at which those for codes in groups read (measured on an H200,
# for products). Those for one token multiply bytes as fast as memory gives them, and start while the kernel before them
# ends.
GROUPED_RATE, TOKEN_RATE = {4: 0.88, 8: 0.74}, {4: 0.88, 8: 1.0}
TOKEN_LAUNCH_SECONDS = 2.2e-6
# Experts in fewer bits, each kernel alone on an H200, with 8 experts (2 used) and 64 (6 used), for 1, 2, 4 and 16
# tokens: the same share of the kernel for one token, of that for few rows, and of tiles of rows, by bits; that of tiles
# of float8; and seconds until an expert's rows are known, of a token alone and of several.
EXPERT_TOKEN_RATE, EXPERT_ROWS_RATE, TILE_RATE = {4: 0.93, 8: 1.0}, {4: 0.52, 8: 0.63}, {4: 0.55, 8: 0.7}
FP8_TILE_RATE, EXPERT_TOKEN_SECONDS, EXPERT_ROWS_SECONDS = 0.94, 3.3e-6, 8e-6
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
# Bytes that plain functions move for each weight that is decoded, of codes and of so many numbers; and for each input
# that is rounded to float8.
DECODED_CODE_BYTES, DECODED_NUMBERS, ROUNDING_BYTES = 4, 5, 16
# Passes of Loki's choice over the joint scores of a key head (`serve/attention/loki_kernel.py`): they are written, read
# for each of 16 digits and for the count, and read to write the chosen tokens.
CHOOSING_PASSES = 1 + 16 + 1 + 1
SCORE_BYTES = 4
# Kernels of a layer beside its four matmuls: two norms, rotation, attention, and what is between gate and down. For one
# token, matmuls include norms and what is between. Rotation and attention of few decodes over a plain cache are one.
SMALL_KERNELS, SMALL_KERNELS_FOR_ONE = 4, 2
# Others have, beside these, a kernel that adds keys and values, and for Loki two that score and choose.
MORE_KERNELS = {"plain": 0, "int4": 1, "loki": 3}
# Where ranks hold pages together, rotation and attention are two kernels, and another adds up the parts of all ranks.
SPLIT_KERNELS = 2


def packed_product(kernels: Kernels, form: WeightFormat, rows: int, inner: int, columns: int) -> tuple[float, int]:
    """Seconds of a matmul with a weight in fewer bits, and the bytes of the weight."""
    stored = weight_bytes(form, columns, inner)
    is_half = kernels.item_bytes == 2  # as the kernels take inputs
    assert isinstance(form, Grouped | RowFp8), "other formats are for CPUs"
    if rows <= MAX_KERNEL_ROWS and is_half and has_kernel(form, inner):
        bits = form.bits if isinstance(form, Grouped) else 8
        is_token = rows == 1 and fits_registers(bits, inner)
        rates = TOKEN_RATE if is_token else GROUPED_RATE
        rate = kernels.bytes_per_second * (rates[form.bits] if isinstance(form, Grouped) else 1.0)
        num_bytes = stored + kernels.item_bytes * rows * (inner + columns)
        launch = TOKEN_LAUNCH_SECONDS if is_token else LAUNCH_SECONDS
        return max(2 * rows * inner * columns / kernels.peak, num_bytes / rate) + launch, stored
    has_product = kernels.device.is_newer and is_half and inner % 16 == 0 == columns % 16
    if isinstance(form, RowFp8) and has_product:  # the product of float8 has twice the rate; inputs are rounded for it
        rounding = ROUNDING_BYTES * rows * inner / kernels.bytes_per_second
        return kernels.product(rows, inner, columns) / 2 + rounding, stored
    moved = kernels.item_bytes  # float8 is widened alone: its scale is applied to results
    if isinstance(form, Grouped):
        moved = DECODED_CODE_BYTES + DECODED_NUMBERS * kernels.item_bytes
    decoding = (stored + moved * inner * columns) / kernels.bytes_per_second
    return kernels.product(rows, inner, columns) + decoding, stored


def refuse_experts(config: TransformerConfig, kernels: Kernels, form: WeightFormat | None, sizes: ServedSizes) -> None:
    """Raise ConfigError for layers of experts that differ or have a dense MLP beside their experts, and for experts in
    fewer bits on a GPU that computes in 32 bits, for which there are no kernels.
    """
    if isinstance(config, DecoderConfig) and any(sizes.expert_layers):
        numbers = {number for number in config.num_experts_per_layer if number}
        if len(numbers) > 1 or config.residual_experts:
            given = "residual_experts = true" if config.residual_experts else f"layers of {sorted(numbers)} experts"
            raise ConfigError(
                f"{given} is served, and not priced: the planner prices layers of experts that are equal and have no "
                f"dense MLP beside them; measure it with weft bench serve"
            )
    if form is not None and kernels.item_bytes != 2 and any(sizes.expert_layers):
        raise ConfigError(
            f"--weights in fewer bits is not priced for models with experts in {kernels.precision}, in which a "
            f"{kernels.device.name} serves: its experts are decoded one after the other; leave out --weights, or plan "
            f"for a GPU with bf16"
        )


def refuse_cache(kernels: Kernels, form: CacheFormat) -> None:
    """Raise ConfigError for a cache other than the plain one on a GPU that computes in 32 bits, for which there are no
    kernels.
    """
    if form.name != "plain" and kernels.item_bytes != 2:
        raise ConfigError(
            f"--cache {form.name} is not priced in {kernels.precision}, in which a {kernels.device.name} serves: plain "
            f"functions decode and attend, which is slow; leave out --cache, or plan for a GPU with bf16"
        )


def expert_products(
    kernels: Kernels, form: WeightFormat | None, num_tokens: int, rows: float, inner: int, columns: int, used: float
) -> tuple[float, float]:
    """Seconds of a product with each of `used` experts, which are one kernel, and the bytes of their weights. Each has
    so many rows in the mean; `num_tokens` are those of the step.
    """
    if form is None:
        stored, rate, start = kernels.item_bytes * inner * columns, GROUPED_MATMUL_RATE, GROUPED_MATMUL_SECONDS
    else:
        stored = weight_bytes(form, columns, inner)
        rate, start = _expert_rate(form, num_tokens, rows, inner), EXPERT_ROWS_SECONDS
        if num_tokens == 1 and isinstance(form, Grouped):
            start = EXPERT_TOKEN_SECONDS
    compute = kernels.product(max(1, round(rows)), inner, columns) - LAUNCH_SECONDS
    flops_bound = compute if rows > MAX_KERNEL_ROWS else 2 * rows * inner * columns / kernels.peak
    return used * max(flops_bound, stored / (kernels.bytes_per_second * rate)) + start, used * stored


def _expert_rate(form: WeightFormat, num_tokens: int, rows: float, inner: int) -> float:
    """The share of the memory rate at which experts with so many rows each are read."""
    if not isinstance(form, Grouped):
        return FP8_TILE_RATE
    if num_tokens == 1:
        return (EXPERT_TOKEN_RATE if fits_registers(form.bits, inner) else GROUPED_RATE)[form.bits]
    return (EXPERT_ROWS_RATE if 2 * rows <= FEW_ROWS else TILE_RATE)[form.bits]


def routing_seconds(kernels: Kernels, form: WeightFormat | None, num_tokens: int, sizes: ServedSizes) -> float:
    """Seconds of a layer of experts beside those of any layer and its products."""
    if form is None:
        return EXPERT_KERNELS * LAUNCH_SECONDS
    if num_tokens > MAX_ROUTED_TOKENS:
        return MANY_PACKED_KERNELS * LAUNCH_SECONDS
    # One program reads the router for a token, and has one processor's share of the memory rate.
    rate = kernels.bytes_per_second / (kernels.device.num_processors or 1)
    seconds = (
        kernels.item_bytes * sizes.num_experts * sizes.hidden / rate + 2 * EARLY_SECONDS
    )  # the router's kernel, and sums
    if num_tokens == 1:
        return seconds
    if (pairs := num_tokens * sizes.num_experts_per_tok) > MAX_PAIRS:
        return seconds + ORDER_KERNELS * LAUNCH_SECONDS
    lanes, experts = (1 << (number - 1).bit_length() for number in (pairs, sizes.num_experts))
    return seconds + EARLY_SECONDS + COMPARISON_SECONDS * lanes * (lanes + experts)


def small_kernels(form: CacheFormat, num_tokens: int, num_decodes: int) -> int:
    """Kernels of a layer beside its matmuls, in a step of so many tokens."""
    is_whole = form.name == "plain" and num_tokens == num_decodes <= MAX_WHOLE_DECODES
    number = SMALL_KERNELS_FOR_ONE if num_tokens == 1 else SMALL_KERNELS
    return number + MORE_KERNELS[form.kind] - is_whole


def decode_reads(
    kernels: Kernels, form: CacheFormat, num_decodes: int, num_cached: int, heads: tuple[int, int, int]
) -> tuple[float, float]:
    """Seconds of the attention of decodes in one layer without starts of kernels, and the bytes of the cache that it
    reads. The decodes have `num_cached` tokens together; `heads` are heads, key heads and their size.
    """
    num_heads, num_key_heads, head_dim = heads
    stored = num_cached * form.bytes_per_token(num_key_heads, head_dim, kernels.item_bytes)
    if isinstance(form.storage, FourBitStorage):
        return stored / (kernels.bytes_per_second * PAGE_RATE[form.storage.group]), stored
    if form.loki is None or not num_decodes:
        return stored / kernels.bytes_per_second, stored
    share = _chosen_share(form.loki.choice, num_cached / num_decodes)
    per_token = num_key_heads * kernels.item_bytes
    read = num_cached * per_token * (form.loki.choice.num_dims(head_dim) + share * 2 * head_dim)
    written = num_cached * num_heads * SCORE_BYTES
    # One program finds the chosen tokens of a key head, and has one processor's share of the memory rate.
    num_programs, num_processors = num_decodes * num_key_heads, kernels.device.num_processors or 1
    passes = CHOOSING_PASSES + num_heads // num_key_heads  # each query's scores are read once
    chosen = math.ceil(num_programs / num_processors) * num_processors * passes * SCORE_BYTES * num_cached / num_decodes
    return (read + written + chosen) / kernels.bytes_per_second, read


def prompt_attention(
    kernels: Kernels, form: CacheFormat, computed: int, end: int, window: int | None, heads: tuple[int, int]
) -> tuple[float, float]:
    """Seconds of the attention of a prompt's last `computed` of `end` tokens in one layer, and its FLOPs. `heads` are
    heads and their size.
    """
    num_heads, head_dim = heads
    start, most = end - computed, end if window is None else window
    full = min(max(most - start, 0), computed)  # tokens that attend to all before them
    scores = num_heads * (full * (start + full / 2) + (computed - full) * most)
    seconds = kernels.attention(8 * head_dim * scores, 2 * scores, min(end, most))[0]
    rate = PROMPT_RATE[form.storage.group] if isinstance(form.storage, FourBitStorage) else 1.0
    return seconds / rate, 4 * head_dim * scores


def _chosen_share(choice: LokiChoice, length: float) -> float:
    """The share of a request's tokens that are attended to."""
    if length < choice.dense_below:
        return 1.0
    return min(1.0, max(choice.tokens, (choice.newest + 1) / length))
