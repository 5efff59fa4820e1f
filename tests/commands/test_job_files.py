"""Files that start a run on a cluster: what they ask for, that their own readers accept them, and that they train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands_for_tests import caller
from runs_for_tests import make_run, write_run_file

from weft.cluster.hardware import load
from weft.cluster.shared_devices import with_shared_devices
from weft.commands.job_files import write_job
from weft.errors import ConfigError


@pytest.mark.processes
def test_a_script_of_slurm(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "My run", "plan.data=16")
    path = write_job("slurm", run, run_file, ["plan.data=16", "data.source=two words"], load("h100:2x8"))
    text = path.read_text()
    subprocess.run(["bash", "-n", path], check=True)
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=TERM@300", "--requeue"):
        assert f"#SBATCH {line}\n" in text
    assert f"weft train {run_file} plan.data=16 'data.source=two words'\n" in text
    assert '[ "$status" -eq 75 ]' in text


def test_ranks_of_other_roles_are_processes_without_gpus(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "roles", "plan.data=16", "roles.loader=4")
    text = write_job("slurm", run, run_file, [], load("h100:2x8")).read_text()
    assert "#SBATCH --ntasks-per-node=10\n#SBATCH --gpus-per-node=8\n" in text
    job = yaml.safe_load(write_job("kubernetes", run, run_file, [], load("h100:2x8")).read_text())
    assert job["spec"]["nprocPerNode"] == "10"
    uneven = make_run(run_file, "roles", "plan.data=16", "roles.loader=3")
    with pytest.raises(ConfigError, match="3 ranks that do not train, which do not spread evenly over 2 nodes"):
        write_job("slurm", uneven, run_file, [], load("h100:2x8"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_pytorch_job(tmp_path: Path, nodes: int) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "run", f"plan.data={8 * nodes}")
    job = yaml.safe_load(write_job("kubernetes", run, run_file, [], load(f"h100:{nodes}x8")).read_text())
    assert (job["apiVersion"], job["kind"], job["spec"]["nprocPerNode"]) == ("kubeflow.org/v1", "PyTorchJob", "8")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    wanted = {"Master": 1} if nodes == 1 else {"Master": 1, "Worker": 1}
    assert {role: one["replicas"] for role, one in replicas.items()} == wanted
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun", "-m", "weft", "train", str(run_file)]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_what_cannot_be_written(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    with pytest.raises(ConfigError, match="--write-job slrm is not known; did you mean 'slurm'"):
        write_job("slrm", make_run(run_file, "run"), run_file, [], load("h100:1x8"))
    with pytest.raises(ConfigError, match="the plan's 12 ranks do not fill nodes of 8 devices"):
        write_job("slurm", make_run(run_file, "run", "plan.data=12", "train.batch=24"), run_file, [], load("h100:2x8"))


@pytest.mark.parametrize(("step_seconds", "words"), [(None, "24:00:00"), (0.1, "01:01:00"), (9e9, "24:00:00")])
def test_the_time_of_a_job_is_that_of_its_steps(tmp_path: Path, step_seconds: float | None, words: str) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "run", "plan.data=8")
    text = write_job("slurm", run, run_file, [], load("h100:1x8"), step_seconds).read_text()
    assert f"#SBATCH --time={words}\n" in text


def test_ranks_that_share_a_gpu_do_not_ask_for_one_each(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "run", "plan.data=16", "plan.ranks_per_device=2")
    cluster = with_shared_devices(load("h100:1x8"), 2)
    text = write_job("slurm", run, run_file, [], cluster).read_text()
    assert "#SBATCH --ntasks-per-node=16\n#SBATCH --gpus-per-node=8\n" in text


SRUN = """#!{python}
import os, subprocess, sys
names = dict(line[len("#SBATCH --"):].strip().split("=", 1) for line in open("{job}") if line.startswith("#SBATCH --")
             and "=" in line)
nodes, tasks = int(names["nodes"]), int(names["ntasks-per-node"])
assert sys.argv[1] == "--kill-on-bad-exit=0"
step = dict(SLURM_JOB_ID="4242", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=str(nodes * tasks),
            SLURM_STEP_NUM_NODES=str(nodes), SLURM_STEP_TASKS_PER_NODE=f"{{tasks}}(x{{nodes}})",
            SLURM_STEP_NODELIST="localhost")
ranks = [subprocess.Popen(sys.argv[2:], env={{**os.environ, **step, "SLURM_PROCID": str(rank),
         "SLURM_LOCALID": str(rank % tasks), "SLURM_NODEID": str(rank // tasks)}}) for rank in range(nodes * tasks)]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_job_of_a_planned_run_trains_the_plan_that_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """The planner chooses 2 of the 4 devices, which the cluster that was asked about does not say."""
    run_file, weft = write_run_file(tmp_path), caller(monkeypatch, capfd)
    monkeypatch.chdir(tmp_path)
    changes = ["cluster=h100:2x2", "train.steps=3", "train.device=cpu", "plan.precision=fp32"]
    left = weft("plan", run_file, *changes, "--where", "data=2", "--best", "devices", "--write-job", kind)
    assert left.status == 0, left.err
    job = run_file.with_suffix(".sbatch" if kind == "slurm" else ".yaml")
    assert f"wrote {job}" in left.out
    scripts = tmp_path / "bin"
    scripts.mkdir()
    (scripts / "srun").write_text(SRUN.format(python=sys.executable, job=job))
    (scripts / "srun").chmod(0o755)
    environ = {**os.environ, "PATH": f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if kind == "slurm":
        command = ["bash", str(job)]
    else:  # what Kubeflow's operator gives a pod
        spec = yaml.safe_load(job.read_text())["spec"]
        assert list(spec["pytorchReplicaSpecs"]) == ["Master"]
        (container,) = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
        command, place = container["command"], {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "NNODES": "1"}
        assert container["workingDir"] == os.getcwd()
        own = {"NPROC_PER_NODE": spec["nprocPerNode"], "NODE_RANK": "0", **place}
        environ |= {"WORLD_SIZE": "1", "RANK": "0", **place, **{f"PET_{name}": value for name, value in own.items()}}
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    for words in ("1 x 2 H100", "data 2, fp32", "step 3/3"):
        assert words in found.stdout
