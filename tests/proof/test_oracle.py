"""Every layout computes what the unsplit model does: loss, norm, gradients, parameters, traffic and state, in float64.

A covering sample of plans × models runs always, the full product with `-m soak`. The negative controls break one thing
each, in the parent before the ranks are forked, and the report must say so.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from models_for_tests import ALL_MODELS, ROOT_ONLY_MODELS, TOKEN_MODELS, VECTOR_MODELS, check
from sampled_for_tests import one_in
from torch import Tensor, nn

import weft.comm.collectives
import weft.parallel.gradient_norm
import weft.sharding.flat_buffer
import weft.step.train_step
from weft.comm import Axis, Ledger, Pending
from weft.errors import PlanError, VerifyError
from weft.plan import Memory, Plan, Precision, Recompute, Shard
from weft.sharding.flat_buffer import Flat

pytestmark = pytest.mark.processes


def shard(degree: int, stage: Any, **others: Any) -> Plan:
    """A plan over `shard`."""
    return Plan(shard=Shard(degree, stage), **others)


def slices(recompute: Recompute = "none") -> Memory:
    """Gradients that are reduced at every micro-batch."""
    return Memory(recompute, "slice")


# Every axis and stage, alone and together, with and without accumulation, at 2, 4 and 8 ranks.
PLANS: dict[str, Plan] = {
    "data 2": Plan(data=2),
    "data 2, accumulated": Plan(data=2, micro_batch=1),
    "data 4": Plan(data=4, micro_batch=1),
    "data 8": Plan(data=8),
    "shard 2 stage 1": shard(2, 1, micro_batch=2),
    "shard 2 stage 2": shard(2, 2, micro_batch=1),
    "shard 2 stage 3": shard(2, 3),
    "shard 2 stage 3, accumulated": shard(2, 3, micro_batch=1),
    "shard 4 stage 1": shard(4, 1),
    "shard 4 stage 2": shard(4, 2),
    "shard 4 stage 3": shard(4, 3, micro_batch=1),
    "shard 8 stage 1": shard(8, 1),
    "shard 8 stage 2": shard(8, 2),
    "shard 8 stage 3": shard(8, 3),
    "data 2 × shard 2 stage 1": Plan(data=2, shard=Shard(2, 1), micro_batch=1),
    "data 2 × shard 2 stage 2": Plan(data=2, shard=Shard(2, 2)),
    "data 2 × shard 2 stage 3": Plan(data=2, shard=Shard(2, 3), micro_batch=1),
    "data 2 × shard 4 stage 3": Plan(data=2, shard=Shard(4, 3)),
    "data 4 × shard 2 stage 2": Plan(data=4, shard=Shard(2, 2)),
    "data 4 × shard 2 stage 3": Plan(data=4, shard=Shard(2, 3)),
    "shard 2 stage 2, slice": shard(2, 2, micro_batch=1, memory=slices()),
    "shard 2 stage 3, slice": shard(2, 3, micro_batch=2, memory=slices()),
    "data 2 × shard 2 stage 3, slice": Plan(data=2, shard=Shard(2, 3), micro_batch=1, memory=slices()),
    "selective": Plan(data=2, memory=Memory("selective")),
    "full, stage 3": shard(2, 3, micro_batch=2, memory=Memory("full")),
    "selective, stage 3": shard(4, 3, memory=Memory("selective")),
    "full, stage 2, slice": shard(2, 2, micro_batch=2, memory=slices("full")),
}


@pytest.mark.parametrize("plan", one_in(2, PLANS))
@pytest.mark.sampled(3)
def test_every_plan_trains_a_tied_decoder(plan: Plan) -> None:
    check("tied decoder", plan).require()


@pytest.mark.parametrize("name", one_in(2, list(ALL_MODELS)))
@pytest.mark.sampled(3)
def test_every_model_is_sharded_in_stage_3(name: str) -> None:
    check(name, shard(2, 3, micro_batch=2)).require()


@pytest.mark.parametrize("name", one_in(2, list(ALL_MODELS)))
@pytest.mark.sampled(3)
def test_every_model_is_trained_over_data_and_shard(name: str) -> None:
    check(name, Plan(data=2, shard=Shard(2, 1)), clip=None).require()


@pytest.mark.parametrize("name", one_in(2, list(TOKEN_MODELS | VECTOR_MODELS)))
@pytest.mark.sampled(3)
def test_every_model_with_blocks_is_recomputed_in_stage_3(name: str) -> None:
    recompute: Recompute = "full" if name in VECTOR_MODELS else "selective"
    check(name, shard(2, 3, memory=Memory(recompute))).require()


@pytest.mark.parametrize("plan", [Plan(data=2), shard(4, 2), Plan(data=2, shard=Shard(2, 3))])
@pytest.mark.parametrize("clip", [None, 1e-3, 1e6])
@pytest.mark.sampled(4)
def test_clipping(plan: Plan, clip: float | None) -> None:
    check("gpt2", plan, clip).require()


def test_one_process_is_held_plainly_and_says_nothing() -> None:
    report = check("tied decoder", Plan(micro_batch=2)).require()
    assert not [line for line in report.checks if line.what.startswith("traffic")]


def test_the_plan_is_verified_in_float64_whatever_its_precision() -> None:
    report = check("mlp", Plan(data=2, precision="bf16")).require()
    assert report.plan.precision == "fp64"


def test_report_lists_what_was_compared() -> None:
    lines = {line.what for line in check("mlp", Plan(data=2, shard=Shard(2, 3))).checks}
    assert lines >= {
        "loss",
        "gradient norm",
        "worst gradient",
        "worst parameter after the steps",
        "traffic: tokens all_reduce",
        "traffic: data all_reduce",
        "traffic: shard all_gather",
        "traffic: state all_reduce",
        "traffic: shard reduce_scatter",
        "state: parameters",
        "state: gradients",
        "state: optimizer",
        "state: buffers",
    }


def test_a_batch_that_does_not_divide_is_refused_before_any_process_starts() -> None:
    with pytest.raises(PlanError, match=r"batch = 8 sequences does not divide over 3 ranks .*use 6 or 9"):
        check("mlp", Plan(data=3))


# --- negative controls: what is broken must be found, and named

Patch = pytest.MonkeyPatch
ORACLE = importlib.import_module("weft.proof.rank")


def broken(name: str, plan: Plan) -> dict[str, str]:
    """What the report found wrong: the check's name and where."""
    report = check(name, plan)
    assert not report.passed
    with pytest.raises(VerifyError, match="differs from the sequential model in"):
        report.require()
    return {line.what: line.where for line in report.checks if not line.passed}


