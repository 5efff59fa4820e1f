"""A folder of labelled images of one size, from which each rank reads only its region.

`labels.csv` names the images and gives each a class:

    image,label
    a.tif,0
    b.tif,1

An image is a .npy array [height, width] or [height, width, channels] (memory-mapped), a .tif or .tiff (only the tiles
that overlap the region are read, of one level if it is a pyramid), or a .png, which can only be decoded whole. Before a
run starts, all images are checked: their size, their type, and that the file is complete. A bad image is reported, and
left out or an error, as the run file says. An image that turns out to be broken later, when its pixels are decoded,
does not count in the loss of its batch, or is an error. No reader unpickles, and none decodes more than
`MAX_DECODED_PIXELS` at once.
"""

from __future__ import annotations

import csv
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.checkpoint.file_hashes import file_hashes
from weft.data.config import ImageShape, OnBad
from weft.data.formats import BadImageError, Interval, reader_of
from weft.data.tokens import is_held_out
from weft.errors import DataError
from weft.models.loss import IGNORE

LABELS = "labels.csv"
MAX_LABEL_BYTES = 256 * 1024 * 1024
MAX_CLASSES = 1 << 20
SAMPLED_BYTES = 4096  # bytes of each file that enter the fingerprint
MAX_HASHED_BYTES = 16 << 30  # of all files together; larger data would take minutes to hash
HASHES_FILE = "images.json"  # beside a run's checkpoints: hashes of the images that it trains and evaluates on

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class LabelledImage:
    """One line of the labels file. `number` is the index of the line."""

    path: Path
    label: int
    number: int


class Images:
    """Images of one shape with their classes. `get` reads some of them, whole or one region of each."""

    def __init__(self, entries: Sequence[LabelledImage], shape: ImageShape, level: int, on_bad: OnBad) -> None:
        self._entries, self.shape, self._level, self._on_bad = entries, shape, level, on_bad
        self.broken: set[str] = set()  # the names of files that could not be decoded

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, indices: NDArray[np.integer[Any]], rows: Interval | None = None, columns: Interval | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns pixels [num_indices, channels, rows, columns], from -1 to 1, and classes [num_indices].

        The class of an image that cannot be decoded is IGNORE if bad images are skipped. If only a region is read, it
        is always an error, because a rank that reads another region may not notice.
        """
        is_whole = rows is None and columns is None
        rows, columns = rows or (0, self.shape.height), columns or (0, self.shape.width)
        pixels = torch.zeros(len(indices), self.shape.channels, rows[1] - rows[0], columns[1] - columns[0])
        labels = torch.empty(len(indices), dtype=torch.int64)
        for place, index in enumerate(indices):
            entry = self._entries[int(index)]
            try:
                region = reader_of(entry.path).read(entry.path, self._level, rows, columns)
                if not np.isfinite(region).all():
                    raise BadImageError("it has pixels that are NaN or infinite")
                pixels[place] = torch.from_numpy(_scaled(region)).movedim(-1, 0)
                labels[place] = entry.label
            except BadImageError as error:
                if self._on_bad == "stop" or not is_whole:
                    raise DataError(f"{entry.path} cannot be read: {error}; remove it from {LABELS}") from None
                labels[place] = IGNORE
                if entry.path.name not in self.broken:
                    self.broken.add(entry.path.name)
                    logger.warning("%s cannot be read and is skipped: %s", entry.path, error)
        return pixels, labels


@dataclass(frozen=True)
class ImageRegion:
    """One region of each image, for a rank that needs no more."""

    images: Images
    rows: Interval
    columns: Interval

    def __len__(self) -> int:
        return len(self.images)

    def get(self, indices: NDArray[np.integer[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns pixels [num_indices, channels, rows, columns] and classes, like `Images.get`."""
        return self.images.get(indices, self.rows, self.columns)


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder, split into training and held-out images. `bad` says why images are left out."""

    train: Images
    held_out: Images | None
    fingerprint: str
    bad: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()  # in the order of the labels file


def open_folder(
    folder: Path,
    shape: ImageShape,
    num_classes: int,
    *,
    held_out: float = 0.0,
    level: int = 0,
    on_bad: OnBad = "stop",
) -> ImageFolder:
    """Open and check the images of a folder, all of `shape`. A hash of their number in the labels file splits them."""
    entries = read_labels(folder, num_classes)
    bad: dict[str, str] = {}
    good = []
    for entry in entries:
        try:
            found = reader_of(entry.path).examine(entry.path, level)
            if found != shape:
                raise BadImageError(f"it is {found} where the run and its model expect {shape}")
            good.append(entry)
        except BadImageError as error:
            if on_bad == "stop":
                raise DataError(
                    f"{entry.path} cannot be used: {error}; repair it, remove it from {LABELS}, or set "
                    f"data.on_bad = 'skip'"
                ) from None
            bad[entry.path.name] = str(error)
    if not good:
        name, reason = next(iter(bad.items()))
        raise DataError(f"none of the {len(entries)} images of {folder} can be used; {name}: {reason}")
    held = [entry for entry in good if is_held_out(entry.number, held_out)]
    kept = [entry for entry in good if not is_held_out(entry.number, held_out)]
    if not kept or (held_out > 0 and not held):
        raise DataError(
            f"data.held_out = {held_out} of {len(good)} images leaves {len(kept)} to train on and {len(held)} held "
            f"out; give more images or change it"
        )
    fingerprint = _fingerprint(good, shape, level, held_out)
    return ImageFolder(
        Images(kept, shape, level, on_bad),
        Images(held, shape, level, on_bad) if held_out > 0 else None,
        fingerprint,
        bad,
        tuple(entry.path for entry in good),
    )


def can_hash(files: Sequence[Path]) -> bool:
    """Returns whether all bytes of the images are hashed, for runs that resume."""
    return sum(path.stat().st_size for path in files) <= MAX_HASHED_BYTES


def contents_hash(files: Sequence[Path], folder: Path) -> str:
    """Returns a hash of all bytes of the images of the run in `folder`, which keeps what was hashed; "" without images,
    or if they have too many bytes.
    """
    if not files or not can_hash(files):
        return ""
    hashes = file_hashes(files, folder / "checkpoints" / HASHES_FILE)
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def count_classes(folder: Path) -> int | None:
    """Returns the number of classes that a folder's labels file names; None if there is no such file."""
    if not (folder / LABELS).is_file():
        return None
    return 1 + max(entry.label for entry in read_labels(folder, MAX_CLASSES))


