"""Kill -9 at every disk action of a save: the newest checkpoint is the old one or the new one, whole, never a mix."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft.checkpoint import Checkpoint, Piece, Region, Saver, latest, steps
from weft.errors import CheckpointError

pytestmark = pytest.mark.processes

torch.set_num_threads(1)

OLD, NEW = 100, 200


def pieces_of(step: int, rank: int, num_ranks: int) -> list[Piece]:
    """A sharded parameter, its sharded state, and a scalar that rank 0 holds."""
    shape = (6, 5)
    values = torch.arange(30.0) * step
    cut = slice(30 * rank // num_ranks, 30 * (rank + 1) // num_ranks)
    region = Region.flat(shape, cut.start, cut.stop)
    pieces = [
        Piece("w", "parameter", region, values[cut]),
        Piece("w", "exp_avg", region, values[cut].bfloat16()),
    ]
    return [*pieces, Piece("w", "step", Region.whole(()), torch.tensor(step))] if rank == 0 else pieces


def save_step(folder: Path, step: int, num_ranks: int, token: str, at: Callable[[str], None]) -> None:
    """Save as all ranks; the later ranks first, so that each action happens in one order."""
    for rank in reversed(range(num_ranks)):
        saver = Saver(folder, rank, num_ranks, token, keep_last=1, timeout_seconds=120, at=at)
        saver.save(step, pieces_of(step, rank, num_ranks), {"step": step})
        saver.wait()


def check_whole(path: Path) -> int:
    """Every value of a checkpoint must be its own step's."""
    checkpoint = Checkpoint(path)
    step = checkpoint.step
    assert path.name == f"step-{step:08d}"
    assert checkpoint.state == {"step": step}
    assert torch.equal(checkpoint.read("w", "parameter"), (torch.arange(30.0) * step).reshape(6, 5))
    assert torch.equal(checkpoint.read("w", "exp_avg"), (torch.arange(30.0) * step).reshape(6, 5).bfloat16())
    assert checkpoint.read("w", "step").item() == step
    return step


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; returns the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


class KillAt:
    """Kills this process at the n-th point."""

    def __init__(self, index: int) -> None:
        self.left = index

    def __call__(self, point: str) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def points_of(folder: Path, num_ranks: int) -> list[str]:
    """The points of a save beside a previous checkpoint, in order."""
    points: list[str] = []
    save_step(folder, OLD, num_ranks, "aaaa", at=lambda point: None)
    save_step(folder, NEW, num_ranks, "bbbb", at=points.append)
    return points


def test_the_points_are_every_action_in_a_safe_order(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    points = points_of(folder, num_ranks=2)
    assert points[::2] == [
        "before write rank-00001.safetensors",
        "before fsync rank-00001.safetensors",
        "before write rank-00001.json.tmp",
        "before fsync rank-00001.json.tmp",
        "before fsync .saving-step-00000200-bbbb-1",
        "before rename rank-00001.json",
        "before write rank-00000.safetensors",
        "before fsync rank-00000.safetensors",
        "before write rank-00000.json.tmp",
        "before fsync rank-00000.json.tmp",
        "before fsync .saving-step-00000200-bbbb-1",
        "before rename rank-00000.json",
        "before write manifest.json",
        "before fsync manifest.json",
        "before remove rank-00000.json",
        "before remove rank-00001.json",
        "before fsync .saving-step-00000200-bbbb-1",
        "before rename step-00000200",
        "before fsync run",
        "before rename .deleting-step-00000100-bbbb",
        "before remove .deleting-step-00000100-bbbb",
    ]
    assert points[1::2] == [point.replace("before", "after") for point in points[::2]]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_kill_at_every_point_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, num_ranks: int) -> None:
    points = points_of(tmp_path / "count", num_ranks)
    published = points.index("after rename step-00000200")
    assert len(points) == (28 if num_ranks == 1 else 42)
    for index, point in enumerate(points):
        folder = tmp_path / f"kill-{index}"
        save_step(folder, OLD, num_ranks, "aaaa", at=lambda point: None)
        killed = in_child(lambda: save_step(folder, NEW, num_ranks, "bbbb", at=KillAt(index)))  # noqa: B023
        assert killed == signal.SIGKILL, point
        newest = latest(folder)
        assert newest is not None
        assert check_whole(newest) == (NEW if index >= published else OLD), point
        for step in steps(folder):
            check_whole(folder / f"step-{step:08d}")
        save_step(folder, NEW, num_ranks, "cccc", at=lambda point: None)  # the run comes back and saves again
        assert check_whole(folder / f"step-{NEW:08d}") == NEW
        save_step(folder, NEW + 100, num_ranks, "dddd", at=lambda point: None)
        assert os.listdir(folder) == [f"step-{NEW + 100:08d}"], point


