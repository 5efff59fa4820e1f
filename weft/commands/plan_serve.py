"""`weft plan --serve`: the layouts in which a model can be served on a cluster, and what each gives."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.architectures import LanguageConfig, RecurrentConfig, TransformerConfig
from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster, load
from weft.commands.console import print_json, say
from weft.commands.plan_serve_cpu import ModelToServe, plan_cpu_serving
from weft.commands.plan_service import plan_service
from weft.errors import ConfigError, PlanError
from weft.planner.predict import is_known
from weft.planner.serving import ServingModel, ServingPrediction, ServingTimes, ServingWorkload, StreamingPrice
from weft.planner.serving_load import ServiceQuestion
from weft.planner.serving_search import search_serving
from weft.planner.serving_speculation import SpeculationPrice, price_speculation
from weft.serve.attention.formats import cache_format
from weft.serve.parallel.traffic import ServedSizes
from weft.serve.refusals import ServingCase, kind_of, refuse
from weft.serve.spec import ServingSpec

NUM_SHOWN = 8
NOT_PRICED = "Not priced on GPUs: --sums (sums over ranks are the library's), --adapter, and LSTM and GRU models."


def plan_serving(
    model: ModelToServe,
    cluster_name: str,
    question: ServingWorkload | ServiceQuestion,
    spec: ServingSpec,
    accepted: float,
    console: Console,
    as_json: bool,
) -> None:
    """Find the best layout to serve a model, for requests that arrive at once or for a service, and show it with
    others. `accepted` is the share of drafts that are accepted. Raises PlanError if none fits.
    """
    name, config = model.name, model.config
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"--serve is for models of text; {name} is a model of images")
    cluster = load(cluster_name)
    device, cache = "cpu" if is_cpu(cluster) else "cuda", cache_format(spec.cache)
    refuse(ServingCase.of(spec, model=kind_of(config), device=device, cache=cache, is_planned=True))
    if isinstance(question, ServiceQuestion) and is_cpu(cluster):
        raise ConfigError(
            "a CPU has prices of one request, and none of a service; leave out --rate, limits and --report, or plan "
            "for a GPU"
        )
    workload = question if isinstance(question, ServingWorkload) else ServingWorkload.of(1, 1, 1)
    _refuse_lengths(name, config, workload)
    prompt, output = workload.lengths[0]
    if is_cpu(cluster):
        plan_cpu_serving(model, cluster, prompt + output // 2, spec, console, as_json)
        return
    assert not isinstance(config, RecurrentConfig)
    _refuse_axes(name, config, spec.cache)
    precision = "bf16" if "bf16" in cluster.node.device.peak_flops else "fp32"
    _refuse_unknown_rates(cluster, precision)
    if isinstance(question, ServiceQuestion):
        plan_service(model, cluster, question, precision, spec, console, as_json)
        return
    with console.status("planning"):
        found, refused = search_serving(config, cluster, workload, precision, spec, model.has_codes)
    if not found:
        raise PlanError(f"no layout serves {name} on {cluster_name}; the last one: {refused[-1]}")
    price = None
    if spec.speculate is not None:
        one = ServingModel(config, cluster, found[0].plan, precision, spec, model.has_codes)
        price = price_speculation(one, spec.speculate, accepted, prompt + output // 2)
    if as_json:
        plans = [_as_json(one) for one in found]
        about: dict[str, Any] = {"model": name, "cluster": cluster_name, "precision": precision, "refused": refused}
        about |= {"weights": spec.weights or precision, "cache": spec.cache or precision}
        about |= {} if price is None else {"speculation": {**asdict(price), "times_as_fast": price.times_as_fast}}
        print_json({**about, "requests": len(workload.lengths), "why": explain(found, cluster), "plans": plans})
        return
    _show(name, cluster_name, found, workload, spec, console)
    lines = explain(found, cluster)
    lines[-1] += replace(spec, weights=None if model.has_codes else spec.weights).arguments("plan")
    if price is not None:
        lines.insert(-1, _of_drafts(price))
    lines.append(NOT_PRICED)
    for line in lines:
        say(console, line)


def _refuse_lengths(name: str, config: LanguageConfig, workload: ServingWorkload) -> None:
    """Raise ConfigError for requests that are longer than the model is made for."""
    longest, positions = max(workload.lengths, key=sum), config.context_length
    if sum(longest) > positions:
        raise ConfigError(
            f"--prompt {longest[0]} and --output {longest[1]} are {sum(longest)} tokens, and {name} is made for "
            f"{positions} (max_position_embeddings or n_positions of its config); give shorter ones"
        )


def _refuse_axes(name: str, config: TransformerConfig, cache: str | None) -> None:
    """Raise ConfigError for a file of Loki's axes that is of a model with other layers or heads."""
    loki = cache_format(cache).loki
    sizes = ServedSizes.of(config)
    wanted = (sizes.num_layers, sizes.num_key_heads, sizes.head_dim, sizes.head_dim)
    if loki is not None and tuple(loki.axes.shape) != wanted:
        layers, heads, size = loki.axes.shape[:3]
        raise ConfigError(
            f"the file of --cache {cache} is of {layers} layers with {heads} key heads of {size}, and {name} has "
            f"{wanted[0]} with {wanted[1]} of {wanted[2]}; run weft calibrate on the model that is served"
        )


