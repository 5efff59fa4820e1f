"""A stop signal before there is anything to save ends the command, also while a module is imported that hides it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TRIES_AN_IMPORT = "try:\n    import asks_to_stop\nexcept BaseException:\n    pass\n"
ASKS_TO_STOP = "import signal\nsignal.raise_signal(signal.SIGTERM)\n"
PROGRAM = "from weft.commands.early_stop import stopping_early\nwith stopping_early():\n    {}\n    print('went on')"


@pytest.mark.parametrize("line", ["import tries_an_import", ASKS_TO_STOP.replace("\n", "; ").rstrip("; ")])
def test_one_line_and_the_status_of_the_signal(tmp_path: Path, line: str) -> None:
    (tmp_path / "tries_an_import.py").write_text(TRIES_AN_IMPORT)
    (tmp_path / "asks_to_stop.py").write_text(ASKS_TO_STOP)
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", PROGRAM.format(line)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "weft: stopped by SIGTERM; there was nothing to save\n"
