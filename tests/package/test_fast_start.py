"""`import weft` needs torch, numpy and safetensors alone; help and mistakes in a run file need no torch."""

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
EXTRAS = ["typer", "rich", "transformers", "tokenizers", "pyarrow", "datasets", "pandas", "wandb", "tensorboard"]

# Forbids the extras, imports weft, and says what came with it.
IMPORT = f"""
import json, sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ImportError(f"{{name}} is forbidden here")

sys.meta_path.insert(0, Forbid())
import torch, torch.distributed
import weft
plan = weft.Plan(data=2, shard=weft.Shard(4))
print(json.dumps({{"ranks": plan.num_ranks, "modules": sorted(sys.modules)}}))
"""


def run(code: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    command, environ = [sys.executable, "-c", code, *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300)


def test_import_needs_no_extra() -> None:
    left = run(IMPORT)
    assert left.returncode == 0, left.stderr
    assert left.stderr == ""
    found = json.loads(left.stdout)
    assert found["ranks"] == 8
    assert "weft.commands.app" not in found["modules"]
    assert "torch._dynamo" not in found["modules"]  # a second or two


def test_the_command_line_names_the_extra_that_it_needs() -> None:
    left = run(IMPORT.partition("import torch")[0] + "import weft.commands.app")
    assert left.returncode == 1
    assert left.stderr == "weft: the command line needs typer and rich; pip install 'weft[cli]'\n"


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
    found = json.loads(run(PROGRAM, json.dumps(CASES), folder=tmp_path).stdout)
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
    done = run(program, "train", "broken.toml", "--json", "train.steps=1", folder=tmp_path)
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
