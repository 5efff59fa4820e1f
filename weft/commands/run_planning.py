"""Turns a run, or a model of the catalog, into a question for the planner, and the planner's answer back into a run.

The planner chooses the layout of a run file without `[plan]`, or whose `[plan]` has only `precision`, `matmul`, `exact`
or `hierarchical`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from weft.cluster.cpu_rates import is_cpu, with_assumed_rates
from weft.cluster.hardware import Cluster, load, local_cluster
from weft.data.config import MAX_SEQUENCE, Data, DataConfig, ImagesConfig
from weft.errors import ConfigError, PlanError
from weft.launch.environment import RankInfo
from weft.models import GPT2Config, LanguageConfig, ModelConfig
from weft.models.catalog import load_model
from weft.parallel.apply import cost
from weft.plan import Pipe, Plan, Precision
from weft.planner.answer import Answer, Progress, ask
from weft.planner.goodput import DISK, MEMORY, Failures
from weft.planner.predict import predict, run_cluster
from weft.planner.question import Constraint, Objective, Question
from weft.run_file import PLANNER, Run
from weft.run_tables import TrainConfig
from weft.step.examples import micro_batch_profile
from weft.train.setup import device_type

NOT_LAYOUT = ("plan.precision", "plan.matmul", "plan.exact", "plan.hierarchical", "plan.communication")


def has_layout(run: Run) -> bool:
    """Does the run file, or an override, state how the work is split?"""
    return any(key.startswith("plan.") and not key.startswith(NOT_LAYOUT) for key in run.origins)


def catalog_run(name: str, cluster: str, tokens: int, sequence: int | None) -> Run:
    """Returns a run of a language model of the catalog. Its data are placeholders, for the user to replace."""
    config = load_model(name)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"--model {name} is of images; give --images-per-step and --size")
    longest = config.context_length
    sequence = sequence or longest
    if not 0 < sequence <= MAX_SEQUENCE:
        raise ConfigError(f"--sequence {sequence} is not between 1 and {MAX_SEQUENCE}")
    if isinstance(config, GPT2Config):
        config = replace(config, n_positions=max(sequence, longest))
    if tokens % sequence:
        raise ConfigError(
            f"--tokens-per-step {tokens} is not a multiple of the sequence of {sequence} tokens; use "
            f"{max(1, tokens // sequence) * sequence} or another --sequence"
        )
    data = DataConfig(source="stdlib", sequence=sequence)
    return _catalog_run(name, config, data, tokens // sequence, cluster)


def image_run(name: str, cluster: str, images: int, size: int) -> Run:
    """Returns a run of an image model of the catalog, for square images."""
    config = load_model(name)
    if isinstance(config, LanguageConfig):
        raise ConfigError(f"--model {name} is of language; give --tokens-per-step (and --sequence)")
    step = config.size_multiple
    if size % step or size < step:
        raise ConfigError(f"--size {size} is no multiple of {step}, by which {name} makes images smaller; use one")
    data = ImagesConfig(kind="images", source="images", height=size, width=size)
    return _catalog_run(name, config, data, images, cluster)


def _catalog_run(name: str, config: ModelConfig, data: Data, batch: int, cluster: str) -> Run:
    train = TrainConfig(steps=1000, batch=batch)
    return Run(
        name=name, folder=Path("runs") / name, model=config, source=None, data=data, train=train, plan=Plan(),
        cluster=cluster,
    )  # fmt: skip


def planning_cluster(run: Run, rank_info: RankInfo | None = None) -> Cluster:
    """Returns the devices to plan for: those of the run's cluster, of this machine, or of a launcher's ranks."""
    if run.cluster != "local":
        cluster = load(run.cluster)
        if rank_info is not None and cluster.num_devices != rank_info.num_ranks:
            raise ConfigError(
                f"the launcher started {rank_info.num_ranks} ranks, but cluster {run.cluster} has "
                f"{cluster.num_devices} devices; name the cluster that you run on, or write a [plan]"
            )
        return with_assumed_rates(cluster)
    hosts = 1 if rank_info is None else rank_info.num_hosts
    ranks = None if rank_info is None else rank_info.num_ranks // hosts
    return with_assumed_rates(replace(local_cluster(ranks, on_cpu=device_type(run) == "cpu"), num_nodes=hosts))


def ask_for(
    run: Run,
    cluster: Cluster,
    constraints: tuple[Constraint, ...] = (),
    objective: Objective = "time",
    say: Progress = lambda what: None,
    mtbf_seconds: float | None = None,
) -> Answer:
    """Returns the planner's answer for a run's model and batch; `mtbf_seconds` is that of one device."""
    precision: Precision = run.plan.precision
    if "plan.precision" not in run.origins:
        precision = "bf16" if "bf16" in cluster.node.device.peak_flops and not is_cpu(cluster) else "fp32"
        asked = [one.value for one in constraints if one.name == "precision" and one.comparison in ("=", "==")]
        precision = asked[0] if asked else precision  # type: ignore[assignment]
    device = cluster.node.device
    if device.peak_flops and precision not in device.peak_flops:
        have = [name for name in get_args(Precision) if name in device.peak_flops]
        raise PlanError(f"precision = '{precision}' is not among those of {device.name}; use {' or '.join(have)}")
    alone, shape, exact = replace(run, plan=Plan(precision=precision)), None, run.plan.exact
    if not isinstance(run.data, DataConfig):
        assert not isinstance(run.model, LanguageConfig), "the run file was checked"
        shape = run.data.shape(run.model.in_channels)
        exact &= not any(one.name == "exact" and one.value is False for one in constraints)
    compiles = run.train.compile
    question = Question(alone.split.batch, alone.split.sequence, precision, constraints, shape, exact, compiles)
    return ask(run.name, run.model, cluster, question, objective, say, mtbf_seconds)


def fit_to_ranks(run: Run, rank_info: RankInfo) -> Run:
    """Returns the run with the plan nearest to its own that uses the ranks of this job.

    The batch stays the same, and so does the micro-batch if it divides the batch of a rank. The degree of `data`
    changes first, which leaves a rank's memory unchanged; then that of `shard`; then that of `pipe`.
    """
    old, refusals = run.plan, list[str]()
    if old.num_ranks == rank_info.num_ranks:
        return run
    for plan in _nearest(old, rank_info.num_ranks):
        per_rank = run.split.batch // plan.num_batch_ranks
        near = replace(run, plan=replace(plan, micro_batch=math.gcd(per_rank, run.split.micro_batch) or None))
        try:
            prediction = predict(near, run_cluster(near, rank_info.num_hosts))
        except ConfigError as error:
            refusals.append(f"{plan.describe_axes()}: {error}")
            continue
        if prediction.cost.memory_bytes <= prediction.memory_limit_bytes:
            return near
        refusals.append(f"{plan.describe_axes()}: it needs {prediction.cost.memory_bytes:,} bytes a device")
    raise PlanError(
        f"the plan needs {old.num_ranks} ranks ({old.describe_axes()}), {rank_info.num_ranks} are there, and no plan "
        f"near it suits them ({refusals[0] if refusals else 'the degrees of the model do not divide them'}); start a "
        f"number of ranks that divides the batch, or change the plan"
    )


def _nearest(plan: Plan, num_ranks: int) -> Iterator[Plan]:
    """Yields plans for another number of ranks, the least changed first."""
    model_ranks = plan.num_ranks // (plan.data * plan.shard.degree * plan.pipe.degree)
    for pipe in _divisors_near(plan.pipe.degree, num_ranks):
        for shard in _divisors_near(plan.shard.degree, num_ranks):
            data, rest = divmod(num_ranks, model_ranks * pipe * shard)
            if rest == 0:
                yield replace(
                    plan,
                    data=data,
                    shard=replace(plan.shard, degree=shard),
                    pipe=replace(plan.pipe, degree=pipe) if pipe > 1 else Pipe(),
                )


def _divisors_near(degree: int, number: int) -> list[int]:
    """Returns the divisors of a number, those nearest to a degree (as a ratio) first."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return sorted(divisors, key=lambda divisor: (max(divisor / degree, degree / divisor), -divisor))


