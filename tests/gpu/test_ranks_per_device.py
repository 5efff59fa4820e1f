"""Ranks that share a GPU by their plan: sums through CUDA IPC, the oracle, training under MPS, and a killed rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import models_for_tests as models
import pytest
import torch
from gpu_for_tests import Case, losses, prove, succeeded, weft, write_run

from weft.comm import all_reduce
from weft.comm.device_cells import GPU_CELL_BYTES, NUM_CELLS, GpuCells
from weft.launch.fork_server import ForkServer
from weft.launch.local_ranks import run_spawned
from weft.mesh import Mesh
from weft.plan import Plan

CASES = {
    "m=2": Case(models.tied_decoder, models.token_batch, Plan(data=2, ranks_per_device=2)),
    "m=4": Case(models.tied_decoder, models.token_batch, Plan(data=4, ranks_per_device=4)),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def wrong_sums(rank: int, num_ranks: int) -> list[str]:
    """The sums on the GPU that are not those of small whole numbers, which every dtype holds."""
    device = torch.device("cuda", torch.cuda.current_device())
    axis = Mesh(Plan(data=num_ranks, ranks_per_device=num_ranks), device)["data"]
    assert axis.levels is not None
    ranks = axis.levels[1].device_ranks
    assert ranks is not None
    assert isinstance(ranks.cells, GpuCells)
    longer = (NUM_CELLS + 2) * GPU_CELL_BYTES // 4 + 3
    cases = [*((size, dtype) for size in (1, 1000) for dtype in DTYPES), (longer, torch.float32)]
    wrong: list[str] = []
    for repeat in range(5):
        under_way = []
        for size, dtype in cases:
            tensor = (torch.arange(size, device=device) % 7 + rank + repeat).to(dtype)
            under_way.append((all_reduce(tensor, axis), tensor, size, dtype))
        for pending, *_ in reversed(under_way):
            pending.wait()
        for _, tensor, size, dtype in under_way:
            every = [(torch.arange(size, device=device) % 7 + other + repeat) for other in range(num_ranks)]
            if not torch.equal(tensor, sum(every).to(dtype)):  # type: ignore[union-attr]
                wrong.append(f"{size} {dtype} in repeat {repeat}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_through_cuda_ipc(num_ranks: int) -> None:
    entry = f"{__file__}:wrong_sums"
    found = run_spawned(entry, {"num_ranks": num_ranks}, num_ranks, timeout_seconds=120, device="cuda")
    assert found == [[]] * num_ranks


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsplit_model(fork_server: ForkServer, name: str) -> None:
    report = prove(fork_server, "test_ranks_per_device", name).require()
    assert any("data/device reduce" in line.what for line in report.checks)


@pytest.fixture
def services() -> Iterator[Path]:
    """The folder for temporary files of this test's commands, where services of other tests are not counted. Its path
    is short, as sockets need.
    """
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        yield Path(folder)


def test_training_equals_data_parallelism_and_the_service_ends_with_it(tmp_path: Path, services: Path) -> None:
    given = ["train.device=cuda", "plan.data=4", "plan.precision=fp32", "train.steps=6", "--no-verify"]
    run = write_run(tmp_path)
    succeeded(weft("train", run, *given, "train.share_gpus=true", f"folder={tmp_path}/plain"))
    shared_run = (*given, "plan.ranks_per_device=4", f"folder={tmp_path}/shared")
    left = succeeded(weft("train", run, *shared_run, TMPDIR=str(services)))
    plain, shared = losses(tmp_path / "plain"), losses(tmp_path / "shared")
    assert plain.keys() == shared.keys()
    assert all(abs(plain[step] - shared[step]) < 1e-4 for step in plain), (plain, shared)
    assert not list(services.glob("weft-mps-*")), left.err


def test_too_many_ranks_for_the_gpus_are_refused(tmp_path: Path) -> None:
    per_device = 2
    num = per_device * (torch.cuda.device_count() + 1)
    left = weft("train", write_run(tmp_path), "train.device=cuda", f"plan.data={num}", "plan.ranks_per_device=2")
    assert left.status == 2
    assert "plan.ranks_per_device = 2 needs" in left.err


def test_a_killed_rank_changes_nothing_and_the_service_ends(tmp_path: Path, services: Path) -> None:
    given = ["plan.data=2", "plan.ranks_per_device=2", "plan.precision=fp32", "train.steps=40", "train.device=cuda"]
    given += ["train.deterministic=true", "train.evaluate_every=40"]
    more = ["--kinds", "kill", "--mtbf", "3s", "--faults", 1, "--seed", 1, "--json"]
    found = weft("chaos", write_run(tmp_path), *given, *more, seconds=120, TMPDIR=str(services))
    assert found.status == 0, found.out[-2000:] + found.err[-3000:]
    assert found.json["equal"]
    assert found.json["faults"]
    assert not list(services.glob("weft-mps-*"))
