"""Weft's AdamW: torch's bits in fp32, wherever its state lies; and what fewer bits of state cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import models_for_tests as models
import pytest
import torch
from torch import Tensor, nn

import weft
import weft.optim.adamw
import weft.sharding.layout
from weft.cluster.hardware import Cluster, load
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim import AdamW
from weft.parallel.apply import cost, parallelize
from weft.parallel.gradient_norm import clip_factor, clip_grad_norm, grad_norm
from weft.parallel.model_state import all_flats, host_bytes, named_pieces, state_bytes
from weft.plan import BatchSplit, Memory, Plan, Shard, split_batch
from weft.planner.advice import fitting_offload
from weft.planner.predict import predict
from weft.profiling import profile
from weft.run_file import load_run
from weft.sharding.whole_gradient import WholeGradient
from weft.step.objective import CROSS_ENTROPY, Batch
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
STEPS = 5
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
BF16 = Plan(precision="bf16")


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return models.tied_decoder().to(dtype)


def micro_batches(step: int, count: int) -> list[Batch]:
    tokens, labels = models.token_batch(step)
    return [(t, y) for t, y in zip(tokens.chunk(count), labels.chunk(count), strict=True)]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; whatever shape pieces have."""
    pieces = [(len(part.parameter.shape), piece) for part, piece in named_pieces(model) if piece.requires_grad]
    found = [[piece for dims, piece in pieces if (dims >= 2) == decays] for decays in (True, False)]
    return [{"params": found[0], "weight_decay": 0.1}, {"params": found[1], "weight_decay": 0.0}]


def train(plan: Plan, count: int = 1, steps: int = STEPS, clip: float | None = 0.05) -> dict[str, Tensor]:
    """Weights and moments after some steps, by parameter and kind."""
    mesh = Mesh(plan)
    model = parallelize(make(), plan, mesh)
    optimizer = AdamW(model, groups(model), **OPTIONS)
    for step in range(steps):
        train_step(model, optimizer, micro_batches(step, count), mesh, clip=clip)
    found = {}
    for part, piece in named_pieces(model):
        found[part.parameter.name] = piece.detach().clone()
        found |= {f"{part.parameter.name} {kind}": value for kind, value in optimizer.read_state(piece).items()}
    return found


def train_by_torch(count: int, steps: int = STEPS, clip: float | None = 0.05) -> dict[str, Tensor]:
    """The same with torch's own optimizer over the model as it is; the sum of the gradients is weft's."""
    mesh = Mesh(Plan())
    model = parallelize(make(), Plan(), mesh)
    optimizer = torch.optim.AdamW(groups(model), **OPTIONS, fused=True)
    for step in range(steps):
        train_step(model, optimizer, micro_batches(step, count), mesh, clip=clip)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().flatten()
        found |= {f"{name} {kind}": value.flatten() for kind, value in optimizer.state[parameter].items()}
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name].flatten(), other[name].flatten())]


# --- exactness


@pytest.mark.parametrize("count", [1, 2])
def test_state_on_the_host_changes_no_bit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.optim.adamw, "STAGING_NUMEL", 256)  # several chunks in each parameter
    expected = train(Plan(memory=Memory(offload=1e-9)), count)
    assert differing(expected, train_by_torch(count, clip=None)) != []  # clipping does change it
    for offload in (0.5, 1.0):
        assert differing(expected, train(Plan(memory=Memory(offload=offload)), count)) == []


def test_without_clipping_the_bits_are_those_of_torch() -> None:
    assert differing(train(Plan(memory=Memory(offload=1.0)), clip=None), train_by_torch(1, clip=None)) == []
    assert differing(train(Plan(memory=Memory(offload=1e-9)), 2, clip=None), train_by_torch(2, clip=None)) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharded_state_on_the_host_changes_no_bit(stage: Any, precision: Any) -> None:
    plan = Plan(shard=Shard(2, stage), precision=precision, micro_batch=1)

    def rank(index: int) -> list[str]:
        torch.set_num_threads(1)
        found = [train(replace(plan, memory=Memory(offload=share)), steps=3) for share in (0.0, 0.5, 1.0)]
        return differing(found[0], found[1]) + differing(found[0], found[2])

    assert run_local(rank, 2) == [[], []]


