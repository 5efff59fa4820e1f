"""`memory.weights`: blocks that live in host memory. Equal to the bit; bytes as predicted, and no copy too few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import models_for_tests as models
import pytest
import runs_for_tests as runs
import torch
import torch._dynamo  # before ranks are forked
from hypothesis import given
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
from models_for_tests import VECTOR_MODELS, check
from runs_for_tests import copy_run
from sampled_for_tests import one_in
from torch import Tensor, nn

import weft
import weft.optim.adamw
import weft.sharding.streamed_buffer
import weft.train.loop
from weft.checkpoint import Checkpoint, Saver
from weft.cluster.hardware import Cluster, local_cluster
from weft.compile.blocks import compile_blocks
from weft.errors import ConfigError, PlanError
from weft.inspection.live_bytes import LiveTensors
from weft.memory.offload_weights import WeightPolicy, home_bytes, link_traffic
from weft.memory.prune import prune
from weft.mesh import Mesh
from weft.models import DecoderConfig, build
from weft.optim import AdamW
from weft.optim.saved_state import load_state, make_optimizer, pieces_to_save
from weft.parallel.apply import Cost, cost, parallelize
from weft.parallel.gradient_norm import clip_grad_norm, grad_norm
from weft.parallel.model_state import all_flats, host_bytes, host_tensors, named_pieces, state_bytes, state_tensors
from weft.plan import Context, Memory, Pipe, Plan, Shard, Tile, split_batch
from weft.plan import Tensor as TensorPlan
from weft.planner.advice import fitting_offload, fitting_weights
from weft.planner.closed_form_memory import state, updated_bytes
from weft.planner.predict import predict
from weft.profiling import profile
from weft.proof.prove import verify_run
from weft.run_file import Run, load_run
from weft.run_tables import LayerDrop
from weft.sharding.layout import streamed_blocks
from weft.sharding.streamed_buffer import DeviceBuffer, HostLink, StreamedFlat
from weft.step.cuda_graph import wants_graph
from weft.step.examples import example_inputs
from weft.step.layer_drop import drop_layers
from weft.step.train_step import evaluate, train_step

pytestmark = pytest.mark.processes

FP32, BF16 = Plan(memory=Memory(offload=1e-9)), Plan(precision="bf16")  # both in flat buffers
STEPS, CLIP = 3, 0.05
Built = tuple[nn.Module, AdamW, Mesh]


def streamed(plan: Plan, share: float, **memory: Any) -> Plan:
    return replace(plan, memory=replace(plan.memory, weights=share, **memory))


def built(make: Callable[[], nn.Module], plan: Plan) -> Built:
    mesh = Mesh(plan)
    model = parallelize(make(), plan, mesh)
    return model, AdamW(model, lr=1e-2), mesh


def run(one: Built, count: int, steps: range = range(STEPS)) -> dict[str, Tensor]:
    """Losses, norms and held-out losses of some steps; then weights and moments."""
    model, optimizer, mesh = one
    found: dict[str, Tensor] = {}
    for step in steps:
        torch.manual_seed(step)
        result = train_step(model, optimizer, micro_batches(step, count), mesh, clip=CLIP)
        found |= {f"loss {step}": result.loss, f"norm {step}": result.grad_norm}
        found[f"held out {step}"] = evaluate(model, micro_batches(step, 1), mesh)
    for part, piece in named_pieces(model):
        found[part.parameter.name] = piece.detach().clone()
        found |= {f"{part.parameter.name} {kind}": value for kind, value in optimizer.read_state(piece).items()}
    return found


def train(make: Callable[[], nn.Module], plan: Plan, count: int = 1) -> dict[str, Tensor]:
    return run(built(make, plan), count)


def link_of(model: nn.Module) -> HostLink:
    return next(flat.device_buffer.link for flat in all_flats(model) if isinstance(flat, StreamedFlat))


def predicted(make: Callable[[], nn.Module], plan: Plan, count: int = 1) -> Cost:
    split = replace(split_batch(plan, len(models.token_batch(0)[0]), 1), accumulation=count)
    return cost(profile(make()), plan, split)


# --- exactness


@pytest.mark.parametrize(
    ("recompute", "count", "share"),
    [("none", 1, 0.4), ("none", 2, 1.0), ("selective", 1, 1.0), ("full", 1, 1.0), ("full", 2, 0.4)],
)
@pytest.mark.parametrize(("make", "plan"), [(gpt2, FP32), (llama, BF16)], ids=["fp32", "bf16"])
def test_no_bit_changes(make: Callable[[], nn.Module], plan: Plan, recompute: Any, count: int, share: float) -> None:
    plan = replace(plan, memory=replace(plan.memory, recompute=recompute))
    expected = train(make, plan, count)
    assert float(expected["norm 0"]) > CLIP
    assert differing(train(make, streamed(plan, share), count), expected) == []


@pytest.mark.parametrize(
    "memory",
    [
        Memory(offload=0.7),
        Memory(state="bf16", master=False),
        Memory(state="int8", master=False, recompute="full"),
        Memory(state="int8", offload=1.0),
        Memory(activations=1.0),
    ],
    ids=str,
)
def test_beside_other_policies_no_bit_changes(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.optim.adamw, "STAGING_NUMEL", 256)  # several chunks in each parameter
    plan = replace(BF16, memory=memory, exact=False)
    expected = train(llama, plan)
    assert differing(train(llama, streamed(plan, 0.6)), expected) == []


def test_compiled_blocks_find_their_weights() -> None:
    def compiled(share: float) -> dict[str, Tensor]:
        one = built(llama, streamed(BF16, share))
        torch.compiler.reset()
        compile_blocks(one[0], pytest.fail, "aot_eager_decomp_partition")
        return run(one, 1)

    assert differing(compiled(1.0), compiled(0.0)) == []


def test_a_sum_of_three_micro_batches_comes_back_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(llama, BF16, 4)
    assert differing(train(llama, streamed(BF16, 1.0), 4), expected) == []
    monkeypatch.setattr(StreamedFlat, "expect_gradient", lambda self: None)  # only then is it late
    assert differing(train(llama, streamed(BF16, 1.0), 4), expected) == []


@pytest.mark.parametrize("name", one_in(4, ["frozen parameter", "gpt2", *VECTOR_MODELS]))
def test_models_of_all_kinds_are_verified(name: str) -> None:
    for count, share in ((1, 1.0), (2, 0.5)):
        report = check(name, Plan(memory=Memory(weights=share), micro_batch=8 // count)).require()
        assert "host: parameters" in {check.what for check in report.checks}


def test_verify_of_a_run_uses_each_room_again() -> None:
    run = load_run(QUICKSTART, ["plan.data=1", "plan.shard=1", "plan.memory={weights=1.0}", "train.batch=8"])
    report = verify_run(run).require()
    assert {"host: gradients", "host: optimizer"} <= {check.what for check in report.checks}


def test_skipped_blocks_have_zero_gradients() -> None:
    def losses(share: float) -> dict[str, Tensor]:
        plan = replace(streamed(BF16, share), exact=False)
        model, optimizer, mesh = built(gpt2, plan)
        gates = drop_layers(model, LayerDrop(0.2, 10.0), 0, plan, optimizer)
        found: dict[str, Tensor] = {}
        for step in range(6):
            torch.manual_seed(step)
            gates.begin(step + 1, 0)
            result = train_step(model, optimizer, micro_batches(step, 1), mesh)
            found |= {f"loss {step}": result.loss, f"norm {step}": result.grad_norm}
        return found

    assert differing(losses(1.0), losses(0.0)) == []


def test_pruned_blocks_are_streamed() -> None:
    def pruned() -> nn.Module:
        model = llama()
        torch.manual_seed(1)
        masks = {name: torch.rand(one.shape) > 0.5 for name, one in model.named_parameters() if "mlp" in name}
        return prune(model, masks)

    assert differing(train(pruned, streamed(BF16, 1.0)), train(pruned, BF16)) == []


class Idle(nn.Module):
    """Blocks with a parameter that only every second forward touches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(IdleBlock() for _ in range(4))

    def forward(self, hidden: Tensor, is_idle: bool) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, is_idle)
        return hidden


class IdleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, hidden: Tensor, is_idle: bool) -> Tensor:
        hidden = torch.tanh(self.first(hidden))
        return hidden if is_idle else hidden + self.second(hidden)


@pytest.mark.parametrize("plan", [FP32, BF16], ids=["fp32", "bf16"])
def test_parameters_without_gradients_and_sums_that_the_user_keeps(plan: Plan) -> None:
    def gradients(share: float) -> list[Tensor]:
        model, optimizer, mesh = built(Idle, streamed(plan, share))
        torch.manual_seed(1)
        for is_idle in (True, False, True):  # nobody clears them in between
            model(torch.randn(3, 6), is_idle).float().square().sum().backward()
        found = [grad_norm(model, mesh), clip_grad_norm(model, 0.5, mesh)]
        assert float(grad_norm(model, mesh)) == pytest.approx(0.5, rel=1e-2)
        found += [flat.slice_gradient.clone() for flat in all_flats(model) if flat.slice_gradient is not None]
        optimizer.step()
        return found + [piece.detach().clone() for _, piece in named_pieces(model)]

    for mine, yours in zip(gradients(1.0), gradients(0.0), strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=0)


def test_a_backward_that_was_cut_short_leaves_nothing() -> None:
    def after(is_cut: bool) -> dict[str, Tensor]:
        one = built(llama, streamed(BF16, 1.0))
        if is_cut:
            run(one, 1, range(0))
            loss = one[0](micro_batches(3, 1)[0][0]).float().sum()
            handle = all_flats(one[0])[2].whole_parameters[0].register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
        return run(one, 1)

    assert differing(after(True), after(False)) == []


