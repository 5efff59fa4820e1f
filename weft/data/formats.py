"""Readers of image files, one for each format.

`examine` checks that a file is complete, without decoding it, and returns the image's shape. `read` returns the pixels
[rows, columns, channels] of a region. Both raise BadImageError, which says what is wrong with the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.config import ImageShape
from weft.errors import DataError
from weft.schema import nearest

# The limit for pixels that are decoded at once: the whole image of a .png, one tile or strip of a .tif.
MAX_DECODED_PIXELS = 1 << 28
DTYPES = ("uint8", "uint16", "float32", "float64")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by colour type; 3 is a palette of colours

Interval = tuple[int, int]
Pixels = NDArray[Any]


class BadImageError(Exception):
    """An image file that cannot be used. The message says what is wrong with it."""


class Reader(Protocol):
    """Reads image files of one format."""

    def examine(self, path: Path, level: int) -> ImageShape:
        """Check that the file is complete, and return the shape of the image at a level of its pyramid."""

    def read(self, path: Path, level: int, rows: Interval, columns: Interval) -> Pixels:
        """Returns the pixels of a region, [rows, columns, channels]."""


def reader_of(path: Path) -> Reader:
    """Returns the reader for a file, by the suffix of its name."""
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise DataError(f"{path} is no image that weft reads{nearest(suffix, READERS)}")
    return READERS[suffix]


@contextmanager
def _bad_image() -> Iterator[None]:
    """Convert any error of a decoder to BadImageError: decoders raise many kinds of errors for invalid bytes."""
    try:
        yield
    except (BadImageError, DataError, MemoryError):
        raise
    except Exception as error:
        raise BadImageError(f"{type(error).__name__}: {error}") from None


def _shape(shape: tuple[int, ...], dtype: np.dtype[Any], level: int = 0, levels: int = 1) -> ImageShape:
    if not 0 <= level < levels:
        raise BadImageError(f"it has {levels} level{'s' * (levels > 1)}, and data.level is {level}")
    if len(shape) not in (2, 3) or 0 in shape:
        raise BadImageError(f"it holds {list(shape)} and not [height, width] or [height, width, channels]")
    if dtype.name not in DTYPES:
        raise BadImageError(f"its pixels are {dtype.name}, not one of {', '.join(DTYPES)}")
    return ImageShape(shape[0], shape[1], shape[2] if len(shape) == 3 else 1)


def _with_channels(pixels: Pixels) -> Pixels:
    return pixels if pixels.ndim == 3 else pixels[..., None]


class NumpyReader:
    """Reads .npy files, memory-mapped: only the bytes of a region are read."""

    def examine(self, path: Path, level: int) -> ImageShape:
        array = self._map(path)
        return _shape(array.shape, array.dtype, level)

    def read(self, path: Path, level: int, rows: Interval, columns: Interval) -> Pixels:
        with _bad_image():
            return _with_channels(np.array(self._map(path)[slice(*rows), slice(*columns)]))

    def _map(self, path: Path) -> Pixels:
        with _bad_image():
            array: Pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):  # an archive of arrays (.npz) under this name
            raise BadImageError("it holds no single array")
        return array


class PngReader:
    """Reads .png files with Pillow. A complete file ends with a chunk of type IEND."""

    def examine(self, path: Path, level: int) -> ImageShape:
        with _bad_image(), path.open("rb") as file:
            if file.read(8) != PNG_SIGNATURE:
                raise BadImageError("it does not begin as a PNG file does")
            size_bytes = path.stat().st_size
            header = b""
            while True:
                start = file.read(8)
                if len(start) < 8:
                    raise BadImageError("its end is missing")
                length, kind = struct.unpack(">I4s", start)
                if file.tell() + length + 4 > size_bytes:
                    raise BadImageError("its end is missing")
                if kind == b"IHDR":
                    header = file.read(length)
                    file.seek(4, 1)
                else:
                    file.seek(length + 4, 1)
                if kind == b"IEND":
                    break
        with _bad_image():
            width, height, bits, color = struct.unpack(">IIBB", header[:10])
            if height * width > MAX_DECODED_PIXELS:
                raise BadImageError(
                    f"a PNG file is decoded whole, and its {height} × {width} pixels are more than "
                    f"{MAX_DECODED_PIXELS}; use a tiled TIFF or a .npy file"
                )
            dtype = np.dtype("uint16" if bits == 16 else "uint8")
            channels = PNG_CHANNELS[color]
            return _shape((height, width) if channels == 1 else (height, width, channels), dtype, level)

    def read(self, path: Path, level: int, rows: Interval, columns: Interval) -> Pixels:
        shape = self.examine(path, level)
        try:
            from PIL import Image
        except ImportError:
            raise DataError(f"{path} needs pillow to be read; pip install 'weft[images]'") from None
        if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit is lower; `examine` has refused what is above ours
            Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, MAX_DECODED_PIXELS)
        with _bad_image(), Image.open(path, formats=["PNG"]) as image:
            whole = image.convert("RGB") if image.mode == "P" else image
            pixels = np.asarray(whole)[slice(*rows), slice(*columns)]
            if pixels.dtype == np.int32:  # Pillow's type for 16 bits
                pixels = pixels.astype(np.uint16)
            if pixels.dtype == np.bool_:
                pixels = pixels.astype(np.uint8) * 255
            result = _with_channels(pixels)
            assert result.shape[2] == shape.channels, (path, result.shape)
            return np.array(result)


class TiffReader:
    """Reads .tif files with tifffile. Only the tiles (or strips) of a region are read, from the image or from one level
    of a pyramid.
    """

    def examine(self, path: Path, level: int) -> ImageShape:
        with self._page(path, level) as (page, shape):
            size_bytes = path.stat().st_size
            for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
                if offset + count > size_bytes:
                    raise BadImageError(
                        f"{size_bytes} bytes are there, and pixels lie at {offset} to {offset + count}; its end is "
                        f"missing"
                    )
            return shape

    def read(self, path: Path, level: int, rows: Interval, columns: Interval) -> Pixels:
        with self._page(path, level) as (page, shape):
            height, width = _segment(page)
            across = -(-shape.width // width)
            found = np.zeros((rows[1] - rows[0], columns[1] - columns[0], shape.channels), dtype=page.dtype)
            for row in range(rows[0] // height, -(-rows[1] // height)):
                for column in range(columns[0] // width, -(-columns[1] // width)):
                    pixels = _decode(page, row * across + column)
                    if pixels is not None:  # a tile that is not stored is empty
                        _copy(pixels, (row * height, column * width), found, (rows[0], columns[0]))
            return found

    @contextmanager
    def _page(self, path: Path, level: int) -> Iterator[tuple[Any, ImageShape]]:
        try:
            import tifffile
        except ImportError:
            raise DataError(f"{path} needs tifffile to be read; pip install 'weft[images]'") from None
        with _bad_image(), tifffile.TiffFile(path) as file:
            levels = file.series[0].levels
            shape = _shape(levels[min(level, len(levels) - 1)].shape, levels[0].dtype, level, len(levels))
            page = levels[level].keyframe
            if page.shape != levels[level].shape or page.axes not in ("YX", "YXS"):
                raise BadImageError(f"it has axes {levels[level].axes}; only one picture with interleaved channels")
            height, width = _segment(page)
            if height * width > MAX_DECODED_PIXELS:
                raise BadImageError(f"its tiles of {height} × {width} pixels are more than {MAX_DECODED_PIXELS}")
            yield page, shape


def _segment(page: Any) -> tuple[int, int]:
    """Returns the height and width of a tile or a strip of rows, which is decoded at once."""
    if page.is_tiled:
        return int(page.tilelength), int(page.tilewidth)
    return min(int(page.rowsperstrip), int(page.imagelength)), int(page.imagewidth)


def _decode(page: Any, index: int) -> Pixels | None:
    """Decode one tile or strip, [rows, columns, channels]; None if it is not stored."""
    handle = page.parent.filehandle
    handle.seek(page.dataoffsets[index])
    data = handle.read(page.databytecounts[index])
    try:
        pixels, _, _ = page.decode(data, index, jpegtables=page.jpegtables, jpegheader=page.jpegheader)
    except (ImportError, ValueError) as error:
        if "imagecodecs" not in str(error):
            raise
        raise DataError(f"{page.parent.filename} cannot be decompressed: {error}; pip install imagecodecs") from None
    return None if pixels is None else pixels[0]


def _copy(source: Pixels, source_at: tuple[int, int], target: Pixels, target_at: tuple[int, int]) -> None:
    """Copy the overlap of two arrays [rows, columns, channels]. `source_at` and `target_at` are the positions of their
    first pixels in the image.
    """
    spans = []
    for dim in range(2):
        begin = max(source_at[dim], target_at[dim])
        end = min(source_at[dim] + source.shape[dim], target_at[dim] + target.shape[dim])
        spans.append((begin, end))
    (top, bottom), (left, right) = spans
    target[top - target_at[0] : bottom - target_at[0], left - target_at[1] : right - target_at[1]] = source[
        top - source_at[0] : bottom - source_at[0], left - source_at[1] : right - source_at[1]
    ]


READERS: dict[str, Reader] = {
    ".npy": NumpyReader(),
    ".png": PngReader(),
    ".tif": TiffReader(),
    ".tiff": TiffReader(),
}
