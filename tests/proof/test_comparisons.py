"""What a proof compares and with which tolerance: buffers, results, unused parameters, noisy models, casts, batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import models_for_tests as models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft.sharding.flat_buffer
from weft.comm import Axis, Pending
from weft.errors import DataError, PlanError, VerifyError
from weft.memory.offload_activations import ACTIVATIONS
from weft.models import GPT2, GPT2Config
from weft.models.experts import grouped_product
from weft.models.loss import token_loss
from weft.plan import Context, Memory, Plan, Shard
from weft.plan import Tensor as TensorAxes
from weft.proof.compare import largest_of, results, tensors
from weft.proof.float64 import Float64
from weft.proof.prove import ProofReport, verify
from weft.proof.report import nan_as_inf, report_of
from weft.proof.sequential import make_model, run_sequential
from weft.sharding.units import units_of
from weft.step.objective import CROSS_ENTROPY, Objective

RANK = importlib.import_module("weft.proof.rank")
Patch = pytest.MonkeyPatch
WIDTH = models.WIDTH


def failed(report: ProofReport) -> dict[str, str]:
    """The checks that did not pass, and where."""
    return {check.what: check.where for check in report.checks if not check.passed}


# --- buffers


class RunningMean(models.MLP):
    """Keeps an exponential mean of its inputs, and the number of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.full((3,), float("-inf")))

    def forward(self, value: Tensor) -> Any:
        if self.training:
            self.mean.lerp_(value.detach().mean(0), 0.1)
            self.forwards += 1
        return super().forward(value)


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=Shard(2, 3), micro_batch=2)])
def test_a_running_mean_of_each_ranks_own_samples_is_found(plan: Plan) -> None:
    report = verify(RunningMean, models.vector_batch, plan)
    assert list(failed(report)) == ["worst buffer after the steps"]
    assert ", mean, which forwards change" in failed(report)["worst buffer after the steps"]


@pytest.mark.processes
def test_buffers_that_micro_batches_change_are_those_of_the_same_micro_batches() -> None:
    verify(RunningMean, models.vector_batch, Plan(micro_batch=2)).require()


@pytest.mark.processes
def test_finds_a_buffer_that_is_changed_on_one_rank_only(monkeypatch: Patch) -> None:
    def change(model: nn.Module) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = original(model)
        for name, buffer in found:
            if name == "table" and dist.get_rank() == 1:
                buffer[0] *= 1 + 1e-6
        return found

    original = RANK._buffers
    assert not failed(verify(_with_table, models.vector_batch, Plan(data=2)))
    monkeypatch.setattr(RANK, "_buffers", change)
    assert failed(verify(_with_table, models.vector_batch, Plan(data=2))) == {
        "worst buffer after the steps": "rank 1, table"
    }


def _with_table() -> nn.Module:
    model: nn.Module = models.MLP()
    model.register_buffer("table", torch.ones(2))
    model.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))
    return model


# --- the result


class WithFeatures(models.MLP):
    """Returns its logits and something that the loss does not use."""

    def forward(self, value: Tensor) -> Any:
        logits = super().forward(value)
        return {"logits": logits, "features": {"mean": self.feature(logits), "loss": logits.sum()}}

    def feature(self, logits: Tensor) -> Tensor:
        return logits.mean(-1)


def _logits_total(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model(batch[0])["logits"], batch[1])[0]


LOGITS = Objective(CROSS_ENTROPY.count, _logits_total)


@pytest.mark.processes
def test_the_result_is_compared_and_not_only_the_loss(monkeypatch: Patch) -> None:
    report = verify(WithFeatures, models.vector_batch, Plan(data=2), objective=LOGITS).require()
    assert "worst result after the steps" in {check.what for check in report.checks}
    monkeypatch.setattr(WithFeatures, "feature", _rank_dependent)
    wrong = verify(WithFeatures, models.vector_batch, Plan(data=2), objective=LOGITS)
    assert list(failed(wrong)) == ["worst result after the steps"]


def _rank_dependent(self: nn.Module, logits: Tensor) -> Tensor:
    is_split = units_of(self) is not None
    return logits.mean(-1) * (1 + 1e-6 * is_split)


# --- parameters without a gradient