def read_labels(folder: Path, num_classes: int) -> list[LabelledImage]:
    """Read a folder's labels file. Raises DataError for unknown columns, and for names outside the folder or
    repeated.
    """
    path = folder / LABELS
    try:
        if path.stat().st_size > MAX_LABEL_BYTES:
            raise DataError(f"{path} is larger than {MAX_LABEL_BYTES} bytes; this is no list of images")
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}; give a file with the columns image,label") from None
    if not lines or lines[0] != ["image", "label"]:
        raise DataError(f"{path} must begin with the line 'image,label'; found {','.join(lines[0] if lines else [])!r}")
    entries: list[LabelledImage] = []
    seen: set[str] = set()
    for number, line in enumerate(lines[1:]):
        where = f"{path}, line {number + 2}"
        if len(line) != 2 or not line[1].isdecimal() or int(line[1]) >= num_classes:
            raise DataError(f"{where}: {','.join(line)!r} is not an image and a class from 0 to {num_classes - 1}")
        name = Path(line[0])
        if not line[0] or name.is_absolute() or ".." in name.parts:
            raise DataError(f"{where}: {line[0]!r} is not a path inside {folder}")
        if line[0] in seen:
            raise DataError(f"{where}: {line[0]!r} is named twice")
        seen.add(line[0])
        entries.append(LabelledImage(folder / name, int(line[1]), number))
    if not entries:
        raise DataError(f"{path} names no image")
    return entries


def _scaled(region: NDArray[Any]) -> NDArray[np.float32]:
    """Scale integer pixels to -1 ... 1; floating-point pixels stay unchanged. [rows, columns, channels]"""
    values = region.astype(np.float32)
    if region.dtype.kind == "u":
        values *= 2.0 / float(np.iinfo(region.dtype).max)
        values -= 1.0
    return values


def _fingerprint(entries: Sequence[LabelledImage], shape: ImageShape, level: int, held_out: float) -> str:
    """Returns a hash of names, classes, sizes, some bytes of each file, and whether it is held out. Hashing all bytes
    could take hours (`contents_hash`).
    """
    digest = hashlib.sha256(repr((tuple(shape), level)).encode())
    for entry in entries:
        with entry.path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(max(0, (size_bytes - SAMPLED_BYTES) // 2))
            stated = (entry.path.name, entry.label, size_bytes, is_held_out(entry.number, held_out))
            digest.update(repr(stated).encode() + file.read(SAMPLED_BYTES))
    return digest.hexdigest()
