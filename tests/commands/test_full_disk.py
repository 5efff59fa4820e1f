"""A full disk at each place that a command writes to: one line names the place, status 2, nothing is half written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands_for_tests import caller
from disks_for_tests import small_disk
from runs_for_tests import write_run_file

pytestmark = pytest.mark.processes

NO_ROOM = "No space left on device"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A full disk with a few pages for the names of files and folders."""
    with small_disk(tmp_path / "disk", 32768):
        with pytest.raises(OSError, match=NO_ROOM):
            (tmp_path / "disk" / "filler").write_bytes(bytes(65536))
        yield tmp_path / "disk"


def test_every_place_is_named_in_one_line(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run_file(tmp_path)
    weft = caller(monkeypatch, capfd)
    tiny = ["train.steps=1", "train.warmup_steps=0", "plan.data=1", "--no-verify"]
    assert weft("train", run_file, f"folder={tmp_path / 'run'}", *tiny).status == 0
    cases = {
        "run.toml": ["init", disk / "run.toml"],
        "planned.toml": ["plan", run_file, "--search", "--write", disk / "planned.toml"],
        "model": ["export", tmp_path / "run", disk / "model"],
        "cache": ["train", run_file, f"folder={tmp_path / 'other'}", f"data.cache={disk / 'cache'}", *tiny],
        "run/checkpoints": ["train", run_file, f"folder={disk / 'run'}", *tiny],
    }
    for name, arguments in cases.items():
        left = weft(*arguments)
        assert left.status == 2, (name, left.err)
        assert left.err.startswith("weft: "), name
        assert left.err.count("\n") == 1, left.err
        assert str(disk / name) in left.err
        assert NO_ROOM in left.err
    assert not [path for path in disk.iterdir() if path.name in ("run.toml", "planned.toml", "model")]
    (disk / "filler").unlink()
    assert weft("init", disk / "run.toml").status == 0
