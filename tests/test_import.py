"""`import weft` needs torch, numpy and safetensors, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ["typer", "rich", "transformers", "tokenizers", "pyarrow", "datasets", "pandas", "wandb", "tensorboard"]

# Forbids the extras, imports weft, and says how long that took beyond torch.
IMPORT = f"""
import json, sys, time

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ImportError(f"{{name}} is forbidden here")

sys.meta_path.insert(0, Forbid())
import torch, torch.distributed
start = time.perf_counter()
import weft
seconds = time.perf_counter() - start
plan = weft.Plan(data=2, shard=weft.Shard(4))
print(json.dumps({{"seconds": seconds, "ranks": plan.num_ranks, "modules": sorted(sys.modules)}}))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)


def test_import_needs_no_extra() -> None:
    left = run(IMPORT)
    assert left.returncode == 0, left.stderr
    assert left.stderr == ""
    found = json.loads(left.stdout)
    assert found["ranks"] == 8
    assert "weft.cli" not in found["modules"]
    assert "torch._dynamo" not in found["modules"]  # a second or two
    print(f"import weft took {found['seconds']:.2f} s beyond torch")
    assert found["seconds"] < 20  # a machine that is busy is slow; 0.1 s on one that is not


def test_the_command_line_names_the_extra_that_it_needs() -> None:
    left = run(IMPORT.partition("import torch")[0] + "import weft.cli")
    assert left.returncode == 1
    assert left.stderr == "weft: the command line needs typer and rich; pip install 'weft[cli]'\n"
