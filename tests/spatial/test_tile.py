"""Axis tile: models on tiles against the unsplit model in float64; bytes, memory, hand-overs, fusing, refusals."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import images_for_tests
import pytest
import tiles_for_tests as shared
import torch
import torch.nn.functional as F
from sampled_for_tests import one_in
from tensor_for_tests import failures, saved_bytes
from tiles_for_tests import CASES, MODELS, Streams, UNet, dry, images, over
from torch import Tensor, nn

import weft
from weft.comm import Axis, barrier
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim.saved_state import pieces_to_save
from weft.parallel.apply import cost, parallelize, refuse
from weft.parallel.tile import TileGradients, tile
from weft.plan import Context, Pipe, Plan, Shard, Tile, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.proof.prove import ProofReport, verify
from weft.sharding.flat_buffer import Flat
from weft.sharding.units import units_of
from weft.spatial import halo, norms
from weft.spatial.dry_run import tiling_of
from weft.spatial.halo import HaloDim
from weft.spatial.tile_layout import BatchShare, LayoutNotes, layout_of, set_layout
from weft.step.train_step import evaluate, train_step

pytestmark = pytest.mark.processes

Patch = pytest.MonkeyPatch


def check(name: str, plan: Plan, steps: int = 2) -> ProofReport:
    make, batch = MODELS[name]
    return verify(make, batch, plan, steps=steps)


# --- the oracle

MORE: dict[str, tuple[str, Plan]] = {
    "mixed": ("mixed", over(2, 2)),
    "BatchNorm": ("BatchNorm", over(4, 1, micro_batch=2)),
    "unet, upsampled": ("unet, upsampled", over(1, 4)),
    "unet, shares in the middle": ("unet, thin", over(4, 1, hand_over="batch")),
    "unet, full": ("unet", over(1, 2, "full")),
    "shard 2, full": ("plain", over(2, 1, "full", shard=Shard(2, 2), micro_batch=2)),
    "data": ("unet, upsampled", over(1, 2, data=2)),
    "data × shard, selective": ("GroupNorm", over(2, 1, "selective", data=2, shard=Shard(2, 1))),
    "batch, until a block, full": ("BatchNorm", over(2, 2, "full", hand_over="batch", until="layer1.1")),
    "batch, until behind the mean": ("BatchNorm", over(1, 2, hand_over="batch", until="fc")),
    "until": ("GroupNorm", over(2, 2, until="layer2")),
    "streams, full": ("streams", over(1, 2, "full", until="cells.4")),
    "streams, inside a block": ("streams", over(2, 1, "full", until="cells.3.takes.1")),
    "streams, fused": ("streams", over(2, 1, until="cells.2", fused=2)),
    "three streams, batch": ("three streams", over(2, 2, until="cells.2", hand_over="batch")),
    "unet, until the bottom": ("unet", over(2, 1, until="bottom")),
    "fused 3": ("unet", over(1, 2, fused=3)),
    "fused 2, mixed": ("mixed", over(2, 2, fused=2)),
}


@pytest.mark.parametrize(("name", "plan"), one_in(2, CASES))
@pytest.mark.sampled(2)
def test_equals_the_unsplit_model(name: str, plan: Plan) -> None:
    check(name, plan).require()


@pytest.mark.soak
@pytest.mark.parametrize(("name", "plan"), MORE.values(), ids=MORE.keys())
def test_more_equal_the_unsplit_model(name: str, plan: Plan) -> None:
    check(name, plan).require()


def test_two_levels() -> None:
    make, batch = MODELS["BatchNorm"]
    report = verify(make, batch, over(2, 2, hierarchical=True), ranks_per_node=2, steps=2).require()
    assert "traffic: tile/node all_reduce" in {line.what for line in report.checks}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.sampled(2)
def test_other_precisions_and_layouts_in_memory(layout: torch.memory_format) -> None:
    def losses(plan: Plan) -> list[float]:
        def rank(_: int) -> list[float]:
            mesh = Mesh(plan)
            torch.manual_seed(0)
            model = images_for_tests.batch_resnet().to(memory_format=layout)
            model = parallelize(model, plan, mesh, example=lambda: (torch.zeros(4, 3, 32, 32),))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            found = []
            for step in range(3):
                pixels, labels = images(32, 32)(step)
                batch = tile(pixels, mesh).to(memory_format=layout), labels
                found.append(train_step(model, optimizer, [batch], mesh).loss.item())
            return found

        answers: list[list[float]] = run_local(rank, plan.num_ranks)
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    alone = losses(Plan())
    assert losses(over(2, 2)) == pytest.approx(alone, rel=1e-6)
    assert losses(over(2, 2, precision="bf16")) == pytest.approx(alone, rel=1e-2)


def test_statistics_over_tiles_and_data_need_a_word() -> None:
    with pytest.raises(PlanError, match=r"'down1.1' takes statistics over the batch, which data = 2 splits"):
        check("unet", over(1, 2, data=2))


# --- negative controls


def broken(name: str, plan: Plan) -> set[str]:
    """What the report found wrong, traffic aside; something must be."""
    found = failures(check(name, plan, steps=1))
    assert found
    assert not any(what.startswith("traffic") for what in found)
    return found


def test_finds_a_halo_that_has_no_backward(monkeypatch: Patch) -> None:
    original = HaloDim.add_up

    def forgetful(self: HaloDim, gradient: Tensor, received: Any) -> Tensor:
        return original(self, gradient, [(peer, torch.zeros_like(more)) for peer, more in received])

    monkeypatch.setattr(HaloDim, "add_up", forgetful)
    found = broken("classic", over(1, 2))
    assert "worst gradient" in found


def test_finds_a_halo_that_does_not_arrive(monkeypatch: Patch) -> None:
    original = HaloDim.assemble

    def forgetful(self: HaloDim, out: Tensor, value: Any, strips: list[Tensor], fill: float) -> Tensor:
        return original(self, out, value, [torch.zeros_like(strip) for strip in strips], fill)

    monkeypatch.setattr(HaloDim, "assemble", forgetful)
    assert "loss" in broken("classic", over(2, 1))


def test_finds_gradients_that_are_averaged_over_tiles(monkeypatch: Patch) -> None:
    finish = Flat.finish_reduce

    def mean(self: Flat) -> None:
        finish(self)
        assert self.slice_gradient is not None
        self.slice_gradient.div_(2)

    monkeypatch.setattr(Flat, "finish_reduce", mean)
    assert "worst gradient" in broken("classic", over(1, 2))


def test_finds_gradients_that_are_not_summed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(TileGradients, "apply", lambda self, model, plan, mesh, values: model)
    assert "worst gradient" in failures(check("classic", over(1, 2), steps=1))


def test_finds_statistics_of_single_tiles(monkeypatch: Patch) -> None:
    original = norms._whole_moments

    def local(own: Tensor, counts: Tensor, axis: Any) -> Any:
        original(own, counts, axis)
        return torch.var_mean(own, [dim for dim in range(own.dim()) if dim != 1], correction=0)[::-1]

    monkeypatch.setattr(norms, "_whole_moments", local)
    found = broken("BatchNorm", over(2, 1))
    assert "loss" in found
    assert "worst buffer after the steps" in found


def test_finds_a_loss_that_counts_a_sample_for_each_tile(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        sys.modules["weft.step.train_step"], "all_reduce", lambda tensor, axis: halo.exchange([], [], axis)
    )
    assert {"loss", "worst gradient"} <= failures(check("classic", over(1, 2)))


# --- bytes by hand


def sent(plan: Plan, shape: tuple[int, ...], make: Callable[[], nn.Module], row: int, column: int) -> list[Any]:
    return [(one.call, one.is_backward) for one in dry(make(), shape, plan.tile, row, column).calls]


def test_bytes_of_an_inner_tile_by_hand() -> None:
    batch, channels, rows, columns, size = 2, 5, 24, 12, 4

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, channels, 1), nn.Conv2d(channels, 1, (5, 3), padding=(2, 1)))

    h, w, a, b = rows // 3, columns // 3, 2, 1
    strip, wide = batch * channels * b * h * size, batch * channels * a * (w + 2 * b) * size
    expected = [(("columns", "send", strip), False)] * 2 + [(("rows", "send", wide), False)] * 2
    expected += [(("rows", "send", wide), True)] * 2 + [(("columns", "send", strip), True)] * 2
    assert sent(over(3, 3), (batch, 3, rows, columns), make, 1, 1) == expected


def test_bytes_of_a_stride_and_of_one_axis_by_hand() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 1, 3, stride=2, padding=1))

    strip = 2 * 4 * 16 * 4  # a column of the left neighbour; nothing of the right one
    assert sent(over(1, 4), (2, 3, 16, 32), make, 0, 1) == [
        (("columns", "send", strip), False),
        (("columns", "send", strip), True),
    ]
    assert sent(over(1, 4), (2, 3, 16, 32), make, 0, 3) == [(("columns", "send", strip), True)]


def root_sends(model: nn.Module, plan: Tile, shape: tuple[int, ...]) -> list[tuple[str, str, int, bool]]:
    """What a rank sends outside of blocks, in forward and (True) backward."""
    said = dry(model, shape, plan).calls
    return [(*one.call, one.is_backward) for one in said if not one.block and one.call[1] == "send"]


def test_all_that_enters_the_block_at_a_hand_over_is_handed_over_once() -> None:
    """The third cell takes the results of the two before it, and the fourth one of those again."""
    shape, own = (2, 3, 16, 24), 2 * 4 * 8 * 12 * 4 // 2  # bytes of a tile of what the second cell gives
    plan = Tile(1, 2, until="cells.2")
    stem = root_sends(Streams(), Tile(1, 2), shape)  # the halo of the first convolution, which is no block
    found = root_sends(Streams(), plan, shape)
    handed = [("columns", "send", size, is_backward) for size in (own, 4 * own) for is_backward in (False, True)]
    assert sorted(found) == sorted([*stem, *handed])
    later = {f"cells.{number}" for number in range(2, 6)}
    assert not [one for one in dry(Streams(), shape, plan).calls if one.block in later]
    third = root_sends(Streams(3), Tile(1, 2, until="cells.2"), shape)  # takes the stem's result too, as large
    assert sorted(third) == sorted([*found, *handed[2:]])


class ChangedInPlace(nn.Module):
    """Changes an image in place between two functions that need it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, shared.NUM_CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        value = self.convolution(value)
        before = value.flatten(2).mean(-1)
        value.mul_(2).add_(1)
        out: Tensor = self.head(torch.cat([before, value.flatten(2).mean(-1)], 1))
        return out


