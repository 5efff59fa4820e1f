"""Kernels of lean inference equal their plain functions on the GPU, and engines that use them record CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_for_tests import environment

pytestmark = pytest.mark.processes

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "lean_gpu.py"


def test_kernels_equal_plain_functions_on_the_gpu() -> None:
    command = [sys.executable, str(BENCHMARK), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok ") >= 40
    assert "BAD" not in done.stdout
