"""Full disks, folders that may not be written or read, and devices without room: one line each, and nothing lost."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from commands_for_tests import caller
from disks_for_tests import small_disk
from runs_for_tests import losses, make_run, train_on_ranks, write_run_file

from weft.checkpoint import Checkpoint, Piece, Region, Saver, steps
from weft.cluster.hardware import load
from weft.commands import train as train_command
from weft.commands.out_of_memory import nearest_fitting, out_of_memory
from weft.errors import CheckpointError, LaunchError
from weft.launch.folder_lock import locked
from weft.launch.local_ranks import LocalError, run_local
from weft.planner.predict import predict
from weft.run_file import load_run
from weft.train.metrics import MetricsLog

pytestmark = pytest.mark.processes

NOBODY = 65534


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("bad world"))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    """A file with the warnings of this process and of those that it forks."""
    handler = logging.FileHandler(tmp_path / "told.txt")
    logging.getLogger("weft").addHandler(handler)
    yield tmp_path / "told.txt"
    logging.getLogger("weft").removeHandler(handler)
    handler.close()


def test_a_save_that_finds_no_room_is_told_and_the_next_one_is_made(run_file: Path, told: Path) -> None:
    """Of two ranks the second cannot write step 3: nobody waits for it, and training goes on to its usual end."""
    calm = make_run(run_file, "calm", "plan.data=2", "train.steps=9")
    train_on_ranks(calm)
    run = make_run(run_file, "short of room", "plan.data=2", "train.steps=9")
    save_file = safetensors.torch.save_file

    def no_room_for_step_three(tensors: dict[str, Any], path: Path) -> None:
        if "rank-00001" in path.name and "step-00000003" in path.parent.name:
            full()
        save_file(tensors, path)

    with patch("weft.checkpoint.save.save_file", no_room_for_step_three):
        train_on_ranks(run)
    assert steps(run.folder / "checkpoints") == [6, 9]
    assert losses(run.folder) == losses(calm.folder)
    lines = told.read_text()
    assert re.search(r"a checkpoint was not saved: cannot save to .*No space left.*; training went on", lines)
    assert re.search(r"step 3 was not published: ranks \[1\] could not save their part; training went on", lines)


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on_from_it(run_file: Path, tmp_path: Path) -> None:
    calm = make_run(run_file, "enough room", "train.steps=9")
    train_on_ranks(calm)
    size_bytes = sum(path.stat().st_size for path in (calm.folder / "checkpoints" / "step-00000009").iterdir())
    with small_disk(tmp_path / "disk", int(1.7 * size_bytes)) as mount:  # room for one
        run = load_run(run_file, [f"folder={tmp_path / 'disk' / 'run'}", "train.steps=9", "checkpoint.keep_last=1"])
        with pytest.raises(
            LocalError, match=r"CheckpointError: cannot save to .*space.*earlier checkpoints .* untouched"
        ):
            train_on_ranks(run)
        assert steps(run.folder / "checkpoints") == [3]
        checkpoint = Checkpoint(run.folder / "checkpoints" / "step-00000003")
        assert all(checkpoint.read(entry.name, entry.kind).isfinite().all() for entry in checkpoint.entries())
        mount("size=16m")
        train_on_ranks(run)
        assert steps(run.folder / "checkpoints") == [9]
        assert losses(run.folder) == losses(calm.folder)


def test_a_full_disk_at_a_restart_does_not_end_the_run(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start is refused. Ranks that start again go on: what they have in memory would be lost with the job."""
    run, make = make_run(run_file, "full at a restart", "train.steps=4"), Path.mkdir

    def full(self: Path, *arguments: Any, **options: Any) -> None:
        if self.name.startswith(".saving-step-0-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(LocalError, match=r"CheckpointError: cannot save to .*No space left on device"):
        train_on_ranks(run)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train_on_ranks(run)["finished"]


def test_metrics_on_a_full_disk_are_whole_lines(run_file: Path, told: Path) -> None:
    run = make_run(run_file, "no room for metrics", "train.steps=4")
    with small_disk(run.folder, 12288) as mount, locked(run.folder):  # pages for the folder, the lock and one of lines
        log = MetricsLog(run, 0)
        for step in range(1, 9):
            log.write("step", step, {"text": "x" * 1000})
        mount("size=64k")
        log.write("step", 9, {"text": "y"})
        log.close()
        found = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert found[0] == 1
    assert found[-1] == 9
    assert 1 < len(found) < 9
    assert told.read_text().count("metrics.jsonl cannot be written (No space left on device)") == 1


def test_a_folder_that_may_not_be_written_is_refused_before_training(run_file: Path, tmp_path: Path) -> None:
    run = make_run(run_file, "read-only", "train.steps=3")
    with small_disk(run.folder, 2**20) as mount:
        mount("ro")
        with pytest.raises(
            LocalError, match=r"LaunchError: the run's folder .* cannot be written: Read-only file system"
        ):
            train_on_ranks(run)
    with small_disk(tmp_path / "checkpoints", 2**20) as mount:
        mount("ro")
        with pytest.raises(CheckpointError, match=r"cannot save to .*Read-only file system.*choose another folder"):
            Saver(tmp_path / "checkpoints", 0, 1, "abcd")


def test_what_another_user_owns_is_refused_by_name() -> None:
    """As a user without rights: a folder that cannot be written, a checkpoint that cannot be read (no damage)."""
    if os.geteuid() != 0:
        pytest.skip("to become another user needs root")
    folder = Path(tempfile.mkdtemp(prefix="weft-rights-"))
    try:
        folder.chmod(0o755)
        region = Region.whole((3,))
        Saver(folder / "c", 0, 1, "abcd").save(
            1, [Piece("w", "parameter", region, torch.ones(3))], {}, asynchronous=False
        )
        step = folder / "c" / "step-00000001"

        def unprivileged(_: int) -> list[str]:
            os.seteuid(NOBODY)
            told = []
            for action in (lambda: locked(folder / "run").__enter__(), lambda: Checkpoint(step)):
                try:
                    action()
                except (LaunchError, CheckpointError) as error:
                    told.append(f"{type(error).__name__}: {error}")
            return told

        for path in (step / "rank-00000.safetensors", step / "manifest.json", step):
            path.chmod(0o600)
            first, second = run_local(unprivileged, 1)[0]
            assert "cannot be written: Permission denied; give it permission" in first
            assert f"CheckpointError: {path} may not be read by user {NOBODY}" in second  # and no DamagedError
    finally:
        shutil.rmtree(folder)


# ---------------------------------------------------------------- memory of the device


def test_a_device_out_of_memory_gives_the_breakdown_and_a_plan_that_fits(run_file: Path) -> None:
    """On a device with less room than the plan needs: the advice is checked by predicting it."""
    run = make_run(run_file, "out of memory", "plan.data=2", "plan.micro_batch=8", "train.compile=false")
    cluster = load("h100:1x2")
    need_bytes = predict(run, cluster).cost.memory_bytes
    device = replace(cluster.node.device, memory_bytes=need_bytes * 3 // 4)
    cluster = replace(cluster, node=replace(cluster.node, device=device))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nSee PYTORCH")
    message = str(out_of_memory(run, cluster, error))
    assert message.startswith(
        "a device is out of memory (CUDA out of memory. Tried 2 GiB.). Of data 2, micro-batch 8, "
    )
    assert f"{need_bytes / 2**20:.4g} MiB of {device.memory_bytes / 2**20:.4g} MiB" in message
    for name, size in predict(run, cluster).cost.state_bytes.items():
        if size:
            assert f"{name} {size / 2**20:.4g} MiB" in message
    assert "The nearest plan that needs less: plan.micro_batch = 4 (" in message
    smaller = predict(replace(run, plan=replace(run.plan, micro_batch=4)), cluster).cost.memory_bytes
    assert nearest_fitting(run, cluster, device.memory_bytes) == ("plan.micro_batch = 4", smaller)
    assert smaller <= device.memory_bytes
    cut = replace(run.plan, data=1, shard=replace(run.plan.shard, degree=2), micro_batch=1)
    cut = replace(cut, memory=replace(cut.memory, recompute="full"))
    least_bytes = predict(replace(run, plan=cut), cluster).cost.memory_bytes
    words = "plan.micro_batch = 1 and plan.memory.recompute = 'full' and plan.shard = 2 with plan.data = 1"
    assert nearest_fitting(run, cluster, least_bytes) == (words, least_bytes)
    assert nearest_fitting(run, cluster, 1) is None
    message = str(out_of_memory(run, replace(cluster, node=load("h100:1x2").node), error))
    assert "By that it fits: other programs may use the device." in message


def test_weft_train_says_it_in_one_line(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(train_command, "train", no_room)
    left = caller(monkeypatch, capfd)("train", run_file, f"folder={tmp_path / 'run'}", "--no-verify")
    assert left.status == 2
    (line,) = [line for line in left.err.splitlines() if line.startswith("weft:")]
    assert "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in line
    assert "the prediction is" in line
    assert "The nearest plan that needs less: plan.micro_batch = 8" in line