class ChangedForLater(nn.Module):
    """Changes an image in place between two convolutions of it, which autograd allows in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        value = self.layers[1](self.layers[0](value))
        early = self.layers[2](value)
        value.mul_(3)
        out: Tensor = self.layers[3](early) + self.layers[3](value)
        return out


@pytest.mark.parametrize("evaluation", [torch.no_grad, torch.inference_mode])
@pytest.mark.sampled(1)
def test_an_image_with_fetched_pixels_is_changed_in_place(evaluation: Any) -> None:
    plan, shape = over(2, 1, fused=2), (2, 3, 16, 8)

    def rank(_: int) -> None:
        torch.manual_seed(0)
        mesh, whole, given = Mesh(plan), ChangedForLater(), torch.randn(shape)
        model = parallelize(copy.deepcopy(whole), plan, mesh, example=lambda: (torch.zeros(shape),))
        with evaluation():
            assert torch.allclose(model(tile(given, mesh)), tile(whole(given), mesh), atol=1e-5)

    run_local(rank, 2)


@pytest.mark.parametrize("hand_over", ["gather", "batch"])
@pytest.mark.sampled(1)
def test_an_image_that_was_changed_in_place_is_handed_over_again(hand_over: Any) -> None:
    verify(ChangedInPlace, images(8, 8), over(1, 2, hand_over=hand_over), steps=2).require()


def test_a_stream_of_no_more_pixels_is_handed_over_where_it_is_first_taken() -> None:
    class Skip(Streams):
        def forward(self, images: Tensor) -> Tensor:
            early = self.stem(images)
            last = self.cells[0](early, early)
            last = self.cells[1](last, last)  # handed over before it
            logits: Tensor = self.head(self.cells[3](self.cells[4](early, early), last).mean((2, 3)))
            return logits

    found = dry(Skip(), (2, 3, 16, 24), Tile(1, 2, until="cells.1")).calls
    assert {one.block for one in found if one.call[0] == "columns"} == {"", "cells.0"}


def test_larger_images_that_go_around_a_hand_over_stay_in_tiles() -> None:
    found = dry(UNet(), (2, 3, 16, 24), Tile(1, 2, until="bottom"))
    assert found.output == "tile"
    blocks = {one.block.partition(".")[0] for one in found.calls if one.call[0] == "columns"}
    assert blocks == {"", "down1", "down2", "merge1", "merge2"}


def test_statistics_and_hand_overs_by_hand() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1))

    assert sent(over(2, 2), (4, 3, 8, 8), make, 0, 0) == [
        (("tile", "all_gather", 2 * 8 * 4 * 4), False),
        (("tile", "all_reduce", 2 * 8 * 4), True),
        (("tile", "all_reduce", 4 * 8 * 4), True),
        (("tile", "all_reduce", 4 * 8 * 4), False),
    ]

    def flat() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten())

    quarter = 4 * 2 * 4 * 4 * 4
    # The own tile to the other column, and both to the other row; backward what was got goes back.
    whole = [(("columns", "send", quarter), False), (("rows", "send", 2 * quarter), False)]
    whole += [(("rows", "send", 2 * quarter), True), (("columns", "send", quarter), True)]
    assert sent(over(2, 2), (4, 3, 8, 8), flat, 0, 0) == whole
    shares = [(("tile", "send", quarter // 4), False)] * 3 + [(("tile", "send", quarter // 4), True)] * 3
    assert sent(over(2, 2, hand_over="batch"), (4, 3, 8, 8), flat, 0, 0) == shares


def messages(fused: int, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[int, float]:
    """How many there are in a forward, and the share of the whole model's FLOPs."""
    found = dry(make(), shape, Tile(1, 4, fused=fused), 0, 1)
    whole = profile(make(), lambda: (torch.zeros(shape),))
    calls = [one for one in found.calls if one.call[1] == "send" and not one.is_backward]
    return len(calls), found.profile.flops / whole.flops


