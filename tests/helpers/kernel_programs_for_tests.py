"""What kernels and the plain functions beside them differ by, as Triton's interpreter on a CPU finds it.

The interpreter is chosen when Triton is imported, so the cases, which are functions of other helpers, run in a process
of their own. It imports Triton once for all cases of a session, and forks for each of them, as they change constants.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from functools import cache
from typing import Any

CLOSE, BF16_STEP = 4e-6, 2**-7
LIMIT_SECONDS = 300.0
PROGRAM = """
import importlib, json, os, sys, traceback
import interpreter_for_tests, torch
torch.set_num_threads(1)
for line in sys.stdin:
    module, case = line.split()
    cases = importlib.import_module(module).CASES
    if os.fork():
        os.wait()
        continue
    torch.manual_seed(0)
    try:
        answer = {"found": cases[case]()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
    os._exit(0)
"""


@cache
def _interpreter() -> subprocess.Popen[str]:
    """A process that ends with this one, which holds the other end of its input."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=paths)


@cache
def differences(case: str, module: str = "kernels_for_tests") -> dict[str, Any]:
    """By what the kernels of a case in a module's CASES differ from the plain functions, by name."""
    process = _interpreter()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{module} {case}\n")
    process.stdin.flush()
    assert select.select([process.stdout], [], [], LIMIT_SECONDS)[0], f"{case} took more than {LIMIT_SECONDS:.0f} s"
    answer = json.loads(process.stdout.readline())
    assert "found" in answer, answer["error"]
    found: dict[str, Any] = answer["found"]
    return found
