"""Cases of which a few run always, and the rest with `-m soak`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def some_soak(names: Iterable[str], *always: str) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all of `names`, those not in `always` marked soak."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.soak) for name in names]


def one_in(count: int, cases: Iterable[str] | Mapping[str, Any]) -> list[Any]:
    """The same for names, or for cases by name: the first of every `count` always."""
    named = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    found = []
    for number, (name, case) in enumerate(named.items()):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, id=name, marks=pytest.mark.soak if number % count else ()))
    return found