class Routed(nn.Module):
    """Two experts; only the samples of the second half of a batch use the second, and nothing uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, value: Tensor) -> Tensor:
        is_second = value[:, 0] > 0
        parts = [self.experts[0](value[~is_second]), self.experts[1](value[is_second])]
        used = [part for part in parts if len(part)]
        order = torch.cat([(~is_second).nonzero(), is_second.nonzero()]).flatten()
        out: Tensor = self.head(torch.cat(used)[order.argsort()])
        return out


def _routed_batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, labels = models.vector_batch(step)
    inputs[:, 0] = torch.tensor([-1.0] * 4 + [1.0] * 4)
    return inputs, labels


SLICES = Plan(shard=Shard(2, 2), micro_batch=1, memory=Memory(accumulate="slice"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "batch", "plan"),
    [
        (models.Unused, models.vector_batch, Plan(data=2)),
        (models.Unused, models.vector_batch, Plan(shard=Shard(2, 3))),
        (models.Unused, models.vector_batch, SLICES),
        (Routed, _routed_batch, Plan(data=2)),
    ],
)
def test_a_parameter_without_a_gradient_on_any_rank_is_not_decayed(
    make: Callable[[], nn.Module], batch: Any, plan: Plan
) -> None:
    verify(make, batch, plan).require()


def _gpt2_with_idle_linear() -> nn.Module:
    model = GPT2(GPT2Config(vocab_size=62, n_positions=11, n_embd=12, n_layer=2, n_head=2))
    model.transformer.h[0].idle = nn.Linear(12, 12)
    return model


@pytest.mark.processes
def test_a_linear_that_no_forward_calls_is_passed_over_under_x() -> None:
    verify(_gpt2_with_idle_linear, models.token_batch, Plan(tensor=TensorAxes(x=2))).require()


class OtherOrder(nn.Module):
    """Registers a linear behind its head, of twice as many features as classes, and uses it inside or not at all."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.head, self.beside, self.is_used = nn.Linear(12, 6), nn.Linear(4, 12), is_used

    def forward(self, value: Tensor) -> Tensor:
        hidden = value[:, :12]
        out: Tensor = self.head(hidden + self.beside(value[:, :4]) if self.is_used else hidden)
        return out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("is_used", "reason"), [(True, "'add' joins its logits"), (False, "the model does not call it")]
)
def test_a_linear_behind_the_head_is_refused_under_x(is_used: bool, reason: str) -> None:
    with pytest.raises(PlanError, match=rf"the result of 'beside', the last linear that the model .*, and {reason}"):
        verify(lambda: OtherOrder(is_used), models.vector_batch, Plan(tensor=TensorAxes(x=2)))


class LeavesOut(nn.Module):
    """Never calls its last block; with `draws`, calls each of the others or not by a random number."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 5)
        self.draws = draws

    def forward(self, value: Tensor) -> Tensor:
        for block in list(self.blocks)[:3]:
            if not (self.training and self.draws and torch.rand(()) < 0.5):
                value = block(value).tanh()
        out: Tensor = self.head(value)
        return out


@pytest.mark.processes
def test_blocks_that_a_forward_leaves_out() -> None:
    verify(lambda: LeavesOut(False), models.vector_batch, Plan(shard=Shard(2, 3))).require()
    report = verify(lambda: LeavesOut(True), models.vector_batch, Plan(shard=Shard(2, 3)))
    with pytest.raises(VerifyError, match=r"was not proved: .*the model draws random numbers"):
        report.require()


# --- a model's own noise


class Noisy(nn.Module):
    """Multiplies rounding errors by about `gain`."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.first, self.head, self.gain = nn.Linear(WIDTH, 16), nn.Linear(16, 5), gain

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.head(torch.sin(self.gain * self.first(value)))
        return out


@pytest.mark.processes
def test_an_error_within_the_models_own_noise_passes_and_says_so(monkeypatch: Patch) -> None:
    report = verify(lambda: Noisy(3e4), models.vector_batch, Plan(data=2)).require()
    stated = [check for check in report.checks if "the model's own noise there is" in check.where]
    assert stated
    assert all(float(check.found) > 1e-9 for check in stated)

    def skip(tensor: Tensor, axis: Axis, wire: str) -> Pending:
        weft.comm.collectives.record(axis, "all_reduce", tensor)
        return Pending(None, axis, "all_reduce")

    monkeypatch.setattr(weft.sharding.flat_buffer, "all_reduce", skip)
    assert "worst gradient" in failed(verify(lambda: Noisy(3e4), models.vector_batch, Plan(data=2)))


def _answer(error: float, noise: float) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        f"{side}{kind}": {} for side in ("predicted", "counted") for kind in ("", "_state", "_host")
    }
    lists: dict[str, Any] = {
        "notes": [],
        "draws": [],
        "calls": [],
        "made_buffers": [],
        "num_compared": 1,
        "num_expected": 1,
    }
    return {
        "errors": {"evaluation": [0.0, "-", 0.0], "buffer": [error, "mean", noise]},
        **sizes,
        **lists,
    }


