"""Makes docs/measured/: what was measured, one page per subject, from the files of benchmarks/results.

    python benchmarks/measured.py            writes the pages
    python benchmarks/measured.py --check    ends with 1 if a page differs from what it would write

A result says when and where it was measured and by which command. Its numbers become tables by their shape: a list of
entries is a table, a name with entries is a heading. Lists of more than `MOST_ROWS` entries are counted, not shown.
`transcribed.json` has tables and notes of docs for which there is no other file; it names the page and the day.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "measured"
TRANSCRIBED = "transcribed.json"
MOST_ROWS, MOST_COLUMNS, MOST_ITEMS, MOST_FACTS, MOST_CHARACTERS = 60, 8, 4, 3, 160
HARDWARE = (
    "hardware", "device", "cpu", "capability", "num_cpu_cores", "cpu_cores", "machine", "cluster", "threads", "torch",
    "python", "versions", "MPS",
)  # fmt: skip
HEAD = (*HARDWARE, "benchmark", "date", "command")
WORDS = ("note", "notes", "what", "aim", "text", "run", "seconds")  # keys whose text is a paragraph and not a row
UNITS = (  # words of a key, and the units of its numbers: the largest unit that is at most the number
    ("bytes_per_second", ((1e9, 1e9, "GB/s"), (1e6, 1e6, "MB/s"), (0.0, 1.0, "B/s"))),
    ("flops_per_second", ((1e12, 1e12, "TFLOP/s"), (0.0, 1.0, "FLOP/s"))),
    ("flops", ((1e12, 1e12, "TFLOP"), (1e9, 1e9, "GFLOP"), (0.0, 1.0, "FLOP"))),
    ("bytes", ((1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB"), (1.0, 1.0, "B"))),
    ("seconds", ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "us"))),
)
NO_UNIT = frozenset({"ratio", "share", "percent", "times", "error", "errors", "formula"})


@dataclass(frozen=True)
class Page:
    """A page: its title, what its reader finds there, and the files that it shows, each with a heading."""

    title: str
    introduction: str
    files: dict[str, str]
    left_out: frozenset[str] = frozenset()  # keys that are not shown, wherever they are


ROUNDS = frozenset({"errors_of_rounds", "measured_ms_of_rounds", "readings", "lags", "load_average"})
SUBJECTS = {
    "one_gpu": Page(
        "Training on one GPU",
        "[One GPU](../one_gpu.md) beside other trainers, and [several ranks on it](../ranks_per_device.md).",
        {
            "one-gpu-h200.json": "Llamas of 1.2 to 40 billion parameters",
            "fp8-losses-h200.json": "Losses in fp8",
            "overhead-cuda-bf16.json": "Overhead over a plain loop",
            "moments-cpu.json": "Losses with moments in fewer bits",
            "ranks-per-device-h200.json": "Several ranks on one GPU",
        },
    ),
    "images": Page(
        "Training on images",
        "Steps of [large images](../images.md) on one GPU.",
        {"images-h200.json": "Plain PyTorch and weft", "hy-fi.json": "Hy-Fi's comparison, predicted"},
    ),
    "experts": Page(
        "Models with experts",
        "Steps and layers of [models with experts](../expert.md).",
        {
            "experts-h200.json": "Qwen3-MoE on one GPU, beside transformers",
            "expert-fp8-h200.json": "A layer in fp8, part by part",
            "expert-kernels-h200.json": "Kernels that other frameworks use",
            "peers-experts-cpu.json": "Beside FSDP2, over CPU ranks",
            "experts-text.json": "Losses with and without experts",
        },
        frozenset({"earlier_calls", "milliseconds_of_kernels_in_fp8"}),
    ),
    "planner": Page(
        "The planner",
        "Predictions of [the planner](../planner.md) and of [famous runs](../famous_runs.md) beside measurements.",
        {
            "planner-accuracy.json": "Published tables",
            "planner-h200.json": "Eighteen shapes on one GPU",
            "megatron-host.json": "Megatron's host",
            "cpu-plans.json": "Four plans on a CPU",
        },
        frozenset({"kernels", "machine_file"}),
    ),
    "parallel": Page(
        "Several ranks",
        "[Pipelines](../pipeline.md), [communication](../communication.md), [K-FAC](../kfac.md).",
        {
            "peers-cpu.json": "Beside PyTorch's own parallelism",
            "pipeline-cpu.json": "Pipelines",
            "recorder-overhead-cpu.json": "Cost of recording communication",
            "compressed-quality-cpu.json": "1-bit and 0/1 Adam",
            "curvature-cpu.json": "Curvature ranks",
        },
        ROUNDS,
    ),
    "resilience": Page(
        "Resilience",
        "What [failures](../resilience.md) and the protection against them cost.",
        {
            "chaos-cpu.json": "Random faults",
            "save-stall-cpu.json": "Saves",
            "shadow-cpu.json": "Shadows of stages",
            "hostile-clients.json": "A server among hostile clients",
        },
    ),
    "serving_gpu": Page(
        "Serving on a GPU",
        "The [engine](../serving.md) and [lean inference](../lean_inference.md) on a GPU.",
        {
            "serve-gpu.json": "The engine",
            "serve-gpu-layout.json": "The engine before and after it was composed anew",
            "first-tokens.json": "First tokens after a start",
            "sampling-gpu.json": "Draws with filters",
            "lean-gpu.json": "Fewer bytes a token",
            "lean-prompts.json": "Prompts over a cache of 4 bits",
            "lean-planned.json": "What `weft plan --serve` says beside these",
            "larger-than-gpu.json": "A model larger than the GPU",
            "split-attention-gpu.json": "Attention over half of the pages",
            "serve-shared-gpu.json": "Ranks that share a GPU",
        },
    ),
    "serving_cpu": Page(
        "Serving on a CPU",
        "Decodes [on a CPU](../cpu_serving.md), and [recurrent models](../recurrent.md).",
        {
            "serve-cpu.json": "One thread",
            "serve-cpu-2-threads.json": "Two threads",
            "serve-cpu-amx.json": "A CPU with AMX",
            "cpu-products.json": "Products of some rows",
            "recurrent-cpu.json": "LSTM and GRU",
            "vocabulary-search-cpu.json": "Graph search for likely tokens",
            "cpu-planned.json": "Predicted and measured",
            "cpu-planned-2-threads.json": "The same with two threads",
            "cpu-planned-amx.json": "The same with AMX, beside other work",
            "cpu-planned-arm.json": "The same on ARM",
        },
        ROUNDS,
    ),
    "quality": Page(
        "Quality in fewer bits",
        "Perplexity of models whose weights or caches have [fewer bits](../lean_inference.md).",
        {
            "lean-quality-cpu.json": "A dense model",
            "lean-quality-arm.json": "The same on ARM",
            "lean-quality-experts-cpu.json": "A model with experts",
        },
        frozenset({"explained"}),
    ),
    "proofs": Page(
        "Proofs",
        "[Proofs](../design.md) of right plans, and of faults in them: a fault is one element of one compared tensor, "
        "ten times its tolerance away. `benchmarks/results/proof-noise.json` has each model.",
        {"proof-noise.json": "Models of torchvision, timm and transformers under every axis"},
        frozenset({"models"}),
    ),
    "gpu_checks": Page(
        "Checks on a GPU",
        "What the tests prove on a CPU, [on a GPU](../gpus.md).",
        {"gpu-checks-h200.json": "Kernels and streams", "test-gpu-h200.json": "make test-gpu"},
    ),
}
ELSEWHERE = {"model-table.json", TRANSCRIBED}  # docs/models.md is made from the first


def number(key: str, value: float) -> str:
    """Return a number with the unit that its key names, in four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    names = key.split("_")
    if names[-1] in ("error", "errors"):
        return f"{100 * value:+.1f} %"
    for unit, sizes in UNITS:
        is_named = unit in key if "_" in unit else unit in names and NO_UNIT.isdisjoint(names)
        if is_named and value:
            for least, size, symbol in sizes:
                if abs(value) >= least:
                    return f"{digits(value / size)} {symbol}"
    return digits(value)