def counted(axis: Axis, operation: str, whole: Tensor) -> Pending:
    """Enter a call in the ledger and do nothing."""
    if axis.degree > 1:
        weft.comm.collectives.record(axis, operation, whole)
    return Pending(None, axis, operation)


def test_finds_a_skipped_all_reduce_over_data(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        weft.sharding.flat_buffer, "all_reduce", lambda tensor, axis, *_: counted(axis, "all_reduce", tensor)
    )
    found = broken("tied decoder", Plan(data=2, shard=Shard(2, 3)))
    assert {"gradient norm", "worst gradient", "worst parameter after the steps"} <= set(found)
    assert not [what for what in found if what.startswith(("traffic", "state"))]


def test_finds_a_skipped_reduce_scatter(monkeypatch: Patch) -> None:
    def own_part(part: Tensor, whole: Tensor, axis: Axis, wire: str) -> Pending:
        part.copy_(whole.chunk(axis.degree)[axis.index])
        return counted(axis, "reduce_scatter", whole)

    monkeypatch.setattr(weft.sharding.flat_buffer, "reduce_scatter", own_part)
    found = broken("gpt2", shard(2, 2))
    assert "worst gradient" in found
    assert not [what for what in found if what.startswith(("traffic", "state"))]


def test_finds_one_wrong_element_of_one_gather_on_one_rank(monkeypatch: Patch) -> None:
    def corrupt(whole: Tensor, part: Tensor, axis: Axis, wire: str) -> Pending:
        pending = weft.comm.collectives.all_gather(whole, part, axis)
        pending.wait()
        if axis.index == 1:
            whole[0] += 1e-6
        return pending

    monkeypatch.setattr(weft.sharding.flat_buffer, "all_gather", corrupt)
    assert "loss" in broken("sequential", shard(2, 3))


