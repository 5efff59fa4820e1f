"""The law of the ledger: what the strategies state is what a run counts, to the byte, on random plans and models.

Each case is one step on two or four forked ranks: traffic by axis, operation and size of each call, and bytes of state.
A sample runs always, the same each time; with `-m soak` many more, others each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from random_for_tests import DEGREES, Case, CNNs, Conv, Decoders, Layer, MLPs, draw_case
from runs_for_tests import DEEP, Silent, make_run, write_run_file
from torch import Tensor
from torch.optim import Optimizer

import weft.parallel.apply
from weft.comm import add_traffic, expand
from weft.comm.ledger import Key, Traffic
from weft.data.order import local_indices
from weft.errors import PlanError
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh, level_degrees
from weft.models import DecoderConfig, build
from weft.optim import AdamW
from weft.parallel.apply import cost, parallelize, refuse
from weft.parallel.data import DataAxis
from weft.parallel.model_state import all_units, state_bytes
from weft.parallel.shard import ShardAxis
from weft.pipeline.build import Staging, stage
from weft.plan import BatchSplit, Pipe, Plan, Shard, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import Profile, profile
from weft.proof.prove import verify
from weft.sharding.layout import COMPUTE_DTYPE
from weft.step.examples import example_inputs, micro_batch_profile
from weft.step.objective import step_traffic
from weft.step.train_step import train_step
from weft.strategy import Cost
from weft.train import loop

pytestmark = pytest.mark.processes

LEAST_REAL = 0.6  # of the cases drawn; the others are refused


def differences(case: Case) -> list[str]:
    """Where the cost of a case and one step of it differ; PlanError where it is refused."""
    plan, (inputs, _) = case.plan, case.inputs()
    sequence = inputs.shape[1] if plan.context.degree > 1 else 1
    split = split_batch(plan, case.batch, sequence)
    example = inputs[: split.micro_batch]
    found = profile(case.build(), lambda: (example,), dtype=COMPUTE_DTYPE[plan.precision])
    refuse(found, plan)
    cost(found, plan, split)  # what cannot be split is told here
    answers = run_local(lambda rank: on_rank(case, found, split), plan.num_ranks, 60)
    return [f"rank {rank}: {line}" for rank, answer in enumerate(answers) for line in answer]


def on_rank(case: Case, found: Profile, split: BatchSplit) -> list[str]:
    """One step; what of it was not predicted, or predicted and not done."""
    plan = case.plan
    # What every rank finds again by itself was found once, before the fork: nothing else is left out.
    setattr(weft.parallel.apply, "profile", lambda *_: found)  # noqa: B010 (to mypy)
    mesh = Mesh(plan, ranks_per_node=case.ranks_per_node)
    model = parallelize(case.build(), plan, mesh, example=found.example)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    nothing = [torch.zeros(0, requires_grad=True)]  # a stage may be frozen
    optimizer: Optimizer = AdamW(model) if all_units(model) else torch.optim.AdamW(trained or nothing, foreach=True)
    state: dict[str, int] = {}
    optimizer.register_step_pre_hook(lambda *_: state.update(state_bytes(model, optimizer)))
    mesh.ledger.clear()
    train_step(model, optimizer, own_batches(case, split, mesh["batch"].index), mesh)
    state["optimizer"] = optimizer_bytes(optimizer)
    predicted = cost(found, plan, split, mesh.coordinates)
    levels = level_degrees(plan, case.ranks_per_node)
    traffic = expand(add_traffic(predicted.traffic, step_traffic(plan)), levels)
    return [*differing(traffic, mesh.ledger.entries()), *differing(predicted.state_bytes, state)]


def differing(predicted: Any, counted: Any) -> list[str]:
    keys = sorted({*predicted, *counted}, key=str)
    pairs = [(key, predicted.get(key), counted.get(key)) for key in keys]
    return [f"{key}: predicted {told(a)}, counted {told(b)}" for key, a, b in pairs if a != b]


def told(value: Any) -> str:
    return f"{dict(sorted(value.sizes.items()))}" if isinstance(value, Traffic) else f"{value}"


def optimizer_bytes(optimizer: Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum({value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}.values())


def own_batches(case: Case, split: BatchSplit, index: int) -> list[tuple[Tensor, ...]]:
    """This rank's micro-batches."""
    inputs, labels = case.inputs()
    rows = local_indices(torch.arange(split.batch).numpy(), split.micro_batch, split.num_batch_ranks, index)
    return [(inputs[torch.from_numpy(chosen)], labels[torch.from_numpy(chosen)]) for chosen in rows]


