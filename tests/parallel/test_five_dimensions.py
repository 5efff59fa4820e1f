"""Stages of a pipeline on tiles (Hy-Fi's five dimensions): data × pipe × tile, mirrored replicas, shard beside them.

Each against the unsplit model in float64: loss, gradients, parameters and running statistics after two steps, and
bytes. A sample that covers schedules, hand-overs and models runs always, the full product with `-m soak`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import images_for_tests
import pytest
import torch
from nets_for_tests import net
from sampled_for_tests import one_in
from tensor_for_tests import failures
from tiles_for_tests import Mixed, Streams, UNet, images
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.comm import barrier
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import cost, parallelize
from weft.parallel.tile import tile
from weft.pipeline import stage as stage_module
from weft.pipeline.build import stage
from weft.pipeline.cost import edge_bytes
from weft.pipeline.shared_parameters import SharedParameters
from weft.plan import Memory, Pipe, Plan, Shard, Tile, split_batch
from weft.profiling import profile
from weft.proof.prove import ProofReport, verify
from weft.spatial.dry_run import dry_run
from weft.spatial.halo import HaloDim
from weft.spatial.tile_layout import BatchShare, TileLayout
from weft.step.train_step import evaluate, train_step

pytestmark = pytest.mark.processes

Patch = pytest.MonkeyPatch
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "GroupNorm": (images_for_tests.group_resnet, images(11, 14, 8)),
    "BatchNorm": (images_for_tests.batch_resnet, images(11, 14, 8)),
    "unet": (UNet, images(13, 18, 4, dense=True)),
    "flatten": (images_for_tests.Classic, images_for_tests.image_batch),
    "mixed": (Mixed, images(16, 18)),
    "streams": (Streams, images(16, 24)),
}
# Stages of the ResNet that begin inside its two layers; and of the U-Net, of which both skips cross stages.
RESNET = ("layer1.0", "layer1.1", "layer2.0")
UNET = ("bottom.0", "merge1.0")


def over(pipe: Pipe, rows: int, columns: int, **others: Any) -> Plan:
    """A plan of stages on tiles."""
    names = ("until", "hand_over", "fused")
    options = {name: others.pop(name) for name in names if name in others}
    others.setdefault("micro_batch", 2)
    return Plan(pipe=pipe, tile=Tile(rows, columns, **options), **others)


def check(name: str, plan: Plan, steps: int = 2) -> ProofReport:
    make, batch = MODELS[name]
    return verify(make, batch, plan, steps=steps)


# --- the oracle

CASES: dict[str, tuple[str, Plan]] = {
    "data 2 × pipe 2 × tile 2": ("BatchNorm", over(Pipe(2), 1, 2, data=2, statistics="batch")),
    "pipe 2 × rows 2 × columns 2, full": ("BatchNorm", over(Pipe(2, "gpipe"), 2, 2, memory=Memory("full"))),
    "bidirectional": ("BatchNorm", over(Pipe(2, "bidirectional"), 2, 1)),
    "gems, skips": ("unet", over(Pipe(2, "gems", split=UNET[1:]), 1, 2, micro_batch=1)),
    "skips over a stage": ("unet", over(Pipe(3, split=UNET), 2, 1)),
    "shard 3": ("GroupNorm", over(Pipe(2), 1, 2, shard=Shard(2, 3), memory=Memory("selective"))),
    "interleaved": ("BatchNorm", over(Pipe(2, "interleaved", split=RESNET), 1, 2)),
    "whole behind a stage": ("BatchNorm", over(Pipe(2, split=RESNET[2:]), 2, 1, until="layer2")),
    "shares behind a stage": ("BatchNorm", over(Pipe(3, split=RESNET[1:]), 1, 2, until="layer2", hand_over="batch")),
    "whole inside a stage": (
        "BatchNorm",
        over(Pipe(2, split=RESNET[1:2]), 1, 2, until="layer1.1", memory=Memory("full")),
    ),
    "shares inside a stage": ("flatten", over(Pipe(2, split=("conv2",)), 1, 2, hand_over="batch")),
    # The stages begin at the hand-over, behind it (one input is handed over in each), and before it.
    "streams, handed over by the later stage": ("streams", over(Pipe(2, split=("cells.2",)), 1, 2, until="cells.2")),
    "streams, shares in both stages": (
        "streams",
        over(Pipe(2, split=("cells.3",)), 2, 1, until="cells.2", hand_over="batch", memory=Memory("full")),
    ),
    "streams, whole in a middle stage": (
        "streams",
        over(Pipe(3, split=("cells.1", "cells.4")), 1, 2, until="cells.2.takes.0"),
    ),
    "fused over stages": ("BatchNorm", over(Pipe(2), 2, 1, fused=3)),
    "zero-bubble": ("mixed", over(Pipe(2, "zero-bubble", split=("expand",)), 1, 2)),
}


@pytest.mark.parametrize(("name", "plan"), one_in(10, CASES))
def test_equals_the_unsplit_model(name: str, plan: Plan) -> None:
    check(name, plan).require()


def test_running_statistics_are_compared() -> None:
    """Of mirrored replicas too, which each see half of the micro-batches."""
    report = check("BatchNorm", over(Pipe(2, "bidirectional"), 1, 2)).require()
    assert "worst buffer after the steps" in {line.what for line in report.checks}


# --- negative controls


@pytest.mark.soak
def test_finds_a_stage_that_takes_tiles_for_whole_images(monkeypatch: Patch) -> None:
    monkeypatch.setattr(stage_module, "set_layout", lambda tensor, place: tensor)
    assert {"loss", "worst gradient"} <= failures(check("GroupNorm", over(Pipe(2), 1, 2), steps=1))


def test_finds_a_halo_that_has_no_backward(monkeypatch: Patch) -> None:
    original = HaloDim.add_up

    def forgetful(self: HaloDim, gradient: Tensor, received: Any) -> Tensor:
        return original(self, gradient, [(peer, torch.zeros_like(more)) for peer, more in received])

    monkeypatch.setattr(HaloDim, "add_up", forgetful)
    found = failures(check("GroupNorm", over(Pipe(2), 2, 1), steps=1))
    assert "worst gradient" in found
    assert not any(what.startswith("traffic") for what in found)


@pytest.mark.soak
def test_finds_mirrored_stages_that_do_not_add_up(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SharedParameters, "combine", lambda self: None)
    assert "worst gradient" in failures(check("GroupNorm", over(Pipe(2, "bidirectional"), 1, 2), steps=1))


# --- what crosses, and what is said where


def staged(plan: Plan, name: str = "BatchNorm") -> Any:
    make, batch = MODELS[name]
    example = batch(0)[0][:2]
    whole = profile(make(), lambda: (example,))
    return whole, stage(whole, plan)


def places(plan: Plan, name: str = "BatchNorm") -> list[tuple[tuple[int, ...], Any]]:
    """Shape and place of what crosses stages."""
    route = staged(plan, name)[1].route
    values = [route.trace.values[int(edge.name)] for edge in route.edges]
    return [(value.shape, value.layout) for value in values]


def test_tiles_cross_until_they_are_handed_over() -> None:
    at = RESNET[1:2]  # 8 channels of 6 × 7 pixels, of which the first tile has 6 × 4
    ((shape, place),) = places(over(Pipe(2, split=at), 1, 2))
    assert shape == (2, 8, 6, 4)
    assert isinstance(place, TileLayout)
    assert place.sizes == (6, 7)
    ((shape, place),) = places(over(Pipe(2, split=at), 1, 2, until="layer1"))
    assert (shape, place) == ((2, 8, 6, 7), None)
    ((shape, place),) = places(over(Pipe(2, split=at), 1, 2, until="layer1", hand_over="batch"))
    assert (shape, place) == ((1, 8, 6, 7), BatchShare(2))
    ((shape, place),) = places(over(Pipe(2, split=at), 1, 2, until="layer1.1"))  # handed over behind the message
    assert shape == (2, 8, 6, 4)


def test_both_skips_of_a_unet_cross_as_tiles() -> None:
    found = places(over(Pipe(3, split=UNET), 2, 1), "unet")
    assert [shape for shape, _ in found] == [(2, 4, 7, 18), (2, 8, 3, 9), (2, 8, 2, 4), (2, 12, 7, 18)]
    assert all(isinstance(place, TileLayout) for _, place in found)


def test_no_rank_makes_a_whole_image() -> None:
    seen = []

    def example() -> tuple[Tensor]:
        seen.append(torch.zeros(2, 3, 11, 14))
        return (seen[-1],)

    plan = over(Pipe(2), 1, 2)
    whole = profile(images_for_tests.batch_resnet(), example)
    cost(whole, plan, split_batch(plan, 8, 1))
    assert len(seen) > 2
    assert all(isinstance(image, FakeTensor) for image in seen)


def test_messages_have_the_bytes_of_a_ranks_own_tile() -> None:
    _, staging = staged(over(Pipe(2, split=RESNET[1:2]), 1, 2))
    sizes = [edge_bytes(staging, {"rows": 0, "columns": column}) for column in range(2)]
    assert sizes == [[2 * 8 * 6 * 4 * 4], [2 * 8 * 6 * 3 * 4]]


def test_what_stages_say_adds_up_to_what_the_whole_says() -> None:
    plan = over(Pipe(2), 2, 2)
    whole, staging = staged(plan)
    names = ("rows", "columns", "tile")
    for row, column in ((0, 0), (1, 1)):
        at = {**dict.fromkeys(plan.degrees, 0), "rows": row, "columns": column}
        alone = cost(whole, Plan(tile=plan.tile), split_batch(Plan(), 2, 1), at).traffic
        parts = [cost(whole, plan, split_batch(plan, 2, 1), {**at, "pipe": index}, staging).traffic for index in (0, 1)]
        for key in alone:
            if key[0] in names:
                assert sum(part[key].num_bytes for part in parts if key in part) == alone[key].num_bytes, key
        found = [staging.profile(whole, index, at) for index in (0, 1)]
        local = dry_run(whole, plan, at).profile
        assert sum(part.flops for part in found) == local.flops
        saved = [sum((block.saved_bytes or {})["none"] for block in part.all) for part in (*found, local)]
        assert saved[0] + saved[1] == saved[2]


def test_code_on_the_images_alone_is_run_and_counted_by_every_stage_that_comes_there() -> None:
    def pooled() -> nn.Module:
        def forward(self: Any, given: Tensor) -> Tensor:
            small = nn.functional.avg_pool2d(given, 3, stride=1, padding=1)
            return self.head(self.blocks[1](self.blocks[0](small).relu() + small).mean((2, 3)))

        return net(forward, blocks=nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)), head=nn.Linear(3, 5))

    verify(pooled, images(8, 9, 4), over(Pipe(2), 1, 2), steps=2).require()


@pytest.mark.parametrize("hand_over", ["gather", "batch"])
def test_evaluates_what_it_trains(hand_over: Any) -> None:
    plan = over(Pipe(2, split=("conv2",)), 1, 2, hand_over=hand_over)

    def rank(_: int) -> list[Any]:
        mesh = Mesh(plan)
        pixels, labels = images_for_tests.image_batch(0)
        model = parallelize(images_for_tests.Classic(), plan, mesh, example=lambda: (pixels[:2],))
        batches = [(tile(pixels[at : at + 2], mesh), labels[at : at + 2]) for at in range(0, 8, 2)]
        before = evaluate(model, batches, mesh).item()
        result = train_step(model, torch.optim.SGD(model.parameters(), 0.1), batches, mesh)
        after = evaluate(model, batches, mesh).item()
        barrier()
        return [result.num_targets.item(), abs(before - result.loss.item()) < 1e-6, after < before]

    assert run_local(rank, 4) == [[8, True, True]] * 4


def test_a_batch_that_does_not_divide_over_the_tiles() -> None:
    with pytest.raises(PlanError, match=r"does not divide 1 samples over 2 tiles"):
        check("flatten", over(Pipe(2, split=("conv2",)), 1, 2, hand_over="batch", micro_batch=1))


# --- the full product

SCHEDULES = ["gpipe", "1f1b", "zero-bubble", "bidirectional", "gems"]


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["GroupNorm", "BatchNorm", "unet"])
def test_full_product(name: str, grid: tuple[int, int], schedule: Any, recompute: Any) -> None:
    check(name, over(Pipe(2, schedule), *grid, memory=Memory(recompute), micro_batch=1)).require()


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "bidirectional"])
@pytest.mark.parametrize("hand_over", ["gather", "batch"])
@pytest.mark.parametrize("until", ["layer1", "layer1.1", "layer2", "fc"])
@pytest.mark.parametrize(
    "beside", [{"data": 2}, {"shard": Shard(2, 3)}, {"shard": Shard(2, 1), "memory": Memory("full")}]
)
def test_full_product_of_hand_overs(beside: dict[str, Any], until: str, hand_over: Any, schedule: Any) -> None:
    plan = over(Pipe(2, schedule), 1, 2, until=until, hand_over=hand_over, statistics="batch", **beside)
    check("BatchNorm", plan).require()


@pytest.mark.soak
@pytest.mark.parametrize("fused", [2, 5])
@pytest.mark.parametrize("split", [RESNET, ("bn1", "layer1.0", "layer2.0")])
def test_full_product_of_wide_halos(split: tuple[str, ...], fused: int) -> None:
    check("BatchNorm", over(Pipe(4, split=split), 1, 2, fused=fused, memory=Memory("full"))).require()
