"""Images: made-up slides whose labels need the whole, files of which a region is read, and files that are bad."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from weft.data import formats, slides
from weft.data.formats import BadImageError, ImageShape, reader_of
from weft.data.images import ImageFolder, open_folder, read_labels
from weft.data.slides import make_slide, render, slide_folder, write_slide
from weft.errors import DataError
from weft.models import IGNORE

SIZE = 64
WHOLE = (0, SIZE)


# --- slides


def test_slides_follow_from_seed_and_number() -> None:
    assert make_slide(3, 5, SIZE) == make_slide(3, 5, SIZE)
    pixels = render(make_slide(3, 5, SIZE), WHOLE, WHOLE)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (SIZE, SIZE, 3)
    for other in (make_slide(3, 6, SIZE), make_slide(4, 5, SIZE)):
        assert not np.array_equal(render(other, WHOLE, WHOLE), pixels)


@settings(max_examples=30)
@given(
    size=st.integers(32, 150),
    ends=st.tuples(*[st.floats(0, 1)] * 4),
    index=st.integers(0, 99),
)
def test_every_region_agrees_with_the_whole(size: int, ends: tuple[float, ...], index: int) -> None:
    slide = make_slide(0, index, size)
    whole = render(slide, (0, size), (0, size))
    top, bottom = sorted(int(end * (size - 1)) for end in ends[:2])
    left, right = sorted(int(end * (size - 1)) for end in ends[2:])
    region = render(slide, (top, bottom + 1), (left, right + 1))
    assert np.array_equal(region, whole[top : bottom + 1, left : right + 1])


def test_a_quarter_of_a_slide_says_nothing_about_its_label() -> None:
    """Change either lesion: the label turns, and three quarters of the slide stay as they are, to the pixel.

    So whatever looks at one quarter answers both slides alike, and is right for one of them.
    """
    half = SIZE // 2
    quarters = [((a, a + half), (b, b + half)) for a in (0, half) for b in (0, half)]
    for index in range(20):
        slide = make_slide(1, index, SIZE)
        for lesion in range(2):
            kinds = list(slide.kinds)
            kinds[lesion] = 1 - kinds[lesion]
            other = replace(slide, kinds=tuple(kinds))
            assert other.label == 1 - slide.label
            equal = [np.array_equal(render(slide, *place), render(other, *place)) for place in quarters]
            assert sorted(equal) == [False, True, True, True]


def test_kinds_and_labels_are_balanced() -> None:
    made = [make_slide(0, index, SIZE) for index in range(400)]
    assert [slide.label for slide in made[:4]] == [0, 1, 0, 1]
    for lesion in range(2):
        for label in range(2):
            share = np.mean([slide.kinds[lesion] for slide in made if slide.label == label])
            assert 0.4 < share < 0.6  # neither lesion alone goes with the label


def test_a_slide_is_written_in_strips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slides, "STRIP_PIXELS", 7 * SIZE)
    slide = make_slide(0, 0, SIZE)
    drawn: list[Any] = []

    def watched(slide: slides.Slide, rows: Any, columns: Any) -> Any:
        drawn.append(rows)
        return render(slide, rows, columns)

    monkeypatch.setattr(slides, "render", watched)
    write_slide(tmp_path / "slide.npy", slide)
    assert len(drawn) == 10
    assert np.array_equal(np.load(tmp_path / "slide.npy"), render(slide, WHOLE, WHOLE))


def test_a_slide_without_room_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"no room for a slide of 3,200 bytes: No space left on device; .*data\.cache"):
        write_slide(tmp_path / "slide.npy", make_slide(0, 0, 32))


def test_a_folder_of_slides_is_made_once_and_is_a_folder_of_images(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    folder = slide_folder(tmp_path / "cache", 20, SIZE, 3, lambda done, total: told.append((done, total)))
    assert told[-1] == (20, 20)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert slide_folder(tmp_path / "cache", 20, SIZE, 3, lambda *_: told.append((0, 0))) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert told[-1] == (20, 20)
    found = open_folder(folder, ImageShape(SIZE, SIZE, 3), 2, held_out=0.3)
    assert found.held_out is not None
    assert len(found.train) + len(found.held_out) == 20
    assert len(found.held_out) > 0
    labels = torch.cat([part.get(np.arange(len(part)))[1] for part in (found.train, found.held_out)])
    assert labels.sum() == 10
    assert slide_folder(tmp_path / "cache", 20, SIZE, 4) != folder


def test_other_slides_have_another_fingerprint(tmp_path: Path) -> None:
    prints = {
        open_folder(slide_folder(tmp_path, 6, SIZE, seed), ImageShape(SIZE, SIZE, 3), 2).fingerprint
        for seed in (0, 1, 2)
    }
    assert len(prints) == 3


@pytest.mark.parametrize("size", [31, 1 << 18])
def test_a_slide_of_a_senseless_size_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"a slide of {size} × {size} pixels cannot be made; use a size from 32 to"):
        slide_folder(tmp_path, 4, size, 0)
    assert list(tmp_path.iterdir()) == []


# --- formats

HEIGHT, WIDTH = 90, 133


def picture(channels: int = 3, dtype: str = "uint8", seed: int = 0) -> NDArray[Any]:
    draw = np.random.default_rng(seed)
    values = draw.random((HEIGHT, WIDTH, channels))
    scaled = values * 255 if dtype == "uint8" else values * 65535 if dtype == "uint16" else values
    return scaled.astype(dtype)


def save_png(path: Path, pixels: NDArray[Any]) -> None:
    Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0]).save(path)


def save_tiff(**options: Any) -> Callable[[Path, NDArray[Any]], None]:
    def save(path: Path, pixels: NDArray[Any]) -> None:
        squeezed = pixels if pixels.shape[2] > 1 else pixels[..., 0]
        kind = "rgb" if pixels.shape[2] > 1 else "minisblack"
        tifffile.imwrite(path, squeezed, photometric=kind, **options)

    return save


SAVERS: dict[str, tuple[str, Callable[[Path, NDArray[Any]], None]]] = {
    "npy": (".npy", lambda path, pixels: np.save(path, pixels)),
    "png": (".png", save_png),
    "tiff in tiles": (".tif", save_tiff(tile=(32, 48))),
    "tiff in tiles, compressed": (".TIFF", save_tiff(tile=(32, 48), compression="zlib")),
    "tiff in strips": (".tiff", save_tiff(rowsperstrip=7)),
    "tiff in one strip": (".tif", save_tiff()),
}


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize(("channels", "dtype"), [(3, "uint8"), (1, "uint8"), (1, "uint16")])
def test_regions_of_every_format(tmp_path: Path, name: str, channels: int, dtype: str) -> None:
    suffix, save = SAVERS[name]
    pixels, path = picture(channels, dtype), tmp_path / f"image{suffix}"
    save(path, pixels)
    reader = reader_of(path)
    assert reader.examine(path, 0) == (HEIGHT, WIDTH, channels)
    places = [
        ((0, HEIGHT), (0, WIDTH)),
        ((0, 1), (0, 1)),
        ((31, 33), (47, 49)),
        ((64, 90), (96, 133)),
        ((5, 70), (0, 9)),
    ]
    for rows, columns in places:
        found = reader.read(path, 0, rows, columns)
        assert found.dtype == np.dtype(dtype)
        assert np.array_equal(found, pixels[slice(*rows), slice(*columns)]), (rows, columns)


def test_a_palette_and_a_bitmap_are_read_as_colours_and_greys(tmp_path: Path) -> None:
    pixels = (picture() // 64 * 64)[:, :, :1].repeat(3, axis=2)
    Image.fromarray(pixels).quantize(8).save(tmp_path / "palette.png")
    reader = reader_of(tmp_path / "palette.png")
    assert reader.examine(tmp_path / "palette.png", 0) == (HEIGHT, WIDTH, 3)
    assert np.array_equal(reader.read(tmp_path / "palette.png", 0, (3, 50), (2, 9)), pixels[3:50, 2:9])
    Image.fromarray(pixels[..., 0] > 100).save(tmp_path / "bits.png")
    assert np.array_equal(
        reader.read(tmp_path / "bits.png", 0, (3, 50), (2, 9)), (pixels[3:50, 2:9, :1] > 100) * np.uint8(255)
    )


def test_the_limit_of_pixels_is_ours_and_not_that_of_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pixels = tmp_path / "large.png", picture()
    save_png(path, pixels)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH // 3)  # Pillow refuses more than twice as many
    assert np.array_equal(reader_of(path).read(path, 0, (0, HEIGHT), (0, WIDTH)), pixels)
    monkeypatch.setattr(formats, "MAX_DECODED_PIXELS", HEIGHT * WIDTH - 1)
    with pytest.raises(BadImageError, match=r"its 90 × 133 pixels are more than 11969; use a tiled TIFF"):
        reader_of(path).read(path, 0, (0, 1), (0, 1))


def test_only_the_tiles_of_a_region_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles.tif"
    save_tiff(tile=(16, 16))(path, picture())
    decoded: list[int] = []
    plain = formats._decode

    def watched(page: Any, index: int) -> Any:
        decoded.append(index)
        return plain(page, index)

    monkeypatch.setattr(formats, "_decode", watched)
    reader_of(path).read(path, 0, (16, 48), (32, 33))
    assert decoded == [9 + 2, 18 + 2]  # 9 tiles across; rows 1 and 2, column 2


def test_a_level_of_a_pyramid(tmp_path: Path) -> None:
    path, pixels = tmp_path / "pyramid.tif", picture()
    with tifffile.TiffWriter(path) as writer:
        options = {"tile": (32, 32), "photometric": "rgb"}
        writer.write(pixels, subifds=1, **options)
        writer.write(pixels[::2, ::2], subfiletype=1, **options)
    reader = reader_of(path)
    assert reader.examine(path, 0) == (90, 133, 3)
    assert reader.examine(path, 1) == (45, 67, 3)
    assert np.array_equal(reader.read(path, 1, (30, 45), (40, 67)), pixels[::2, ::2][30:45, 40:67])
    with pytest.raises(BadImageError, match=r"it has 2 levels, and data\.level is 2"):
        reader.examine(path, 2)
    np.save(tmp_path / "flat.npy", pixels)
    with pytest.raises(BadImageError, match=r"it has 1 level, and data\.level is 1"):
        reader_of(tmp_path / "flat.npy").examine(tmp_path / "flat.npy", 1)


# --- folders


def make_folder(folder: Path, num: int = 6, suffix: str = ".npy", save: Any = np.save) -> list[NDArray[Any]]:
    folder.mkdir(exist_ok=True)
    pictures = [picture(seed=index) for index in range(num)]
    for index, pixels in enumerate(pictures):
        save(folder / f"{index}{suffix}", pixels)
    lines = ["image,label", *(f"{index}{suffix},{index % 3}" for index in range(num))]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return pictures


def opened(folder: Path, **options: Any) -> ImageFolder:
    return open_folder(folder, ImageShape(HEIGHT, WIDTH, 3), 3, **options)


def test_a_batch_is_scaled_and_channels_come_first(tmp_path: Path) -> None:
    pictures = make_folder(tmp_path)
    pixels, labels = opened(tmp_path).train.get(np.array([4, 1]))
    assert labels.tolist() == [1, 1]
    assert pixels.shape == (2, 3, HEIGHT, WIDTH)
    assert pixels.dtype == torch.float32
    expected = torch.from_numpy(pictures[4]).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(pixels[0], expected, atol=1e-6)
    part, _ = opened(tmp_path).train.get(np.array([4, 1]), rows=(10, 30), columns=(7, 9))
    assert torch.equal(part, pixels[:, :, 10:30, 7:9])


def test_numbers_that_are_no_integers_stay_as_they_are(tmp_path: Path) -> None:
    make_folder(tmp_path, 1)
    floats = picture(dtype="float64") * 50
    np.save(tmp_path / "0.npy", floats)
    pixels, _ = opened(tmp_path).train.get(np.array([0]))
    assert torch.allclose(pixels[0], torch.from_numpy(floats).permute(2, 0, 1).float())


def test_the_split_is_by_number_and_no_image_is_on_both_sides(tmp_path: Path) -> None:
    pictures = make_folder(tmp_path, 30)
    found = opened(tmp_path, held_out=0.4)
    assert found.held_out is not None
    shown = [part.get(np.arange(len(part)))[0][:, 0, 0, 0] for part in (found.train, found.held_out)]
    firsts = sorted(float(value) for part in shown for value in part)
    assert firsts == pytest.approx(sorted(float(one[0, 0, 0]) / 127.5 - 1 for one in pictures), abs=1e-6)
    assert opened(tmp_path).held_out is None
    with pytest.raises(DataError, match=r"data\.held_out = 1e-06 of 30 images leaves 30 to train on and 0 held out"):
        opened(tmp_path, held_out=1e-6)


def test_the_fingerprint_knows_which_images_are_held_out(tmp_path: Path) -> None:
    make_folder(tmp_path, 30)
    fingerprints = {opened(tmp_path, held_out=part).fingerprint for part in (0.0, 0.2, 0.4)}
    assert len(fingerprints) == 3
    first = opened(tmp_path, held_out=0.4)
    lines = (tmp_path / "labels.csv").read_text().splitlines()
    (tmp_path / "labels.csv").write_text("\n".join([lines[0], "none.npy,0", *lines[1:]]) + "\n")
    second = opened(tmp_path, held_out=0.4, on_bad="skip")  # the same images, each with the number of the next
    assert len(second.train) + len(second.held_out or ()) == 30
    assert second.fingerprint != first.fingerprint


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def overwrite(path: Path) -> None:
    path.write_bytes(b"no image at all" * 20)


def remove(path: Path) -> None:
    path.unlink()


BAD = {
    ("npy", shorten): "mmap length is greater than filesize|ValueError",
    ("npy", overwrite): "ValueError",
    ("npy", remove): "FileNotFoundError",
    ("png", shorten): "its end is missing",
    ("png", overwrite): "it does not begin as a PNG file does",
    ("tiff in tiles", shorten): "its end is missing|Error",
    ("tiff in strips", overwrite): "TiffFileError",
}


@pytest.mark.parametrize(("name", "spoil"), BAD, ids=lambda value: getattr(value, "__name__", value))
def test_a_bad_image_is_named_and_fatal_or_left_out_and_counted(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    suffix, save = SAVERS[name]
    make_folder(tmp_path, 6, suffix, save)
    spoil(tmp_path / f"2{suffix}")
    with pytest.raises(DataError, match=rf"2\{suffix} cannot be used: .*set data\.on_bad = 'skip'"):
        opened(tmp_path)
    found = opened(tmp_path, on_bad="skip")
    assert len(found.train) == 5
    assert list(found.bad) == [f"2{suffix}"]
    assert found.train.get(np.arange(5))[1].tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(DataError, match=BAD[name, spoil]):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (picture()[:80], "it is 80 × 133 pixels of 3 channels where the run and its model expect 90 × 133 pixels of 3"),
        (picture()[..., 0], "133 pixels of 1 channels where"),
        (picture().astype(np.int64), "its pixels are int64, not one of uint8, uint16, float32, float64"),
        (picture()[None], r"it holds \[1, 90, 133, 3\] and not \[height, width\]"),
        (np.array([{}], dtype=object), "Python objects in dtype"),
    ],
)
def test_an_image_of_another_kind_is_bad(tmp_path: Path, pixels: NDArray[Any], message: str) -> None:
    make_folder(tmp_path)
    np.save(tmp_path / "3.npy", pixels, allow_pickle=True)
    with pytest.raises(DataError, match=rf"3\.npy cannot be used: .*{message}"):
        opened(tmp_path)


def test_all_images_bad(tmp_path: Path) -> None:
    make_folder(tmp_path, 2)
    for index in range(2):
        overwrite(tmp_path / f"{index}.npy")
    with pytest.raises(DataError, match=r"none of the 2 images of .* can be used; 0\.npy: ValueError"):
        opened(tmp_path, on_bad="skip")


def spoil_pixels(path: Path) -> None:
    """Damage that no size shows: the middle of a file's compressed pixels."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - value for value in content[middle : middle + 64])
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["png", "tiff in tiles, compressed"])
def test_pixels_that_cannot_be_decoded(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    suffix, save = SAVERS[name]
    make_folder(tmp_path, 3, suffix, save)
    spoil_pixels(tmp_path / f"1{suffix}")
    with pytest.raises(DataError, match=rf"1\{suffix} cannot be read: .*; remove it from labels\.csv"):
        opened(tmp_path).train.get(np.arange(3))
    images = opened(tmp_path, on_bad="skip").train
    with caplog.at_level(logging.WARNING, logger="weft"):
        for _ in range(2):
            pixels, labels = images.get(np.arange(3))
    assert labels.tolist() == [0, IGNORE, 2]
    assert float(pixels[1].abs().max()) == 0
    assert images.broken == {f"1{suffix}"}
    assert len(caplog.records) == 1
    with pytest.raises(DataError, match="cannot be read"):  # another rank may hold a region that can
        images.get(np.array([1]), rows=(0, HEIGHT), columns=(0, WIDTH))


def test_pixels_that_are_nan_and_archives_of_arrays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def save(path: Path, pixels: Any) -> None:
        np.save(path, np.asarray(pixels, dtype=np.float32))

    make_folder(tmp_path, 3, ".npy", save)
    spoiled = np.load(tmp_path / "1.npy")
    spoiled[3, 4] = np.nan
    np.save(tmp_path / "1.npy", spoiled)
    with pytest.raises(DataError, match=r"1\.npy cannot be read: it has pixels that are NaN or infinite; remove it"):
        opened(tmp_path).train.get(np.arange(3))
    with caplog.at_level(logging.WARNING, logger="weft"):
        assert opened(tmp_path, on_bad="skip").train.get(np.arange(3))[1].tolist() == [0, IGNORE, 2]
    assert "1.npy cannot be read and is skipped: it has pixels that are NaN" in caplog.text
    with (tmp_path / "2.npy").open("wb") as file:
        np.savez(file, one=spoiled, other=spoiled)
    with pytest.raises(DataError, match=r"2\.npy cannot be used: it holds no single array"):
        opened(tmp_path)


def test_no_more_is_decoded_at_once_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("png", "tiff in one strip", "tiff in tiles", "npy"):
        suffix, save = SAVERS[name]
        save(tmp_path / f"{name}{suffix}", picture())
    monkeypatch.setattr(formats, "MAX_DECODED_PIXELS", 2000)
    with pytest.raises(BadImageError, match="a PNG file is decoded whole, and its 90 × 133 pixels are more than 2000"):
        reader_of(tmp_path / "png.png").examine(tmp_path / "png.png", 0)
    with pytest.raises(BadImageError, match="a PNG file is decoded whole"):
        reader_of(tmp_path / "png.png").read(tmp_path / "png.png", 0, (0, 1), (0, 1))
    strip = tmp_path / "tiff in one strip.tif"
    with pytest.raises(BadImageError, match="its tiles of 90 × 133 pixels are more than 2000"):
        reader_of(strip).read(strip, 0, (0, 1), (0, 1))
    for path in (tmp_path / "tiff in tiles.tif", tmp_path / "npy.npy"):
        assert reader_of(path).examine(path, 0) == (90, 133, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with the line 'image,label'; found ''"),
        ("a.npy,0\n", "must begin with the line 'image,label'; found 'a.npy,0'"),
        ("image,label\n", "names no image"),
        ("image,label\na.npy,3\n", "line 2: 'a.npy,3' is not an image and a class from 0 to 2"),
        ("image,label\na.npy,0\nb.npy,-1\n", "line 3: 'b.npy,-1' is not an image and a class"),
        ("image,label\na.npy\n", "line 2: 'a.npy' is not an image and a class"),
        ("image,label\n../a.npy,0\n", r"line 2: '\.\./a\.npy' is not a path inside"),
        ("image,label\n/etc/a.npy,0\n", "line 2: '/etc/a.npy' is not a path inside"),
        ("image,label\na.npy,0\na.npy,1\n", "line 3: 'a.npy' is named twice"),
    ],
)
def test_a_labels_file_is_read_strictly(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_labels(tmp_path, 3)


def test_a_folder_without_labels_and_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"labels\.csv cannot be read: .*; give a file with the columns image,label"):
        read_labels(tmp_path, 3)
    with pytest.raises(DataError, match=r"image\.jpg is no image that weft reads; .*\.png"):
        reader_of(tmp_path / "image.jpg")


@pytest.mark.parametrize(("name", "package"), [("png", "PIL"), ("tiff in tiles", "tifffile")])
def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    suffix, save = SAVERS[name]
    make_folder(tmp_path, 2, suffix, save)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r"to be read; pip install 'weft\[images\]'"):
        opened(tmp_path).train.get(np.arange(2))


def test_a_compression_that_needs_another_package_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    Image.fromarray(picture()).save(tmp_path / "lzw.tif", compression="tiff_lzw")
    with pytest.raises(DataError, match=r"lzw\.tif cannot be decompressed: .*LZW.*; pip install imagecodecs"):
        reader_of(tmp_path / "lzw.tif").read(tmp_path / "lzw.tif", 0, (0, 5), (0, 5))
