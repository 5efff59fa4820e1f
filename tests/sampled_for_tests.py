"""Cases of which a few run always, and the rest with `-m soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_soak(names: Iterable[str], *always: str) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all of `names`, those not in `always` marked soak."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.soak) for name in names]