def test_fused_halos_send_fewer_messages() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)))

    found = {fused: messages(fused, make, (1, 3, 16, 64)) for fused in (1, 2, 3, 6)}
    assert {fused: calls for fused, (calls, _) in found.items()} == {1: 12, 2: 6, 3: 4, 6: 2}
    # Of 16 columns, layers of a group of f compute 2 (f - 1), 2 (f - 2), ... more.
    for fused, (_, flops) in found.items():
        assert flops == pytest.approx((16 + sum(2 * i for i in range(fused)) / fused) / 64)


def test_fused_halos_over_strides() -> None:
    layers = [nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, stride=2, padding=1), nn.Conv2d(1, 1, 5, padding=2)]
    found = dry(nn.Sequential(*layers), (1, 1, 8, 64), Tile(1, 2, fused=3))
    # h = s h + lo: 2 for the last, 2·2 + 1 and 2·2 + 0 before the second, and one more each before the first.
    assert list(found.extras.values()) == [((0, 0), (2, 2)), ((0, 0), (5, 4))]
    assert [one.call for one in found.calls if not one.is_backward] == [("columns", "send", 6 * 8 * 4)]


# --- memory


def all_saved_bytes(make: Callable[[], nn.Module], shape: tuple[int, ...], plan: Plan) -> list[int]:
    """What autograd saves on each rank, parameters and buffers aside."""

    def rank(_: int) -> int:
        mesh = Mesh(plan)
        model = parallelize(make(), plan, mesh, example=lambda: (torch.zeros(shape),))
        units = units_of(model)
        assert units is not None
        held = [*(flat.whole for flat in units.flats), *model.buffers()]
        return saved_bytes(held, lambda: model(tile(torch.zeros(shape), mesh)))

    found: list[int] = run_local(rank, plan.num_ranks)
    return found


