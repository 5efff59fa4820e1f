"""The axis pipe: every schedule, cut and model computes what the unsplit model does, holds and says what was predicted.

`weft.verify` compares loss, norm, gradients, parameters, traffic and state in float64. What it does not see is
here too: activations alive at once, copies equal to the bit, draws, evaluation, and what is left when a rank dies. A
sample that covers all runs always, the full product with `-m soak`. Negative controls break one thing each.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import models_for_tests as plain
import pipeline_for_tests as models
import pytest
import torch
from pipeline_for_tests import Batch, chain, double, images, make, on_stages, tokens, vectors
from runs_for_tests import DEEP, make_run, write_run_file
from sampled_for_tests import one_in, some_soak
from sleeping_for_tests import Chain, Trainer, micro_batches, run_ranks
from torch import Tensor, nn
from torch.optim import SGD

import weft.comm.collectives
import weft.pipeline.shared_parameters
from weft.comm import Axis, Pending
from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.launch import local_ranks as local
from weft.launch.local_ranks import LocalError, run_local
from weft.mesh import Mesh
from weft.models import token_loss
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_flats, named_pieces
from weft.pipeline.runtime import Pipeline, Stage
from weft.pipeline.shared_parameters import SharedParameters
from weft.pipeline.step_run import StepRun
from weft.plan import Context, Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.proof.prove import ProofReport, verify, verify_run
from weft.schedule import Action, make_schedule, simulate
from weft.step.objective import CROSS_ENTROPY, Objective
from weft.step.train_step import evaluate, train_step

pytestmark = pytest.mark.processes

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "bidirectional", "message")
ModelFn = Callable[[], nn.Module]


def _total(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch[0])
    return token_loss(output["logits"] if isinstance(output, dict) else output, batch[1])[0]


OBJECTIVE = Objective(CROSS_ENTROPY.count, _total)  # also for models that return a dict


def check(
    model_fn: ModelFn, batch: Callable[[int], Batch], pipe: Pipe, objective: Objective = OBJECTIVE, **others: Any
) -> ProofReport:
    """Verify a model under a plan; micro-batches of one sample unless told."""
    plan = Plan(pipe=pipe, **{"micro_batch": 1, **others})
    return verify(model_fn, batch, plan, objective=objective, steps=2)


# --- schedules


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(2)
def test_every_schedule_at_four_ranks(schedule: Any) -> None:
    # Nine blocks do not divide over four or eight stages, and each takes what the first has made.
    check(lambda: models.Fan(9), vectors(6), Pipe(4, schedule)).require()


@pytest.mark.parametrize("schedule", one_in(3, SCHEDULES))
def test_every_schedule_at_eight_ranks(schedule: Any) -> None:
    depth = 17 if schedule == "interleaved" else 9
    check(chain(depth), vectors(4), Pipe(8, schedule)).require()


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ("gpipe", 3),
        ("1f1b", 1),
        ("1f1b", 16),
        ("interleaved", 1),
        ("interleaved", 7),
        ("zero-bubble", 5),
        ("gems", 1),
        ("bidirectional", 1),
        ("bidirectional", 5),
        ("message", 8),
    ],
)
@pytest.mark.sampled(2)
def test_every_schedule_at_two_ranks(schedule: Any, count: int) -> None:
    check(models.Fan, vectors(count), Pipe(2, schedule)).require()


@pytest.mark.soak
@pytest.mark.parametrize("count", range(1, 17))
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_numbers_of_micro_batches(schedule: Any, degree: int, count: int) -> None:
    if schedule == "gems" and count > 1 and count % 2:
        with pytest.raises(PlanError, match=rf"gems: batches = {count} is odd"):
            check(chain(9), vectors(count), Pipe(degree, schedule))
        return
    check(chain(9), vectors(count), Pipe(degree, schedule)).require()


@pytest.mark.parametrize(("batches", "count"), [(1, 3), (2, 6), (4, 4), (6, 6)])
@pytest.mark.sampled(2)
def test_gems_batches(batches: int, count: int) -> None:
    check(models.UNet, vectors(count), Pipe(4 if batches == 4 else 2, "gems", batches=batches)).require()


@pytest.mark.parametrize(
    "pipe",
    [
        Pipe(2, "interleaved", chunks=3),
        Pipe(3, "message", in_flight=2),
        Pipe(2, "1f1b", in_flight=1),
        Pipe(2, "interleaved", chunks=2, in_flight=4),
    ],
)
def test_options_of_schedules(pipe: Pipe) -> None:
    check(models.UNet, vectors(5), pipe).require()


def test_stages_as_named() -> None:
    split = ("down.2", "up.0", "up.2")
    check(models.UNet, vectors(), Pipe(2, "interleaved", chunks=2, split=split)).require()


def test_stages_of_equal_memory() -> None:
    check(models.decoder, tokens(), Pipe(3, balance="memory")).require()


# --- models

VECTOR_MODELS: dict[str, ModelFn] = {
    "sequential": models.sequential,
    "u-net": models.UNet,
    "fan": models.Fan,
    "mixed": models.Mixed,
    "shared": models.Shared,
    "queries": models.Queries,
    "in place": models.InPlace,
    "looking": models.Looking,
    "records": models.Records,
    "frozen": models.Frozen,
    "adapters": plain.AdapterChain,
    "frozen behind trained": plain.FrozenHeads,
    "module in two blocks": plain.SharedModule,
    "parameter in two blocks": plain.SharedParameter,
    "structured": plain.Structured,
}
IMAGE_MODELS: dict[str, ModelFn] = {"vit": models.ViT, "resnet": models.ResNet}
TOKEN_MODELS: dict[str, ModelFn] = {
    "decoder": models.decoder,
    "gpt2": plain.gpt2,
    "frozen middle": plain.frozen_middle,
    "frozen first": plain.frozen_first,
    "transformers llama": plain.hf_llama,
    "transformers gpt2": plain.hf_gpt2,
    "transformers qwen2": plain.hf_qwen2,
}
ALL_MODELS = VECTOR_MODELS | IMAGE_MODELS | TOKEN_MODELS
LIKE_OTHERS = ("adapters", "frozen behind trained", "parameter in two blocks", "structured", "gpt2", "frozen middle")
OWN_BATCH = ("adapters", "frozen behind trained", "module in two blocks", "parameter in two blocks", "structured")


def batch_of(name: str) -> tuple[Callable[[int], Batch], int]:
    """Batches for a model, and the size of a micro-batch of which there are four."""
    if name in OWN_BATCH:
        return plain.vector_batch, 2
    if name in TOKEN_MODELS:
        return (tokens(), 1) if name == "decoder" else (plain.token_batch, 2)
    return (images(8), 2) if name in IMAGE_MODELS else (vectors(), 1)


def check_model(name: str, pipe: Pipe, **others: Any) -> ProofReport:
    batch, size = batch_of(name)
    objective = CROSS_ENTROPY if name in TOKEN_MODELS or name == "structured" else OBJECTIVE
    return check(ALL_MODELS[name], batch, pipe, objective, micro_batch=size, **others)


@pytest.mark.parametrize("name", one_in(2, [name for name in ALL_MODELS if name not in LIKE_OTHERS]))
@pytest.mark.sampled(2)
def test_every_model_in_two_stages(name: str) -> None:
    check_model(name, Pipe(2)).require()


@pytest.mark.parametrize("name", some_soak(["mixed", "shared", "looking", "resnet"], "mixed", "resnet"))
def test_models_in_mirrored_stages(name: str) -> None:
    check_model(name, Pipe(4, "bidirectional")).require()


@pytest.mark.parametrize("first", range(1, 5))
def test_changes_in_place_at_every_cut(first: int) -> None:
    check(models.InPlace, vectors(), Pipe(2, split=("head" if first == 4 else f"blocks.{first}",))).require()


def test_a_block_that_changes_its_input() -> None:
    check(models.Changing, vectors(), Pipe(2, split=("blocks.1",))).require()


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ALL_MODELS)
def test_every_model_under_every_schedule(name: str, schedule: Any) -> None:
    num_blocks = len(find_blocks(ALL_MODELS[name]()))
    if schedule == "interleaved" and num_blocks < 4:
        with pytest.raises(
            PlanError, match=f"4 stages need as many blocks, and the model's forward calls {num_blocks}"
        ):
            check_model(name, Pipe(2, schedule))
        return
    check_model(name, Pipe(2, schedule)).require()


# --- beside other axes

BESIDE: dict[str, Plan] = {
    "interleaved × data": Plan(data=2, pipe=Pipe(2, "interleaved")),
    "message × data": Plan(data=2, pipe=Pipe(2, "message")),
    "gems × data": Plan(data=2, pipe=Pipe(2, "gems")),
    "1f1b × shard 1": Plan(pipe=Pipe(2), shard=Shard(2, 1)),
    "bidirectional × shard 2": Plan(pipe=Pipe(2, "bidirectional"), shard=Shard(2, 2)),
    "zero-bubble × shard 3": Plan(pipe=Pipe(2, "zero-bubble"), shard=Shard(2, 3)),
    "gems × x (sequence)": Plan(pipe=Pipe(2, "gems"), tensor=TensorPlan(2, sequence=True)),
    "gpipe × y": Plan(pipe=Pipe(2, "gpipe"), tensor=TensorPlan(1, 2)),
    "1f1b × context": Plan(pipe=Pipe(2), context=Context(2)),
    "zero-bubble, full": Plan(pipe=Pipe(2, "zero-bubble"), memory=Memory("full")),
    "1f1b × shard 3, full": Plan(pipe=Pipe(2), shard=Shard(2, 3), memory=Memory("full")),
    "interleaved × shard 3 × x, selective": Plan(
        pipe=Pipe(2, "interleaved"), shard=Shard(2, 3), tensor=TensorPlan(2), memory=Memory("selective")
    ),
}
MORE: dict[str, Plan] = {
    f"{schedule} × {name}": replace(plan, pipe=Pipe(2, schedule))  # type: ignore[arg-type]
    for schedule in SCHEDULES
    for name, plan in {
        "data": Plan(data=2),
        "shard 1": Plan(shard=Shard(2, 1)),
        "shard 2": Plan(shard=Shard(2, 2)),
        "shard 3": Plan(shard=Shard(2, 3)),
        "x": Plan(tensor=TensorPlan(2)),
        "y": Plan(tensor=TensorPlan(1, 2)),
        "x × y (sequence)": Plan(tensor=TensorPlan(2, 2, sequence=True)),
        "context": Plan(context=Context(2)),
        "selective": Plan(memory=Memory("selective")),
        "full": Plan(memory=Memory("full")),
        "data × shard 3, full": Plan(data=2, shard=Shard(2, 3), memory=Memory("full")),
    }.items()
    if not (schedule == "message" and name.startswith(("shard", "x", "y", "context", "data × shard")))
    and not (schedule == "zero-bubble" and name.startswith(("x", "y")))
}


@pytest.mark.parametrize("plan", one_in(2, BESIDE))
@pytest.mark.sampled(2)
def test_beside_other_axes(plan: Plan) -> None:
    is_inside = plan.tensor.x * plan.tensor.y * plan.context.degree > 1  # these need attention
    model_fn, batch = (models.decoder, tokens(4)) if is_inside else (models.Shared, vectors(8))
    verify(
        model_fn, batch, replace(plan, micro_batch=1), objective=CROSS_ENTROPY if is_inside else OBJECTIVE, steps=2
    ).require()


@pytest.mark.parametrize("pipe", [Pipe(2, "interleaved"), Pipe(2, "bidirectional"), Pipe(2, "gems")], ids=str)
@pytest.mark.parametrize("offload", [0.4, pytest.param(1.0, marks=pytest.mark.soak)])
@pytest.mark.sampled(3)
def test_state_on_the_host_passes_one_set_of_slots_a_rank(pipe: Pipe, offload: float) -> None:
    verify(models.decoder, tokens(4), Plan(pipe=pipe, memory=Memory(offload=offload), micro_batch=1), steps=2).require()


@pytest.mark.parametrize("split", ["model.layers.0", "model.norm", "lm_head"])
@pytest.mark.sampled(3)
def test_a_stage_without_blocks_beside_a_split_sequence(split: str) -> None:
    tensor, memory = TensorPlan(2, sequence=True), Memory("full" if split == "model.norm" else "none")
    plan = Plan(pipe=Pipe(2, split=(split,)), tensor=tensor, memory=memory, micro_batch=2)
    verify(models.decoder, tokens(4), plan, steps=1).require()


@pytest.mark.soak
@pytest.mark.parametrize("plan", MORE.values(), ids=MORE.keys())
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_every_schedule_beside_every_other_axis(plan: Plan, micro_batch: int) -> None:
    verify(models.decoder, tokens(8), replace(plan, micro_batch=micro_batch), steps=2).require()


@pytest.mark.soak
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skips_under_every_schedule(schedule: Any, degree: int) -> None:
    check(lambda: models.Fan(17), vectors(6), Pipe(degree, schedule)).require()


# --- random graphs


def check_graph(seed: int) -> None:
    """A random graph, cut at random places."""
    schedule: Any = SCHEDULES[seed % len(SCHEDULES)]
    degree = 4 if schedule in ("gems", "bidirectional") else 3
    split = models.random_split(seed, degree * (2 if schedule == "interleaved" else 1))
    check(lambda: models.Graph(seed), vectors(6), Pipe(degree, schedule, split=split)).require()


@pytest.mark.parametrize("seed", [2, 19])  # small ones, of two schedules
def test_random_graphs(seed: int) -> None:
    check_graph(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(77))
def test_more_random_graphs(seed: int) -> None:
    check_graph(seed)


# --- negative controls

Patch = pytest.MonkeyPatch


def broken(report: ProofReport) -> dict[str, str]:
    """What the report found wrong, and where."""
    assert not report.passed
    return {line.what: line.where for line in report.checks if not line.passed}


def silent(tensor: Tensor, axis: Axis) -> Pending:
    """Enter an all-reduce in the ledger and do nothing."""
    weft.comm.collectives.record(axis, "all_reduce", tensor)
    return Pending(None, axis, "all_reduce")


def test_finds_a_micro_batch_that_is_not_scaled(monkeypatch: Patch) -> None:
    backward = StepRun._backward

    def unscaled(self: StepRun, stage: Stage, action: Action) -> None:
        kept = self.work
        if action.micro_batch == 2:
            assert kept.scales is not None
            self.work = replace(kept, scales=torch.ones_like(kept.scales))
        backward(self, stage, action)
        self.work = kept

    monkeypatch.setattr(StepRun, "_backward", unscaled)
    found = broken(check(chain(4), vectors(), Pipe(2)))
    assert "worst gradient" in found
    assert not [what for what in found if what.startswith(("traffic", "state"))]


@pytest.mark.parametrize("schedule", ["gems", "bidirectional"])
def test_finds_a_replica_that_is_left_out(monkeypatch: Patch, schedule: Any) -> None:
    monkeypatch.setattr(SharedParameters, "combine", lambda self: None)
    assert {"worst gradient", "traffic: mirror all_reduce"} <= set(
        broken(check(chain(4), vectors(), Pipe(2, schedule)))
    )


def test_finds_a_consumer_whose_gradient_is_dropped(monkeypatch: Patch) -> None:
    take = StepRun._take

    def forgetful(self: StepRun, key: Any) -> Tensor:
        tensor = take(self, key)
        edge, _, _, direction = key
        is_dropped = direction == "backward" and self.schedule.edges[edge][:2] == (0, 2)
        return torch.zeros_like(tensor) if is_dropped else tensor

    monkeypatch.setattr(StepRun, "_take", forgetful)
    found = broken(check(models.Fan, vectors(), Pipe(3)))
    assert found["worst gradient"].startswith("rank 0")
    assert "loss" not in found or found["loss"].endswith(("step 2", "step 3"))


def test_finds_a_tied_gradient_that_is_not_combined(monkeypatch: Patch) -> None:
    monkeypatch.setattr(weft.pipeline.shared_parameters, "all_reduce", silent)
    found = broken(check(models.decoder, tokens(), Pipe(2), CROSS_ENTROPY))
    assert found["worst gradient"].endswith("model.embed_tokens.weight")
    assert not [what for what in found if what.startswith(("traffic", "state"))]


# --- what verify does not see


def digests(model: nn.Module) -> dict[str, str]:
    """The bits of all parameters and buffers that a rank holds, by name and copy."""
    found = {}
    for part, piece in named_pieces(model):
        found[f"{part.parameter.name} {part.parameter.copy}"] = _digest(piece)
    assert isinstance(model, Pipeline)
    for (_, replica), stage in model.parts.items():
        found |= {f"{name} {replica}": _digest(buffer) for name, buffer in stage.model.named_buffers()}
    return found


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def copies_after_three_steps(model_fn: ModelFn, batch: Callable[[int], Batch], plan: Plan) -> dict[str, set[str]]:
    """The digests that the copies of each parameter and buffer have."""

    def rank(index: int) -> dict[str, str]:
        mesh = Mesh(plan)
        model = on_stages(model_fn, plan, mesh, split(batch(0), len(batch(0)[0]))[0])
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            train_step(model, optimizer, split(batch(step), len(batch(0)[0])), mesh, OBJECTIVE)
        return digests(model)

    found: dict[str, set[str]] = {}
    for answer in run_local(rank, plan.num_ranks):
        for name, digest in answer.items():
            found.setdefault(name.rpartition(" ")[0], set()).add(digest)
    return found


def split(batch: Batch, count: int) -> list[Batch]:
    """A batch in equal micro-batches, in float64."""
    return list(zip(*(tensor.chunk(count) for tensor in double(batch)), strict=True))


@pytest.mark.parametrize("schedule", ["gems", "bidirectional"])
def test_copies_are_equal_to_the_bit(schedule: Any) -> None:
    plan = Plan(pipe=Pipe(2, schedule), precision="fp64")
    found = copies_after_three_steps(models.decoder, tokens(4), plan)
    assert "model.embed_tokens.weight" in found
    assert len(found) == sum(1 for _ in models.decoder().named_parameters())
    assert [name for name, bits in found.items() if len(bits) > 1] == []


@pytest.mark.parametrize("count", [4, 3])
def test_statistics_of_replicas_agree(count: int) -> None:
    plan = Plan(pipe=Pipe(2, "bidirectional"), precision="fp64")
    found = copies_after_three_steps(models.ResNet, images(count), plan)
    assert sum("running" in name or "tracked" in name for name in found) == 7 * 3
    assert [name for name, bits in found.items() if len(bits) > 1] == []


def test_copies_that_are_not_combined_differ(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SharedParameters, "combine", lambda self: None)
    found = copies_after_three_steps(chain(4), vectors(), Plan(pipe=Pipe(2, "gems"), precision="fp64"))
    assert [name for name, bits in found.items() if len(bits) > 1] == list(found)


# --- activations alive


class Alive:
    """Counts the forwards of one rank of which saved tensors are alive: until all that hold their storage are gone."""

    def __init__(self, others: Sequence[Tensor]) -> None:
        self.now: tuple[int, int] | None = None  # the stage and micro-batch that runs forward
        self.others = {tensor.untyped_storage()._cdata for tensor in others}  # parameters and the batch itself
        self.held: dict[tuple[int, int], set[int]] = {}
        self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self.now is None or storage._cdata in self.others:
            return tensor
        held = self.held.setdefault(self.now, set())
        if storage._cdata not in held:
            held.add(storage._cdata)
            weakref.finalize(storage, held.discard, storage._cdata)
        self.peak = max(self.peak, sum(bool(held) for held in self.held.values()))
        return tensor


def measure_alive(pipe: Pipe, count: int, monkeypatch: Patch) -> tuple[list[int], list[int]]:
    """The most activations alive at once on each rank: measured on a real step, and simulated."""
    plan = Plan(pipe=pipe, precision="fp64")
    forward, batch = StepRun._forward, vectors(count)(0)

    def rank(index: int) -> tuple[int, int]:
        batches = split(batch, count)
        mesh = Mesh(plan)
        model = on_stages(chain(9), plan, mesh, batch)
        alive = Alive([*(tensor for own in batches for tensor in own), *(flat.whole for flat in all_flats(model))])

        def watched(self: StepRun, stage: Stage, action: Action) -> None:
            alive.now = action.stage, action.micro_batch
            forward(self, stage, action)
            alive.now = None

        monkeypatch.setattr(StepRun, "_forward", watched)
        with torch.autograd.graph.saved_tensors_hooks(alive.pack, lambda tensor: tensor):
            train_step(model, SGD(model.parameters(), lr=0.1), batches, mesh)
        assert not any(alive.held.values())
        return alive.peak, simulate(model.schedule(count)).peak_activations[index]

    answers = run_local(rank, pipe.degree)
    return [measured for measured, _ in answers], [simulated for _, simulated in answers]


@pytest.mark.parametrize(
    ("pipe", "count", "expected"),
    [
        (Pipe(3, "gpipe"), 5, [5, 5, 5]),
        (Pipe(3, "1f1b"), 5, [3, 2, 1]),
        (Pipe(2, "interleaved"), 4, [5, 3]),
        (Pipe(3, "zero-bubble"), 5, [3, 3, 3]),
        (Pipe(2, "gems"), 4, [1, 1]),
        (Pipe(2, "gems"), 8, [1, 1]),
        (Pipe(2, "gems", batches=2), 8, [4, 4]),
        (Pipe(4, "bidirectional"), 4, None),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_activations_alive_at_once(pipe: Pipe, count: int, expected: list[int] | None, monkeypatch: Patch) -> None:
    measured, simulated = measure_alive(pipe, count, monkeypatch)
    assert measured == simulated
    assert expected is None or measured == expected


def test_message_driven_order_keeps_to_its_cap(monkeypatch: Patch) -> None:
    measured, _ = measure_alive(Pipe(3, "message", in_flight=2), 6, monkeypatch)
    assert max(measured) <= 2
    assert measured[0] == 2


# --- messages


def test_messages_of_a_step() -> None:
    # In four stages six tensors cross: of the way down the first block's result to the last stage, the second's to the
    # two after it, the third's to the next; and twice a pair that was joined where its later half was made.
    split_at = ("down.2", "up.0", "up.2")
    plan, count = Plan(pipe=Pipe(4, split=split_at), precision="fp64"), 3
    batch = vectors(6)(0)

    def rank(index: int) -> list[int]:
        mesh = Mesh(plan)
        model = on_stages(models.UNet, plan, mesh, batch)
        mesh.ledger.clear()
        train_step(model, SGD(model.parameters(), lr=0.1), split(batch, count), mesh)
        sent = mesh.ledger.entries()["pipe", "send"]
        return [sent.calls, sent.num_bytes]

    answers = run_local(rank, 4)
    one = 2 * models.WIDTH * 8  # two samples in float64
    assert sum(calls for calls, _ in answers) == 2 * 6 * count
    assert sum(num_bytes for _, num_bytes in answers) == 2 * (4 * one + 2 * 2 * one) * count
    assert [calls for calls, _ in answers] == [3 * count, (1 + 2) * count, (3 + 1) * count, 2 * count]


# --- steps outside of verify


def sequential(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over batches and its gradients, with torch's own functions."""
    count = sum(int(CROSS_ENTROPY.count(batch)) for batch in batches)
    loss = sum(_total(model, batch) for batch in batches) / count
    assert isinstance(loss, Tensor)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(model: Pipeline, expected: dict[str, Tensor]) -> float:
    """The worst difference of what an optimizer is about to see."""
    errors = [
        float((piece.grad - expected[part.parameter.name].flatten()[part.start : part.stop]).abs().max())
        for part, piece in named_pieces(model)
        if piece.grad is not None
    ]
    return max(errors)


