"""From a run, or a model of the catalog, to a question for the planner; and from its answer back to a run.

A run file whose `[plan]` says nothing of the layout (no table, or only `precision`, `exact`, `hierarchical`) leaves it
to the planner.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.cluster import Cluster, load, local_cluster
from weft.config import Run, TrainConfig
from weft.data.config import Data, DataConfig, ImagesConfig
from weft.errors import ConfigError
from weft.launch import Place
from weft.measure import is_cpu, with_assumed_rates
from weft.models import GPT2Config, LanguageConfig, ModelConfig
from weft.models.catalog import load_model
from weft.parallel import cost
from weft.plan import Plan, Precision
from weft.planner.answer import Answer, Progress, ask
from weft.planner.question import Constraint, Objective, Question
from weft.predict import micro_batch_profile
from weft.train.loop import device_type

NOT_LAYOUT = ("plan.precision", "plan.matmul", "plan.exact", "plan.hierarchical")
MAX_SEQUENCE = 1 << 24


def has_layout(run: Run) -> bool:
    """Whether the run file, or an override, says how the work is split."""
    return any(key.startswith("plan.") and key not in NOT_LAYOUT for key in run.origins)


def catalog_run(name: str, cluster: str, tokens: int, sequence: int | None) -> Run:
    """A run of a model of language of the catalog: what to train on is for the user to fill in."""
    config = load_model(name)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"--model {name} is of images; give --images-per-step and --size")
    own = config.n_positions if isinstance(config, GPT2Config) else config.max_position_embeddings
    sequence = sequence or own
    if not 0 < sequence <= MAX_SEQUENCE:
        raise ConfigError(f"--sequence {sequence} is not between 1 and {MAX_SEQUENCE}")
    if isinstance(config, GPT2Config):
        config = replace(config, n_positions=max(sequence, own))
    if tokens % sequence:
        raise ConfigError(
            f"--tokens-per-step {tokens} is not a multiple of the sequence of {sequence} tokens; use "
            f"{max(1, tokens // sequence) * sequence} or another --sequence"
        )
    data = DataConfig(source="stdlib", sequence=sequence)
    return _catalog_run(name, config, data, tokens // sequence, cluster)


def image_run(name: str, cluster: str, images: int, size: int) -> Run:
    """A run of a model of images of the catalog, for square ones."""
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
        name=name, folder=Path("runs") / name, model=config, model_folder=None, data=data, train=train, plan=Plan(),
        cluster=cluster,
    )  # fmt: skip


def planning_cluster(run: Run, place: Place | None = None) -> Cluster:
    """All devices to plan for: of the cluster that the run names, of this machine, or those that a launcher started."""
    if run.cluster != "local":
        cluster = load(run.cluster)
        if place is not None and cluster.num_devices != place.num_ranks:
            raise ConfigError(
                f"the launcher started {place.num_ranks} ranks, but cluster {run.cluster} has {cluster.num_devices} "
                f"devices; name the cluster that you run on, or write a [plan]"
            )
        return with_assumed_rates(cluster)
    hosts = 1 if place is None else place.num_hosts
    ranks = None if place is None else place.num_ranks // hosts
    return with_assumed_rates(replace(local_cluster(ranks, on_cpu=device_type(run) == "cpu"), num_nodes=hosts))


def ask_for(
    run: Run,
    cluster: Cluster,
    constraints: tuple[Constraint, ...] = (),
    objective: Objective = "time",
    say: Progress = lambda what: None,
) -> Answer:
    """The planner's answer for a run's model and batch."""
    precision: Precision = run.plan.precision
    if "plan.precision" not in run.origins:
        precision = "fp32" if is_cpu(cluster) else "bf16"
        asked = [one.value for one in constraints if one.name == "precision" and one.comparison in ("=", "==")]
        precision = asked[0] if asked else precision  # type: ignore[assignment]
    alone, shape, exact = replace(run, plan=Plan(precision=precision)), None, run.plan.exact
    if not isinstance(run.data, DataConfig):
        assert not isinstance(run.model, LanguageConfig), "the run file was checked"
        shape = run.data.shape(run.model.in_channels)
        exact &= not any(one.name == "exact" and one.value is False for one in constraints)
    question = Question(alone.split.batch, alone.split.sequence, precision, constraints, shape, exact)
    return ask(run.name, run.model, cluster, question, objective, say)


def with_plan(run: Run, answer: Answer) -> Run:
    """The run under the answer's first plan."""
    given = run.plan
    exact = given.exact and answer.question.exact
    plan = replace(answer.best.plan, matmul=given.matmul, exact=exact, hierarchical=given.hierarchical)
    return replace(run, plan=plan, origins={**run.origins, "plan.data": "planner"})


def with_traffic(answer: Answer, run: Run) -> Answer:
    """The answer with what the first plan's fullest rank says in a step, as its strategies state it, to the byte."""
    planned = with_plan(run, answer)
    return replace(answer, traffic=cost(micro_batch_profile(planned), planned.plan, planned.split).traffic)
