"""The page of `weft plan --report`: one HTML file that shows what the planner found and loads nothing from elsewhere.

It reads what `weft plan --json` prints. What is missing there (no plan fits, no pipeline, no other device counts) is
left out of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from weft.planner.report.figures import (
    MEMORY_PARTS,
    ideal_rates,
    memory_bars,
    scaling_curve,
    small_step_bar,
    traffic_bars,
)
from weft.planner.report.html_parts import document
from weft.planner.report.html_parts import figure as _figure
from weft.planner.report.html_parts import legend_list as _legend
from weft.planner.report.html_parts import table as _table
from weft.planner.report.style import bytes_text, count_text, number, percent, policy_text, seconds_text
from weft.planner.report.timeline import step_picture

Answer = Mapping[str, Any]
_OBJECTIVES = {"time": "the shortest step", "cost": "the fewest device-hours", "devices": "the fewest devices that fit"}
_NO_COMMUNICATION = ("compute", "bubble", "optimizer")


def page(answer: Answer) -> str:
    """The answer of `weft plan` as a self-contained HTML page."""
    title = f"{answer['model']['name']} on {answer['cluster']['name']}"
    sections = (_head, _plans, _memory, _step, _traffic, _scaling, _sensitivities, _foot)
    body = "\n".join(section(answer) for section in sections)
    return document(f"weft plan: {title}", body)


def exposed_seconds(where: Mapping[str, float]) -> float:
    """The communication of a step that nothing hides."""
    return sum(seconds for name, seconds in where.items() if name not in _NO_COMMUNICATION)


def _head(answer: Answer) -> str:
    model, cluster, question = answer["model"], answer["cluster"], answer["question"]
    links = [
        f"{bytes_text(cluster[key], 'B/s')} {words}"
        for key, words in (
            ("intra_bytes_per_second", "inside a node"),
            ("inter_bytes_per_second", "between nodes"),
        )
        if cluster.get(key)
    ]
    devices = f"{_several(cluster['nodes'], 'node')} × {cluster['devices_per_node']} {cluster['device']}"
    wanted = _OBJECTIVES.get(question["objective"], question["objective"])
    constraints = question.get("constraints") or []
    facts = {
        "Model": f"{count_text(model['parameters'])} parameters in {_several(model['blocks'], 'block')}",
        "Cluster": ", ".join([f"{devices} = {_several(cluster['devices'], 'device')}", *links]),
        "Question": f"{question['asked']} a step{_in_all(question)}, {question['precision']}, {wanted}"
        + (f"; with {', '.join(constraints)}" if constraints else ""),
    }
    lines = "".join(f"<li>{name}: {escape(words)}</li>" for name, words in facts.items())
    title = f"{escape(model['name'])} on {escape(cluster['name'])}"
    return f'<header><div class="kicker">weft plan</div><h1>{title}</h1><ul class="facts">{lines}</ul></header>\n' + (
        _answer(answer["plans"][0], answer) if answer.get("plans") else _no_answer(answer)
    )


def _in_all(question: Mapping[str, Any]) -> str:
    """The tokens of all sequences."""
    return f" ({question['tokens_per_step']:,} tokens)" if question["unit"] == "tokens" else ""


def _answer(best: Mapping[str, Any], answer: Answer) -> str:
    limit, seconds, unit = answer["cluster"]["memory_limit_bytes"], best["seconds"], answer["question"]["unit"]
    hours = next((name for name in best if name.startswith("device_hours_per_")), "")
    tiles = {
        "a step": seconds_text(seconds),
        f"{unit}/s": number(best[f"{unit}_per_second"]),
        "MFU": percent(best.get("mfu")),
        f"memory, of {bytes_text(limit)}": bytes_text(best["memory_bytes"]),
        "exposed communication": percent(exposed_seconds(best["where"]) / seconds),
        "bubble": percent(best["bubble_share"]),
        hours.replace("device_", "device-").replace("_", " "): number(best.get(hours)),
    }
    shown = "".join(f"<div><b>{escape(value)}</b><small>{escape(name)}</small></div>" for name, value in tiles.items())
    how = (
        f"micro-batch {best['micro_batch']}, {best['num_micro_batches']} of them a step; "
        f"recompute {policy_text(best)}; {_several(best['num_devices'], 'device')}"
    )
    return (
        f'<section class="answer"><h2>{escape(best["axes"])}</h2><div class="quiet">{escape(how)}</div>'
        f'<div class="tiles">{shown}</div><p>{escape(answer.get("why") or "")}</p></section>'
    )


def _no_answer(answer: Answer) -> str:
    return f'<section class="answer none"><h2>No plan fits</h2><p>{escape(answer.get("why") or "")}</p></section>'


def _plans(answer: Answer) -> str:
    plans = answer.get("plans") or []
    if not plans:
        return ""
    limit = answer["cluster"]["memory_limit_bytes"]
    longest = max(plan["seconds"] for plan in plans)
    unit = answer["question"]["unit"]
    heads = ("", "plan", "micro-batch", "recompute", "#step", f"#{unit}/s", "#MFU", f"#memory of {bytes_text(limit)}")
    rows = [
        [
            str(index + 1),
            escape(plan["axes"]),
            f"{plan['micro_batch']} × {plan['num_micro_batches']}",
            escape(policy_text(plan)),
            seconds_text(plan["seconds"]),
            number(plan[f"{unit}_per_second"]),
            percent(plan.get("mfu")),
            bytes_text(plan["memory_bytes"]),
            percent(exposed_seconds(plan["where"]) / plan["seconds"]),
            percent(plan["bubble_share"]),
            small_step_bar(plan["where"], longest),
        ]
        for index, plan in enumerate(plans)
    ]
    parts = _in_order(name for plan in plans for name, seconds in plan["where"].items() if seconds > 0)
    return (
        "<section><h2>The best plans</h2>"
        '<p class="quiet">Where the step goes is in seconds, all plans on one scale. Of communication, only what '
        "nothing hides is counted.</p>"
        f"{_legend(parts)}{_table([*heads, '#exposed', '#bubble', 'where the step goes'], rows, first=True)}</section>"
    )


def _memory(answer: Answer) -> str:
    plans, rejected = answer.get("plans") or [], answer.get("rejected") or []
    if not plans and not rejected:
        return ""
    what = (
        "Bytes of the fullest rank against the limit of a device (1 GB is 10⁹ bytes); an arrow ends bars that are cut."
    )
    picture = memory_bars(plans, rejected, answer["cluster"]["memory_limit_bytes"])
    return _figure("Memory", what, _legend(MEMORY_PARTS, '<li><i class="line"></i>limit</li>'), picture)


def _step(answer: Answer) -> str:
    if not answer.get("plans"):
        return ""
    best = answer["plans"][0]
    picture, note, kinds = step_picture(best)
    what = (
        "What each rank of pipe does when (gaps are waits); below, where the step's seconds go."
        if kinds
        else ("Where the step's seconds go.")
    )
    total = sum(best["where"].values())
    told = {
        name: f"{name} {seconds_text(seconds)} ({100 * seconds / total:.0f} %)"
        for name, seconds in best["where"].items()
        if seconds > 0
    }
    legend = _legend(kinds, before="ranks:") + _legend(told, before="the step:", names=told)
    return _figure("The step of the best plan", f"{what} {note}", legend, picture)


def _traffic(answer: Answer) -> str:
    plans = answer.get("plans") or []
    traffic = [entry for entry in (plans[0].get("traffic") or [] if plans else []) if entry["bytes"] > 0]
    if not traffic:
        return ""
    what = "What one rank of the best plan sends in a step, by link, axis and operation. The scale is logarithmic."
    legend = _legend(_in_order(entry["axis"] for entry in traffic))
    return _figure("Traffic", what, legend, traffic_bars(traffic, answer["cluster"]))


def _scaling(answer: Answer) -> str:
    points = sorted(answer.get("scaling") or [], key=lambda point: point["devices"])
    if not points:
        return ""
    unit = answer["question"]["unit"]
    rate = f"{unit}_per_second"
    fitting = [point for point in points if point.get("fits", True) and point.get(rate)]
    ideal = dict(zip((point["devices"] for point in fitting), ideal_rates(fitting, rate), strict=True))
    rows = [
        [
            f"{point['devices']:,}",
            f"{point['nodes']:,}",
            seconds_text(point.get("seconds")),
            number(point.get(rate)),
            percent(point.get("mfu")),
            percent(point[rate] / ideal[point["devices"]]) if point in fitting else "does not fit",
            escape(point.get("axes") or "–"),
        ]
        for point in points
    ]
    legend = _legend(
        (),
        '<li><i class="compute dot"></i>best plan, with its MFU</li>'
        + ('<li><i class="ring"></i>this cluster</li>' if answer["cluster"]["devices"] in ideal else "")
        + '<li><i class="dash"></i>ideal: the smallest count that fits, times devices</li>'
        + ("<li>✕ does not fit</li>" if len(fitting) < len(points) else ""),
    )
    what = f"{unit.capitalize()} per second of the best plan with the same batch on other device counts; "
    what += "both axes are logarithmic."
    picture = scaling_curve(points, answer["cluster"]["devices"], unit)
    heads = ("#devices", "#nodes", "#step", f"#{unit}/s", "#MFU", "#of the ideal", "best plan")
    return _figure("Scaling", what, legend, picture, _table(heads, rows))


def _sensitivities(answer: Answer) -> str:
    changes = answer.get("sensitivities") or []
    if not changes:
        return ""
    axes = answer["plans"][0]["axes"] if answer.get("plans") else None
    rows = [
        [
            escape(one["change"]),
            seconds_text(one["seconds"]),
            seconds_text(one["saved_seconds"]),
            percent(one["saved_seconds"] / (one["seconds"] + one["saved_seconds"])),
            "the same plan" if one.get("axes") in (None, axes) else escape(one["axes"]),
        ]
        for one in changes
    ]
    table = _table(("change", "#step then", "#saved", "#of the step", "best plan then"), rows)
    return f"<section><h2>What a little more would change</h2>{table}</section>"


def _foot(answer: Answer) -> str:
    if answer.get("considered") is None:
        return ""
    seconds = answer.get("search_seconds")
    took = f" in {number(seconds)} s" if seconds is not None else ""
    return f"<footer>{answer['considered']:,} plans considered{took}. All numbers are predictions.</footer>"


def _in_order(names: Iterable[str]) -> list[str]:
    """Each name once, as first met."""
    return list(dict.fromkeys(names))


def _several(num: int, what: str) -> str:
    return f"{num:,} {what}{'s' if num != 1 else ''}"