class Held(SGD):
    """An optimizer that changes nothing and keeps the error of the gradients that it is given."""

    def __init__(self, model: Pipeline, expected: dict[str, Tensor]) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model, self.expected, self.error = model, expected, float("inf")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.error = gradient_error(self.model, self.expected)


@pytest.mark.parametrize("schedule", ["zero-bubble", "gems", "message"])
def test_micro_batches_of_different_sizes(schedule: Any) -> None:
    plan = Plan(pipe=Pipe(2, schedule), precision="fp64")
    batches = [double(vectors(size, seed=size)(0)) for size in (3, 1, 2, 2)]

    def rank(index: int) -> float:
        loss, gradients = sequential(make(models.UNet), batches)
        mesh = Mesh(plan)
        model = on_stages(models.UNet, plan, mesh, batches[0])
        optimizer = Held(model, gradients)
        result = train_step(model, optimizer, batches, mesh, clip=None)
        return max(optimizer.error, abs(float(result.loss) - loss))

    assert max(run_local(rank, 2)) < 1e-12


@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, pipe=Pipe(2)),
        Plan(pipe=Pipe(2, "gems", batches=2)),
        Plan(pipe=Pipe(2, "bidirectional"), shard=Shard(2, 3)),
        Plan(pipe=Pipe(2, "message")),
    ],
    ids=lambda plan: str(plan.describe_axes()),
)
def test_evaluation_is_the_mean_loss_and_changes_nothing(plan: Plan) -> None:
    plan = replace(plan, precision="fp64")
    ranks = plan.num_batch_ranks
    batches = [double(vectors(2, seed=seed)(0)) for seed in range(3 * ranks)]

    def rank(index: int) -> tuple[list[float], bool]:
        mesh = Mesh(plan)
        model = on_stages(models.UNet, plan, mesh, batches[0])
        own = [batch for place, batch in enumerate(batches) if place % ranks == mesh["batch"].index]
        found = [float(evaluate(model, own, mesh))]  # an odd number of batches, before any step
        before = digests(model)
        train_step(model, SGD(model.parameters(), lr=0.0), own[:2], mesh)
        found.append(float(evaluate(model, own, mesh)))
        return found, digests(model) == before and model.training

    expected = sequential_loss(make(models.UNet), batches)
    for losses, is_unchanged in run_local(rank, plan.num_ranks):
        assert losses == pytest.approx([expected, expected], rel=1e-12)
        assert is_unchanged


