"""Hy-Fi's published comparison, predicted: spatial + bidirectional over pipeline and over layer parallelism.

    python benchmarks/hy_fi.py [--json]

Hy-Fi (ISC 2022, LNCS 13289, pp. 109-130) reports "up to 2.67× and 1.68× speedups over layer and pipeline parallelism".
Its abstract prints no configuration. Assumed here: its models at the sizes that its public code (MPI4DL) shows, in fp32
without recompute, on eight V100 of Lassen (two nodes), four tiles × two stages against eight stages, and for all the
same images a step; for each kind of parallelism the planner's best plan that fits 16 GB, in tiles until the end or
handed over where that is best. It is weft that is predicted: rectangular, with all ranks at work in late stages, where
MPI4DL gives each of those to one rank and waits for the device at every message; so factors are larger than published.
Nothing is fitted: the V100 has its one calibration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import harness

from weft.cluster.hardware import load
from weft.data.formats import ImageShape
from weft.models import VisionConfig
from weft.models.catalog import load_model
from weft.plan import Pipe, Plan, Tile
from weft.planner.image_model import ImageModel, planned_images

CLUSTER = "lassen:2"
CASES = [("amoebanet-d-18-208", 1024), ("amoebanet-d-18-208", 2048), ("resnet110-v2", 1024), ("resnet110-v2", 2048)]
BATCHES = (2, 4, 8)  # of one image nothing is left to overlap
NUM_TILES = 4
PUBLISHED = {"layer": 2.67, "pipeline": 1.68}
BEST = "spatial + bidirectional"


@dataclass(frozen=True)
class Row:
    """The best plan of one kind of parallelism for one model, size and batch; no plan where none fits."""

    model: str
    size: int
    batch: int
    kind: str
    plan: str = ""
    seconds: float | None = None
    memory_bytes: float | None = None


def plans(kind: str, model: ImageModel, batch: int) -> Iterator[tuple[Plan, int]]:
    """The plans of a kind with their numbers of micro-batches."""
    num_devices = model.cluster.num_devices
    tiles, pipes = [Tile()], [Pipe(num_devices, "gpipe")]
    if kind.startswith("spatial"):
        points = ("", *model.steps.sections.points)
        grids = [(rows, NUM_TILES // rows) for rows in (1, 2, 4)]
        tiles = [Tile(*grid, until, how) for grid in grids for until in points for how in ("gather", "batch")]  # type: ignore[arg-type]
        names = ("bidirectional", "gems") if kind == BEST else ("gpipe",)
        pipes = [Pipe(num_devices // NUM_TILES, name) for name in names]  # type: ignore[arg-type]
    for micro_batch in (size for size in range(1, batch + 1) if batch % size == 0):
        count = batch // micro_batch
        if (kind == "layer") != (count == 1) and kind in ("layer", "pipeline"):
            continue
        for tile in tiles:
            if tile.hand_over == "batch" and (micro_batch % NUM_TILES or not tile.until):
                continue
            for pipe in pipes:
                if not (pipe.schedule == "gems" and count % 2):
                    yield Plan(pipe=pipe, tile=tile, micro_batch=micro_batch), count


def best(kind: str, name: str, size: int, batch: int) -> Row:
    """The fastest that fits."""
    config = load_model(name)
    assert isinstance(config, VisionConfig)
    model = planned_images(config, ImageShape(size, size, 3), "fp32", load(CLUSTER))
    limit, found = model.cluster.node.device.memory_bytes, Row(name, size, batch, kind)
    for plan, count in plans(kind, model, batch):
        held = model.held(plan, count).total_bytes
        seconds = model.steps.step(plan, count).seconds
        if held <= limit and (found.seconds is None or seconds < found.seconds):
            words = f"{plan.describe_axes()}, micro-batch {plan.micro_batch} × {count}"
            found = Row(name, size, batch, kind, words, seconds, held)
    return found


def rows(cases: list[tuple[str, int]] = CASES, batches: tuple[int, ...] = BATCHES) -> list[Row]:
    """Every kind of parallelism for every case."""
    kinds = ("layer", "pipeline", "spatial + pipeline", BEST)
    return [best(kind, *case, batch) for case in cases for batch in batches for kind in kinds]


def factors(found: list[Row]) -> dict[str, tuple[float, float]]:
    """How much faster spatial + bidirectional is than each other kind, at least and at most."""
    by_case = {(row.model, row.size, row.batch, row.kind): row.seconds for row in found}
    all_of_them: dict[str, list[float]] = {}
    for (name, size, batch, kind), seconds in by_case.items():
        ours = by_case[name, size, batch, BEST]
        if kind != BEST and seconds is not None and ours is not None:
            all_of_them.setdefault(kind, []).append(seconds / ours)
    return {kind: (min(factors), max(factors)) for kind, factors in all_of_them.items()}


def main() -> None:
    parser = harness.options(__doc__, "hy-fi.json")
    parser.add_argument("--json", action="store_true", help="also write --out")
    arguments = parser.parse_args()
    found = rows()
    for row in found:
        told = "does not fit" if row.seconds is None else f"{row.batch / row.seconds:8.2f} images/s   {row.plan}"
        print(f"{row.model:20} {row.size:5} {row.batch:3}  {row.kind:24} {told}")
    up_to = factors(found)
    for kind, (least, most) in up_to.items():
        published = f"   published: up to {PUBLISHED[kind]:.2f}" if kind in PUBLISHED else ""
        print(f"{BEST} over {kind}: predicted {least:.2f} to {most:.2f}{published}")
    if arguments.json:
        value = {"cluster": CLUSTER, "predicted": up_to, "published": PUBLISHED}
        harness.write(arguments.out, {**value, "rows": [asdict(row) for row in found]}, device="cpu")


if __name__ == "__main__":
    main()
