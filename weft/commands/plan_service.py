"""`weft plan --serve --rate`: the layouts that serve a rate of requests within limits of time, and what each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from weft.architectures import TransformerConfig
from weft.cluster.hardware import Cluster
from weft.commands.console import print_json, say
from weft.commands.output import write_result
from weft.commands.plan_serve_cpu import ModelToServe
from weft.errors import PlanError
from weft.planner.report.figures import WIDTH, line, svg, text
from weft.planner.report.html_parts import document, figure, table
from weft.planner.serving import ServingModel
from weft.planner.serving_load import (
    NUM_RATES,
    ReplicaLoad,
    ServedRate,
    ServiceAnswer,
    ServiceQuestion,
    answer,
    frontier,
)
from weft.planner.serving_search import serving_plans
from weft.serve.spec import ServingSpec

NUM_SHOWN = 8
FORMATS = (None, "fp8", "int8", "int4")  # of weights, that are tried if formats are searched
Point = tuple[str, int, ServedRate]  # layout, devices of a replica, a rate that it was run at


def plan_service(
    model: ModelToServe,
    cluster: Cluster,
    question: ServiceQuestion,
    precision: str,
    spec: ServingSpec,
    console: Console,
    as_json: bool,
) -> None:
    """Find the layouts that serve the rate with the fewest devices, and show them. Raises PlanError if none keeps the
    limits.
    """
    config = cast(TransformerConfig, model.config)
    traffic = question.traffic(config.context_length)
    found, points, refused = list[ServiceAnswer](), list[Point](), list[str]()
    with console.status("planning"):
        for one in _specs(spec, question, model.has_codes):
            for plan in serving_plans(config, cluster.num_devices):
                try:
                    given = (config, cluster, plan, precision, one, model.has_codes)
                    load = ReplicaLoad(ServingModel(*given), traffic)
                except PlanError as error:
                    refused.append(str(error))
                    continue
                options = replace(one, weights=None if model.has_codes else one.weights).arguments("plan")
                own = answer(load, plan, options, traffic, question.rate, question.limits, question.device_hour_price)
                name = f"{_layout(plan)}{options}"
                points += [
                    (name, plan.num_ranks // plan.data, served) for served in load.tried() if served.waits.following
                ]
                found += [own] if own else []
                refused += (
                    [] if own else [f"{name}: not even a {load.capacity / NUM_RATES:.3g} requests/s are served in time"]
                )
    if not found:
        raise PlanError(f"no layout on {cluster.name} keeps the limits; the last one: {refused[-1]}")
    found.sort(key=lambda one: (one.num_devices if question.rate else 0, -one.goodput_per_device))
    best = frontier(points)
    if question.report is not None:
        write_result(question.report, page(f"{model.name} on {cluster.name}", found, best, points))
    if as_json:
        print_json(
            {
                "model": model.name, "cluster": cluster.name, "rate": question.rate, "limits": asdict(question.limits),
                "answers": [_as_json(one) for one in found], "refused": refused,
                "frontier": [{"layout": name, "devices": number, **asdict(one)} for name, number, one in best],
            }
        )  # fmt: skip
        return
    _show(model.name, cluster, question, found, best, console)


def _specs(spec: ServingSpec, question: ServiceQuestion, has_codes: bool) -> list[ServingSpec]:
    """Return the options to try: those that are given, or with each format of weights."""
    if not question.searches_formats or has_codes:
        return [spec]
    return [replace(spec, weights=name) for name in FORMATS]


def _show(
    name: str,
    cluster: Cluster,
    question: ServiceQuestion,
    found: Sequence[ServiceAnswer],
    best: Sequence[Point],
    console: Console,
) -> None:
    asked = "" if question.rate is None else f", {question.rate:g} requests/s"
    shown = Table(title=f"{name} on {cluster.name}{asked}", title_justify="left", box=None, pad_edge=False)
    heads = ["a replica", "devices", "rate", "first", "next", "replicas", "in all", "$/M"]
    for head in heads:
        shown.add_column(head, justify="left" if head == heads[0] else "right", no_wrap=head == heads[0])
    for one in found[:NUM_SHOWN]:
        shown.add_row(*_cells(one))
    console.print(shown)
    say(console, "rate: requests/s of a replica; first, next: p99 of waits for tokens; in all: devices; $/M: tokens.")
    top = found[0]
    if top.num_devices > cluster.num_devices:
        say(console, f"This takes {top.num_devices} devices, and {cluster.name} has {cluster.num_devices}.")
    curve = "; ".join(f"{_of_user(one):,.0f} at {_per_device(one):,.0f} ({one[0]})" for one in _few(best))
    if curve:
        say(console, f"Tokens/s for a user (all but 1 in 100) at tokens/s of a device: {curve}.")
    say(console, "Requests arrive at random; the caches of replicas are not shared, and nothing fails.")
    options = [f"plan.{key}={value}" for key, value in _degrees(top).items() if value > 1]
    say(console, f"Serve it: {top.num_replicas} x weft serve FOLDER {' '.join(options)}{top.options}")


def _cells(one: ServiceAnswer) -> list[str]:
    waits, dollars = one.served.waits, one.dollars_per_million
    cells = [f"{_layout(one.plan)}{one.options}", str(one.replica_devices), f"{one.served.rate:.3g}"]
    cells += [f"{waits.first:.2f} s", f"{1e3 * waits.following:.0f} ms", str(one.num_replicas), str(one.num_devices)]
    return [*cells, "" if dollars is None else f"{dollars:.2f}"]


def _few(best: Sequence[Point], number: int = 4) -> list[Point]:
    """Return a few points from one end of the frontier to the other."""
    places = sorted({round(index * (len(best) - 1) / (number - 1)) for index in range(number)}) if best else []
    return [best[place] for place in places]


def _of_user(point: Point) -> float:
    """Return the tokens a second that all users but 1 in 100 get."""
    return 1 / point[2].waits.following


def _per_device(point: Point) -> float:
    return point[2].waits.tokens_per_second / point[1]


def _degrees(one: ServiceAnswer) -> dict[str, int]:
    plan = one.plan
    return {"pipe": plan.pipe.degree, "expert": plan.expert, "tensor.x": plan.tensor.x}


def _layout(plan: Any) -> str:
    degrees = {"pipe": plan.pipe.degree, "expert": plan.expert, "x": plan.tensor.x}
    return " × ".join(f"{name} {value}" for name, value in degrees.items() if value > 1) or "one device"


def _as_json(one: ServiceAnswer) -> dict[str, Any]:
    about = {"plan": _degrees(one), "options": one.options.strip(), "num_devices": one.num_devices}
    names = ("replica_devices", "num_replicas", "goodput_per_device", "dollars_per_million")
    return {**about, **{name: getattr(one, name) for name in names}, "served": asdict(one.served)}


def page(title: str, found: Sequence[ServiceAnswer], best: Sequence[Point], points: Sequence[Point]) -> str:
    """Return a page with the layouts and the frontier."""
    heads = ["a replica", "#devices", "#requests/s", "#first p99", "#next p99", "#replicas", "#in all", "#$/M tokens"]
    rows = [[escape(cell) for cell in _cells(one)] for one in found]
    words = "Each point is a layout at a rate; those on the line are better than any other in one of the two."
    picture = figure("Fast for users, or cheap", words, "", frontier_picture(best, points))
    return document(title, f"<h1>{escape(title)}</h1>{table(heads, rows, first=True)}{picture}")


def frontier_picture(best: Sequence[Point], points: Sequence[Point]) -> str:
    """Return the tokens a second of a device over those for a user, as SVG."""
    top, bottom, left, right = 16, 320, 96, WIDTH - 40
    fast, much = (max(map(of, points), default=1.0) for of in (_of_user, _per_device))

    def place(point: Point) -> tuple[float, float]:
        return left + _of_user(point) / fast * (right - left), bottom - _per_device(point) / much * (bottom - top)

    shapes = [line(left, bottom, right, bottom, "grid"), line(left, top, left, bottom, "grid")]
    shapes += [
        text(left - 8, top + 4, f"{much:,.0f}", "quiet", "end"),
        text(right, bottom + 18, f"{fast:,.0f} tokens/s for a user", "quiet", "end"),
        text(left, top - 4, "tokens/s of a device", "quiet"),
    ]
    shapes.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, best))}" class="curve"/>')
    for point in points:
        (x, y), kind = place(point), "ring" if point in best else "compute"
        words = f"{point[0]}: {point[2].rate:.3g} requests/s, first token {point[2].waits.first:.2f} s"
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"><title>{escape(words)}</title></circle>')
    return svg(WIDTH, bottom + 26, "Tokens a second of a device over those for a user, and the best of both", shapes)
