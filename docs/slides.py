"""Draws tiles.svg and predictions.svg from a run of examples/pathology.toml: python docs/slides.py RUN_FOLDER

tiles.svg: a slide with the grid of the example's plan, and what each rank fetches from its neighbours, as a dry run of
the model says it. predictions.svg: held-out slides with what the trained model says of them, above the same slides with
the kind of one lesion changed. Prints the accuracy on all held-out slides.
"""

from __future__ import annotations

import base64
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from weft.checkpoint import Checkpoint, latest
from weft.data.config import SlidesConfig
from weft.data.images import Images
from weft.data.slides import Pixels, Slide, make_slide, render
from weft.errors import ConfigError
from weft.models import build
from weft.plan import Plan
from weft.run_file import Run, load_run
from weft.spatial.dry_run import _run, dry_run
from weft.spatial.fuse import NeighbourLayer
from weft.spatial.windows import Extra
from weft.step.examples import micro_batch_profile
from weft.train.batches import prepare_data

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parent / "examples" / "pathology.toml"
COLOURS = ("#0b62a4", "#b3410e", "#1a7a3c", "#7a3fa0")  # of ranks
NUM_SHOWN = 4
LEVELS = 16  # of a colour, in the pictures: grain does not compress
FUSED = 4
WORDS = ("one kind", "two kinds")
STYLE = "text{font:13px sans-serif;fill:#222}.quiet{fill:#555}.small{font-size:11px}"


