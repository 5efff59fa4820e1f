"""Files that start a run on a cluster: what they ask for, and that their own readers accept them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from runs_for_tests import make_run, write_run_file

from weft.cluster.hardware import load
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
