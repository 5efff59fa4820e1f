"""Ranks that share a device: their sums, their traffic, the oracle, equal losses to the bit, and what is refused."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import models_for_tests as models
import pytest
import torch
from runs_for_tests import losses, make_run, train_on_ranks, write_run_file
from torch import Tensor

from weft.cluster.hardware import load
from weft.cluster.local_gpus import Gpu, hide_gpus
from weft.cluster.shared_devices import CONTEXT_BYTES, with_shared_devices
from weft.comm import Axis, Pending, Traffic, all_reduce, backends, collectives, expand, hierarchical
from weft.comm.device_cells import HOST_CELL_BYTES, NUM_CELLS
from weft.comm.device_ranks import DeviceRanks
from weft.commands.out_of_memory import refuse_if_too_large
from weft.errors import ConfigError, LaunchError, LocalError, PlanError
from weft.launch import environment
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh, level_degrees
from weft.plan import Communication, Context, Pipe, Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.planner.advice import best_levels
from weft.planner.fewer_bytes import fewer_bytes
from weft.planner.predict import predict, run_cluster
from weft.proof.prove import ProofReport, verify

DEVICES = [(1, 2), (1, 3), (1, 4), (2, 2)]  # (devices, ranks on each)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
LONGER = (NUM_CELLS + 2) * HOST_CELL_BYTES + 8  # bytes that do not fit the cells at once

DEADLINE_SECONDS = 60

processes = pytest.mark.processes


def stamp(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, which all dtypes and their sums over 4 ranks hold exactly."""
    return ((7 * rank + 3 * torch.arange(size)) % 11).to(dtype)