def test_gradients_that_nobody_keeps_leave_nothing() -> None:
    def after(is_asked: bool) -> dict[str, Tensor]:
        one = built(llama, streamed(BF16, 1.0))
        if is_asked:
            embedding = all_flats(one[0])[0].whole_parameters[0]
            for step in range(2):  # a sum, which comes back for nothing
                loss = one[0](micro_batches(step, 1)[0][0]).float().sum()
                loss.backward() if step == 0 else torch.autograd.grad(loss, embedding)
            one[1].zero_grad()
        return run(one, 1)

    assert differing(after(True), after(False)) == []


def test_micro_batches_are_computed_twice(tmp_path: Path) -> None:
    path = runs.write_run_file(tmp_path, runs.DEEP)
    overrides = ['plan.precision="bf16"', "plan.micro_batch=2", "train.batch=4", "train.steps=4"]
    repeated = ["numbers.repeat_every=1", "train.deterministic=true"]
    found = []
    for name, share in (("here", 0.0), ("away", 1.0)):
        one = runs.make_run(path, name, *overrides, *repeated, f"plan.memory={{weights={share}}}")
        runs.train_on_ranks(one)
        found.append(runs.losses(one.folder))
    assert found[0] == found[1]


def test_a_change_of_a_piece_reaches_the_next_forward() -> None:
    for plan in (FP32, BF16):
        model, optimizer, mesh = built(llama, streamed(plan, 1.0))
        train_step(model, optimizer, micro_batches(0, 1), mesh)
        before = model(models.token_batch(0)[0])
        with torch.no_grad():
            for name, piece in model.named_parameters():
                if "down_proj" in name or "o_proj" in name:
                    piece.zero_()
        after = model(models.token_batch(0)[0])
        assert not torch.equal(before, after)
        root = [name for name, _ in model.named_parameters() if "layers" not in name]
        assert len(root) == 3


# --- resume


