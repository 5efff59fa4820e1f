"""Copies in memory: of one host and around a ring of two; lost, damaged and half written ones; no room."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shadow_for_tests import SHAPE, on_hosts, pieces_of

from weft.checkpoint import Checkpoint
from weft.comm import barrier
from weft.errors import DamagedError
from weft.resilience import memory_copies as memory_module
from weft.resilience.memory_copies import MemoryCopies
from weft.resilience.shared_memory import PartListing, claim, complete_steps, list_parts, parts_name

pytestmark = pytest.mark.processes


def save(copies: MemoryCopies, *steps: int) -> None:
    for step in steps:
        copies.save(step, pieces_of(step, copies._rank, copies._num_ranks), {"step": step})
    copies.wait()
    barrier()


def read(copies: MemoryCopies, step: int) -> bool:
    """Whether every rank reads what was saved."""
    checkpoint = Checkpoint(copies.assemble(step))
    assert checkpoint.state == {"step": step}
    return torch.equal(checkpoint.read("w", "parameter"), (torch.arange(70.0) * step).view(SHAPE))


def test_the_last_two_steps_are_there_and_no_more(tmp_path: Path) -> None:
    def work(copies: MemoryCopies, said: list[str]) -> Any:
        save(copies, 2, 4, 6)
        return [copies.steps(), read(copies, 6), said]

    assert on_hosts(tmp_path, 1, work) == [[[6, 4], True, []]] * 4
    assert complete_steps(tmp_path / "host-0") == [4, 6]


def test_a_host_that_is_lost_is_made_up_for_by_its_neighbour(tmp_path: Path) -> None:
    on_hosts(tmp_path, 2, lambda copies, said: save(copies, 2, 4))
    for host in (0, 1):
        assert {key: sorted(parts) for key, parts in list_parts(tmp_path / f"host-{host}").items()} == {
            (2, 4): [0, 1, 2, 3],  # its own and those of the host before: of two, all
            (4, 4): [0, 1, 2, 3],
        }
    os.rename(tmp_path / "host-1", tmp_path / "lost")
    assert on_hosts(tmp_path, 2, lambda copies, said: [copies.steps(), read(copies, 4)]) == [[[4, 2], True]] * 4


@pytest.mark.parametrize("num_lost", [1, 2])
def test_of_three_hosts_one_may_be_lost(tmp_path: Path, num_lost: int) -> None:
    on_hosts(tmp_path, 3, lambda copies, said: save(copies, 2), num_ranks=6)
    held = [sorted(list_parts(tmp_path / f"host-{host}")[2, 6]) for host in range(3)]
    assert held == [[0, 1, 4, 5], [0, 1, 2, 3], [2, 3, 4, 5]]
    for host in range(num_lost):
        os.rename(tmp_path / f"host-{host}", tmp_path / f"lost-{host}")
    found = on_hosts(tmp_path, 3, lambda copies, said: [step for step in copies.steps() if read(copies, step)], 6)
    assert found == [[2] if num_lost == 1 else []] * 6


def test_fewer_ranks_read_what_more_have_saved(tmp_path: Path) -> None:
    on_hosts(tmp_path, 2, lambda copies, said: save(copies, 2))
    assert on_hosts(tmp_path, 1, lambda copies, said: [copies.steps(), read(copies, 2)], 2) == [[[2], True]] * 2


def test_a_copy_that_is_half_written_does_not_count(tmp_path: Path) -> None:
    on_hosts(tmp_path, 1, lambda copies, said: save(copies, 2, 4))
    (tmp_path / "host-0" / parts_name((4, 4)) / "rank-00002.json").unlink()
    assert on_hosts(tmp_path, 1, lambda copies, said: [copies.steps(), read(copies, 2)]) == [[[2], True]] * 4


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    on_hosts(tmp_path, 1, lambda copies, said: save(copies, 2))
    path = tmp_path / "host-0" / parts_name((2, 4)) / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)

    def work(copies: MemoryCopies, said: list[str]) -> str:
        copies.steps()
        with pytest.raises(DamagedError) as caught:
            read(copies, 2)
        return str(caught.value)

    assert all("do not match their SHA-256" in text for text in on_hosts(tmp_path, 1, work))


def test_a_damaged_manifest_is_found_by_all(tmp_path: Path) -> None:
    on_hosts(tmp_path, 1, lambda copies, said: save(copies, 2))
    (tmp_path / "host-0" / parts_name((2, 4)) / "rank-00003.json").write_text("{}")

    def work(copies: MemoryCopies, said: list[str]) -> bool:
        copies.steps()
        with pytest.raises(DamagedError):
            copies.assemble(2)
        return True

    assert on_hosts(tmp_path, 1, work) == [True] * 4


def test_later_copies_are_forgotten_when_the_run_goes_on_from_before(tmp_path: Path) -> None:
    def work(copies: MemoryCopies, said: list[str]) -> Any:
        save(copies, 2, 4)
        copies.forget_after(3)
        return copies.steps()

    assert on_hosts(tmp_path, 1, work) == [[2]] * 4


def test_without_room_there_are_no_copies_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_bytes", lambda folder: 600)

    def work(copies: MemoryCopies, said: list[str]) -> Any:
        save(copies, 2, 4)
        return [copies.steps(), said[0].replace(str(tmp_path), ""), len(said)]

    # 17 floats of rank 0, for 4 ranks, twice
    wrong = "no copies are kept in memory from here on: they need 544 bytes in /host-0, and 600 are free"
    answers = on_hosts(tmp_path, 1, work)
    assert answers[0] == [[], wrong, 1]


def test_a_copy_that_fails_turns_them_off_on_all_ranks(tmp_path: Path) -> None:
    def work(copies: MemoryCopies, said: list[str]) -> Any:
        if copies._rank == 2:
            copies._write_part = lambda *_: (_ for _ in ()).throw(OSError("no space"))  # type: ignore[method-assign]
        copies.save(2, pieces_of(2, copies._rank, 4), {})
        copies.save(4, pieces_of(4, copies._rank, 4), {})
        return [len(said), copies.steps()]

    assert on_hosts(tmp_path, 1, work) == [[1, []]] * 4


def fails_on_rank(rank: int) -> Callable[[MemoryCopies], None]:
    """From the call on, one rank cannot map files."""
    whole = memory_module.map_file

    def start(copies: MemoryCopies) -> None:
        def fails(path: Path, size_bytes: int) -> torch.Tensor:
            raise OSError("stale file handle")

        memory_module.map_file = fails if copies._rank == rank else whole

    return start


def test_a_rank_that_cannot_read_its_part_makes_no_other_wait_when_parts_are_fetched(tmp_path: Path) -> None:
    on_hosts(tmp_path, 2, lambda copies, said: save(copies, 2))
    os.rename(tmp_path / "host-1", tmp_path / "lost")
    start = fails_on_rank(0)

    def work(copies: MemoryCopies, said: list[str]) -> str:
        assert copies.steps() == [2]
        start(copies)
        with pytest.raises(DamagedError) as error:
            copies.assemble(2)
        return str(error.value).partition("used: ")[2]

    found = on_hosts(tmp_path, 2, work)
    assert found[0] == "stale file handle"
    assert all(found)  # all ranks raise


def test_a_rank_that_cannot_read_its_part_makes_no_other_wait_when_parts_are_sent(tmp_path: Path) -> None:
    start = fails_on_rank(1)

    def work(copies: MemoryCopies, said: list[str]) -> list[str]:
        start(copies)
        for step in (2, 4):
            copies.save(step, pieces_of(step, copies._rank, 4), {})
        return said

    found = on_hosts(tmp_path, 2, work)
    assert [len(said) for said in found] == [1] * 4
    assert "stale file handle" in found[1][0]


def test_the_folder_of_a_dead_job_is_removed_by_the_next(tmp_path: Path) -> None:
    prefix = f"weft-copies-{os.getuid()}-"
    with claim(tmp_path / f"{prefix}old"), claim(tmp_path / f"{prefix}fresh"):
        pass
    os.utime(tmp_path / f"{prefix}old", (0, 0))
    used = tmp_path / f"{prefix}used"
    child = os.fork()
    if child == 0:
        held = claim(used)
        os.utime(used, (0, 0))
        (tmp_path / "ready").touch()
        signal.pause()
        held.close()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    claim(tmp_path / f"{prefix}new").close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = {path.name.removeprefix(prefix) for path in tmp_path.glob(prefix + "*")}
    assert left == {"fresh", "used", "new"}


def test_a_listing_travels_as_json() -> None:
    held = PartListing({(3, 2): {0: (10, 20), 1: (0, 5)}})
    assert PartListing.decode(held.encode()) == held
