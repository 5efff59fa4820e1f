"""`memory.activations`: what blocks save waits in host memory. Equal to the bit; bytes, order and peak as predicted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_for_tests as models
import pytest
import runs_for_tests as runs
import torch
import torch._dynamo  # before ranks are forked
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_for_tests import (
    QUICKSTART,
    NeverWaits,
    Slow,
    differing,
    gpt2,
    initialised,
    llama,
    make_run,
    micro_batches,
    on_h200,
    random_batch,
    with_memory,
)
from torch import Tensor, nn

import weft
import weft.memory.activation_copies
import weft.train.loop
from weft.cluster.hardware import Cluster, local_cluster
from weft.compile.blocks import compile_blocks
from weft.compile.saved_bytes import compiled_profile
from weft.errors import PlanError
from weft.inspection.live_bytes import LiveTensors
from weft.launch.local_ranks import run_local
from weft.memory.activation_copies import (
    MIN_OFFLOAD_BYTES,
    ActivationOffloader,
    OffloadedGroup,
    OffloadedStorage,
    offload_from,
    offloader_of,
)
from weft.memory.offload_activations import ActivationPolicy, offloaded_blocks
from weft.mesh import Mesh
from weft.models import DecoderConfig, build
from weft.models.loss import token_loss
from weft.optim import AdamW
from weft.optim.saved_state import make_optimizer
from weft.parallel.apply import Cost, cost, parallelize
from weft.parallel.model_state import host_bytes, named_pieces, state_tensors
from weft.plan import Context, Memory, Pipe, Plan, Recompute, Shard, Tile, split_batch
from weft.plan import Tensor as TensorPlan
from weft.planner.advice import fitting_activations
from weft.planner.predict import predict
from weft.planner.step import HOST_LINK_SHARE
from weft.profiling import profile
from weft.proof.prove import verify_run
from weft.run_file import Run, load_run
from weft.run_tables import LayerDrop
from weft.step.examples import example_inputs
from weft.step.layer_drop import drop_layers
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

BF16 = Plan(precision="bf16")
STEPS = 5


def with_share(plan: Plan, share: float, recompute: Recompute = "none") -> Plan:
    return replace(plan, memory=replace(plan.memory, recompute=recompute, activations=share))


def train(
    make: Callable[[], nn.Module], plan: Plan, count: int = 2, prepare: Callable[[nn.Module], None] = lambda _: None
) -> tuple[dict[str, Tensor], nn.Module]:
    """Losses, the first step's gradients and the last parameters; and the model."""
    mesh = Mesh(plan)
    model = parallelize(make(), plan, mesh)
    prepare(model)
    pieces = [(part.parameter.name, piece) for part, piece in named_pieces(model)]
    options: dict[str, Any] = {"lr": 1e-2}
    is_mixed = plan.precision == "bf16"
    optimizer = AdamW(model, **options) if is_mixed else torch.optim.AdamW(model.parameters(), **options)
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        gradients = {f"gradient of {name}": piece.grad.clone() for name, piece in pieces if piece.grad is not None}
        found.update({name: gradient for name, gradient in gradients.items() if name not in found})

    optimizer.register_step_pre_hook(keep)
    torch.manual_seed(1)
    for step in range(STEPS):
        found[f"loss {step}"] = train_step(model, optimizer, micro_batches(step, count), mesh).loss
    return found | {name: piece.detach().clone() for name, piece in pieces}, model


def predicted(make: Callable[[], nn.Module], plan: Plan, count: int = 2) -> Cost:
    tokens = micro_batches(0, count)[0][0]
    dtype = torch.bfloat16 if plan.precision == "bf16" else None
    return cost(profile(make(), lambda: (tokens,), None, dtype), plan, split_batch(plan, len(tokens), 1))


def sender(model: nn.Module) -> ActivationOffloader:
    found = offloader_of(model)
    assert found is not None
    return found


def pooled_bytes(model: nn.Module) -> int:
    return sum(buffer.numel() for buffer in sender(model).pool.buffers)


