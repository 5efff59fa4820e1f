"""Ranks that shadow each other: a loss is made good in the same step, and shadows are their stages, to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pipeline_for_tests import vectors
from restarts_for_tests import Kill, train_under_agent
from restarts_for_tests import assert_same_end as assert_same_run
from runs_for_tests import DEEP, losses, make_run, write_run_file
from shadow_for_tests import (
    NUM_STEPS,
    RANKS,
    Chain,
    Death,
    all_deaths,
    batches_of,
    make_chain,
    run_chain,
    seed,
    some_deaths,
)
from torch import Tensor as TorchTensor

from weft.checkpoint import Checkpoint, Saver, steps
from weft.errors import ConfigError, LostRankError, PlanError
from weft.launch.agent import Restarts
from weft.launch.local_ranks import LocalError, run_local
from weft.mesh import Mesh
from weft.optim.saved_state import load_state, pieces_to_save
from weft.parallel.apply import cost, refuse
from weft.pipeline.build import stage as cut_into_stages
from weft.pipeline.sections import Sections
from weft.pipeline.shadow_gradients import ShadowRefresh
from weft.plan import BatchSplit, Memory, Pipe, Plan, Shard, Tensor
from weft.profiling import profile
from weft.proof.prove import verify
from weft.resilience.corruption import compare_replicas, digest_all
from weft.schedule.actions import Action
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

PLAN = Plan(pipe=Pipe(RANKS, shadow=True), micro_batch=2)


# --- losses


@pytest.fixture(scope="module", params=["1f1b"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_chain(folder, [], request.param) == 0
    return folder


def assert_same_end(folder: Path, undisturbed: Path) -> None:
    """Losses and norms of all steps, and every tensor of the last checkpoint, bit for bit."""
    assert json.loads((folder / "numbers.json").read_text()) == json.loads((undisturbed / "numbers.json").read_text())
    ours, theirs = (Checkpoint(one / "checkpoints" / f"step-{NUM_STEPS:08d}") for one in (folder, undisturbed))
    assert {(e.kind, e.name) for e in ours.entries()} == {(e.kind, e.name) for e in theirs.entries()}
    for entry in ours.entries():
        assert torch.equal(ours.read(entry.name, entry.kind), theirs.read(entry.name, entry.kind)), entry.name


def lose(death: Death, folder: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]) -> float:
    """A run that loses a rank and goes on by itself; the seconds that it took."""
    assert run_chain(folder, [death]) == 0, death
    assert (folder / "died").read_text() == death.point
    said = capfd.readouterr().err
    found = re.findall(
        rf"weft: rank {death.rank} was killed by SIGKILL .*, in step (\d+)\. Rank {death.rank - 1} took its pipe stage "
        rf"{death.rank} over within ([0-9.]+) s, in the same step; nothing is lost\. 3 ranks go on without shadows",
        said,
    )
    assert len(found) == 1, said
    assert said.count("weft: rank") == 1
    assert int(found[0][0]) in (death.step, death.step + 1)  # ranks ahead of it may have begun the next
    assert_same_end(folder, undisturbed)
    return float(found[0][1])


def test_a_lost_rank_changes_nothing(undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number, death in enumerate(some_deaths(2)):
        lose(death, tmp_path / str(number), undisturbed, capfd)


def test_ranks_that_wait_in_a_sum_learn_of_the_loss(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 3 waits for rank 0 in the sum of losses: it has nothing from rank 1, and must see rank 0 let go."""
    lose(Death(1, 2, "backward 3", seconds=1.0), tmp_path / "run", undisturbed, capfd)