@pytest.mark.parametrize("plan", one_in(2, {"apart": over(2, 2), "fused": over(2, 2, fused=2)}))
@pytest.mark.parametrize("make", [images_for_tests.batch_resnet, UNet])
@pytest.mark.sampled(2)
def test_each_rank_saves_its_part_and_the_halo(make: Callable[[], nn.Module], plan: Plan) -> None:
    shape = (2, 3, 64, 64)
    whole = profile(make(), lambda: (torch.zeros(shape),))
    split = split_batch(plan, 2, 1)
    alone = cost(whole, Plan(), split).saved_bytes
    for index, measured in enumerate(all_saved_bytes(make, shape, plan)):
        row, column = divmod(index, plan.tile.columns)
        at = {**dict.fromkeys(plan.degrees, 0), "rows": row, "columns": column}
        assert cost(whole, plan, split, at).saved_bytes == pytest.approx(measured, rel=0.02)
        assert 1 / plan.tile.degree <= measured / alone < 1 / plan.tile.degree + 0.1


def test_flops_go_over_tiles() -> None:
    whole = profile(images_for_tests.batch_resnet(), lambda: (torch.zeros(2, 3, 64, 64),))
    alone, parts = (cost(whole, plan, split_batch(plan, 2, 1)) for plan in (Plan(), over(2, 2)))
    assert parts.flops == pytest.approx(alone.flops / 4, rel=1e-3)


