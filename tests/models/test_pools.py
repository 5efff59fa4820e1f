"""Average pools whose gradient torch gets wrong, on GPUs (a CPU is told that it does) and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import weft.parallel.apply
from weft.mesh import Mesh
from weft.models.vision import pools
from weft.models.vision.pools import PoolWindow, avg_pool2d, fix_average_gradients, has_wrong_gradient
from weft.parallel.apply import parallelize
from weft.plan import Plan, Tile
from weft.spatial.tile_layout import Grid
from weft.spatial.view import View
from weft.strategy import Strategy
from weft.train.batches import as_on_gpus


def images(channels: int = 3) -> Tensor:
    made = torch.randn(2, channels, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return made.to(memory_format=torch.channels_last).requires_grad_()


def gradient(pool: Any, given: Tensor) -> tuple[Tensor, Tensor]:
    result = pool(given)
    draws = torch.randn(result.shape, dtype=result.dtype, generator=torch.Generator().manual_seed(1))
    return result, torch.autograd.grad(result, given, draws)[0]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "has_wrong_gradient", lambda images, padding: padding != 0)
    monkeypatch.setattr(pools, "has_triton", lambda: False)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("more", [(), (True,), (False, False), (False, True, 5)])
def test_a_copy_with_channels_first_has_the_gradient(more: tuple[Any, ...]) -> None:
    given, forms = images(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: forms.append(one.stride()) or one, lambda one: one):
        found = gradient(lambda one: avg_pool2d(one, 3, 2, 1, *more), given)
    expected = gradient(lambda one: F.avg_pool2d(one, 3, 2, 1, *more), given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert forms == [(3 * 8 * 7, 8 * 7, 7, 1)]
    assert found[0].is_contiguous(memory_format=torch.channels_last)


def test_names_of_arguments_are_torchs() -> None:
    told: dict[str, Any] = {"kernel_size": 3, "padding": 1, "count_include_pad": False}
    assert torch.equal(avg_pool2d(input=images(), **told), F.avg_pool2d(input=images(), **told))


def test_names_of_arguments_of_pools_by_kernel_are_torchs_too() -> None:
    images = torch.empty(2, 8, 6, 6)
    with pools.memory_of_kernel_pools():
        assert F.max_pool2d(input=images, kernel_size=2).shape == (2, 8, 3, 3)
        assert F.avg_pool2d(input=images, kernel_size=3, stride=1).shape == (2, 8, 4, 4)
        assert torch.max_pool2d(input=images, kernel_size=2).shape == (2, 8, 3, 3)


def test_padded_images_with_channels_last_on_gpus_are_concerned() -> None:
    assert not has_wrong_gradient(images(), 1)
    with FakeTensorMode():
        first = torch.empty(2, 3, 8, 7, device="cuda")
        last = first.to(memory_format=torch.channels_last)
        some = torch.empty_strided((2, 3, 7, 7), last.stride(), device="cuda")  # of them, not contiguous in any order
        assert [has_wrong_gradient(last, padding) for padding in (1, (0, 1), 0, (0, 0))] == [True, True, False, False]
        assert has_wrong_gradient(some, 1)
        assert not has_wrong_gradient(first, 1)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_modules_are_mended() -> None:
    model = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(2), nn.MaxPool2d(2, padding=1))
    names, given = list(model.state_dict()), images()
    expected = gradient(model, given)
    forms: list[tuple[int, ...]] = []
    fix_average_gradients(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: forms.append(one.stride()) or one, lambda one: one):
        found = gradient(model, given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert list(model.state_dict()) == names
    assert [form[1] for form in forms[:2]] == [8 * 7, 1]  # the padded one alone has channels first


class Pooled(nn.Module):
    def __init__(self, *settings: Any) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(*settings)

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.pool(F.hardtanh(images))
        return pooled


POOLS = {
    "small": ((3, 1, 1), True),
    "large": ((7, 1, 3), False),
    "over the edge": ((3, 2, 0, True), False),
    "over the edge, counted": ((3, 2, 1, True, False), True),
}


@pytest.mark.parametrize(("settings", "is_compiled"), POOLS.values(), ids=POOLS)
@pytest.mark.full(2)
def test_what_torchs_compiler_gets_right_is_compiled(settings: tuple[Any, ...], is_compiled: bool) -> None:
    functions: list[str] = []

    def noted(module: fx.GraphModule, _: Any) -> Any:
        functions.extend(getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    model, given = Pooled(*settings), images()
    expected = gradient(model, given)
    fix_average_gradients(model)
    found = gradient(torch.compile(model, backend=noted), given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert "hardtanh" in functions
    assert ("avg_pool2d" in functions) == is_compiled


def test_parallel_models_are_mended_when_all_else_is_done() -> None:
    plan, seen = Plan(), list[type]()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 1, 1))

    class Looks(Strategy):
        def apply(self, model: nn.Module, *rest: Any) -> nn.Module:
            seen.extend(type(module) for module in model.modules())
            return model

    *before, last = weft.parallel.apply.STRATEGIES
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weft.parallel.apply, "STRATEGIES", (*before, Looks(), last))
        parallelize(model, plan, Mesh(plan, "cpu"))
    assert nn.AvgPool2d in seen  # by which couples of convolutions are found
    assert isinstance(model[1], pools._FixedAveragePool)


def test_whole_images_behind_tiles_are_mended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[tuple[int, ...]] = []
    monkeypatch.setattr(pools, "has_wrong_gradient", lambda images, padding: forms.append(images.shape))
    mesh = Mesh(Plan(), "cpu")
    with View(Grid(mesh["rows"], mesh["columns"], mesh["tile"]), Tile()):
        found = F.avg_pool2d(images(), 3, stride=1, padding=1)
    assert torch.equal(found, F.avg_pool2d(images(), 3, 1, 1))
    assert forms == [(2, 3, 8, 7)]


def test_images_on_gpus_have_channels_last() -> None:
    tokens, labels, pixels = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 3, 4), torch.randn(2, 3, 4, 5)
    assert as_on_gpus(tokens) is tokens
    assert as_on_gpus(labels) is labels
    assert as_on_gpus(pixels).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(as_on_gpus(pixels), pixels)


def test_kernels_leave_images_alone_whose_pixels_have_no_number() -> None:
    """They count pixels in 32 bits; of results there may be more than of the image."""
    wide = PoolWindow.of(2, 1, 1)
    assert wide.fits(torch.empty(1, 8, 40000, 40000, device="meta"))
    assert not wide.fits(torch.empty(2, 8, 40000, 40000, device="meta"))
    assert 46340 * 46340 < 2**31 < 46341 * 46341
    assert not wide.fits(torch.empty(1, 8, 46340, 46340, device="meta"))