def wrong_sums(axis: Axis) -> list[str]:
    """The sums that are not what the stamps say. All are under way at once, and are waited for in another order."""
    under_way = []
    cases = [*product([0, 1, 1000], DTYPES, ("sum", "max", "min")), (LONGER // 8, torch.float64, "sum")]
    for size, dtype, reduction in [*cases, (3, torch.float32, "sum")]:
        tensor = stamp(size, axis.index, dtype)
        pending = all_reduce(tensor, axis, reduction)  # type: ignore[arg-type]
        under_way.append((pending, tensor, size, dtype, reduction))
    for pending, *_ in reversed(under_way):
        pending.wait()
        pending.wait()
    wrong = []
    for _, tensor, size, dtype, reduction in under_way:
        every = torch.stack([stamp(size, rank, dtype) for rank in range(axis.degree)])
        found = {"sum": every.sum(0, dtype=dtype), "max": every.amax(0), "min": every.amin(0)}[reduction]
        wrong += [] if torch.equal(tensor, found) else [f"{reduction} of {size} {dtype}"]
    return wrong


@processes
@pytest.mark.parametrize(("num_devices", "per_device"), DEVICES)
@pytest.mark.sampled(1)
def test_sums_equal_those_over_all_ranks(num_devices: int, per_device: int) -> None:
    degree = num_devices * per_device

    def rank(_: int) -> list[str]:
        return wrong_sums(Mesh(Plan(data=degree, ranks_per_device=per_device))["data"])

    assert run_local(rank, degree) == [[]] * degree


@processes
def test_the_ledger_counts_what_is_predicted_and_leaders_send_as_one_rank_per_device() -> None:
    def rank(index: int) -> list[Any]:
        plan = Plan(data=4, ranks_per_device=2)
        mesh = Mesh(plan)
        all_reduce(torch.zeros(3), mesh["data"]).wait()
        all_reduce(torch.zeros(5), mesh["tokens"], "max").wait()
        collectives.broadcast(torch.zeros(7), mesh["data"]).wait()
        flat = {("data", "all_reduce"): Traffic(1, 12), ("tokens", "all_reduce"): Traffic(1, 20)}
        flat["data", "broadcast"] = Traffic(1, 28)
        entries = mesh.ledger.entries()
        leaders = {key: value for key, value in entries.items() if key[0].endswith("/leaders")}
        return [entries == expand(flat, level_degrees(plan, None), mesh.is_leader), sorted(map(str, leaders))]

    leader = [True, ["('data/leaders', 'all_reduce')", "('tokens/leaders', 'all_reduce')"]]
    assert run_local(rank, 4) == [leader, [True, []], leader, [True, []]]


# --- the oracle


def check(plan: Plan) -> ProofReport:
    return verify(models.tied_decoder, models.token_batch, plan)


@processes
@pytest.mark.parametrize(("num_devices", "per_device"), [(2, 2), (1, 4)])
@pytest.mark.sampled(1)
def test_equals_the_unsplit_model_with_predicted_traffic(num_devices: int, per_device: int) -> None:
    report = check(Plan(data=num_devices * per_device, ranks_per_device=per_device)).require()
    told = {line.what.removeprefix("traffic: ") for line in report.checks if line.what.startswith("traffic: ")}
    parts = ["device reduce", "device broadcast", *(["leaders all_reduce"] if num_devices > 1 else [])]
    assert told == {f"{axis}/{part}" for axis, part in product(("data", "losses", "tokens"), parts)}


def forgetful(self: DeviceRanks, tensor: Tensor, reduction: Any) -> None:
    """A leader that reads the piece of its device's last rank and does not add it."""
    original = self._piece_of
    last = self.num_ranks - 1

    def piece_of(rank: int, number: int, like: Tensor) -> Tensor:
        found = original(rank, number, like)
        return torch.zeros_like(found) if rank == last and reduction == "sum" else found

    with patch.object(self, "_piece_of", piece_of):
        add_pieces(self, tensor, reduction)


add_pieces = DeviceRanks.add_pieces


@processes
def test_a_leader_that_forgets_a_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRanks, "add_pieces", forgetful)
    assert run_local(lambda _: wrong_sums(Mesh(Plan(data=2, ranks_per_device=2))["data"]), 2)[0]
    assert not check(Plan(data=2, ranks_per_device=2)).passed


@processes
def test_bytes_that_are_not_predicted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = collectives.record

    def twice(axis: Axis, operation: str, *given: Any) -> None:
        for _ in range(1 + (operation == "reduce")):
            record(axis, operation, *given)

    monkeypatch.setattr(collectives, "record", twice)
    report = check(Plan(data=2, ranks_per_device=2))
    assert {line.what for line in report.checks if not line.passed} == {
        f"traffic: {axis}/device reduce" for axis in ("data", "losses", "tokens")
    }


# --- equal losses to the bit


def in_device_order(per_device: int) -> Any:
    """All-reduce of plain data parallelism that adds in the order of ranks on each device, and then over devices."""
    original = hierarchical.all_reduce

    def ordered(tensor: Tensor, axis: Axis, reduction: Any = "sum") -> Pending:
        if reduction != "sum" or axis.degree == 1:
            return original(tensor, axis, reduction)
        every = tensor.new_empty(axis.degree * tensor.numel())
        collectives.all_gather(every, tensor.detach().reshape(-1).clone(), axis).wait()
        total: Tensor | None = None
        for device in every.view(-1, per_device, *tensor.shape):
            own = device[0].clone()
            for other in device[1:]:
                own += other
            total = own if total is None else total + own
        tensor.detach().copy_(total)
        return Pending(None, axis, "all_reduce")

    return ordered


@processes
@pytest.mark.parametrize(("num_devices", "per_device"), [(2, 1), (1, 2), (1, 3), (1, 4), (2, 2)])
@pytest.mark.sampled(1)
def test_losses_have_the_bits_of_data_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_devices: int, per_device: int
) -> None:
    degree, run_file = num_devices * per_device, write_run_file(tmp_path)
    given = ["train.steps=4", "train.batch=12", "checkpoint.every=100", f"plan.data={degree}", "train.device=cpu"]
    shared = make_run(run_file, "shared", *given, f"plan.ranks_per_device={per_device}")
    train_on_ranks(shared)
    plain = make_run(run_file, "plain", *given)
    ordered = in_device_order(per_device)
    monkeypatch.setattr(hierarchical, "all_reduce", ordered)
    monkeypatch.setattr("weft.step.train_step.all_reduce", ordered)
    train_on_ranks(plain)
    assert losses(shared.folder) == losses(plain.folder)
    assert len(set(losses(plain.folder))) == 4


# --- refusals