def sequential_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    count = sum(int(CROSS_ENTROPY.count(batch)) for batch in batches)
    with torch.no_grad():
        return float(sum(_total(model.eval(), batch) for batch in batches) / count)


def test_evaluation_uses_running_statistics() -> None:
    plan = Plan(pipe=Pipe(2, "gems"), precision="fp64")
    batches = split(images(8)(0), 4)

    def rank(index: int) -> float:
        mesh = Mesh(plan)
        model = on_stages(models.ResNet, plan, mesh, batches[0])
        return float(evaluate(model, batches, mesh))

    expected = sequential_loss(make(models.ResNet), batches)
    assert run_local(rank, 2) == pytest.approx([expected] * 2, rel=1e-12)


def test_numbers_of_micro_batches_may_change_from_step_to_step() -> None:
    plan = Plan(pipe=Pipe(2, "gems"), precision="fp64")
    batches = [double(vectors(2, seed=seed)(0)) for seed in range(4)]

    def rank(index: int) -> float:
        mesh, worst = Mesh(plan), 0.0
        model = on_stages(chain(4), plan, mesh, batches[0])
        for count in (1, 4, 2):
            _, gradients = sequential(make(chain(4)), batches[:count])
            optimizer = Held(model, gradients)
            train_step(model, optimizer, batches[:count], mesh, clip=None)
            worst = max(worst, optimizer.error)
        return worst

    assert max(run_local(rank, 2)) < 1e-12


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gems"])
def test_mixed_precision_is_that_of_one_process(schedule: Any) -> None:
    plan = Plan(pipe=Pipe(2, schedule), precision="bf16")
    batches = split(tokens(4)(0), 4)

    def train(own: Plan, ledger: list[int]) -> list[float]:
        mesh = Mesh(own)
        torch.manual_seed(0)
        model = parallelize(models.decoder(), own, mesh, example=lambda: (batches[0][0],))
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        found = [train_step(model, optimizer, batches, mesh).loss.item() for _ in range(4)]
        sent = mesh.ledger.entries().get(("pipe", "send"))
        ledger += [] if sent is None else [sent.calls, sent.num_bytes]
        return found

    def rank(index: int) -> tuple[list[float], list[int]]:
        ledger: list[int] = []
        return train(plan, ledger), ledger

    expected = train(Plan(precision="bf16"), [])
    one = models.SEQUENCE * 8 * 2  # a sequence of hidden states of two bytes
    for losses, (calls, num_bytes) in run_local(rank, 2):
        assert losses == pytest.approx(expected, rel=5e-3)
        assert (calls, num_bytes) == (4 * 4, 4 * 4 * one)
    assert expected[-1] < 0.95 * expected[0]