@pytest.mark.soak
def test_every_rank_at_every_step_and_point(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = sorted(lose(d, tmp_path / str(n), undisturbed, capfd) for n, d in enumerate(all_deaths()))
    with capfd.disabled():
        print(
            f"\n{len(seconds)} losses made good: median {seconds[len(seconds) // 2]:.2f} s, longest {seconds[-1]:.2f} s"
        )


@pytest.mark.soak
def test_a_loss_under_gpipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_chain(tmp_path / "whole", [], "gpipe") == 0
    assert run_chain(tmp_path / "lost", [Death(2, 2, "backward 1")], "gpipe") == 0
    assert "Rank 1 took its pipe stage 2 over" in capfd.readouterr().err
    assert_same_end(tmp_path / "lost", tmp_path / "whole")


def test_a_pipeline_of_two_ranks_goes_on_in_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_chain(tmp_path / "whole", [], num_ranks=2) == 0
    assert run_chain(tmp_path / "lost", [Death(1, 3, "backward 1")], num_ranks=2) == 0
    assert "1 rank goes on without shadows: another loss starts both again" in capfd.readouterr().err
    assert_same_end(tmp_path / "lost", tmp_path / "whole")


@pytest.mark.soak
def test_checkpoints_after_a_loss_are_whole(undisturbed: Path, tmp_path: Path) -> None:
    assert run_chain(tmp_path / "run", [Death(1, 1, "backward 0")]) == 0
    folder = tmp_path / "run" / "checkpoints"
    assert steps(folder) == [2, 4, 5]
    for step in steps(folder):
        ours, theirs = (Checkpoint(one / f"step-{step:08d}") for one in (folder, undisturbed / "checkpoints"))
        for entry in theirs.entries():
            assert torch.equal(ours.read(entry.name, entry.kind), theirs.read(entry.name, entry.kind)), entry.name


@pytest.mark.soak
def test_a_second_loss_starts_all_again(undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deaths = [Death(2, 2, "forward 2"), Death(1, 4, "backward 1")]
    assert run_chain(tmp_path / "run", deaths, restarts=Restarts(1)) == 0
    said = capfd.readouterr().err
    assert "Rank 1 took its pipe stage 2 over" in said
    assert re.search(r"weft: rank 1 was killed by SIGKILL .*, in step 4\. All ranks start again \(restart 1 of", said)
    assert_same_end(tmp_path / "run", undisturbed)


@pytest.mark.soak
def test_a_loss_that_is_not_made_good_starts_all_again(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Shadows that were never refreshed are not used; the paragraph names the rank that was killed."""
    (tmp_path / "stale").touch()
    assert run_chain(tmp_path, [Death(2, 3, "backward 1")], restarts=Restarts(1)) == 0
    said = capfd.readouterr().err
    assert "took" not in said
    assert re.search(
        r"weft: rank 2 was killed by SIGKILL .*, in step 3\. All ranks start again \(restart 1 of", said
    ), said
    assert_same_end(tmp_path, undisturbed)


def test_nobody_is_before_rank_0(undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_chain(tmp_path / "run", [Death(0, 2, "backward 0")], restarts=Restarts(1)) == 0
    said = capfd.readouterr().err
    assert "took" not in said
    assert "rank 0 was killed by SIGKILL" in said
    assert_same_end(tmp_path / "run", undisturbed)


@pytest.mark.soak
def test_weft_train_goes_on_without_a_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole loop: rank 2 is killed in step 5 of 12; checkpoints, metrics and the end are as if it had not been."""
    overrides = ["train.steps=12", "checkpoint.every=5", "plan.micro_batch=4", "numbers.compare_every=4"]
    overrides += ["plan.pipe={degree=4, shadow=true}", "model.tie_word_embeddings=false"]
    run_file = write_run_file(tmp_path, DEEP)
    whole, run = (make_run(run_file, name, *overrides) for name in ("whole", "lost"))
    train_under_agent(run_file, whole, overrides, None)
    train_under_agent(run_file, run, overrides, Kill(2, 5, 7))
    said = capfd.readouterr().err
    assert "in step 5. Rank 1 took its pipe stage 2 over" in said, said
    assert losses(run.folder) == losses(whole.folder)
    assert steps(run.folder / "checkpoints") == steps(whole.folder / "checkpoints") == [5, 10, 12]
    assert_same_run(run, whole)


# --- shadows are their stages


def states(model: Any, optimizer: Any, replica: int) -> dict[int, int]:
    """Hashes of weights and moments, by stage."""
    found = {}
    for (number, own), part in model.parts.items():
        if own == replica:
            pieces = [piece for flat in part.units.flats for piece in flat.pieces]
            moments = [value for piece in pieces for value in optimizer.state[piece].values()]
            found[number] = int(digest_all([*(piece.detach() for piece in pieces), *moments]))
    return found


def train_and_hash(index: int) -> list[list[dict[int, int]]]:
    mesh = Mesh(PLAN)
    model, optimizer = make_chain(PLAN, mesh)
    found = []
    for step in range(3):
        train_step(model, optimizer, batches_of(step), mesh, before_micro_batch=seed(step))
        found.append([states(model, optimizer, replica) for replica in (0, 1)])
        compare_replicas(model, optimizer, mesh, step)
    return found


def test_a_shadow_is_its_stage_to_the_bit() -> None:
    answers = run_local(train_and_hash, RANKS)
    for step in range(3):
        owned = {stage: value for answer in answers for stage, value in answer[step][0].items()}
        shadows = {stage: value for answer in answers for stage, value in answer[step][1].items()}
        assert sorted(owned) == ["0", "1", "2", "3"]
        assert shadows == {stage: owned[stage] for stage in ("1", "2", "3")}
    assert answers[0][0][0] != answers[0][1][0]  # and steps change it


def test_a_shadow_is_loaded_with_its_stage(tmp_path: Path) -> None:
    def rank(index: int) -> list[dict[int, int]]:
        mesh = Mesh(PLAN)
        model, optimizer = make_chain(PLAN, mesh)
        train_step(model, optimizer, batches_of(0), mesh, before_micro_batch=seed(0))
        saver = Saver(tmp_path, mesh.rank, RANKS, "token")
        saver.save(1, pieces_to_save(model, optimizer, mesh), {})
        saver.wait(published=True)
        again, its_optimizer = make_chain(PLAN, mesh)
        load_state(Checkpoint(tmp_path / "step-00000001"), again, its_optimizer)
        assert states(again, its_optimizer, 0) == states(model, optimizer, 0)
        assert states(again, its_optimizer, 1) == states(model, optimizer, 1)
        return [states(again, its_optimizer, replica) for replica in (0, 1)]

    answers = run_local(rank, RANKS)
    assert [answers[n][1] for n in range(3)] == [answers[n + 1][0] for n in range(3)]


def without_refresh(index: int) -> None:
    with (
        patch.object(ShadowRefresh, "expect", lambda *_: None),
        patch.object(ShadowRefresh, "give", lambda *_: None),
        patch.object(ShadowRefresh, "finish", lambda *_: None),
    ):
        train_and_hash(index)


def test_a_refresh_that_is_left_out_is_seen() -> None:
    with pytest.raises(LocalError, match=r"silent corruption in step 0: ranks . and . hold different bits of"):
        run_local(without_refresh, RANKS)


def give_old_gradients(index: int) -> None:
    give = ShadowRefresh.give
    with patch.object(
        ShadowRefresh, "give", lambda refresh, units, target, step: give(refresh, units, target, step - 1)
    ):
        train_and_hash(index)


def test_gradients_of_another_step_are_refused() -> None:
    with pytest.raises(LocalError, match=r"is in step 1 and was sent the gradients of step 0 for its shadow"):
        run_local(give_old_gradients, RANKS)


def take_over_with_a_stale_shadow(index: int) -> str:
    mesh = Mesh(PLAN)
    model, optimizer = make_chain(PLAN, mesh)
    for step in range(2):
        train_step(model, optimizer, batches_of(step), mesh, before_micro_batch=seed(step))
    model._shadow_steps -= 1
    try:
        model.take_over(index + 1, 0, [Action("forward", 0, 0)], False)
    except LostRankError as error:
        return str(error)
    return "taken"


def test_a_stale_shadow_is_not_used() -> None:
    told = run_local(take_over_with_a_stale_shadow, RANKS)
    assert told[1] == "stage 2 was lost with its rank: its shadow has the gradients of 1 steps, and 2 are done"


# --- sections


def test_a_section_that_others_have_ended_takes_their_numbers() -> None:
    def fails() -> list[float]:
        raise LostRankError("rank 2 is gone")

    told: list[str] = []

    def recover(why: str) -> list[float]:
        told.append(why)
        return [3.0]

    sections = Sections(recover)
    assert sections.run(lambda: [1.0]) == [1.0]
    assert sections.run(fails) == [3.0]
    assert (sections.number, sections.last, told) == (2, [3.0], ["rank 2 is gone"])


def test_a_section_that_nobody_has_ended_is_done_again() -> None:
    attempts: list[int] = []

    def fails_once() -> list[float]:
        attempts.append(1)
        if len(attempts) == 1:
            raise LostRankError("rank 2 is gone")
        return [5.0]

    sections = Sections(lambda why: None)
    assert sections.run(fails_once) == [5.0]
    assert sections.number == 1


def test_other_errors_are_nobodys_loss() -> None:
    def wrong() -> list[float]:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        Sections(lambda why: None).run(wrong)


# --- plans


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_plan_with_shadows_is_proved_and_its_bytes_are_predicted(schedule: Any) -> None:
    class Quiet(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.noise.p = 0.0

    plan = Plan(pipe=Pipe(3, schedule, shadow=True), micro_batch=2)
    report = verify(Quiet, vectors(8), plan, steps=2).require()
    sent = {check.what for check in report.checks if check.what.startswith("traffic")}
    assert sent == {
        f"traffic: {name}" for name in ("pipe send", "shadow send", "state all_reduce", "losses all_reduce")
    }


def test_forwards_of_shadows_need_no_message_and_what_they_cost_is_told() -> None:
    counted = profile(Chain(), lambda: (torch.zeros(2, 7),))
    plain, split = Plan(pipe=Pipe(RANKS), micro_batch=2), BatchSplit(8, 1, 2, 4, 1)
    for rank in range(RANKS):
        at = {**dict.fromkeys(plain.degrees, 0), "pipe": rank}
        before, after = (cost(counted, plan, split, at) for plan in (plain, PLAN))
        assert after.traffic["pipe", "send"] == before.traffic["pipe", "send"]
        assert (("shadow", "send") in after.traffic) == (rank > 0)
        keeps = rank < RANKS - 1  # the last shadows nobody
        assert (after.state_bytes["parameters"] > before.state_bytes["parameters"]) == keeps
        assert (after.saved_bytes > before.saved_bytes) == keeps
        assert (after.flops > before.flops) == keeps


REFUSALS = {
    "works for pipe alone, and the plan has data = 2": Plan(data=2, pipe=Pipe(2, shadow=True)),
    "works for pipe alone, and the plan has shard = 2": Plan(shard=Shard(2), pipe=Pipe(2, shadow=True)),
    "works for pipe alone, and the plan has x = 2": Plan(tensor=Tensor(2), pipe=Pipe(2, shadow=True)),
    "works with pipe.schedule = 'gpipe' or '1f1b', and it is 'zero-bubble'": Plan(
        pipe=Pipe(2, "zero-bubble", shadow=True)
    ),
    "works in fp32 and fp64, and precision is 'bf16'": Plan(pipe=Pipe(2, shadow=True), precision="bf16"),
    "keeps plain state, and memory.offload = 0.5": Plan(pipe=Pipe(2, shadow=True), memory=Memory(offload=0.5)),
    "pipe = 1 has none": Plan(pipe=Pipe(shadow=True)),
}


def test_stages_that_need_more_than_the_rank_before_has_are_refused() -> None:
    class Skipping(Chain):
        def forward(self, value: TorchTensor) -> TorchTensor:
            first = value = self.blocks[0](value)
            for block in list(self.blocks)[1:]:
                value = block(value)
            out: TorchTensor = self.head(value + first)
            return out

    counted = profile(Skipping(), lambda: (torch.zeros(2, 7),))
    with pytest.raises(PlanError, match=r"stage 3 takes a tensor from stage 0, which the rank before it does not have"):
        cut_into_stages(counted, PLAN)


def test_tied_parameters_are_refused() -> None:
    class Tied(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[-1].linear.weight = self.blocks[0].linear.weight  # type: ignore[union-attr]

    counted = profile(Tied(), lambda: (torch.zeros(2, 7),))
    with pytest.raises(PlanError, match=r"stages 0 and 3 share the parameter 'blocks.0.linear.weight'"):
        cut_into_stages(counted, PLAN)


def test_copies_in_memory_are_refused_beside_shadows(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, DEEP)
    with pytest.raises(ConfigError, match=r"keeps each stage on two ranks, and checkpoint.memory_every = 2 copies it"):
        make_run(run_file, "run", "plan.pipe={degree=4, shadow=true}", "checkpoint.memory_every=2")


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_be_shadowed_is_refused(words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        refuse(profile(Chain(), lambda: (torch.zeros(2, 7),)), REFUSALS[words])
