"""Axes `rows` and `columns`: splits images into tiles over ranks, for images too large for one device (Hy-Fi, GEMS).

Each rank runs the user's own model on its tile, under a view in which code sees the shapes of whole images
(`weft.spatial`). Halos are exchanged before each convolution and pool, forward and backward. Norms take statistics over
all tiles. Where an operation needs whole images, tiles are gathered or exchanged for shares of the batch. Every rank
holds whole weights, and their gradients are summed over the tiles: one all-reduce of each trained slice a step. The
loss is the sum of the ranks' losses, divided by the number of targets that all ranks count. So targets that several
ranks compute count once.

The same view serves `plan.statistics = "batch"`, with or without tiles: batch norms take statistics over all ranks with
different samples.

An inner tile of h × w pixels and c channels, with a halo of a rows and b columns on each side, exchanges 2·b·h·c
elements along columns and 2·a·(w + 2·b)·c along rows, forward and backward. The cost is counted, not estimated, by a
dry run of the rank's forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from weft.comm.ledger import Key
from weft.errors import PlanError
from weft.inspection.nested_tensors import map_tensors
from weft.inspection.parameter_cut import share
from weft.inspection.rng import TileRng
from weft.mesh import Mesh
from weft.parallel.buffer_traffic import buffer_traffic
from weft.parallel.model_state import all_flats
from weft.plan import BatchSplit, Plan, Tile
from weft.profiling import Profile
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import Call
from weft.spatial.dry_run import dry_run, mark_tiling, tiling_for, tiling_of
from weft.spatial.tile_layout import Grid
from weft.spatial.tiled_model import install, install_stage
from weft.spatial.view import View
from weft.strategy import Buffer, Cost, SearchSpace, Strategy, Values, divisors, tally

MAX_TILES = 64  # largest number of tiles of an image that a search tries


class TileAxis(Strategy):
    """Splits images over `rows` and `columns`."""

    name = "tile"
    axes = ("rows", "columns")

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if not plan.is_viewed:
            return None
        size, inputs = f"tile = {plan.tile.rows} × {plan.tile.columns}", "whole images"
        if plan.tile.degree == 1:
            size, inputs = "statistics = 'batch'", "inputs"
        if plan.context.degree > 1:
            return f"{size} beside context = {plan.context.degree}, which weft does not do yet; use context = 1"
        if plan.tensor.x * plan.tensor.y > 1:
            return f"{size} beside tensor axes, which weft does not do; use tensor.x = tensor.y = 1"
        if profile.example is None:
            return f"{size} needs an example of the {inputs}; pass example=, the arguments of one forward"
        assert profile.model is not None
        if not profile.counted:
            return (
                f"{size}, but the model's forward depends on the values of its inputs, which no plan of tiles can know"
            )
        if plan.tile.until and plan.tile.until not in dict(profile.model.named_modules()):
            return f"tile.until = '{plan.tile.until}' is no module of {type(profile.model).__name__}"
        try:
            dry_run(profile, plan, {"rows": 0, "columns": 0})
        except PlanError as error:
            return str(error)
        return None

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if not plan.is_viewed:
            return Cost()
        pairs: list[tuple[Key, int]] = []
        in_backward = {block.name for block in profile.blocks if block.in_backward}
        is_again = plan.memory.recompute != "none"
        calls = profile.tile_calls if plan.pipe.degree > 1 else dry_run(profile, plan, coordinates).calls
        for recorded in calls:
            axis, operation, num_bytes = recorded.call
            times = 1 + (is_again and recorded.recomputed and recorded.block in in_backward)
            pairs += [((axis, operation), num_bytes)] * (times * split.accumulation)
        return Cost(tally(pairs))

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        """Returns the grids; the planner tries where tiles end and how they are handed over."""
        if space.samples != "images":
            return [{}]
        degrees = [degree for degree in divisors(space.num_devices) if degree <= MAX_TILES]
        return [{"tile": Tile(rows, degree // rows)} for degree in degrees for rows in divisors(degree)]

    def block_calls(self, block: BlockPass, plan: Plan) -> Iterable[Call]:
        """Yields the collectives between tiles: halos for each image, statistics once for a micro-batch."""
        is_recomputed = plan.memory.recompute != "none" and block.is_block
        for call in block.work.tile_calls:
            num_bytes = call.num_bytes * (block.micro_batch if call.operation == "send" else 1)
            phase = "forward" if call.phase == "again" else call.phase
            yield call._replace(num_bytes=num_bytes, phase=phase)
            if call.phase == "again" and is_recomputed:
                yield call._replace(num_bytes=num_bytes, phase="backward")

    def needs_example(self, plan: Plan) -> bool:
        return plan.is_viewed

    def examine(self, whole: Profile, plan: Plan, mesh: Mesh) -> None:
        tiling = tiling_for(whole, plan)
        if tiling is not None:
            assert whole.model is not None
            mark_tiling(whole.model, tiling)

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        tiling = tiling_of(model)
        if tiling is None:
            return model
        is_over_batch, is_staged = plan.has_batch_statistics, plan.pipe.degree > 1
        grid = Grid(
            mesh["rows"],
            mesh["columns"],
            mesh["tile"],
            TileRng(mesh["tile"], mesh.device),
            samples=mesh["samples"] if is_over_batch else None,
            batch=mesh["batch"] if is_over_batch else None,
        )
        put_under = install_stage if is_staged else install
        put_under(model, View(grid, plan.tile, tiling.extras, is_staged, tiling.point), tiling.sizes)
        return model


class TileGradients(Strategy):
    """Sums gradients over the tiles, after `ShardAxis` has made the flat buffers."""

    name = "tile gradients"

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        return Cost(tally(buffer_traffic(self, profile, plan, split)))

    def buffer_calls(self, buffer: Buffer, plan: Plan, software: Software) -> Iterable[Call]:
        if plan.tile.degree > 1:
            own = buffer.numel / plan.shard.degree
            yield Call("tile", "all_reduce", own * buffer.gradient_bytes, "reduce")

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.tile.degree > 1:
            for flat in all_flats(model):
                flat.sum_over.append(mesh["tile"])
        return model


def tile(image: Tensor, mesh: Mesh) -> Tensor:
    """Returns this rank's tile of whole images, or of their pixels' labels: the last two dims are rows and columns."""
    for dim, name in ((-2, "rows"), (-1, "columns")):
        axis = mesh[name]
        if image.shape[dim] < axis.degree:
            raise PlanError(
                f"tile.{name} = {axis.degree}, but the image has {image.shape[dim]} {name}; use at most "
                f"{image.shape[dim]}, or larger images"
            )
        begin, end = share(image.shape[dim], axis.degree, axis.index)
        image = image.narrow(dim, begin, end - begin)
    return image.contiguous()


def own_targets(batch: Any, model: nn.Module, mesh: Mesh) -> Any:
    """Returns a micro-batch (inputs, *targets) with the targets of this rank's samples if the result has only those."""
    tiling = tiling_of(model)
    if tiling is None or tiling.output != "batch":
        return batch
    axis = mesh["tile"]
    return batch[0], *(one[slice(*share(len(one), axis.degree, axis.index))] for one in batch[1:])


def own_tiles(batch: Any, model: nn.Module, mesh: Mesh) -> Any:
    """Returns a rank's part of a batch (inputs, *targets) of whole images, as its data loader would return it.

    Inputs of the images' size are split into tiles, and targets if the model's result is.
    """
    tiling = tiling_of(model)
    if tiling is None or mesh["tile"].degree == 1:
        return batch

    def part(tensor: Tensor) -> Tensor:
        is_image = tensor.dim() > 2 and tuple(tensor.shape[-2:]) == tuple(tiling.sizes)
        return tile(tensor, mesh) if is_image else tensor

    targets = [tile(one, mesh) if tiling.output == "tile" else one for one in batch[1:]]
    return map_tensors(part, batch[0]), *targets


def repeats(model: nn.Module, plan: Plan) -> int:
    """Returns how many ranks count the same targets."""
    tiling = tiling_of(model)
    return plan.tile.degree if tiling is not None and tiling.output == "whole" else 1
