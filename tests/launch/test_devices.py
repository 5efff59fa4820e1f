"""What a machine has decides what a run is given: precision, device, how many ranks; and how its steps are timed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands_for_tests import Weft
from runs_for_tests import make_run, write_run_file

from weft.cluster import local_gpus as devices
from weft.cluster.local_gpus import Gpu, gpus, hide_gpus
from weft.comm import backends
from weft.errors import LocalError
from weft.health.rank_status import Status
from weft.launch.fork_server import ForkServer
from weft.mesh import Mesh
from weft.plan import Plan
from weft.planner.predict import predict, run_cluster
from weft.run_file import load_run
from weft.step.train_step import evaluate, train_step
from weft.train import metrics
from weft.train.metrics import Clock, Moment
from weft.train.setup import device_type

pytestmark = pytest.mark.processes

H200 = Gpu("NVIDIA H200", 150_000_000_000, (9, 0))
V100 = Gpu("Tesla V100-SXM2-32GB", 34_000_000_000, (7, 0))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


def test_a_described_machine_is_seen_only_while_it_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VISIBLE_VARIABLE, "3")
    with hide_gpus([H200]):
        assert gpus() == (H200,)
        assert os.environ[devices.VISIBLE_VARIABLE] == ""
    assert os.environ[devices.VISIBLE_VARIABLE] == "3"
    assert gpus() == ()


@pytest.mark.parametrize(
    ("machine", "overrides", "precision", "reason"),
    [
        ([H200], [], "bf16", "usual on NVIDIA H200"),
        ([H200], ["plan.micro_batch=2"], "bf16", "usual on NVIDIA H200"),
        ([H200], ["train.device=cpu"], "fp32", "usual on a CPU"),
        ([H200], ["plan.precision=fp32"], "fp32", ""),
        ([V100], [], "fp32", "Tesla V100-SXM2-32GB has no bf16"),
        ([H200, V100], [], "fp32", "Tesla V100-SXM2-32GB has no bf16"),
        ([], [], "fp32", "usual on a CPU"),
        ([], ["cluster=h100:1x8"], "bf16", "usual on H100 SXM 80GB"),
        ([], ["cluster=v100-32:1x8"], "fp32", None),
    ],
)
def test_a_precision_that_is_left_out_suits_the_device(
    machine: list[Gpu], overrides: list[str], precision: str, reason: str | None, run_file: Path
) -> None:
    with hide_gpus(machine):
        run = load_run(run_file, overrides)
    assert run.plan.precision == precision
    assert reason is None or run.precision_reason == reason


def test_the_start_says_which_precision_and_why(run_file: Path, weft: Weft) -> None:
    assert "fp32 (usual on a CPU)" in weft("plan", run_file, "plan.data=2").out
    assert "bf16 (usual on" in weft("plan", run_file, "plan.data=2", "cluster=h200:1x2").out


def test_more_ranks_than_gpus_are_refused_unless_they_may_share(run_file: Path) -> None:
    with hide_gpus([H200]):
        run = load_run(run_file, ["plan.data=4"])
        assert device_type(run) == "cuda"
        with pytest.raises(
            Exception, match=r"4 ranks need as many GPUs, and this machine has 1.*train\.share_gpus=true"
        ):
            run_cluster(run)
        shared = run_cluster(load_run(run_file, ["plan.data=4", "train.share_gpus=true"]))
    assert shared.node.device.memory_bytes == H200.memory_bytes // 4


def test_what_carries_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv(backends.SHARING_VARIABLE, raising=False)
    assert backends.choose_backend("cpu", 8) == "gloo"
    assert backends.choose_backend("cuda", 1) == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(backends, "nccl_version", lambda: (2, 28, 9))
    assert backends.choose_backend("cuda", 2) == "gloo"
    assert "which NCCL 2.28.9 does not allow" in backends.describe_backend("cuda", 2)
    assert backends.SHARING_VARIABLE not in os.environ
    monkeypatch.setattr(backends, "nccl_version", lambda: (2, 30, 4))
    assert backends.choose_backend("cuda", 2) == "cpu:gloo,cuda:nccl"
    assert os.environ.pop(backends.SHARING_VARIABLE) == "1"


@pytest.mark.parametrize(
    ("ranks", "gpus", "queues"), [(1, 1, "32"), (2, 1, "16"), (4, 1, "8"), (8, 1, "8"), (8, 8, "32")]
)
def test_ranks_that_share_a_gpu_share_its_queues(
    ranks: int, gpus: int, queues: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv(backends.QUEUES_VARIABLE, "4")
    backends.prepare_cuda(ranks)
    assert os.environ[backends.QUEUES_VARIABLE] == "4", "the user's own number stays"
    monkeypatch.delenv(backends.QUEUES_VARIABLE)
    backends.prepare_cuda(ranks)
    assert os.environ[backends.QUEUES_VARIABLE] == queues


def test_a_delayed_update_is_timed_on_a_known_device(run_file: Path) -> None:
    """`weft train` crashed here on every GPU of the catalog."""
    options = ["plan.memory.offload=0.5", "plan.exact=false", "plan.micro_batch=4", "cluster=h200:1x1"]
    run = load_run(run_file, [*options, "plan.memory.delay=true"])
    assert predict(run, run_cluster(run)).step_seconds
    plain = replace(run, plan=replace(run.plan, memory=replace(run.plan.memory, delay=False)))
    assert predict(plain, run_cluster(plain)).cost.memory_bytes


# --- rates


class Time:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(metrics, "time", made)
    return made


def step(clock: Clock, time: Time, number: int, seconds: float) -> Moment:
    time.now += seconds
    moment = clock.moment()
    clock.done(number, moment)
    return moment


def test_numbers_that_are_read_a_step_late_are_of_their_own_step(time: Time) -> None:
    """As on a GPU: the last two steps are read at once, and each has its own time."""
    clock = Clock(0, units_per_step=100, num_devices=2, flops_per_step=1e12, peak=2e12)
    moments = [step(clock, time, number, seconds) for number, seconds in ((1, 30.0), (2, 1.0), (3, 2.0))]
    first, second, third = (clock.read(number, moment) for number, moment in enumerate(moments, start=1))
    assert (first.step_seconds, first.is_start) == (30.0, True)
    assert (second.units_per_second, second.units_per_second_per_device, second.mfu) == (100.0, 50.0, 0.5)
    assert (third.step_seconds, third.is_start) == (2.0, False)


def test_a_first_step_that_compiles_slows_down_no_rate_but_its_own(time: Time) -> None:
    clock = Clock(10, 100, 1, 1e12, None)
    step(clock, time, 11, 60.0)
    found = clock.read(13, [step(clock, time, number, 1.0) for number in (12, 13)][-1])
    assert found.step_seconds == 1.0
    assert not found.is_start
    assert found.mfu is None


def test_what_is_left_out_counts_for_no_step(time: Time) -> None:
    clock = Clock(0, 100, 1, 1e12, None)
    clock.read(1, step(clock, time, 1, 5.0))
    time.now += 100.0  # an evaluation
    clock.skip(1)
    assert clock.read(2, step(clock, time, 2, 3.0)).step_seconds == 3.0


def test_a_first_step_that_is_done_again_is_no_start(time: Time) -> None:
    clock = Clock(0, 100, 1, 1e12, None)
    assert clock.read(1, step(clock, time, 1, 9.0)).is_start
    clock.skip(0)
    assert not clock.read(1, step(clock, time, 1, 1.0)).is_start


def test_a_run_that_cannot_be_sampled_is_finished_all_the_same(
    run_file: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ForkServer.call

    def call(self: ForkServer, job: str, **arguments: object) -> object:
        if job == "sample":
            raise LocalError("'sample' failed: OutOfMemoryError: CUDA out of memory\ntrace")
        return whole(self, job, **arguments)

    monkeypatch.setattr(ForkServer, "call", call)
    left = weft("train", run_file, f"folder={run_file.parent / 'run'}", "train.steps=3", "plan.data=1", "--no-verify")
    assert left.status == 0
    assert "no sample  'sample' failed: OutOfMemoryError: CUDA out of memory" in left.out
    assert "what to try next" in left.out
    assert "train.steps=6 plan.tensor.x=2 plan.data=1\n" in left.out


def test_a_suggested_plan_is_one_that_the_model_allows(run_file: Path, weft: Weft) -> None:
    odd_heads = (
        "model.num_attention_heads=3",
        "model.num_key_value_heads=3",
        "model.hidden_size=36",
        "plan.data=1",
        "--no-verify",
    )
    left = weft("train", run_file, f"folder={run_file.parent / 'run'}", "train.steps=3", *odd_heads)
    assert left.status == 0
    assert "train.steps=6 plan.pipe=2 plan.data=1\n" in left.out


def test_evaluation_gives_a_sign_of_life_for_each_batch() -> None:
    """A rank that is silent for long is taken for one that hangs, and no unit of a plain model speaks."""
    mesh, phases = Mesh(Plan()), list[str]()

    class Noted(Status):
        def phase(self, doing: str) -> None:
            phases.append(doing)

    mesh.ledger.status = Noted({}, 0)
    model = torch.nn.Linear(3, 5)
    batches = [(torch.randn(2, 3), torch.tensor([1, 4]))] * 3
    evaluate(model, batches, mesh)
    assert phases == ["evaluating"] * 3
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, mesh)
    assert phases.count("forward and backward") == 3


def test_one_rank_is_a_child_too(run_file: Path, weft: Weft) -> None:
    run = make_run(run_file, "alone")
    left = weft("train", run_file, f"folder={run.folder}", "train.steps=3", "plan.micro_batch=4", "--no-verify")
    assert left.status == 0
    assert "step 1/3" in left.out
    assert "to start" in left.out
    assert (run.folder / "checkpoints" / "step-00000003").is_dir()
