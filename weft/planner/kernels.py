"""How long a device takes for a matmul, a convolution, attention, and bytes that only pass through memory.

A matmul is a roofline with three losses. *Tiles*: its result is computed in tiles, all of which take the time of a full
one, in waves of as many tiles as the device has processors. *Depth*: each tile fills a pipeline before it runs at full
speed, so a short inner dimension costs. *Tile size*: small tiles read more for each product. The library chooses the
best tile, and so does `Kernels.product`. On top comes one number for each type of device, `calibration`, which says
what the best matmul reaches of the printed peak under the power and clocks of a training run; it is fitted on a named
table (see `cluster/catalog/*.toml`) and used everywhere. Where power is what limits a device, its clock is lower in
training than alone: an H200 runs at 1,450 to 1,680 of 1,980 MHz, at its 700 W, in every step that its host can follow,
and all large matmuls reach about 700 TFLOP/s, whatever their tiles. The losses are then those at the full clock
(`burst`), and count only as far as they are larger than what power costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster, Device
from weft.inspection.memory_traffic import MemoryTraffic
from weft.planner.workload import Filter

# (rows, columns) of tiles that matmul libraries have; the first two are the largest.
TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
# Those that cuBLAS chose on an H200 over 18 models (`benchmarks/results/planner-h200.json`), both ways round: with so
# many, few matmuls leave processors without work.
NEWER_TILES = (
    *TILES, (128, 320), (320, 128), (192, 192), (128, 192), (192, 128), (96, 192), (192, 96), (96, 128), (128, 96)
)  # fmt: skip
# Of the inner dimension, until a tile runs at full speed and for as long as its result is written: on older devices,
# and at the full clock of newer ones, whose products are faster and their filling is not. On an H200 an inner dimension
# of 1,024 leaves 580 to 600 TFLOP/s and one of 512 leaves 490 to 530; 2,048 already reach what power allows.
FILL_DEPTH, NEWER_FILL_DEPTH = 96, 420
SMALL_TILE_LOSS = 0.1
# What attention kernels reach of the device's peak on long causal sequences, (forward, backward), where the device's
# matmul instructions are those the kernel was written for, and on a newer device. On Hopper, flash2 was measured on an
# H200. On A100 they are as FlashAttention-2's paper has them (arXiv 2307.08691, recalled,
# not re-checked): flash2 0.66 and 0.55; flash1 "30-50 %" forward and "25-35 %" backward, taken in the middle. On Hopper
# flash1 is assumed to lose what flash2 loses.
FLASH = {
    "flash1": ((0.40, 0.30), (0.20, 0.177)),
    "flash2": ((0.66, 0.55), (0.334, 0.325)),
}
# A sequence this long reaches half of it, (forward, backward): blocks on the diagonal, and the start of each row.
# Measured on an H200 from 512 to 32,768 tokens, for two kernels.
HALF_SEQUENCE = (400, 1000)
# The calibration of the devices on which FLASH was found, old and new: what power and clocks cost matmuls on another
# device they cost attention too.
FLASH_CALIBRATION = (0.75, 0.70)
FLASH_BACKWARD_WORK = 2.5  # products of backward for each two of forward, over two
# "flash3" is cuDNN's kernel on Hopper. Its time for a score is that of its products, 4 and 10 operations for each
# element of a head, at the full rate of the device, and of what is not a product (exponentials, maxima, sums), which
# does not shrink with the head: (forward, backward) seconds. On an H200 in training, for a score: 1.0 and 2.9 ps with
# heads of 128, 0.7 and 2.2 ps with heads of 64.
FLASH3_RATE = 0.9
FLASH3_SCORE_SECONDS = (0.40e-12, 1.40e-12)
# Heads are filled up to a multiple of this: 80 take the kernel, and the time, of 128.
FLASH3_HEAD_DIM = 64
# Scores are computed in blocks, whole ones on the diagonal too; one processor does all keys of so many queries, so that
# few sequences of few heads leave processors idle.
FLASH3_BLOCK = 128
FLASH3_CALIBRATION = 0.71  # of the device on which this was found; see FLASH_CALIBRATION
# Moved in backward for each element of a query by kernels beside it: the products of results and their gradients, and
# gradients from float32; where several queries share a key, also the sum of the gradients of keys and values.
FLASH3_BYTES, FLASH3_GROUPED_BYTES = 16, 22
SCORE_PASSES = {"forward": 4.5, "backward": 5.5}  # times that plain attention moves its scores, beside its products
MEMORY_SHARE = 0.85  # of the printed bandwidth that streaming kernels reach
# Times of forward's bytes that backward moves, by `fused`. Eager, the gradients of biases and the joining of views are
# kernels of their own (measured on an H200: 2.8 to 3.4 for GPT-2 and Llama blocks; compiled 1.9 to 2.1).
BACKWARD_PASSES = {False: 3.0, True: 2.0}
LAUNCH_SECONDS = 4e-6  # between two kernels on the device
# While a kernel of torch.compile begins and ends, it has not all of the memory's bandwidth: twelve in a block of 4,096
# tokens lost 60 us on an H200, in norms, rotary embedding and SwiGLU of 28 to 155 MB.
STREAM_SECONDS = 4e-6
# Moved for each logit by torch's own cross-entropy in float32, forward and backward (measured on an H200: 46), and by
# one that torch.compile fuses (11). Kernels made for it move less: read once, and once more to write the gradient.
EAGER_LOSS_BYTES, COMPILED_LOSS_BYTES, FUSED_LOSS_BYTES = 46, 11, 8
# What is left of full speed to a matmul of 16 bits where rows of an operand or the result are no multiple of 16 bytes,
# by (newer device, even number of elements). Measured on an H200, 50,257 to 50,264 columns over 1,024 to 8,192 rows,
# forward and backward: Hopper's instructions need that multiple; kernels for older devices run instead, at half their
# speed where the number is odd. Older devices are taken to lose only the latter.
UNALIGNED = {(True, True): 0.38, (True, False): 0.185, (False, True): 1.0, (False, False): 0.48}
ALIGNED_ELEMENTS = 8
# Of what bf16 matmuls reach of their peak. Scaled by tensor: 1,403 and 1,453 of 1,979 to 794 of 989 on H100 and H200.
# Scaled by row, torch has a kernel of its own: found on an H200, 6.7B of 4 × 2,048 tokens (docs/planner.md).
FP8_PRODUCT = {"tensor": 0.9, "row": 0.72}
# To make an operand fp8: read for its largest value (fused, by what made it), read again, written. Backward casts the
# gradient and turns both operands of forward; scaled by rows, it casts all of them along the other dimension as well.
CAST_BYTES = {False: 5, True: 3}
TURN_BYTES = 2

# Of weft's own trainer, on an H200. A sum of a 16-bit gradient into fp32 moves 10 bytes, and torch's kernel for mixed
# types reaches under half of the bandwidth (5.3 ps for a parameter, 1.5 and 8 billion of them); the head's gradient
# takes 7.1 to 7.8 ps. The host's two are of one row, 8 × 1 × 2,048 tokens of Qwen2 1.5B: no other waits for its host.
ALONE_BYTES, SUM_BYTES, HEAD_BYTES = 6, 22, 32
CALL_SECONDS, GRADIENT_SECONDS = 0.3e-3, 80e-6


@dataclass(frozen=True)
class Software:
    """How steps are run, beside the plan: facts about a framework. The defaults are weft's own, uncompiled.

    `attention`: a key of FLASH, or "plain" with scores in memory. `fused`: operations between matmuls are one kernel
    (torch.compile, or fused by hand); `compiled`: it is torch.compile, block by block, which then decides what is kept
    for backward. `host_seconds`: what the host takes to issue one operation; where kernels are
    shorter, the host sets the pace. `loss_bytes` pass through memory for each logit, forward and backward.
    `selective`: what selective recompute does again: "cheap" work, the "attention", or every "other" matmul beside the
    cheap work. `stops_early`: full recompute ends at the last thing that backward needs, before a block's last
    linear (torch's own without reentrance, since 2.1). `pads_head`: classes that are no multiple of 16 bytes are
    filled up, where the head is whole. `gradient_bytes` of a parameter are reduced, behind the last
    backward where `hides_gradients`. `hides_input`: dI is summed behind dW. `hides_tensor`: collectives of x run in
    pieces behind the pieces of their matmul. `copies_sequence`: the sequence is not the outermost dimension, so
    that what is gathered or scattered along it is copied once more. `fp8`: products of linears are but for the head's,
    scaled by "tensor" (what is gathered along the sequence is cast before) or by "row"; `keeps_fp8_weights`: cast in
    the first micro-batch of a step, used by all. `splits_messages`: between stages each rank of x sends its part.
    `grows_buckets`: gradients are reduced in buckets that grow with the ranks of data, not block by block.
    """

    attention: str = "flash2"
    fused: bool = False
    compiled: bool = False
    fp8: str = ""
    keeps_fp8_weights: bool = False
    host_seconds: float = 10e-6
    loss_bytes: float = EAGER_LOSS_BYTES
    selective: str = "cheap"
    stops_early: bool = True
    pads_head: bool = False
    gradient_bytes: int = 4
    hides_gradients: bool = True
    hides_input: bool = True
    hides_tensor: bool = False
    copies_sequence: bool = False
    splits_messages: bool = False
    grows_buckets: bool = False
    shards_optimizer: bool = False  # over data and context, data inside of pipe
    fuses_ring: bool = False  # what adds up the parts of attention is one kernel
    repeats_keys: bool = False  # for every query head, before attention
    pipe_outside: bool = False  # of data in the order of ranks; weft has data outside
    # Moved for each parameter: AdamW and new 16-bit weights 30, norm 4, taking gradients 6. (One rank: 28, 2 and 4.)
    optimizer_bytes: int = 40
    gathers_again: bool = False  # parameters of `shard` for recompute, and once more for backward
    # Matmul libraries have the tiles of cuBLAS since 2024 (NEWER_TILES), and power is what limits a newer device.
    many_tiles: bool = False
    # Of `optimizer_bytes`, what a rank alone spares that adds up no micro-batches: gradients are taken with their norm.
    alone_bytes: int = 0
    # Moved for a parameter to add the gradient of one more micro-batch, in bytes at full bandwidth, and for an element
    # of the head's weight whose gradient is added up in fp32 with the loss, then scaled and rounded.
    sum_bytes: int = 0
    head_bytes: int = 0
    # What the host takes to call what was compiled of a block, forward or backward, and for a parameter's gradient.
    call_seconds: float = 0.0
    gradient_seconds: float = 0.0


def software_for_text(cluster: Cluster, compiles: bool | None = None) -> Software:
    """How weft trains models of language on a cluster: compiled if the run says so, or else on GPUs, with the fastest
    attention kernel.
    """
    is_newer = cluster.node.device.is_newer and not is_cpu(cluster)
    attention = "flash3" if is_newer else "flash2"  # Hopper's has a kernel of its own
    if not (not is_cpu(cluster) if compiles is None else compiles):
        return Software(attention, pads_head=not is_cpu(cluster), many_tiles=True)
    loss_bytes = COMPILED_LOSS_BYTES if is_cpu(cluster) else FUSED_LOSS_BYTES
    return Software(
        attention,
        fused=True,
        compiled=True,
        loss_bytes=loss_bytes,
        pads_head=not is_cpu(cluster),
        many_tiles=True,
        alone_bytes=ALONE_BYTES,
        sum_bytes=SUM_BYTES,
        head_bytes=HEAD_BYTES,
        call_seconds=CALL_SECONDS,
        gradient_seconds=GRADIENT_SECONDS,
    )


@dataclass(frozen=True)
class Kernels:
    """Times of kernels on one device in one precision."""

    device: Device
    software: Software
    precision: str = "bf16"

    @property
    def peak(self) -> float:
        """The printed rate of matmuls; where the device has no bf16, that of its other 16 bits."""
        return self.device.peak_flops.get(self.precision) or self.device.peak_flops["fp16"]

    @property
    def flops_per_second(self) -> float:
        """What the best matmul reaches."""
        return self.peak * self.device.calibration

    @property
    def bytes_per_second(self) -> float:
        """What a streaming kernel reaches."""
        assert self.device.memory_bandwidth_bytes_per_second is not None
        return self.device.memory_bandwidth_bytes_per_second * MEMORY_SHARE

    def product(self, rows: int, inner: int, columns: int, share: float = 1.0) -> float:
        """A matmul [rows, inner] · [inner, columns] in 16 bits, at a share of full speed."""
        return self._product(rows, inner, columns, self.flops_per_second * share, 2)

    def linear(self, rows: int, inputs: int, outputs: int, given_share: float = 1.0) -> tuple[float, float]:
        """(forward, backward) of a linear, in the software's precision; `given_share` of its input is cast here."""
        if not self.software.fp8:
            share = self._aligned_share(inputs, outputs)
            backward = self.product(rows, outputs, inputs, share) + self.product(inputs, rows, outputs, share)
            return self.product(rows, inputs, outputs, share), backward
        rate = self.device.peak_flops["fp8"] * self.device.calibration * FP8_PRODUCT[self.software.fp8]
        given, result = rows * inputs, rows * outputs
        weight = 0 if self.software.keeps_fp8_weights else inputs * outputs  # that is cast and turned here
        cast = CAST_BYTES[self.software.fused] / self.bytes_per_second
        backward = self._product(rows, outputs, inputs, rate, 1) + self._product(inputs, rows, outputs, rate, 1)
        if self.software.fp8 == "row":
            backward += cast * (2 * result + given + weight)
        else:
            backward += cast * result + TURN_BYTES * (given + weight) / self.bytes_per_second
        return self._product(rows, inputs, outputs, rate, 1) + cast * (given_share * given + weight), backward

    def _aligned_share(self, inputs: int, outputs: int) -> float:
        """What is left of full speed where rows of so many elements are no multiples of 16 bytes."""
        if self.item_bytes != 2 or inputs % ALIGNED_ELEMENTS == outputs % ALIGNED_ELEMENTS == 0:
            return 1.0
        return UNALIGNED[self.device.is_newer, inputs % 2 == outputs % 2 == 0]

    def _product(self, rows: int, inner: int, columns: int, rate: float, size: int) -> float:
        if min(rows, inner, columns) < 1:
            return 0.0
        flops, num_bytes = 2 * rows * inner * columns, size * (rows * inner + inner * columns) + 2 * rows * columns
        burst = self.device.burst if self.software.many_tiles else None
        share = tile_share(rows, inner, columns, self.device.num_processors, burst is not None)
        # Idle processors, and those that fill or write a tile, leave power to the others.
        reached = min(1.0, share * (burst or self.device.calibration) / self.device.calibration)
        return max(flops / (rate * reached), num_bytes / self.bytes_per_second) + LAUNCH_SECONDS

    @property
    def item_bytes(self) -> int:
        """Of one number in memory."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    def convolution(self, one: Filter, scale: float) -> tuple[float, float]:
        """(forward, backward) of a convolution of `scale` images, as implicit matmuls that read each pixel once.

        The weight's gradient adds up over so many pixels that libraries cut the inner dimension, and all processors
        have work. One channel a group is no matmul: it runs on what computes fp32.
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
        """(forward, backward) of attention with `flops` forward, counted whole, and so many scores; `is_grouped`: where
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
        # Two products forward and four backward; each reads or writes all scores. In one of the two, and one of the
        # four, the inner dimension is a head's; in the others the columns of the result are.
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
        padded = math.ceil(head_dim / FLASH3_HEAD_DIM) * FLASH3_HEAD_DIM
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
        """The loss and its gradient."""
        return num_logits * self.software.loss_bytes / self.bytes_per_second

    def streamed(self, num_bytes: float, num_kernels: int) -> float:
        """Kernels of torch.compile that move so many bytes together."""
        return num_bytes / self.bytes_per_second + num_kernels * (STREAM_SECONDS + LAUNCH_SECONDS)

    def moved(self, moved: MemoryTraffic) -> float:
        """Kernels that only move bytes, as the software runs them."""
        fused = self.software.fused
        num_bytes, num_kernels = moved[2:] if fused else moved[:2]
        return num_bytes / self.bytes_per_second + num_kernels * LAUNCH_SECONDS

    def moved_backward(self, moved: MemoryTraffic) -> float:
        """Their backward."""
        return BACKWARD_PASSES[self.software.fused] * self.moved(moved)


@lru_cache(maxsize=1 << 16)
def tile_share(rows: int, inner: int, columns: int, num_processors: int | None, is_newer: bool = False) -> float:
    """The share of full speed that the best tile leaves a matmul, with the tiles of newer libraries and devices."""
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