def digits(value: float) -> str:
    """Return a number in four digits, thousands apart; whole numbers whole."""
    if float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def cell(key: str, value: Any) -> str:
    """Return what a table says of a value."""
    if value is None:
        return "–"
    if isinstance(value, (int, float)):
        return number(key, value)
    if isinstance(value, str):
        return value.replace("|", "\\|").replace("\n", " ")
    if isinstance(value, dict):
        return ", ".join(f"{name}: {cell(name, one)}" for name, one in value.items())
    if len(value) > MOST_ITEMS and all(isinstance(one, (int, float)) for one in value):
        middle = statistics.median(value)
        return f"{number(key, middle)} ({number(key, min(value))} to {number(key, max(value))}, {len(value)} values)"
    if len(value) > MOST_ITEMS and value and isinstance(value[0], list):
        return f"{len(value)} values, the last {cell(key, value[-1])}"
    return ", ".join(cell(key, one) for one in value)


def flat(entry: dict[str, Any], left_out: frozenset[str], above: tuple[str, ...] = ()) -> dict[str, str]:
    """Return an entry's columns: names of nested entries are joined, also to find the unit."""
    columns: dict[str, str] = {}
    for name, value in entry.items():
        names = (*above, name)
        if name in left_out:
            continue
        if isinstance(value, dict) and value:
            columns |= flat(value, left_out, names)
        elif not (is_entries(value) and len(value) > MOST_ITEMS):
            columns[": ".join(map(words, names))] = cell("_".join(names), value)
    return columns