def png(pixels: NDArray[np.uint8]) -> str:
    """Pixels [rows, columns, 3] as the address of an image."""
    rows, columns, _ = pixels.shape
    coarse = (pixels // LEVELS * LEVELS + LEVELS // 2).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in coarse)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    whole = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def image(pixels: Pixels, x: float, y: float, size: float) -> str:
    place = f'x="{x}" y="{y}" width="{size}" height="{size}"'
    return f'<image {place} style="image-rendering:pixelated" href="{png(pixels)}"/>'


def svg(width: int, height: int, shapes: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>'


# --- tiles


def margins(run: Run, fused: int) -> tuple[NeighbourLayer, Extra]:
    """The first layer that looks at neighbours, and the pixels that are fetched for it: rows and columns, each way."""
    plan = replace(run.plan, tile=replace(run.plan.tile, fused=fused))
    whole, at = micro_batch_profile(run), {"rows": 0, "columns": 0}
    assert isinstance(run.data, SlidesConfig)
    layers: list[NeighbourLayer] = []
    _run(whole, Plan(tile=plan.tile), at, (run.data.size, run.data.size), {}, layers)
    extras = dry_run(whole, plan, at).extras
    return layers[0], layers[0].before(extras.get(layers[0].position, ((0, 0), (0, 0))))


def regions(run: Run, fused: int) -> list[tuple[int, int, int, int]]:
    """(top, bottom, left, right) of what each rank holds behind its first exchange."""
    layer, (down, right) = margins(run, fused)
    found = []
    for top, bottom in layer.input_layout.rows.owned:
        for begin, end in layer.input_layout.columns.owned:
            rows = max(0, top - down[0]), min(layer.input_layout.rows.size, bottom + down[1])
            found.append((*rows, max(0, begin - right[0]), min(layer.input_layout.columns.size, end + right[1])))
    return found


def tiles(run: Run) -> str:
    """The whole slide with all halos, and the place where four tiles meet, larger."""
    assert isinstance(run.data, SlidesConfig)
    size = run.data.size
    pixels = render(make_slide(run.data.seed, 0, size), (0, size), (0, size))
    scale, near, close = 4, 14, 18  # picture pixels for a slide's; slide pixels around the middle; and for one of those
    half, side = size // 2, 2 * near * close
    shapes = [image(pixels, 20, 40, size * scale)]
    inset = pixels[half - near : half + near, half - near : half + near]
    left = size * scale + 60
    shapes.append(image(inset, left, 40, side))
    plain, wide = regions(run, 1), regions(run, FUSED)
    for index, (one, more) in enumerate(zip(plain, wide, strict=True)):
        for region, dash in ((one, ""), (more, ' stroke-dasharray="6 4"')):
            top, bottom, begin, end = region
            style = f'fill="{COLOURS[index]}" fill-opacity="{0.10 if not dash else 0}" stroke="{COLOURS[index]}"{dash}'
            shapes.append(
                f'<rect x="{20 + begin * scale}" y="{40 + top * scale}" width="{(end - begin) * scale}" '
                f'height="{(bottom - top) * scale}" {style} stroke-width="1.5"/>'
            )
            box = [max(-near, min(near, value - half)) for value in (top, bottom, begin, end)]
            x, y = left + (box[2] + near) * close, 40 + (box[0] + near) * close
            shapes.append(
                f'<rect x="{x}" y="{y}" width="{(box[3] - box[2]) * close}" height="{(box[1] - box[0]) * close}" '
                f'{style} stroke-width="2"/>'
            )
    line = '<path d="M{0} {1}h{2}M{3} {4}v{2}" stroke="#fff" stroke-width="3" fill="none"/>'
    shapes.append(line.format(20, 40 + half * scale, size * scale, 20 + half * scale, 40))
    shapes.append(line.format(left, 40 + near * close, side, left + near * close, 40))
    for index in range(4):
        row, column = divmod(index, 2)
        shapes.append(text(30 + column * half * scale, 60 + row * half * scale, f"rank {index}"))
    near_by, far = margins(run, 1)[1][0], margins(run, FUSED)[1][0]
    told = (
        f"full lines: its tile and what a rank fetches for its first layer (7 × 7, stride 2): {near_by[0]} pixels from "
        f"above and the left, {near_by[1]} from below and the right; corners come with the rows",
        f"broken lines: with fused = {FUSED}, {far[0]} and {far[1]} pixels, once for {FUSED} layers",
    )
    shapes += [
        text(20, 26, f"a slide of {size} × {size} pixels on 2 × 2 ranks"),
        text(left, 26, f"the {2 * near} × {2 * near} pixels where four tiles meet"),
        *(text(20, 60 + 18 * index + size * scale, words, "quiet small") for index, words in enumerate(told)),
    ]
    return svg(left + side + 20, 40 + size * scale + 56, shapes)


# --- predictions


def trained(run: Run, folder: Path) -> nn.Module:
    """The model of a run's last checkpoint."""
    path = latest(folder / "checkpoints")
    if path is None:
        raise ConfigError(f"{folder} has no checkpoint; train it: weft train {EXAMPLE}")
    checkpoint, model = Checkpoint(path), build(run.model).double()
    entries = [*checkpoint.entries("parameter"), *checkpoint.entries("buffer")]
    model.load_state_dict({entry.name: checkpoint.read(entry.name, entry.kind) for entry in entries})
    return model.eval()


def says(model: nn.Module, pixels: Pixels) -> float:
    """The probability of two kinds."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(pixels.astype(np.float64) / 127.5 - 1).permute(2, 0, 1)[None])
        return float(logits.softmax(-1)[0, 1])


def predictions(model: nn.Module, slides: Sequence[Slide]) -> str:
    """Slides above their twins."""
    side, gap = 256, 24
    shapes = [text(gap, 22, "held-out slides, and what the model says of their two lesions")]
    shapes.append(text(gap, 22 + side + 84, "the same slides with the kind of the second lesion changed"))
    for column, slide in enumerate(slides):
        first, second = slide.kinds
        for row, one in enumerate((slide, replace(slide, kinds=(first, 1 - second)))):
            pixels = render(one, (0, one.size), (0, one.size))
            two = says(model, pixels)
            x, y = gap + column * (side + gap), 34 + row * (side + 84)
            is_right = (two > 0.5) == bool(one.label)
            colour = "#1a7a3c" if is_right else "#b00020"
            shapes.append(image(pixels, x, y, side))
            frame = f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none"'
            shapes.append(f'{frame} stroke="{colour}" stroke-width="4"/>')
            told = f"says {WORDS[two > 0.5]} ({100 * max(two, 1 - two):.1f} %)"
            shapes.append(text(x, y + side + 20, f"{told}: {'right' if is_right else 'wrong'}"))
            shapes.append(text(x, y + side + 38, f"is {WORDS[one.label]}", "quiet small"))
    return svg(gap + len(slides) * (side + gap), 34 + 2 * (side + 84) - 20, shapes)


def main() -> None:
    run = load_run(EXAMPLE)
    (FOLDER / "tiles.svg").write_text(tiles(run), encoding="utf-8")
    model, held_out = trained(run, Path(sys.argv[1])), prepare_data(run).held_out
    assert isinstance(run.data, SlidesConfig)
    assert isinstance(held_out, Images)
    right = 0
    for begin in range(0, len(held_out), 32):
        images, labels = held_out.get(np.arange(begin, min(begin + 32, len(held_out))))
        with torch.inference_mode():
            right += int((model(images.double()).argmax(-1) == labels).sum())
    print(f"{right} of {len(held_out)} held-out slides right")
    numbers = [int(entry.path.stem.partition("-")[2]) for entry in held_out._entries[:NUM_SHOWN]]
    slides = [make_slide(run.data.seed, number, run.data.size) for number in numbers]
    (FOLDER / "predictions.svg").write_text(predictions(model, slides), encoding="utf-8")


if __name__ == "__main__":
    main()