def _refuse_unknown_rates(cluster: Cluster, precision: str) -> None:
    """Raise ConfigError for a GPU of this machine that the catalog does not know. fp16 may stand in for a precision."""
    if is_known(cluster, precision) or is_known(cluster, "fp16"):
        return
    is_alone = cluster.node.num_devices == 1  # its link is measured by ranks that share it
    raise ConfigError(
        f"the cluster '{cluster.name}' is of {cluster.node.device.name}, whose rates are not known; measure them "
        f"(weft bench machine --device cuda{' --ranks 2' * is_alone} --write machine.toml) and give --cluster "
        f"machine.toml{':1x1' * is_alone}, or name another, as --cluster h200:1x1"
    )


def _of_drafts(price: SpeculationPrice) -> str:
    """A sentence about what drafts give."""
    given = f"Drafts by {price.kind}, of which {price.chance:.0%} are accepted: one request alone gets"
    if price.times_as_fast < 1:
        return (
            f"{given} {price.tokens_per_second:,.0f} tokens/s and {price.tokens_per_second_without:,.0f} without, so "
            f"they do not pay. Under load they are not priced."
        )
    return (
        f"{given} {price.tokens_per_second:,.0f} tokens/s, {price.times_as_fast:.1f} times as many as without, with "
        f"{price.num_drafts} drafts a step. Under load they are not priced."
    )


def explain(found: list[ServingPrediction], cluster: Cluster) -> list[str]:
    """Sentences about the best layout."""
    best = found[0]
    loaded, alone, device = best.loaded, best.alone, cluster.node.device
    order = sorted(loaded.shares.items(), key=lambda pair: -pair[1])
    causes = ", ".join(f"{share:.0%} {cause}" for cause, share in order if share >= 0.005)
    lines = [
        f"Memory: {best.weight_bytes / 1e9:.1f} GB of weights and {best.cache_tokens:,} tokens of key-value cache of "
        f"{best.cache_bytes_per_token / 1e3:.0f} kB each, of {device.memory_bytes / 1e9:.0f} GB a device.",
        f"Under load: {causes}. {_rate(loaded)} tokens/s are {_share(best):.2f} of the floor, at which "
        f"weights and cache are read at the printed bandwidth, or FLOPs run at the printed peak.",
        f"One request alone: {_rate(alone)} tokens/s, the first after {alone.first_token_seconds * 1e3:.0f} ms.",
    ]
    if best.streaming is not None:
        lines += _of_streaming(best.streaming)
    if best.merged_bytes:
        number = best.plan.context.degree
        lines.append(
            f"Context: each of {number} devices holds 1/{number} of a request's keys and values, and the same weights; "
            f"in each layer {best.merged_bytes / 1e3:.1f} kB are gathered for a token."
        )
    fastest = min(found, key=lambda one: -one.alone.tokens_per_second)
    if fastest is not best:
        lines.append(
            f"Least time for one request: {_layout(fastest)}, {_rate(fastest.alone)} tokens/s alone "
            f"and {_rate(fastest.loaded)} under load."
        )
    options = [f"plan.{key}={value}" for key, value in _degrees(best).items() if value > 1]
    lines.append(f"Serve it: weft serve FOLDER {' '.join(options)}".rstrip())
    return lines


