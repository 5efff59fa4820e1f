"""`import weft` needs torch, numpy and safetensors, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(code: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)


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
