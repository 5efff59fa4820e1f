"""Blocks compiled in pieces compute what they compute uncompiled, and alike pieces are compiled once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import weft.compile.pieces
import weft.compile.saved_bytes
from weft.compile.blocks import compile_blocks
from weft.compile.pieces import PieceCompiler, is_cut, keeps_order, split_into_units
from weft.inspection.blocks import find_blocks
from weft.inspection.torch_patches import kernels_at_once
from weft.models import build
from weft.models.catalog import load_model
from weft.models.vision.amoebanet import Cell
from weft.models.vision.pools import fix_average_gradients, memory_only_pools
from weft.profiling.saved_in_pieces import as_in_pieces


class Branches(nn.Module):
    """Convolutions and a pool, with norms, sums and a ReLU in place between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(channels, channels, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        one = self.relu(self.norms[0](self.first(images)))
        two = self.relu(self.norms[1](self.second(one)))
        three: Tensor = self.norms[2](self.third(two)) + self.pool(one)
        return torch.relu(three) + images


def chain(*channels: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), *(Branches(size) for size in channels)).double()


def images(channels: int = 3) -> Tensor:
    made = torch.randn(1, channels, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    return made.to(memory_format=torch.channels_last)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Result and gradients of a second step, running statistics, and what evaluation gives after it."""
    for _ in range(2):
        out = model(images())
        out.square().sum().backward()
    found = {"out": out, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
    model.eval()
    with torch.no_grad():
        found["evaluation"] = model(images())
    return {**found, **dict(model.named_buffers())}


CODES: list[str] = []


def counted(graph: fx.GraphModule, inputs: Any) -> Any:
    CODES.append(graph.code)
    return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)


def listed(graph: fx.GraphModule, inputs: Any) -> Any:
    CODES.append(graph.code)
    return graph.forward


torch._dynamo.register_backend(counted, name="counted_pieces")
torch._dynamo.register_backend(listed, name="listed_pieces")  # traces no backward: in a tenth of the time


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of what "counted_pieces" compiles, with backward, or "listed_pieces". All blocks are compiled in pieces."""
    torch.compiler.reset()
    CODES.clear()
    monkeypatch.setattr(weft.compile.saved_bytes, "MAX_LAYERS", 5)
    return CODES


def test_pieces_compute_the_same_and_alike_ones_are_compiled_once(codes: list[str]) -> None:
    plain, model = chain(4, 4), chain(4, 4)
    names = list(model.state_dict())
    compile_blocks(model, pytest.fail, "counted_pieces")
    found = trained(model)
    assert list(model.state_dict()) == names
    for name, expected in trained(plain).items():
        assert torch.allclose(found[name], expected, rtol=1e-10, atol=1e-12), name
    blocks = [code for code in codes if "batch_norm" in code]
    # In training the first two norms with their ReLUs are alike but for one that is read twice; and in evaluation.
    assert len(blocks) == 2 * 2
    assert not any("conv" in code or "pool" in code for code in blocks)


@pytest.mark.parametrize("has_kernels", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_cell_keeps_what_is_foreseen(codes: list[str], has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of convolutions and of ReLUs; of a ReLU behind a sum the mask too. Parameters are there anyway."""
    if has_kernels:
        monkeypatch.setattr(weft.compile.pieces, "by_kernel", lambda node: memory_only_pools())
    cell, kept = Cell("batch", 16, 16, 8, False, False), []
    for parameter in cell.parameters():
        parameter.data = parameter.to(torch.bfloat16)
    own = {tensor.untyped_storage()._cdata for tensor in (*cell.parameters(), *cell.buffers())}
    inputs = [images(16).to(torch.bfloat16).requires_grad_() for _ in range(2)]
    for run in (cell, torch.compile(cell, dynamic=False, backend=PieceCompiler("counted_pieces"))):
        storages: dict[int, tuple[int, Tensor]] = {}

        def keep(one: Tensor, storages: dict[int, tuple[int, Tensor]] = storages) -> Tensor:
            if one.untyped_storage()._cdata not in own:
                storages[one.untyped_storage()._cdata] = (one.untyped_storage().nbytes(), one)
            return one

        pieces = as_in_pieces() if has_kernels and run is cell else nullcontext()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), pieces:
            run(*inputs)
        kept.append(sum(size for size, _ in storages.values()))
    norms = sum("batch_norm" in code for code in codes)
    assert norms == len({code for code in codes if "batch_norm" in code}) == 7  # for 13 norms
    statistics, mask = 13 * 2 * 8 * 4, images(8).numel()
    expected = kept[0] + (0 if has_kernels else mask)  # which is foreseen with kernels, as on GPUs
    assert expected - statistics <= kept[1] <= expected + statistics


def test_amoebanet_is_compiled_in_pieces_and_resnet_is_not() -> None:
    found = []
    for name in ("amoebanet-d-18-208", "resnet50"):
        with torch.device("meta"):
            model = build(load_model(name))
        compile_blocks(model, pytest.fail)
        block: Any = next(iter(find_blocks(model).values()))
        found.append(isinstance(block.forward.backend, PieceCompiler))
    assert found == [True, False]


class Changed(nn.Module):
    """A value that a convolution reads before it is written over."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        value = torch.sigmoid(images) * 2
        first = self.one(value)
        value.add_(1).mul_(2)
        return torch.relu(self.two(value) + first) * 2


class Narrow(nn.Module):
    """A graph with more than tensors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.relu(self.one(images) * 2).double() + 1


@pytest.mark.parametrize("kind", [Changed, Narrow])
def test_what_cannot_be_cut_is_compiled_whole(codes: list[str], kind: Callable[[], nn.Module]) -> None:
    model = kind().double() if kind is Changed else kind()
    given = images(4) if kind is Changed else images(4).float()
    compiled = torch.compile(model, dynamic=False, backend=PieceCompiler("listed_pieces"))
    with torch.no_grad():
        assert torch.equal(compiled(given), model(given))
    assert len(codes) == 1
    assert "conv2d" in codes[0]


def test_another_form_than_was_traced_goes_on_uncompiled(codes: list[str]) -> None:
    plain, model, said = chain(4), chain(4), list[str]()
    compile_blocks(model, said.append, "listed_pieces")
    with torch.no_grad():
        model(images())
        block: Any = model[1]
        for piece in block.forward.backend.compiled.values():
            piece.forms = []
        assert torch.allclose(model(images()), plain(images()), rtol=1e-10)
    assert len(said) == 1
    assert said[0].startswith("torch.compile failed (traced [], got [[(1, 0), (4, 1), (8, 32), (8, 4)]")
    assert said[0].endswith("going on uncompiled")


def test_kernels_are_waited_for_together() -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    taken: list[int] = []

    class Kernel(Future[object]):
        def result(self, timeout: float | None = None) -> object:
            taken.append(id(self))
            return object()

    shared = Kernel()
    scopes: list[dict[str, Any]] = [{"own": Kernel(), "shared": shared} for _ in range(3)]
    with config.patch(compile_threads=2):
        with kernels_at_once():
            for scope in scopes:
                AsyncCompile().wait(scope)
            assert not taken
        assert not any(isinstance(kernel, Future) for scope in scopes for kernel in scope.values())
    assert len(taken) == len(set(taken)) == 4
    assert len({id(scope["shared"]) for scope in scopes}) == 1
    assert len({id(scope["own"]) for scope in scopes}) == 3


# --- where graphs are cut, for any graph


@st.composite
def graphs(draw: st.DrawFn) -> fx.Graph:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"given_{number}") for number in range(3)]
    for _ in range(draw(st.integers(1, 25))):
        target = draw(st.sampled_from([operator.add, operator.mul, operator.matmul]))
        nodes.append(graph.call_function(target, (draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes)))))
    graph.output(tuple(nodes))
    return graph


@given(graphs())
def test_units_hold_all_once_and_none_waits_for_itself(graph: fx.Graph) -> None:
    units = split_into_units(list(graph.nodes))
    done = {node for node in graph.nodes if node.op == "placeholder"}
    for unit in units:
        assert len(unit) == 1 or not any(map(is_cut, unit))
        assert done.isdisjoint(unit)
        inside = set(unit)
        assert all(one in done or one in inside for node in unit for one in node.all_input_nodes)
        done |= inside
    assert done == {node for node in graph.nodes if node.op != "output"}


def test_order_is_kept_where_results_in_place_are_read() -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    product = graph.call_function(torch.matmul, (given, given))
    changed = graph.call_method("relu_", (product,))
    after = graph.call_function(torch.matmul, (changed, changed))
    value = torch.zeros(2, 2)
    for node, one in ((given, torch.ones(2, 2)), (product, value), (changed, value), (after, torch.ones(2, 2))):
        node.meta["example_value"] = one
    nodes = list(graph.nodes)
    assert keeps_order(nodes, split_into_units(nodes))
    late = graph.call_function(torch.matmul, (product, after))  # reads what was written over by its old name
    late.meta["example_value"] = torch.ones(2, 2)
    nodes = list(graph.nodes)
    assert not keeps_order(nodes, split_into_units(nodes))


def test_pools_are_those_of_weft_where_it_has_kernels(codes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, pooled = chain(4), chain(4), list[int]()

    def pool(given: Tensor, *settings: Any, **named: Any) -> Tensor:
        pooled.append(given.shape[1])
        return F.max_pool2d(given, *settings, **named)

    monkeypatch.setattr(weft.compile.pieces, "by_kernel", lambda node: {F.max_pool2d: pool})
    compile_blocks(model, pytest.fail, "listed_pieces")
    with torch.no_grad():
        assert torch.allclose(model(images()), plain(images()), rtol=1e-10)
    assert pooled == [4]


@pytest.mark.full
def test_averages_of_parallel_models_are_those_of_weft_too(codes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cell, pooled = Cell("batch", 16, 16, 8, False, False), list[int]()
    fix_average_gradients(cell)

    def pool(given: Tensor, *settings: Any, **named: Any) -> Tensor:
        pooled.append(given.shape[1])
        return F.avg_pool2d(given, *settings, **named)

    monkeypatch.setattr(weft.compile.pieces, "by_kernel", lambda node: {F.avg_pool2d: pool})
    given = [images(16).float(), images(16).float()]
    with torch.no_grad():
        found = torch.compile(cell, dynamic=False, backend=PieceCompiler("listed_pieces"))(*given)
        assert pooled == [8]
        assert torch.allclose(found, cell(*given), rtol=1e-4, atol=1e-5)
