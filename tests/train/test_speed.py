"""What makes a step fast changes nothing: compiled blocks, a measured attention kernel, batches and numbers in time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs_for_tests as runs
import tensor_for_tests as shared
import torch
import torch._dynamo

from weft.compile import attention_kernel
from weft.compile import blocks as compiling
from weft.compile.attention_kernel import AttentionShape, attention_shape, choose_kernel
from weft.compile.blocks import compile_blocks, wants_compile
from weft.errors import ConfigError
from weft.mesh import Mesh
from weft.models import build
from weft.models.loss_head import loss_head_of
from weft.models.vision import ResNetConfig
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.plan import Plan, Tile
from weft.run_file import run_from_tables
from weft.step.objective import CROSS_ENTROPY
from weft.step.train_step import StepResult
from weft.train.metrics import Moment
from weft.train.prefetch import Batches, PendingResult

pytestmark = pytest.mark.processes

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    runs.write_text(tmp_path / "text.txt", 500)
    return runs.make_run(runs.write_run_file(tmp_path), "one")


def trained(backend: str | None, said: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    plan = Plan(precision="fp64")
    model = parallelize(shared.SHIPPED["tied"]().double(), plan, Mesh(plan))
    if backend is not None:
        compile_blocks(model, said.append, backend)
    total = CROSS_ENTROPY.total(model, shared.token_batch(0))
    total.backward()
    return total.item(), {p.parameter.name: piece.grad for p, piece in named_pieces(model) if piece.grad is not None}


def test_compiled_blocks_and_loss_compute_the_same() -> None:
    said: list[str] = []
    expected, gradients = trained(None, said)
    torch._dynamo.utils.counters.clear()
    found, others = trained("aot_eager", said)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # of both blocks, and of the loss
    assert found == pytest.approx(expected, rel=1e-12)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, others[name], rtol=1e-10, atol=1e-12), name
    assert said == []


def test_what_does_not_compile_runs_uncompiled() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    said: list[str] = []
    torch._dynamo.register_backend(broken, name="broken")
    assert trained("broken", said)[0] == trained(None, said)[0]
    assert len(said) == 1
    assert "no compiler here" in said[0]
    assert said[0].endswith("going on uncompiled")


def test_when_to_compile(run: Any) -> None:
    cpu = torch.device("cpu")
    assert (wants_compile(run, cpu), wants_compile(run, CUDA)) == (False, True)
    for wanted in (False, True):
        asked = replace(run, train=replace(run.train, compile=wanted))
        assert wants_compile(asked, cpu) == wants_compile(asked, CUDA) == wanted
    tiled = replace(asked, plan=replace(run.plan, tile=Tile(2)))
    with pytest.raises(ConfigError, match=r"train.compile = true, but with tile = 2"):
        wants_compile(tiled, cpu)
    assert not wants_compile(replace(tiled, train=run.train), CUDA)
    over_all = replace(run.plan, data=2, statistics="batch")
    assert not wants_compile(replace(run, plan=over_all), CUDA)
    assert wants_compile(replace(run, plan=replace(over_all, statistics="rank")), CUDA)


def test_images_are_compiled_with_what_lies_around_blocks() -> None:
    graphs: list[int] = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.register_backend(counted, name="counted_images")
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        plan = Plan(precision="bf16")  # has flat buffers, and hooks on blocks
        config = ResNetConfig(depth=34, width=8, num_classes=4, norm="group")
        model = parallelize(build(config), plan, Mesh(plan, "cpu"))
        if compiled:
            compile_blocks(model, pytest.fail, "counted_images")
        images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        out = model(images)
        out.square().sum().backward()
        with torch.no_grad():
            model(images)
        results.append([out, *(piece.grad for _, piece in named_pieces(model) if piece.grad is not None)])
    assert len(results[0]) > 100
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)
    # Stem, tail and 7 kinds of 16 blocks, with gradients and without.
    assert len(graphs) == 2 * (2 + 7)


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.cache_folder() == tmp_path / "weft"


def test_the_faster_kernel_is_chosen_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = {"FLASH_ATTENTION": 2.0, "CUDNN_ATTENTION": 1.0}
    asked: list[str] = []

    def measured(kernel: Any, *_: Any) -> float:
        asked.append(kernel.name)
        return seconds[kernel.name]

    monkeypatch.setattr(attention_kernel, "_kernel_seconds", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    file, shape = tmp_path / "new" / "attention.json", AttentionShape(2, 8, 4, 64, 16)
    assert choose_kernel(shape, torch.bfloat16, CUDA, file) == "cudnn"
    seconds["FLASH_ATTENTION"] = 0.5
    assert choose_kernel(shape, torch.bfloat16, CUDA, file) == "cudnn"
    assert choose_kernel(shape._replace(batch=3), torch.bfloat16, CUDA, file) == "flash"
    assert len(asked) == 4
    assert len(json.loads(file.read_text())) == 2
    file.write_text("not json")
    assert choose_kernel(shape, torch.bfloat16, CUDA, file) == "flash"


def test_the_shape_of_a_runs_attention(run: Any) -> None:
    shape = attention_shape(run)
    assert shape is not None
    assert shape.batch == run.split.micro_batch
    assert shape.sequence == run.data.sequence
    assert shape.num_heads == run.model.num_attention_heads


def test_numbers_and_batches_on_a_cpu_come_at_once() -> None:
    asked: list[int] = []

    def make(step: int) -> list[Any]:
        asked.append(step)
        return [(torch.full((1,), step),)]

    batches = Batches(make, 3, torch.device("cpu"))
    batches.prepare(1)
    assert asked == []
    assert batches.take(1)[0][0].tolist() == [1]
    one = torch.tensor(2.5)
    assert PendingResult(
        3, 0.1, StepResult(one, one * 2, one, torch.tensor(1)), Moment(torch.device("cpu"))
    ).read() == (
        2.5,
        5.0,
        1,
    )


def test_a_run_compiles_and_has_a_z_loss(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "weft.train.setup.compile_blocks", lambda model, say: asked.append(loss_head_of(model) is not None)
    )
    plain = runs.train_on_ranks(run)["loss"]
    other = replace(run, folder=run.folder.parent / "other", train=replace(run.train, compile=True, z_loss=0.01))
    with_z_loss = runs.train_on_ranks(other)["loss"]
    assert asked in ([True], [])  # ranks are forked
    assert with_z_loss > plain


def test_z_loss_is_for_text(tmp_path: Path) -> None:
    train = {"steps": 1, "batch": 1, "z_loss": 0.1}
    tables = {"model": {"architecture": "resnet"}, "data": {"kind": "slides"}, "train": train}
    with pytest.raises(ConfigError, match=r"train.z_loss is for text"):
        run_from_tables(tables, {}, "x")