@pytest.fixture
def all_sizes() -> Iterator[None]:
    with offload_from(1):
        yield


# --- exactness


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("make", "plan"), [(gpt2, Plan()), (llama, BF16)], ids=["gpt2", "llama"])
@pytest.mark.sampled(4)
def test_no_bit_changes_and_each_byte_goes_once(
    make: Callable[[], nn.Module], plan: Plan, recompute: Recompute
) -> None:
    expected, plain = train(make, with_share(plan, 0.0, recompute))
    assert offloader_of(plain) is None
    sizes = []
    for share in (0.3, 1.0):
        mine = with_share(plan, share, recompute)
        found, model = train(make, mine)
        assert differing(found, expected) == []
        planned = predicted(make, mine).host_bytes["activations"]
        assert pooled_bytes(model) == planned  # made once, for all steps and micro-batches
        assert sender(model).down_bytes == sender(model).up_bytes == planned * 2 * STEPS
        sizes.append(planned)
    assert sizes[1] == 4 * sizes[0]  # of five blocks, the last stays


@pytest.mark.usefixtures("all_sizes")
def test_what_stays_on_the_device_falls_by_what_goes() -> None:
    plans = [with_share(BF16, share) for share in (0.0, 1.0)]
    here, away = (predicted(llama, plan) for plan in plans)
    assert here.saved_bytes - away.saved_bytes == away.host_bytes["activations"] > 0
    assert here.host_bytes == {}


def test_what_is_small_stays() -> None:
    _, model = train(llama, with_share(BF16, 1.0), 1)
    assert sender(model).down_bytes == 0
    assert predicted(llama, with_share(BF16, 1.0)).host_bytes == {}
    assert MIN_OFFLOAD_BYTES == 1 << 20


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.sampled(2)
def test_compiled_blocks_send_what_their_graphs_save(recompute: Recompute) -> None:
    def compile_them(model: nn.Module) -> None:
        torch.compiler.reset()
        compile_blocks(model, pytest.fail, "aot_eager_decomp_partition")

    expected, _ = train(llama, with_share(BF16, 0.0, recompute), 1, compile_them)
    plan = with_share(BF16, 1.0, recompute)
    with offload_from(1000):  # but for the state of random numbers, and shorter
        found, model = train(llama, plan, 1, compile_them)
        tokens, labels = micro_batches(0, 1)[0]
        eager = profile(llama(), lambda: (tokens,), lambda logits: token_loss(logits, labels)[0], torch.bfloat16)
        planned = cost(compiled_profile(eager), plan, split_batch(plan, len(tokens), 1)).host_bytes["activations"]
    assert differing(found, expected) == []
    random_state = (
        4 * torch.get_rng_state().numel() if recompute == "full" else 0
    )  # real ones are under MIN_OFFLOAD_BYTES
    assert pooled_bytes(model) - random_state == planned


