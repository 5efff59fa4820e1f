"""Compiles the kernels that the interpreter's cases launch for a GPU that is not here.

    python tests/helpers/compiled_kernels_for_tests.py expert_kernels_for_tests routes    # no case: all of them

Triton's interpreter runs what the compiler refuses, so a kernel that equals its plain function on a CPU may not
compile. A launch here compiles for a Hopper GPU, to machine code, and computes nothing.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class NoDevice:
    """What Triton asks of a driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launches() -> set[str]:
    """Make launches compile their kernels, and no more. Returns the names of those that were compiled since."""
    driver.set_active(NoDevice())  # type: ignore[arg-type]
    compiled: set[str] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        for name, used in (("BY_PTX", tensors[0].dtype in (torch.bfloat16, torch.float16)), ("IS_EARLY", True)):
            if name in self.arg_names:
                kwargs[name] = used
        run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.add(self.__name__)

    JITFunction.run = compile_only  # type: ignore[method-assign]
    return compiled


def compile_cases(module: str, *cases: str) -> None:
    """Compile what cases of the interpreter launch; all without names."""
    sys.modules["interpreter_for_tests"] = ModuleType("interpreter_for_tests")  # cases import it before Triton
    compiled, failed = compile_launches(), []
    every = importlib.import_module(module).CASES
    for case in cases or every:
        torch.manual_seed(0)
        try:
            every[case]()
        except (triton.CompilationError, triton.OutOfResources):
            failed.append(case)
            traceback.print_exc()
        except Exception as error:  # results of kernels that did not run may be refused
            print(f"{case} went no further: {type(error).__name__}: {error}", file=sys.stderr)
    print(json.dumps({"compiled": sorted(compiled), "failed": failed}))


if __name__ == "__main__":
    compile_cases(*sys.argv[1:])