def words(name: str) -> str:
    return name.replace("_", " ").replace("|", "\\|")


def is_entries(value: Any) -> bool:
    """Whether a value is a list of entries, or names with entries."""
    many = list(value.values()) if isinstance(value, dict) else value
    return isinstance(many, list) and bool(many) and all(isinstance(one, dict) and one for one in many)


def table(rows: Sequence[tuple[str, dict[str, str]]]) -> Iterator[str]:
    """Yield the lines of a table; of one with more columns than rows, names of columns stand at the left."""
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    if len(names) > MOST_COLUMNS and len(names) > len(rows):
        rows, names = (
            [(name, {title: row.get(name, "") for title, row in rows}) for name in names],
            list(dict.fromkeys(title for title, _ in rows)),
        )
    yield f"| | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for title, row in rows:
        yield f"| {title} | {' | '.join(row.get(name, '') for name in names)} |"
    yield ""


def titled(entries: Any, left_out: frozenset[str]) -> list[tuple[str, dict[str, str]]]:
    """Return rows with their titles: names of entries, or the text with which each of a list begins."""
    if isinstance(entries, dict):
        return [(words(name), flat(entry, left_out)) for name, entry in entries.items() if name not in left_out]
    rows = []
    for index, entry in enumerate(entries, 1):
        columns, first = flat(entry, left_out), next(iter(entry))
        title = columns.pop(words(first)) if isinstance(entry[first], str) else str(index)
        rows.append((title if title not in dict(rows) else f"{title} ({index})", columns))
    return rows


def is_single(value: Any) -> bool:
    """Whether a table can show a value in one cell."""
    return not isinstance(value, dict) and not is_entries(value)


def tables(name: str, value: Any, level: int, left_out: frozenset[str]) -> Iterator[str]:
    """Yield a heading and tables for a value that is not a single number or text."""
    yield f"{'#' * min(level, 6)} {words(name)}"
    yield ""
    if not is_entries(value):
        yield from body(value, level + 1, left_out)
    elif len(value) > MOST_ROWS:
        yield f"{len(value)} rows, which only the file has."
        yield ""
    elif isinstance(value, dict) and all(is_entries(one) for one in value.values()):
        if sum(len(one) for one in value.values()) <= MOST_ITEMS:
            yield from table(titled(value, left_out))
        else:
            for title, one in value.items():
                yield from tables(title, one, level + 1, left_out)
    else:
        yield from table(titled(value, left_out))