def _of_streaming(price: StreamingPrice) -> list[str]:
    """Sentences about weights in host memory."""
    whole = f" and gathers {price.gathered_bytes / 1e9:.1f} GB over replicas"
    gathers = whole if price.gathered_bytes else ""
    streamed = f"{price.num_blocks - price.resident_blocks} of {price.num_blocks} blocks"
    lines = [
        f"Weights in host memory: {price.host_bytes / 1e9:.1f} GB a device, of {streamed}. Each step copies "
        f"{price.copied_bytes / 1e9:.1f} GB to a device{gathers}, at least {price.copy_seconds * 1e3:,.0f} ms. From "
        f"{price.break_even_tokens:,} tokens a step on, products take as long; with fewer, the device waits."
    ]
    if price.fitting_blocks == price.num_blocks:
        lines.append("All blocks fit on a device beside the cache of this load, so --stream-weights is not needed.")
    elif price.fitting_blocks > price.resident_blocks:
        lines.append(
            f"{price.fitting_blocks} blocks fit on a device beside the cache of this load: give --resident-blocks "
            f"{price.fitting_blocks}, and fewer bytes are copied."
        )
    return lines


def _degrees(one: ServingPrediction) -> dict[str, int]:
    plan = one.plan
    degrees = {"data": plan.data, "pipe": plan.pipe.degree, "expert": plan.expert}
    return {**degrees, "context": plan.context.degree, "tensor.x": plan.tensor.x}


def _layout(one: ServingPrediction) -> str:
    names = [f"{key.rpartition('.')[2]} {value}" for key, value in _degrees(one).items() if value > 1]
    return " × ".join(names) or "one device"


def _rate(times: ServingTimes) -> str:
    """Tokens per second, with digits behind the point if there are few."""
    return f"{times.tokens_per_second:,.{0 if times.tokens_per_second >= 10 else 2}f}"


def _share(one: ServingPrediction) -> float:
    return one.loaded.tokens_per_second / one.loaded.floor_tokens_per_second


def _show(
    name: str,
    cluster: str,
    found: list[ServingPrediction],
    workload: ServingWorkload,
    spec: ServingSpec,
    console: Console,
) -> None:
    prompt, output = (fmean(column) for column in zip(*workload.lengths, strict=True))
    title = f"{name} on {cluster}: {len(workload.lengths)} requests of {prompt:.0f} tokens in, {output:.0f} out"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("layout", "weights", "held", "first\ntoken", "tokens/s", "floor", "first\nalone", "per s\nalone"):
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    for one in found[:NUM_SHOWN]:
        table.add_row(
            _layout(one),
            f"{one.weight_bytes / 1e9:.1f} GB",
            f"{one.requests_held}",
            f"{one.loaded.first_token_seconds:.2f} s",
            _rate(one.loaded),
            f"{_share(one):.2f}",
            f"{one.alone.first_token_seconds * 1e3:.0f} ms",
            _rate(one.alone),
        )
    console.print(table)
    say(console, f"{spec.token_budget} tokens a step, {spec.max_running} requests at once in each replica")


def _as_json(one: ServingPrediction) -> dict[str, Any]:
    return {
        "plan": _degrees(one),
        "weight_bytes": one.weight_bytes,
        "cache_bytes_per_token": one.cache_bytes_per_token,
        "cache_tokens": one.cache_tokens,
        "memory_bytes": one.memory_bytes,
        "requests_held": one.requests_held,
        "merged_bytes": one.merged_bytes,
        **({} if one.streaming is None else {"streaming": asdict(one.streaming)}),
        "loaded": _times(one.loaded),
        "alone": _times(one.alone),
    }


def _times(times: Any) -> dict[str, Any]:
    return {
        "first_token_seconds": times.first_token_seconds,
        "tokens_per_second": times.tokens_per_second,
        "floor_tokens_per_second": times.floor_tokens_per_second,
        "share_of_floor": times.tokens_per_second / times.floor_tokens_per_second,
        "shares": times.shares,
    }
