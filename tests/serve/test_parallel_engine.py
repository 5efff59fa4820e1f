"""Several ranks serve what one rank serves: equal tokens under every axis, and a wrong part is noticed."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from parallel_serving_for_tests import (
    LIMIT_SECONDS,
    check,
    on_one_rank,
    part_of,
    requests,
    scarce,
    tokens_on_ranks,
    whole_model,
)
from serving_for_tests import CONFIGS

from weft.cluster.small_choice import SmallChoice, Strategy
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Memory, Pipe, Plan, Shard, Tensor
from weft.serve.engine import Engine
from weft.serve.follow_steps import follow_steps
from weft.serve.model import ranks
from weft.serve.model.model_part import EngineOptions, ModelPart
from weft.serve.model.ranks import RankMessage, ServingRanks
from weft.serve.model.step_inputs import text_inputs
from weft.serve.parallel.rank_part import RankPlace, part_numel, refuse_plan
from weft.serve.parallel.traffic import ServedSizes, step_calls

FOUR_RANKS = [
    ("llama", Plan(tensor=Tensor(4))),
    ("qwen3-deep", Plan(pipe=Pipe(4))),
    ("gpt2", Plan(pipe=Pipe(2), tensor=Tensor(1, 2))),
    ("mistral", Plan(pipe=Pipe(2), tensor=Tensor(2))),
    ("qwen2", Plan(data=2, tensor=Tensor(2))),
    ("mixtral", Plan(expert=2, tensor=Tensor(2))),
]
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


@pytest.mark.processes
@pytest.mark.parametrize("one_in", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_four_ranks_give_the_tokens_of_one_under_every_axis(one_in: int) -> None:
    check(FOUR_RANKS[::one_in], 4)


@pytest.mark.processes
def test_the_expert_that_all_tokens_use_is_whole_on_each_rank() -> None:
    check([("qwen2_moe", Plan(expert=2))], 2)
    with pytest.raises(PlanError, match=r"does not divide the 1 features of .*shared_expert_gate"):
        refuse_plan(CONFIGS["qwen2_moe"], Plan(tensor=Tensor(2)))


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("name", DENSE)
def test_every_model_on_two_and_four_ranks(name: str) -> None:
    two = [Plan(tensor=Tensor(2)), Plan(tensor=Tensor(1, 2)), Plan(pipe=Pipe(2)), Plan(data=2)]
    check([(name, plan) for plan in two], 2)
    four = [Plan(tensor=Tensor(4)), Plan(tensor=Tensor(2, 2)), Plan(data=2, pipe=Pipe(2))]
    check([*((name, plan) for plan in four), (f"{name}-deep", Plan(pipe=Pipe(4)))], 4)


@pytest.mark.processes
def test_a_wrong_part_is_noticed_and_traffic_is_as_stated() -> None:
    """Negative control: rank 1 holds the part of rank 0. And the calls of a text equal those of `step_calls`."""
    plan = Plan(tensor=Tensor(2))
    expected, *_ = on_one_rank("llama")
    given = requests()[:3]
    cases = [
        ("llama", plan),
        ("gpt2", Plan(tensor=Tensor(1, 2))),
        ("qwen2", Plan(pipe=Pipe(2))),
        ("mixtral", Plan(expert=2)),
    ]

    for name, case in cases:
        refuse_plan(CONFIGS[name], case)

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        place = RankPlace(plan, dict.fromkeys(plan.degrees, 0))
        wrong = tokens_on_ranks("llama", Mesh(plan), given, scarce(plan), place)
        return wrong, [counted(*case) for case in cases]

    def counted(name: str, plan: Plan) -> dict[str, list[int]]:
        """The calls of one step of five tokens after which two requests sample, on this rank."""
        mesh = Mesh(plan)
        ranks = ServingRanks(mesh)
        part = ModelPart(part_of(name, ranks.place), scarce(plan), ranks)
        mesh.ledger.clear()
        inputs = text_inputs((1, 2, 3, 4, 5), 4)
        inputs = type(inputs)(inputs.flat, inputs.tables, inputs.queries, 0, [4])
        if ranks.is_lead:
            ranks.tell(RankMessage("step", inputs))
            part.logits(inputs)
            ranks.tell(RankMessage("stop"))
        else:
            follow_steps(part)
        entries = mesh.ledger.entries().items()
        return {"/".join(key): [one.calls, one.num_bytes] for key, one in entries if key[0] != "replica"}

    found = run_local(rank, 2, LIMIT_SECONDS)
    assert found[0][0]["tokens"] != {name: expected[name] for name in found[0][0]["tokens"]}
    for index, (name, case) in enumerate(cases):
        for rank_index in range(2):
            stage = (rank_index - 1) % 2 if case.pipe.degree == 2 else 0
            stated = list(step_calls(ServedSizes.of(CONFIGS[name]), case, stage, 5, 1, 8))
            calls, sums = Counter("/".join(key) for key, _ in stated), Counter[str]()
            for key, num_bytes in stated:
                sums["/".join(key)] += num_bytes
            assert found[rank_index][1][index] == {key: [calls[key], sums[key]] for key in calls}, (name, rank_index)


def test_plans_that_cannot_serve_are_refused_in_words() -> None:
    llama = CONFIGS["llama"]
    for plan, words in (
        (Plan(tensor=Tensor(3)), "tensor.x = 3 does not divide the 4 heads"),
        (Plan(pipe=Pipe(3)), "pipe = 3 stages are more than the model's 2 layers"),
        (Plan(expert=2), "has no layer of experts"),
        (Plan(shard=Shard(2)), "the plan sets more"),
        (Plan(memory=Memory(recompute="full")), "the plan sets more"),
    ):
        with pytest.raises(PlanError, match=words):
            refuse_plan(llama, plan)
    with pytest.raises(PlanError, match=r"experts are not served over y, and plan.tensor.y = 2"):
        refuse_plan(CONFIGS["mixtral"], Plan(tensor=Tensor(1, 2)))
    with pytest.raises(PlanError, match=r"plan.expert = 16 is more than the \d+ experts of a layer"):
        refuse_plan(CONFIGS["mixtral"], Plan(expert=16))


def test_parts_have_as_many_parameters_as_stated_and_stages_hold_all() -> None:
    """A tied head (qwen2) is held beside the embedding if they are on different stages."""
    cases = [("qwen2-deep", Plan(pipe=Pipe(4))), ("mixtral", Plan(pipe=Pipe(2), expert=2, tensor=Tensor(2)))]
    for name, plan in [*cases, ("gpt2", Plan(tensor=Tensor(2, 2)))]:
        for index in range(plan.pipe.degree):
            place = RankPlace(plan, {**dict.fromkeys(plan.degrees, 0), "pipe": index})
            built = sum(parameter.numel() for parameter in part_of(name, place).parameters())
            assert part_numel(CONFIGS[name], place) == built, (name, index)
    whole = sum(parameter.numel() for parameter in whole_model("qwen3-deep").parameters())
    plan = Plan(pipe=Pipe(4))
    places = [RankPlace(plan, {**dict.fromkeys(plan.degrees, 0), "pipe": index}) for index in range(4)]
    assert sum(part_numel(CONFIGS["qwen3-deep"], place) for place in places) == whole


@pytest.mark.processes
def test_groups_of_ranks_that_measured_other_sums_take_the_same() -> None:
    """Ranks of `data` compute the same, and would round differently."""

    def rank(index: int) -> list[str]:
        mesh = Mesh(Plan(data=2, tensor=Tensor(x=2)))
        own: tuple[Strategy, ...] = ("one_shot", "symmetric_one_shot") if index < 2 else ("two_shot", "two_shot")
        with patch.object(ranks, "measured_choice", lambda axis, device: SmallChoice((256, 4096), own)):
            axis = ServingRanks(mesh, "measured").axes.x
        assert axis is not None
        assert axis.small is not None
        return list(axis.small.strategies)

    # Symmetric memory is not there on a CPU, so the library takes its place, on all ranks.
    assert run_local(rank, 4, LIMIT_SECONDS) == [["one_shot", "library"]] * 4


@pytest.mark.processes
def test_a_text_that_fails_on_one_rank_ends_the_engine() -> None:
    """The other rank waits for it in the middle of the text, and would take what comes next for that."""

    def rank(index: int) -> str:
        mesh = Mesh(Plan(tensor=Tensor(x=2)))
        own = ServingRanks(mesh)
        engine = Engine(part_of("llama", own.place), scarce(mesh.plan), own)
        failing = patch.object(ModelPart, "hidden_states", side_effect=MemoryError("too much"))
        with failing, pytest.raises(MemoryError):
            engine.embed((1, 2, 3), "mean")
        with pytest.raises(RuntimeError, match="ranks are out of step, as one of them failed: MemoryError"):
            engine.idle()
        return "ended"

    def other(index: int) -> str:
        own = ServingRanks(Mesh(Plan(tensor=Tensor(x=2))))
        ModelPart(part_of("llama", own.place), scarce(Plan(tensor=Tensor(x=2))), own)
        return own.next_message().kind

    assert run_local(lambda index: (other if index else rank)(index), 2, LIMIT_SECONDS) == ["ended", "text"]


@pytest.mark.processes
def test_a_replica_of_one_rank_launches_a_step_while_the_one_before_is_read() -> None:
    """As an engine without ranks does; one of several ranks does not."""
    options = EngineOptions(block_size=4, num_blocks=60, overlap=True)

    def rank(_: int) -> tuple[dict[str, Any] | None, list[bool]]:
        torch.set_num_threads(1)
        overlaps, found = [], None
        for plan in (Plan(tensor=Tensor(2)), Plan(data=2)):
            mesh = Mesh(plan)
            ranks = ServingRanks(mesh)
            if ranks.is_lead:
                overlaps.append(Engine(part_of("llama", ranks.place), options, ranks)._overlap)
            else:
                ModelPart(part_of("llama", ranks.place), options, ranks)
            if plan.data == 2:
                found = tokens_on_ranks("llama", mesh, requests(), options, ranks=ranks)
        return found, overlaps

    (found, overlaps), _ = run_local(rank, 2, LIMIT_SECONDS)
    assert overlaps == [False, True]
    tokens, embedding, _ = on_one_rank("llama")
    assert found is not None
    assert found["tokens"] == tokens
    assert found["embedding"] == pytest.approx(embedding, abs=1e-6)
    assert found["is_free"]
