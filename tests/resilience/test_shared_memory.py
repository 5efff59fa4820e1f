"""The folder of memory copies: who holds it, who may remove it, and what happens when shared memory is full."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shadow_for_tests import on_hosts, pieces_of
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from weft.comm import barrier
from weft.errors import CheckpointError
from weft.health.rank_status import Status
from weft.health.watchdog import Deadline
from weft.launch.environment import RankInfo
from weft.resilience import shared_memory
from weft.resilience.memory_copies import MemoryCopies
from weft.resilience.peer_watch import Lookout
from weft.resilience.shared_memory import claim, complete_steps, map_file

pytestmark = pytest.mark.processes

PREFIX = f"weft-copies-{os.getuid()}-"


def left(folder: Path, prefix: str = PREFIX) -> set[str]:
    return {path.name.removeprefix(prefix) for path in folder.glob(prefix + "*")}


def in_another_process(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def idle(tmp_path: Path, name: str, prefix: str = PREFIX) -> Path:
    """A folder that a job left long ago."""
    folder = tmp_path / f"{prefix}{name}"
    claim(folder).close()
    os.utime(folder, (0, 0))
    return folder


# --- who holds it


def test_a_process_that_claims_two_folders_keeps_both(tmp_path: Path) -> None:
    """As a rank does, of its copies and of its page: the second claim must not let go of the first."""
    with claim(tmp_path / f"{PREFIX}copies"), claim(tmp_path / f"{PREFIX}pages"):
        for name in ("copies", "pages"):
            os.utime(tmp_path / f"{PREFIX}{name}", (0, 0))
        in_another_process(lambda: claim(tmp_path / f"{PREFIX}other").close())
        assert left(tmp_path) == {"copies", "pages", "other"}


def test_a_process_never_removes_a_folder_that_it_holds(tmp_path: Path) -> None:
    with claim(tmp_path / f"{PREFIX}copies"):
        os.utime(tmp_path / f"{PREFIX}copies", (0, 0))
        with claim(tmp_path / f"{PREFIX}pages"):
            assert left(tmp_path) == {"copies", "pages"}


def test_a_folder_that_is_removed_while_it_is_claimed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job's sweep has the lock first, and removes the folder, while this one waits for the lock."""
    folder = idle(tmp_path, "copies")
    removals = [1]

    def swept_before(lock: Callable[..., None]) -> Callable[..., None]:
        def locked(*arguments: Any) -> None:
            if removals:
                removals.pop()
                shutil.rmtree(folder)
            lock(*arguments)

        return locked

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, swept_before(getattr(fcntl, name)))
    with claim(folder) as held:
        found = os.stat(folder / shared_memory.LOCK)
        assert (found.st_dev, found.st_ino) == (os.fstat(held.fileno()).st_dev, os.fstat(held.fileno()).st_ino)


# --- who may remove it


def test_a_folder_that_was_used_just_now_is_left_for_its_job(tmp_path: Path) -> None:
    """While torchrun restarts ranks, no process may hold it for a while."""
    claim(tmp_path / f"{PREFIX}soon").close()
    idle(tmp_path, "old")
    with claim(tmp_path / f"{PREFIX}own"):
        assert left(tmp_path) == {"soon", "own"}


@pytest.mark.parametrize("when", ["it is opened", "it is locked", "its age is taken"])
def test_a_folder_that_another_sweep_removes_first_is_no_error(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = idle(tmp_path, "old")

    def removed_before(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            shutil.rmtree(victim, ignore_errors=True)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, call)

    calls = {
        "it is opened": [(builtins, "open"), (os, "open")],
        "it is locked": [(fcntl, "flock"), (fcntl, "lockf")],
        "its age is taken": [(time, "time")],
    }
    for module, name in calls[when]:
        removed_before(module, name)
    claim(tmp_path / f"{PREFIX}new").close()
    assert left(tmp_path) == {"new"}


def test_folders_of_other_users_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may make a folder that has this user's number in its name."""
    uid = os.getuid() + 1
    prefix = f"weft-copies-{uid}-"
    theirs = idle(tmp_path, "theirs", prefix)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    new = tmp_path / f"{prefix}new"
    with pytest.raises(CheckpointError, match="belongs to somebody else"):
        claim(new)  # made by the process, which is another user
    assert (theirs / shared_memory.LOCK).exists()


def test_a_folder_that_may_not_be_opened_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = idle(tmp_path, "forbidden")
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path)
    (tmp_path / f"{PREFIX}pipe").mkdir()
    os.mkfifo(tmp_path / f"{PREFIX}pipe" / shared_memory.LOCK)

    def refused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            if str(path).startswith(str(forbidden)):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path, *arguments, **named)

        return call

    for module in (builtins, os):
        monkeypatch.setattr(module, "open", refused(module.open))
    claim(tmp_path / f"{PREFIX}new").close()
    assert left(tmp_path) == {"forbidden", "file", "link", "pipe", "new"}


