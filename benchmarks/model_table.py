"""Which architectures each axis splits: every model of `zoo.py` under every plan, proved or refused in words.

Writes `docs/models.md` and `benchmarks/results/model-table.json`. A proof is that of `weft.verify`: float64 on two CPU
processes, all gradients, three steps.

    python benchmarks/model_table.py [--only gpt2,bert] [--plans x,pipe]
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import harness
import torch
import transformers
from zoo import Entry, zoo

import weft
from weft.errors import LocalError, WeftError
from weft.plan import Context, Pipe, Plan, Shard, Tensor, Tile

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "model-table.json", ROOT / "docs" / "models.md"
PLANS = {
    "data": Plan(data=2, micro_batch=2),
    "shard": Plan(shard=Shard(2, stage=3), micro_batch=2),
    "x": Plan(tensor=Tensor(x=2), micro_batch=4),
    "y": Plan(tensor=Tensor(y=2), micro_batch=4),
    "x sequence": Plan(tensor=Tensor(x=2, sequence=True), micro_batch=4),
    "context": Plan(context=Context(2), micro_batch=4),
    "pipe": Plan(pipe=Pipe(2), micro_batch=2),
    "rows": Plan(tile=Tile(rows=2), micro_batch=4),
}
SECONDS = 600.0


def outcome_of(entry: Entry, plan: Plan) -> dict[str, Any]:
    """Returns {"outcome": proved, not proved, refused, differs or failed, and why}."""
    begin = time.monotonic()
    try:
        report = weft.verify(entry.build, entry.batch, plan, timeout_seconds=SECONDS)
        failure = report.first_failure
        found = {"outcome": "proved" if report.passed else "differs", "not_proved": list(report.not_proved)}
        if not report.passed and failure is None:
            found |= {"outcome": "not proved", "why": report.not_proved[-1]}
        if failure is not None:
            found["why"] = f"{failure.what}: expected {failure.expected}, found {failure.found} ({failure.where})"
    except LocalError as error:  # a rank failed, or did not end
        found = {"outcome": "failed", "why": str(error)}
    except WeftError as error:
        found = {"outcome": "refused", "why": str(error)}
    except Exception as error:
        found = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
    return found | {"seconds": round(time.monotonic() - begin, 1), "transformers": transformers.__version__}


def page(found_with: dict[str, Any]) -> str:
    """Returns the page of the docs: a table with a number for each reason, and the reasons below."""
    rows: dict[str, dict[str, dict[str, Any]]] = found_with["models"]
    reasons: dict[str, int] = {}
    lines = []
    for name, outcomes in rows.items():
        cells = []
        for plan in PLANS:
            found = outcomes.get(plan)
            if found is None:
                cells.append("")
            elif found["outcome"] == "proved":
                cells.append("yes")
            else:
                cells.append(f"[{reasons.setdefault(_general(found), len(reasons) + 1)}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    counts = {plan: sum(row.get(plan, {}).get("outcome") == "proved" for row in rows.values()) for plan in PLANS}
    head = f"| model | {' | '.join(f'{plan} ({counts[plan]})' for plan in PLANS)} |"
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    versions = " and ".join(sorted({found["transformers"] for row in rows.values() for found in row.values()}))
    introduction = _INTRODUCTION.format(versions=versions)
    return "\n".join([introduction, head, "|---" * (len(PLANS) + 1) + "|", *lines, "\n## Reasons\n", notes, ""])


_INTRODUCTION = """# Which models each axis splits

Every model below is transformers' own, unedited, with a tiny config and random weights. `weft.verify` compared each
plan on two processes with the unsplit model in float64: loss, every gradient, the parameters after three steps, traffic
and memory. *yes*: proved. A number: refused before training, for the reason below the table. In brackets behind an
axis: how many models it splits. `python benchmarks/model_table.py` wrote this page (transformers {versions}).
"""


def _general(found: dict[str, Any]) -> str:
    first = found["why"].strip().splitlines()[0]
    return first if found["outcome"] == "refused" else f"**{found['outcome']}**: {first}"


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--only", help="names of models, with commas")
    parser.add_argument("--plans", help="names of plans, with commas")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    plans = arguments.plans.split(",") if arguments.plans else list(PLANS)
    entries = [one for one in zoo() if not arguments.only or one.name in arguments.only.split(",")]
    rows: dict[str, dict[str, dict[str, Any]]] = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    for entry in entries:
        row = rows.setdefault(entry.name, {})
        for plan in plans:
            row[plan] = outcome_of(entry, PLANS[plan])
            print(f"{entry.name:14} {plan:10} {row[plan]['outcome']:8} {row[plan].get('why', '')[:150]!r}", flush=True)
        order = [one.name for one in zoo() if one.name in rows]
        result = {
            **harness.facts(device="cpu"), "models": {name: rows[name] for name in order},
        }  # fmt: skip
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        PAGE.write_text(page(result))


if __name__ == "__main__":
    main()