# --- what a rank is given, and gives


def test_tiles_of_an_image() -> None:
    plan = over(2, 3)
    image = torch.arange(2 * 5 * 7).view(2, 5, 7)

    def rank(_: int) -> list[Any]:
        mesh = Mesh(plan)
        barrier()  # a rank that ends before others have their groups would break them off
        return [list(tile(image, mesh).shape), tile(image, mesh).flatten().tolist()]

    found = run_local(rank, 6)
    assert [shape for shape, _ in found] == [[2, 3, 3], [2, 3, 2], [2, 3, 2], [2, 2, 3], [2, 2, 2], [2, 2, 2]]
    assert sorted(pixel for _, pixels in found for pixel in pixels) == list(range(2 * 5 * 7))


@pytest.mark.parametrize(("hand_over", "output"), [("gather", "whole"), ("batch", "batch")])
def test_a_step_counts_every_sample_once(hand_over: Any, output: str) -> None:
    plan = over(1, 2, hand_over=hand_over)

    def rank(_: int) -> list[Any]:
        mesh = Mesh(plan)
        pixels, labels = images_for_tests.image_batch(0)
        model = parallelize(images_for_tests.Classic(), plan, mesh, example=lambda: (pixels,))
        batch = tile(pixels, mesh), labels
        before = evaluate(model, [batch], mesh).item()
        result = train_step(model, torch.optim.SGD(model.parameters(), 0.1), [batch], mesh)
        tiling = tiling_of(model)
        assert tiling is not None
        return [tiling.output, result.num_targets.item(), abs(before - result.loss.item()) < 1e-6]

    assert run_local(rank, 2) == [[output, 8, True]] * 2


def test_names_stay_and_one_rank_saves() -> None:
    plan = over(1, 2)

    def rank(_: int) -> list[Any]:
        mesh = Mesh(plan)
        names = list(images_for_tests.batch_resnet().state_dict())
        model = parallelize(images_for_tests.batch_resnet(), plan, mesh, example=lambda: (torch.zeros(2, 3, 8, 8),))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        barrier()
        return [list(model.state_dict()) == names, len(list(pieces_to_save(model, optimizer, mesh)))]

    first, second = run_local(rank, 2)
    assert first[0]
    assert second[0]
    assert first[1] > 20
    assert second[1] == 0


def test_tiles_drop_pixels_apart_and_channels_alike() -> None:
    plan = over(1, 2, fused=2)

    def rank(_: int) -> dict[str, Any]:
        mesh = Mesh(plan)
        layers = [nn.Conv2d(3, 8, 1), nn.Dropout2d(0.5), nn.Dropout(0.5), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten()]
        chain = nn.Sequential(*layers, nn.Linear(512, 8), nn.Dropout(0.5))
        model = parallelize(chain, plan, mesh, example=lambda: (torch.zeros(2, 3, 8, 8),))
        masks: dict[str, Any] = {}

        def watch(name: str) -> None:
            def take(module: Any, args: Any, out: Tensor) -> None:
                with torch._C.DisableTorchFunction():
                    masks[name] = (out.flatten(2).sum(-1) if name == "1" else out).eq(0).flatten().tolist()

            model.get_submodule(name).register_forward_hook(take)

        for name in ("1", "2", "6"):
            watch(name)
        torch.manual_seed(7)
        model(tile(torch.ones(2, 3, 8, 8), mesh))
        return {**masks, "after": torch.rand(()).item()}

    left, right = run_local(rank, 2)
    assert left["1"] == right["1"]
    assert left["2"] != right["2"]
    assert left["6"] == right["6"]
    assert left["after"] == right["after"]


