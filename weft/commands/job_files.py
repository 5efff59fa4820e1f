"""Files that start a run on a cluster: a batch script of SLURM, or a PyTorchJob of Kubernetes (Kubeflow's operator)."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster
from weft.commands.output import write_result
from weft.errors import UNFINISHED, ConfigError
from weft.run_file import PLANNER, Run
from weft.schema import changed_values, inline, nearest

SAVE_SECONDS = 300  # how long before the end of its time a job is told to save
DAY_SECONDS, START_SECONDS = 24 * 3600, 3600  # of a job's time: at most, and beside the steps
SUFFIXES = {"slurm": ".sbatch", "kubernetes": ".yaml"}


class JobTime(NamedTuple):
    """The predicted seconds of a step, and the number of steps. `step_seconds` is None if they are not known."""

    step_seconds: float | None
    steps: int

    @property
    def words(self) -> str:
        """The time to ask SLURM for: the predicted one with a margin, a day at most, after which a job is requeued."""
        seconds = DAY_SECONDS if self.step_seconds is None else 1.5 * self.step_seconds * self.steps + START_SECONDS
        minutes = math.ceil(min(DAY_SECONDS, seconds) / 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:00"


def write_job(
    kind: str, run: Run, run_file: Path, changes: list[str], cluster: Cluster, step_seconds: float | None = None
) -> Path:
    """Write the file that starts `weft train RUN_FILE CHANGES` for a run's plan on a cluster, beside the run file."""
    refuse_kind(kind)
    path = run_file.with_suffix(SUFFIXES[kind])
    nodes, per_node = _shape(run, cluster)
    others, rest = divmod(run.roles.num_ranks, nodes)
    if rest:
        raise ConfigError(
            f"[roles] names {run.roles.num_ranks} ranks that do not train, which do not spread evenly over {nodes} "
            f"nodes; name a multiple of {nodes}"
        )
    name = re.sub(r"[^a-z0-9-]+", "-", run.name.lower()).strip("-") or "weft"
    command = ["weft", "train", str(run_file), *changes]
    gpus = 0 if is_cpu(cluster) else per_node // run.plan.ranks_per_device
    job = Job(name, nodes, per_node + others, gpus, command, JobTime(step_seconds, run.train.steps))
    write_result(path, job.slurm() if kind == "slurm" else job.kubernetes())
    return path


def pinned(run: Run, changes: list[str]) -> list[str]:
    """Returns changes to a run file with the run's plan, its cluster and the intervals between saves that the planner
    chose: a job trains what was shown, and plans nothing.
    """
    plan = {"precision": run.plan.precision, **changed_values(run.plan)}
    own = [f"cluster={run.cluster}", f"plan={inline(plan)}"]
    for key in ("every", "memory_every"):
        if run.origins.get(f"checkpoint.{key}") == PLANNER:
            own.append(f"checkpoint.{key}={getattr(run.checkpoint, key)}")
    replaced = {override.partition("=")[0] for override in own}
    kept = [one for one in changes if not {one.partition("=")[0], one.partition(".")[0]} & replaced]
    return [*kept, *own]


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


class Job(NamedTuple):
    """What a job file asks for. `tasks` and `gpus` are those of a node."""

    name: str
    nodes: int
    tasks: int
    gpus: int
    command: list[str]
    time: JobTime

    def slurm(self) -> str:
        """Returns a batch script of SLURM."""
        gpus = f"#SBATCH --gpus-per-node={self.gpus}\n" if self.gpus else ""
        return f"""#!/bin/bash
#SBATCH --job-name={self.name}
#SBATCH --nodes={self.nodes}
#SBATCH --ntasks-per-node={self.tasks}
{gpus}#SBATCH --time={self.time.words}
#SBATCH --chdir={Path.cwd()}
#SBATCH --signal=TERM@{SAVE_SECONDS}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={self.name}-%j.log
# What your cluster needs besides, each with one # less (sinfo lists partitions, scontrol show node the CPUs):
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
##SBATCH --cpus-per-task=CPUS

{_environment()}
# Before the time is over the ranks save and leave with {UNFINISHED}; then the job is put into the queue again.
srun --kill-on-bad-exit=0 {shlex.join(self.command)}
status=$?
if [ "$status" -eq {UNFINISHED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""

    def kubernetes(self) -> str:
        """Returns a PyTorchJob."""
        launch = json.dumps(["torchrun", "-m", *self.command])
        limits = f"""
              resources:
                limits:
                  nvidia.com/gpu: {self.gpus}"""
        roles = {"Master": 1} | ({"Worker": self.nodes - 1} if self.nodes > 1 else {})
        replicas = "".join(
            f"""    {role}:
      replicas: {count}
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: IMAGE  # with weft, the run file and the data; all pods share the run's folder
              workingDir: {json.dumps(str(Path.cwd()))}  # where the command finds them, in the image
              command: {launch}{limits if self.gpus else ""}
"""
            for role, count in roles.items()
        )
        return f"""apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {self.name}
spec:
  nprocPerNode: "{self.tasks}"
  pytorchReplicaSpecs:
{replicas}"""


def _environment() -> str:
    """Returns the lines of a script that make `weft` the one that has written it."""
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.is_file():
        return f"source {shlex.quote(str(activate))}\n"
    return f'export PATH={shlex.quote(str(Path(sys.prefix) / "bin"))}:"$PATH"\n'
