"""`weft plan --serve` for a CPU: what a decode of one request takes there, by what was measured of that CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.architectures import LanguageConfig
from weft.cluster.decode_rates import HOW_TO_MEASURE, DecodeRates
from weft.cluster.hardware import Cluster
from weft.commands.console import print_json, say
from weft.errors import ConfigError
from weft.planner.serving_cpu import CpuDecode, predict_decode, refuse_size
from weft.serve.head.graph_head import GraphHead, graph_head

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
NOT_PRICED = (
    "Not priced on a CPU: prompts, several requests at once, several ranks, --cache, --speculate, --stream-weights and "
    "--adapter. Other processes on the machine make a decode slower than this."
)


@dataclass(frozen=True)
class CpuQuestion:
    """What is asked: a model, a cluster, the tokens that a request has, and options as `weft serve` takes them."""

    name: str
    config: LanguageConfig
    cluster: Cluster
    length: int
    precision: str = "fp32"
    saved: str = "fp32"  # the precision of the weights, in which weft serve computes if it is not told another
    weights: str | None = None
    head: str | None = None
    has_codes: bool = False  # the folder's own weights are nearest to the format `weights`


def measured_rates(cluster: Cluster) -> DecodeRates:
    """What was measured of decodes on a CPU. Raises ConfigError if nothing was."""
    if cluster.decode is None:
        raise ConfigError(
            f"the cluster '{cluster.name}' is a CPU whose decodes were not measured, and no rates are assumed; measure "
            f"this machine in two minutes ({HOW_TO_MEASURE}) and give --cluster machine.toml, or plan for a GPU, as "
            f"--cluster h200:1x1"
        )
    return cluster.decode


def refuse_options(ways: dict[str, Any], drafts: tuple[str, float] | None) -> None:
    """Raise ConfigError for options that have no price on a CPU."""
    streaming = {"--stream-weights": ways["ahead"], "--resident-blocks": ways["resident"]}
    given = {"--cache": ways["cache"], **streaming, "--speculate": drafts}
    for option, value in given.items():
        if value:
            raise ConfigError(f"{option} is not priced on a CPU; leave it out, or plan for a GPU")
    if ways["precision"] not in (None, *DTYPES):
        raise ConfigError(f"--precision {ways['precision']} is unknown on a CPU; give {' or '.join(DTYPES)}")


def plan_cpu_serving(asked: CpuQuestion, console: Console, as_json: bool) -> None:
    """Predict a decode of one request, and show it."""
    rates = measured_rates(asked.cluster)
    dtype, graph = DTYPES[asked.precision], graph_head(asked.head)
    given = (asked.length, asked.weights, graph or asked.head)
    found = predict_decode(asked.config, rates, dtype, *given)
    refuse_size(asked.config, dtype, asked.cluster.node.host_memory_bytes, *given)
    if as_json:
        print_json(_as_json(asked, rates, found))
        return
    title = f"{asked.name} on {asked.cluster.name}: a decode of one request with {asked.length} tokens"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, min_width=len(title))
    for column in ("", "ms", "share"):
        table.add_column(column, justify="right" if column else "left")
    for cause, seconds in found.seconds_by_cause.items():
        table.add_row(cause, f"{1e3 * seconds:.2f}", f"{seconds / found.seconds:.0%}")
    console.print(table)
    for line in _sentences(asked, rates, found, graph):
        say(console, line)


def _sentences(asked: CpuQuestion, rates: DecodeRates, found: CpuDecode, graph: GraphHead | None) -> list[str]:
    threads = f"{rates.threads} thread{'s' * (rates.threads > 1)}"
    lines = [
        f"One request alone: {found.tokens_per_second:,.1f} tokens/s, {1e3 * found.seconds:.1f} ms each, by {threads}.",
        f"A token reads {found.read_bytes / 1e6:,.0f} MB, which plain products read in {1e3 * found.floor_seconds:.1f} "
        f"ms: {found.floor_seconds / found.seconds:.2f} of the time.",
    ]
    if graph is not None and not graph.pays_for(1):
        lines.append("A search would read more than the dense head, so weft serve uses that one.")
    precision = asked.precision if asked.precision != asked.saved else None
    weights = None if asked.has_codes else asked.weights
    given = {"--precision": precision, "--weights": weights, "--head": asked.head}
    options = "".join(f" {option} {value}" for option, value in given.items() if value)
    doubt = [] if rates.doubt is None else [f"Doubtful: {rates.doubt}."]
    return [*lines, *doubt, f"Serve it: weft serve FOLDER --device cpu{options}", NOT_PRICED]


def _as_json(asked: CpuQuestion, rates: DecodeRates, found: CpuDecode) -> dict[str, Any]:
    return {
        "model": asked.name,
        "cluster": asked.cluster.name,
        "precision": asked.precision,
        "weights": asked.weights or asked.precision,
        "head": asked.head or asked.precision,
        "threads": rates.threads,
        "tokens": asked.length,
        "tokens_per_second": found.tokens_per_second,
        "seconds_per_token": found.seconds,
        "seconds_by_cause": dict(found.seconds_by_cause),
        "read_bytes_per_token": found.read_bytes,
        "floor_seconds_per_token": found.floor_seconds,
        "doubt": rates.doubt,
        "not_priced": NOT_PRICED,
    }