REFUSED = {
    "divide": (lambda: Plan(data=4, ranks_per_device=3), r"ranks_per_device = 3 does not divide data = 4"),
    "zero": (lambda: Plan(data=4, ranks_per_device=0), "a device has at least 1 rank"),
    "shard": (lambda: Plan(data=2, shard=Shard(2), ranks_per_device=2), r"given shard = 2; use 1 there"),
    "x": (lambda: Plan(data=2, tensor=TensorPlan(2), ranks_per_device=2), r"given x = 2"),
    "pipe": (lambda: Plan(data=2, pipe=Pipe(2), ranks_per_device=2), r"given pipe = 2"),
    "context": (lambda: Plan(data=2, context=Context(2), ranks_per_device=2), r"given context = 2"),
    "hierarchical": (lambda: Plan(data=2, hierarchical=True, ranks_per_device=2), "use one of them"),
    "rounded": (
        lambda: Plan(data=2, exact=False, communication=Communication(reduce="int8"), ranks_per_device=2),
        "'int8' rounds them for links",
    ),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make()


@processes
def test_a_host_whose_ranks_do_not_fill_devices_is_refused() -> None:
    def rank(_: int) -> None:
        Mesh(Plan(data=4, ranks_per_device=4), ranks_per_node=2)

    with pytest.raises(LaunchError, match="a host has 2 ranks, which do not fill devices"):
        run_local(rank, 4, own_errors=True)


@processes
def test_a_rank_that_sends_nothing_is_named() -> None:
    def rank(index: int) -> None:
        axis = Mesh(Plan(data=3, ranks_per_device=3))["data"]
        ranks = axis.levels[1].device_ranks
        if index == 0:
            ranks._timeout_seconds = 0.1
        if index != 2:
            all_reduce(torch.zeros(1), axis).wait()
        time.sleep(DEADLINE_SECONDS)

    with pytest.raises(LocalError, match=r"rank 2 of the 3 ranks that share this device sent nothing for 0 s"):
        run_local(rank, 3)


# --- prediction


def test_a_rank_has_a_part_of_the_memory_and_pays_for_its_cells(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    given = ["train.device=cpu", "plan.data=4"]
    plain = make_run(run_file, "a", *given)
    shared = make_run(run_file, "b", *given, "plan.ranks_per_device=2")
    one, other = predict(plain, run_cluster(plain)), predict(shared, run_cluster(shared))
    assert run_cluster(shared).num_devices == run_cluster(plain).num_devices == 4
    assert other.memory_limit_bytes == pytest.approx(one.memory_limit_bytes)
    assert other.cost.memory_bytes == one.cost.memory_bytes + (16 << 20)
    assert ("data/leaders", "all_reduce") in other.traffic
    assert set(other.communication_seconds) >= {"data/device", "data/leaders"}


def test_a_gpu_of_a_cluster_is_divided() -> None:
    whole = load("h100:1x2")
    shared = with_shared_devices(whole, 4)
    assert (shared.num_devices, shared.node.num_devices) == (8, 8)
    assert shared.node.device.memory_bytes == whole.node.device.memory_bytes // 4 - CONTEXT_BYTES
    assert shared.node.device.peak_flops["bf16"] == whole.node.device.peak_flops["bf16"] / 4
    assert with_shared_devices(whole, 1) == whole
    assert replace(shared, node=whole.node) == whole


def test_a_plan_that_does_not_fit_its_part_of_a_gpu_is_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    on_gpu = ["train.device=cuda", "train.compile=false"]
    fits, too_many = (
        make_run(run_file, str(m), *on_gpu, f"plan.data={m}", f"plan.ranks_per_device={m}") for m in (1, 4)
    )
    with hide_gpus([Gpu("Small", 4 * CONTEXT_BYTES, (9, 0))]):
        for run in (fits, too_many):
            cluster = run_cluster(run)
            words = r"data 4 \(4 per device\).* on a device of .*Each of the 4 ranks .* use fewer"
            with pytest.raises(PlanError, match=words) if run is too_many else nullcontext():
                refuse_if_too_large(run, cluster, predict(run, cluster))
        two = make_run(run_file, "two", "train.device=cuda", "plan.data=4", "plan.ranks_per_device=2")
        with pytest.raises(ConfigError, match=r"needs 2 GPUs, and this machine has 1; use plan.data = 2"):
            run_cluster(two)


def test_other_forms_of_communication_are_not_suggested(tmp_path: Path) -> None:
    given = ["train.device=cpu", "plan.data=4", "plan.ranks_per_device=2"]
    run = make_run(write_run_file(tmp_path), "a", *given)
    assert best_levels(run, run_cluster(run)) is None
    assert fewer_bytes(run, run_cluster(run)) is None


def test_consecutive_ranks_have_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [RankInfo(rank, 4, rank, 4, 1, "torchrun") for rank in range(4)]
    assert [environment._cuda_index(place, False, 2) for place in places] == [0, 0, 1, 1]
    with pytest.raises(LaunchError, match="start no more ranks per host than it has"):
        environment._cuda_index(places[2], False, 1)
    with pytest.raises(LaunchError, match=r"shows 2, for 2 ranks each .*no more than 4 ranks per host"):
        environment._cuda_index(RankInfo(4, 6, 4, 6, 1, "torchrun"), False, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match="each of the 4 ranks of this host sees a GPU of its own"):
        environment._cuda_index(RankInfo(0, 4, 0, 4, 1, "slurm"), False, 2)


def test_the_back_end_of_all_ranks_is_not_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(backends, "nccl_shares_gpus", lambda: False)
    assert backends.choose_backend("cuda", 4) == "cpu:gloo,cuda:nccl"
    assert backends.choose_backend("cuda", 4, ranks_per_device=2) == "gloo"
