"""The next axis is four edits: its own file, a line in the table of strategies, a field of `Plan` and a line in `AXES`.

An axis that splits parameters is added so to a copy of weft. It is planned, costed, refused, proved and run there, its
checkpoints load under other plans, and the reference of run files has its key.
"""

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
        '    "y": AxisField("tensor.y", ("weights",)),': '    "toy": AxisField("toy", ("weights",)),',
        '    tile: Annotated[Tile, "tiles of an image"] = field(default_factory=Tile)': (
            '    toy: Annotated[int, "ranks that share the rows of some weights"] = 1'
        ),
    },
    "parallel/apply.py": {
        "from weft.parallel.tile import TileAxis, TileGradients": "from weft.parallel.toy import ToyAxis",
        "    BranchAxis(),": "    ToyAxis(),",
    },
}


def test_an_axis_that_splits_weights_is_added_by_four_edits(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "weft", tmp_path / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in ADDED.items():
        path = tmp_path / "weft" / name
        text = path.read_text()
        for line, added in lines.items():
            assert text.count(f"{line}\n") == 1, line
            text = text.replace(f"{line}\n", f"{line}\n{added}\n")
        path.write_text(text)
    shutil.copy(HELPERS / "toy_axis.py", tmp_path / "weft" / "parallel" / "toy.py")
    runs = tmp_path / "runs"
    runs.mkdir()
    command = [sys.executable, str(HELPERS / "toy_axis_checks.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=runs, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