def test_bf16_gradients_of_one_micro_batch_need_no_fp32() -> None:
    model = parallelize(make(), BF16)
    optimizer, mesh = AdamW(model, groups(model), **OPTIONS), Mesh(BF16)
    train_step(model, optimizer, micro_batches(0, 1), mesh)
    assert {
        flat.whole_gradient.tensor.dtype for flat in all_flats(model) if flat.whole_gradient.tensor is not None
    } == {torch.bfloat16}
    train_step(model, optimizer, micro_batches(1, 2), mesh)  # which are added up, in fp32 as ever
    assert {
        flat.whole_gradient.tensor.dtype for flat in all_flats(model) if flat.whole_gradient.tensor is not None
    } == {torch.float32}


@pytest.mark.parametrize("count", [1, 2])
def test_weights_behind_bf16_equal_those_under_torch(count: int) -> None:
    def by_torch() -> dict[str, Tensor]:
        mesh = Mesh(BF16)
        model = parallelize(make(), BF16, mesh)
        optimizer = torch.optim.AdamW(groups(model), **OPTIONS, fused=True)
        for step in range(STEPS):
            train_step(model, optimizer, micro_batches(step, count), mesh, clip=None)
        return {part.parameter.name: piece.detach() for part, piece in named_pieces(model)}

    found, expected = train(BF16, count, clip=None), by_torch()
    assert differing({name: found[name] for name in expected}, expected) == []


def test_plain_arithmetic_is_that_of_torch() -> None:
    plan = Plan(memory=Memory(offload=1e-9))
    expected = train(plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weft.optim.buffer_state.MomentStore, "is_plain", property(lambda _: False, lambda *_: None), raising=False
        )
        found = train(plan)
    assert differing(found, expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_change_of_a_piece_behind_the_update_reaches_the_next_forward() -> None:
    mesh = Mesh(BF16)
    model = parallelize(make(), BF16, mesh)
    train_step(model, AdamW(model), micro_batches(0, 1), mesh)
    with torch.no_grad():
        for piece in model.parameters():
            piece.zero_()
    assert not model(models.token_batch(0)[0]).any()


# --- what lies where


@pytest.mark.parametrize(
    "plan",
    [
        BF16,
        Plan(memory=Memory(offload=1.0)),
        replace(BF16, memory=Memory(offload=0.5)),
        replace(BF16, memory=Memory(offload=1.0, state="int8"), exact=False),
        replace(BF16, memory=Memory(offload=0.6, state="bf16", master=False), exact=False),
        replace(BF16, memory=Memory(state="int8", master=False), exact=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2])
def test_bytes_are_those_predicted(plan: Plan, count: int) -> None:
    mesh, tokens = Mesh(plan), models.token_batch(0)[0]
    model = parallelize(make(), plan, mesh)
    optimizer, seen = AdamW(model, groups(model)), dict[str, Any]()
    optimizer.register_step_pre_hook(lambda *_: seen.update(state=state_bytes(model, optimizer)))
    split = replace(split_batch(plan, len(tokens), 1), accumulation=count)
    for step in range(2):
        train_step(model, optimizer, micro_batches(step, count), mesh)
    predicted = cost(profile(make()), plan, split, mesh.coordinates)
    assert seen["state"] == predicted.state_bytes
    assert host_bytes(model, optimizer) == predicted.host_bytes
    share = plan.memory.offload
    assert bool(predicted.host_bytes) == (share > 0)


def test_a_share_of_the_state_is_on_the_host() -> None:
    split = BatchSplit(1, 1, 1, 1, 1)
    found = profile(make())
    everything = cost(found, replace(BF16, memory=Memory(offload=1.0)), split).host_bytes
    assert sum(everything.values()) == pytest.approx(12 * found.numel, rel=0.1)
    shares = [
        sum(cost(found, replace(BF16, memory=Memory(offload=share / 10)), split).host_bytes.values())
        for share in range(11)
    ]
    assert shares == sorted(shares)
    assert shares[0] == 0


def test_verify_holds_plans_with_state_on_the_host() -> None:
    plan = Plan(shard=Shard(2, 3), memory=Memory(offload=1.0), micro_batch=2)
    report = weft.verify(models.tied_decoder, models.token_batch, plan).require()
    assert {"host: parameters", "host: optimizer", "state: staging"} <= {check.what for check in report.checks}


# --- refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory": Memory(offload=1.5)}, "offload = 1.5; a share lies between 0 and 1"),
        ({"memory": Memory(state="int8")}, "plan.memory.state = 'int8' keeps less of each update"),
        ({"memory": Memory(master=False), "exact": False}, "precision is 'fp32'; use bf16, or master = true"),
    ],
)
def test_plans_that_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan(**given)


