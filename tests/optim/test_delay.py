"""Updates that are put off by one step: equal to a loop that does just that, also across a kill and a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_for_tests as models
import pytest
import torch
from saving_for_tests import save
from torch import Tensor, nn

from weft.checkpoint import Checkpoint, Saver
from weft.errors import CheckpointError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim import AdamW
from weft.optim.saved_state import load_state, pieces_to_save
from weft.parallel.apply import cost, parallelize
from weft.parallel.model_state import all_flats, named_pieces, state_bytes
from weft.plan import Memory, Plan, Shard, split_batch
from weft.profiling import profile
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

EXACT = Plan(precision="bf16", memory=Memory(offload=0.5), exact=False)
DELAYED = replace(EXACT, memory=replace(EXACT.memory, delay=True))
CLIP = 0.05


class Stale(AdamW):
    """The reference: each step takes the gradient, and the clipping, of the one before; the first does nothing."""

    kept: tuple[list[Tensor], Tensor | None] | None = None

    def step(self, closure: Any = None, scale: Tensor | None = None) -> None:  # type: ignore[override]
        own = [held.flat.slice_gradient for held in self.held if held.flat.slice_gradient is not None]
        new = [gradient.clone() for gradient in own], scale
        if self.kept is not None:
            for gradient, old in zip(own, self.kept[0], strict=True):
                gradient.copy_(old)
            super().step(scale=self.kept[1])
        self.kept = new


def build(plan: Plan, kind: Callable[..., AdamW] = AdamW) -> tuple[nn.Module, AdamW, Mesh]:
    torch.manual_seed(0)
    mesh = Mesh(plan)
    model = parallelize(models.tied_decoder().float(), plan, mesh)
    return model, kind(model, lr=1e-2), mesh


def run(model: nn.Module, optimizer: AdamW, mesh: Mesh, steps: range, count: int = 1) -> list[float]:
    found = []
    for step in steps:
        batches = zip(*(tensor.chunk(count) for tensor in models.token_batch(step)), strict=True)
        result = train_step(model, optimizer, list(batches), mesh, clip=CLIP)
        found += [float(result.loss), float(result.grad_norm)]
    return found


def weights(model: nn.Module) -> list[list[float]]:
    return [piece.detach().tolist() for _, piece in named_pieces(model)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_delayed_update_is_that_of_the_gradient_before(count: int) -> None:
    delayed, reference, exact = build(DELAYED), build(EXACT, Stale), build(EXACT)
    found, expected = run(*delayed, range(6), count), run(*reference, range(6), count)
    assert found == expected
    assert weights(delayed[0]) == weights(reference[0])
    assert found[0] == found_of_first(exact, count)  # the same model, the same first loss
    assert found != run(*exact, range(1, 6), count)


def found_of_first(built: tuple[nn.Module, AdamW, Mesh], count: int) -> float:
    return run(*built, range(1), count)[0]


def test_the_second_step_still_has_the_first_weights() -> None:
    model, optimizer, mesh = build(DELAYED)
    losses = [float(train_step(model, optimizer, [models.token_batch(0)], mesh).loss) for _ in range(3)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("stage", [1, 2])
def test_sharded_updates_are_delayed_alike(stage: Any) -> None:
    def rank(index: int) -> bool:
        torch.set_num_threads(1)
        shard = Shard(2, stage)
        pair = build(replace(DELAYED, shard=shard)), build(replace(EXACT, shard=shard), Stale)
        return run(*pair[0], range(4)) == run(*pair[1], range(4)) and weights(pair[0][0]) == weights(pair[1][0])

    assert run_local(rank, 2) == [True, True]


@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_resumed_run_has_the_gradient_that_waits(tmp_path: Path, killed_at: int) -> None:
    whole, first, second = build(DELAYED), build(DELAYED), build(replace(DELAYED, memory=Memory(offload=1, delay=True)))
    expected = run(*whole, range(6))
    found = run(*first, range(killed_at))
    run(*second, range(2))  # what it has learned is forgotten
    load_state(save(tmp_path, *first, killed_at), second[0], second[1])
    found += run(*second, range(killed_at, 6))
    assert found == expected
    assert weights(second[0]) == weights(whole[0])


def test_a_gradient_that_waits_is_not_lost_in_silence(tmp_path: Path) -> None:
    built, exact = build(DELAYED), build(EXACT)
    run(*built, range(2))
    with pytest.raises(CheckpointError, match=r"put off by plan\.memory\.delay = true, and now it is false"):
        load_state(save(tmp_path, *built, 2), exact[0], exact[1])


def test_bytes_are_those_predicted() -> None:
    model, optimizer, mesh = build(DELAYED)
    seen: list[dict[str, int]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(state_bytes(model, optimizer)))
    run(model, optimizer, mesh, range(3))
    split = split_batch(DELAYED, len(models.token_batch(0)[0]), 1)
    assert seen[-1] == cost(profile(models.tied_decoder()), DELAYED, split).state_bytes
    assert all(flat.update_done is None for flat in all_flats(model))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"exact": True}, "at weights one update old, and plan.exact = true"),
        ({"memory": Memory(delay=True)}, "and plan.memory.offload = 0; raise offload"),
        ({"shard": Shard(2, 3)}, "given 'bf16', true and stage 3 of degree 2"),
        ({"precision": "fp32"}, "given 'fp32', true and stage 3 of degree 1"),
    ],
)
def test_refusals(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        replace(DELAYED, **plan)


def plain(kind: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer, Mesh]:
    """One rank in fp32, whose parameters torch's own optimizer updates."""
    torch.manual_seed(0)
    mesh = Mesh(Plan(precision="fp32"))
    model = parallelize(models.tied_decoder().float(), mesh.plan, mesh)
    return model, kind(model.parameters(), lr=1e-2), mesh


