"""How long a device takes for a matmul, for attention, and for bytes that only pass through memory.

A matmul is a roofline with three losses. *Tiles*: its result is computed in tiles, all of which take the time of a full
one, in waves of as many tiles as the device has processors. *Depth*: each tile fills a pipeline before it runs at full
speed, so a short inner dimension costs. *Tile size*: small tiles read more for each product. The library chooses the
best tile, and so does `Kernels.product`. On top comes one number for each type of device, `calibration`, which says
what the best matmul reaches of the printed peak under the power and clocks of a training run; it is fitted on a named
table (see `clusters/*.toml`) and used everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from weft.cluster import Device
from weft.moved import Moved

# (rows, columns) of tiles that matmul libraries have; the first two are the largest.
TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
FILL_DEPTH = 96  # of the inner dimension, until a tile runs at full speed
SMALL_TILE_LOSS = 0.1
# What attention kernels reach of the device's peak, (forward, backward), where the device's matmul instructions are
# those the kernel was written for, and on a newer device. FlashAttention-2 (arXiv 2307.08691) and -3 (2407.08608)
# report these for A100 and H100 at a few thousand tokens.
FLASH = {"flash1": ((0.42, 0.35), (0.22, 0.18)), "flash2": ((0.62, 0.50), (0.36, 0.31)), "flash3": ((0.6, 0.5),) * 2}
BATCHED_PRODUCT = 0.55  # of the best matmul, for the small ones of plain attention
FLASH_BACKWARD_WORK = 2.5  # products of backward for each two of forward, over two
MEMORY_SHARE = 0.85  # of the printed bandwidth that streaming kernels reach
LAUNCH_SECONDS = 4e-6  # between two kernels on the device
SCORE_PASSES = {"forward": 4.5, "backward": 5.5}  # times that plain attention moves its scores


@dataclass(frozen=True)
class Software:
    """How steps are run, beside the plan: facts about a framework. The defaults are weft's own.

    `attention`: a key of FLASH, or "plain" with scores in memory. `fused`: operations between matmuls are one kernel
    (torch.compile, or fused by hand). `host_seconds`: what the host takes to issue one operation; where kernels are
    shorter, the host sets the pace. `selective`: what selective recompute does again, "cheap" work or "attention".
    `gradient_bytes` of a parameter are reduced, behind the last backward where `hides_gradients`. `hides_input`: dI is
    summed behind dW. `splits_messages`: between stages each rank of x sends its part.
    """

    attention: str = "flash2"
    fused: bool = False
    host_seconds: float = 10e-6
    selective: str = "cheap"
    gradient_bytes: int = 4
    hides_gradients: bool = True
    hides_input: bool = True
    splits_messages: bool = False
    shards_optimizer: bool = False  # over data


@dataclass(frozen=True)
class Kernels:
    """Times of kernels on one device in one precision; `speedup` is that of its matmuls over bf16 (fp8: 2)."""

    device: Device
    software: Software
    precision: str = "bf16"

    @property
    def flops_per_second(self) -> float:
        """What the best matmul reaches."""
        return self.device.peak_flops[self.precision] * self.device.calibration

    @property
    def bytes_per_second(self) -> float:
        """What a streaming kernel reaches."""
        assert self.device.memory_bandwidth_bytes_per_second is not None
        return self.device.memory_bandwidth_bytes_per_second * MEMORY_SHARE

    def product(self, rows: int, inner: int, columns: int) -> float:
        """A matmul [rows, inner] · [inner, columns] in 16 bits."""
        if min(rows, inner, columns) < 1:
            return 0.0
        flops, num_bytes = 2 * rows * inner * columns, 2 * (rows * inner + inner * columns + rows * columns)
        share = tile_share(rows, inner, columns, self.device.num_processors)
        return max(flops / (self.flops_per_second * share), num_bytes / self.bytes_per_second) + LAUNCH_SECONDS

    def attention(self, flops: float, score_bytes: float, is_causal: bool = True) -> tuple[float, float]:
        """(forward, backward) of attention with `flops` forward, counted whole, and scores of `score_bytes`."""
        if not flops:
            return 0.0, 0.0
        if self.software.attention != "plain":
            needed = flops / 2 if is_causal else flops
            shares = FLASH[self.software.attention][self.device.is_newer]
            peak = self.device.peak_flops["bf16"]
            return needed / (peak * shares[0]), FLASH_BACKWARD_WORK * needed / (peak * shares[1])
        products = flops / (self.flops_per_second * BATCHED_PRODUCT)
        forward, backward = (score_bytes * passes / self.bytes_per_second for passes in SCORE_PASSES.values())
        return products + forward, 2 * products + backward

    def moved(self, moved: Moved) -> float:
        """Kernels that only move bytes, as the software runs them."""
        fused = self.software.fused
        num_bytes, num_kernels = moved[2:] if fused else moved[:2]
        return num_bytes / self.bytes_per_second + num_kernels * LAUNCH_SECONDS


@lru_cache(maxsize=1 << 16)
def tile_share(rows: int, inner: int, columns: int, num_processors: int | None) -> float:
    """The share of full speed that the best tile leaves a matmul."""
    best = 0.0
    largest = TILES[0][0] * TILES[0][1] / sum(TILES[0])
    for tall, wide in TILES:
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        slots = math.ceil(tiles / num_processors) * num_processors if num_processors else tiles
        filled = rows * columns / (slots * tall * wide)
        size = tall * wide / (tall + wide) / largest
        by_size = min(1.0, size / (size + SMALL_TILE_LOSS) * (1 + SMALL_TILE_LOSS))
        depth = FILL_DEPTH if tall * wide >= TILES[0][0] * TILES[0][1] else FILL_DEPTH * 2 / 3
        best = max(best, filled * by_size * inner / (inner + depth))
    return best
