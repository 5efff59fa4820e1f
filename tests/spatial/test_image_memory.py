"""Memory of models of images on a GPU, predicted as the run is: compiled but for tiles, with many layers in pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sampled_for_tests import one_in
from torch import Tensor, nn

import weft.compile.saved_bytes
from weft.cluster.hardware import Cluster, load, local_cluster
from weft.commands.run_planning import image_run
from weft.compile.saved_bytes import compiled_profile
from weft.data.formats import ImageShape
from weft.models.vision import AmoebaNetDConfig, ResNetConfig, VisionConfig
from weft.plan import Memory, Plan, Tile
from weft.planner.answer import planned
from weft.planner.image_model import COMPILED, IN_PIECES, planned_images, software_for_images
from weft.planner.predict import predict
from weft.planner.question import Question
from weft.profiling import profile
from weft.profiling.peak_bytes import peaks
from weft.profiling.software import Software

RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "images-h200.json").read_text())
SIDES: dict[str, tuple[bool | None, Memory]] = {  # what the run says of compiling, and of recompute
    "weft": (None, Memory()),
    "weft, not compiled": (False, Memory()),
    "weft, recomputed": (False, Memory("full")),
}
ROWS: dict[str, tuple[str, int, str, int]] = {
    f"{key} {side}": (key.split()[0], int(key.split()[1]), side, row[side]["peak_bytes"])
    for key, row in RESULTS.items()
    if isinstance(row, dict)
    for side in SIDES
    if "peak_bytes" in row.get(side, {})
}


@pytest.mark.parametrize(("name", "size", "side", "peak_bytes"), one_in(9, ROWS))
def test_what_was_measured_on_an_h200_is_predicted_within_4_percent(
    name: str, size: int, side: str, peak_bytes: int
) -> None:
    """`weft train` and `weft plan` say about the same: with recompute the planner has no trace of backward."""
    run, cluster = image_run(name, "h200:1x1", 1, size), load("h200:1x1")
    compiles, memory = SIDES[side]
    run = replace(run, plan=Plan(precision="bf16", memory=memory), train=replace(run.train, compile=compiles))
    found = predict(run, cluster).cost.memory_bytes
    assert found == pytest.approx(peak_bytes, rel=0.04)
    model = planned(run.model, cluster, Question(1, 1, "bf16", shape=ImageShape(size, size, 3), compiles=compiles))
    planner = model.held(Plan(micro_batch=1, precision="bf16", memory=memory), 1).tensor_bytes
    assert planner == pytest.approx(found, rel=0.01 if memory.recompute == "none" else 0.07)


def test_both_models_were_measured_as_they_are_run_unasked() -> None:
    assert {name for name, _, side, _ in ROWS.values() if side == "weft"} == {"resnet50", "amoebanet-d-18-208"}


class Pooled(nn.Module):
    """A block with a pool, of which torch.compile keeps the places of maxima in a byte each."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.norm, self.pool = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.pool(torch.relu(self.norm(self.convolve(images))))
        return pooled


def test_a_block_with_a_pool_is_traced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Pooled())
    found = profile(model, lambda: (torch.zeros(2, 3, 16, 16),), lambda out: out.sum())
    eager, kept = (one.blocks[1].saved_bytes for one in (found, compiled_profile(found)))
    pixels, pooled, statistics = 2 * 4 * 16 * 16, 2 * 4 * 8 * 8, 2 * 4 * 4
    assert eager is not None
    assert kept is not None
    assert kept["none"] == 2 * pixels * 4 + pooled + statistics  # its input, and the result of the convolution
    assert eager["none"] == 3 * pixels * 4 + pooled * 8 + statistics  # and that of the ReLU


def test_in_pieces_a_pool_holds_what_its_kernels_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.compile.saved_bytes, "MAX_LAYERS", 1)
    block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(3, 1, 1))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), block)
    found = profile(model, lambda: (torch.zeros(2, 3, 16, 16),), lambda out: out.sum())
    pixels = 2 * 8 * 16 * 16
    eager, kept = (one.blocks[1].saved_bytes for one in (found, compiled_profile(found)))
    assert eager is not None
    assert kept is not None
    assert eager["none"] == 2 * pixels * 4 + pixels * 8  # its input, the convolution's result and places of maxima
    assert kept["none"] == pixels * 4 + pixels
    whole, mine = (
        peaks(one, "none", lambda forward: forward).block_bytes["1"] for one in (found, compiled_profile(found))
    )
    assert whole - mine >= 7 * pixels


