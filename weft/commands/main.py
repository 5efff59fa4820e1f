"""The entry point of `weft`. A run file is checked before the command line is imported, which takes longer."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType

from weft.errors import BAD_INPUT, ConfigError, WeftError, exit_status
from weft.launch.one_speaker import is_first_to_say

COMMANDS = ("train", "verify", "plan", "chaos")  # whose first argument is a run file
CLOSED_PIPE = 141  # the exit status of programs that SIGPIPE ends
PLANNING = "plan"  # after this command, nothing is left to clean up: its process ends at once
MAY_BE_EMPTY = ("--prompt",)  # a text that is continued from its beginning
FLAGS = ("--json", "--verify", "--no-verify", "--fresh", "--print-config")  # options without a value


def run() -> None:
    """Run the command as all that this process does.

    `weft plan` makes millions of objects that live until it ends: torch's compiler, and the trace of a model. It pauses
    Python's collector, which would walk through them again and again, and does not free them one by one at the end.
    """
    if sys.argv[1:2] != [PLANNING]:
        try:
            main()
        finally:
            _leave_closed_pipe()
        return
    gc.disable()
    try:
        main()
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            raise
        _end_process(left.code or 0)
    _end_process(0)


def _leave_closed_pipe() -> None:
    """Ends this process as SIGPIPE would, without a word, if the reader of its output has closed it (`| head`)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(CLOSED_PIPE)
    except OSError:
        return  # Python says so when it ends
    if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # what click leaves behind when a print has failed
        os._exit(CLOSED_PIPE)


def _end_process(status: int) -> None:
    """End this process without Python's cleanup, unless its output cannot be written: then the cleanup says so."""
    _leave_closed_pipe()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        raise SystemExit(status) from None
    os._exit(status)


def main() -> None:
    """Run the command. An error that a user may meet is printed as one line. docs/commands.md lists the statuses."""
    try:
        with stopping_early():
            if sys.argv[-1:] == ["--like"]:
                sys.argv.append("list")
            _refuse_empty(sys.argv[1:])
            _tell_of_torch(sys.argv[1:])
            _check_run_file(sys.argv[1:])
            from weft.commands.app import app

            app()
    except WeftError as error:
        _fail(str(error), exit_status(error))
    except BrokenPipeError:
        raise SystemExit(CLOSED_PIPE) from None
    except OSError as error:  # a file that cannot be read or written, a full disk
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        _fail(f"{what}; check the path, its permissions and the space left", BAD_INPUT)


class _TorchNotice(MetaPathFinder):
    """Says that torch is being loaded, which takes seconds, when its import begins. Finds no module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Called before each import of a module that is not loaded."""
        if name == "torch":
            sys.meta_path.remove(self)
            print("weft: loading torch", file=sys.stderr, flush=True)


def _tell_of_torch(arguments: Sequence[str]) -> None:
    """Give a sign of life within a second, where a person waits at a terminal."""
    if sys.stderr.isatty() and "--json" not in arguments and "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchNotice())


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option or argument that is given as empty text, which would count as not given."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        option, equals, value = argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        if equals and not value and option not in MAY_BE_EMPTY:
            what = f"{option} is" if option.startswith("--") else "an argument is"
            raise ConfigError(f"{what} given as empty text; give a value, or leave it out")


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


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPORT_SYSTEM = "<frozen importlib"  # how file names of its frames begin


@contextmanager
def stopping_early() -> Iterator[None]:
    """End this process at a stop signal that it does not ignore, as nohup sets. Training replaces the handlers."""
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in STOP_SIGNALS:  # one that comes while this process ends: it has been said
        signal.signal(other, lambda again, frame: os._exit(128 + again))
    with suppress(OSError):  # the terminal may be gone
        print(f"weft: stopped by {signal.Signals(number).name}; there was nothing to save", file=sys.stderr, flush=True)
    if _is_importing(frame):  # modules that try an import may catch SystemExit, and the command would go on
        os._exit(128 + number)
    raise SystemExit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False
