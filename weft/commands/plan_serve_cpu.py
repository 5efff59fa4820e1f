"""`weft plan --serve` for a CPU: what a decode of one request takes there, by what was measured of that CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.architectures import LanguageConfig, ModelConfig
from weft.cluster.decode_rates import HOW_TO_MEASURE, DecodeRates
from weft.cluster.hardware import Cluster
from weft.commands.console import print_json, say
from weft.errors import ConfigError
from weft.planner.serving_cpu import CpuDecode, predict_decode
from weft.serve.cpu_costs import CpuCosts
from weft.serve.head.graph_head import GraphHead, graph_head
from weft.serve.spec import ServingSpec

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
NOT_PRICED = (
    "Not priced on a CPU: prompts, several requests at once, several ranks, --cache, --speculate, --stream-weights and "
    "--adapter. Other processes on the machine make a decode slower than this."
)


@dataclass(frozen=True)
class ModelToServe:
    """The model that is planned for: its name and config, the precision in which its weights are saved, and whether
    they are a folder's own in fewer bits, nearest to the format that the options have.
    """

    name: str
    config: ModelConfig
    saved: str = "fp32"
    has_codes: bool = False


def measured_rates(cluster: Cluster) -> DecodeRates:
    """What was measured of decodes on a CPU. Raises ConfigError if nothing was."""
    if cluster.decode is None:
        raise ConfigError(
            f"the cluster '{cluster.name}' is a CPU whose decodes were not measured, and no rates are assumed; measure "
            f"this machine in two minutes ({HOW_TO_MEASURE}) and give --cluster machine.toml, or plan for a GPU, as "
            f"--cluster h200:1x1"
        )
    return cluster.decode


def plan_cpu_serving(
    model: ModelToServe, cluster: Cluster, length: int, spec: ServingSpec, console: Console, as_json: bool
) -> None:
    """Predict a decode of one request that has `length` tokens, and show it."""
    assert isinstance(model.config, LanguageConfig)
    rates, precision, graph = measured_rates(cluster), spec.precision or model.saved, graph_head(spec.head)
    costs = CpuCosts(model.config, DTYPES[precision], spec.weights, graph or spec.head)
    found = predict_decode(costs, rates, length)
    costs.refuse_size(cluster.node.host_memory_bytes, length)
    if as_json:
        about = {"model": model.name, "cluster": cluster.name, "precision": precision, "tokens": length}
        about |= {"weights": spec.weights or precision, "head": spec.head or precision}
        print_json({**about, **_as_json(rates, found)})
        return
    title = f"{model.name} on {cluster.name}: a decode of one request with {length} tokens"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, min_width=len(title))
    for column in ("", "ms", "share"):
        table.add_column(column, justify="right" if column else "left")
    for cause, seconds in found.seconds_by_cause.items():
        table.add_row(cause, f"{1e3 * seconds:.2f}", f"{seconds / found.seconds:.0%}")
    console.print(table)
    for line in _sentences(model, spec, rates, found, graph):
        say(console, line)


def _sentences(
    model: ModelToServe, spec: ServingSpec, rates: DecodeRates, found: CpuDecode, graph: GraphHead | None
) -> list[str]:
    threads = f"{rates.threads} thread{'s' * (rates.threads > 1)}"
    lines = [
        f"One request alone: {found.tokens_per_second:,.1f} tokens/s, {1e3 * found.seconds:.1f} ms each, by {threads}.",
        f"A token reads {found.read_bytes / 1e6:,.0f} MB, which plain products read in {1e3 * found.floor_seconds:.1f} "
        f"ms: {found.floor_seconds / found.seconds:.2f} of the time.",
    ]
    if graph is not None and not graph.pays_for(1):
        lines.append("A search would read more than the dense head, so weft serve uses that one.")
    precision = spec.precision if spec.precision != model.saved else None
    options = replace(spec, precision=precision, weights=None if model.has_codes else spec.weights).arguments("plan")
    doubt = [] if rates.doubt is None else [f"Doubtful: {rates.doubt}."]
    return [*lines, *doubt, f"Serve it: weft serve FOLDER --device cpu{options}", NOT_PRICED]


def _as_json(rates: DecodeRates, found: CpuDecode) -> dict[str, Any]:
    return {
        "threads": rates.threads,
        "tokens_per_second": found.tokens_per_second,
        "seconds_per_token": found.seconds,
        "seconds_by_cause": dict(found.seconds_by_cause),
        "read_bytes_per_token": found.read_bytes,
        "floor_seconds_per_token": found.floor_seconds,
        "doubt": rates.doubt,
        "not_priced": NOT_PRICED,
    }
