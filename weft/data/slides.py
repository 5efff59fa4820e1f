"""Synthetic whole-slide images of any size, generated from a seed, whose labels depend on the whole image.

They are a realistic task without a download. A slide has islands of stained tissue and two lesions in opposite
quadrants. A lesion is of one of two kinds, which its colour and its cells show. The label says whether both are of the
same kind (0, a tumour that has spread) or not (1, two tumours). So a tile with one lesion says nothing about the label:
if the other lesion changes, the label changes and the tile's pixels do not. A linear function of the mean of local
features does not give the label either.

Every pixel is a function of (slide, row, column), so any region can be rendered by itself, and a slide of any size is
written in strips. Tissue and lesions scale with the slide; cells and grain have a fixed size in pixels, as under a
microscope.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data.cache import build_folder, flush_to_disk, lock
from weft.data.config import LARGEST_SLIDE, SMALLEST_SLIDE
from weft.data.images import LABELS
from weft.data.order import GOLDEN, Words, mix
from weft.errors import DataError

FORMAT_VERSION = 1
CELL_PIXELS = 6
STRIP_PIXELS = 1 << 20

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Interval = tuple[int, int]
Progress = Callable[[int, int], None]

GLASS, TISSUE, NUCLEUS = (243, 241, 244), (226, 168, 198), (128, 84, 160)
# The colours of each kind of lesion: its background and its cells.
LESIONS = (((172, 132, 206), (62, 40, 132)), ((214, 176, 128), (122, 70, 34)))


class Spot(NamedTuple):
    """An ellipse; all numbers are fractions of the slide's size."""

    row: float
    column: float
    height: float
    width: float


@dataclass(frozen=True)
class Slide:
    """The contents of a slide. `kinds` are those of its two lesions."""

    size: int
    islands: tuple[Spot, ...]
    lesions: tuple[Spot, Spot]
    kinds: tuple[int, int]
    seed: int

    @property
    def label(self) -> int:
        """1 if the lesions are of different kinds, else 0."""
        return int(self.kinds[0] != self.kinds[1])


def make_slide(seed: int, index: int, size: int) -> Slide:
    """Slide number `index` of a seed. Every second slide has label 1. The kind of each lesion by itself is equally
    likely to be 0 or 1.
    """
    if not SMALLEST_SLIDE <= size <= LARGEST_SLIDE:
        raise DataError(
            f"a slide of {size} × {size} pixels cannot be made; use a size from {SMALLEST_SLIDE} to {LARGEST_SLIDE}"
        )
    digest = hashlib.blake2b(f"slide:{seed}:{index}".encode(), digest_size=8).digest()
    slide_seed = int.from_bytes(digest, "little")
    rng = np.random.Generator(np.random.PCG64(slide_seed))

    def spot(row: float, column: float, sizes: tuple[float, float]) -> Spot:
        height, width = rng.uniform(*sizes, 2)
        return Spot(row + rng.uniform(-0.05, 0.05), column + rng.uniform(-0.05, 0.05), height, width)

    quadrants = [(row, column) for row in (0.25, 0.75) for column in (0.25, 0.75)]
    islands = [spot(row, column, (0.16, 0.24)) for row, column in quadrants]
    islands += [Spot(*rng.uniform(0.1, 0.9, 2), *rng.uniform(0.03, 0.08, 2)) for _ in range(rng.integers(2, 6))]
    first, second = ((0, 3), (1, 2))[int(rng.integers(2))]
    lesions = (spot(*quadrants[first], (0.07, 0.12)), spot(*quadrants[second], (0.07, 0.12)))
    kind = int(rng.integers(2))
    return Slide(size, tuple(islands), lesions, (kind, kind ^ (index % 2)), slide_seed)