def test_copies_of_a_model_know_nothing_of_its_memory() -> None:
    notes, image = LayoutNotes(), torch.zeros(2, 3)
    notes.record(set_layout(image, BatchShare(4)))
    again, other = (image.view(2, 3) for _ in range(2))
    copy.deepcopy(notes).restore(other)
    notes.restore(again)
    assert layout_of(other) is None
    assert layout_of(again) == BatchShare(4)


# --- bad input


def reason(make: Callable[[], nn.Module], plan: Plan, shape: tuple[int, ...] | None = (2, 3, 16, 16)) -> str:
    """Why a plan is refused."""
    found = profile(make()) if shape is None else profile(make(), lambda: (torch.zeros(shape),))
    with pytest.raises(PlanError) as error:
        refuse(found, plan)
    return str(error.value)


class Calls(nn.Module):
    """A function behind a convolution."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.stem, self.head, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.Identity(), function

    def forward(self, value: Tensor) -> Any:
        return self.head(self.function(self.stem(value)))


class Twice(torch.autograd.Function):
    """A function of the model's own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


REMEDY = "; hand tiles over before it (tile.until = the name of a module), or use rows = columns = 1"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda v: v.cumsum(-1), "the operation 'cumsum' works along rows or columns"),
        (lambda v: v.mean(-1), "the operation 'mean' works along rows or columns"),
        (lambda v: v.std((2, 3)), "the operation 'std' works along rows and columns"),
        (lambda v: torch.fft.fft2(v), "the operation 'fft_fft2' has no rule for tiles"),
        (lambda v: F.unfold(v, 3), "the operation 'unfold' has no rule for tiles"),
        (lambda v: F.grid_sample(v, torch.zeros(2, 8, 8, 2)), "the operation 'grid_sample' has no rule for tiles"),
        (lambda v: v[:, :, 3], "the operation 'getitem' takes a single row or column"),
        (lambda v: v[torch.arange(2)], "the operation 'getitem' takes pixels by an index that is no number or slice"),
        (lambda v: torch.cat([v, v], -1), "the operation 'cat' joins images along rows or columns"),
        (lambda v: F.pad(v, (1, 1, 1, 1), mode="reflect"), "the operation 'pad' pads with mode = 'reflect'"),
        (lambda v: F.max_pool2d(v, 2, return_indices=True)[0], "the operation 'max_pool2d_with_indices' gives indices"),
        (
            lambda v: F.interpolate(v, scale_factor=2, mode="bicubic"),
            "the operation 'interpolate' has mode = 'bicubic'",
        ),
        (lambda v: v @ v.transpose(2, 3), "the operation 'matmul' multiplies images by images"),
        (lambda v: torch.zeros(2, 4, 16, 16).add_(v), "the operation 'add' changes a tensor that is not in tiles"),
        (lambda v: v + v.mT, "the operation 'mT' has no rule for tiles"),
        (lambda v: v + v.transpose(2, 3), "the operation 'add' takes images together whose rows and columns are in"),
    ],
)
def test_an_operation_without_a_rule_is_named(function: Any, words: str) -> None:
    assert f"tile = 1 × 2: {words}" in reason(lambda: Calls(function), over(1, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda v: [v, v[..., 1:].relu_()][0] + 1,
        lambda v: [v[..., 1:], v[:, 1:].mul_(2)][0] + 1,
        lambda v: [v[..., 1:], v[..., :-1].mul_(2)][0] + 1,
        lambda v: [v, v.flatten(1).relu_()][0] + 1,
        lambda v: [v.flatten(1), v.mul_(2)][0] + 1,
    ],
)
@pytest.mark.sampled(1)
def test_copies_of_pixels_are_not_used_after_another_was_changed_in_place(function: Any) -> None:
    """Where torch has views, tiles have copies: of slices, and of what is handed over."""
    assert reason(lambda: Calls(function), over(1, 2)) == (
        "tile = 1 × 2: the operation 'add' takes pixels of which another copy (a slice, an image or what it was handed "
        f"over as) was changed in place{REMEDY}"
    )


def test_the_module_around_it_is_named_too() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))

    assert reason(make, over(2, 1)) == f"tile = 2 × 1: the operation 'pad' in '1' pads with mode = 'circular'{REMEDY}"


def test_a_place_that_is_lost_is_noticed() -> None:
    model = Calls(lambda v: v.flatten(2).transpose(0, 1))
    assert reason(lambda: model, over(1, 2, hand_over="batch")) == (
        "tile = 1 × 2: 'head' (Identity) gave [4, 1, 256] where the whole model has [4, 2, 256] ('head'); weft "
        "follows samples along the first dim only; use tile.hand_over = 'gather'"
    )


