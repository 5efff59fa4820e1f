"""Kernels compile for a GPU that is not here: Triton's interpreter, which other tests use, runs more than compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed, which compiles the kernels"),
]
PROGRAM = Path(__file__).parents[1] / "helpers" / "compiled_kernels_for_tests.py"
# Some compile for a minute.
MODULES = [
    "fp8_kernels_for_tests",
    *(
        pytest.param(f"{name}_for_tests", marks=pytest.mark.soak)
        for name in ("step_kernels", "expert_kernels", "kernels")
    ),
]


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_for_a_hopper_gpu(module: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, PROGRAM, module], env=environ, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["compiled"]
    assert not found["failed"], done.stderr[-3000:]
