"""`weft profile`: what a run's ranks recorded of their communication, as a table, a page and a trace."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weft.commands.console import print_json, say
from weft.commands.result_file import write_result
from weft.errors import ConfigError
from weft.recording.live import ADDRESS, live_server
from weft.recording.page import TABLE_HEADS, late_sentences, profile_page, row_texts
from weft.recording.rank_file import FOLDER, chrome_trace, read_recording
from weft.recording.summary import summarise


def show_profile(run_folder: Path, console: Console, as_json: bool) -> None:
    """Print the sums of a recording, and write its page and its trace beside the recording."""
    ranks = read_recording(run_folder)
    found = summarise(ranks)
    folder = run_folder / FOLDER if (run_folder / FOLDER).is_dir() else run_folder
    write_result(folder / "page.html", profile_page(run_folder.name, ranks, found))
    write_result(folder / "trace.json", chrome_trace(ranks))
    if as_json:
        print_json(found.to_json())
        return
    say(
        console,
        f"[bold]{run_folder}[/]  {found.plan}, steps {found.first_step} to {found.last_step}: a step takes "
        f"{found.step_seconds * 1e3:.1f} ms, of which a rank waits {found.exposed_share:.1%} for communication",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for head in TABLE_HEADS:
        table.add_column(head.lstrip("#"), justify="right" if head.startswith("#") else "left", no_wrap=True)
    for row in found.operations:
        table.add_row(*row_texts(row))
    console.print(table)
    for sentence in late_sentences(found):
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
