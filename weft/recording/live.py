"""`weft profile --live`: serves the page of a recording on loopback while the run writes it.

Ranks write what they have recorded after 1, 2, 4, 8, ... recorded steps, and at the end. Each request reads the files
again, and the page asks to be loaded again every few seconds. Only this machine is answered, and only for the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from weft.errors import ConfigError, WeftError
from weft.planner.report.html_parts import document
from weft.recording.page import profile_page
from weft.recording.rank_file import RankRecording, read_recording
from weft.recording.summary import summarise

ADDRESS = "127.0.0.1"
REFRESH_SECONDS = 2
_HOSTS = ("127.0.0.1", "localhost")  # a page of another site cannot have us under these names


def live_page(run_folder: Path) -> str:
    """The page of what was recorded so far, or one that says why there is none."""
    try:
        ranks = _same_steps(read_recording(run_folder))
        text = profile_page(run_folder.name, ranks, summarise(ranks))
    except WeftError as error:
        text = document(f"weft profile: {run_folder.name}", f"<p>Nothing to show yet: {escape(str(error))}</p>")
    head = f'<head>\n<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
    assert text.count("<head>") == 1
    return text.replace("<head>", head)


def _same_steps(ranks: Sequence[RankRecording]) -> list[RankRecording]:
    """The steps that all ranks have written: some may have written more than others."""
    last = min(one.last_step for one in ranks)
    return [
        replace(
            one,
            last_step=last,
            calls=[call for call in one.calls if call.step <= last],
            phases=[span for span in one.phases if span.step <= last],
        )
        for one in ranks
    ]


def live_server(run_folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the page on a port of loopback; 0 takes a free one. The caller runs and closes it."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds that a connection may say nothing

        def do_GET(self) -> None:
            if (self.headers.get("Host") or "").rpartition(":")[0] not in _HOSTS:
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            body = live_page(run_folder).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing for each request."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port} cannot be used on {ADDRESS}: {error}; choose another, or 0") from error
    server.daemon_threads = True
    return server
