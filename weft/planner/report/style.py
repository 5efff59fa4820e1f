"""How the page of a plan looks: one colour for each part of a step or of memory, the style sheet, and numbers as text.

Colours are picked to be told apart by colour-blind eyes, on white paper and on a dark screen; no picture relies on
colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.schedule.draw import time_unit

# On a light and on a dark ground. Forward, backward and weight gradients are shades of compute.
_COLOURS = {
    "compute": ("#2a78d6", "#3987e5"),
    "forward": ("#9cc5f2", "#b5d5f7"),
    "backward": ("#2a78d6", "#3987e5"),
    "weight": ("#12427d", "#2560a8"),
    "x": ("#eb6834", "#d95926"),
    "y": ("#62c6e6", "#5fbcdc"),
    "data": ("#1baf7a", "#199e70"),
    "shard": ("#eda100", "#c98500"),
    "pipe": ("#e87ba4", "#d55181"),
    "expert": ("#8a5a00", "#b98a3d"),
    "context": ("#008300", "#2f9a2f"),
    "rows": ("#eb6834", "#d95926"),  # tiles never stand beside x, y and context
    "columns": ("#62c6e6", "#5fbcdc"),
    "tile": ("#008300", "#2f9a2f"),
    "bubble": ("#d9d8d2", "#4a4945"),
    "optimizer": ("#4a3aa7", "#9085e9"),
    "parameters": ("#2a78d6", "#3987e5"),
    "gradients": ("#eda100", "#c98500"),
    "activations": ("#eb6834", "#d95926"),
    "unnamed": ("#8f8e88", "#8f8e88"),  # what has no colour of its own
}
_GROUNDS = {
    "ground": ("#fcfcfb", "#1a1a19"),
    "raised": ("#f4f4f1", "#252523"),
    "ink": ("#1b1b19", "#f1f0ec"),
    "quiet": ("#5c5b57", "#b3b1a9"),
    "rule": ("#dddcd6", "#3d3c39"),
    "over": ("#b3261e", "#ff8a80"),  # the limit
}
_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1160px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:27px;line-height:1.25;margin:2px 0 6px;overflow-wrap:anywhere}
h2{font-size:19px;margin:44px 0 6px}
p{margin:6px 0;max-width:100ch}
.kicker{color:var(--quiet);font-size:13px;letter-spacing:.08em;text-transform:uppercase}
.facts,.quiet,figcaption{color:var(--quiet)}
.facts{margin:0;padding:0;list-style:none}
.answer{background:var(--raised);border-left:4px solid var(--compute);border-radius:4px;padding:16px 20px;margin:20px 0}
.answer.none{border-color:var(--over)}
.answer h2{margin:0 0 2px;overflow-wrap:anywhere}
.tiles{display:flex;flex-wrap:wrap;gap:14px 36px;margin:16px 0 12px}
.tiles b{display:block;white-space:nowrap;font-size:22px;line-height:1.25;font-weight:600}
.tiles small{display:block;max-width:125px;color:var(--quiet);font-size:13px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 14px 7px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--quiet);font-weight:500;vertical-align:bottom}
th:last-child,td:last-child{padding-right:0}
.number{text-align:right}
td.number,td.short{white-space:nowrap}
td.axes{min-width:240px}
.number+.axes{padding-left:14px}
figure+.scroll{margin-top:18px}
tr.first td{font-weight:600}
figure{margin:14px 0 0}
figcaption{font-size:14px;margin-bottom:4px}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:6px 0 10px;padding:0;list-style:none;font-size:13px}
.legend i{display:inline-block;width:12px;height:12px;margin-right:6px;border-radius:2px;vertical-align:-1px}
.legend i.dot{border-radius:50%}
.legend i.ring{background:var(--ground);border:3px solid var(--compute);border-radius:50%}
.legend i.dash{height:0;border-radius:0;border-top:2px dashed var(--quiet);width:26px;vertical-align:4px}
.legend i.line{height:0;border-top:2px solid var(--ink);width:18px;vertical-align:4px}
svg{display:block;font-size:12px;fill:var(--ink)}
figure svg{width:100%;min-width:820px;height:auto}
svg .quiet{fill:var(--quiet)}
svg .strong{font-weight:600}
svg .over{fill:var(--over)}
svg .halo{stroke:var(--ground);stroke-width:5px;paint-order:stroke}
svg .on-dark{fill:#fff}
svg .on-light{fill:#1b1b19}
svg .columns{shape-rendering:crispEdges}
svg .grid{stroke:var(--rule)}
svg .limit{stroke:var(--ink);stroke-width:2}
svg .curve{fill:none;stroke:var(--compute);stroke-width:2}
svg .ideal{stroke:var(--quiet);stroke-width:1.5;stroke-dasharray:6 5}
svg .ring{fill:var(--ground);stroke:var(--compute);stroke-width:3}
svg .cross{fill:none;stroke:var(--over);stroke-width:2}
footer{margin-top:44px;color:var(--quiet);font-size:13px}
@media print{
 body{font-size:11px}main{max-width:none;padding:0}.scroll{overflow:visible}
 :root{--ground:#fff}.legend,figcaption,footer{font-size:10px}.tiles b{font-size:17px}.tiles small{font-size:10px}
 figure svg{min-width:0}table{font-size:10px}th,td{padding-right:8px}td.axes{min-width:0}td svg{width:120px}
 h2{break-after:avoid}figure,tr,.answer{break-inside:avoid}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


def part_class(name: str) -> str:
    """The class that colours a part of a step, of memory or of traffic."""
    return name if name in _COLOURS else "unnamed"


def style_sheet() -> str:
    """The whole style of the page, for light and dark screens and for paper."""
    values = {**_GROUNDS, **_COLOURS}
    light, dark = ("".join(f"--{name}:{value[index]};" for name, value in values.items()) for index in (0, 1))
    parts = "\n".join(f".{name}{{fill:var(--{name});background:var(--{name})}}" for name in _COLOURS)
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{parts}{_RULES}"
    )


def number(value: float | None) -> str:
    """Four digits or more, and no exponent: `341,250`, `12.5`."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"


def seconds_text(seconds: float | None) -> str:
    """`12.30 s`, `4.125 ms`."""
    if seconds is None:
        return "–"
    if seconds == 0:
        return "0 s"
    per_second, unit = time_unit(abs(seconds))
    value = seconds * per_second
    return f"{value:,.0f} {unit}" if abs(value) >= 999.5 else f"{value:#.4g} {unit}"


def policy_text(plan: Mapping[str, Any]) -> str:
    """`selective, offload 0.35`: what a plan of an answer does for memory."""
    share = plan.get("offload")
    return f"{plan['recompute']}, offload {share:g}" if share else str(plan["recompute"])


def bytes_text(num_bytes: float, unit: str = "B") -> str:
    """Decimal, as datasheets print sizes and rates: `71.2 GB`."""
    size, sign = _shortened(num_bytes, ("", "k", "M", "G", "T", "P"))
    return f"{size} {sign}{unit}"


def count_text(count: float) -> str:
    """`530B` parameters, `50k` tokens."""
    return "".join(_shortened(count, ("", "k", "M", "B", "T")))


def _shortened(value: float, signs: tuple[str, ...]) -> tuple[str, str]:
    """Three digits and the sign of their thousands."""
    power = 0
    while abs(value) >= 999.5 and power < len(signs) - 1:
        value, power = value / 1000, power + 1
    return (f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"), signs[power]


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