def test_a_folder_is_private_and_one_of_others_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"{PREFIX}copies"
    claim(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    on_hosts(tmp_path, 1, lambda copies, said: (copies.save(2, pieces_of(2, copies._rank, 4), {}), copies.wait(), None))
    assert complete_steps(tmp_path / "host-0") == [2]
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert complete_steps(tmp_path / "host-0") == []


# --- no room


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_room_is_taken_before_a_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sparse file lacks shows as SIGBUS when it is written; what was allocated is there."""
    written = map_file(tmp_path / "part", 1 << 20)
    assert os.stat(tmp_path / "part").st_blocks * 512 >= 1 << 20
    written.fill_(7)
    assert map_file(tmp_path / "part", 1 << 20).eq(7).all()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        map_file(tmp_path / "other", 1 << 20)
    assert not (tmp_path / "other").exists()
    assert map_file(tmp_path / "part", 1 << 20).eq(7).all()  # it has its room


def save_twice(copies: MemoryCopies, said: list[str]) -> Any:
    for step in (2, 4):
        copies.save(step, pieces_of(step, copies._rank, copies._num_ranks), {})
    barrier()
    return [said, copies.steps()]


def test_a_neighbour_without_room_turns_copies_off_and_nobody_waits(tmp_path: Path) -> None:
    """Rank 2 has no room for the part of rank 0, on the other host."""

    def work(copies: MemoryCopies, said: list[str]) -> Any:
        if copies._rank == 2:
            os.posix_fallocate = full  # type: ignore[assignment]  # in this process, which is forked
        return save_twice(copies, said)

    answers = on_hosts(tmp_path, 2, work)
    assert [steps for _, steps in answers] == [[2]] * 4  # every rank has written its own part
    for rank, (said, _) in enumerate(answers):
        (line,) = said
        reason = "shared memory is full" if rank == 2 else "another rank cannot"
        assert line.startswith(f"no copies are kept in memory from here on: {reason}"), line
    assert "checkpoint.memory_every" in answers[2][0][0]


def test_a_rank_that_cannot_write_its_part_keeps_no_host_waiting(tmp_path: Path) -> None:
    def work(copies: MemoryCopies, said: list[str]) -> Any:
        if copies._rank == 2:
            copies._write_part = full  # type: ignore[method-assign, assignment]
        return save_twice(copies, said)

    answers = on_hosts(tmp_path, 2, work)
    assert [steps for _, steps in answers] == [[]] * 4
    assert all(len(said) == 1 for said, _ in answers)
    assert "shared memory is full" in answers[2][0][0]


def test_a_page_takes_its_room_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages lie in shared memory too: where it is full, a rank without one that others see trains on."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            full()
            return 0

        def truncate(self, size: int | None = None) -> int:  # a sparse file always finds room
            return 0

    real = builtins.open

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        return Full() if str(path).endswith(".page") else real(path, *arguments, **named)

    monkeypatch.setattr(builtins, "open", opened)
    store: Store = HashStore()
    page = Status({}, 0)
    page.step_begins(3)
    with Lookout(page, RankInfo(0, 1, 0, 1, 1, "torchrun"), store, Deadline(60), tmp_path / "run"):
        page.phase("forward and backward")
        assert page.page() is not None
        assert not list(tmp_path.glob("*/rank-*.page"))
    assert not list(tmp_path.glob("weft-*"))