@pytest.mark.parametrize(
    ("error", "noise", "is_proved", "words"),
    [
        (2e-9, 4e-4, True, "the model's own noise there is 4e-04"),  # 10 x noise is above 1e-3
        (2e-9, 0.0, False, "rank 0, mean"),
        (2e-9, 1e-10, False, "rank 0, mean"),
        (2e-3, 4e-4, False, "too much to prove equality"),
        (5e-3, 4e-4, False, "the model's own noise there is 4e-04"),
    ],
)
def test_noise_raises_the_tolerance_to_a_thousandth_at_most(
    error: float, noise: float, is_proved: bool, words: str
) -> None:
    report = report_of([_answer(error, noise)], Plan(), (), None)
    assert report.passed is is_proved
    assert any(words in text for text in (*report.not_proved, *(check.where for check in report.checks)))


@pytest.mark.parametrize(("counted", "passed"), [(90, True), (100, True), (110, False)])
def test_fewer_activations_may_go_to_the_host_than_predicted_and_no_more(counted: int, passed: bool) -> None:
    """transformers makes masks for shapes, of which predictions know, but not for the data of a step."""
    answer = _answer(0.0, 0.0) | {"predicted_host": {ACTIVATIONS: 100}, "counted_host": {ACTIVATIONS: counted}}
    report = report_of([answer], Plan(), (), None)
    assert {check.what: check.passed for check in report.checks}[f"host: {ACTIVATIONS}"] is passed


@pytest.mark.processes
def test_a_model_that_is_mostly_noise_is_not_proved() -> None:
    report = verify(lambda: Noisy(1e13), models.vector_batch, Plan(data=2))
    assert not report.passed
    with pytest.raises(
        VerifyError, match=r"was not proved: .*the model's own noise there is .*too much to prove equality"
    ):
        report.require()


# --- infinities and NaN

INFINITE, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("same", [INFINITE, -INFINITE, NAN])
def test_what_is_infinite_or_no_number_on_both_sides_hides_no_other_error(same: float) -> None:
    def error(found: float, *others: float) -> float:
        mask = torch.tensor([same, *others])
        own, expected = torch.tensor([same, found]), torch.tensor([same, 2.0])
        return tensors({"own": own, "mask": mask}, {"own": expected, "mask": mask}).worst().error

    assert error(2.0) == error(2.0, 5.0) == 0.0
    assert error(2.5) == error(2.5, 5.0) == 0.25  # of its own largest number


@pytest.mark.parametrize(
    ("found", "expected"),
    [(INFINITE, 2.0), (2.0, INFINITE), (INFINITE, -INFINITE), (NAN, 2.0), (2.0, NAN), (NAN, INFINITE)],
)
def test_infinities_and_nan_must_be_at_the_same_places(found: float, expected: float) -> None:
    pair = torch.tensor([found, 1.0]), torch.tensor([expected, 1.0])
    assert nan_as_inf(tensors({"own": pair[0]}, {"own": pair[1]}).worst().error) == INFINITE
    assert nan_as_inf(results([("own", *pair)], largest_of([pair[1]])).worst().error) == INFINITE


def test_a_result_that_should_be_zero_is_compared() -> None:
    assert results([("own", torch.ones(2), torch.zeros(2))], 0.0).worst().error > 1e9


# --- casts, kernels without float64, dropout


class Casting(models.MLP):
    """Computes in float32 for a while, and drops."""

    def forward(self, value: Tensor) -> Any:
        narrow = functional.softmax(value.float(), -1, dtype=torch.float32) + torch.zeros(WIDTH)
        return super().forward(functional.dropout(narrow.to(torch.float32).type_as(value), 0.5))