@pytest.mark.parametrize(
    "pipe",
    ['{degree=2, schedule="gems", batches=4}', '{degree=2, schedule="interleaved", chunks=2}', "{degree=3}"],
)
@pytest.mark.sampled(2)
def test_runs_are_verified_on_a_model_with_layers_enough(pipe: str, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, DEEP)
    report = verify_run(make_run(run_file, "run", f"plan.pipe={pipe}", "plan.micro_batch=2")).require()
    assert report.plan.pipe.degree == int(pipe[8])


def test_a_run_whose_stages_are_named_is_verified_in_as_many(tmp_path: Path) -> None:
    split_at = 'plan.pipe={degree=2, split=["model.layers.3"]}'
    report = verify_run(make_run(write_run_file(tmp_path, DEEP), "run", split_at, "plan.micro_batch=2")).require()
    assert report.plan.pipe == Pipe(2, split=("model.layers.1",))


# --- draws


class Emulated:
    """Lets an unsplit model draw as stages do: the root from the common state, each stage from one of its own."""

    def __init__(self, model: nn.Module, stage_of: dict[str, int], is_apart: bool = True) -> None:
        self.is_apart, self.seed = is_apart, 0
        self.own: dict[int, Tensor] = {}
        self.common = torch.get_rng_state()
        model.register_forward_pre_hook(self._begin)
        for name, stage in stage_of.items():
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, stage=stage: self._enter(stage))
            module.register_forward_hook(lambda *_, stage=stage: self._leave(stage))

    def _begin(self, *_: Any) -> None:
        self.seed, self.own = int(torch.randint(0, 2**62, ())), {}

    def _enter(self, stage: int) -> None:
        self.common = torch.get_rng_state()
        if stage in self.own:
            torch.set_rng_state(self.own[stage])
        else:
            torch.manual_seed(self.seed + stage * self.is_apart)

    def _leave(self, stage: int) -> None:
        self.own[stage] = torch.get_rng_state()
        torch.set_rng_state(self.common)


