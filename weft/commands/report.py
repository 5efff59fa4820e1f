"""`weft report`: a run's losses and speed against steps, as one page."""

from __future__ import annotations

from pathlib import Path

from weft.commands.console import make_console, print_json, say
from weft.commands.result_file import write_result
from weft.errors import ConfigError
from weft.recording.curves import run_page
from weft.train.metrics import read_events


def write_report(run_folder: Path, out: Path | None, as_json: bool) -> None:
    """Write the page of a run to `out`, or else into its folder, and print where it is."""
    metrics = run_folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ConfigError(f"{run_folder} has no metrics.jsonl; give the folder of a run that has trained")
    events = read_events(metrics)
    target = run_folder / "report.html" if out is None else out
    write_result(target, run_page(run_folder.resolve().name, events))
    if as_json:
        print_json({"page": str(target), "events": len(events)})
        return
    say(make_console(), f"wrote {target}")