def test_a_rank_that_dies_alone_is_named_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    """Rank 1 is killed at each of its points; rank 0 lives on, and publishes only what is complete."""
    own = [point for point in points_of(tmp_path / "count", 2) if "rank-00001" in point or ".saving" in point]
    own = own[: own.index("after rename rank-00001.json") + 1]
    assert len(own) == 12
    for index, point in enumerate(own):
        folder = tmp_path / f"kill-{index}"
        save_step(folder, OLD, 2, "aaaa", at=lambda point: None)

        def rank_1() -> None:
            saver = Saver(folder, 1, 2, "bbbb", at=KillAt(index))  # noqa: B023
            saver.save(NEW, pieces_of(NEW, 1, 2), {"step": NEW})
            saver.wait()

        rank_0 = Saver(folder, 0, 2, "bbbb", timeout_seconds=0.05)
        assert in_child(rank_1) == signal.SIGKILL
        rank_0.save(NEW, pieces_of(NEW, 0, 2), {"step": NEW})
        if point == "after rename rank-00001.json":
            rank_0.wait()
        else:
            with pytest.raises(CheckpointError, match=r"no part from ranks \[1\]"):
                rank_0.wait()
        newest = latest(folder)
        assert newest is not None
        assert check_whole(newest) == (NEW if point == "after rename rank-00001.json" else OLD)


def test_leftovers_of_a_crashed_attempt_are_never_mixed_in(tmp_path: Path) -> None:
    """A crashed run left rank 1's part of the same step; the next run must wait for its own."""
    folder, elsewhere, left_over = tmp_path / "run", tmp_path / "elsewhere", ".saving-step-00000200-aaaa-1"
    crashed = Saver(folder, 1, 2, "aaaa")
    crashed.save(NEW, pieces_of(OLD, 1, 2), {}, asynchronous=False)
    assert os.listdir(folder) == [left_over]
    rank_0 = Saver(folder, 0, 2, "bbbb", timeout_seconds=120)
    assert os.listdir(folder) == []
    rank_0.save(NEW, pieces_of(NEW, 0, 2), {"step": NEW})
    Saver(elsewhere, 1, 2, "aaaa").save(NEW, pieces_of(OLD, 1, 2), {}, asynchronous=False)
    (elsewhere / left_over).rename(folder / left_over)  # at once: rank 0 may remove it at any time
    rank_1 = Saver(folder, 1, 2, "bbbb", timeout_seconds=120)
    rank_1.save(NEW, pieces_of(NEW, 1, 2), {"step": NEW})
    for saver in (rank_0, rank_1):
        saver.wait(published=True)
    assert check_whole(folder / "step-00000200") == NEW


class CarelessSaver(Saver):
    """Writes its manifest straight into the final folder, as a saver without a rename would."""

    def _write_file(self, path: Path, data: bytes) -> None:
        final = self.folder / f"step-{NEW:08d}"
        final.mkdir()
        super()._write_file(final / "manifest.json", data)


def test_a_saver_without_the_rename_is_caught(tmp_path: Path) -> None:
    """Negative control: the check above must fail for it."""

    def work() -> None:
        kill = KillAt(5)  # after write manifest.json
        CarelessSaver(tmp_path, 0, 1, "bbbb", at=kill).save(
            NEW, pieces_of(NEW, 0, 1), {"step": NEW}, asynchronous=False
        )

    save_step(tmp_path, OLD, 1, "aaaa", at=lambda point: None)
    assert in_child(work) == signal.SIGKILL
    newest = latest(tmp_path)
    assert newest is not None
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors cannot be used"):
        check_whole(newest)


def test_ranks_in_threads_publish_together(tmp_path: Path) -> None:
    """All ranks at once, several steps, whatever the order of their threads."""

    def run(rank: int) -> None:
        saver = Saver(tmp_path, rank, 4, "aaaa", keep_last=2, timeout_seconds=120)
        for step in (1, 2, 3, 4, 5):
            saver.save(step, pieces_of(step, rank, 4), {"step": step})
        saver.wait(published=True)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert steps(tmp_path) == [4, 5]
    assert [check_whole(tmp_path / f"step-{step:08d}") for step in (4, 5)] == [4, 5]
