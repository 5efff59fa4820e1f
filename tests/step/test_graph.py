"""A recorded step replayed: equal to the step that was recorded, whatever the host forgets in between.

There are no CUDA graphs on a CPU. `record` stands in for them with the same contract: it notes every operation with its
tensors, and a replay does the operations again into the same tensors, without any of the Python around them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.errors import ConfigError
from weft.mesh import Mesh
from weft.models import build
from weft.models.vision import ResNetConfig
from weft.optim import AdamW
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_units
from weft.plan import Plan
from weft.run_file import load_run
from weft.step.cuda_graph import WARM_STEPS, Graph, Replay, wants_graph
from weft.step.objective import CLASSIFICATION
from weft.step.train_step import train_step

NUM_STEPS = WARM_STEPS + 4


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result


def record(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    """Note what `compute` does; unlike a GPU's recording it is done on the way, which changes running statistics."""
    with _Notes() as notes:
        result = compute()

    @torch.no_grad()
    def replay() -> None:
        for func, args, kwargs, before in notes.done:
            for place, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != new.data_ptr():
                    place.copy_(new)

    return result, replay


def _model(precision: str) -> tuple[nn.Module, torch.optim.Optimizer, Mesh]:
    torch.manual_seed(0)
    plan = Plan(precision=precision)  # type: ignore[arg-type]
    mesh = Mesh(plan, "cpu")
    config = ResNetConfig(depth=10, width=8, num_classes=4, norm="group")
    model = parallelize(build(config), plan, mesh)
    optimizer: torch.optim.Optimizer = (
        AdamW(model, lr=1e-2) if all_units(model) else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    return model, optimizer, mesh


def _train(precision: str, graph: Callable[[nn.Module], Graph | None], sizes: list[int]) -> list[Tensor]:
    """Losses and final parameters of some steps on images of given sizes."""
    model, optimizer, mesh = _model(precision)
    recorded, found = graph(model), []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(number)
        batch = (torch.randn(2, 3, size, size, generator=generator), torch.tensor([number % 3, 1]))
        result = train_step(model, optimizer, [batch], mesh, CLASSIFICATION, graph=recorded)
        found += [result.loss, result.grad_norm]
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replayed_step_equals_a_computed_one(precision: str) -> None:
    said: list[str] = []
    sizes = [32] * NUM_STEPS
    computed = _train(precision, lambda model: None, sizes)
    replayed = _train(precision, lambda model: Graph(model, said.append, record), sizes)
    assert not said
    for ours, theirs in zip(replayed, computed, strict=True):
        assert torch.equal(ours, theirs)


def test_other_shapes_are_computed() -> None:
    sizes = [32] * (WARM_STEPS + 1) + [48, 32, 40, 32]
    computed = _train("bf16", lambda model: None, sizes)
    for ours, theirs in zip(_train("bf16", lambda m: Graph(m, print, record), sizes), computed, strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_cannot_be_recorded_is_computed() -> None:
    def fail(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        compute()  # half of the work is done, and nothing of it may stay
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    said: list[str] = []
    sizes = [32] * NUM_STEPS
    computed = _train("bf16", lambda model: None, sizes)
    for ours, theirs in zip(_train("bf16", lambda m: Graph(m, said.append, fail), sizes), computed, strict=True):
        assert torch.equal(ours, theirs)
    assert said == [
        "the step cannot be recorded (operation not permitted when stream is capturing); going on without a CUDA graph"
    ]


def test_the_stand_in_can_fail() -> None:
    """Negative control: a replay that leaves out what lies between is seen."""

    def record_nothing(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        return compute(), lambda: None

    sizes = [32] * NUM_STEPS
    computed = _train("bf16", lambda model: None, sizes)
    stale = _train("bf16", lambda model: Graph(model, print, record_nothing), sizes)
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(stale, computed, strict=True))


IMAGES = Path(__file__).parents[2] / "examples" / "pathology.toml"
TEXT = Path(__file__).parents[2] / "examples" / "quickstart.toml"
CUDA = torch.device("cuda", 0)
ALONE = ("plan.tile.rows=1", "plan.tile.columns=1")


def test_images_on_one_gpu_are_recorded() -> None:
    images = load_run(IMAGES, ALONE)
    assert wants_graph(images, CUDA)
    assert not wants_graph(images, torch.device("cpu"))
    assert not wants_graph(load_run(IMAGES, (*ALONE, "train.graph=false")), CUDA)
    text = load_run(TEXT, ("plan.data=1", "plan.shard=1"))
    assert not wants_graph(text, CUDA)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("plan.tile.rows=2", "the plan has 2 ranks"),
        ("plan.memory.recompute='full'", "memory.recompute = 'full'"),
        ("plan.micro_batch=1", "micro-batches"),
    ],
)
def test_what_cannot_be_recorded_is_refused(change: str, reason: str) -> None:
    assert not wants_graph(load_run(IMAGES, (*ALONE, change)), CUDA)
    with pytest.raises(ConfigError, match=reason):
        wants_graph(load_run(IMAGES, (*ALONE, change, "train.graph=true")), CUDA)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ConfigError, match="which has no CUDA graphs; use false"):
        wants_graph(load_run(IMAGES, (*ALONE, "train.graph=true")), torch.device("cpu"))
