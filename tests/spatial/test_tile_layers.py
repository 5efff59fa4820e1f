"""Layers on tiles against the whole image in float64: ownership, every kind of layer, random geometry."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiles_for_tests import GRIDS, Case, compare_all
from torch import Tensor, nn

from weft.inspection.parameter_cut import Interval, share
from weft.spatial import overlap
from weft.spatial.ownership import Line, SlidingWindow, inside, length, meet, transfers

pytestmark = pytest.mark.processes

TOLERANCE = 1e-12

# --- pure arithmetic


@given(st.integers(1, 60), st.integers(1, 8), st.data())
def test_every_rank_gets_what_it_needs_from_its_owner(size: int, degree: int, data: st.DataObject) -> None:
    extra = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    line = Line.of(size, degree, extra)
    bounds = st.tuples(st.integers(-9, size + 9), st.integers(0, 20)).map(lambda one: (one[0], one[0] + one[1]))
    needs = [data.draw(bounds) for _ in range(degree)]
    all_moves = [transfers(line, needs, index) for index in range(degree)]
    for index, one in enumerate(all_moves):
        has = set(range(*line.held[index]))
        for peer, pixels in one.receives:
            assert (index, pixels) in all_moves[peer].sends
            assert inside(pixels, line.owned[peer])
            assert not has & set(range(*pixels))
            has |= set(range(*pixels))
        assert set(range(*needs[index])) & set(range(size)) <= has
        assert len({peer for peer, _ in one.receives}) == len(one.receives)
    assert sum(len(one.sends) for one in all_moves) == sum(len(one.receives) for one in all_moves)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_outputs_are_counted_as_torch_does(
    size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool
) -> None:
    window = SlidingWindow(kernel, stride, pad, pad, dilation)
    if pad > kernel // 2 or size + 2 * pad < window.reach:
        return
    pooled = F.max_pool1d(torch.zeros(1, 1, size), kernel, stride, pad, dilation, ceil_mode=ceil)
    assert window.num_outputs(size, ceil) == pooled.shape[-1]


@pytest.mark.parametrize(
    ("window", "low", "high"),
    [
        (SlidingWindow(3, 1, 1, 1), 1, 1),
        (SlidingWindow(3, 2, 1, 1), 1, 0),
        (SlidingWindow(2, 2), 0, 0),
        (SlidingWindow(7, 2, 3, 3), 3, 2),
        (SlidingWindow(5, 1, 4, 4, 2), 4, 4),
    ],
)
def test_halos_of_sizes_that_divide(window: SlidingWindow, low: int, high: int) -> None:
    line, index = Line.of(64, 4), 1
    owned = share(window.num_outputs(64), 4, index)
    begin, end = window.needs(owned)
    assert (line.owned[index][0] - begin, max(0, end - line.owned[index][1])) == (low, high)


def test_a_thin_tile_asks_further_ones() -> None:
    line = Line.of(8, 8)
    assert [peer for peer, _ in transfers(line, [(i - 3, i + 4) for i in range(8)], 4).receives] == [1, 2, 3, 5, 6, 7]


def test_intervals() -> None:
    def check(left: Interval, right: Interval, common: Interval) -> None:
        assert meet(left, right) == common
        assert length(common) == len(set(range(*left)) & set(range(*right)))

    check((0, 4), (2, 9), (2, 4))
    check((0, 2), (5, 9), (5, 5))


# --- each kind of layer


class Call(nn.Module):
    """A function behind a convolution, whose weights see what it does to gradients."""

    def __init__(self, function: Any, width: int = 4) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, width, 1), function

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.function(self.first(value))
        return out


class Draw(nn.Module):
    """All pixels from negative ones: a pool that fills with zero shows."""

    def forward(self, value: Tensor) -> Tensor:
        return F.max_pool2d(-value.abs() - 1, 3, 2, 1)


S = nn.Sequential
KINDS: dict[str, Case] = {
    "chain": (
        lambda: S(
            *(nn.Conv2d(3, 4, 5, dilation=2, padding=4), nn.Tanh(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.AvgPool2d(2)),
        ),
        (2, 3, 33, 34),
    ),
    "conv 1×7, 7×1": (lambda: S(nn.Conv2d(3, 4, (1, 7), padding=(0, 3)), nn.Conv2d(4, 2, (7, 1))), (2, 3, 12, 13)),
    "conv same, even": (lambda: nn.Conv2d(3, 4, (4, 2), padding="same", dilation=(1, 3)), (2, 3, 9, 10)),
    "conv 3-D": (
        lambda: S(nn.Conv3d(3, 4, 3, stride=(1, 2, 1), padding=1), nn.Conv3d(4, 2, 2, padding="same")),
        (2, 3, 4, 9, 8),
    ),
    "pools 3-D": (
        lambda: S(nn.Conv3d(3, 4, 1), nn.MaxPool3d(3, 2, 1, ceil_mode=True), nn.AvgPool3d(2, 1, 1)),
        (1, 3, 5, 11, 12),
    ),
    "transposed 3-D": (lambda: nn.ConvTranspose3d(3, 2, 3, stride=2, padding=1, output_padding=1), (1, 3, 3, 5, 6)),
    "max of negatives": (Draw, (2, 3, 9, 11)),
    "pools, ceil": (
        lambda: Call(lambda v: F.avg_pool2d(F.max_pool2d(v, 3, 2, 1, ceil_mode=True), 2, 2, 1, True, False)),
        (2, 3, 13, 14),
    ),
    "avg, counted pad": (
        lambda: S(nn.AvgPool2d(3, 2, 1, count_include_pad=True, ceil_mode=True), nn.Conv2d(3, 2, 1)),
        (2, 3, 12, 14),
    ),
    "avg, divisor": (lambda: Call(lambda v: F.avg_pool2d(v, 3, 1, 1, divisor_override=4)), (2, 3, 8, 9)),
    "BatchNorm": (lambda: S(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), (3, 3, 11, 13)),
    "BatchNorm, cumulative": (
        lambda: S(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None, affine=False)),
        (3, 3, 11, 13),
    ),
    "BatchNorm 3-D": (lambda: S(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4)), (2, 3, 3, 6, 5)),
    "GroupNorm": (lambda: S(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)), (3, 3, 10, 9)),
    "InstanceNorm": (
        lambda: S(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        (3, 3, 10, 9),
    ),
    "LayerNorm over space": (lambda: S(nn.Conv2d(3, 4, 3), nn.LayerNorm([4, 8, 7])), (3, 3, 10, 9)),
    "norms, evaluated": (
        lambda: S(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)).eval(),
        (3, 3, 10, 9),
    ),
    "global pool": (
        lambda: S(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
        (2, 3, 9, 8),
    ),
    "adaptive, even": (
        lambda: S(nn.Conv2d(3, 4, 1), nn.AdaptiveMaxPool2d((6, 4)), nn.AdaptiveAvgPool2d((6, None))),
        (2, 3, 12, 8),
    ),
    "adaptive, uneven": (lambda: S(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d((7, 5))), (2, 3, 11, 13)),
    "few outputs": (lambda: S(nn.Conv2d(3, 4, 1), nn.AdaptiveMaxPool2d(1), nn.Conv2d(4, 2, 1)), (2, 3, 9, 8)),
    "nearest": (
        lambda: S(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=(1.7, 2.3)), nn.Upsample(size=(9, 31))),
        (2, 3, 8, 9),
    ),
    "nearest-exact": (lambda: S(nn.Conv2d(3, 4, 1), nn.Upsample(size=(13, 11), mode="nearest-exact")), (2, 3, 8, 9)),
    "bilinear": (
        lambda: S(
            nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=1.6, mode="bilinear"), nn.UpsamplingBilinear2d(size=(7, 9))
        ),
        (2, 3, 8, 9),
    ),
    "trilinear": (
        lambda: S(nn.Conv3d(3, 2, 1), nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True)),
        (1, 3, 2, 5, 6),
    ),
    "area": (lambda: Call(lambda v: F.interpolate(v, size=(5, 4), mode="area")), (2, 3, 10, 9)),
    "pad, crop": (
        lambda: Call(lambda v: F.pad(v, (1, -2, 3, 0, 1, 1), value=0.5)[:, 1:, ::2, 2:-1] * 2),
        (2, 3, 9, 12),
    ),
    "shuffles": (
        lambda: S(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 2, 3, padding=1), nn.PixelUnshuffle(3)),
        (2, 3, 12, 9),
    ),
    "flatten": (lambda: S(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)), (2, 3, 10, 10)),
    "reductions": (
        lambda: Call(lambda v: v.sum((0, 2, 3), keepdim=True) * v.mean((-1, -2))[..., None, None] + v.amax(1, True)),
        (2, 3, 7, 6),
    ),
    "dims": (
        lambda: Call(
            lambda v: (
                torch.stack(v.unbind(1), -1).movedim(-1, 0).transpose(0, 1).unsqueeze(0).squeeze(0).softmax(1).flip(1)
            )
        ),
        (2, 3, 6, 7),
    ),
    "operands": (
        lambda: Call(
            lambda v: torch.where(v > 0, v * torch.ones_like(v), v * torch.arange(6.0)[:, None]) + torch.arange(7.0)
        ),
        (2, 3, 6, 7),
    ),
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2)])
def test_each_kind_of_layer(grid: tuple[int, int]) -> None:
    for name, found in zip(KINDS, compare_all(list(KINDS.values()), grid), strict=True):
        assert found["forward"] <= 1e-14, (name, found)
        assert found["gradient"] <= TOLERANCE, (name, found)
        assert found["buffer"] <= TOLERANCE, (name, found)


def test_a_plain_convolution_is_the_same_to_the_bit() -> None:
    cases = [KINDS[name] for name in ("chain", "conv 1×7, 7×1", "conv same, even", "max of negatives")]
    assert [found["forward"] for found in compare_all(cases, (2, 2))] == [0.0] * len(cases)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (4, 1)])
def test_inner_outputs_while_halos_travel(monkeypatch: pytest.MonkeyPatch, grid: tuple[int, int]) -> None:
    monkeypatch.setattr(overlap, "WORTH_FLOPS", 0)
    monkeypatch.setattr(overlap, "WORTH_SHARE", 0.01)
    geometries: list[dict[str, Any]] = [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (5, 4), "padding": (1, 3), "stride": (2, 1), "groups": 2},
        {"kernel_size": (3, 2), "padding": (4, 2), "dilation": (2, 2), "bias": False},
        {"kernel_size": 4, "padding": "same", "dilation": (1, 2)},
    ]
    cases: list[Case] = [(partial(build, "conv", options), (2, 4, 33, 29)) for options in geometries]
    cases.append((lambda: nn.Conv3d(3, 2, 3, padding=1), (1, 3, 3, 17, 19)))
    for case, found in zip(cases, compare_all(cases, grid), strict=True):
        assert found["forward"] <= 1e-14, (case, found)
        assert found["gradient"] <= TOLERANCE, (case, found)


@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(0, 4), st.integers(1, 2), st.integers(20, 60), st.integers(0, 3)
)
def test_inner_outputs_and_strips_are_all(k: int, stride: int, pad: int, dilation: int, size: int, index: int) -> None:
    window, line = SlidingWindow(k, stride, pad, pad, dilation), Line.of(size, 4)
    outputs, held = share(window.num_outputs(size), 4, index), line.held[index]
    need = window.needs(outputs)
    plan = overlap.plan_overlap([window] * 2, [False] * 2, (outputs,) * 2, (held,) * 2, (need,) * 2, 10**15)
    if plan is None:
        return
    assert inside(window.needs(plan.inner[0]), held)
    regions = [plan.inner, *plan.strips]
    pixels = [(row, column) for rows, columns in regions for row in range(*rows) for column in range(*columns)]
    assert len(set(pixels)) == len(pixels) == length(outputs) ** 2


def test_small_convolutions_do_not_overlap() -> None:
    around = ((4, 8), (4, 8)), ((4, 8), (4, 8)), ((3, 9), (3, 9))
    windows = [SlidingWindow(3, 1, 1, 1)] * 2
    assert overlap.plan_overlap(windows, [False] * 2, *around, 10**15) is None  # a quarter is inner
    wide = ((40, 80), (40, 80)), ((40, 80), (40, 80)), ((39, 81), (39, 81))
    assert overlap.plan_overlap(windows, [False] * 2, *wide, 10**9) is None
    found = overlap.plan_overlap(windows, [False] * 2, *wide, 10**11)
    assert found is not None
    assert found.inner == ((41, 79), (41, 79))
    assert len(found.strips) == 4


def test_hand_over_of_layers() -> None:
    names = ("chain", "global pool", "few outputs", "flatten")
    assert [one["lies"] for one in compare_all([KINDS[name] for name in names], (1, 2))] == ["tile"] + ["whole"] * 3


# --- random geometry

small = st.integers(1, 3)


@st.composite
def geometry(draw: st.DrawFn) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    """A layer that fits an image, and the image."""
    kind = draw(st.sampled_from(["conv", "conv", "conv", "transposed", "max", "average", "interpolate", "adaptive"]))
    size = draw(st.tuples(st.integers(6, 20), st.integers(6, 20)))
    pair = st.tuples
    options: dict[str, Any] = {}
    if kind in ("conv", "transposed"):
        kernel = draw(pair(st.integers(1, 5), st.integers(1, 5)))
        dilation, stride = draw(pair(small, small)), draw(pair(small, small))
        pads = [draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True)]
        options = {"kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": tuple(pads)}
        options |= {"groups": draw(st.sampled_from([1, 2])), "bias": draw(st.booleans())}
        if kind == "transposed":
            options["output_padding"] = tuple(
                draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
            )
    elif kind in ("max", "average"):
        kernel = draw(pair(st.integers(1, 4), st.integers(1, 4)))
        options = {"kernel_size": kernel, "stride": draw(pair(small, small)), "ceil_mode": draw(st.booleans())}
        options["padding"] = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        if kind == "average":
            options["count_include_pad"] = draw(st.booleans())
        else:
            options["dilation"] = draw(pair(st.integers(1, 2), st.integers(1, 2)))
    else:
        options = {"size": draw(pair(st.integers(1, 30), st.integers(1, 30)))}
        if kind == "interpolate":
            options["mode"] = draw(st.sampled_from(["nearest", "nearest-exact", "bilinear"]))
            options["align_corners"] = draw(st.booleans()) if options["mode"] == "bilinear" else None
    return kind, options, (2, 4, *size)


def build(kind: str, options: dict[str, Any]) -> nn.Module:
    """The layer between two pointwise ones."""
    makers: dict[str, Any] = {"conv": partial(nn.Conv2d, 4, 2), "transposed": partial(nn.ConvTranspose2d, 4, 2)}
    makers |= {"max": nn.MaxPool2d, "average": nn.AvgPool2d, "interpolate": nn.Upsample}
    if kind == "adaptive":
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(options["size"]))
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), makers[kind](**options))


def runs(case: tuple[str, dict[str, Any], tuple[int, ...]]) -> bool:
    try:
        return build(*case[:2])(torch.zeros(case[2])).numel() > 0
    except RuntimeError:  # an image too small for the kernel
        return False


def check_geometry(drawn: list[Any], grid: tuple[int, int]) -> None:
    cases: list[Case] = [(partial(build, kind, options), shape) for kind, options, shape in drawn]
    for case, found in zip(drawn, compare_all(cases, grid), strict=True):
        assert found["forward"] <= 1e-14, (case, found)
        assert found["gradient"] <= TOLERANCE, (case, found)


@pytest.mark.parametrize("grid", GRIDS)
@settings(max_examples=3)
@given(drawn=st.lists(geometry().filter(runs), min_size=12, max_size=12))
def test_random_geometry(grid: tuple[int, int], drawn: list[Any]) -> None:
    check_geometry(drawn, grid)


@pytest.mark.soak
@pytest.mark.parametrize("grid", [*GRIDS, (2, 4), (3, 2), (1, 5)])
@settings(max_examples=50)
@given(drawn=st.lists(geometry().filter(runs), min_size=12, max_size=12))
def test_random_geometry_for_long(grid: tuple[int, int], drawn: list[Any]) -> None:
    check_geometry(drawn, grid)