def test_state_that_the_host_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.sharding.host_memory.available_host_bytes", lambda: 2 << 30)
    with pytest.raises(PlanError, match=r"0.0 GiB in host memory .* 2.0 GiB are free, of which 2 stay free"):
        parallelize(make(), Plan(memory=Memory(offload=1.0)))


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(PlanError, match="1 of 1 parameters are no trained pieces of the model"):
        AdamW(parallelize(make(), BF16), [nn.Parameter(torch.zeros(3))])


def test_a_model_that_is_held_plainly_has_torchs_optimizer() -> None:
    with pytest.raises(PlanError, match=r"has no flat buffers.*torch\.optim\.AdamW"):
        AdamW(parallelize(make(), Plan()))


def test_state_dicts_come_back() -> None:
    plan = replace(BF16, memory=Memory(state="int8", offload=1.0), exact=False)
    models_ = [parallelize(make(), plan) for _ in range(2)]
    one, other = (AdamW(model, groups(model), **OPTIONS) for model in models_)
    train_step(models_[0], one, micro_batches(0, 1), Mesh(plan))
    other.load_state_dict(one.state_dict())
    for mine, yours in zip(one.held, other.held, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.store.tensors, yours.store.tensors, strict=True))
        assert mine.store.steps.tolist() == yours.store.steps.tolist() == [1.0] * len(mine.parts)


def test_the_clip_factor_is_taken_of_fp32_sums() -> None:
    mesh = Mesh(BF16)
    model = parallelize(make(), BF16, mesh)
    AdamW(model)
    model(models.token_batch(0)[0]).float().square().mean().backward()
    gradients = [flat.slice_gradient for flat in all_flats(model) if flat.slice_gradient is not None]
    expected = torch.cat(gradients).double().norm()
    assert float(grad_norm(model, mesh)) == pytest.approx(float(expected), rel=1e-5)
    factor = clip_factor(expected, 0.5 * float(expected))
    assert float(factor) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("max_norm", [1.0, float("inf")])
def test_a_norm_that_is_not_finite_gives_no_factor(max_norm: float) -> None:
    for norm in (float("inf"), float("nan")):
        factor = clip_factor(torch.tensor(norm, dtype=torch.float64), max_norm)
        assert factor.isnan()


def test_no_update_is_made_where_the_norm_is_not_finite() -> None:
    """No moment decays, and no weight."""
    mesh = Mesh(BF16)
    model = parallelize(make(), BF16, mesh)
    optimizer = AdamW(model, weight_decay=0.1)
    train_step(model, optimizer, micro_batches(0, 1), mesh)

    def state() -> list[list[float]]:
        held = [value.tolist() for one in optimizer.held for value in (one.flat.slice, *one.store.tensors)]
        return [*held, *(one.store.steps.tolist() for one in optimizer.held)]

    before = state()
    huge = replace(CROSS_ENTROPY, total=lambda model, batch: model(batch[0]).sum() * 3e38)
    result = train_step(model, optimizer, micro_batches(1, 1), mesh, huge)
    assert not result.grad_norm.isfinite()
    assert state() == before
    assert clip_factor(torch.tensor(float("inf")), 1.0).isnan()  # which leaves an update out; 0 would decay


# --- advice


