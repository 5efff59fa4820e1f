"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="the run file (TOML)", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="changes to it: section.key=value", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