def with_plan(run: Run, answer: Answer) -> Run:
    """Returns the run with the answer's first plan, on the part of the cluster that it uses."""
    asked = run.plan
    plan = answer.best.plan
    names = ("matmul", "hierarchical", "communication")
    stated = {name: getattr(asked, name) for name in names if any(k.startswith(f"plan.{name}") for k in run.origins)}
    plan = replace(plan, exact=asked.exact and answer.question.exact and plan.exact, **stated)
    used, cluster = answer.model.cluster, run.cluster
    if cluster != "local" and used.num_devices != load(cluster).num_devices:
        cluster = f"{used.name}:{used.num_nodes}x{used.node.num_devices}"
    return replace(run, plan=plan, cluster=cluster, origins={**run.origins, "plan.data": PLANNER})


def with_saves(run: Run, cost: Failures, step_seconds: float) -> Run:
    """Returns the run with the intervals between saves that lose the least time, unless its file states them."""
    every = {way.name: max(1, round(way.interval_seconds / step_seconds)) for way in cost.ways}
    if DISK in every and "checkpoint.every" not in run.origins:
        saves = replace(run.checkpoint, every=every[DISK])
        run = replace(run, checkpoint=saves, origins={**run.origins, "checkpoint.every": PLANNER})
    if MEMORY in every and "checkpoint.memory_every" not in run.origins:
        saves = replace(run.checkpoint, memory_every=every[MEMORY])
        run = replace(run, checkpoint=saves, origins={**run.origins, "checkpoint.memory_every": PLANNER})
    return run


def with_traffic(answer: Answer, run: Run) -> Answer:
    """Returns the answer with a rank's traffic in a step of the first plan, to the byte, as its strategies state it."""
    planned = with_plan(run, answer)
    return replace(answer, traffic=cost(micro_batch_profile(planned), planned.plan, planned.split).traffic)