def test_finds_a_stale_gather(monkeypatch: Patch) -> None:
    # The whole parameters of the first step are kept: later losses differ, the first gradient does not.
    start_gather = Flat.start_gather

    def once(self: Flat) -> None:
        if not hasattr(self, "kept"):
            start_gather(self)
            assert self._gathering is not None
            self._gathering.wait()
            self.kept = self.whole.clone()  # type: ignore[attr-defined]
            return
        if not self.is_whole and self._gathering is None:
            start_gather(self)
            assert self._gathering is not None
            self._gathering.wait()
            self.whole.copy_(self.kept)

    monkeypatch.setattr(Flat, "start_gather", once)
    found = broken("mlp", shard(2, 3))
    assert found["loss"].endswith(("step 2", "step 3"))
    assert "worst gradient" not in found


def test_finds_a_missing_mean(monkeypatch: Patch) -> None:
    finish_reduce = Flat.finish_reduce

    def total(self: Flat) -> None:
        finish_reduce(self)
        assert self.slice_gradient is not None
        self.slice_gradient.mul_(2)

    monkeypatch.setattr(Flat, "finish_reduce", total)
    found = broken("gpt2", Plan(data=2))
    assert {"gradient norm"} <= set(found)
    assert "loss" not in found or found["loss"].endswith(("step 2", "step 3"))


def test_finds_a_forgotten_micro_batch(monkeypatch: Patch) -> None:
    train_step = weft.step.train_step.train_step

    def forgetful(model: Any, optimizer: Any, micro_batches: Any, *others: Any, **options: Any) -> Any:
        return train_step(model, optimizer, micro_batches[:-1], *others, **options)

    monkeypatch.setattr(ORACLE, "train_step", forgetful)
    assert broken("mlp", Plan(data=2, micro_batch=2))["loss"]


def test_finds_a_micro_batch_whose_gradient_is_lost(monkeypatch: Patch) -> None:
    take_gradient = Flat.take_gradient

    def last_only(self: Flat, index: int) -> None:
        self.whole_gradient.filled.discard(index)
        take_gradient(self, index)

    monkeypatch.setattr(Flat, "take_gradient", last_only)
    found = broken("mlp", Plan(data=2, micro_batch=2))
    assert "worst gradient" in found


def test_finds_a_norm_that_is_not_summed_over_shard(monkeypatch: Patch) -> None:
    silent = lambda tensor, axis: counted(axis, "all_reduce", tensor)  # noqa: E731
    monkeypatch.setattr(weft.parallel.gradient_norm, "all_reduce", silent)
    assert "gradient norm" in broken("tied decoder", shard(2, 3))


def test_finds_a_loss_that_each_rank_normalises_alone(monkeypatch: Patch) -> None:
    # The label masks are uneven, so the mean of the ranks' means is not the mean.
    monkeypatch.setattr(
        weft.step.train_step, "all_reduce", lambda tensor, axis, *_: counted(axis, "all_reduce", tensor)
    )
    assert "loss" in broken("tied decoder", Plan(data=2))


def test_finds_a_gradient_that_one_piece_never_gets(monkeypatch: Patch) -> None:
    finish_reduce = Flat.finish_reduce

    def forgetful(self: Flat) -> None:
        finish_reduce(self)
        if self.shard.index == 1:
            self.pieces[-1].grad = None

    monkeypatch.setattr(Flat, "finish_reduce", forgetful)
    found = broken("mlp", shard(2, 2))
    assert found["worst parameter after the steps"] == "rank 1, second.bias"


def test_finds_a_collective_that_is_not_counted(monkeypatch: Patch) -> None:
    record = Ledger.record

    def forgetful(self: Ledger, axis: str, operation: str, num_bytes: int) -> None:
        if operation != "reduce_scatter":
            record(self, axis, operation, num_bytes)

    monkeypatch.setattr(Ledger, "record", forgetful)
    assert list(broken("mlp", shard(2, 3))) == ["traffic: shard reduce_scatter"]


def test_finds_a_collective_that_is_counted_twice(monkeypatch: Patch) -> None:
    record = Ledger.record

    def double(self: Ledger, axis: str, operation: str, num_bytes: int) -> None:
        for _ in range(2 if axis == "data" else 1):
            record(self, axis, operation, num_bytes)

    monkeypatch.setattr(Ledger, "record", double)
    assert list(broken("mlp", Plan(data=2))) == ["traffic: data all_reduce"]


