"""The next axis: its own file, a line in the table of strategies, a field and a line in `plan/`. Nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
# By file of weft/: each line after which one is added, and that one.
ADDED = {
    "plan/__init__.py": {
        '    "y": AxisField("tensor.y", ("weights",)),': '    "toy": AxisField("toy", ()),',
        "    tile: Tile = field(default_factory=Tile)": "    toy: int = 1",
    },
    "parallel/apply.py": {
        "from weft.parallel.tile import TileAxis, TileGradients": "from weft.parallel.toy import ToyAxis",
        "    ContextAxis(),": "    ToyAxis(),",
    },
}


def test_an_axis_that_is_added_is_planned_costed_refused_and_run(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "weft", tmp_path / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in ADDED.items():
        path = tmp_path / "weft" / name
        text = path.read_text()
        for line, added in lines.items():
            assert text.count(f"{line}\n") == 1, line
            text = text.replace(f"{line}\n", f"{line}\n{added}\n")
        path.write_text(text)
    shutil.copy(HELPERS / "toy_axis.py", tmp_path / "weft" / "parallel" / "toy.py")
    command = [sys.executable, str(HELPERS / "toy_axis_checks.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
