"""What commands say about inputs that people try: the place that is wrong, the rule and what to change."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands_for_tests import Weft, caller
from disks_for_tests import small_disk
from runs_for_tests import make_run, write_run_file

from weft.commands import main
from weft.commands.main import stopping_early
from weft.commands.train import _other_plan_to_price
from weft.data.images import read_labels
from weft.run_file import load_run

pytestmark = pytest.mark.processes
NO_ROOM = "No space left on device"


def test_a_folder_that_is_not_there_and_a_run_that_has_not_saved(weft: Weft, tmp_path: Path) -> None:
    for command in (
        ("generate", "nosuchrun"),
        ("export", "nosuchrun", "out"),
        ("evaluate", "nosuchrun", "--data", "x"),
    ):
        assert "nosuchrun does not exist; give a run folder" in weft(*command).err
    (tmp_path / "young" / "checkpoints").mkdir(parents=True)
    for command in (("generate", tmp_path / "young"), ("export", tmp_path / "young", tmp_path / "out")):
        assert f"{tmp_path / 'young'} is the folder of a run without a complete checkpoint" in weft(*command).err


def test_a_host_that_nobody_knows(weft: Weft, tmp_path: Path) -> None:
    left = weft("serve", tmp_path, "--host", "no.such.host.invalid")
    assert left.status == 2
    assert "--host no.such.host.invalid is no address and no name that is known here" in left.err
    assert "is reached from other machines; give --api-key" in weft("serve", tmp_path, "--host", "0.0.0.0").err


def test_a_byte_order_mark_is_no_part_of_a_file(run_file: Path, tmp_path: Path) -> None:
    run_file.write_bytes(b"\xef\xbb\xbf" + run_file.read_bytes())
    assert load_run(run_file).train.steps == 15
    (tmp_path / "labels.csv").write_bytes(b"\xef\xbb\xbfimage,label\na.npy,1\n")
    assert [entry.label for entry in read_labels(tmp_path, 2)] == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('name="a\\nb"', "name = 'a\\nb' has line breaks"),
        ('folder="a\\nb"', "folder = 'a\\nb' has line breaks"),
        ("train.steps=100000000000000000000", "train.steps = 100000000000000000000; it must be at most 1000000000000"),
    ],
)
def test_values_that_no_run_can_have(weft: Weft, run_file: Path, change: str, message: str) -> None:
    left = weft("train", run_file, change)
    assert left.status == 2
    assert message in left.err


def test_what_is_suggested_changes_something(run_file: Path) -> None:
    suggested = {
        (): "plan.memory.recompute=full",
        ("plan.shard=2",): "plan.shard.stage=2",
        ("plan.shard={degree=2, stage=2}",): "plan.shard.stage=3",
        ("plan.memory.recompute=full",): "plan.memory.recompute=none",
    }
    for overrides, change in suggested.items():
        assert _other_plan_to_price(make_run(run_file, "run", *overrides)) == (change,)


def test_a_closed_pipe_ends_a_command_without_a_word(tmp_path: Path) -> None:
    """As `weft plan ... | head` does; 141 is the status of programs that SIGPIPE ends."""
    for command in (["--help"], ["init", "run.toml"]):
        reader, writer = os.pipe()
        os.close(reader)
        found = subprocess.run(
            [sys.executable, "-m", "weft", *command], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=300
        )
        os.close(writer)
        assert (found.returncode, found.stderr) == (141, b""), command


def test_a_hangup_is_said_and_a_second_signal_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    try:
        with stopping_early():
            with pytest.raises(SystemExit) as left:
                signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (left.value.code, ended) == (129, [130])
    assert capfd.readouterr().err == "weft: stopped by SIGHUP; there was nothing to save\n"


def test_the_import_of_torch_is_said_at_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    for is_terminal, arguments, shown in ((True, [], 1), (True, ["--json"], 0), (False, [], 0)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        main._tell_of_torch(arguments)
        for _ in range(2):
            importlib.util.find_spec("torch")
        assert capfd.readouterr().err.count("weft: loading torch\n") == shown


def test_famous_runs_are_listed(weft: Weft) -> None:
    assert "llama3-405b-meta\n" in weft("plan", "--like", "list").out
    assert "llama3-405b-meta" in weft("plan", "--like", "list", "--json").json
    assert weft("plan", "--like").out == weft("plan", "--like", "list").out


def test_a_run_is_measured_on_what_it_held_out(run_file: Path, weft: Weft) -> None:
    own = ["train.steps=2", "plan.data=1", "train.evaluate_every=2", "--no-verify", "--json"]
    trained = weft("train", run_file, "folder=run", *own).json["evaluation"]
    found = weft("evaluate", "run", "--json").json
    assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    assert found["targets"] == 11 * 24
    assert "--kind and --sequence say how --data is read" in weft("evaluate", "run", "--sequence", 8).err
    text = run_file.with_name("text.txt")
    text.write_text(text.read_text()[::-1])
    changed = weft("evaluate", "run")
    assert "is not what it was trained on, and what is held out of it now may have been trained on" in changed.err
    assert weft("evaluate", "run", "--data", text, "--json").json["targets"] > 0


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
