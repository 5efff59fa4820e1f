"""`plan.statistics = "batch"`: batch norms over the samples of all ranks, against the unsplit model on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import images_for_tests
import pytest
import torch
from tensor_for_tests import failures
from tiles_for_tests import UNet, images
from torch import Tensor, nn

from weft.comm import Axis
from weft.comm.ledger import Traffic
from weft.errors import PlanError
from weft.parallel.apply import cost, refuse
from weft.plan import Context, Memory, Pipe, Plan, Shard, Tile, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.proof.prove import ProofReport, verify
from weft.spatial import norms

pytestmark = pytest.mark.processes

Patch = pytest.MonkeyPatch


class Vectors(nn.Module):
    """No images: batch norm over features, of which one has no weights and one is called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(7, 6, bias=False), nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6, affine=False), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.enter(inputs))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        mean = nn.functional.batch_norm(hidden, None, None, training=True)
        logits: Tensor = self.head(hidden + mean)
        return logits


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 7, generator=generator), torch.randint(0, 5, (8,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "resnet": (images_for_tests.batch_resnet, images(11, 14, 8)),
    "unet": (UNet, images(13, 18, 8, dense=True)),
    "vectors": (Vectors, vectors),
}


def over(**others: Any) -> Plan:
    return Plan(statistics="batch", **others)


def check(name: str, plan: Plan, steps: int = 2) -> ProofReport:
    return verify(*MODELS[name], plan, steps=steps)


CASES: dict[str, tuple[str, Plan]] = {
    "data": ("resnet", over(data=2)),
    "data, no images": ("vectors", over(data=4)),
    "shard 3, full": ("resnet", over(shard=Shard(2, 3), memory=Memory("full"))),
    "shard 1, selective, accumulation": ("vectors", over(shard=Shard(2, 1), memory=Memory("selective"), micro_batch=2)),
    "tile": ("unet", over(data=2, tile=Tile(1, 2))),
    "tile, whole behind": ("resnet", over(data=2, tile=Tile(2, 1, until="layer2"), memory=Memory("full"))),
    "tile, shares behind": ("resnet", over(shard=Shard(2, 2), tile=Tile(1, 2, until="layer2", hand_over="batch"))),
    "pipe": ("vectors", over(data=2, pipe=Pipe(2), micro_batch=2)),
}


@pytest.mark.parametrize(("name", "plan"), CASES.values(), ids=CASES.keys())
def test_equals_the_unsplit_model_on_the_whole_batch(name: str, plan: Plan) -> None:
    report = check(name, plan).require()
    assert "worst buffer after the steps" in {line.what for line in report.checks}


def test_two_levels() -> None:
    report = verify(*MODELS["vectors"], over(data=4, hierarchical=True), ranks_per_node=2, steps=2).require()
    assert "traffic: batch/node all_gather" in {line.what for line in report.checks}


def test_one_rank_says_nothing() -> None:
    plan = over()
    assert not plan.is_viewed
    assert cost(profile(Vectors(), lambda: (torch.zeros(8, 7),)), plan, split_batch(plan, 8, 1)).traffic == {}


def test_finds_statistics_of_single_ranks(monkeypatch: Patch) -> None:
    original = norms._whole_moments

    def local(own: Tensor, counts: Tensor, axis: Axis) -> Any:
        original(own, counts, axis)
        return torch.var_mean(own, [dim for dim in range(own.dim()) if dim != 1], correction=0)[::-1]

    monkeypatch.setattr(norms, "_whole_moments", local)
    found = failures(check("resnet", over(data=2), steps=1))
    assert {"loss", "worst gradient", "worst buffer after the steps"} <= found
    assert not any(what.startswith("traffic") for what in found)


def test_finds_gradients_of_single_ranks(monkeypatch: Patch) -> None:
    original = norms.all_reduce
    monkeypatch.setattr(norms, "all_reduce", lambda tensor, axis: original(tensor.clone(), axis))
    found = failures(check("resnet", over(data=2), steps=1))
    assert "worst gradient" in found
    assert not any(what.startswith("traffic") for what in found)


def test_bytes_by_hand() -> None:
    def said(plan: Plan) -> dict[Any, Traffic]:
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 64, 2))
        found = profile(model, lambda: (torch.zeros(2, 3, 8, 8),))
        traffic = cost(found, plan, split_batch(plan, 8, 1)).traffic
        return {key: value for key, value in traffic.items() if key[0] in ("batch", "samples")}

    # Mean and variance of 8 channels of 4 bytes, of each of 4 ranks; and two sums back.
    once = {("batch", "all_gather"): Traffic(1, 2 * 8 * 4 * 4), ("batch", "all_reduce"): Traffic(1, 2 * 8 * 4)}
    assert said(over(data=2, shard=Shard(2))) == once
    assert said(over(data=2, shard=Shard(2), micro_batch=1)) == {key: value * 2 for key, value in once.items()}
    tiles = said(over(data=4, tile=Tile(1, 2)))
    assert tiles == {
        ("samples", "all_gather"): Traffic(1, 2 * 8 * 4 * 8),
        ("samples", "all_reduce"): Traffic(1, 2 * 8 * 4),
    }


# --- refusals


def reason(plan: Plan, example: Any = lambda: (torch.zeros(2, 7),)) -> str:
    with pytest.raises(PlanError) as error:
        refuse(profile(Vectors(), example), plan)
    return str(error.value)


def test_without_it_a_split_batch_is_refused() -> None:
    assert reason(Plan(data=2)) == (
        "layer 'norm' takes statistics over the batch, which data = 2 splits; set plan.statistics = 'batch' to take "
        "them over all ranks, plan.exact = false to accept those of each rank, or use GroupNorm or LayerNorm"
    )


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"tensor": TensorPlan(2)}, "beside tensor axes, which weft does not do; use tensor.x = tensor.y = 1"),
        ({"context": Context(2)}, "beside context = 2, which weft does not do yet; use context = 1"),
    ],
)
def test_axes_that_do_not_go_together(others: dict[str, Any], words: str) -> None:
    assert reason(over(data=2, **others)) == f"statistics = 'batch' {words}"


def test_what_else_it_needs() -> None:
    assert (
        reason(over(data=2), None) == "statistics = 'batch' needs an example of the inputs; pass example=, "
        "the arguments of one forward"
    )
    assert reason(over(data=2, pipe=Pipe(2, "message"))) == (
        "pipe.schedule = 'message' lets each rank choose its own order, but statistics = 'batch' lets data = 2 ranks "
        "talk inside a stage; use statistics = 'rank', or another schedule"
    )


# --- the full product


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("beside", [{"data": 2}, {"shard": Shard(2, 2)}, {"shard": Shard(2, 3)}])
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        *((name, {}) for name in MODELS),
        *((name, {"tile": Tile(1, 2)}) for name in ("resnet", "unet")),
        *((name, {"pipe": Pipe(2, schedule)}) for name in MODELS for schedule in ("1f1b", "gems")),
    ],
)
def test_full_product(name: str, inside: dict[str, Any], beside: dict[str, Any], recompute: Any) -> None:
    check(name, over(**beside, **inside, memory=Memory(recompute), micro_batch=2)).require()
