"""How commands end: a plan at once, with its output and status, and any command at a stop signal, in one line."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.commands import main as command

ROOT = Path(__file__).parents[2]


class _EndedAtOnce(BaseException):
    """Takes the place of `os._exit`, which no test survives."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Returns a function that is the process of `weft NAME`, whose command is `work`; returns how it ended."""

    def end(status: int) -> None:
        raise _EndedAtOnce(status)

    def call(name: str, work: Callable[[], None]) -> BaseException | None:
        monkeypatch.setattr(sys, "argv", ["weft", name])
        monkeypatch.setattr(command, "main", work)
        monkeypatch.setattr(os, "_exit", end)
        try:
            command.run()
        except (SystemExit, _EndedAtOnce) as ended:
            return ended
        return None

    yield call
    gc.enable()


def _leave(code: object) -> Callable[[], None]:
    def work() -> None:
        raise SystemExit(code)

    return work


@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (2, 2), (130, 130)])
def test_a_plan_ends_at_once_with_its_status(run: Callable[..., Any], code: int | None, status: int) -> None:
    ended = run("plan", _leave(code))
    assert isinstance(ended, _EndedAtOnce)
    assert ended.args == (status,)


def test_a_plan_that_returns_ends_at_once(run: Callable[..., Any]) -> None:
    ended = run("plan", lambda: None)
    assert isinstance(ended, _EndedAtOnce)
    assert ended.args == (0,)


def test_other_commands_end_as_python_ends(run: Callable[..., Any]) -> None:
    ended = run("train", _leave(75))
    assert isinstance(ended, SystemExit)
    assert ended.code == 75
    assert run("train", lambda: None) is None


def test_a_message_as_status_is_left_to_python(run: Callable[..., Any]) -> None:
    ended = run("plan", _leave("weft: the command line needs typer"))
    assert isinstance(ended, SystemExit)


def test_output_that_cannot_be_written_is_left_to_python(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(sys.stdout, "flush", fail)
    ended = run("plan", _leave(0))
    assert isinstance(ended, SystemExit)
    assert ended.code == 0


@pytest.mark.processes
def test_what_a_plan_prints_is_written_before_its_process_ends() -> None:
    program = (
        "import atexit, sys\n"
        "from weft.commands import main as command\n"
        "def work():\n    print('the plan', end='')\n    sys.exit(2)\n"
        "atexit.register(lambda: print('cleanup'))\n"
        "command.main = work\n"
        "command.run()\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command_line = [sys.executable, "-c", program, "plan"]
    done = subprocess.run(command_line, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "the plan")


TRIES_AN_IMPORT = "try:\n    import asks_to_stop\nexcept BaseException:\n    pass\n"
ASKS_TO_STOP = "import signal\nsignal.raise_signal(signal.SIGTERM)\n"
PROGRAM = "from weft.commands.main import stopping_early\nwith stopping_early():\n    {}\n    print('went on')"


@pytest.mark.processes
@pytest.mark.parametrize("line", ["import tries_an_import", ASKS_TO_STOP.replace("\n", "; ").rstrip("; ")])
def test_one_line_and_the_status_of_the_signal(tmp_path: Path, line: str) -> None:
    (tmp_path / "tries_an_import.py").write_text(TRIES_AN_IMPORT)
    (tmp_path / "asks_to_stop.py").write_text(ASKS_TO_STOP)
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", PROGRAM.format(line)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "weft: stopped by SIGTERM; there was nothing to save\n"