# --- random cases


class Tally:
    """How many cases were drawn and why some were refused."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.refused: list[str] = []

    def check(self, case: Case) -> None:
        """Hold one case to the law."""
        self.num_drawn += 1
        try:
            found = differences(case)
        except PlanError as error:
            self.refused.append(f"{case.plan.describe_axes()}, {case.model}: {error}")
            reject()
        assert not found, f"{case}\n" + "\n".join(found)


def hold_to_the_law(all_degrees: Sequence[Mapping[str, int]], **options: Any) -> None:
    """Each choice of degrees with random models and the rest of the plan drawn."""
    tally = Tally()
    drawn = settings(database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck], **options)

    def holds(degrees: Mapping[str, int], seed: int) -> None:
        tally.check(draw_case(degrees, seed))

    for degrees in all_degrees:
        drawn(given(st.just(degrees), st.integers(0, 2**32 - 1))(holds))()
    real = 1 - len(tally.refused) / tally.num_drawn
    assert real >= LEAST_REAL, "\n".join([f"only {real:.0%} of {tally.num_drawn} cases fit", *tally.refused])


def test_cost_equals_ledger_on_random_plans_and_models() -> None:
    hold_to_the_law(DEGREES[::4], max_examples=1, derandomize=True)


@pytest.mark.soak
def test_cost_equals_ledger_on_many_random_plans_and_models() -> None:
    """Every axis alone and every two."""
    hold_to_the_law(DEGREES, max_examples=40)


# --- what random cases have found


def stack(plan: Plan, activation: str = "gelu", num_tokens: int = 8, bias: bool = True) -> Case:
    layers = (Layer(8, "rms", activation, bias, True),) * 3
    return Case(plan, MLPs(8, layers, False, num_tokens), (), 4 * plan.num_batch_ranks)


CONVOLUTIONS = CNNs(
    (Conv(6, 3, 2, 1, "none", True), Conv(4, 3, 1, 1, "group", True), Conv(5, 1, 1, 1, "none", False)), False
)
PIPE_AND_Y = Plan(pipe=Pipe(2), tensor=TensorPlan(y=2), micro_batch=2)
FLAT = (Layer(4, "none", "tanh", True, False),) * 2
SEQUENCE = TensorPlan(x=2, sequence=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(PIPE_AND_Y, CONVOLUTIONS, (), 4),  # whose stream is whole over y, in stages without convolutions too
        stack(Plan(data=2, pipe=Pipe(2), micro_batch=2, precision="bf16"), num_tokens=0),  # whose inputs are cast
        stack(Plan(tensor=SEQUENCE), "relu in place", bias=False),  # which changes what a column gives
    ],
)
def test_cases_that_once_failed(case: Case) -> None:
    assert differences(case) == []


def test_convolutions_over_pipe_and_y_compute_what_the_unsplit_model_does() -> None:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(step)
        return CONVOLUTIONS.batch(4)

    verify(CONVOLUTIONS.build, batch, PIPE_AND_Y).require()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (stack(Plan(tensor=TensorPlan(y=2)), num_tokens=0), "tensor.y = 2, but 'enter' has no partner"),
        (
            Case(Plan(tensor=TensorPlan(y=2)), MLPs(8, FLAT, True, 0), (), 4),
            r"begins with an nn\.Embedding, and the model has none.*use y = 1",
        ),
        (stack(Plan(tensor=SEQUENCE), num_tokens=5), r"splits the 5 tokens .* over x = 2; use a sequence that it"),
        (stack(Plan(tensor=replace(SEQUENCE, chunks=2)), num_tokens=6), "chunks = 2 does not divide the 3 tokens"),
        (stack(Plan(tensor=SEQUENCE), num_tokens=0), r"but the first is given \[4, 8\]; use false"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_rank_starts(case: Case, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        differences(case)


class CutError(Exception):
    """Where a run was cut into stages."""


def test_a_run_is_cut_as_its_prediction_is(tmp_path: Path) -> None:
    # By memory, in which the loss counts, in the dtype that computes, for whole sequences.
    text = DEEP.replace("hidden_size = 40", "hidden_size = 8\nvocab_size = 8000")
    text = text.replace("num_hidden_layers = 4", "num_hidden_layers = 6")
    plan = ['plan.pipe={degree=2, balance="memory"}', "plan.context=2", "plan.precision=bf16", "plan.micro_batch=2"]
    run = make_run(write_run_file(tmp_path, text), "cut", *plan)
    predicted = stage(micro_batch_profile(run), run.plan).stage_of

    def stop(staging: Staging, *_: Any) -> None:
        raise CutError(dict(staging.stage_of))

    def rank(index: int) -> Any:
        place = RankInfo(index, run.plan.num_ranks, index, run.plan.num_ranks)
        world = patch.object(loop, "world", lambda run, place, store: nullcontext(Mesh(run.plan)))
        with world, patch.object(weft.parallel.apply, "build", stop), pytest.raises(CutError) as found:
            loop.train(run, place, Silent())
        return found.value.args[0]

    assert run_local(rank, run.plan.num_ranks) == [predicted] * run.plan.num_ranks
    without_loss = profile(build(run.model), lambda: example_inputs(run), dtype=torch.bfloat16)
    assert stage(without_loss, run.plan).stage_of != predicted


# --- negative controls


def small(plan: Plan) -> Case:
    config = DecoderConfig(vocab_size=9, hidden_size=4, intermediate_size=3, num_hidden_layers=1, num_attention_heads=2)
    return Case(plan, Decoders(config, 4), (), 2 * plan.num_batch_ranks)


def test_the_law_holds_for_the_case_of_the_controls() -> None:
    assert differences(small(Plan(data=2, shard=Shard(2, 2)))) == []


def test_finds_a_call_that_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = DataAxis.cost

    def one_less(self: DataAxis, *given: Any) -> Cost:
        found = stated(self, *given)
        (key, traffic), *_ = found.traffic.items()
        size = min(traffic.sizes)
        left = {s: calls - (s == size) for s, calls in traffic.sizes.items() if calls - (s == size)}
        fewer: dict[Key, Traffic] = {key: Traffic(traffic.calls - 1, traffic.num_bytes - size, left)}
        return replace(found, traffic=fewer)

    monkeypatch.setattr(DataAxis, "cost", one_less)
    found = differences(small(Plan(data=2, shard=Shard(2, 2))))
    assert len(found) == 4  # ranks
    assert all("('data', 'all_reduce')" in line for line in found)


def test_finds_bytes_that_are_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = ShardAxis.cost

    def lighter(self: ShardAxis, *given: Any) -> Cost:
        found = stated(self, *given)
        return replace(found, state_bytes={**found.state_bytes, "gradients": found.state_bytes["gradients"] - 4})

    monkeypatch.setattr(ShardAxis, "cost", lighter)
    found = differences(small(Plan(shard=Shard(2, 3))))
    assert [line.split(":")[1].strip() for line in found] == ["gradients"] * 2


def test_finds_calls_of_another_size_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = DataAxis.cost

    def evened(self: DataAxis, *given: Any) -> Cost:
        found = stated(self, *given)
        shares = {key: Traffic(t.calls, t.num_bytes, shifted(t.sizes)) for key, t in found.traffic.items()}
        return replace(found, traffic=shares)

    def shifted(sizes: Any) -> dict[int, int]:
        low, high = min(sizes), max(sizes)
        assert low != high
        return {**sizes, low: sizes[low] - 1, high: sizes[high] - 1, low + 4: 1, high - 4: 1}

    monkeypatch.setattr(DataAxis, "cost", evened)
    assert differences(small(Plan(data=2)))