def test_a_forward_that_looks_at_values() -> None:
    assert reason(lambda: Calls(lambda v: v[v > 0]), over(1, 2)) == (
        "tile = 1 × 2, but the model's forward depends on the values of its inputs, which no plan of tiles can know"
    )


def test_functions_of_the_models_own_are_followed() -> None:
    assert dry(Calls(Twice.apply), (2, 3, 8, 8), Tile(1, 2)).output == "tile"


def test_images_and_grids_that_do_not_fit() -> None:
    make = images_for_tests.batch_resnet
    assert reason(make, over(1, 16), (2, 3, 8, 8)) == (
        "tile.columns = 16, but the images have 8 columns; use at most 8, or larger images"
    )
    assert reason(lambda: nn.Linear(3, 4), over(1, 2), (2, 3)) == (
        "tile splits images [batch, channels, rows, columns], and none is among the model's arguments"
    )
    assert reason(make, over(1, 2, hand_over="batch", until="fc"), (3, 3, 8, 8)) == (
        "tile.hand_over = 'batch' does not divide 3 samples over 2 tiles; use a micro-batch that is a multiple of 2, "
        "or hand_over = 'gather'"
    )
    assert reason(make, over(1, 2), None) == (
        "tile = 1 × 2 needs an example of the whole images; pass example=, the arguments of one forward"
    )
    assert reason(make, over(1, 2, until="layer9")) == "tile.until = 'layer9' is no module of ResNet"
    words = "the operation 'flatten' in '3' cannot go on in tiles (it folds rows or columns into other dims)"
    chain = [nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 8), nn.Linear(8, 5)]
    assert words in reason(lambda: nn.Sequential(*chain), over(1, 2, until="5"))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            {"tensor": TensorPlan(2)},
            "tile = 1 × 2 beside tensor axes, which weft does not do; use tensor.x = tensor.y = 1",
        ),
        ({"context": Context(2)}, "tile = 1 × 2 beside context = 2, which weft does not do yet; use context = 1"),
        (
            {"pipe": Pipe(2, "message")},
            "pipe.schedule = 'message' lets each rank choose its own order, but the ranks of a stage (columns = 2) "
            "must share one; use data beside it, or another schedule",
        ),
    ],
)
def test_axes_that_do_not_go_together(others: dict[str, Any], words: str) -> None:
    assert reason(images_for_tests.batch_resnet, over(1, 2, **others)) == words


def test_plans_of_tiles() -> None:
    with pytest.raises(PlanError, match=r"plan.rows = 0; a degree is at least 1"):
        over(0, 2)
    with pytest.raises(PlanError, match=r"plan.tile.fused = 0; an exchange serves at least 1 layer"):
        over(1, 2, fused=0)
    assert over(2, 2, fused=3, hand_over="batch").describe_axes() == "rows 2 × columns 2 (batch, fused 3)"
    assert weft.Tile(2, 3).degree == 6


def test_a_tile_of_another_size() -> None:
    plan = over(1, 2)

    def rank(_: int) -> str:
        model = parallelize(images_for_tests.Classic(), plan, Mesh(plan), example=lambda: (torch.zeros(2, 3, 8, 8),))
        with pytest.raises(PlanError) as error:
            model(torch.zeros(2, 3, 8, 8))
        barrier()
        return str(error.value)

    assert run_local(rank, 2)[1] == (
        "Classic was given no tile of 8 × 4 pixels, which is what the rank at row 0 and column 1 holds of images of "
        "8 × 8; cut them with weft.tile(image, mesh)"
    )
    run_rows = Axis("rows", 3, 0, None, None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"tile.rows = 3, but the image has 2 rows"):
        tile(torch.zeros(1, 1, 2, 9), {"rows": run_rows, "columns": run_rows})  # type: ignore[arg-type]


# --- the full product


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("fused", [1, 3])
@pytest.mark.parametrize("grid", [*shared.GRIDS, (2, 4)])
@pytest.mark.parametrize("name", ["GroupNorm", "BatchNorm", "unet", "unet, upsampled"])
def test_full_product(name: str, grid: tuple[int, int], fused: int, recompute: Any) -> None:
    check(name, over(*grid, recompute, fused=fused)).require()