@pytest.mark.parametrize("pipe", [Pipe(2, "bidirectional"), Pipe(2, "interleaved")], ids=str)
def test_draws(pipe: Pipe) -> None:
    """Noise of the root is the same wherever it is used, and dropout is another in every stage; both repeat."""
    num_stages = 4 if pipe.schedule == "interleaved" else 2
    names = [*(f"blocks.{i}" for i in range(4)), *(f"between.{i}" for i in range(4))]
    stage_of = {name: int(name.rpartition(".")[2]) * num_stages // 4 for name in names}
    split_at = tuple(f"blocks.{place}" for place in range(4 // num_stages, 4, 4 // num_stages))
    plan = Plan(pipe=replace(pipe, split=split_at), precision="fp64")
    batches = [double(vectors(3, seed=seed)(0)) for seed in range(2)]

    def emulate(is_apart: bool) -> tuple[float, dict[str, Tensor]]:
        model = make(models.Dropped)
        Emulated(model, stage_of, is_apart)
        gradients: dict[str, Tensor] = {}
        loss, count = 0.0, sum(int(CROSS_ENTROPY.count(batch)) for batch in batches)
        for index, batch in enumerate(batches):
            torch.manual_seed(100 + index)
            total = _total(model, batch) / count
            total.backward()
            loss += total.item()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return loss, gradients

    def rank(index: int) -> list[float]:
        loss, gradients = emulate(is_apart=True)
        mesh = Mesh(plan)
        model = on_stages(models.Dropped, plan, mesh, batches[0])
        optimizer = Held(model, gradients)
        errors = []
        for _ in range(2):
            result = train_step(model, optimizer, batches, mesh, OBJECTIVE, None, lambda index: seed_with(100 + index))
            errors += [abs(float(result.loss) - loss), optimizer.error]
        return errors

    for answer in run_local(rank, 2):
        assert max(answer) < 1e-12
    assert abs(emulate(is_apart=True)[0] - emulate(is_apart=False)[0]) > 1e-6  # the control


def seed_with(seed: int) -> None:
    torch.manual_seed(seed)


def test_without_seeds_every_micro_batch_draws_anew() -> None:
    plan = Plan(pipe=Pipe(2), precision="fp64")
    batch = double(vectors(3)(0))

    def rank(index: int) -> list[float]:
        mesh = Mesh(plan)
        model = on_stages(models.Dropped, plan, mesh, batch)
        torch.manual_seed(0)
        optimizer = SGD(model.parameters(), lr=0.0)
        return [float(train_step(model, optimizer, [batch], mesh).loss) for _ in range(3)]

    first, second = run_local(rank, 2)
    assert first == second
    assert len(set(first)) == 3


# --- when a rank is lost


def answers_of(function: Callable[[int], Any], num_ranks: int, folder: Path) -> list[str | None]:
    """What each of several local ranks fails with; None for one that was killed. Waits for all of them."""
    ranks = [local._LocalRank(rank, num_ranks, folder, 0.0, "cpu", compares=False) for rank in range(num_ranks)]
    children = [local._start(local._forked(function), rank) for rank in ranks]
    found: list[str | None] = []
    for child in children:
        with os.fdopen(child.pipe, "rb") as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        found.append(None if status == -signal.SIGKILL else "{error}: {text}".format(**json.loads(text)))
    return found


@pytest.mark.parametrize("schedule", ["gems", "message"])
def test_a_lost_rank_is_named(schedule: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    plan = Plan(pipe=Pipe(4, schedule), precision="fp64")
    forward, batches = StepRun._forward, split(vectors(8)(0), 8)

    def rank(index: int) -> None:
        def killed(self: StepRun, stage: Stage, action: Action) -> None:
            if index == 1 and action.micro_batch == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            forward(self, stage, action)

        monkeypatch.setattr(StepRun, "_forward", killed)
        mesh = Mesh(plan)
        model = on_stages(chain(5), plan, mesh, batches[0])
        train_step(model, SGD(model.parameters(), lr=0.1), batches, mesh)

    before, lost, *after = answers_of(rank, 4, tmp_path)
    assert lost is None
    for number, text in ((0, before), *enumerate(after, 2)):
        assert text is not None
        assert text.startswith(f"LostRankError: rank {number} (pipe rank {number}) was ")
        assert "the connection to rank" in text
        assert "of micro-batch" in text
        assert "at stage" in text
    neighbours = [before, after[0]]
    assert any("to rank 1 (pipe rank 1) failed" in text for text in neighbours if text is not None)


# --- refusals on ranks (those that need none are in test_pipeline_parts.py)


def test_an_objective_that_calls_the_model_twice_is_refused() -> None:
    def twice(model: nn.Module, batch: Batch) -> Tensor:
        return _total(model, batch) + _total(model, batch)

    with pytest.raises(PlanError, match="the objective calls the model twice for one batch"):
        check(chain(2), vectors(2), Pipe(2), Objective(CROSS_ENTROPY.count, twice))


def test_a_model_over_pipe_is_not_called() -> None:
    plan = Plan(pipe=Pipe(2), precision="fp64")

    def rank(index: int) -> None:
        model = on_stages(chain(2), plan, Mesh(plan), vectors(2)(0))
        model(torch.zeros(1, models.WIDTH))

    with pytest.raises(LocalError, match=r"is run by its schedule, not called; use weft\.train_step or weft\.evaluate"):
        run_local(rank, 2)


def test_a_forward_that_takes_another_way_is_refused() -> None:
    class Fickle(models.Chain):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.enter(inputs)
            if bool((inputs[0, 0] > 0).item()):
                hidden = hidden * 2
            for block in self.blocks:
                hidden = block(hidden)
            logits: Tensor = self.head(hidden)
            return logits

    plan = Plan(pipe=Pipe(2), precision="fp64")
    inputs, labels = double(vectors(2)(0))

    def rank(index: int) -> str:
        mesh = Mesh(plan)
        model = on_stages(Fickle, plan, mesh, (inputs.abs(), labels))
        batches = [(inputs.abs(), labels), (-inputs.abs(), labels)]
        try:
            train_step(model, SGD(model.parameters(), lr=0.1), batches, mesh)
        except Exception as error:  # of the other rank: its neighbour is gone, which it may see first
            return str(error)
        return "nothing"

    told = run_local(rank, 2)[0]
    assert "stage 0: the model's forward came to 'blocks.0' where its trace has 'mul'" in told


# --- what a pipeline says it did and when: its spans follow the schedule, one after another, and leave not


SECONDS = 0.002  # that every block sleeps at least, each way

PIPES = [
    Pipe(2, "gpipe"),
    Pipe(4, "1f1b"),
    Pipe(2, "interleaved", chunks=2),
    Pipe(2, "zero-bubble"),
    Pipe(4, "gems"),
    Pipe(2, "bidirectional"),
    Pipe(4, "message"),
]


def spans_of(pipe: Pipe, num_micro_batches: int) -> list[dict[str, Any]]:
    """On each rank, (start, end, [kind, stage, micro-batch, replica] or None for a wait): of a step, an evaluation."""

    def rank(index: int) -> dict[str, Any]:
        trainer = Trainer(pipe, Chain(4, SECONDS, SECONDS, seed=index))
        batches = micro_batches(num_micro_batches)
        found = {}
        for name, run in (("step", trainer.step), ("evaluation", trainer.evaluate)):
            run(batches)
            found[name] = [
                (start, end, list(action) if isinstance(action, Action) else None)
                for start, end, action in trainer.model.spans
            ]
        return found

    return run_ranks(rank, pipe.degree)


@pytest.mark.parametrize("pipe", PIPES, ids=lambda pipe: pipe.schedule)
def test_spans(pipe: Pipe) -> None:
    schedule = make_schedule(pipe.schedule, pipe.degree, 4, **pipe.options)
    for index, found in enumerate(spans_of(pipe, 4)):
        listed = list(schedule.compute(index))
        done = [Action(*action) for _, _, action in found["step"] if action]
        if pipe.schedule == "message":  # in an order of its own, but each kind's in that of micro-batches
            assert [a for a in done if a.kind == "forward"] == [a for a in listed if a.kind == "forward"]
            assert [a for a in done if a.kind == "backward"] == [a for a in listed if a.kind == "backward"]
        else:
            assert done == listed
        assert found["evaluation"] == found["step"]  # it leaves what the last training step did
        for spans in found.values():
            assert spans[0][0] == 0
            for (_, end, _), (start, _, _) in pairwise(spans):
                assert start == end  # nothing overlaps, nothing is left out
        for start, end, action in found["step"]:
            least = SECONDS if action and action[0] != "weight" else 0
            assert end - start >= least  # a block's sleep falls into its own span


def test_the_first_step_of_each_kind_goes_through_host_memory() -> None:
    """Kernels are launched for the first time in it, which waits for receives that run on a GPU."""

    def rank(index: int) -> list[bool]:
        trainer = Trainer(Pipe(2, "gpipe"), Chain(2, 0.0, 0.0, seed=index))
        found = []
        for run, count in ((trainer.step, 2), (trainer.step, 2), (trainer.evaluate, 2), (trainer.step, 4)):
            run(micro_batches(count))
            found.append(trainer.model._transport.uses_host)
        return found

    assert run_ranks(rank, 2) == [[True, False, True, True]] * 2