def test_torch_refuses_a_gradient_that_waits(tmp_path: Path) -> None:
    built, (model, optimizer, _) = build(DELAYED), plain(torch.optim.AdamW)
    run(*built, range(4))
    with pytest.raises(CheckpointError, match=r"put off by plan\.memory\.delay = true, and now it is false"):
        load_state(save(tmp_path, *built, 4), model, optimizer)


def with_stale_gradient(folder: Path) -> Checkpoint:
    """A checkpoint of step 8 in which a gradient of step 4 still waits, as a run without delay may have left it."""
    before, after = build(DELAYED), build(EXACT)
    run(*before, range(4))
    run(*after, range(8))
    old = [piece for piece in pieces_to_save(*before) if piece.kind.startswith("pending")]
    assert old
    saver = Saver(folder, 0, 1, "token")
    saver.save(8, [*pieces_to_save(*after), *old], {}, asynchronous=False)
    return Checkpoint(folder / "step-00000008")


def test_a_gradient_of_another_step_is_never_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    without, exact = build(DELAYED), build(EXACT)
    run(*exact, range(8))
    load_state(save(tmp_path / "without", *exact, 8), without[0], without[1])
    expected = run(*without, range(8, 11)), weights(without[0])
    for plan in (DELAYED, EXACT):
        built = build(plan)
        load_state(with_stale_gradient(tmp_path / f"{plan.memory.delay}"), built[0], built[1])
        assert "belongs to update 4, and the state is that of 8 updates; it is dropped" in caplog.text
        caplog.clear()
        assert not built[1].beside.get("gradients")
        if plan is DELAYED:
            assert (run(*built, range(8, 11)), weights(built[0])) == expected


def test_torch_drops_a_gradient_of_another_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, mesh = plain(torch.optim.AdamW)
    load_state(with_stale_gradient(tmp_path), model, optimizer)
    assert "it is dropped" in caplog.text
    assert {piece.kind for piece in pieces_to_save(model, optimizer, mesh)} == {
        "parameter",
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


def test_a_stale_gradient_in_a_state_dict_is_refused() -> None:
    built, other = build(DELAYED), build(DELAYED)
    run(*built, range(3))
    state = built[1].state_dict()
    for one in state["state"].values():
        one["step"] += 4
    with pytest.raises(CheckpointError, match="belongs to update 3, and the state is that of 6 updates"):
        other[1].load_state_dict(state)


def test_going_back_to_a_state_without_moments_forgets_those_that_are_there(tmp_path: Path) -> None:
    first, fresh, used = plain(torch.optim.AdamW), build(DELAYED), build(DELAYED)
    checkpoint = save(tmp_path, *first, 0)
    assert {entry.kind for entry in checkpoint.entries()} == {"parameter"}
    run(*used, range(3))
    for built in (fresh, used):
        load_state(checkpoint, built[0], built[1])
    assert run(*used, range(4)) == run(*fresh, range(4))
    assert weights(used[0]) == weights(fresh[0])
