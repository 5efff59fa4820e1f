"""Files that start a run on a cluster: a batch script of SLURM, or a PyTorchJob of Kubernetes (Kubeflow's operator)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from weft.cluster.hardware import Cluster
from weft.commands.result_file import write_result
from weft.errors import UNFINISHED, ConfigError
from weft.run_file import Run
from weft.schema import nearest

SAVE_SECONDS = 300  # how long before the end of its time a job is told to save
SUFFIXES = {"slurm": ".sbatch", "kubernetes": ".yaml"}


def write_job(kind: str, run: Run, run_file: Path, overrides: list[str], cluster: Cluster) -> Path:
    """Write the file that starts `weft train RUN_FILE` for a run's plan on a cluster, beside the run file."""
    refuse_kind(kind)
    path = run_file.with_suffix(SUFFIXES[kind])
    nodes, per_node = _shape(run, cluster)
    others, rest = divmod(run.roles.num_ranks, nodes)
    if rest:
        raise ConfigError(
            f"[roles] names {run.roles.num_ranks} ranks that do not train, which do not spread evenly over {nodes} "
            f"nodes; name a multiple of {nodes}"
        )
    command = ["weft", "train", str(run_file), *overrides]
    name = re.sub(r"[^a-z0-9-]+", "-", run.name.lower()).strip("-") or "weft"
    text = (_slurm if kind == "slurm" else _kubernetes)(name, nodes, (per_node + others, per_node), command)
    write_result(path, text)
    return path


def refuse_kind(kind: str) -> None:
    """Raise ConfigError for a kind of job that weft does not write."""
    if kind not in SUFFIXES:
        raise ConfigError(f"--write-job {kind} is not known{nearest(kind, SUFFIXES)}")


def _shape(run: Run, cluster: Cluster) -> tuple[int, int]:
    """Returns the number of nodes, and of ranks on each."""
    per_node = min(run.plan.num_ranks, cluster.node.num_devices)
    nodes, rest = divmod(run.plan.num_ranks, per_node)
    if rest:
        raise ConfigError(
            f"the plan's {run.plan.num_ranks} ranks do not fill nodes of {cluster.node.num_devices} devices; choose a "
            f"plan with a multiple of that, or name the nodes it shall have (cluster = name:nodesxdevices)"
        )
    return nodes, per_node


def _slurm(name: str, nodes: int, per_node: tuple[int, int], command: list[str]) -> str:
    """`per_node` is (processes, GPUs) of a node."""
    tasks, gpus = per_node
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --gpus-per-node={gpus}
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@{SAVE_SECONDS}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log

# Before the time is over the ranks save and leave with {UNFINISHED}; then the job is put into the queue again.
srun --kill-on-bad-exit=0 {shlex.join(command)}
status=$?
if [ "$status" -eq {UNFINISHED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


def _kubernetes(name: str, nodes: int, per_node: tuple[int, int], command: list[str]) -> str:
    """`per_node` is (processes, GPUs) of a node."""
    tasks, gpus = per_node
    launch = json.dumps(["torchrun", "-m", *command])
    roles = {"Master": 1} | ({"Worker": nodes - 1} if nodes > 1 else {})
    replicas = "".join(
        f"""    {role}:
      replicas: {count}
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: IMAGE  # with weft, the run file and the data; all pods share the run's folder
              command: {launch}
              resources:
                limits:
                  nvidia.com/gpu: {gpus}
"""
        for role, count in roles.items()
    )
    return f"""apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {name}
spec:
  nprocPerNode: "{tasks}"
  pytorchReplicaSpecs:
{replicas}"""