@pytest.mark.parametrize(("first", "second"), [(1.0, 0.0), (0.0, 0.4)])
@pytest.mark.parametrize("plan", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_run_resumes_under_another_share(plan: Plan, first: float, second: float, tmp_path: Path) -> None:
    expected = run(built(llama, plan), 2)
    saved, resumed = built(llama, streamed(plan, first)), built(llama, streamed(plan, second))
    run(saved, 2, range(2))
    run(resumed, 2, range(1))  # what it has learned is forgotten
    saver = Saver(tmp_path, 0, 1, "token")
    saver.save(2, pieces_to_save(*saved), {})
    saver.wait(published=True)
    load_state(Checkpoint(tmp_path / "step-00000002"), resumed[0], resumed[1])
    found = run(resumed, 2, range(2, STEPS))
    assert differing(found, {name: expected[name] for name in found}) == []


def test_a_run_file_trains_and_resumes(tmp_path: Path) -> None:
    path = runs.write_run_file(tmp_path, runs.DEEP)
    overrides = ['plan.precision="bf16"', "plan.micro_batch=2", "train.batch=4"]
    whole = runs.make_run(path, "whole", *overrides)
    runs.train_on_ranks(whole)
    resumed = runs.make_run(path, "resumed", *overrides, "plan.memory={weights=0.5}")
    copy_run(whole, 6, resumed)
    runs.train_on_ranks(resumed)
    assert runs.losses(resumed.folder) == runs.losses(whole.folder)
    ends = [Checkpoint(one.folder / "checkpoints" / "step-00000015") for one in (whole, resumed)]
    for entry in ends[0].entries():
        assert torch.equal(*(end.read(entry.name, entry.kind) for end in ends)), (entry.kind, entry.name)


# --- copies that run no earlier than someone waits for them


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("plan", [FP32, BF16], ids=["fp32", "bf16"])
def test_every_copy_is_waited_for(plan: Plan, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(gpt2, plan, count)
    monkeypatch.setattr(weft.sharding.streamed_buffer, "CopyStream", Slow)
    for share in (0.4, 1.0):
        assert differing(train(gpt2, streamed(plan, share), count), expected) == []


@pytest.mark.parametrize("lane", ["up", "down"])
def test_a_copy_that_is_not_waited_for_is_seen(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(gpt2, BF16)
    lanes = iter([NeverWaits, Slow] if lane == "up" else [Slow, NeverWaits])  # in the order they are made
    monkeypatch.setattr(weft.sharding.streamed_buffer, "CopyStream", lambda device: next(lanes)(device))
    assert "loss 1" in differing(train(gpt2, streamed(BF16, 1.0)), expected)


FETCH, BEGIN = StreamedFlat._fetch, StreamedFlat._begin_gradient


def stay_away(self: StreamedFlat) -> None:
    """A block that forgets to come back for its backward: another's weights are in its room."""
    if id(self) not in FETCHED:
        FETCH(self)
    FETCHED.add(id(self))
    self.device_buffer.weight_holder = self


def begin_anew(self: StreamedFlat) -> None:
    self._has_sum = False
    BEGIN(self)


def keep_here(self: DeviceBuffer, target: Tensor, gradient: Tensor) -> None:
    self.gradient_holder = None


FETCHED = set[int]()
BREAKS: dict[str, tuple[type, str, Any]] = {
    "stale weights": (StreamedFlat, "_leave_device_buffer", lambda self: None),
    "no way back": (StreamedFlat, "_fetch", stay_away),
    "a gradient that stays": (DeviceBuffer, "send", keep_here),
    "a sum that is not added to": (StreamedFlat, "_begin_gradient", begin_anew),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(llama, BF16, 2)
    FETCHED.clear()
    monkeypatch.setattr(*BREAKS[name])
    assert "held out 1" in differing(train(llama, streamed(BF16, 1.0), 2), expected)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_weights_come_a_block_ahead(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    late, finish = list[str](), StreamedFlat.finish_gather

    def watched(self: StreamedFlat) -> None:
        if not self.is_whole and self.device_buffer.weight_holder is not self:
            late.append(self.layout.parameters[0].name)
        finish(self)

    monkeypatch.setattr(StreamedFlat, "finish_gather", watched)
    run(built(gpt2, streamed(BF16, share)), 2)
    assert late == []


# --- bytes


PLANS = {
    "fp32": FP32,
    "bf16": BF16,
    "bf16, offload": replace(BF16, memory=Memory(offload=0.7)),
    "compact": replace(BF16, memory=Memory(state="int8", master=False), exact=False),
}
ALL_BYTES = {
    f"{name} {share} {count}": (name, share, count) for name in PLANS for share in (0.4, 1.0) for count in (1, 2)
}


@pytest.mark.parametrize(("name", "share", "count"), one_in(3, ALL_BYTES))
def test_bytes_are_those_predicted(name: str, share: float, count: int) -> None:
    plan = streamed(PLANS[name], share)
    model, optimizer, mesh = built(llama, plan)
    seen = dict[str, Any]()
    optimizer.register_step_pre_hook(lambda *_: seen.update(state=state_bytes(model, optimizer)))
    expected = predicted(llama, plan, count)
    moved = link_traffic(profile(llama()), plan, count)
    first_up = 0
    for step in range(3):
        before = link_of(model).up_bytes, link_of(model).down_bytes
        train_step(model, optimizer, micro_batches(step, count), mesh)
        ways = link_of(model).up_bytes - before[0], link_of(model).down_bytes - before[1]
        first_up = first_up or ways[0]
    assert seen["state"] == expected.state_bytes
    assert host_bytes(model, optimizer) == expected.host_bytes
    # The sums of the very first step begin in bf16; from then on they are in fp32.
    assert ways == (moved.up_forward_bytes + moved.up_backward_bytes, moved.down_bytes)
    assert first_up <= ways[0]


def test_the_device_holds_no_more_of_a_deeper_model() -> None:
    few, many = (predicted(partial(llama, number), streamed(BF16, 1.0)) for number in (3, 12))
    assert few.state_bytes == many.state_bytes
    shares = [predicted(partial(llama, 12), streamed(BF16, share / 10)) for share in range(11)]
    here, there = ([sum(getattr(one, kind).values()) for one in shares] for kind in ("state_bytes", "host_bytes"))
    assert here[2:] == sorted(here[2:], reverse=True)  # the first room costs what its block saves
    assert there == sorted(there)
    assert there[0] == 0


@pytest.mark.parametrize("name", ["fp32", "bf16", "compact"])  # offload takes whole buffers, of which here are few
def test_the_planners_closed_form_is_that_of_the_strategies(name: str) -> None:
    plan = streamed(PLANS[name], 0.6)
    found, exact = profile(llama()), predicted(llama, plan)
    away = sum(block.numel for block in found.blocks if block.name in streamed_blocks(found.all, plan))
    parameters, gradients, optimizer = state(plan, found.numel, 1, away)
    rooms = 2 * found.blocks[0].numel
    compute, gradient = (2, 2) if plan.precision == "bf16" else (4, 4)
    assert parameters + rooms * compute == pytest.approx(exact.state_bytes["parameters"], rel=0.02)
    assert gradients + rooms * gradient == pytest.approx(exact.state_bytes["gradients"], rel=0.02)
    assert optimizer == pytest.approx(exact.state_bytes["optimizer"], rel=0.1)
    moved = sum(exact.host_bytes.values()) - home_bytes(found, plan)
    assert updated_bytes(plan, found.numel, away) == pytest.approx(moved, rel=0.1)


def test_predicted_peak_is_what_tensors_take() -> None:
    plan = Plan(micro_batch=8, precision="bf16", memory=Memory("full", weights=1.0))
    run = make_run(plan)
    assert isinstance(run.model, DecoderConfig)
    run = replace(run, model=replace(run.model, num_hidden_layers=8))
    mesh = Mesh(plan)
    model = parallelize(initialised(build(run.model)), plan, mesh, example=lambda: example_inputs(run))
    optimizer, batches = make_optimizer(model, run.train), [random_batch(run, 0)]
    train_step(model, optimizer, batches, mesh)
    held = [tensor for tensors in state_tensors(model, optimizer).values() for tensor in tensors]
    away = [tensor for tensors in host_tensors(model, optimizer).values() for tensor in tensors]
    with LiveTensors(held, ignored=away) as live:
        train_step(model, optimizer, batches, mesh)
    found = predict(run, local_cluster(1, on_cpu=True)).cost
    assert found.memory_bytes == pytest.approx(live.peak_bytes, rel=0.05)


@given(num_blocks=st.integers(1, 100), twentieths=st.integers(1, 20))
def test_blocks_are_spread_and_the_last_is_streamed(num_blocks: int, twentieths: int) -> None:
    share = twentieths / 20
    blocks = profile(nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_blocks)))).all
    found = streamed_blocks(blocks, Plan(memory=Memory(weights=share)))
    places = [int(name) for name in found]
    assert list(found.values()) == list(range(len(found)))
    assert places == sorted(places)
    assert places[-1] == num_blocks - 1
    assert share * num_blocks - 1e-6 <= len(found) < share * num_blocks + 1


# --- time, and what fits


def deep_on_h200(share: float, link: float = 64e9) -> tuple[Run, Cluster]:
    deep = ("data.sequence=64", "model.num_hidden_layers=16", "train.compile=false")
    return on_h200(link, *deep, "train.batch=16", "plan.micro_batch=16", f"plan.memory={{weights={share}}}")


def test_copies_that_compute_does_not_hide_take_time() -> None:
    def seconds(share: float, link: float) -> float:
        found = predict(*deep_on_h200(share, link)).step_seconds
        assert found is not None
        return found

    assert seconds(1.0, 1e15) == pytest.approx(seconds(0.0, 1e15), rel=1e-3)
    assert seconds(1.0, 1e9) > seconds(1.0, 64e9) >= seconds(0.0, 64e9)
    assert seconds(0.5, 1e9) < seconds(1.0, 1e9)
    run, cluster = deep_on_h200(1.0, 1e9)
    told = predict(run, cluster).communication_seconds
    blocks = profile(build(run.model)).blocks
    numel = sum(block.numel for block in blocks)
    back = numel - sum(block.numel for block in blocks[-2:])
    assert told["weights"] == pytest.approx((numel * 2 + back * 2 + numel * 2) / 0.86e9, rel=0.01)
    assert told["host"] == pytest.approx(numel * 14 / 1e9, rel=0.01)


def test_it_is_advised_where_nothing_less_fits() -> None:
    run, cluster = deep_on_h200(0.0)
    run = replace(run, train=replace(run.train, batch=1))

    def with_policy(memory: Memory) -> Run:
        return replace(run, plan=replace(run.plan, micro_batch=1, memory=memory))

    def needs(memory: Memory) -> int:
        return predict(with_policy(memory), cluster).cost.memory_bytes

    plain = with_policy(Memory())
    assert fitting_weights(plain, cluster) is None
    almost = with_memory(cluster, needs(Memory()) - 1000)
    assert fitting_offload(plain, almost) is not None
    assert fitting_weights(plain, almost) is None  # less does it
    least, most = needs(Memory(weights=1.0)), min(needs(Memory(offload=1.0)), needs(Memory(activations=1.0)))
    assert least < most
    found = fitting_weights(plain, with_memory(cluster, (least + most) / 2))
    assert found is not None
    assert 0 < found.weights < 1
    assert needs(Memory(weights=found.weights - 0.05)) > (least + most) / 2
    assert fitting_weights(plain, with_memory(cluster, least / 2)) is None


# --- refusals


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(data=2), "data = 2"),
        (Plan(shard=Shard(4, 3)), "shard = 4"),
        (Plan(pipe=Pipe(2)), "pipe = 2"),
        (Plan(tensor=TensorPlan(2)), "x = 2"),
        (Plan(context=Context(2)), "context = 2"),
        (Plan(tile=Tile(rows=2, columns=2)), "rows = 2, columns = 2"),
    ],
)
def test_axes_are_refused(plan: Plan, words: str) -> None:
    found = WeightPolicy().refuse(profile(llama()), streamed(plan, 0.5))
    assert found is not None
    assert f"weights = 0.5 works on one rank, and the plan has {words}: use weights = 0 there" in found
    assert WeightPolicy().refuse(profile(llama()), plan) is None


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(PlanError, match=r"keeps blocks on the host, and the model has none"):
        parallelize(models.MLP(), Plan(memory=Memory(weights=0.5)))
    with pytest.raises(PlanError, match=r"memory\.weights = 1\.5; a share lies between 0 and 1"):
        Plan(memory=Memory(weights=1.5))
    with pytest.raises(PlanError, match=r"delay = true keeps the weights of two steps, .*0\.5 keeps those of one step"):
        Plan(precision="bf16", exact=False, memory=Memory(weights=0.5, offload=1.0, delay=True))
    run = load_run(QUICKSTART, ["plan={memory={weights=0.5}}", "train.graph=true"])
    with pytest.raises(ConfigError, match=r"memory\.weights = 0\.5 makes room for weights in an order of its own"):
        wants_graph(run, torch.device("cuda"))


def test_other_optimizers_are_refused() -> None:
    model = parallelize(llama(), streamed(BF16, 1.0))
    with pytest.raises(PlanError, match=r"which only weft\.AdamW\(model, \.\.\.\) takes; use it, or weights = 0"):
        model(models.token_batch(0)[0]).sum().backward()


class GivesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight[:2]


def test_a_view_of_a_weight_is_refused() -> None:
    model = parallelize(nn.Sequential(GivesItsWeight(), GivesItsWeight()), Plan(memory=Memory(weights=1.0)))
    with pytest.raises(PlanError, match=r"which memory\.weights > 0 frees after the block.*or use weights = 0"):
        model(torch.ones(2))


def test_training_asks_for_room_before_it_takes_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"in host memory for each of 1 ranks here.*plan\.memory\.weights"):
        runs.train_with_a_small_host(tmp_path, "plan.memory={weights=1.0}", monkeypatch)


def test_the_policy_is_told() -> None:
    assert Memory("full", offload=0.5, weights=0.25).words == ", recompute full, offload 0.5, weights 0.25"
