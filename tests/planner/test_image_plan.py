"""Plans for models of images: sections against dry runs, convolutions by hand, stages, memory, the search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.cluster.hardware import load
from weft.commands.run_planning import image_run
from weft.data.config import ImageShape
from weft.errors import ConfigError, PlanError
from weft.models.catalog import load_model
from weft.models.vision import AmoebaNetDConfig, ResNetConfig, UNetConfig
from weft.parallel.apply import cost
from weft.plan import Branch, Memory, Pipe, Plan, Tile, split_batch
from weft.planner.image_chain import chain
from weft.planner.image_model import COMPILED, ImageModel, planned_images
from weft.planner.image_step import balanced
from weft.planner.kernels import LAUNCH_SECONDS, MEMORY_SHARE, Kernels
from weft.planner.question import Question, parse_constraints
from weft.planner.search import search
from weft.planner.step import on_rank
from weft.profiling import Profile, profile
from weft.profiling.software import Software
from weft.profiling.workload import Filter
from weft.spatial.dry_run import dry_run

SIZE = 512
SMALL = ResNetConfig(depth=10, width=16)
V100 = load("lassen").node.device


@cache
def small(cluster: str = "lassen:2", norm: Any = "batch") -> ImageModel:
    return planned_images(replace(SMALL, norm=norm), ImageShape(SIZE, SIZE, 3), "fp32", load(cluster))


@cache
def of_four() -> Profile:
    """Four images at once, for hand-overs to shares of the batch."""
    model = small().profile.model
    assert model is not None
    return profile(model, lambda: (torch.zeros(4, 3, SIZE, SIZE),), None, torch.float32)


# --- sections


@pytest.mark.parametrize(
    ("tile", "within"),  # rows send corners along, which weigh more on the small tiles of the reference
    [
        (Tile(2, 2), 0.12),
        (Tile(1, 4), 0.02),
        (Tile(4, 2), 0.12),
        (Tile(2, 2, fused=2), 0.3),
        (Tile(2, 2, until="layer3"), 0.07),
        (Tile(2, 2, until="layer3", hand_over="batch"), 0.07),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
@pytest.mark.full(2)
def test_sections_of_any_grid_are_near_its_dry_run(tile: Tile, within: float) -> None:
    whole, count = (of_four(), 4) if tile.hand_over == "batch" else (small().profile, 1)
    dry = dry_run(whole, Plan(tile=tile), {"rows": tile.rows // 2, "columns": tile.columns // 2})
    sections = small().steps.sections.under(tile)
    assert sum(s.part.flops * s.images for s in sections) * count == pytest.approx(dry.profile.flops, rel=0.01)
    for kind in ("none", "selective", "full"):
        saved = sum((block.saved_bytes or {})[kind] for block in dry.profile.all)
        assert sum(s.saved_bytes[kind] * s.images for s in sections) * count == pytest.approx(
            saved, rel=max(0.06, within)
        )
    sent, said = Counter[str](), Counter[str]()
    times, calls = Counter[str](), Counter[str]()
    for axis, operation, num_bytes in (one.call for one in dry.calls):
        if operation == "send":
            sent[axis] += num_bytes
            calls[axis] += 1
    for call in (call for section in sections for call in section.part.tile_calls if call.operation == "send"):
        said[call.axis] += call.num_bytes * call.times * count  # type: ignore[assignment]
        times[call.axis] += call.times  # type: ignore[assignment]
    assert said == pytest.approx(sent, rel=within)
    assert times == pytest.approx(calls, abs=1)


def test_activations_are_a_share_and_the_halo() -> None:
    for tile in (Tile(2, 2), Tile(4, 4), Tile(1, 8)):
        sections = small().steps.sections
        one, whole = (sum(s.saved_bytes["none"] for s in each) for each in (sections.under(tile), sections.whole))
        assert whole / tile.degree < one < whole / tile.degree * 1.1


def test_the_chain_has_all_of_the_model() -> None:
    found = small().profile
    parts = chain(found)
    assert [block.name for block in parts[1:-1]] == [block.name for block in found.blocks]
    assert sum(block.numel for block in parts) == found.numel
    assert sum(section.part.flops for section in small().steps.sections.whole) == found.flops
    for kind in ("none", "full"):
        saved = sum((block.saved_bytes or {})[kind] for block in found.all)
        assert sum(section.saved_bytes[kind] for section in small().steps.sections.whole) == saved


def test_hand_over_points_are_where_images_get_smaller() -> None:
    assert small().steps.sections.points == ("layer2.0", "layer3.0", "layer4.0")


@pytest.mark.soak
def test_blocks_of_two_streams_are_handed_over_with_both() -> None:
    # Each cell of AmoebaNet takes the results of the two before it.
    model = planned_images(AmoebaNetDConfig(layers=3, filters=16), ImageShape(128, 128, 3), "fp32", load("lassen"))
    sections, tile = model.steps.sections, Tile(2, 2, "cells.3")
    assert sections.points == ("cells.0", "cells.1", "cells.3", "cells.5")
    at = sections.handed_over_at(tile)
    told = sections.under(tile)[at].part.tile_calls
    dry = dry_run(model.profile, Plan(tile=tile), {"rows": 0, "columns": 0})
    said = [one.call for one in dry.calls if not one.block and one.call[1] == "send"]
    assert sum(call.num_bytes * call.times for call in told) == sum(num_bytes for _, _, num_bytes in said)
    assert sum(call.times for call in told) == len(said) == 8  # two tensors along two axes, both ways


def test_a_skip_of_larger_images_leaves_no_point() -> None:
    model = planned_images(UNetConfig(depth=2, width=4), ImageShape(64, 64, 3), "fp32", load("lassen"))
    assert model.steps.sections.points == ()
    found = search(model, Question(1, 1, "fp32", parse_constraints(["until=down.1"]), ImageShape(64, 64, 3)))
    assert not found.best
    words = (
        "behind a hand-over before 'down.1', block 'up.1' takes larger images from before it, which are in tiles, so "
        "all that follows is in tiles again; use until = '' (tiles to the end)"
    )
    assert ("tile.until", words) in found.refused


def test_images_smaller_than_the_grid_are_handed_over() -> None:
    sections = small().steps.sections
    assert sections.handed_over_at(Tile(1, 16)) == len(sections.whole)
    at = sections.handed_over_at(Tile(1, 32))  # layer4 has 16 × 16 pixels
    assert sections.whole[at].name == "layer4.0"
    assert sections.under(Tile(1, 32))[at].part.flops == sections.whole[at].part.flops


# --- convolutions


def test_a_large_convolution_is_near_the_peak_and_a_thin_one_at_memory() -> None:
    kernels = Kernels(V100, Software(), "fp32")
    wide = Filter(128 * 128, 128 * 128, 512, 512, 9)
    forward, backward = kernels.convolution(wide, 8)
    best = 8 * wide.flops / (15.7e12 * V100.calibration)
    assert best < forward < 1.1 * best
    assert 2 * best < backward < 2.3 * best
    thin, half = Filter(1024.0 * 1024, 1024.0 * 1024, 64, 64, 1), Kernels(V100, Software(), "bf16")
    num_bytes = 2 * (2 * 64 * 1024 * 1024 + 64 * 64)
    assert half.convolution(thin, 1)[0] == pytest.approx(num_bytes / (900e9 * MEMORY_SHARE) + LAUNCH_SECONDS)
    assert kernels.convolution(wide._replace(needs_gradient=False), 8)[1] < 0.6 * backward


def test_convolutions_of_one_channel_are_bound_by_memory() -> None:
    kernels, one = Kernels(V100, Software(), "fp32"), Filter(256.0 * 256, 256.0 * 256, 1, 1, 9, 256)
    num_bytes = 4 * 256 * (2 * 256 * 256 + 9)
    assert kernels.convolution(one, 1)[0] == pytest.approx(num_bytes / (900e9 * MEMORY_SHARE) + LAUNCH_SECONDS)


@pytest.mark.parametrize(("size", "seconds"), [(4096, 0.0755), (8192, 0.2751)])
@pytest.mark.sampled(2)
def test_resnet50_on_one_h200_as_measured(size: int, seconds: float) -> None:
    # benchmarks/results/images-h200.json; nothing is fitted to it.
    model = planned_images(load_model("resnet50"), ImageShape(size, size, 3), "bf16", load("h200:1x1"))  # type: ignore[arg-type]
    assert model.steps.step(Plan(micro_batch=1, precision="bf16"), 1).seconds == pytest.approx(seconds, rel=0.2)


# --- steps


@given(st.lists(st.floats(0.01, 10), min_size=4, max_size=14), st.integers(1, 4))
def test_balanced_stages_are_the_best(seconds: list[float], num_stages: int) -> None:
    if num_stages > len(seconds) - 2:
        with pytest.raises(PlanError, match="stages need as many blocks"):
            balanced(seconds, num_stages)
        return
    groups = balanced(seconds, num_stages)
    assert [groups[0][0], groups[-1][1]] == [0, len(seconds)]
    assert all(one[1] == other[0] for one, other in pairwise(groups))
    assert all(begin < end for begin, end in groups)
    longest = max(sum(seconds[begin:end]) for begin, end in groups)

    def best(start: int, left: int) -> float:
        if left == 1:
            return sum(seconds[start:])
        stops = range(max(start + 1, 2), len(seconds) - left + 1)
        return min(max(sum(seconds[start:stop]), best(stop, left - 1)) for stop in stops)

    assert longest == pytest.approx(best(0, num_stages), rel=1e-9)


def test_mirrored_replicas_hold_two_stages_and_wait_less() -> None:
    assert on_rank(Pipe(4, "bidirectional"), 1) == [(1, 0.5), (2, 0.5)]
    assert on_rank(Pipe(2, "interleaved", chunks=2), 1) == [(1, 1.0), (3, 1.0)]
    plain, both = (Plan(pipe=Pipe(4, name), micro_batch=1) for name in ("1f1b", "bidirectional"))  # type: ignore[arg-type]
    one, other = (small().steps.step(plan, 4) for plan in (plain, both))
    assert other.where["bubble"] < one.where["bubble"]
    assert sum(other.where.values()) == pytest.approx(other.seconds)
    held = [small().held(plan, 4).parameters_bytes for plan in (plain, both)]
    assert held[1] > held[0]


def test_memory_is_near_what_the_strategies_state() -> None:
    found = small().profile
    for tile, recompute in ((Tile(), "none"), (Tile(2, 2), "none"), (Tile(2, 2), "full")):
        plan = Plan(tile=tile, micro_batch=1, memory=Memory(recompute))  # type: ignore[arg-type]
        stated = cost(found, plan, split_batch(plan, 1, 1, "images"))
        held = small().held(plan, 1)
        assert held.state_bytes == pytest.approx(sum(stated.state_bytes.values()), rel=0.01)
        assert held.saved_bytes == pytest.approx(stated.saved_bytes, rel=0.02)


# --- the search


def test_what_runs_under_the_view_is_priced_uncompiled() -> None:
    compiled = planned_images(SMALL, ImageShape(SIZE, SIZE, 3), "fp32", load("lassen:2"), COMPILED)
    plan = Plan(data=2, statistics="batch", micro_batch=1)
    for is_equal, one in ((True, plan), (False, replace(plan, statistics="rank", exact=False))):
        times = {model.steps.step(one, 1).seconds for model in (compiled, small())}
        held = {model.held(one, 1).saved_bytes for model in (compiled, small())}
        assert (len(times) == 1, len(held) == 1) == (is_equal, is_equal)


def test_the_best_grid_and_hand_over_are_found() -> None:
    question = Question(8, 1, "fp32", parse_constraints(["no pipe"]), ImageShape(SIZE, SIZE, 3))
    found = search(small(), question)
    best = found.best[0]
    assert best.plan.tile.degree == 8  # batch norm forbids data
    assert best.plan.tile.hand_over == "batch"
    same = [Plan(tile=Tile(*grid), micro_batch=8) for grid in ((1, 8), (2, 4), (8, 1))]
    assert best.seconds < min(small().steps.step(plan, 1).seconds for plan in same)
    assert [one.seconds for one in found.best] == sorted(one.seconds for one in found.best)
    assert any("statistics over the batch" in reason for _, reason in found.refused)


def test_data_is_allowed_with_other_norms_or_if_asked() -> None:
    question = Question(8, 1, "fp32", parse_constraints(["data=8"]), ImageShape(SIZE, SIZE, 3))
    assert not search(small(), question).best
    assert search(small(), replace(question, exact=False)).best[0].plan.exact is False
    assert search(small(norm="group"), question).best[0].plan.data == 8


def test_data_is_allowed_with_statistics_over_the_batch() -> None:
    asked = parse_constraints(["data=8", "rows=1", "columns=1"])
    question = Question(8, 1, "fp32", asked, ImageShape(SIZE, SIZE, 3))
    refused = search(small(), question)
    assert not refused.best
    assert any("--where statistics=batch" in reason for _, reason in refused.refused)
    over_all = replace(question, constraints=(*asked, *parse_constraints(["statistics=batch"])))
    assert search(small(), over_all).best[0].plan.statistics == "batch"


def test_branches_are_searched() -> None:
    """The shortcuts of a ResNet are branches beside its longest convolutions: ranks cannot share them evenly."""
    shape = ImageShape(SIZE, SIZE, 3)
    wanted = parse_constraints(["branch=2", "no tile", "no pipe", "recompute=none"])
    found = search(small(norm="group"), Question(8, 1, "fp32", wanted, shape)).best
    assert {one.plan.branch for one in found} == {Branch(2), Branch(2, "split")}
    for one in found:
        assert one.step is not None
        assert sum(one.step.where.values()) == pytest.approx(one.seconds)
        assert one.step.where["branch"] > 0
    split = next(one for one in found if one.plan.branch.splits_batch)
    alone = small(norm="group").steps.step(replace(split.plan, branch=Branch()), split.num_micro_batches)
    assert alone.where["compute"] < split.step.where["compute"] < 2 * alone.where["compute"]  # type: ignore[union-attr]
    refused = search(small(norm="group"), Question(8, 1, "fp32", parse_constraints(["branch=8", "no tile"]), shape))
    assert any("branches for 2 ranks only" in reason for _, reason in refused.refused)


def test_branches_are_searched_beside_pipe_and_recompute() -> None:
    wanted = parse_constraints(["branch=2", "pipe=2", "recompute=full", "no tile"])
    found = search(small(norm="group"), Question(8, 1, "fp32", wanted, ImageShape(SIZE, SIZE, 3))).best
    assert {one.plan.branch for one in found} == {Branch(2), Branch(2, "split")}
    for one in found:
        assert one.plan.pipe.degree == 2
        assert one.plan.memory.recompute == "full"
        assert one.step is not None
        kept = replace(one.plan, memory=Memory())
        steps = small(norm="group").steps
        assert (
            steps.step(kept, one.num_micro_batches).where["branch"] < one.step.where["branch"]
        )  # it communicates once


def test_the_state_of_branches_is_near_what_the_strategies_state() -> None:
    model = small(norm="group")
    for batch in ("same", "split"):
        plan = Plan(branch=Branch(2, batch), micro_batch=1)  # type: ignore[arg-type]
        places = [{**dict.fromkeys(plan.degrees, 0), "branch": index} for index in range(2)]
        samples = split_batch(plan, plan.num_batch_ranks, 1, "images")
        stated = max(sum(cost(model.profile, plan, samples, at).state_bytes.values()) for at in places)
        assert model.held(plan, 1).state_bytes == pytest.approx(stated, rel=0.02)


@pytest.mark.soak
def test_branches_beat_data_parallelism_where_images_are_few() -> None:
    """Few small images: a device takes nearly as long for one as for two, so that splitting them gains nothing."""
    shape, config = ImageShape(64, 64, 3), AmoebaNetDConfig(layers=3, filters=64)
    model = planned_images(config, shape, "bf16", load("h100:1x2"))
    question = Question(8, 1, constraints=parse_constraints(["no tile", "no pipe"]), shape=shape, exact=False)
    best = search(model, question).best
    others = [one.seconds for one in best if one.plan.branch.degree == 1]
    assert best[0].plan.branch == Branch(2)
    assert best[0].seconds < 0.9 * min(others)


def test_constraints_on_tiles() -> None:
    wanted = parse_constraints(["tile=4", "rows=2", "fused=1", "until=layer3.0"])
    found = search(small(), Question(8, 1, "fp32", wanted, ImageShape(SIZE, SIZE, 3), exact=False)).best
    assert {(one.plan.tile.rows, one.plan.tile.columns, one.plan.tile.fused) for one in found} == {(2, 2, 1)}
    assert {one.plan.tile.until for one in found} == {"layer3.0"}
    question = Question(8, 1, "fp32", parse_constraints(["no tile"]), ImageShape(SIZE, SIZE, 3))
    none = search(small().on(load("lassen:1")), question).best  # four devices, as there are blocks
    assert none
    assert all(one.plan.tile.degree == 1 and one.plan.pipe.degree == 4 for one in none)
    assert all(len(one.plan.pipe.split) == 3 for one in none)


def test_an_image_too_large_for_one_device_is_tiled() -> None:
    model = planned_images(SMALL, ImageShape(SIZE, SIZE, 3), "fp32", load("lassen:1"))
    device = replace(model.cluster.node.device, memory_bytes=int(model.held(Plan(micro_batch=1), 1).total_bytes))
    node = replace(model.cluster.node, device=replace(device, memory_bytes=device.memory_bytes - 10_000_000))
    tight = model.on(replace(model.cluster, node=node))
    best = search(
        tight, Question(1, 1, "fp32", parse_constraints(["no recompute", "no pipe"]), ImageShape(SIZE, SIZE, 3))
    ).best
    assert best
    assert all(one.plan.tile.degree == 4 for one in best)


def test_words() -> None:
    run = image_run("resnet50", "lassen:1", 8, 2048)
    assert run.split.batch == 8
    with pytest.raises(ConfigError, match="--model llama3-8b is of language; give --tokens-per-step"):
        image_run("llama3-8b", "lassen:1", 8, 2048)
    with pytest.raises(ConfigError, match="--size 100 is no multiple of 32"):
        image_run("amoebanet-d-18-208", "lassen:1", 8, 100)
    assert Question(1, 1, shape=ImageShape(64, 32, 3)).describe() == "1 image of 64 × 32 pixels"