class CastingBlock(nn.Linear):
    """Computes in float32 for a while."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.float().sin().type_as(value))


class CastingBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(CastingBlock(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        logits: Tensor = self.head(value)
        return logits


@pytest.mark.processes
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_casts_keep_float64_when_a_block_is_recomputed(recompute: Any) -> None:
    verify(CastingBlocks, models.vector_batch, Plan(data=2, memory=Memory(recompute))).require()


def test_a_model_that_is_compared_with_compiled_blocks_casts_as_they_do() -> None:
    """Compiled blocks cannot be kept from casting, so the unsplit model casts too."""

    def loss(keeps_casts: bool) -> float:
        run = run_sequential(
            make_model(CastingBlocks), models.vector_batch, CROSS_ENTROPY, 1, None, 8, [], keeps_casts=keeps_casts
        )
        return run.losses[0]

    values, labels = models.vector_batch(0)
    with torch.no_grad():
        plain = functional.cross_entropy(make_model(CastingBlocks)(values.double()), labels).item()
    assert loss(True) == pytest.approx(plain, rel=1e-15)
    assert loss(False) != pytest.approx(plain, rel=1e-12)


@pytest.mark.processes
def test_casts_inside_a_model_keep_float64_and_dropout_drops_nothing_and_both_are_said() -> None:
    report = verify(Casting, models.vector_batch, Plan(data=2)).require()
    casts, dropout = report.not_proved
    assert casts.startswith("casts to narrower floating point: the proof computes them in float64 (test_comparisons.py")
    assert dropout.startswith("dropout 0.5: the proof drops nothing (test_comparisons.py")


class Drawing(models.MLP):
    """Adds random numbers to its input."""

    def forward(self, value: Tensor) -> Any:
        return super().forward(value + torch.randn_like(value))


@pytest.mark.processes
def test_a_model_that_draws_random_numbers_is_not_said_to_differ() -> None:
    report = verify(Drawing, models.vector_batch, Plan(data=2))
    with pytest.raises(VerifyError, match=r"was not proved: the model draws random numbers \(test_comparisons\.py:\d+"):
        report.require()


def test_a_grouped_product_is_the_product_of_each_group() -> None:
    left, right = torch.randn(7, 3, dtype=torch.float64), torch.randn(3, 3, 5, dtype=torch.float64)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    expected = torch.cat([left[:2] @ right[0], left[2:6] @ right[2], torch.zeros(1, 5, dtype=torch.float64)])
    assert torch.equal(grouped_product(left, right, ends), expected)
    with Float64() as wide:
        assert torch.equal(functional.grouped_mm(left, right, offs=ends), expected)
    assert wide.notes[0].startswith("grouped products")
    by_rows = grouped_product(left.T, torch.ones(7, 2, dtype=torch.float64), ends)
    assert torch.equal(by_rows[2], left.T[:, 2:6] @ torch.ones(4, 2, dtype=torch.float64))


def test_the_mode_ends_with_its_context() -> None:
    with Float64():
        assert torch.zeros(1).float().dtype == torch.float64
    assert torch.zeros(1, dtype=torch.float64).float().dtype == torch.float32
    assert torch.zeros(1).dtype == torch.float32


# --- batches


class Pair(nn.Module):
    """Has two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, 5), nn.Linear(2, 5)

    def forward(self, value: Tensor, *, beside: Tensor) -> Tensor:
        out: Tensor = self.one(value) + self.other(beside)
        return out


def _nested_batch(step: int) -> dict[str, Any]:
    inputs, labels = models.vector_batch(step)
    return {"inputs": [inputs, inputs[:, :2].clone()], "labels": (labels,), "name": "pair"}


def _nested_total(model: nn.Module, batch: Any) -> Tensor:
    value, beside = batch["inputs"]
    return functional.cross_entropy(model(value, beside=beside), batch["labels"][0], reduction="sum")


NESTED = Objective(lambda batch: (batch["labels"][0] != -100).sum(), _nested_total)


@pytest.mark.processes
def test_a_batch_may_be_any_nested_value_and_a_model_have_several_inputs() -> None:
    verify(Pair, _nested_batch, Plan(data=2, micro_batch=2), objective=NESTED).require()


def test_a_batch_that_cannot_be_used_is_refused_in_words() -> None:
    with pytest.raises(DataError, match="have different first dims"):
        verify(Pair, lambda step: (torch.zeros(8, WIDTH), torch.zeros(3)), Plan(data=2))
    with pytest.raises(PlanError, match="has no 'labels' with which the model could compute its loss"):
        verify(Pair, lambda step: {"value": torch.zeros(8, WIDTH)}, Plan(data=2))
    objective = Objective(NESTED.count, lambda model, batch: model.get_submodule("one")(batch["inputs"][0]))
    with pytest.raises(PlanError, match="did not call Pair itself"):
        verify(Pair, _nested_batch, Plan(data=2), objective=objective)
    with pytest.raises(PlanError, match="context = 2, but no attention of Pair is one that weft can split"):
        verify(Pair, _nested_batch, Plan(context=Context(2)), objective=NESTED)


MODEL, BATCH = nn.Linear(2, 2), (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((MODEL, lambda step: BATCH, Plan()), r"model_fn is a Linear; .*lambda: Linear\(\.\.\.\)"),
        ((3, lambda step: BATCH, Plan()), "model_fn is a int"),
        ((lambda: MODEL, BATCH, Plan()), r"batch_fn is a tuple; .*lambda step: batch"),
        ((lambda: MODEL, lambda step: BATCH, 2), r"plan is a int; give a weft\.Plan"),
        ((lambda: None, lambda step: BATCH, Plan()), r"model_fn\(\) returned a NoneType"),
    ],
    ids=["a model", "a number", "a batch", "a degree", "no model"],
)
def test_what_verify_is_given_in_place_of_functions_is_named(arguments: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        verify(*arguments)