def render(slide: Slide, rows: Interval, columns: Interval) -> Pixels:
    """Render a region, [rows, columns, 3]. The pixels equal those of the whole slide."""
    assert 0 <= rows[0] < rows[1] <= slide.size, rows
    assert 0 <= columns[0] < columns[1] <= slide.size, columns
    ragged = 0.6 * (_noise(slide, "edge", max(4, slide.size // 16), rows, columns) - 0.5)
    shade = _noise(slide, "shade", max(4, slide.size // 24), rows, columns)
    grain = _uniform(slide, "grain", np.arange(*rows), np.arange(*columns)).astype(np.float32)
    inside = _inside_cells(slide, rows, columns)
    image = np.empty((*grain.shape, 3), dtype=np.float32)
    image[:] = GLASS
    tissue = np.any([_in_spot(slide, spot, rows, columns) + ragged > 0 for spot in slide.islands], axis=0)
    image[tissue] = TISSUE
    image[tissue & (inside < 0.3)] = NUCLEUS
    for spot, kind in zip(slide.lesions, slide.kinds, strict=True):
        lesion = _in_spot(slide, spot, rows, columns) + ragged > 0
        ground, cells = LESIONS[kind]
        image[lesion] = ground
        image[lesion & (inside < (0.85 if kind == 0 else 0.6))] = cells
    image += 24 * (shade[..., None] - 0.5) + 16 * (grain[..., None] - 0.5)
    return np.clip(image, 0, 255).astype(np.uint8)


def slide_folder(cache: Path, num_images: int, size: int, seed: int, progress: Progress | None = None) -> Path:
    """Returns a folder of slides and their labels, slide-00000.npy ... and labels.csv, which is built in the cache if
    it is not there.
    """
    if num_images < 1:
        raise DataError(f"{num_images} slides are none; use at least 1")
    make_slide(seed, 0, size)  # raises for an invalid size
    folder = cache / f"slides-{num_images}x{size}-seed{seed}-v{FORMAT_VERSION}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with lock(cache / f"{folder.name}.lock", "the slides"):
        if not folder.exists():
            build_folder(folder, lambda building: _write(building, num_images, size, seed, progress))
    return folder


def write_slide(path: Path, slide: Slide) -> None:
    """Write a slide as a .npy file [size, size, 3] of uint8, rendered in strips."""
    shape = (slide.size, slide.size, 3)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    _allocate_file(path)
    step = max(1, STRIP_PIXELS // slide.size)
    for row in range(0, slide.size, step):
        end = min(row + step, slide.size)
        array[row:end] = render(slide, (row, end), (0, slide.size))
    array.flush()


def _allocate_file(path: Path) -> None:
    """Allocate disk space for a mapped file, or raise DataError: on a full disk, a write to the mapping would kill the
    process (SIGBUS).
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise DataError(
                f"{path.parent} has no room for a slide of {path.stat().st_size:,} bytes: {error.strerror}; "
                f"free some, or choose another folder (data.cache = ...)"
            ) from error


def _write(building: Path, num_images: int, size: int, seed: int, progress: Progress | None) -> None:
    lines = ["image,label"]
    for index in range(num_images):
        slide = make_slide(seed, index, size)
        name = f"slide-{index:05}.npy"
        write_slide(building / name, slide)
        lines.append(f"{name},{slide.label}")
        if progress is not None:
            progress(index + 1, num_images)
    with (building / LABELS).open("w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
        flush_to_disk(file)


# --- pixels


def _in_spot(slide: Slide, spot: Spot, rows: Interval, columns: Interval) -> Floats:
    """1 at the centre of a spot, 0 on its edge, negative outside. [rows, columns]"""
    down = (np.arange(*rows, dtype=np.float32) / slide.size - spot.row) / spot.height
    across = (np.arange(*columns, dtype=np.float32) / slide.size - spot.column) / spot.width
    distance: Floats = (1 - down[:, None] ** 2 - across[None] ** 2).astype(np.float32)
    return distance


def _inside_cells(slide: Slide, rows: Interval, columns: Interval) -> Floats:
    """Returns the distance of each pixel from the centre of its cell, in cells. Centres are a grid with random offsets.
    [rows, columns]
    """
    down, across = np.arange(*rows), np.arange(*columns)
    offsets = [_uniform(slide, name, down // CELL_PIXELS, across // CELL_PIXELS) for name in ("down", "across")]
    y = (down % CELL_PIXELS)[:, None] / CELL_PIXELS - (0.3 + 0.4 * offsets[0])
    x = (across % CELL_PIXELS)[None] / CELL_PIXELS - (0.3 + 0.4 * offsets[1])
    return (2 * np.hypot(y, x)).astype(np.float32)


def _noise(slide: Slide, name: str, spacing: int, rows: Interval, columns: Interval) -> Floats:
    """Smooth noise in [0, 1): random values on a grid of `spacing` pixels, linearly interpolated. [rows, columns]"""
    pixels = [np.arange(*ends) for ends in (rows, columns)]
    down, across = (one // spacing for one in pixels)  # the grid point before each pixel
    row_part, column_part = (one % spacing / spacing for one in pixels)  # the pixel's distance from it
    grid = _uniform(slide, name, np.arange(down[0], down[-1] + 2), np.arange(across[0], across[-1] + 2))
    down, across = down - down[0], across - across[0]
    above = grid[down] * (1 - row_part[:, None]) + grid[down + 1] * row_part[:, None]  # [rows, grid columns]
    result: Floats = (above[:, across] * (1 - column_part) + above[:, across + 1] * column_part).astype(np.float32)
    return result


def _uniform(slide: Slide, name: str, down: NDArray[np.int64], across: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns random numbers in [0, 1) of down × across; each depends only on its position, the slide and `name`."""
    key = int.from_bytes(hashlib.blake2b(f"{slide.seed}:{name}".encode(), digest_size=8).digest(), "little")
    row_keys: Words = mix(down.astype(np.uint64) + np.uint64(key))
    words = mix(row_keys[:, None] + across.astype(np.uint64) * np.uint64(GOLDEN))
    return (words >> np.uint64(11)).astype(np.float64) * math.ldexp(1.0, -53)
