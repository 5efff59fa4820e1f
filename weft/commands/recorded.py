"""`weft profile` and `weft report`: pages of what a run recorded, of its communication, and of its losses and speed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weft.commands.console import make_console, print_json, say
from weft.commands.output import write_result
from weft.errors import ConfigError
from weft.recording.curves import run_page
from weft.recording.live import ADDRESS, live_server
from weft.recording.page import TABLE_HEADS, late_sentences, profile_page, row_texts
from weft.recording.rank_file import FOLDER, chrome_trace, read_recording
from weft.recording.summary import summarise
from weft.train.metrics import read_events


def show_profile(run_folder: Path, console: Console, as_json: bool) -> None:
    """Print the sums of a recording, and write its page and its trace beside the recording."""
    ranks = read_recording(run_folder)
    sums = summarise(ranks)
    folder = run_folder / FOLDER if (run_folder / FOLDER).is_dir() else run_folder
    write_result(folder / "page.html", profile_page(run_folder.name, ranks, sums))
    write_result(folder / "trace.json", chrome_trace(ranks))
    if as_json:
        print_json(sums.to_json())
        return
    say(
        console,
        f"[bold]{run_folder}[/]  {sums.plan}, steps {sums.first_step} to {sums.last_step}: a step takes "
        f"{sums.step_seconds * 1e3:.1f} ms, of which a rank waits {sums.exposed_share:.1%} for communication",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for head in TABLE_HEADS:
        table.add_column(head.lstrip("#"), justify="right" if head.startswith("#") else "left", no_wrap=True)
    for row in sums.operations:
        table.add_row(*row_texts(row))
    console.print(table)
    for sentence in late_sentences(sums):
        say(console, f"[yellow]late[/]  {sentence}")
    say(console, f"wrote {folder / 'page.html'} and {folder / 'trace.json'} (for chrome://tracing or Perfetto)")


def serve_live(run_folder: Path, port: int, console: Console) -> None:
    """Serve the page of a run that is being recorded, until Ctrl-C."""
    if not run_folder.is_dir():
        raise ConfigError(f"{run_folder} is not a folder; give the folder of a run")
    with live_server(run_folder, port) as server:
        say(console, f"http://{ADDRESS}:{server.server_address[1]}/ shows {run_folder}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


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
