"""The command line, called in this process: with what status it leaves, and what it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from weft.commands.main import main


class Left(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Weft = Callable[..., Left]


def caller(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], columns: int = 200) -> Weft:
    """A function that is `weft ARGUMENTS` on a terminal of so many columns."""

    def call(*arguments: object) -> Left:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        status = 0
        try:
            main()
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else int(bool(left.code))
        captured = capfd.readouterr()
        return Left(status, captured.out, captured.err)

    return call
