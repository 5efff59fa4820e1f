"""What kernels and the plain functions beside them differ by, as programs under Triton's interpreter find it.

The interpreter is chosen when Triton is imported, so each program, a helper too, runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

CLOSE, BF16_STEP = 4e-6, 2**-7
# The cases of one test file, which one process computes.
TOGETHER = ("updates", "losses", "labels", "takes", "offsets", "pools", "rows")


def differences(case: str, program: str = "kernels_for_tests.py") -> dict[str, dict[str, float]]:
    """By what the kernels of a case differ from the plain functions, by name."""
    found: dict[str, dict[str, float]] = output_of(program, *(TOGETHER if case in TOGETHER else (case,)))[case]
    return found


@cache
def output_of(name: str, *cases: str) -> Any:
    """The JSON in the last line that a program among the helpers prints."""
    program = Path(__file__).with_name(name)
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=paths)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
