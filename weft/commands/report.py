"""`weft report`: a run's losses and speed against steps, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.errors import ConfigError

EXAMPLE = "Example: weft report runs/quickstart"


def report_command(
    run_folder: Annotated[Path, typer.Argument(help="the folder of a run, which may still train")],
    out: Annotated[Path | None, typer.Option(help="the file to write; report.html in the folder if not given")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Draw a run's losses and speed against steps. One page (HTML) that loads nothing from elsewhere."""
    from weft.commands.console import make_console, print_json, say
    from weft.commands.result_file import write_result
    from weft.recording.curves import run_page
    from weft.train.metrics import read_events

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