def body(result: dict[str, Any], level: int, left_out: frozenset[str]) -> Iterator[str]:
    """Yield paragraphs, then the single values of a result in one table, then its entries."""
    facts: dict[str, str] = {}
    alike: dict[str, dict[str, str]] = {}  # entries of single values with the same names, in one table
    larger: dict[str, Any] = {}
    for name, value in result.items():
        if name in left_out:
            continue
        if isinstance(value, str) and (name in WORDS or len(value) > MOST_CHARACTERS):
            yield f"{words(name)[0].upper()}{words(name)[1:]}: {cell(name, value)}"
            yield ""
        elif is_single(value):
            facts[words(name)] = cell(name, value)
        elif isinstance(value, dict) and all(is_single(one) for one in value.values()):
            if len(value) <= MOST_FACTS:
                facts |= flat({name: value}, left_out)
            else:
                alike[words(name)] = flat(value, left_out)
        else:
            larger[name] = value
    if facts:
        yield from table([(name, {"": value}) for name, value in facts.items()])
    while alike:
        title, first = next(iter(alike.items()))
        same = {name: row for name, row in alike.items() if len({*row} & {*first}) > len(first) / 2}
        alike = {name: row for name, row in alike.items() if name not in same}
        if len(same) > 1:
            yield from table(list(same.items()))
        else:
            yield f"{'#' * min(level, 6)} {title}"
            yield ""
            yield from table([(name, {"": value}) for name, value in first.items()])
    for name, value in larger.items():
        yield from tables(name, value, level, left_out)


def section(file: str, title: str, left_out: frozenset[str]) -> Iterator[str]:
    """Yield the part of a page that one file gives."""
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    result |= result.pop("about", {})
    yield f"## {title}"
    yield ""
    hardware = "; ".join(f"{words(name)}: {cell(name, result[name])}" for name in HARDWARE if name in result)
    place = f"[`{file}`](../../benchmarks/results/{file})"
    yield f"`{result['command']}`, {result['date']} ({place}). {hardware or 'The file does not name the hardware.'}"
    yield ""
    yield from body({name: value for name, value in result.items() if name not in HEAD}, 3, left_out)


def transcribed(subject: str) -> Iterator[str]:
    """Yield what was measured or computed before it had a file of its own: tables and notes of docs."""
    for entry in json.loads((RESULTS / TRANSCRIBED).read_text(encoding="utf-8"))["entries"]:
        if entry["subject"] == subject:
            yield f"## {entry['title']}"
            yield ""
            yield f"Transcribed from {entry['source']}; there is no result file."
            yield ""
            for note in entry.get("notes", ()):
                yield note
                yield ""
            if "rows" in entry:
                yield f"| {' | '.join(entry['columns'])} |"
                yield "|---" * len(entry["columns"]) + "|"
                yield from (f"| {' | '.join(row)} |" for row in entry["rows"])
                yield ""


def page(subject: str) -> str:
    """Return a page of docs/measured."""
    one = SUBJECTS[subject]
    lines = [f"# Measured: {one.title[0].lower()}{one.title[1:]}", "", one.introduction]
    lines += ["Made by `python benchmarks/measured.py` from `benchmarks/results`; not edited by hand.", ""]
    for file, title in one.files.items():
        lines += section(file, title, one.left_out)
    lines += transcribed(subject)
    return "\n".join(lines).rstrip("\n") + "\n"


def index() -> str:
    """Return the list of the pages."""
    lines = [
        "# Measured",
        "",
        "What was measured, on which hardware, when and by which command: one page per subject.",
        "",
    ]
    lines += [f"- [{one.title}]({subject}.md): {', '.join(one.files.values())}." for subject, one in SUBJECTS.items()]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of every page by its place."""
    return {PAGES / "README.md": index()} | {PAGES / f"{subject}.md": page(subject) for subject in SUBJECTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page differs")
    check = parser.parse_args().check
    for path, text in pages().items():
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            sys.exit(f"{path} differs; run: python benchmarks/measured.py")
        if not check:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
