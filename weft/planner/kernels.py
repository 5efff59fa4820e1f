"""Times of kernels on a device: matmuls, convolutions, attention, and operations that only move bytes.

A matmul is a roofline with three losses. *Tiles*: the result is computed in tiles, which all take the time of a full
tile, in waves of as many tiles as the device has processors. *Depth*: each tile fills a pipeline before it runs at full
speed, so a short inner dimension costs time. *Tile size*: small tiles read more bytes per product. The matmul library
chooses the best tile, and so does `Kernels.product`. In addition, `calibration` is one number for each type of device:
the share of the printed peak that the best matmul reaches under the power and clocks of a training run. It is fitted on
a named table (see `cluster/catalog/*.toml`) and used everywhere.

If power limits a device, its clock is lower in training than in a single matmul. An H200 runs at 1,450 to 1,680 of
1,980 MHz, at its 700 W, in every step in which the host keeps up, and all large matmuls reach about 700 TFLOP/s with
any tiles. The three losses then apply to the rate at the full clock (`burst`), and count only where they are larger
than the loss to power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from weft.cluster.hardware import Device
from weft.inspection.memory_traffic import MemoryTraffic
from weft.profiling.software import Software
from weft.profiling.workload import Filter

# (rows, columns) of the tiles in matmul libraries; the first two are the largest.
TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
# The tiles that cuBLAS chose on an H200 over 18 models (`benchmarks/results/planner-h200.json`), in both orientations.
# With so many tiles, few matmuls leave processors idle.
NEWER_TILES = (
    *TILES, (128, 320), (320, 128), (192, 192), (128, 192), (192, 128), (96, 192), (192, 96), (96, 128), (128, 96)
)  # fmt: skip
# The length of the inner dimension that costs as much time as filling a tile's pipeline and writing its result: on
# older devices, and at the full clock of newer devices, whose products are faster while filling is not. On an H200 an
# inner dimension of 1,024 leaves 580 to 600 TFLOP/s and one of 512 leaves 490 to 530; one of 2,048 reaches the limit
# that power sets.
FILL_DEPTH, NEWER_FILL_DEPTH = 96, 420
SMALL_TILE_LOSS = 0.1
# The share of the device's peak that attention kernels reach on long causal sequences, (forward, backward): on devices
# whose matmul instructions the kernel was written for, and on a newer device. On Hopper, flash2 was measured on an
# H200. The numbers on A100 are those of FlashAttention-2's paper (arXiv 2307.08691, recalled, not re-checked): flash2
# 0.66 and 0.55; flash1 "30-50 %" forward and "25-35 %" backward, of which the middle is used. On Hopper flash1 is
# assumed to lose as much as flash2 does.
FLASH = {
    "flash1": ((0.40, 0.30), (0.20, 0.177)),
    "flash2": ((0.66, 0.55), (0.334, 0.325)),
}
# A sequence of this length reaches half of that share, (forward, backward), because of blocks on the diagonal and the
# start of each row. Measured on an H200 from 512 to 32,768 tokens, for two kernels.
HALF_SEQUENCE = (400, 1000)
# The calibration of the devices on which FLASH was measured, older and newer. On another device, power and clocks slow
# attention as much as they slow matmuls.
FLASH_CALIBRATION = (0.75, 0.70)
FLASH_BACKWARD_WORK = 2.5  # FLOPs of backward divided by FLOPs of forward
# "flash3" is cuDNN's kernel on Hopper. Its time per score has two parts. The products take 4 (forward) and 10
# (backward) FLOPs for each element of a head, at the device's full rate. The other operations (exponentials, maxima,
# sums) take a constant time that does not depend on the head's size: (forward, backward) seconds. On an H200 in
# training a score takes 1.0 and 2.9 ps with heads of 128, and 0.7 and 2.2 ps with heads of 64.
FLASH3_RATE = 0.9
FLASH3_SCORE_SECONDS = (0.40e-12, 1.40e-12)
# Heads are padded to a multiple of this: heads of 80 take the kernel, and the time, of heads of 128.
FLASH3_HEAD_DIM = 64
# Beyond 128, heads whose queries and values differ take the time of the mean of both: those of 192 and 128 (latent
# attention), the time of 160. On an H200, 128 such heads of 2,048, 4,096 and 8,192 tokens take 0.33, 1.17 and 4.58 ms
# forward and 1.49, 5.31 and 20.4 ms both ways, which is predicted within 10 %.
FLASH3_LARGE_HEAD_DIM, FLASH3_LARGE_MULTIPLE = 128, 32
# Scores are computed in blocks of this size, including whole blocks on the diagonal. One processor computes all keys of
# one block of queries, so few sequences with few heads leave processors idle.
FLASH3_BLOCK = 128
FLASH3_CALIBRATION = 0.71  # of the device on which flash3 was measured; see FLASH_CALIBRATION
# Bytes per query element that kernels beside the attention kernel move in backward: the products of results and their
# gradients, and gradients converted from float32. With grouped queries they also sum the gradients of keys and values.
FLASH3_BYTES, FLASH3_GROUPED_BYTES = 16, 22
SCORE_PASSES = {"forward": 4.5, "backward": 5.5}  # times that plain attention moves its scores outside of products
MEMORY_SHARE = 0.85  # share of the printed bandwidth that streaming kernels reach
# Bytes that backward moves, divided by forward's, by `fused`. In eager mode the gradients of biases and the joining of
# views are separate kernels (measured on an H200: 2.8 to 3.4 for GPT-2 and Llama blocks; compiled 1.9 to 2.1).
BACKWARD_PASSES = {False: 3.0, True: 2.0}
LAUNCH_SECONDS = 4e-6  # gap between two kernels on the device
# At its start and end, a kernel of torch.compile does not reach the full memory bandwidth: twelve kernels in a block of
# 4,096 tokens lost 60 us on an H200, in norms, rotary embedding and SwiGLU of 28 to 155 MB.
STREAM_SECONDS = 4e-6
# The share of full speed of a 16-bit matmul if rows of an operand or of the result are not a multiple of 16 bytes, by
# (newer device, even number of elements). Measured on an H200, 50,257 to 50,264 columns over 1,024 to 8,192 rows,
# forward and backward. Hopper's instructions need that multiple; otherwise kernels for older devices run, at half their
# speed if the number is odd. Older devices are assumed to lose only in the odd case.
UNALIGNED = {(True, True): 0.38, (True, False): 0.185, (False, True): 1.0, (False, False): 0.48}
ALIGNED_ELEMENTS = 8
# The speed of grouped matmuls of experts relative to the best matmul. On an H200, torch._grouped_mm alone reached 737,
# 684 and 675 TFLOP/s in forward, and 756, 719 and 651 for gradients of weights, with 8, 64 and 128 experts; the best
# matmul reaches 790.
GROUPED_PRODUCTS = 0.89
# The efficiency of fp8 matmuls relative to that of bf16 matmuls, each as a share of its own peak. Scaled per tensor:
# 1,403 and 1,453 of 1,979 to 794 of 989 on H100 and H200. Scaled per row, torch uses another kernel: found on an H200,
# 6.7B of 4 × 2,048 tokens (docs/measured/planner.md).
FP8_PRODUCT = {"tensor": 0.9, "row": 0.72}
# Bytes per element to cast an operand to fp8: read for its largest value (fused into the operation that made it), read
# again, written. Backward casts the gradient and transposes both operands of forward; scaled per row, it also casts all
# of them along the other dimension.
CAST_BYTES = {False: 5, True: 3}
TURN_BYTES = 2


@dataclass(frozen=True)
class Kernels:
    """Times of kernels on one device in one precision, in seconds."""

    device: Device
    software: Software
    precision: str = "bf16"

    @property
    def peak(self) -> float:
        """The printed FLOP/s of matmuls; fp16's if the device has no bf16."""
        return self.device.peak_flops.get(self.precision) or self.device.peak_flops["fp16"]

    @property
    def flops_per_second(self) -> float:
        """The FLOP/s of the best matmul."""
        return self.peak * self.device.calibration

    @property
    def bytes_per_second(self) -> float:
        """The memory bandwidth that a streaming kernel reaches."""
        assert self.device.memory_bandwidth_bytes_per_second is not None
        return self.device.memory_bandwidth_bytes_per_second * MEMORY_SHARE

    def product(self, rows: int, inner: int, columns: int, share: float = 1.0) -> float:
        """Seconds of a matmul [rows, inner] · [inner, columns] at a share of full speed."""
        return self._product(rows, inner, columns, self.flops_per_second * share, self.item_bytes)

    def linear(self, rows: int, inputs: int, outputs: int, given_share: float = 1.0) -> tuple[float, float]:
        """(forward, backward) seconds of a linear layer, in the software's precision.

        For fp8, `given_share` of its input is cast here.
        """
        if not self.software.fp8:
            share = self._aligned_share(inputs, outputs)
            backward = self.product(rows, outputs, inputs, share) + self.product(inputs, rows, outputs, share)
            return self.product(rows, inputs, outputs, share), backward
        rate = self.device.peak_flops["fp8"] * self.device.calibration * FP8_PRODUCT[self.software.fp8]
        given, result = rows * inputs, rows * outputs
        weight = 0 if self.software.keeps_fp8_weights else inputs * outputs  # elements cast and transposed here
        cast = CAST_BYTES[self.software.fused] / self.bytes_per_second
        backward = self._product(rows, outputs, inputs, rate, 1) + self._product(inputs, rows, outputs, rate, 1)
        if self.software.fp8 == "row":
            backward += cast * (2 * result + given + weight)
        else:
            backward += cast * result + TURN_BYTES * (given + weight) / self.bytes_per_second
        return self._product(rows, inputs, outputs, rate, 1) + cast * (given_share * given + weight), backward

    def _aligned_share(self, inputs: int, outputs: int) -> float:
        """The share of full speed if rows of so many elements are not multiples of 16 bytes."""
        if self.item_bytes != 2 or inputs % ALIGNED_ELEMENTS == outputs % ALIGNED_ELEMENTS == 0:
            return 1.0
        return UNALIGNED[self.device.is_newer, inputs % 2 == outputs % 2 == 0]

    def _product(self, rows: int, inner: int, columns: int, rate: float, size: int) -> float:
        """Seconds of a matmul at `rate` FLOP/s for full tiles; operands have `size` bytes an element."""
        if min(rows, inner, columns) < 1:
            return 0.0
        flops, num_bytes = (
            2 * rows * inner * columns,
            size * (rows * inner + inner * columns) + self.item_bytes * rows * columns,
        )
        burst = self.device.burst if self.software.many_tiles else None
        share = tile_share(rows, inner, columns, self.device.num_processors, burst is not None)
        # Processors that are idle, or fill or write a tile, leave their power to the others.
        reached = min(1.0, share * (burst or self.device.calibration) / self.device.calibration)
        return max(flops / (rate * reached), num_bytes / self.bytes_per_second) + LAUNCH_SECONDS

    def grouped_product(self, rows: int, inner: int, columns: int) -> float:
        """Seconds of a matmul [rows, inner] · [inner, columns] among many that one kernel computes, as for experts."""
        flops, num_bytes = 2 * rows * inner * columns, self.item_bytes * (inner * (rows + columns) + rows * columns)
        burst = self.device.burst if self.software.many_tiles else None
        share = tile_share(rows, inner, columns, None, burst is not None)
        reached = min(GROUPED_PRODUCTS, share * (burst or self.device.calibration) / self.device.calibration)
        return max(flops / (self.flops_per_second * reached), num_bytes / self.bytes_per_second)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element in memory."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    def convolution(self, one: Filter, scale: float) -> tuple[float, float]:
        """(forward, backward) seconds of a convolution of `scale` images, as implicit matmuls that read each pixel
        once.

        The weight's gradient is a sum over so many pixels that libraries split the inner dimension, so no processor is
        idle. A convolution with one channel per group is no matmul: it runs on the fp32 units.
        """
        rows, in_rows = math.ceil(one.rows * scale), math.ceil(one.in_rows * scale)
        inner, weight = one.inputs * one.taps, one.inputs * one.taps * one.outputs
        num_bytes = self.item_bytes * one.groups * (in_rows * one.inputs + rows * one.outputs + weight)
        flops = one.flops * scale
        if one.inputs == 1 and one.groups > 1:
            plain = self.device.peak_flops.get("fp32", self.peak) * self.device.calibration
            each = max(flops / plain, num_bytes / self.bytes_per_second) + LAUNCH_SECONDS
            return each, (1 + one.needs_gradient) * each
        processors = self.device.num_processors

        def seconds(share: float) -> float:
            return max(flops / (self.flops_per_second * share), num_bytes / self.bytes_per_second) + LAUNCH_SECONDS

        backward = seconds(tile_share(inner, rows, one.outputs, None))
        if one.needs_gradient:
            inverse = max(1, round(one.outputs * one.taps * rows / in_rows))
            backward += seconds(tile_share(in_rows * one.groups, inverse, one.inputs, processors))
        return seconds(tile_share(rows * one.groups, inner, one.outputs, processors)), backward

    def attention(
        self, flops: float, score_numel: float, sequence: int, is_causal: bool = True, is_grouped: bool = False
    ) -> tuple[float, float]:
        """(forward, backward) seconds of attention.

        `flops` are those of forward without a causal mask, and `score_numel` the number of scores. `is_grouped`:
        several queries share a key.
        """
        if not flops:
            return 0.0, 0.0
        if self.software.attention == "flash3":
            return self._flash3(flops, score_numel, sequence, is_causal, is_grouped)
        if self.software.attention != "plain":
            needed = flops / 2 if is_causal else flops
            best = FLASH[self.software.attention][self.device.is_newer]
            rate = self.flops_per_second / FLASH_CALIBRATION[self.device.is_newer]
            shares = [share * sequence / (sequence + half) for share, half in zip(best, HALF_SEQUENCE, strict=True)]
            return needed / (rate * shares[0]), FLASH_BACKWARD_WORK * needed / (rate * shares[1])
        # Forward has two products and backward four; each reads or writes all scores. In one of the two, and one of the
        # four, the inner dimension is the head's; in the others the head's dimension is the columns of the result.
        head_dim = max(1, round(flops / (4 * score_numel)))
        score_seconds = 2 * score_numel / self.bytes_per_second
        into, out_of = (
            max(flops / 2 / (self.flops_per_second * tile_share(sequence, *shape, None)), score_seconds)
            for shape in ((head_dim, sequence), (sequence, head_dim))
        )
        forward, backward = (score_seconds * passes for passes in SCORE_PASSES.values())
        return into + out_of + forward, into + 3 * out_of + backward

    def _flash3(
        self, flops: float, score_numel: float, sequence: int, is_causal: bool, is_grouped: bool
    ) -> tuple[float, float]:
        head_dim = flops / (4 * score_numel)
        multiple = FLASH3_HEAD_DIM if head_dim <= FLASH3_LARGE_HEAD_DIM else FLASH3_LARGE_MULTIPLE
        padded = math.ceil(head_dim / multiple) * multiple
        scores = score_numel * (1 + FLASH3_BLOCK / sequence) / 2 if is_causal else score_numel
        scores = max(scores, (self.device.num_processors or 0) * FLASH3_BLOCK * sequence)
        scores *= FLASH3_CALIBRATION / self.device.calibration
        forward, backward = (
            scores * (operations * padded / (self.peak * FLASH3_RATE) + other)
            for operations, other in zip((4, 4 * FLASH_BACKWARD_WORK), FLASH3_SCORE_SECONDS, strict=True)
        )
        beside = (FLASH3_GROUPED_BYTES if is_grouped else FLASH3_BYTES) * flops / (4 * sequence)
        return forward + LAUNCH_SECONDS, backward + beside / self.bytes_per_second + 4 * LAUNCH_SECONDS

    def loss(self, num_logits: float) -> float:
        """Seconds of the loss and its gradient."""
        return num_logits * self.software.loss_bytes / self.bytes_per_second

    def streamed(self, num_bytes: float, num_kernels: int) -> float:
        """Seconds of `num_kernels` kernels of torch.compile that move `num_bytes` together."""
        return num_bytes / self.bytes_per_second + num_kernels * (STREAM_SECONDS + LAUNCH_SECONDS)

    def moved(self, moved: MemoryTraffic) -> float:
        """Seconds of kernels that only move bytes, eager or fused as the software runs them."""
        fused = self.software.fused
        num_bytes, num_kernels = moved[2:] if fused else moved[:2]
        return num_bytes / self.bytes_per_second + num_kernels * LAUNCH_SECONDS

    def moved_backward(self, moved: MemoryTraffic) -> float:
        """Seconds of the backward of kernels that only move bytes."""
        return BACKWARD_PASSES[self.software.fused] * self.moved(moved)


@lru_cache(maxsize=1 << 16)
def tile_share(rows: int, inner: int, columns: int, num_processors: int | None, is_newer: bool = False) -> float:
    """The share of full speed that a matmul reaches with the best tile.

    `is_newer` uses the tiles and fill depth of newer libraries and devices. `num_processors` None ignores idle
    processors.
    """
    best = 0.0
    largest = TILES[0][0] * TILES[0][1] / sum(TILES[0])
    deepest = NEWER_FILL_DEPTH if is_newer else FILL_DEPTH
    for tall, wide in NEWER_TILES if is_newer else TILES:
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        slots = math.ceil(tiles / num_processors) * num_processors if num_processors else tiles
        filled = rows * columns / (slots * tall * wide)
        size = tall * wide / (tall + wide) / largest
        by_size = min(1.0, size / (size + SMALL_TILE_LOSS) * (1 + SMALL_TILE_LOSS))
        depth = deepest if tall * wide >= TILES[0][0] * TILES[0][1] else deepest * 2 / 3
        best = max(best, filled * by_size * inner / (inner + depth))
    return best