def test_the_least_offload_that_fits_is_found() -> None:
    wide = ["model.hidden_size=192", "model.intermediate_size=512", "model.num_hidden_layers=6", "plan.micro_batch=4"]
    run = load_run(QUICKSTART, ["plan.precision=bf16", "plan.data=1", "plan.shard=1", "train.batch=4", *wide])
    cluster = load("h200")
    needs = predict(run, cluster).cost.memory_bytes
    assert fitting_offload(run, cluster) is None  # none is needed

    def with_memory(device_bytes: float, host_bytes: float) -> Cluster:
        device = replace(cluster.node.device, memory_bytes=int(device_bytes))
        return replace(cluster, node=replace(cluster.node, device=device, host_memory_bytes=int(host_bytes)))

    found = fitting_offload(run, with_memory(0.8 * needs, 16e9))
    assert 0 < found.offload < 1
    assert found.cost.memory_bytes <= 0.8 * needs
    memory = Memory(offload=found.offload - 0.05)
    less = predict(replace(run, plan=replace(run.plan, memory=memory)), cluster)
    assert less.cost.memory_bytes > 0.8 * needs
    assert fitting_offload(run, with_memory(0.8 * needs, 1e9)) is None  # the host has too little
    assert fitting_offload(run, with_memory(0.1 * needs, 16e9)) is None
    assert predict(replace(run, plan=replace(run.plan, memory=Memory(offload=1.0))), cluster).communication_seconds[
        "host"
    ]


def test_squares_that_were_taken_with_gradients_are_the_norm_until_something_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a GPU does by a kernel: large gradients alone, and none that are added to or scaled afterwards."""

    def take(whole: WholeGradient, index: int, gradient: Tensor) -> bool:
        if gradient.numel() < 100:
            return False
        whole.views[index].copy_(gradient.view_as(whole.views[index]))
        whole.square_sums[index] = gradient.float().square().sum(dtype=torch.float32).view(1)
        taken.append(index)
        return True

    def norm_of_slices() -> float:
        slices = [flat.slice_gradient.double().square().sum() for flat in all_flats(model) if flat.trainable]
        return float(torch.stack(slices).sum().sqrt())

    taken: list[int] = []
    monkeypatch.setattr(WholeGradient, "_copy_with_squares", take)
    torch.manual_seed(0)
    plan = Plan(precision="bf16")
    mesh = Mesh(plan)
    model = parallelize(models.tied_decoder().float(), plan, mesh)
    optimizer = AdamW(model)
    for step in range(2):
        CROSS_ENTROPY.total(model, models.token_batch(step)).backward()
        assert float(grad_norm(model, mesh)) == pytest.approx(norm_of_slices(), rel=1e-6)
        optimizer.zero_grad()
    assert taken
    CROSS_ENTROPY.total(model, models.token_batch(0)).backward()
    before = clip_grad_norm(model, 1e-3, mesh)
    assert float(grad_norm(model, mesh)) == pytest.approx(1e-3, rel=1e-2)
    assert float(before) > 1e-2
    CROSS_ENTROPY.total(model, models.token_batch(1)).backward()  # another is added
    assert float(grad_norm(model, mesh)) == pytest.approx(norm_of_slices(), rel=1e-6)


@pytest.mark.parametrize("plan", [Plan(), Plan(precision="bf16")], ids=["plain", "flat"])
def test_the_norm_of_long_gradients_is_right_on_a_cpu(plan: Plan) -> None:
    """Torch's own norm of four million float32 numbers is off by 1e-4 on a CPU."""
    mesh = Mesh(plan)
    model = parallelize(nn.Linear(2048, 2048, bias=False), plan, mesh)
    inputs = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
    model(inputs.to(torch.bfloat16 if plan.precision == "bf16" else torch.float32)).square().mean().backward()
    expected = sum(piece.grad.double().square().sum() for _, piece in named_pieces(model) if piece.grad is not None)
    found = clip_grad_norm(model, 1e-3, mesh)
    assert float(found) == pytest.approx(float(expected) ** 0.5, rel=1e-7)
    clipped = sum(piece.grad.double().square().sum() for _, piece in named_pieces(model) if piece.grad is not None)
    assert float(clipped) ** 0.5 == pytest.approx(min(1e-3, float(expected) ** 0.5), rel=1e-2)