def test_finds_a_collective_that_nobody_predicted(monkeypatch: Patch) -> None:
    finish_reduce = Flat.finish_reduce

    def chatty(self: Flat) -> None:
        finish_reduce(self)
        weft.comm.collectives.broadcast(torch.zeros(1), self.shard).wait()

    monkeypatch.setattr(Flat, "finish_reduce", chatty)
    assert list(broken("mlp", shard(2, 3))) == ["traffic: shard broadcast"]


def test_finds_whole_parameters_that_stage_3_does_not_free(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Flat, "_free_whole", lambda self: None)
    assert list(broken("gpt2", shard(2, 3))) == ["state: parameters"]


def test_finds_whole_gradients_that_stage_2_does_not_free(monkeypatch: Patch) -> None:
    continue_reduce = Flat.continue_reduce

    def hoard(self: Flat) -> None:
        kept = self.whole_gradient.tensor
        assert kept is not None
        continue_reduce(self)
        self.whole_gradient.set_tensor(kept)

    monkeypatch.setattr(Flat, "continue_reduce", hoard)
    assert list(broken("gpt2", shard(2, 2))) == ["state: gradients"]


@pytest.mark.parametrize("where", ["first", "last"])
def test_finds_a_parameter_that_is_not_a_number(monkeypatch: Patch, where: str) -> None:
    # One element of a copy of one piece becomes NaN behind the last step: nothing else can show it.
    def poison(model: nn.Module) -> list[tuple[Any, Tensor]]:
        pieces: list[tuple[Any, Tensor]] = original(model)
        pieces[0 if where == "first" else -1][1][0] = float("nan")
        return pieces

    original = ORACLE._pieces
    monkeypatch.setattr(ORACLE, "_pieces", poison)
    assert list(broken("mlp", Plan(data=2))) == ["worst parameter after the steps"]


def test_finds_a_loss_that_is_not_a_number_in_a_later_step(monkeypatch: Patch) -> None:
    train_step, calls = weft.step.train_step.train_step, itertools.count()

    def poison(*given: Any, **options: Any) -> Any:
        result = train_step(*given, **options)
        if next(calls) == 2:
            result.loss.fill_(float("nan"))
        return result

    monkeypatch.setattr(ORACLE, "train_step", poison)
    assert list(broken("mlp", Plan(data=2))) == ["loss"]


def test_finds_a_piece_that_no_rank_holds(monkeypatch: Patch) -> None:
    original = ORACLE._pieces
    monkeypatch.setattr(ORACLE, "_pieces", lambda model: original(model)[1:])
    assert any("parameter" in what for what in broken("mlp", Plan(data=2)))


# --- the full product

FULL_AXES: list[dict[str, Any]] = [{"data": degree} for degree in (2, 4, 8)]
FULL_AXES += [{"shard": Shard(d, stage)} for d in (2, 4, 8) for stage in (1, 2, 3)]  # type: ignore[arg-type]
FULL_AXES += [
    {"data": data, "shard": Shard(degree, stage)}  # type: ignore[arg-type]
    for data, degree in ((2, 2), (2, 4), (4, 2))
    for stage in (1, 2, 3)
]


def full_plans() -> list[Plan]:
    """Every axis with every memory policy, with accumulation where the batch allows it."""
    plans = []
    precision: Precision = "fp64"
    for axes, recompute, accumulate in itertools.product(
        FULL_AXES, ("none", "selective", "full"), ("once", "whole", "slice")
    ):
        given = axes.get("shard", Shard())
        ranks = axes.get("data", 1) * given.degree
        is_sliced = accumulate == "slice"
        if (is_sliced and (given.degree == 1 or given.stage == 1)) or (accumulate != "once" and ranks == 8):
            continue
        memory = Memory(recompute, "slice" if is_sliced else "whole")  # type: ignore[arg-type]
        plans.append(Plan(**axes, micro_batch=None if accumulate == "once" else 1, memory=memory, precision=precision))
    return plans


@pytest.mark.soak
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ALL_MODELS)
@pytest.mark.parametrize("plan", full_plans(), ids=lambda plan: f"{plan.describe_axes()}, {plan.memory}")
def test_full_product(plan: Plan, name: str, clip: float | None) -> None:
    if plan.memory.recompute != "none" and name in ROOT_ONLY_MODELS:
        with pytest.raises(PlanError, match="works on blocks, and the model has none"):
            check(name, plan, clip)
        return
    check(name, plan, clip).require()
