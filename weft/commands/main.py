"""The entry point of `weft`. A run file is checked before the command line is imported, which takes longer."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.commands.early_stop import stopping_early
from weft.errors import BAD_INPUT, WeftError, exit_status
from weft.launch.one_speaker import is_first_to_say

COMMANDS = ("train", "verify", "plan", "chaos")  # whose first argument is a run file
FLAGS = ("--json", "--verify", "--no-verify", "--fresh", "--print-config")  # options without a value


def main() -> None:
    """Run the command. An error that a user may meet is printed as one line. docs/commands.md lists the statuses."""
    try:
        with stopping_early():
            _check_run_file(sys.argv[1:])
            from weft.commands.app import app

            app()
    except WeftError as error:
        _fail(str(error), exit_status(error))
    except OSError as error:  # a file that cannot be read or written, a full disk
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        _fail(f"{what}; check the path, its permissions and the space left", BAD_INPUT)


def _check_run_file(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a mistake in the run file or its overrides. Other forms of a command check it later."""
    given = [argument for argument in arguments if argument not in FLAGS]
    if given[:1] and given[0] in COMMANDS and given[1:] and not any(one.startswith("-") for one in given):
        from weft.run_file import check_run_file

        check_run_file(Path(given[1]), given[2:])


def _fail(message: str, status: int) -> None:
    if is_first_to_say(message, os.environ):
        print(f"weft: {message}", file=sys.stderr)
    raise SystemExit(status)
