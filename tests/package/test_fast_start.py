"""Help, the version and mistakes in a run file are answered without torch, whose import takes seconds."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
CASES = [
    ["--version"],
    ["--help"],
    ["train", "--help"],
    ["plan"],
    ["train", "none.toml"],
    ["train", "broken.toml"],
    ["train", "run.toml", "train.stepz=1"],
    ["plan", "run.toml", "model.hiden_size=8"],
    ["verify", "run.toml", "data.sequence=0"],
    ["chaos", "run.toml", "plan.data=0"],
    ["serve", "--help"],
    ["bench", "serve", "--help"],
]
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from weft.commands.main import main
found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["weft", *arguments]
    text, status = io.StringIO(), 0
    try:
        with redirect_stdout(text), redirect_stderr(text):
            main()
    except SystemExit as left:
        status = left.code or 0
    found.append([status, text.getvalue(), sorted({"torch", "numpy"} & set(sys.modules))])
print(json.dumps(found))
"""


def test_help_and_mistakes_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text((ROOT / "examples/quickstart.toml").read_text())
    (tmp_path / "broken.toml").write_text("name = \n")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(CASES)]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert [modules for _, _, modules in found] == [[]] * len(CASES)
    assert [status for status, _, _ in found] == [0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 0, 0]
    texts = [text for _, text, _ in found]
    assert texts[5].startswith("weft: broken.toml is not valid TOML")
    assert texts[6] == "weft: unknown key 'train.stepz'; did you mean 'steps'?\n"
    assert texts[7] == "weft: unknown key 'model.hiden_size'; did you mean 'hidden_size'?\n"


def test_a_mistake_in_a_run_file_needs_no_command_line(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("name = \n")
    program = (
        "import sys\nfrom weft.commands.main import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n    print(left.code, 'typer' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "train", "broken.toml", "--json", "train.steps=1"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("weft: broken.toml is not valid TOML")


def test_public_names_are_those_that_are_imported_late() -> None:
    assert set(weft.__all__) == set(weft._MODULE_OF)
    assert set(weft.__all__) <= set(dir(weft))
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    importlib.import_module("weft.profiling.count")  # a room named as a public name would hide the function
    assert callable(weft.profile)
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = weft.plans  # type: ignore[attr-defined]