class Summed(nn.Module):
    """A block with a ReLU behind a norm, one behind a sum, one of its input alone and one of it that is padded."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.relu, self.norm, self.pad = nn.ReLU(inplace), nn.BatchNorm2d(8), nn.ZeroPad2d(1)
        self.convolve = nn.ModuleList(nn.Conv2d(8, 8, 1, bias=False) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        plain: Tensor = self.convolve[0](torch.relu(images))
        normed = self.convolve[1](self.relu(self.norm(plain)))
        summed = self.convolve[2](self.relu(normed + plain))
        padded: Tensor = self.convolve[3](self.pad(F.relu(images)))
        return summed.sum() + padded.sum()


@pytest.mark.parametrize("inplace", [False, True])
def test_in_pieces_masks_are_kept_of_relus_behind_no_norm(monkeypatch: pytest.MonkeyPatch, inplace: bool) -> None:
    monkeypatch.setattr(weft.compile.saved_bytes, "MAX_LAYERS", 1)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Summed(inplace))
    found = profile(model, lambda: (torch.zeros(2, 3, 16, 16),), lambda out: out)
    eager, kept = (one.blocks[1].saved_bytes for one in (found, compiled_profile(found)))
    assert eager is not None
    assert kept is not None
    assert kept["none"] - eager["none"] == 2 * (2 * 8 * 16 * 16)  # behind the sum, and before padding


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_in_pieces_a_run_with_recompute_is_predicted(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """Backward pools again as forward did. Nothing of a pool is kept till then, but it is there in its block's."""
    monkeypatch.setattr(weft.compile.saved_bytes, "MAX_LAYERS", 10)
    run, cluster = image_run("resnet50", "h200:1x1", 1, 64), load("h200:1x1")
    run = replace(run, model=AmoebaNetDConfig(layers=3, filters=32))
    run = replace(run, plan=replace(run.plan, memory=Memory(recompute)))  # type: ignore[arg-type]
    plain, mine = (
        predict(replace(run, train=replace(run.train, compile=told)), cluster).cost for told in (False, True)
    )
    assert mine.saved_bytes == plain.saved_bytes
    assert 0.5 * plain.transient_bytes < mine.transient_bytes < plain.transient_bytes


def test_what_a_run_compiles_is_predicted_as_compiled() -> None:
    cluster, shape = load("h200:1"), ImageShape(64, 64, 3)
    few, many = ResNetConfig(depth=18, width=8), AmoebaNetDConfig(filters=16)
    assert software_for_images(few, cluster) == COMPILED
    assert software_for_images(many, cluster) == software_for_images(many, cluster, True) == IN_PIECES
    assert software_for_images(many, local_cluster(1, on_cpu=True), True) == Software()
    assert software_for_images(many, cluster, False) == Software()
    assert software_for_images(few, cluster, False) == Software()
    assert software_for_images(few, local_cluster(1, on_cpu=True)) == Software()
    ours, plain = (planned_images(few, shape, "bf16", cluster, one).steps for one in (COMPILED, Software()))
    tiles, one = (Plan(tile=tile, micro_batch=1, precision="bf16") for tile in (Tile(2, 2), Tile()))
    assert ours.held(tiles, 1) == plain.held(tiles, 1)
    assert ours.step(tiles, 1).seconds == plain.step(tiles, 1).seconds
    assert ours.held(one, 1) != plain.held(one, 1)
    assert ours.step(one, 1).seconds < plain.step(one, 1).seconds


def test_a_run_of_many_different_layers_is_predicted_as_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, but for the pools; a CPU has no kernels for them."""
    cluster, size = load("h200:1x1"), 64
    run = image_run("resnet50", "h200:1x1", 1, size)

    def saved(model: VisionConfig, word: bool | None, where: Cluster = cluster) -> int:
        told = replace(run, model=model, train=replace(run.train, compile=word))
        return predict(told, where).cost.saved_bytes

    resnet, amoebanet = ResNetConfig(depth=18, width=8), AmoebaNetDConfig(layers=3, filters=32)
    assert saved(resnet, None) == saved(resnet, True) != saved(resnet, False)
    monkeypatch.setattr(weft.compile.saved_bytes, "MAX_LAYERS", 10)
    assert saved(resnet, None) == saved(resnet, True) != saved(resnet, False)
    uncompiled = saved(amoebanet, False)
    assert saved(amoebanet, None) == saved(amoebanet, True)
    assert saved(amoebanet, True, local_cluster(1, on_cpu=True)) == uncompiled
    assert 0.5 * uncompiled < saved(amoebanet, True) < 0.8 * uncompiled
    shape = ImageShape(size, size, 3)
    held = {
        software: planned_images(amoebanet, shape, run.plan.precision, cluster, software)
        .held(replace(run.plan, micro_batch=1), 1)
        .saved_bytes
        for software in (IN_PIECES, Software())
    }
    assert held[IN_PIECES] == pytest.approx(saved(amoebanet, True), rel=0.02)
    assert held[Software()] == pytest.approx(uncompiled, rel=0.02)