# --- streams: copies that run no earlier than someone waits for them


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_copy_is_waited_for(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train(gpt2, with_share(Plan(), 0.0, recompute))
    monkeypatch.setattr(weft.memory.activation_copies, "CopyStream", Slow)
    for share in (0.3, 1.0):
        assert differing(train(gpt2, with_share(Plan(), share, recompute))[0], expected) == []


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("lane", ["down", "up"])
def test_a_copy_that_is_not_waited_for_is_seen(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train(gpt2, Plan())
    lanes = iter([NeverWaits, Slow] if lane == "down" else [Slow, NeverWaits])  # in the order they are made
    monkeypatch.setattr(weft.memory.activation_copies, "CopyStream", lambda device: next(lanes)(device))
    assert "loss 4" in differing(train(gpt2, with_share(Plan(), 1.0))[0], expected)


@pytest.mark.usefixtures("all_sizes")
def test_a_stale_buffer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    started, before = OffloadedStorage.start, dict[int, Tensor]()

    def stale(self: OffloadedStorage) -> None:
        """Give what was fetched from the buffer the last time."""
        is_new = self._up is None
        started(self)
        assert self._up is not None
        if is_new:
            now = self._up[0].clone()
            self._up[0].copy_(before.get(self.buffer.data_ptr(), now))
            before[self.buffer.data_ptr()] = now

    expected, _ = train(gpt2, Plan())
    monkeypatch.setattr(OffloadedStorage, "start", stale)
    assert "loss 4" in differing(train(gpt2, with_share(Plan(), 0.3))[0], expected)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a storage was fetched when it was wanted, and the most groups on their way down at once."""
    found, back, leave = {"late": 0, "under way": 0}, OffloadedStorage.fetch, ActivationOffloader._leave

    def watched_back(self: OffloadedStorage) -> Any:
        found["late"] += self._up is None
        return back(self)

    def watched_leave(self: ActivationOffloader, *args: Any) -> None:
        found["under way"] = max(found["under way"], len(self._under_way))
        leave(self, *args)

    monkeypatch.setattr(OffloadedStorage, "fetch", watched_back)
    monkeypatch.setattr(ActivationOffloader, "_leave", watched_leave)
    return found


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_all_is_fetched_a_block_ahead(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train(gpt2, Plan())
    found = counted(monkeypatch)
    train(gpt2, with_share(Plan(), share))
    assert found == {"late": 0, "under way": min(2, len(offloaded_blocks(5, share)))}
    monkeypatch.setattr(OffloadedGroup, "start", lambda self: None)  # nobody fetches ahead
    assert differing(train(gpt2, with_share(Plan(), share))[0], expected) == []
    assert found["late"] > 0


# --- hooks


class Chain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Views(nn.Module):
    """Saves two views of one storage, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        left, right = (hidden @ self.weight).chunk(2, dim=-1)
        return torch.cat([left * right, right], dim=-1)


class Changes(nn.Module):
    """Changes a small tensor that it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        factor = self.weight.exp()
        out = hidden * factor
        factor.add_(1)
        return out


def test_views_of_a_storage_go_once_and_parameters_never() -> None:
    torch.manual_seed(0)
    model = parallelize(Chain(Views), Plan(memory=Memory(activations=1.0)))
    with offload_from(256):
        model(torch.randn(8, 8)).sum().backward()
    assert sender(model).down_bytes == 2 * 2 * 8 * 8 * 4  # of two blocks, the input and the product
    assert sender(model).up_bytes == sender(model).down_bytes


def test_what_was_changed_in_place_is_told_as_without() -> None:
    for share in (0.0, 1.0):
        model = parallelize(Chain(Changes), Plan(memory=Memory(activations=share)))
        with offload_from(64), pytest.raises(RuntimeError, match=r"in ?place"):
            model(torch.randn(8, 8)).sum().backward()


@pytest.mark.usefixtures("all_sizes")
def test_buffers_come_back_without_a_backward() -> None:
    model = parallelize(llama(), with_share(Plan(), 1.0))
    tokens = models.token_batch(0)[0]
    for _ in range(3):
        model(tokens).sum()  # dropped
    most = pooled_bytes(model)
    with torch.no_grad():
        model(tokens)
    model(tokens).sum().backward()
    assert pooled_bytes(model) == most == predicted(llama, with_share(Plan(), 1.0), 1).host_bytes["activations"]
    retained = model(tokens).sum()
    retained.backward(retain_graph=True)
    retained.backward()
    assert pooled_bytes(model) == most


@pytest.mark.usefixtures("all_sizes")
def test_skipped_blocks_change_nothing() -> None:
    def run(share: float) -> dict[str, Tensor]:
        plan = replace(with_share(BF16, share), exact=False)
        mesh = Mesh(plan)
        model = parallelize(gpt2(), plan, mesh)
        optimizer = AdamW(model, lr=1e-2)
        gates = drop_layers(model, LayerDrop(0.2, 10.0), 0, plan, optimizer)
        torch.manual_seed(1)
        losses = {}
        for step in range(STEPS):
            gates.begin(step + 1, 0)
            losses[f"loss {step}"] = train_step(model, optimizer, micro_batches(step, 1), mesh).loss
        return losses

    assert differing(run(1.0), run(0.0)) == []


# --- laws


@settings(max_examples=2 * settings.default.max_examples)
@given(num_blocks=st.integers(2, 200), twentieths=st.integers(1, 20))
def test_blocks_are_spread_and_the_last_interval_stays(num_blocks: int, twentieths: int) -> None:
    share = twentieths / 20
    found = offloaded_blocks(num_blocks, share)
    assert found[0] == 0
    assert found[-1] < num_blocks - 1
    assert len(found) <= max(1, share * num_blocks + 1)
    assert len(found) >= share * num_blocks - 2
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
    if len(found) > 1:
        assert num_blocks - found[-1] > 1 / share - 1e-6
    assert offloaded_blocks(num_blocks, 0.0) == ()


PEAKS = {
    "one process": Plan(micro_batch=8, memory=Memory(activations=1.0)),
    "bf16": Plan(micro_batch=8, precision="bf16", memory=Memory(activations=0.5)),
    "bf16, full": Plan(micro_batch=8, precision="bf16", memory=Memory("full", activations=1.0)),
    "shard 2 stage 3": Plan(shard=Shard(2, 3), micro_batch=4, memory=Memory(activations=1.0)),
}


def deep(plan: Plan) -> Run:
    run = make_run(plan)
    assert isinstance(run.model, DecoderConfig)
    return replace(run, model=replace(run.model, num_hidden_layers=8))


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.sampled(2)
def test_predicted_peak_is_what_tensors_take(name: str) -> None:
    run = deep(PEAKS[name])

    def rank(index: int) -> tuple[int, int]:
        mesh, whole = Mesh(run.plan), initialised(build(run.model))
        model = parallelize(whole, run.plan, mesh, example=lambda: example_inputs(run))
        optimizer = make_optimizer(model, run.train)
        batches = [random_batch(run, number) for number in range(run.split.accumulation)]
        train_step(model, optimizer, batches, mesh)
        held = [tensor for tensors in state_tensors(model, optimizer).values() for tensor in tensors]
        pool = sender(model).pool.buffers
        hosted = host_bytes(model, optimizer)["activations"]
        with LiveTensors(held, ignored=pool) as live:
            train_step(model, optimizer, batches, mesh)
        assert host_bytes(model, optimizer)["activations"] == hosted
        return live.peak_bytes, hosted

    cluster = local_cluster(run.plan.num_ranks, on_cpu=True)
    with offload_from(1 << 14):
        measured = run_local(rank, run.plan.num_ranks)
        found = predict(run, cluster).cost
    without = predict(replace(run, plan=with_share(run.plan, 0.0, run.plan.memory.recompute)), cluster).cost
    assert found.memory_bytes == pytest.approx(max(peak for peak, _ in measured), rel=0.025)
    assert {hosted for _, hosted in measured} == {found.host_bytes["activations"]}
    assert found.memory_bytes < without.memory_bytes


@pytest.mark.parametrize(
    "plan",
    [
        Plan(memory=Memory(activations=1.0)),
        Plan(shard=Shard(2, 3), memory=Memory("full", activations=1.0), micro_batch=2),
        Plan(data=2, memory=Memory("selective", activations=0.5, offload=0.5), micro_batch=1),
    ],
    ids=str,
)
def test_verify_holds_plans_with_activations_on_the_host(plan: Plan) -> None:
    report = weft.verify(models.tied_decoder, models.token_batch, plan, steps=2).require()
    checks = {check.what: check for check in report.checks}
    assert checks["host: activations"].found != "0 B"


def test_verify_of_a_run_sends_some() -> None:
    run = load_run(QUICKSTART, ["plan.data=1", "plan.shard=1", "plan.memory={activations=0.5}", "train.batch=8"])
    report = verify_run(run).require()
    assert "host: activations" in {check.what for check in report.checks}


# --- time, and what fits


def wide_on_h200(share: float, link: float = 64e9) -> tuple[Run, Cluster]:
    wide = ("model.hidden_size=192", "model.intermediate_size=512", "model.num_hidden_layers=6")
    return on_h200(link, *wide, "train.batch=64", "data.sequence=1024", f"plan.memory={{activations={share}}}")


def test_copies_that_compute_does_not_hide_take_time() -> None:
    def seconds(share: float, link: float) -> float:
        found = predict(*wide_on_h200(share, link)).step_seconds
        assert found is not None
        return found

    assert seconds(1.0, 1e15) == pytest.approx(seconds(0.0, 1e15))
    assert seconds(1.0, 6.4e9) > seconds(1.0, 16e9) > seconds(0.0, 16e9)
    assert seconds(0.5, 6.4e9) < seconds(1.0, 6.4e9)


def test_state_on_the_host_takes_its_time_once() -> None:
    run, cluster = wide_on_h200(0.0, 1e9)
    here, away = (
        predict(replace(run, plan=replace(run.plan, memory=Memory(offload=share))), cluster) for share in (0.0, 1.0)
    )
    assert here.step_seconds is not None
    assert away.step_seconds is not None
    link_seconds = sum(away.cost.host_bytes.values()) / (1e9 * HOST_LINK_SHARE)
    assert 0.8 * link_seconds < away.step_seconds - here.step_seconds < 1.01 * link_seconds


def test_the_least_share_that_fits_is_found() -> None:
    run, cluster = wide_on_h200(0.0)
    needs = predict(run, cluster).cost.memory_bytes
    assert fitting_activations(run, cluster) is None  # none is needed

    found = fitting_activations(run, with_memory(cluster, 0.8 * needs))
    assert found is not None
    assert 0 < found.activations <= 1
    assert found.cost.memory_bytes <= 0.8 * needs
    less = predict(replace(run, plan=with_share(run.plan, found.activations - 0.05)), cluster)
    assert less.cost.memory_bytes > 0.8 * needs
    assert fitting_activations(run, with_memory(cluster, 0.01 * needs)) is None
    in_stages = replace(run, plan=replace(run.plan, pipe=Pipe(2)))
    assert fitting_activations(in_stages, with_memory(cluster, 0.1 * needs)) is None


# --- refusals


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(pipe=Pipe(2)), "pipe = 2"),
        (Plan(tensor=TensorPlan(2)), "x = 2"),
        (Plan(context=Context(2)), "context = 2"),
        (Plan(data=2, statistics="batch"), "statistics = 'batch'"),
        (Plan(tile=Tile(rows=2, columns=2)), "rows = 2, columns = 2"),
    ],
)
def test_axes_that_it_does_not_know_are_refused(plan: Plan, words: str) -> None:
    found = ActivationPolicy().refuse(profile(llama()), with_share(plan, 0.5))
    assert found is not None
    assert f"works beside data and shard, and the plan has {words}: use activations = 0" in found
    assert ActivationPolicy().refuse(profile(llama()), plan) is None


def test_a_model_of_one_block_and_a_share_over_1_are_refused() -> None:
    with pytest.raises(PlanError, match=r"all but the last, and the model has 0 .* use 0"):
        parallelize(models.MLP(), Plan(memory=Memory(activations=0.5)))
    with pytest.raises(PlanError, match=r"memory\.activations = 1\.5; a share lies between 0 and 1"):
        Plan(memory=Memory(activations=1.5))


@pytest.mark.usefixtures("all_sizes")
def test_a_host_without_room_is_told_and_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(llama(), with_share(Plan(), 1.0))
    monkeypatch.setattr(weft.memory.activation_copies, "available_host_bytes", lambda: 2 << 30)
    with pytest.raises(PlanError, match=r"keeps 0\.0 GiB of activations in host memory and needs .* lower it"):
        model(models.token_batch(0)[0])


@pytest.mark.usefixtures("all_sizes")
def test_training_asks_for_room_before_it_takes_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"in host memory for each of 1 ranks here.*lower .*plan\.memory\.activations"):
        runs.train_with_a_small_host(tmp_path, "plan.memory={activations=1.0}", monkeypatch)


def test_the_policy_is_told() -> None:
    assert Memory("full", offload=0.5, activations=0.25).words == ", recompute full, offload 0.5, activations 0.25"
